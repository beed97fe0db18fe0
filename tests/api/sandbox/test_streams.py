"""Streams of output as server-sent events, from sandboxes of the memory provider and from rows."""

import base64
import json
import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.conf import LazySettings
from django.db import connections
from django.db.models import F
from django.utils import timezone

from leases import leasing
from sandboxes.db import database_time
from sandboxes.models import Run, RunOutcome
from sandboxes.providers.errors import Rejected
from sandboxes.providers.memory import MemoryProvider
from sandboxes.streams.registry import OPEN_STREAMS
from tests.api.conftest import ApiClient, assert_refused, close_response
from tests.support.event_stream import Event, join_output, parse_events
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db


@pytest.fixture
def lease_url(lease) -> str:
    return f"leases/{lease['id']}"


@pytest.fixture
def run_url(ada: ApiClient, lease_url: str) -> str:
    """Run with the output "hello" and "oops", and exit code 3."""
    result = ada.post(f"{lease_url}/exec", {"argv": ["sh", "-c", "echo hello; echo oops >&2; exit 3"]}).json()
    return f"{lease_url}/runs/{result['run_id']}"


def read_events(response: Any) -> list[Event]:
    assert (response.status_code, response.headers["Content-Type"]) == (200, "text/event-stream")
    content = b"".join(response.streaming_content)  # the test client closes the response at its end
    return list(parse_events(content.splitlines(keepends=True)))


def stream(api: ApiClient, run_url: str, last_event_id: str = "", query: str = "") -> list[Event]:
    headers = {"last_event_id": last_event_id} if last_event_id else {}
    return read_events(api.get(f"{run_url}/stream{query}", **headers))


def test_ended_run_is_replayed_from_its_row(ada: ApiClient, run_url: str) -> None:
    response = ada.get(f"{run_url}/stream")
    assert (response.headers["Cache-Control"], response.headers["X-Accel-Buffering"]) == ("no-store", "no")
    start, stdout, stderr, end = read_events(response)
    assert (start.name, start.id, start.data) == (
        "start", "0-0", {"run_id": run_url.rpartition("/")[2], "encoding": "utf-8", "live": False},
    )  # fmt: skip
    assert (stdout.name, stdout.id, stdout.data) == ("stdout", "6-0", {"offset": 0, "data": "hello\n"})
    assert (stderr.name, stderr.id, stderr.data) == ("stderr", "6-5", {"offset": 0, "data": "oops\n"})
    assert (end.name, end.id, end.data["exit_code"], end.data["outcome"]) == ("exit", "6-5-end", 3, "failed")
    assert (end.data["timed_out"], end.data["truncated"], end.data["oom"]) == (False, False, False)


def test_stream_is_continued_after_any_event_and_is_complete_after_the_last(ada: ApiClient, run_url: str) -> None:
    events = stream(ada, run_url)
    for index, event in enumerate(events[:-1]):
        assert stream(ada, run_url, event.id) == events[index + 1 :]
    assert [(event.name, event.data.get("offset")) for event in stream(ada, run_url, "2-4")] == [
        ("stdout", 2), ("stderr", 4), ("exit", None),
    ]  # fmt: skip
    response = ada.get(f"{run_url}/stream", last_event_id=events[-1].id)
    assert (response.status_code, response.content) == (204, b"")


