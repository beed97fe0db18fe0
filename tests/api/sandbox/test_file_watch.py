"""Watch of a directory as server-sent events."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.signals import request_finished
from django.db import close_old_connections
from django.utils import timezone

from leases import leasing
from leases.models import Lease
from sandboxes import eviction, file_watch
from sandboxes.models import Run, Sandbox
from sandboxes.pool import allocation
from sandboxes.providers.memory import MemoryProvider
from sandboxes.streams.registry import OPEN_STREAMS
from tests.api.conftest import ApiClient, assert_refused
from tests.support.event_stream import Event, parse_events

pytestmark = pytest.mark.django_db(transaction=True)  # another thread reads the rows


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "INTERVAL_SECONDS", 0.005)


@pytest.fixture
def lease_url(lease) -> str:
    return f"leases/{lease['id']}"


@pytest.fixture
def watch(ada: ApiClient, lease_url: str) -> Callable[..., Any]:
    """Open a watch, and yield its events without their first one."""

    @contextmanager
    def open_watch(query: str = "path=", entries: int | None = None) -> Iterator[Iterator[Event]]:
        response = ada.get(f"{lease_url}/watch?{query}")
        assert (response.status_code, response["Content-Type"]) == (200, "text/event-stream")
        events = parse_events(line + b"\n" for part in response.streaming_content for line in part.split(b"\n")[:-1])
        start = next(events)
        assert start.name == "start"
        assert entries in (None, start.data["entries"])
        try:
            yield events
        finally:  # keep the connection of this test to the database
            request_finished.disconnect(close_old_connections)
            response.close()
            request_finished.connect(close_old_connections)
            assert OPEN_STREAMS.count() == 0

    return open_watch


def name_event(event: Event) -> tuple[str, str]:
    return event.name, event.data.get("name", "")


def test_changes_of_programs_and_of_the_files_api_are_streamed(ada: ApiClient, lease_url: str, watch) -> None:
    ada.put(f"{lease_url}/files/src/a.py", b"1")
    with watch("path=src") as events:
        ada.put(f"{lease_url}/files/src/lib/b.py", b"12")
        created = [next(events) for _ in range(2)]
        assert [name_event(event) for event in created] == [("created", "lib"), ("created", "lib/b.py")]
        assert (created[1].data["kind"], created[1].data["size"], created[1].data["mode"]) == ("file", 2, "0644")
        ada.put(f"{lease_url}/files/src/a.py", b"2")
        assert name_event(next(events)) == ("modified", "a.py")
        ada.put(f"{lease_url}/files/outside", b"1")
        ada.delete(f"{lease_url}/files/src/a.py")
        deleted = next(events)
        assert (deleted.name, deleted.data) == ("deleted", {"name": "a.py", "kind": "file"})


def test_data_is_watched(ada: ApiClient, lease_url: str, watch) -> None:
    ada.put(f"{lease_url}/files/a?root=data", b"1")
    with watch("path=&root=data") as events:
        ada.put(f"{lease_url}/files/b?root=data", b"1")
        assert name_event(next(events)) == ("created", "b")


def test_the_end_of_the_lease_ends_the_stream(ada: ApiClient, lease_url: str, watch) -> None:
    with watch() as events:
        ada.post(f"{lease_url}/release")
        end = next(events)
        assert (end.name, end.data) == ("end", {"end_reason": "released"})
        assert list(events) == []


def test_a_watch_neither_renews_the_lease_nor_opens_runs(ada: ApiClient, lease_url: str, watch, memory: MemoryProvider) -> None:
    ada.put(f"{lease_url}/files/a", b"1")
    with watch(entries=2) as events:
        lease, runs = Lease.objects.get(), Run.objects.count()
        sandbox = Sandbox.objects.get()
        memory.write_file(sandbox.ref, "/workspace/b", b"1")
        assert name_event(next(events)) == ("created", "b")
        assert (Lease.objects.get().expires_at, Run.objects.count()) == (lease.expires_at, runs)
        assert Sandbox.objects.get().last_used_at == sandbox.last_used_at


def test_a_watch_survives_sleep_and_wake(ada: ApiClient, lease_url: str, lease, watch) -> None:
    ada.put(f"{lease_url}/files/a", b"1")
    with watch(entries=2) as events:
        sandbox = allocation.find_by_holder(uuid.UUID(lease["id"]))
        assert sandbox
        assert eviction.evict(sandbox.pk, now=timezone.now(), reason="test")
        ada.put(f"{lease_url}/files/b", b"1")  # wakes the sandbox
        assert [name_event(next(events)) for _ in range(2)] == [("gap", ""), ("created", "b")]


def test_a_sleep_and_its_end_are_events(ada: ApiClient, lease_url: str, lease, watch) -> None:
    ada.put(f"{lease_url}/files/a", b"1")
    with watch() as events:
        sandbox = allocation.find_by_holder(uuid.UUID(lease["id"]))
        assert sandbox
        assert eviction.evict(sandbox.pk, now=timezone.now(), reason="test")
        assert (asleep := next(events)).name == "asleep"
        assert asleep.data == {"state": "cold"}
        ada.put(f"{lease_url}/files/b", b"1")
        assert [name_event(next(events)) for _ in range(3)] == [("awake", ""), ("gap", ""), ("created", "b")]


def test_a_cold_sandbox_is_not_woken(ada: ApiClient, lease_url: str, lease, watch) -> None:
    ada.put(f"{lease_url}/files/a", b"1")
    sandbox = allocation.find_by_holder(uuid.UUID(lease["id"]))
    assert sandbox
    assert eviction.evict(sandbox.pk, now=timezone.now(), reason="test")
    with watch(entries=2) as events:
        assert Sandbox.objects.get().state == "cold"
        ada.put(f"{lease_url}/files/b", b"1")
        assert name_event(next(events)) == ("created", "b")  # no gap: the stored files are those of the last sandbox


def test_too_many_entries_are_refused_or_end_the_stream(
    ada: ApiClient, lease_url: str, watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada.put(f"{lease_url}/files/a", b"1")
    with watch(entries=2) as events:
        monkeypatch.setattr(file_watch, "MAX_ENTRIES", 2)
        ada.put(f"{lease_url}/files/b", b"1")
        error = next(events)
        assert (error.name, error.data["code"], error.data["status"]) == ("error", "file_too_large", 413)
        assert list(events) == []
    monkeypatch.setattr("leases.api.files.content.MAX_LISTING_ENTRIES", 2)
    problem = ada.get(f"{lease_url}/watch?path=").json()
    assert (problem["status"], problem["code"], problem["field"]) == (413, "file_too_large", "path")
    assert OPEN_STREAMS.count() == 0


def test_a_watch_of_a_missing_directory_or_ended_lease_is_refused(ada: ApiClient, lease_url: str, lease) -> None:
    ada.put(f"{lease_url}/files/a", b"1")
    assert ada.get(f"{lease_url}/watch?path=none").status_code == 404
    assert ada.get(f"{lease_url}/watch?path=a").status_code == 400
    leasing.end(uuid.UUID(lease["id"]), reason="released", now=timezone.now())
    assert_refused(ada, "GET", f"{lease_url}/watch?path=", None, 410)
    assert OPEN_STREAMS.count() == 0


def test_the_number_of_watches_is_limited(ada: ApiClient, lease_url: str, watch, settings) -> None:
    settings.MAX_STREAMS_PER_LEASE = 1
    ada.put(f"{lease_url}/files/a", b"1")
    with watch(entries=2):
        assert ada.get(f"{lease_url}/watch?path=").json()["code"] == "too_many_streams"
