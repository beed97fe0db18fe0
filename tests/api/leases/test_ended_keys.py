"""End of what a key has opened: event streams, and requests that last longer than the key's right to them."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.utils import timezone

from leases import api_keys
from leases.api import command_threads, streams
from leases.api.base import views
from leases.grants import revocation, stream_watch
from leases.grants.stream_watch import StreamWatch
from leases.models import AgentKey
from sandboxes.file_watch import FileWatch
from sandboxes.models import Run
from sandboxes.providers.memory import MemoryProvider
from sandboxes.streams import rows
from sandboxes.streams.registry import OPEN_STREAMS
from tests.api.conftest import ApiClient
from tests.api.leases.test_slow_bodies import DOCUMENTS, STREAMS, InterruptedBody, send
from tests.support.event_stream import Event, parse_events
from tests.support.grants import KEY_ENDS
from tests.support.waiting import wait_until

Opened = Iterator[Event]


class ManualWatch(StreamWatch):
    """Watch whose checks the test makes."""

    def _run(self) -> None:
        """Leave the checks to the test."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> ManualWatch:
    watch = ManualWatch()
    monkeypatch.setattr(streams, "STREAM_WATCH", watch)
    return watch


@pytest.fixture
def blocked_exec(memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands that end with the test."""
    proceed, execute = threading.Event(), memory.exec

    def wait(*args: Any, **options: Any) -> Any:
        assert proceed.wait(60)
        return execute(*args, **options)

    monkeypatch.setattr(memory, "exec", wait)
    yield
    proceed.set()
    command_threads.join_all()
    connections.close_all()


def open_exec_stream(ada: ApiClient, lease_url: str) -> Any:
    return ada.post(f"{lease_url}/exec/stream", {"argv": ["echo", "done"]})


def open_run_stream(ada: ApiClient, lease_url: str) -> Any:
    with closing(open_exec_stream(ada, lease_url)):
        run = wait_until(lambda: Run.objects.filter(kind="exec").first(), "the run is open")
    return ada.get(f"{lease_url}/runs/{run.pk}/stream")


def open_agent_run_stream(ada: ApiClient, lease_url: str) -> Any:
    url = f"{lease_url}/agent-runs"
    run_id = ada.post(url, {"cli": "program", "argv": ["cat"], "prompt": "{}\n"}).json()["run_id"]
    return ada.get(f"{url}/{run_id}/stream")


def open_event_stream(ada: ApiClient, lease_url: str) -> Any:
    return ada.get("events/stream")


def open_file_watch(ada: ApiClient, lease_url: str) -> Any:
    return ada.get(f"{lease_url}/watch?path=")


STREAM_OPENERS = [open_exec_stream, open_run_stream, open_agent_run_stream, open_event_stream, open_file_watch]
# The stream of events is that of all agents of a key, and shows those that the key has at the time of each event.
ENDS = [
    pytest.param(opener, change.values[0], id=f"{opener.__name__} {change.id}")
    for opener in STREAM_OPENERS
    for change in KEY_ENDS
    if not (opener is open_event_stream and change.id == "agent taken")
]


def iter_lines(response: Any) -> Iterator[bytes]:
    for part in response.streaming_content:
        yield from part.splitlines(keepends=True)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("blocked_exec")
@pytest.mark.parametrize(("opener", "change"), ENDS)
def test_open_stream_ends_with_the_right_of_its_key(
    ada: ApiClient, lease, watch: ManualWatch, opener: Callable[[ApiClient, str], Any], change: dict[str, Any]
) -> None:
    with closing(opener(ada, f"leases/{lease['id']}")) as response:
        events = parse_events(iter_lines(response))
        assert next(events).name == "start"
        watch.check()
        assert is_open()
        AgentKey.objects.update(**change)
        watch.check()
        assert not is_open()
        assert [event.name for event in events if event.name in ("exit", "error", "end")] == []
    assert OPEN_STREAMS.count() == 0


def is_open() -> bool:
    return any(not slot.must_end for slot in OPEN_STREAMS._slots)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("blocked_exec")
@pytest.mark.parametrize("opener", STREAM_OPENERS)
def test_open_stream_outlives_the_rotation_of_its_key(ada: ApiClient, lease, watch: ManualWatch, opener) -> None:
    with closing(opener(ada, f"leases/{lease['id']}")) as response:
        assert next(parse_events(iter_lines(response))).name == "start"
        api_keys.rotate_key(AgentKey.objects.get().pk, now=timezone.now())
        watch.check()
        assert is_open()
        AgentKey.objects.update(previous_valid_until=timezone.now())
        watch.check()
        assert not is_open()


@pytest.mark.django_db(transaction=True)
def test_stream_of_a_key_that_may_only_read_outlives_the_loss_of_other_scopes(
    ada: ApiClient, lease, watch: ManualWatch
) -> None:
    with closing(open_file_watch(ada, f"leases/{lease['id']}")) as response:
        assert next(parse_events(iter_lines(response))).name == "start"
        AgentKey.objects.update(scopes=["read"])
        watch.check()
        assert is_open()


@pytest.mark.django_db(transaction=True)
def test_each_stream_ends_with_its_own_key(ada: ApiClient, issue, lease, watch: ManualWatch) -> None:
    other = issue("did:plc:ada")
    with closing(open_event_stream(ada, "")), closing(open_event_stream(other, "")):
        AgentKey.objects.filter(prefix=other.key[3:11]).update(revoked_at=timezone.now())
        watch.check()
        assert sorted(slot.must_end for slot in OPEN_STREAMS._slots) == [False, True]


@pytest.mark.django_db(transaction=True)
def test_streams_are_checked_each_second_also_after_a_database_error(
    ada: ApiClient, lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_watch, "CHECK_INTERVAL_SECONDS", 0.01)
    has_failed, call = threading.Event(), rows.call

    def fail_once(*args: Any) -> Any:
        if not has_failed.is_set():
            has_failed.set()
            raise OperationalError("no connection")
        return call(*args)

    monkeypatch.setattr(stream_watch, "rows", type("Rows", (), {"call": staticmethod(fail_once)}))
    monkeypatch.setattr(FileWatch, "pause_seconds", 0.01)
    with closing(open_file_watch(ada, f"leases/{lease['id']}")) as response:
        events = parse_events(iter_lines(response))
        assert next(events).name == "start"
        assert has_failed.wait(60)
        AgentKey.objects.update(revoked_at=timezone.now())
        assert [*events] == []
    wait_until(lambda: "stream-watch" not in {thread.name for thread in threading.enumerate()}, "the watch has ended")


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("blocked_exec")
def test_stream_whose_key_ends_before_its_first_event_is_refused(
    ada: ApiClient, lease, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "RECHECK_SECONDS", 0.0)
    create = memory.create

    def end_key(*args: Any, **options: Any) -> Any:
        AgentKey.objects.update(revoked_at=timezone.now())
        return create(*args, **options)

    monkeypatch.setattr(memory, "create", end_key)
    response = open_exec_stream(ada, f"leases/{lease['id']}")
    assert (response.status_code, response.json()["code"], OPEN_STREAMS.count()) == (401, "grant_ended", 0)


# --- long requests --------------------------------------------------------------------------------------------------


@pytest.fixture
def long_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the key again in every request."""
    monkeypatch.setattr(views, "RECHECK_SECONDS", 0.0)


@pytest.mark.django_db
@pytest.mark.usefixtures("long_requests")
@pytest.mark.parametrize("change", KEY_ENDS)
@pytest.mark.parametrize("path", [*STREAMS, *DOCUMENTS])
def test_request_whose_key_ends_while_the_body_arrives_has_no_effect(
    ada: ApiClient, lease, path: str, change: dict[str, Any]
) -> None:
    def end_key() -> None:
        AgentKey.objects.update(**change)

    response = send(ada, lease, path, InterruptedBody((STREAMS | DOCUMENTS)[path], end_key))
    assert (response.status_code, response.json()["code"], Run.objects.count()) == (401, "grant_ended", 0)


@pytest.mark.django_db
@pytest.mark.usefixtures("long_requests")
@pytest.mark.parametrize("change", KEY_ENDS)
def test_result_of_a_command_is_withheld_from_a_key_that_has_ended(
    ada: ApiClient, lease, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    url, execute = f"leases/{lease['id']}/exec", memory.exec
    assert ada.post(url, {"argv": ["echo", "before"]}).json()["stdout"] == "before\n"

    def end_key(*args: Any, **options: Any) -> Any:
        AgentKey.objects.update(**change)
        return execute(*args, **options)

    monkeypatch.setattr(memory, "exec", end_key)
    response = ada.post(url, {"argv": ["echo", "secret"]})
    assert (response.status_code, response.json()["code"]) == (401, "grant_ended")
    assert bytes(Run.objects.latest("started_at").stdout) == b"secret\n"


@pytest.mark.django_db
@pytest.mark.usefixtures("long_requests")
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_download_stops_without_an_end_when_its_key_ends(ada: ApiClient, lease, compression: str) -> None:
    url = f"leases/{lease['id']}"
    assert ada.put(f"{url}/files/a", bytes(100)).status_code == 204
    headers = {"Authorization": f"Bearer {ada.key}"}
    response = ada.client.get(f"/api/v1/{url}/archive?compression={compression}", headers=headers)
    assert response.status_code == 200
    AgentKey.objects.update(revoked_at=timezone.now())
    with pytest.raises(views.LeaseError):
        b"".join(response.streaming_content)


@pytest.mark.django_db
@pytest.mark.usefixtures("long_requests")
def test_upload_by_a_signed_url_that_expires_while_the_body_arrives_has_no_effect(
    ada: ApiClient, lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"path": "a", "method": "PUT", "expires_seconds": 60}
    url = ada.post(f"leases/{lease['id']}/file-urls", body).json()["url"].removeprefix("http://testserver")
    later = timezone.now() + timedelta(minutes=2)
    content = InterruptedBody(b"x", lambda: monkeypatch.setattr("sandboxes.db.database_time.now", lambda: later))
    response = upload(url, content)
    assert (response.status_code, response.json()["code"], Run.objects.count()) == (401, "signed_url_expired", 0)


@pytest.mark.django_db
@pytest.mark.usefixtures("long_requests")
@pytest.mark.parametrize("change", KEY_ENDS)
def test_upload_by_a_signed_url_whose_key_ends_while_the_body_arrives_has_no_effect(
    ada: ApiClient, lease, change: dict[str, Any]
) -> None:
    body = {"path": "a", "method": "PUT"}
    url = ada.post(f"leases/{lease['id']}/file-urls", body).json()["url"].removeprefix("http://testserver")
    response = upload(url, InterruptedBody(b"x", lambda: AgentKey.objects.update(**change)))
    assert (response.status_code, response.json()["code"], Run.objects.count()) == (401, "grant_ended", 0)


def upload(url: str, body: io.BytesIO) -> Any:
    environ = {"wsgi.input": body, "CONTENT_LENGTH": str(len(body.getvalue()))}
    return ApiClient().client.generic("PUT", url, b"", "application/octet-stream", **environ)


# --- leases ---------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_leases_that_a_key_was_granted_in_any_way_are_found(ada: ApiClient, operator: ApiClient, lease, join_body) -> None:
    key = AgentKey.objects.get(prefix=ada.key[3:11])
    joined = ada.post("environments/game-2/join", join_body()).json()["id"]
    forked = ada.post(f"leases/{joined}/fork", {"environment_id": "game-3"}).json()["id"]
    operator.post("environments/game-4/join", join_body())
    assert {str(found.pk) for found in revocation.find_leases(key)} == {lease["id"], joined, forked}
