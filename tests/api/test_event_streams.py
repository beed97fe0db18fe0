"""Stream of events: order, continuation, visibility, filter, and its end."""

import itertools
import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from leases import api_keys
from leases.models import AgentKey, KeyScope
from leases.retention.sweep import delete_expired
from sandboxes.models.webhooks import Event as OutboxEvent
from sandboxes.models.webhooks import EventType
from sandboxes.streams import events
from sandboxes.streams.registry import OPEN_STREAMS
from sandboxes.webhooks import outbox
from tests.api.conftest import ApiClient, assert_refused
from tests.conftest import run_in_threads
from tests.support.billing import ADA, BOB
from tests.support.event_stream import Event, parse_events
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
START, SECONDS = timezone.now(), itertools.count()


@pytest.fixture(autouse=True)
def _fast_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Readers that look at the outbox at once and often."""
    monkeypatch.setattr(events, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(events, "NEWEST_POSITION", events.NewestPosition())
    yield
    assert OPEN_STREAMS.count() == 0
    connections.close_all()


def emit(kind: EventType = EventType.LEASE_ENDED, **payload: Any) -> str:
    """Insert an event of Ada, unless the payload names another agent. Return its id. Each event is later than the last."""
    now = START + timedelta(seconds=next(SECONDS))
    event = outbox.enqueue_event(kind, key=uuid.uuid4().hex, payload={"agent_did": ADA} | payload, now=now)
    assert event is not None
    return str(event.pk)


class Reader:
    """Client of the stream, as a context manager."""

    def __init__(self, client: ApiClient, last_id: str = "", query: str = "") -> None:
        headers = {"last_event_id": last_id} if last_id else {}
        self.response = client.get(f"events/stream{query}", **headers)
        assert (self.response.status_code, self.response.headers["Content-Type"]) == (200, "text/event-stream")
        self.lines: list[bytes] = []
        self._events = parse_events(self._iter_lines())

    def _iter_lines(self) -> Iterator[bytes]:
        for part in self.response.streaming_content:
            for line in part.splitlines(keepends=True):
                self.lines.append(line)
                yield line

    def read(self, count: int) -> list[Event]:
        return [next(self._events) for _ in range(count)]

    def read_all(self) -> list[Event]:
        """Return the rest of a stream that ends."""
        return [*self._events]

    def close(self) -> None:
        self.response.close()


def read(client: ApiClient, count: int, last_id: str = "0", query: str = "") -> list[Event]:
    with closing(Reader(client, last_id, query)) as reader:
        return reader.read(count)


def test_events_after_the_start_arrive_in_order_and_the_stream_continues_after_any(ada: ApiClient) -> None:
    emit()  # before the stream
    with closing(Reader(ada)) as reader:
        (start,) = reader.read(1)
        ids = [emit(lease_id=str(second)) for second in range(3)]
        received = reader.read(3)
    assert (start.name, start.data["types"][0]) == ("start", "budget.warning")
    assert [(event.id, event.name) for event in received] == [(pk, "lease.ended") for pk in ids]
    assert received[0].data["data"] == {"agent_did": ADA, "lease_id": "0"}
    assert (received[0].data["id"], received[0].data["type"]) == (ids[0], "lease.ended")
    assert read(ada, 3, start.id) == received
    assert read(ada, 2, ids[0]) == received[1:]
    assert len(read(ada, 4, "0")) == 4


def test_queued_runs_announce_each_step(ada: ApiClient, pool) -> None:
    body = {"agent_did": ADA, "argv": ["true"], "queued": True, "pool": pool.name}
    queued_run_id = ada.post("runs", body).json()["queued_run_id"]
    (event,) = read(ada, 1, query="?type=queued_run.queued")
    assert (event.data["data"]["queued_run_id"], event.data["data"]["state"]) == (queued_run_id, "queued")


def test_key_reads_only_events_of_its_agents(ada: ApiClient, operator: ApiClient) -> None:
    emit(agent_did=BOB)
    emit(EventType.SANDBOX_QUARANTINED)
    own = emit()
    emit(EventType.TEST)
    last = emit(EventType.QUEUED_RUN_ENDED)
    assert [event.id for event in read(ada, 2)] == [own, last]
    assert len(read(operator, 4)) == 4
    assert "webhook.test" not in {event.name for event in read(operator, 4)}


def test_budgets_of_the_key_need_the_scope_of_costs(issue, ada: ApiClient) -> None:
    own, other = {"scope": "agent", "subject": ADA}, {"scope": "agent", "subject": BOB}
    budget = emit(EventType.BUDGET_EXHAUSTED, **own)
    emit(EventType.BUDGET_EXHAUSTED, **other)
    emit(EventType.BUDGET_WARNING, scope="environment_type", subject="catan")
    last = emit()
    assert [event.id for event in read(ada, 2)] == [budget, last]
    without = issue(ADA, scopes=[KeyScope.LEASES])
    assert [event.id for event in read(without, 1)] == [last]
    with_read = issue(ADA, scopes=[KeyScope.READ])
    assert [event.id for event in read(with_read, 1)] == [last]


def test_types_are_filtered(ada: ApiClient) -> None:
    emit()
    started, ended = emit(EventType.QUEUED_RUN_STARTED), emit(EventType.AGENT_RUN_ENDED)
    query = "?type=queued_run.started,agent_run.ended"
    assert [event.id for event in read(ada, 2, query=query)] == [started, ended]
    assert_refused(ada, "GET", "events/stream?type=lease.gone", None, 400, "type")
    assert_refused(ada, "GET", "events/stream?type=webhook.test", None, 400, "type")


def test_unknown_and_expired_ids_are_refused(ada: ApiClient) -> None:
    old = emit()
    read(ada, 1)
    delete_expired(now=START + outbox.EVENT_RETENTION + timedelta(days=1))
    for last_id, status in ((old, 410), (str(uuid.uuid4()), 410), ("1-2", 400)):
        response = ada.get("events/stream", last_event_id=last_id)
        assert (response.status_code, response.json()["operation"]) == (status, "events_stream")


def test_positions_go_on_after_all_events_were_purged(ada: ApiClient) -> None:
    emit()
    before = outbox.assign_positions(now=START)
    OutboxEvent.objects.all().delete()
    emit()
    assert outbox.assign_positions(now=START + timedelta(seconds=1)) > before


@pytest.mark.parametrize("change", [{"revoked_at": START}, {"expires_at": START - timedelta(hours=1)}])
@pytest.mark.parametrize("with_event", [True, False])
def test_stream_ends_when_its_key_is_not_valid_any_more(
    ada: ApiClient, change: dict[str, Any], with_event: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 60.0 if with_event else 0.05)
    with closing(Reader(ada)) as reader:
        reader.read(1)
        AgentKey.objects.update(**change)
        if with_event:
            emit()
        assert reader.read_all() == []


def test_keep_alive_has_the_id_of_the_last_event_also_of_other_agents(ada: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.05)
    with closing(Reader(ada)) as reader:
        reader.read(1)
        other = emit(agent_did=BOB)
        for part in reader.response.streaming_content:
            if part == f"id: {other}\n: keep-alive\n\n".encode():
                break
    own = emit()
    assert [event.id for event in read(ada, 1, other)] == [own]


def test_streams_of_a_key_are_limited_and_end_with_the_process(ada: ApiClient, settings: Any) -> None:
    settings.MAX_STREAMS_PER_LEASE = 1
    with closing(Reader(ada)) as reader:
        reader.read(1)
        response = ada.get("events/stream")
        assert (response.status_code, response.json()["code"]) == (429, "too_many_streams")
        assert response.json()["detail"].startswith("This API key has 1 open streams")
        for slot in [*OPEN_STREAMS._slots]:
            slot.interrupt()
        assert reader.read_all() == []


def test_rotated_key_keeps_its_stream(ada: ApiClient) -> None:
    with closing(Reader(ada)) as reader:
        reader.read(1)
        api_keys.rotate_key(AgentKey.objects.get().pk, now=timezone.now())
        own = emit()
        assert [event.id for event in reader.read(1)] == [own]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one writer")
def test_event_that_commits_after_a_later_one_is_not_lost(ada: ApiClient) -> None:
    """The first transaction inserts its event before the second one, and commits after a stream has read the second."""
    with closing(Reader(ada)) as reader:
        reader.read(1)
        late = transaction.atomic()
        late.__enter__()
        try:
            first = emit()
            with run_in_threads(1) as run:
                (second,) = run(lambda _: emit())
            assert [event.id for event in reader.read(1)] == [second]
        finally:
            late.__exit__(None, None, None)
        assert [event.id for event in reader.read(1)] == [first]
    assert [event.id for event in read(ada, 2)] == [second, first]
    assert [event.id for event in read(ada, 1, second)] == [first]


WRITERS, READERS, EVENTS_OF_A_WRITER = 4, 2, 10


def test_readers_see_each_event_once_while_others_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that assign positions in small batches while events are committed."""
    monkeypatch.setattr(outbox, "POSITION_BATCH_SIZE", 3)
    total = WRITERS * EVENTS_OF_A_WRITER

    def act(index: int) -> list[str]:
        if index < WRITERS:
            return [emit() for _ in range(EVENTS_OF_A_WRITER)]
        seen, position = list[OutboxEvent](), 0

        def look() -> bool:
            nonlocal position
            if outbox.assign_positions(now=START) > position:
                seen.extend(OutboxEvent.objects.filter(position__gt=position).order_by("position"))
                position = seen[-1].position or 0
            return len(seen) >= total

        wait_until(look, "all events were read", within=20.0)
        return [str(event.pk) for event in seen]

    with run_in_threads(WRITERS + READERS) as run:
        results = run(act)
    assert not [result for result in results if isinstance(result, Exception)], results
    written = [pk for ids in results[:WRITERS] for pk in ids]
    assert all(sorted(ids) == sorted(written) for ids in results[WRITERS:])
    assert results[-1] == results[-2]
