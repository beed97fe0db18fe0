"""GET /pool, and responses without capacity, quota or workspace space."""

from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone

from leases import sweeps
from sandboxes import eviction
from sandboxes.models import Pool, Quota
from sandboxes.pool import allocation
from sandboxes.providers.errors import Rejected
from sandboxes.sweeps import measurements, passes
from tests.api.conftest import ADA, BOB, ApiClient
from tests.support.leases import update_pool

pytestmark = pytest.mark.django_db
TRUE = {"argv": ["true"]}


def get_pool(api: ApiClient, pool: Pool, query: str = "") -> dict[str, Any]:
    response = api.get(f"pool{query}")
    assert response.status_code == 200
    return next(row for row in response.json()["pools"] if row["name"] == pool.name)


@pytest.fixture
def used_lease(ada: ApiClient, lease) -> dict[str, Any]:
    """Lease of Ada with a waiting sandbox."""
    assert ada.post(f"leases/{lease['id']}/exec", TRUE).status_code == 200
    return lease


# --- GET /pool --------------------------------------------------------------------------------------------------------


def test_an_agents_key_sees_capacity_and_its_own_quota_only(ada: ApiClient, bob: ApiClient, used_lease, pool, settings) -> None:
    assert get_pool(bob, pool)["quotas"] == [{"agent_did": BOB, "most": None, "guaranteed": 0, "used": 0}]
    settings.MAX_SANDBOXES_PER_AGENT = 2
    assert get_pool(bob, pool)["quotas"][0]["most"] == 2
    Quota.objects.update_or_create(pool=pool, agent_did=ADA, defaults={"most": 3, "guaranteed": 1})
    Quota.objects.create(pool=pool, agent_did=BOB, most=9)
    assert get_pool(ada, pool) == {
        "name": pool.name, "max_capacity": 100, "used": 1, "draining": False,
        "quotas": [{"agent_did": ADA, "most": 3, "guaranteed": 1, "used": 1}],
    }  # fmt: skip
    assert ada.get("pool").json().keys() == {"pools"}


def test_an_operators_key_sees_all_statistics_and_totals(operator: ApiClient, ada: ApiClient, used_lease, pool: Pool) -> None:
    url = f"leases/{used_lease['id']}/exec"
    ada.post(url, TRUE)
    eviction.evict(allocation.find_by_holder(UUID(used_lease["id"])).pk, now=timezone.now(), reason="test")
    ada.post(url, TRUE)
    stats = get_pool(operator, pool)
    assert {name: number for name, number in stats.items() if number not in (0, None, "", [], False)} == {
        "name": pool.name, "max_capacity": 100, "used": 1, "total": 1, "waiting": 1, "resume_warm_hits": 1,
        "resume_cold_hits": 1, "resume_cold_local_hits": 1, "slept": 1,
        "oldest_waiting_seconds": stats["oldest_waiting_seconds"],
    }  # fmt: skip
    assert {"cold", "warming", "warm", "running", "resume_cold_cloud_hits", "pre_warm_hits", "evicted_waiting"} <= stats.keys()
    Pool.objects.create(name="other", provider="memory", capacity=7)
    response = operator.get("pool").json()
    assert [row["name"] for row in response["pools"]] == sorted(row["name"] for row in response["pools"])
    assert response["max_capacity"] == sum(row["max_capacity"] for row in response["pools"])
    assert (response["total"], response["waiting"]) == (1, 1)


def test_quotas_are_filtered_by_agent(operator: ApiClient, issue, bob: ApiClient, used_lease, pool: Pool) -> None:
    assert get_pool(operator, pool)["quotas"] == []
    assert get_pool(operator, pool, f"?agent_did={ADA}")["quotas"][0]["used"] == 1
    both = issue(ADA, BOB)
    assert [row["agent_did"] for row in get_pool(both, pool)["quotas"]] == [ADA, BOB]
    assert [row["agent_did"] for row in get_pool(both, pool, f"?agent_did={BOB}")["quotas"]] == [BOB]
    assert bob.get(f"pool?agent_did={ADA}").status_code == 403


def test_paused_prewarming_is_shown_to_operators(operator: ApiClient, ada: ApiClient, pool: Pool, memory) -> None:
    update_pool(pool, warm_target=1)
    with memory.fail("create", Rejected("no such image"), times=99):
        passes.warm_pools(now=timezone.now())
    stats = get_pool(operator, pool)
    assert stats["warm_paused_until"] and "no such image" in stats["warm_error"]
    assert "warm_error" not in get_pool(ada, pool)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_over_quota_returns_the_limit_and_retry_after(ada: ApiClient, acquire_body, used_lease, pool: Pool) -> None:
    Quota.objects.filter(pool=pool, agent_did=ADA).update(most=1)
    second = ada.post("leases", acquire_body(environment_id="game-2")).json()
    for response in (
        ada.post(f"leases/{second['id']}/exec", TRUE),
        ada.post(f"leases/{second['id']}/turns", {"turn_number": 1, "state": {}}),
        ada.put(f"leases/{second['id']}/files/f", b"x"),
        ada.delete(f"leases/{second['id']}/files/f"),
        ada.post("environments/game-3/join", {k: v for k, v in acquire_body().items() if k != "environment_id"}),
    ):
        assert (response.status_code, response.json()["code"], response["Retry-After"]) == (429, "quota_exceeded", "30")
        assert response.json()["limit"] == 1
    ada.post(f"leases/{used_lease['id']}/release")
    sweeps.reclaim(now=timezone.now())
    assert ada.post(f"leases/{second['id']}/exec", TRUE).status_code == 200


@pytest.mark.parametrize(
    ("change", "code", "retry_after"),
    [({"draining": True}, "pool_draining", "60"), ({"capacity": 0}, "capacity_exhausted", "10")],
)
def test_a_draining_or_full_pool_is_unavailable_with_retry_after(
    ada: ApiClient, lease, pool: Pool, change: dict[str, Any], code: str, retry_after: str
) -> None:
    update_pool(pool, **change)
    response = ada.post(f"leases/{lease['id']}/exec", TRUE)
    assert (response.status_code, response.json()["code"], response["Retry-After"]) == (503, code, retry_after)
    assert get_pool(ada, pool)["draining"] == (code == "pool_draining")


# --- workspace limit --------------------------------------------------------------------------------------------


def test_a_workspace_over_its_limit_refuses_exec_with_its_size(ada: ApiClient, used_lease, pool: Pool) -> None:
    url = f"leases/{used_lease['id']}"
    update_pool(pool, workspace_limit_mib=1)
    assert ada.post(f"{url}/exec", {"argv": ["sh", "-c", "head -c 3000000 /dev/zero >big"]}).status_code == 200
    measurements.measure_workspaces(now=timezone.now())  # unless the command was slow enough for a measurement of its own
    response = ada.post(f"{url}/exec", TRUE)
    problem = response.json()
    assert (response.status_code, problem["code"], problem["limit_bytes"]) == (409, "workspace_full", 1 << 20)
    assert problem["workspace_bytes"] >= 3_000_000
    assert ada.post(f"{url}/turns", {"turn_number": 1, "state": {}}).json()["code"] == "workspace_full"
    assert ada.delete(f"{url}/files/big").status_code == 204
    assert ada.post(f"{url}/exec", TRUE).status_code == 200
