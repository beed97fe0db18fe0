"""Suspension: frozen processes, or a stop that keeps the files, at providers that can suspend, and a refusal at the others."""

import pytest

from sandboxes.providers.errors import Missing, Rejected
from tests.conformance.conftest import unique_name

LOOP = ["sh", "-c", "while :; do :; done"]
CALLS_WHILE_SUSPENDED = 20  # of the engine: a loop that runs would use CPU time meanwhile


@pytest.mark.smoke
def test_suspended_sandbox_uses_no_cpu_and_keeps_its_processes(bench):
    box, mark = bench.box(), unique_name()
    box.write("kept", b"kept")
    box.provider.start(box.ref, LOOP if box.provider.name == "docker" else ["sleep", "300"], env={}, mark=mark)
    box.provider.resume(box.ref)  # no effect before a suspension
    if not box.provider.can_suspend:
        with pytest.raises(Rejected):
            box.provider.suspend(box.ref)
        return
    for _ in range(2):  # idempotent
        box.provider.suspend(box.ref)
        found = box.provider.inspect(box.ref)
        assert (found.running, found.suspended) == (False, True)
    if not box.provider.suspend_keeps_processes:
        assert_resume_starts_it_with_its_files_and_no_process(bench, box, mark)
        return
    [listed] = box.provider.list(bench.owner)
    used = box.provider.stats(box.ref)
    assert (listed.running, listed.suspended, used is None) == (False, True, False)
    for _ in range(CALLS_WHILE_SUSPENDED):
        box.provider.inspect(box.ref)
    assert box.provider.stats(box.ref).cpu_micros == used.cpu_micros
    for _ in range(2):
        box.provider.resume(box.ref)
        assert (box.provider.inspect(box.ref).running, box.provider.inspect(box.ref).suspended) == (True, False)
    assert box.provider.processes(box.ref, [mark])[mark].running
    assert (box.read("kept"), box.run("true").exit_code) == (b"kept", 0)


def assert_resume_starts_it_with_its_files_and_no_process(bench, box, mark):
    [listed] = box.provider.list(bench.owner)
    assert (listed.running, listed.suspended) == (False, True)
    for _ in range(2):
        box.provider.resume(box.ref)
        assert (box.provider.inspect(box.ref).running, box.provider.inspect(box.ref).suspended) == (True, False)
    state = box.provider.processes(box.ref, [mark]).get(mark)
    assert state is None or not state.running
    assert (box.read("kept"), box.run("true").exit_code) == (b"kept", 0)
    box.provider.suspend(box.ref)
    assert box.run("cat", "kept").stdout == b"kept"  # a command starts it, too
    box.provider.suspend(box.ref)
    box.provider.destroy(box.ref)
    for act in (box.provider.suspend, box.provider.resume):
        with pytest.raises(Missing):
            act(box.ref)


def test_process_is_killed_after_a_resume(suspending_bench):
    box, mark = suspending_bench.box(), unique_name()
    box.provider.start(box.ref, ["sleep", "300"], env={}, mark=mark)
    box.provider.suspend(box.ref)
    box.provider.resume(box.ref)
    box.provider.kill(box.ref, mark)
    assert not box.provider.processes(box.ref, [mark])[mark].running


def test_suspended_sandbox_is_destroyed(suspending_bench):
    box = suspending_bench.box()
    box.provider.start(box.ref, ["sleep", "300"], env={}, mark=unique_name())
    box.provider.suspend(box.ref)
    box.provider.destroy(box.ref)
    assert box.provider.list(suspending_bench.owner) == []
    for act in (box.provider.suspend, box.provider.resume):
        with pytest.raises(Missing):
            act(box.ref)
