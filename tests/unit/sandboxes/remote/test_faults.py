"""Remote providers while their vendors fail: nothing exists twice, runs twice, or is taken for success."""

import shutil
import threading
from datetime import timedelta
from uuid import uuid4

import pytest

from sandboxes.providers.errors import FailureCause, Missing, Stopped, Unavailable
from tests.conftest import MINUTE, run_in_threads
from tests.emulators.base import CUT_AFTER, CUT_BEFORE
from tests.support.remote import connect_provider
from tests.support.waiting import wait_until
from tests.unit.sandboxes.remote.conftest import ATTEMPTS, CREATE, DESTROY, EXECUTE, LIST, Remote

COUNT = "echo run >>/data/count; wc -l </data/count"


@pytest.mark.smoke
def test_create_whose_response_is_lost_leaves_one_sandbox(remote: Remote) -> None:
    spec = remote.spec()
    remote.fail(CREATE[remote.kind], CUT_AFTER)
    assert remote.provider.create(spec) == spec.name  # settled by a look at the vendor
    assert remote.provider.create(spec) == spec.name
    assert len(remote.emulator.find_machines(spec.name)) == 1
    assert [found.name for found in remote.provider.list(remote.owner)] == [spec.name]


@pytest.mark.smoke
def test_create_that_was_never_carried_out_is_an_error_and_can_be_repeated(remote: Remote) -> None:
    spec = remote.spec()
    remote.fail(CREATE[remote.kind], CUT_BEFORE, times=ATTEMPTS[remote.kind])
    with pytest.raises(Unavailable) as error:
        remote.provider.create(spec)
    assert error.value.cause == FailureCause.ENGINE_UNREACHABLE
    assert remote.emulator.find_machines(spec.name) == []
    remote.provider.create(spec)
    assert len(remote.emulator.find_machines(spec.name)) == 1


@pytest.mark.parametrize(
    "outcome",
    [429, 500, pytest.param(503, marks=pytest.mark.smoke), CUT_BEFORE, pytest.param(CUT_AFTER, marks=pytest.mark.smoke)],
)
def test_command_runs_once_although_its_call_is_repeated(remote: Remote, outcome: int | str) -> None:
    ref = remote.start()
    remote.fail(EXECUTE[remote.kind], outcome, times=2)
    assert remote.run(ref, "sh", "-c", COUNT).stdout == b"1\n"
    assert remote.run(ref, "sh", "-c", COUNT).stdout == b"2\n"


def test_command_goes_on_while_the_vendor_is_away_and_its_result_is_found_later(remote: Remote) -> None:
    ref, mark = remote.start(), uuid4().hex
    remote.provider.retry_delays_seconds, remote.provider.poll_seconds = (), 0.2
    failures: list[Exception] = []

    def run() -> None:
        try:
            remote.run(ref, "sh", "-c", f"{COUNT}; until [ -e go ]; do sleep 0.01; done; echo done", mark=mark, retain=True)
        except Unavailable as error:
            failures.append(error)

    remote.fail(EXECUTE[remote.kind], CUT_AFTER, times=30)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(failures) == 1
    remote.emulator.faults.clear()
    if remote.kind == "langsmith":  # it gets a command over the connection that was cut, so this one was never started
        assert remote.provider.find_exec(ref, mark) is None
        return
    state = wait_until(lambda: remote.provider.find_exec(ref, mark), "the command has started")
    assert state.running
    remote.provider.write_file(ref, "/workspace/go", b"")
    again = remote.run(ref, "sh", "-c", "exit 9", mark=mark, retain=True)  # the mark is known: nothing is started
    assert (again.exit_code, again.stdout) == (0, b"1\ndone\n")
    assert timedelta(0) <= remote.provider.find_exec(ref, mark).age < MINUTE


@pytest.mark.smoke
def test_refused_key_is_not_a_missing_sandbox(remote: Remote) -> None:
    ref = remote.start()
    provider = connect_provider(remote.kind, remote.emulator, api_key="revoked")
    for call in (lambda: provider.inspect(ref), lambda: provider.list(remote.owner), lambda: provider.destroy(ref)):
        with pytest.raises(Unavailable) as error:
            call()
        assert error.value.cause == FailureCause.CREDENTIALS_REFUSED
    assert len(remote.emulator.find_machines(ref)) == 1


@pytest.mark.smoke
def test_sandbox_that_the_vendor_stopped_is_started_by_the_next_command_with_its_files(remote: Remote) -> None:
    ref = remote.start()
    remote.provider.write_file(ref, "/data/kept", b"kept")
    remote.emulator.stop_idle(ref)
    if remote.kind == "modal":  # it terminates an idle sandbox
        with pytest.raises(Missing):
            remote.run(ref, "cat", "/data/kept")
        return
    assert not remote.provider.inspect(ref).running
    assert remote.run(ref, "cat", "/data/kept").stdout == b"kept"
    assert remote.provider.inspect(ref).running


