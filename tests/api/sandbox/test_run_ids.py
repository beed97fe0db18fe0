"""Runs whose id the caller chooses: executed once, and nothing for strangers."""

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections
from django.db.models import F

from leases.api import command_threads
from leases.models import AgentRun, IdempotentRequest, Lease, QueuedRun
from sandboxes.errors import RunExists
from sandboxes.models import Pool, Run
from sandboxes.providers.errors import Rejected, Unavailable
from tests.api.conftest import ADA, BOB, ApiClient, assert_refused

pytestmark = pytest.mark.django_db(transaction=True)
RUN_ID = "0b7f6f62-6f0e-4f7a-9d7c-2f1f0d9c8a11"
AGENT = {"cli": "program", "argv": ["cat"], "prompt": "secret"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    command_threads.join_all()
    connections.close_all()


@pytest.fixture
def bobs_lease(bob: ApiClient, acquire_body: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    granted: dict[str, Any] = bob.post("leases", acquire_body(agent_did=BOB, environment_id="game-2")).json()
    return granted


def count_rows() -> dict[str, int]:
    return {model.__name__: model.objects.count() for model in (Run, AgentRun, QueuedRun, Lease)}


def forget_responses() -> None:
    """Let the stored responses of all requests expire."""
    day = timedelta(days=2)
    IdempotentRequest.objects.update(expires_at=F("expires_at") - day, deadline_at=F("deadline_at") - day)


def find_body(path: str, agent: str, pool: Pool) -> dict[str, Any]:
    """Return a body that starts a run with RUN_ID and prints a secret."""
    if path.startswith("runs"):
        return {"agent_did": agent, "argv": ["echo", "secret"], "pool": pool.name, "queued": path == "runs queued"}
    return AGENT if path == "agent-runs" else {"argv": ["echo", "secret"]}


def start(client: ApiClient, path: str, lease: dict[str, Any], pool: Pool, **fields: Any) -> Any:
    agent = BOB if lease["agent_did"] == BOB else ADA
    url = "runs" if path.startswith("runs") else f"leases/{lease['id']}/{path}"
    response = client.post(url, find_body(path, agent, pool) | {"run_id": RUN_ID} | fields)
    if response.streaming:
        content = response.getvalue()
        response.close()
        return SimpleNamespace(status_code=response.status_code, content=content)
    return response


PATHS = ("exec", "exec/stream", "runs", "runs queued", "agent-runs")


def test_run_has_the_chosen_id_everywhere(ada: ApiClient, lease: dict[str, Any], pool: Pool) -> None:
    assert start(ada, "exec", lease, pool).json()["run_id"] == RUN_ID
    assert ada.get(f"leases/{lease['id']}/runs/{RUN_ID}").json()["stdout"] == "secret\n"
    other = str(uuid.uuid4())
    result = start(ada, "runs", lease, pool, run_id=other).json()
    assert (result["run_id"], result["lease_id"], ada.get(f"runs/{other}").json()["stdout"]) == (other, other, "secret\n")
    third = str(uuid.uuid4())
    assert start(ada, "runs queued", lease, pool, run_id=third).json()["queued_run_id"] == third
    fourth = str(uuid.uuid4())
    assert start(ada, "agent-runs", lease, pool, run_id=fourth).json()["run_id"] == fourth


@pytest.mark.parametrize("path", PATHS)
def test_repeated_id_returns_the_same_run_and_executes_nothing(
    ada: ApiClient, lease: dict[str, Any], pool: Pool, path: str
) -> None:
    first = start(ada, path, lease, pool)
    command_threads.join_all()
    rows = count_rows()
    again = start(ada, path, lease, pool)
    assert again.status_code == first.status_code
    assert again.content == first.content
    assert count_rows() == rows


@pytest.mark.parametrize("path", PATHS)
def test_repeated_id_executes_nothing_after_its_response_was_forgotten(
    ada: ApiClient, lease: dict[str, Any], pool: Pool, path: str
) -> None:
    first = start(ada, path, lease, pool)
    command_threads.join_all()
    forget_responses()
    rows = count_rows()
    again = start(ada, path, lease, pool)
    if path == "runs queued":
        assert (again.status_code, again.json()["code"]) == (409, "run_exists")
    elif path == "agent-runs":
        assert (again.status_code, again.json()["run_id"]) == (201, RUN_ID)
    else:
        assert (again.status_code, again.content.count(b"secret")) == (200, first.content.count(b"secret"))
    assert count_rows() == rows


def test_id_with_another_request_is_refused(ada: ApiClient, lease: dict[str, Any], pool: Pool) -> None:
    start(ada, "exec", lease, pool)
    response = start(ada, "exec", lease, pool, argv=["echo", "other"])
    assert (response.status_code, response.json()["code"]) == (409, "idempotency_key_reused")
    assert "run_id" in response.json()["detail"]
    assert start(ada, "agent-runs", lease, pool).status_code == 409
    assert count_rows()["Run"] == 1


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("taken_by", PATHS)
def test_id_of_a_strangers_run_tells_nothing(
    ada: ApiClient, bob: ApiClient, lease: dict[str, Any], bobs_lease: dict[str, Any], pool: Pool, taken_by: str,
    is_stored: bool,
) -> None:  # fmt: skip
    """However a stranger asks, and however often: the same refusal, without output, outcome or owner."""
    start(ada, taken_by, lease, pool)
    command_threads.join_all()
    if not is_stored:
        forget_responses()
    rows = count_rows()
    answers = [start(bob, path, bobs_lease, pool) for path in (*PATHS, *PATHS)]
    assert {response.status_code for response in answers} == {409}
    problems = {json.dumps({**response.json(), "operation": ""}) for response in answers}
    assert len(problems) == 1
    [problem] = map(json.loads, problems)
    assert (problem["code"], problem["detail"]) == ("run_exists", RunExists().detail)
    assert not problem.keys() & {"run_id", "outcome", "exit_code", "lease_id"}
    assert count_rows() == rows


@pytest.mark.parametrize(("path", "step"), [("exec", "sandbox ready"), ("agent-runs", "key claimed")])
def test_id_that_a_stranger_takes_first_is_refused_by_the_run_itself(
    ada: ApiClient,
    bob: ApiClient,
    lease: dict[str, Any],
    bobs_lease: dict[str, Any],
    pool: Pool,
    at_checkpoint,
    path: str,
    step: str,
) -> None:
    """The stranger's run is opened between the check of the id and the run of the first caller."""

    def take() -> None:
        IdempotentRequest.objects.filter(run_id=RUN_ID).update(run_id=None)  # as if the first caller had not reserved the id
        assert start(ada, "exec", lease, pool).status_code == 200

    at_checkpoint(step, take)
    response = start(bob, path, bobs_lease, pool)
    assert (response.status_code, response.json()["code"]) == (409, "run_exists")
    assert b"secret" not in response.content
    assert [str(run.holder) for run in Run.objects.filter(pk=RUN_ID)] == [lease["id"]]
    assert not AgentRun.objects.exists()
    assert b"secret" not in start(bob, path, bobs_lease, pool).content


def test_id_of_a_request_that_opened_no_run_can_be_used_again(
    ada: ApiClient, lease: dict[str, Any], pool: Pool, memory
) -> None:
    memory.fail("create", Unavailable("no engine"), times=1)
    assert start(ada, "exec", lease, pool).status_code == 503
    assert start(ada, "exec", lease, pool).status_code == 200


def test_run_that_ended_before_its_command_is_not_repeated(ada: ApiClient, lease: dict[str, Any], pool: Pool, memory) -> None:
    memory.fail("exec", Rejected("bad program"), times=1)
    assert start(ada, "exec", lease, pool).status_code == 400
    response = start(ada, "exec", lease, pool)
    assert (response.status_code, response.json()["code"], response.json()["run_id"]) == (409, "run_exists", RUN_ID)
    assert "before its command began" in response.json()["detail"] and "bad program" in response.json()["detail"]


@pytest.mark.parametrize("path", PATHS)
def test_id_that_is_no_random_uuid_is_refused_by_name(ada: ApiClient, lease: dict[str, Any], pool: Pool, path: str) -> None:
    url = "runs" if path.startswith("runs") else f"leases/{lease['id']}/{path}"
    by_name, by_time = uuid.uuid5(uuid.NAMESPACE_DNS, "task-123"), "6ba7b811-9dad-11d1-80b4-00c04fd430c8"
    for run_id in ("task-123", 7, "", str(uuid.UUID(int=0)), by_time, str(by_name)):
        assert_refused(ada, "POST", url, find_body(path, ADA, pool) | {"run_id": run_id}, 400, "run_id")
