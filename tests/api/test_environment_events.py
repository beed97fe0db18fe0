"""Events of a game server through the API."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from leases import sweeps
from leases.models import EnvironmentType, QueuedRun, Turn
from leases.queue import attempts, queue
from tests.api.conftest import ApiClient, assert_refused
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db


def build_event(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {"type": "turn", "agent_did": ADA, "turn_number": number, "state": {"n": number}} | fields


def work(delay: timedelta = timedelta(0)) -> None:
    while row := queue.claim("r1", now=timezone.now() + delay):
        attempts.execute(row, now=timezone.now() + delay)


def test_event_becomes_a_turn_whose_action_is_polled(ada: ApiClient, lease) -> None:
    EnvironmentType.objects.update(turn_argv=["cat"])
    url = f"environments/{lease['environment_id']}/events"
    queued = [ada.post(url, build_event(number)) for number in (2, 1)]
    assert {response.status_code for response in queued} == {202}
    assert queued[0].json()["kind"] == "turn"
    assert not Turn.objects.exists()
    work()
    rows = [ada.get(f"runs/queued/{response.json()['queued_run_id']}").json() for response in queued]
    assert [(row["state"], row["turn_number"], row["action"], row["skipped"]) for row in rows] == [
        ("completed", 2, {"n": 2}, False),
        ("completed", 1, {"n": 1}, False),
    ]
    assert list(Turn.objects.order_by("started_at").values_list("number", flat=True)) == [1, 2]


def test_skipped_turn_has_its_reason(ada: ApiClient, lease) -> None:
    EnvironmentType.objects.update(turn_argv=["sh", "-c", "echo no >&2; exit 3"])
    queued = ada.post(f"environments/{lease['environment_id']}/events", build_event()).json()
    work()
    row = ada.get(f"runs/queued/{queued['queued_run_id']}").json()
    assert (row["state"], row["skipped"], row["exit_code"]) == ("completed", True, 3)
    assert row["reason"] == row["action"]["reason"] == "The turn exited with code 3: no"


def test_repeated_event_gets_the_first_answer(ada: ApiClient, lease) -> None:
    url, headers = f"/api/v1/environments/{lease['environment_id']}/events", {"Authorization": f"Bearer {ada.key}"}
    answers = [
        ada.client.post(url, build_event(), "application/json", headers=headers | {"webhook-id": "evt_1"}) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json() == answers[1].json()
    assert QueuedRun.objects.count() == 1
    other = ada.client.post(url, build_event(2), "application/json", headers=headers | {"webhook-id": "evt_1"})
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")


def test_event_needs_an_active_lease_of_an_agent_of_the_key(ada: ApiClient, lease) -> None:
    url = f"environments/{lease['environment_id']}/events"
    missing = ada.post("environments/other/events", build_event())
    assert (missing.status_code, missing.json()["code"]) == (404, "no_active_lease")
    assert ada.post(url, build_event(agent_did=BOB)).status_code == 403
    assert_refused(ada, "POST", url, build_event(type="move"), 400, "type")
    assert_refused(ada, "POST", url, build_event(turn="1"), 400, "turn")
    assert ada.post(f"leases/{lease['id']}/release").status_code == 200
    assert ada.post(url, build_event()).json()["code"] == "no_active_lease"
    assert not QueuedRun.objects.exists()


def test_game_of_events_survives_a_dead_runner(
    ada: ApiClient, lease, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    EnvironmentType.objects.update(turn_argv=["cat"])
    url = f"environments/{lease['environment_id']}/events"
    queued = [ada.post(url, build_event(number), idempotency_key=f"e{number}").json() for number in range(5)]
    with crash_at("run answered"):
        work()
    for number in range(5):  # the game server repeats its events after the restart
        assert ada.post(url, build_event(number), idempotency_key=f"e{number}").json() == queued[number]
    for minutes in (20, 25, 30):
        delay = timedelta(minutes=minutes)
        sweeps.recover_stalled(now=timezone.now() + delay)
        attempts.recover(runner="r2", now=timezone.now() + delay)
        work(delay)
    rows = [ada.get(f"runs/queued/{row['queued_run_id']}").json() for row in queued]
    assert [(row["state"], row["action"]) for row in rows] == [("completed", {"n": number}) for number in range(5)]
    assert list(Turn.objects.order_by("started_at").values_list("number", flat=True)) == list(range(5))
