"""Queued runs through the API."""

import uuid
from typing import Any

import pytest
from django.conf import LazySettings
from django.utils import timezone

from leases.models import QueuedRun
from leases.queue import attempts, queue, sealing
from sandboxes.models import Pool, Sandbox
from tests.api.conftest import ApiClient, assert_refused
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db
BODY = {"agent_did": ADA, "argv": ["sh", "-c", "echo out; echo err >&2; exit 3"], "queued": True}


@pytest.fixture(autouse=True)
def default_pool(pool: Pool) -> str:
    return pool.name


def add(client: ApiClient, pool: str, **fields: Any) -> dict[str, Any]:
    body = BODY | ({} if fields.get("lease_id") else {"pool": pool}) | fields
    response = client.post("runs", body)
    assert response.status_code == 202, response.content
    document: dict[str, Any] = response.json()
    return document


def work() -> None:
    while row := queue.claim("r1", now=timezone.now()):
        attempts.execute(row, now=timezone.now())


def test_queued_run_is_executed_later_in_the_sandbox_of_its_lease(ada: ApiClient, lease, default_pool: str) -> None:
    ada.post(f"leases/{lease['id']}/shells", {"name": "one", "env": {"TOKEN": "of-shell"}})
    argv = ["sh", "-c", "printenv TOKEN; cat"]
    queued = add(ada, default_pool, lease_id=lease["id"], shell="one", argv=argv, stdin="in", repeatable=True, priority=7)
    assert (queued["state"], queued["attempt"], queued["run_id"], queued["lease_id"]) == ("queued", 0, None, lease["id"])
    assert (queued["priority"], queued["repeatable"], queued["max_attempts"]) == (7, True, 3)
    work()
    row = ada.get(f"runs/queued/{queued['queued_run_id']}").json()
    assert (row["state"], row["attempt"], row["exit_code"], row["stdout"]) == ("completed", 1, 0, "of-shell\nin")
    assert ada.get(f"leases/{lease['id']}/runs/{row['run_id']}").json()["exit_code"] == 0


def test_queued_run_without_a_lease_has_the_result_of_a_one_shot_run(ada: ApiClient, default_pool: str) -> None:
    queued = add(ada, default_pool)
    work()
    row = ada.get(f"runs/queued/{queued['queued_run_id']}").json()
    assert (row["state"], row["exit_code"], row["stdout"], row["stderr"]) == ("failed", 3, "out\n", "err\n")
    assert row["error"] == {
        "code": "failed",
        "operation": "exec",
        "provider": "",
        "cause": "",
        "message": "Exit code 3.",
        "retryable": False,
    }
    assert ada.get(f"runs/{row['run_id']}").json()["outcome"] == "failed"


@pytest.mark.parametrize(("fields", "expected"), [({}, True), ({"llm_proxy": {"enabled": False}}, False)])
def test_queued_run_has_the_model_proxy_unless_it_was_queued_without(
    ada: ApiClient, default_pool: str, fields: dict[str, Any], expected: bool
) -> None:
    add(ada, default_pool, **fields)
    work()
    assert [*Sandbox.objects.values_list("llm_enabled", flat=True)] == [expected]


def test_agent_run_is_queued(ada: ApiClient, lease) -> None:
    url = f"leases/{lease['id']}/agent-runs"
    body = {"cli": "program", "argv": ["cat"], "prompt": "s3cret", "queued": True, "env": {"A": "b"}, "max_turns": 3}
    queued = ada.post(url, body)
    assert (queued.status_code, queued.json()["kind"]) == (202, "agent_run")
    row = QueuedRun.objects.get()
    assert row.request["policy"]["max_turns"] == 3
    assert "s3cret" not in str(row.request)
    assert sealing.open_secrets(row) == {"env": {"A": "b"}, "prompt": "s3cret"}
    assert_refused(ada, "POST", url, body | {"model": "m"}, 400, "model")


def test_runs_are_listed_by_state_and_lease_for_their_agent(ada: ApiClient, bob: ApiClient, lease, default_pool: str) -> None:
    first, second = add(ada, default_pool), add(ada, default_pool, lease_id=lease["id"])
    other = add(bob, default_pool, agent_did=BOB)

    def list_ids(client: ApiClient, query: str = "") -> list[str]:
        return [row["queued_run_id"] for row in client.get(f"runs/queued{query}").json()["results"]]

    assert list_ids(ada) == [second["queued_run_id"], first["queued_run_id"]]
    assert list_ids(ada, f"?lease_id={lease['id']}") == [second["queued_run_id"]]
    assert list_ids(bob, "?state=queued") == [other["queued_run_id"]]
    assert list_ids(bob, "?state=started") == []
    page = ada.get("runs/queued?limit=1").json()
    assert page["next"] and len(page["results"]) == 1
    assert_refused(ada, "GET", "runs/queued?state=none", None, 400, "state")
    assert_refused(ada, "GET", "runs/queued?lease_id=none", None, 400, "lease_id")
    assert ada.get(f"runs/queued/{other['queued_run_id']}").json()["code"] == "queued_run_not_found"
    assert ada.post(f"runs/queued/{other['queued_run_id']}/interrupt").status_code == 404


