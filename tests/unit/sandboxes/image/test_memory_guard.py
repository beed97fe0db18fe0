"""image/agent/memory.py on the files of a cgroup: looks, margins and the choice of a run."""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.sandbox_agent import AGENT

MIB = 1 << 20
LIMIT = 512 * MIB


class GuardedRun:
    """The fields of a run that the guard reads."""

    def __init__(self, pid: int) -> None:
        self.process, self.killing = SimpleNamespace(pid=pid), None


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(AGENT.parent)
    known = {*sys.modules}
    yield importlib.import_module("memory")
    for name in {*sys.modules} - known:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def guard(module, tmp_path):
    """A guard of a cgroup of version 2, at time 0 with nothing in use."""
    write(tmp_path)
    return module.MemoryGuard(module.Memory(str(tmp_path)), cpus=1.0)


@pytest.fixture
def own_run():
    """This process as a run, whose memory is more than an eighth of the limit."""
    ballast = b"x" * (80 * MIB)
    yield GuardedRun(os.getpid())
    assert len(ballast)


def write(cgroup: Path, current: int = 0, file: int = 0, limit: object = LIMIT, kills: int = 0) -> None:
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{current}\n")
    (cgroup / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 1\noom_kill {kills}\noom_group_kill 0\n")
    (cgroup / "memory.stat").write_text(f"anon 0\nfile {file}\ninactive_file {file // 2}\nactive_file {file // 2}\n")


def test_looks_are_as_rare_as_the_free_memory_allows(guard, tmp_path):
    assert guard.find_victim([], 100.0) is None
    assert guard.next_look == pytest.approx(100 + (512 - 16) / 4096)
    write(tmp_path, current=LIMIT)  # in less time than any program needs for it
    assert guard.find_victim([], 100.1) is None
    write(tmp_path, current=LIMIT - 17 * MIB)
    guard.find_victim([], 100.2)
    assert guard.next_look == pytest.approx(100.205)


def test_share_of_processors_in_both_versions(module, tmp_path):
    assert module.read_cpus(tmp_path) == 2.0
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert module.read_cpus(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("1000 100000\n")
    assert module.read_cpus(tmp_path) == 0.25


def test_page_cache_does_not_count_and_other_memory_does(guard, tmp_path, own_run):
    write(tmp_path, current=LIMIT, file=LIMIT // 2)
    assert guard.find_victim([own_run], 100.0) is None
    write(tmp_path, current=LIMIT, file=8 * MIB)
    assert guard.find_victim([own_run], 101.0) is own_run
    own_run.killing = "in progress"
    assert guard.find_victim([own_run], 102.0) is None


def test_fast_growth_needs_a_larger_margin(guard, tmp_path, own_run):
    write(tmp_path, current=LIMIT - 40 * MIB)
    assert guard.find_victim([own_run], 100.0) is None
    write(tmp_path, current=LIMIT - 200 * MIB)
    guard.find_victim([own_run], 101.0)
    write(tmp_path, current=LIMIT - 40 * MIB)
    assert guard.find_victim([own_run], 101.05) is own_run  # at this pace, 64 MiB more before a kill has effect


def test_small_runs_are_no_cause(guard, tmp_path):
    idle = GuardedRun(os.getppid())
    write(tmp_path, current=LIMIT, limit=64 * LIMIT)
    guard.find_victim([idle], 100.0)
    write(tmp_path, current=64 * LIMIT, limit=64 * LIMIT)
    assert guard.find_victim([idle], 102.0) is None


def test_kills_of_the_kernel_are_counted_and_an_unlimited_cgroup_is_not_guarded(module, guard, tmp_path, monkeypatch):
    write(tmp_path, kills=3)
    assert guard.count_kills() == 3
    write(tmp_path, limit="max")
    assert guard.find_victim([], 100.0) is None
    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    assert module.create_guard() is None
    monkeypatch.setattr(module, "ROOT", str(tmp_path / "none"))
    assert module.create_guard() is None
