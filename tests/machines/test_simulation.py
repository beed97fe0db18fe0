"""Deterministic simulation: fixed seeds keep all promises, and a seed replays exactly. A search is `make simulate`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, MutantRefused, Replacement, apply_replacements
from tests.support.search import SEARCH, budget

FIRST_SEED, SEEDS = 2, budget(fast=2, full=30)  # about four seconds of CPU each
REPLAYED_SEEDS = (700002, 700004) if SEARCH == "fast" else (*range(700001, 700004), 700004)
TIMEOUT_SECONDS = 600
REPO = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the simulation in a process of its own: it replaces the clock, and needs a fixed order of sets of strings."""
    argv = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(argv, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables of this test run."""
    own = ("LEASEHOLD_", "DATABASE_URL", "TEST_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)} | {"PYTHONHASHSEED": "0"}


def test_promises_hold_in_simulated_histories() -> None:
    finished = simulate("--seed", str(FIRST_SEED), "--seeds", str(SEEDS))
    assert finished.returncode == 0, finished.stdout + finished.stderr


# Two virtual processes. The first dies inside a sweep of the installation. Prints whether the second one may begin it.
DEATH_IN_A_SWEEP = """
import tests.simulation.__main__
from types import SimpleNamespace
from sandboxes import sweep_log
from tests.simulation.world import Process

host = SimpleNamespace(state_dir="/nonexistent")
first, second = Process(host, "host1.worker1"), Process(host, "host1.worker2")
first.enter()
dying = sweep_log.IN_PROGRESS.entering("meter")
assert dying.__enter__()
assert not sweep_log.IN_PROGRESS.entering("meter").__enter__()  # another thread of the same process
second.enter()
print("begins:", sweep_log.IN_PROGRESS.entering("meter").__enter__())
"""


def test_a_process_that_dies_inside_a_sweep_holds_up_no_other_process() -> None:
    done = subprocess.run([sys.executable, "-c", DEATH_IN_A_SWEEP], env=clean_environment(), capture_output=True, text=True)
    assert done.stdout == "begins: True\n", done.stderr


# Prints the trace of each seed: of those that are given, in this order in one process.
TRACES = """
import sys
import tests.simulation.__main__
from tests.simulation.history import run_history
for seed in sys.argv[1:]:
    print(run_history(int(seed)).trace)
"""


def list_traces(*seeds: int) -> list[str]:
    argv = [sys.executable, "-c", TRACES, *map(str, seeds)]
    done = subprocess.run(argv, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_seed_replays_the_same_history_after_others_of_the_same_process() -> None:
    """Nothing of the process may carry over: caches, modules that the first history imports, identifiers."""
    after_others, alone = list_traces(*REPLAYED_SEEDS), list_traces(REPLAYED_SEEDS[-1])
    assert len(after_others) == len(REPLAYED_SEEDS)
    assert after_others[-1] == alone[0]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fits_the_present_code(name: str, tmp_path: Path) -> None:
    for change in MUTANTS[name]:
        target = tmp_path / change.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((REPO / change.path).read_text())
    apply_replacements(name, MUTANTS[name], tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("absent", "x", "exactly once"),
        ("one", "x", "exactly once"),  # twice in the file
        ("f(two=2)", "f(two=2, two=3)", "not be valid Python"),
    ],
)
def test_a_mutant_that_does_not_fit_is_refused_by_name(before: str, after: str, reason: str, tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("one = 1\ndef f(two): return one\nf(two=2)\n")
    with pytest.raises(MutantRefused, match=rf"^mutant example: a\.py .*{reason}"):
        apply_replacements("example", [Replacement("a.py", before, after)], tmp_path)
    assert source.read_text().startswith("one = 1")
