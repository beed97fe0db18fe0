"""Snapshots, restore and fork through the API."""

import uuid
from typing import Any

import pytest

from leases.models import AgentKey, Lease
from sandboxes.models import Sandbox, Snapshot
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.memory.file_tree import File
from tests.api.conftest import ADA, BOB, ApiClient, assert_refused, expire_lease

pytestmark = pytest.mark.django_db


@pytest.fixture
def lease_url(ada: ApiClient, lease) -> str:
    """URL of a lease with one file in its workspace."""
    url = f"leases/{lease['id']}"
    assert ada.put(f"{url}/files/f", b"one").status_code == 204
    return url


def test_a_snapshot_is_taken_listed_and_restored(ada: ApiClient, lease_url: str) -> None:
    taken = ada.post(f"{lease_url}/snapshots", {"name": "before"})
    assert (taken.status_code, taken.json()["name"], taken.json()["kind"]) == (201, "before", "asked")
    ada.put(f"{lease_url}/files/f", b"two")
    restored = ada.post(f"{lease_url}/restore", {"snapshot_id": taken.json()["id"]})
    assert (restored.status_code, restored.json()["kind"]) == (200, "restored")
    assert ada.get(f"{lease_url}/files/f").content == b"one"
    assert ada.post(f"{lease_url}/exec", {"argv": ["cat", "f"]}).json()["stdout"] == "one"
    listed = ada.get(f"{lease_url}/snapshots").json()["results"]
    assert [row["kind"] for row in listed] == ["restored", "sleep", "asked"]
    assert listed[0] == restored.json()


def test_an_unused_lease_has_nothing_to_snapshot(ada: ApiClient, lease) -> None:
    assert assert_refused(ada, "POST", f"leases/{lease['id']}/snapshots", None, 404)["code"] == "no_snapshot"


def test_snapshot_and_its_copies_list_what_is_not_kept(ada: ApiClient, lease_url: str, memory: MemoryProvider) -> None:
    memory.files(Sandbox.objects.get().ref)["/workspace/bin/ping"] = File(b"", mode=0o4755)
    taken = ada.post(f"{lease_url}/snapshots").json()
    assert taken["omitted"] == [{"kind": "set_id_bit", "count": 1, "paths": ["bin/ping"]}]
    ada.post(f"{lease_url}/restore", {"snapshot_id": taken["id"]})
    assert ada.post(f"{lease_url}/exec", {"argv": ["cat", "f"]}).json()["stdout"] == "one"
    assert memory.files(Sandbox.objects.get().ref)["/workspace/bin/ping"].mode == 0o755
    later = ada.post(f"{lease_url}/snapshots").json()
    listed = {row["id"]: row["omitted"] for row in ada.get(f"{lease_url}/snapshots").json()["results"]}
    assert listed.pop(later["id"]) == []
    assert [*listed.values()] == [taken["omitted"]] * 3  # on request, at the eviction, and the restored copy


def test_snapshots_are_listed_a_page_at_a_time_and_after_the_end(ada: ApiClient, lease_url: str, lease) -> None:
    for body in (None, {"name": "b"}):
        assert ada.post(f"{lease_url}/snapshots", body).status_code == 201
    expire_lease(lease["id"])
    first = ada.get(f"{lease_url}/snapshots?limit=1").json()
    second = ada.get(first["next"]).json()
    assert [first["results"][0]["name"], second["results"][0]["name"], second["next"]] == ["b", "", None]


def test_a_repeated_request_takes_one_snapshot(ada: ApiClient, lease_url: str) -> None:
    first = ada.post(f"{lease_url}/snapshots", {"name": "a"}, idempotency_key="k1")
    again = ada.post(f"{lease_url}/snapshots", {"name": "a"}, idempotency_key="k1")
    assert (again.json(), again["Idempotent-Replayed"], Snapshot.objects.count()) == (first.json(), "true", 1)
    ada.put(f"{lease_url}/files/f", b"two")
    ada.post(f"{lease_url}/restore", {"snapshot_id": first.json()["id"]}, idempotency_key="k2")
    ada.put(f"{lease_url}/files/f", b"three")
    ada.post(f"{lease_url}/restore", {"snapshot_id": first.json()["id"]}, idempotency_key="k2")
    assert ada.get(f"{lease_url}/files/f").content == b"three"


