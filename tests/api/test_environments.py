"""Joining an environment and posting conditions."""

import json
import uuid

import pytest
from django_q.models import OrmQ

from leases.models import Lease
from sandboxes.models import Sandbox
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import File, MemoryProvider
from tests.api.conftest import ADA, BOB, ApiClient, expire_lease

pytestmark = pytest.mark.django_db


def test_join_starts_the_sandbox(ada: ApiClient, acquire_body, memory: MemoryProvider) -> None:
    response = ada.post("environments/game-7/join", acquire_body())
    shown = response.json()
    assert (response.status_code, shown["is_new"], shown["environment_id"]) == (201, True, "game-7")
    assert (shown["sandbox"]["state"], shown["sandbox"]["provider"]) == ("warm", "memory")
    config = memory.files(Sandbox.objects.get().ref)["/workspace/config.json"]
    assert isinstance(config, File)
    assert json.loads(config.content)["leaseId"] == shown["id"]


def test_joining_twice_returns_the_same_lease_and_sandbox(ada: ApiClient, acquire_body) -> None:
    first, again = (ada.post("environments/game-7/join", acquire_body()) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json() | {
        "is_new": False,
        "expires_at": again.json()["expires_at"],
        "last_activity": again.json()["last_activity"],
    }


def test_a_failed_start_keeps_the_lease_and_sends_retry_after(ada: ApiClient, acquire_body, memory) -> None:
    memory.fail("create", Unavailable("no engine"), times=1)
    refused = ada.post("environments/game-7/join", acquire_body())
    assert (refused.status_code, refused.json()["code"]) == (503, "sandbox_not_ready")
    assert ada.post("environments/game-7/join", acquire_body()).json()["is_new"] is False


def test_a_condition_ends_the_leases_that_have_it(ada: ApiClient, operator: ApiClient, acquire_body) -> None:
    lease_id = ada.post("leases", acquire_body()).json()["id"]
    ada.post("leases", acquire_body(environment_id="game-2"))
    operator.post("leases", acquire_body(agent_did=BOB, expiry_conditions=[]))
    response = operator.post("environments/game-1/conditions", {"condition": "game.finished"})
    assert (response.status_code, response.json()) == (200, {"ended": [lease_id]})
    assert Lease.objects.get(pk=uuid.UUID(lease_id)).end_reason == "condition:game.finished"
    assert operator.post("environments/game-1/conditions", {"condition": "game.finished"}).json() == {"ended": []}


def test_an_agents_key_ends_only_its_own_agents_leases(ada: ApiClient, operator: ApiClient, acquire_body) -> None:
    own, other = (operator.post("leases", acquire_body(agent_did=did)).json()["id"] for did in (ADA, BOB))
    assert ada.post("environments/game-1/conditions", {"condition": "game.finished"}).json() == {"ended": [own]}
    assert Lease.objects.get(pk=uuid.UUID(other)).status == "active"


def test_a_condition_does_not_end_leases_already_elapsed(ada: ApiClient, lease) -> None:
    expire_lease(lease["id"])
    assert ada.post("environments/game-1/conditions", {"condition": "game.finished"}).json() == {"ended": []}
    assert ada.get(f"leases/{lease['id']}").json()["end_reason"] == "ttl"


def test_ending_a_lease_wakes_the_sweep(ada: ApiClient, lease) -> None:
    ada.post("environments/game-1/conditions", {"condition": "agent.left"})
    assert OrmQ.objects.count() == 0
    ada.post(f"leases/{lease['id']}/release")
    assert [task.func() for task in OrmQ.objects.all()] == ["leases.tasks.reclaim"]