def test_output_of_a_host_whose_clock_is_ahead_is_replayed(
    ada: ApiClient, lease_url: str, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run is a time of the database's clock."""
    memory.before("exec", lambda ref: monkeypatch.setattr(memory, "acknowledge_exec", lambda ref, mark: None))
    result = ada.post(f"{lease_url}/exec", {"argv": ["cat"], "stdin": "y" * 100_000}).json()
    ahead = timedelta(minutes=10)
    Run.objects.update(started_at=F("started_at") - ahead, ended_at=F("ended_at") - ahead)
    measured = database_time.Measurement(database_time.HostTime.read(), -ahead)
    monkeypatch.setattr(database_time, "meter", database_time.SkewMeter(last=measured, tried=measured.at))
    events = stream(ada, f"{lease_url}/runs/{result['run_id']}")
    assert join_output(events, "stdout") == "y" * 100_000
    assert {event.name for event in events} == {"start", "stdout", "exit"}


def test_output_that_is_not_stored_is_a_gap(ada: ApiClient, lease_url: str) -> None:
    result = ada.post(f"{lease_url}/exec", {"argv": ["sh", "-c", f"cat; echo {'x' * 9} >&2"], "stdin": "y" * 100_000}).json()
    run = Run.objects.get(pk=result["run_id"])
    Run.objects.filter(pk=run.pk).update(stdout=bytes(run.stdout)[: 64 << 10])
    _, stdout, gap, stderr, end = stream(ada, f"{lease_url}/runs/{run.pk}")
    assert (len(stdout.data["data"]), stdout.id) == (64 << 10, "65536-0")
    assert (gap.name, gap.id, gap.data) == ("gap", "100000-0", {"stream": "stdout", "lost_bytes": 100_000 - (64 << 10)})
    assert (stderr.id, end.id) == ("100000-10", "100000-10-end")


def test_characters_are_not_divided_and_base64_is_exact(ada: ApiClient, lease_url: str) -> None:
    content = "héllo 🦊".encode() + b"\xff\xf0\x9f"
    result = ada.post(
        f"{lease_url}/exec?encoding=base64", {"argv": ["cat"], "stdin": base64.b64encode(content).decode()}
    ).json()
    url = f"{lease_url}/runs/{result['run_id']}"
    events = stream(ada, url)
    assert join_output(events, "stdout") == content.decode(errors="replace")
    assert all(stream(ada, url, event.id)[-1] == events[-1] for event in events[:-1])
    exact = stream(ada, url, query="?encoding=base64")
    assert (exact[0].data["encoding"], base64.b64decode(join_output(exact, "stdout"))) == ("base64", content)


def test_run_without_an_exit_code_ends_with_a_problem_document(ada: ApiClient, run_url: str) -> None:
    run = Run.objects.filter(pk=run_url.rpartition("/")[2])
    run.update(outcome=RunOutcome.LOST, exit_code=None, note="The host was restarted.")
    end = stream(ada, run_url)[-1]
    assert (end.name, end.id, end.data["code"], end.data["status"]) == ("error", "6-5-end", "run_failed", 409)
    assert (end.data["detail"], end.data["outcome"]) == ("The host was restarted.", "lost")


def test_requests_that_are_refused(ada: ApiClient, bob: ApiClient, lease_url: str, run_url: str) -> None:
    for value in ("x", "1", "1-", "-1-0", "1-2-3", "1-0-END", "9" * 16 + "-0", "١-0"):
        assert_refused(ada, "GET", f"{run_url}/stream", None, 400, "Last-Event-ID", last_event_id=value)
    assert_refused(ada, "GET", f"{run_url}/stream?encoding=x", None, 400, "encoding")
    assert_refused(ada, "GET", f"{lease_url}/runs/{uuid.UUID(int=1)}/stream", None, 404)
    assert_refused(bob, "GET", f"{run_url}/stream", None, 404)
    assert_refused(bob, "POST", f"{lease_url}/exec/stream", {"argv": ["true"]}, 404)
    assert_refused(ApiClient("wrong"), "GET", f"{run_url}/stream", None, 401)
    assert_refused(ApiClient("wrong"), "POST", f"{lease_url}/exec/stream", {"argv": ["true"]}, 401)
    assert_refused(ada, "POST", f"{lease_url}/exec/stream", {"argv": []}, 400, "argv")
    assert OPEN_STREAMS.count() == 0


@pytest.mark.parametrize("setting", ["MAX_STREAMS", "MAX_STREAMS_PER_LEASE"])
def test_stream_above_a_limit_is_refused_until_one_is_closed(
    ada: ApiClient, run_url: str, settings: LazySettings, setting: str
) -> None:
    setattr(settings, setting, 2)
    first, second = ada.get(f"{run_url}/stream"), ada.get(f"{run_url}/stream")
    problem = assert_refused(ada, "GET", f"{run_url}/stream", None, 429)
    assert (problem["code"], problem["limit"]) == ("too_many_streams", 2)
    close_response(first)  # without a read
    assert len(stream(ada, run_url)) == 4
    close_response(second)
    assert OPEN_STREAMS.count() == 0


# --- commands -------------------------------------------------------------------------------------------------------


def start(api: ApiClient, lease_url: str, *argv: str, **headers: str) -> Any:
    return api.post(f"{lease_url}/exec/stream", {"argv": [*argv]}, **headers)


@pytest.mark.django_db(transaction=True)
def test_command_is_executed_as_by_exec(ada: ApiClient, lease_url: str) -> None:
    before = ada.get(lease_url).json()["expires_at"]
    begin, stdout, stderr, end = read_events(start(ada, lease_url, "sh", "-c", "echo hello; echo oops >&2; exit 3"))
    assert (stdout.data["data"], stderr.data["data"], end.data["exit_code"]) == ("hello\n", "oops\n", 3)
    run = Run.objects.get(pk=begin.data["run_id"])
    assert (run.kind, run.exit_code, bytes(run.stdout), run.sandbox.state) == ("exec", 3, b"hello\n", "waiting")
    assert ada.get(lease_url).json()["expires_at"] > before
    assert OPEN_STREAMS.count() == 0


@pytest.mark.django_db(transaction=True)
def test_repeated_request_streams_the_first_run(ada: ApiClient, lease_url: str) -> None:
    first = read_events(start(ada, lease_url, "echo", "once", idempotency_key="k1"))
    assert read_events(start(ada, lease_url, "echo", "once", idempotency_key="k1")) == first
    assert Run.objects.filter(kind="exec").count() == 1


@pytest.mark.django_db(transaction=True)
def test_command_that_does_not_start_is_a_problem_document(
    ada: ApiClient, lease, lease_url: str, memory: MemoryProvider
) -> None:
    memory.fail("create", Rejected("no"), times=1)
    response = start(ada, lease_url, "true")
    assert (response.status_code, response.headers["Content-Type"]) == (503, "application/problem+json")
    leasing.release(uuid.UUID(lease["id"]), now=timezone.now())
    assert start(ada, lease_url, "true").json()["code"] == "lease_ended"
    assert OPEN_STREAMS.count() == 0


@pytest.mark.django_db(transaction=True)
def test_command_continues_without_its_client(ada: ApiClient, lease_url: str, memory: MemoryProvider) -> None:
    reached, proceed = threading.Event(), threading.Event()
    original = memory.exec

    def wait(*args: Any, **options: Any) -> Any:
        reached.set()
        assert proceed.wait(20)
        return original(*args, **options)

    memory.exec = wait  # type: ignore[method-assign]
    try:
        response = start(ada, lease_url, "echo", "done")
        begin = json.loads(next(response.streaming_content).split(b"data: ")[1])
        assert reached.wait(20)
        close_response(response)
        assert OPEN_STREAMS.count() == 0
    finally:
        proceed.set()
        del memory.exec
    wait_until(lambda: Run.objects.filter(pk=begin["run_id"], outcome="ok").exists(), "the command has ended")
    events = stream(ada, f"{lease_url}/runs/{begin['run_id']}")
    assert (join_output(events, "stdout"), events[-1].name) == ("done\n", "exit")
    connections.close_all()
