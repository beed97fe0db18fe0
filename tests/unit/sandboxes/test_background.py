"""Threads and tasks of a process: after an error, and at the limit of threads, the work goes on."""

import asyncio
import threading
from contextlib import suppress
from typing import cast

import pytest
from django.db import InterfaceError, OperationalError

from sandboxes import background, claims
from sandboxes.background import OnDemandThread, repeat
from sandboxes.claims import Heartbeat, Progress
from sandboxes.errors import ClaimLost
from sandboxes.providers.base import Provider
from sandboxes.runs.retention import Acknowledger, RetainedResult

SECONDS = 10.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_started_again() -> None:
    runs, works = list[str](), threading.Event()

    def run() -> None:
        runs.append(threading.current_thread().name)
        if len(runs) == 1:
            raise ValueError("unexpected")
        works.set()

    thread = OnDemandThread("worker", run)
    thread.start()
    thread.join()
    assert not thread.is_running
    thread.start()
    assert works.wait(SECONDS)
    assert runs == ["worker", "worker"]


def test_a_running_thread_is_not_started_twice() -> None:
    runs, go = list[int](), threading.Event()
    thread = OnDemandThread("worker", lambda: (runs.append(1), go.wait(SECONDS)))
    thread.start()
    thread.start()
    go.set()
    thread.join()
    assert runs == [1]


def test_a_thread_above_the_limit_of_threads_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    works = threading.Event()
    thread = OnDemandThread("worker", works.set)
    with monkeypatch.context() as limited:
        limited.setattr(background.threading, "Thread", Refused)
        thread.start()
    assert not thread.is_running
    thread.join()
    thread.start()
    assert works.wait(SECONDS)


class Failing(Progress):
    """Claim whose extension fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def beat(self) -> None:
        raise self.error


class Counted(Progress):
    """Claim that signals its extension."""

    def __init__(self) -> None:
        super().__init__()
        self.extended = threading.Event()

    def beat(self) -> None:
        self.extended.set()


@pytest.mark.parametrize("error", [ValueError("unexpected"), OperationalError("closed"), ClaimLost()], ids=repr)
def test_the_heartbeat_outlives_a_claim_that_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.0)
    closes = iter([error])

    def fail_once() -> None:
        if failed := next(closes, None):
            raise failed

    monkeypatch.setattr(claims, "close_old_connections", fail_once)
    heartbeat, others = Heartbeat(), [Counted(), Counted(), Counted()]
    failing = Failing(error)
    for progress in (others[0], failing, others[1]):
        heartbeat.add(progress)
    assert all(other.extended.wait(SECONDS) for other in others[:2])
    heartbeat.add(others[2])  # after the error
    assert others[2].extended.wait(SECONDS)
    for progress in (failing, *others):
        heartbeat.remove(progress)


def test_results_are_acknowledged_after_one_that_fails() -> None:
    acknowledged = threading.Event()

    class FirstFails:
        def acknowledge_exec(self, ref: str, mark: str) -> None:
            if ref == "first":
                raise ValueError("unexpected")
            acknowledged.set()

    results = Acknowledger()
    for ref in ("first", "second"):
        results.put(RetainedResult(0.0, cast(Provider, FirstFails()), ref, "mark", 1))
    assert acknowledged.wait(SECONDS)


@pytest.mark.parametrize("error", [ValueError("unexpected"), OperationalError("closed"), InterfaceError("closed")], ids=repr)
def test_a_check_is_repeated_after_an_error(error: Exception) -> None:
    calls = list[int]()

    async def check() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise error
        if len(calls) == 3:
            raise asyncio.CancelledError

    with suppress(asyncio.CancelledError):
        asyncio.run(repeat(check, "not checked", seconds=0.0))
    assert len(calls) == 3


def test_a_failed_check_is_logged(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        raise ValueError("unexpected")

    async def run() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(repeat(check, "leases not checked", seconds=0.0), 0.05)

    asyncio.run(run())
    assert "leases not checked" in capsys.readouterr().out + caplog.text
