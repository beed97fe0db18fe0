"""Joins with wait_seconds: validation, position and Retry-After of the refusal, and the position while a join waits."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from leases import sweeps
from leases.models import AgentKey, Lease
from sandboxes.models import AdmissionRequest, Pool
from tests.api.conftest import ADA, ApiClient
from tests.support.billing import start_run
from tests.support.leases import update_pool

pytestmark = pytest.mark.django_db
JOIN = "environments/game-2/join"


@pytest.fixture
def full(lease: dict[str, Any], pool: Pool) -> Lease:
    """Lease of Ada whose running sandbox has the pool's only place."""
    update_pool(pool, capacity=1)
    held = Lease.objects.get(pk=lease["id"])
    start_run(held, now=timezone.now())
    return held


@pytest.mark.parametrize("seconds", [-1, 31, "5", True, 1.5])
def test_wait_seconds_outside_its_range_is_refused(ada: ApiClient, join_body, settings, seconds: Any) -> None:
    settings.MAX_JOIN_WAIT = timedelta(seconds=30)
    response = ada.post(JOIN, join_body(wait_seconds=seconds))
    assert (response.status_code, response.json()["field"]) == (400, "wait_seconds")


def test_wait_seconds_belongs_to_join_only(ada: ApiClient, acquire_body) -> None:
    assert ada.post("leases", acquire_body(wait_seconds=1)).json()["field"] == "wait_seconds"


def test_refused_join_has_its_position_and_the_next_one_gets_the_place(ada: ApiClient, join_body, full: Lease) -> None:
    body, key = join_body(wait_seconds=0), {"idempotency_key": "k1"}
    response = ada.post(JOIN, body, **key)
    problem = response.json()
    assert (response.status_code, problem["code"], response["Retry-After"]) == (503, "capacity_exhausted", "5")
    assert (problem["position"], problem["queue_length"]) == (1, 1)
    assert not Lease.objects.filter(environment_id="game-2").exists()
    ada.post(f"leases/{full.pk}/release")
    sweeps.reclaim(now=timezone.now())
    joined = ada.post(JOIN, body, **key)
    assert (joined.status_code, joined.json()["is_new"], joined.json()["sandbox"]["state"]) == (201, True, "warm")
    assert ada.post(JOIN, body, **key)["Idempotent-Replayed"] == "true"


def test_position_of_a_waiting_join_is_shown_to_keys_of_its_agent(
    ada: ApiClient, bob: ApiClient, operator: ApiClient, join_body, full: Lease, pool: Pool
) -> None:
    url = f"{JOIN}?agent_did={ADA}"
    assert ada.get(url).status_code == 404
    ada.post(JOIN, join_body(wait_seconds=0))
    found = ada.get(url).json()
    assert found.pop("enqueued_at")
    assert found == {
        "agent_did": ADA, "environment_id": "game-2", "pool": pool.name, "position": 1, "queue_length": 1,
    }  # fmt: skip
    assert bob.get(url).status_code == 403
    assert ada.get(JOIN).json()["field"] == "agent_did"
    row = next(row for row in operator.get("pool").json()["pools"] if row["name"] == pool.name)
    assert row["queue_length"] == 1
    AdmissionRequest.objects.all().delete()


def test_key_revoked_during_the_wait_gets_no_lease(ada: ApiClient, join_body, full: Lease, at_checkpoint) -> None:
    def revoke_and_free() -> None:
        AgentKey.objects.update(revoked_at=timezone.now())
        sweeps.end_all_leases(now=timezone.now(), detail="test")
        sweeps.reclaim(now=timezone.now())

    at_checkpoint("place awaited", revoke_and_free)
    assert ada.post(JOIN, join_body(wait_seconds=2)).status_code == 401
    assert not Lease.objects.filter(environment_id="game-2").exists()
