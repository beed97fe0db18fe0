"""Selection of the fast lanes: all cases of four providers, and enough smoke cases of each other one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sandboxes.providers.registry import PROVIDERS
from tests.conformance.conftest import BY_ENGINE, CLUSTER, FULL_KINDS, GVISOR, MATRIX_KINDS, SMOKE_KINDS

MIN_CASES, MAX_CASES = 12, 30  # of the smoke cases of a provider
DIRECTORY = Path(__file__).parent
KINDS = dict.fromkeys((*FULL_KINDS, *SMOKE_KINDS, *MATRIX_KINDS))
# Collects the suite with the expression of the fast lanes in a process of its own, because this run of pytest may have
# another selection. Prints one JSON line for each case: kind of provider, whether it is selected, and the reasons of its marks
# `matrix`.
COLLECT = """
import json, pytest, sys
from tests.support.selection import find_kind

class Listing:
    def print(self, items, is_fast):
        for item in items:
            reasons = [mark.args for mark in item.iter_markers("matrix")]
            print("case:" + json.dumps([find_kind(item, dict.fromkeys(sys.argv[2:])), is_fast, reasons]))

    def pytest_deselected(self, items):
        self.print(items, False)

    def pytest_collection_finish(self, session):
        self.print(session.items, True)

options = ["--collect-only", "-qqq", "-p", "no:cacheprovider", "-m", "not matrix", sys.argv[1]]
sys.exit(pytest.main(options, plugins=[Listing()]))
"""


@pytest.fixture(scope="module")
def cases():
    """Kind, selection by the fast lanes and reasons of each case of this suite."""
    command = [sys.executable, "-c", COLLECT, str(DIRECTORY), *KINDS]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300, cwd=DIRECTORY.parents[1])
    return [json.loads(line.removeprefix("case:")) for line in done.stdout.decode().splitlines() if line.startswith("case:")]


def test_every_provider_of_the_registry_is_in_the_suite():
    assert {*KINDS} == {*PROVIDERS, BY_ENGINE, GVISOR, CLUSTER}


def test_each_provider_has_all_of_its_cases_or_a_smoke_in_the_fast_lanes(cases):
    fast = Counter(kind for kind, is_fast, _ in cases if is_fast)
    matrix = Counter(kind for kind, is_fast, _ in cases if not is_fast)
    assert {kind for kind in FULL_KINDS if matrix[kind] or not fast[kind]} == set()
    assert {kind: fast[kind] for kind in SMOKE_KINDS if not MIN_CASES <= fast[kind] <= MAX_CASES} == {}
    assert {kind for kind in (*SMOKE_KINDS, *MATRIX_KINDS) if not matrix[kind]} == set()
    assert {kind for kind in MATRIX_KINDS if fast[kind]} == set()


def test_every_matrix_mark_states_a_reason(cases):
    reasons = [given for _, is_fast, given in cases if not is_fast]
    assert reasons
    assert all(given and all(len(args) == 1 and args[0].strip() for args in given) for given in reasons)