def test_runs_are_interrupted_one_by_one_and_by_a_filter(ada: ApiClient, bob: ApiClient, lease, default_pool: str) -> None:
    first = add(ada, default_pool)
    for _ in range(2):
        assert ada.post(f"runs/queued/{first['queued_run_id']}/interrupt").json()["state"] == "interrupted"
    add(ada, default_pool, lease_id=lease["id"])
    add(ada, default_pool)
    add(bob, default_pool, agent_did=BOB)
    assert ada.post("runs/queued/interrupt", {"agent_did": ADA, "lease_id": lease["id"]}).json() == {"interrupted": 1}
    assert ada.post("runs/queued/interrupt", {"agent_did": ADA, "states": ["started"]}).json() == {"interrupted": 0}
    assert ada.post("runs/queued/interrupt", {"agent_did": BOB}).status_code == 403
    assert ada.post("runs/queued/interrupt", {"agent_did": ADA}).json() == {"interrupted": 1}
    assert ada.get("runs/stats").json()["counts"]["interrupted"] == 3
    assert bob.get("runs/stats").json()["counts"]["queued"] == 1


def test_repeated_request_adds_one_run(ada: ApiClient, default_pool: str) -> None:
    ids = {ada.post("runs", BODY | {"pool": default_pool}, idempotency_key="k").json()["queued_run_id"] for _ in range(2)}
    assert len(ids) == QueuedRun.objects.count() == 1


def test_full_queue_is_a_429_with_a_time(ada: ApiClient, default_pool: str, settings: LazySettings) -> None:
    settings.QUEUE_MAX_PENDING_PER_AGENT = 1
    add(ada, default_pool)
    refused = ada.post("runs", BODY | {"pool": default_pool})
    assert (refused.status_code, refused.json()["code"], refused.headers["Retry-After"]) == (429, "too_many_queued_runs", "5")
    assert ada.get("runs/stats").json()["limits"]["pending_per_agent"] == 1


def test_all_work_is_stopped_with_an_operators_key(ada: ApiClient, operator: ApiClient, lease, default_pool: str) -> None:
    add(ada, default_pool, lease_id=lease["id"])
    zeros = {"queued_runs": 0, "agent_runs": 0, "commands": 0, "processes": 0, "leases": [], "failures": []}
    environment_id = lease["environment_id"]
    assert operator.post(f"agents/{BOB}/stop").status_code == 404
    assert operator.post(f"agents/{ADA}/stop", {}).json() == zeros | {"queued_runs": 1}
    add(ada, default_pool, lease_id=lease["id"])
    assert operator.post(f"environments/{environment_id}/stop", {"end_leases": False}).json() == zeros | {"queued_runs": 1}
    add(ada, default_pool)
    assert operator.post("stop", {"end_leases": True}).json() == zeros | {"queued_runs": 1, "leases": [lease["id"]]}
    assert operator.post("stop", {}).json() == zeros
    assert ada.get(f"leases/{lease['id']}").json()["end_reason"] == "operator"
    assert_refused(operator, "POST", "stop", {"leases": True}, 400, "leases")
    assert [ada.post(path, {}).status_code for path in ("stop", f"agents/{ADA}/stop")] == [403, 403]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"queued": False, "priority": 1}, "priority"),
        ({"queued": False, "lease_id": str(uuid.UUID(int=1))}, "lease_id"),
        ({"return_workspace": True}, "return_workspace"),
        ({"workspace": "AAAA"}, "workspace"),
        ({"max_attempts": 2}, "max_attempts"),
        ({"shell": "one"}, "shell"),
        ({"pool": "no-such-pool"}, "pool"),
        ({"lease_id": str(uuid.UUID(int=1)), "llm_proxy": {"enabled": False}}, "llm_proxy"),
    ],
)
def test_fields_that_do_not_fit_are_refused(ada: ApiClient, default_pool: str, fields: dict[str, Any], field: str) -> None:
    assert_refused(ada, "POST", "runs", BODY | ({} if "lease_id" in fields else {"pool": default_pool}) | fields, 400, field)
    assert not QueuedRun.objects.exists()


def test_lease_must_be_an_active_one_of_the_agent(ada: ApiClient, operator: ApiClient, lease, default_pool: str) -> None:
    body = BODY | {"lease_id": lease["id"]}
    assert_refused(operator, "POST", "runs", body | {"agent_did": BOB}, 400, "lease_id")
    assert_refused(ada, "POST", "runs", body | {"pool": default_pool}, 400, "pool")
    assert_refused(ada, "POST", "runs", body | {"limits": {"memory_mib": 64}}, 400, "limits.memory_mib")
    assert ada.post("runs", body | {"lease_id": str(uuid.uuid4())}).status_code == 404
    ada.post(f"leases/{lease['id']}/release")
    assert_refused(ada, "POST", "runs", body, 410)
