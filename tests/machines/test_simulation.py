"""Deterministic simulation: fixed seeds keep all promises, and a seed replays exactly. A search is `make simulate`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, MutantRefused, Replacement, apply_replacements
from tests.support.search import SEARCH, budget

FIRST_SEED, SEEDS = 2, budget(fast=2, full=30)  # about four seconds of CPU each
REPLAYED_SEED, SEEDS_BETWEEN = 700007, () if SEARCH == "fast" else range(700001, 700004)  # its agents write to a journal
TIMEOUT_SECONDS = 1800  # ends a search that hangs, and none that a busy machine slows down
REPO = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the search of the simulation in a process of its own."""
    return run_python("-m", "tests.simulation", *arguments)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own: the simulation replaces the clock, and needs a fixed order of sets of strings."""
    own = ("LEASEHOLD_", "DATABASE_URL", "TEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)} | {"PYTHONHASHSEED": "0"}
    argv = [sys.executable, *arguments]
    return subprocess.run(argv, cwd=REPO, env=inherited, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


def test_promises_hold_in_simulated_histories() -> None:
    finished = simulate("--seed", str(FIRST_SEED), "--seeds", str(SEEDS))
    assert finished.returncode == 0, finished.stdout + finished.stderr


# Kills a worker inside the sweep `meter`, and has the other worker of the host run that sweep.
DEATH_IN_A_SWEEP = """
import tests.simulation.__main__
from random import Random
from unittest.mock import patch

from billing import derivation
from controlplane import schedules
from tests.simulation.faults import Faults
from tests.simulation.history import override_settings, set_up
from tests.simulation.options import Options
from tests.simulation.world import World

world = World(1, Faults(), hosts=1, drifts=False)
with world.installed(), override_settings(SANDBOX_PROVIDER="memory", EGRESS_SLOTS=1, DESTROY_TRIES=1):
    set_up(world, Options(Random(1)))
    dying, other = [process for process in world.processes if ".worker" in process.name]
    results = []

    def meter():
        results.append(schedules.run_sweep("meter", now=world.scheduler.time).counts)

    with patch.object(derivation, "derive_usage_and_costs", lambda **options: world.kill(dying)):
        world.spawn(dying, "sweep", meter)
        world.scheduler.run_until(600)
    print("killed inside the sweep:", not dying.alive and not results)
    world.spawn(other, "sweep", meter)
    world.scheduler.run_until(1200)
    print("not run because of:", *[set(counts) & {"still running", "left to another process"} for counts in results])
"""


def test_a_process_killed_inside_a_sweep_leaves_the_sweep_to_others() -> None:
    finished = run_python("-c", DEATH_IN_A_SWEEP)
    assert finished.stdout == "killed inside the sweep: True\nnot run because of: set()\n", finished.stderr


# Prints the trace of each seed: of those that are given, in this order in one process.
TRACES = """
import sys
import tests.simulation.__main__
from tests.simulation.history import run_history
for seed in sys.argv[1:]:
    print(run_history(int(seed)).trace)
"""


def list_traces(*seeds: int) -> list[str]:
    done = run_python("-c", TRACES, *map(str, seeds))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_seed_replays_the_same_history_after_others_and_in_another_process() -> None:
    """Nothing of the process may carry over: caches, modules that the first history imports, identifiers."""
    traces = list_traces(REPLAYED_SEED, *SEEDS_BETWEEN, REPLAYED_SEED)
    assert len(traces) == len(SEEDS_BETWEEN) + 2
    assert traces[0] == traces[-1]
    assert list_traces(REPLAYED_SEED) == traces[:1], "in another process"


# Prints, of two worlds in one process, a stamp of a file and a secret, and whether a process inherits state from another one.
STATE_OF_TWO_WORLDS = """
import tests.simulation.__main__
import secrets

from sandboxes.db import database_time
from sandboxes.providers.memory.file_tree import File
from tests.simulation.faults import Faults
from tests.simulation.process_state import OWN_STATE
from tests.simulation.world import World

def list_state(world):
    world.enter_host(world.hosts[0])
    was_measured = world.main_process.skew_meter.last is not None
    database_time.get_skew()
    assert world.main_process.skew_meter.last is not None
    return [was_measured, *[getattr(module, name) for module, name, _ in OWN_STATE]]

for _ in range(2):
    world = World(1, Faults(), hosts=1, drifts=True)
    with world.installed():
        first, second = list_state(world), list_state(world)
        is_inherited = second[0] or any(one is other for one, other in zip(first[1:], second[1:]))
        print(File(b"").stamp, secrets.token_hex(8), is_inherited)
"""


def test_neither_a_history_nor_a_process_inherits_state() -> None:
    finished = run_python("-c", STATE_OF_TWO_WORLDS)
    [first, second] = finished.stdout.splitlines() or [finished.stderr, ""]
    assert first == second and first.endswith("False")


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