def test_a_restore_while_something_runs_is_busy(ada: ApiClient, lease_url: str, memory: MemoryProvider) -> None:
    pk = ada.post(f"{lease_url}/snapshots").json()["id"]
    responses: list[Any] = []
    memory.before("exec", lambda ref: responses.append(ada.post(f"{lease_url}/restore", {"snapshot_id": pk})))
    ada.post(f"{lease_url}/exec", {"argv": ["true"]})
    (response,) = responses
    assert (response.status_code, response.json()["code"]) == (409, "busy")


# --- forks --------------------------------------------------------------------------------------------------------


def test_a_fork_is_a_lease_with_the_same_files(ada: ApiClient, lease_url: str, lease) -> None:
    response = ada.post(f"{lease_url}/fork", {"environment_id": "fork-1", "ttl_seconds": 600, "sleep_after": "30s"})
    fork = response.json()
    assert (response.status_code, fork["is_new"], fork["agent_did"], fork["environment_type"]) == (201, True, ADA, "catan")
    assert (fork["ttl_seconds"], fork["sleep_after"], fork["sandbox"]) == (600, 30, None)
    assert ada.post(f"leases/{fork['id']}/exec", {"argv": ["cat", "f"]}).json()["stdout"] == "one"
    assert Lease.objects.get(pk=fork["id"]).pool == Lease.objects.get(pk=lease["id"]).pool
    again = ada.post(f"{lease_url}/fork", {"environment_id": "fork-1"})
    assert (again.status_code, again.json()["id"], again.json()["is_new"]) == (200, fork["id"], False)


def test_a_fork_from_a_named_snapshot_of_an_ended_lease(ada: ApiClient, lease_url: str, lease) -> None:
    pk = ada.post(f"{lease_url}/snapshots").json()["id"]
    ada.put(f"{lease_url}/files/f", b"two")
    expire_lease(lease["id"])
    response = ada.post(f"{lease_url}/fork", {"environment_id": "game-1", "snapshot_id": pk})
    assert response.status_code == 201
    assert ada.get(f"leases/{response.json()['id']}/files/f").content == b"one"


def test_a_fork_into_a_held_environment_is_a_conflict(ada: ApiClient, lease_url: str, acquire_body) -> None:
    ada.post("leases", acquire_body(environment_id="fork-1"))
    for environment in ("fork-1", "game-1"):
        assert_refused(ada, "POST", f"{lease_url}/fork", {"environment_id": environment}, 409, "environment_id")


def test_a_fork_for_another_agent_needs_a_key_of_both(ada: ApiClient, bob: ApiClient, issue, lease_url: str, pool) -> None:
    body = {"environment_id": "fork-1", "agent_did": BOB, "environment_type": "rpg", "pool": pool.name}
    assert_refused(ada, "POST", f"{lease_url}/fork", body, 403)
    assert_refused(bob, "POST", f"{lease_url}/fork", body, 404)
    fork = issue(ADA, BOB).post(f"{lease_url}/fork", body).json()
    assert (fork["agent_did"], fork["environment_type"]) == (BOB, "rpg")


def test_a_fork_counts_as_a_new_lease(ada: ApiClient, lease_url: str) -> None:
    AgentKey.objects.update(tokens=-1000)
    assert ada.post(f"{lease_url}/fork", {"environment_id": "fork-1"}).status_code == 429
    assert (Lease.objects.count(), Snapshot.objects.filter(kind="forked").count()) == (1, 0)


# --- bad input ----------------------------------------------------------------------------------------------------


def test_unknown_snapshots_are_not_found(ada: ApiClient, bob: ApiClient, lease_url: str, acquire_body) -> None:
    other = bob.post("leases", acquire_body(agent_did=BOB)).json()["id"]
    bob.put(f"leases/{other}/files/f", b"bob's")
    other_snapshot = bob.post(f"leases/{other}/snapshots").json()["id"]
    for pk in (other_snapshot, str(uuid.uuid4())):
        assert_refused(ada, "POST", f"{lease_url}/restore", {"snapshot_id": pk}, 404, "snapshot_id")
        assert_refused(ada, "POST", f"{lease_url}/fork", {"environment_id": "fork-1", "snapshot_id": pk}, 404, "snapshot_id")


def test_a_fork_of_an_unknown_type_or_pool_names_the_field(ada: ApiClient, lease_url: str) -> None:
    pk = ada.post(f"{lease_url}/snapshots").json()["id"]
    for field, value in (("environment_type", "chess"), ("pool", "no-such-pool")):
        body = {"environment_id": "fork-1", "snapshot_id": pk, field: value}
        assert_refused(ada, "POST", f"{lease_url}/fork", body, 400, field)