def test_command_in_a_sandbox_that_stops_meanwhile_is_unknown_and_the_next_one_starts_it(remote: Remote) -> None:
    ref = remote.start()
    remote.provider.write_file(ref, "/data/kept", b"kept")
    is_ended = remote.kind == "modal"  # it terminates an idle sandbox
    with pytest.raises(Missing if is_ended else Stopped, match=r"stopped while the command ran|not found"):
        remote.provider.exec(
            ref, ["sh", "-c", "touch begun; sleep 60"], env={}, timeout=timedelta(seconds=30), mark=uuid4().hex,
            output=StopWhenBegun(remote, ref),
        )  # fmt: skip
    if not is_ended:
        assert remote.run(ref, "cat", "/data/kept").stdout == b"kept"


class StopWhenBegun:
    """Output view that stops the sandbox once the command is about to start."""

    def __init__(self, remote: Remote, ref: str) -> None:
        self._remote, self._ref = remote, ref

    def attach(self, stdout: object, stderr: object) -> None:
        threading.Thread(target=self._stop).start()

    def _stop(self) -> None:
        [machine] = self._remote.emulator.find_machines(self._ref)
        while not (machine.directory / "disk/workspace/begun").exists():
            threading.Event().wait(0.005)
        self._remote.emulator.stop_idle(self._ref)


def test_sandbox_that_the_vendor_replaced_by_an_empty_one_is_missing(remote: Remote) -> None:
    ref = remote.start()
    [machine] = remote.emulator.find_machines(ref)
    for directory in ("opt/leasehold", "workspace", "data"):
        for entry in (machine.directory / "disk" / directory).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    with pytest.raises(Missing, match="replaced this sandbox by an empty one"):
        remote.run(ref, "true")


@pytest.mark.parametrize("remote", ["daytona"], indirect=True)
def test_one_response_without_the_runner_is_no_replaced_sandbox(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, execute = remote.start(), remote.provider._execute
    responses = ['leasehold:{"state": "no_tool"}']
    monkeypatch.setattr(
        remote.provider, "_execute", lambda *args, **more: responses.pop() if responses else execute(*args, **more)
    )
    assert remote.run(ref, "true").exit_code == 0 and not responses


@pytest.mark.smoke
def test_failed_listing_is_an_error_and_not_empty(remote: Remote) -> None:
    remote.start()
    remote.fail(LIST[remote.kind], 500, times=ATTEMPTS[remote.kind])
    with pytest.raises(Unavailable):
        remote.provider.list(remote.owner)


@pytest.mark.smoke
def test_destroy_whose_response_is_lost_can_be_repeated(remote: Remote) -> None:
    ref = remote.start()
    remote.fail(DESTROY, CUT_AFTER, times=ATTEMPTS[remote.kind])
    with pytest.raises(Unavailable):
        remote.provider.destroy(ref)
    remote.provider.destroy(ref)
    assert remote.emulator.find_machines(ref) == []
    with pytest.raises(Missing):
        remote.provider.inspect(ref)


def test_damaged_output_of_the_vendor_is_no_result(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = remote.start()
    monkeypatch.setattr(remote.provider, "_execute", lambda *args, **more: 'noise\nleasehold:{"state": "ended", "output"')
    with pytest.raises(Unavailable) as error:
        remote.run(ref, "true")
    assert error.value.cause == FailureCause.AGENT_FAILED


@pytest.mark.smoke
@pytest.mark.parametrize("remote", ["runloop"], indirect=True)
def test_concurrent_calls_for_a_sandbox_that_the_vendor_has_ended_find_it_missing(remote: Remote) -> None:
    ref = remote.start()
    remote.emulator.delete_stopped(ref)
    with run_in_threads(8) as together:
        results = together(lambda number: remote.provider.inspect(ref))
    assert {type(result) for result in results} == {Missing}


@pytest.mark.smoke
@pytest.mark.parametrize("remote", ["daytona", "runloop"], indirect=True)
def test_concurrent_commands_in_a_sandbox_that_the_vendor_has_stopped_start_it_and_run(remote: Remote) -> None:
    ref = remote.start()
    remote.emulator.stop_idle(ref)
    with run_in_threads(4) as together:
        results = together(lambda number: remote.run(ref, "true").exit_code)
    assert results == [0] * 4


@pytest.mark.parametrize("remote", ["daytona", "runloop"], indirect=True)
def test_command_that_is_refused_before_a_concurrent_call_has_started_the_sandbox_is_repeated(remote: Remote) -> None:
    ref = remote.start()
    remote.fail(EXECUTE[remote.kind], 400)
    assert remote.run(ref, "true").exit_code == 0
