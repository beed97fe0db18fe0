"""A POST with an Idempotency-Key acts once."""

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import F
from django.utils import timezone

from billing.models import Budget, BudgetTopUp
from leases import api_keys, sweeps
from leases.api.base import idempotency
from leases.models import AgentKey, IdempotentRequest, Lease
from leases.queue.models import QueuedRun
from sandboxes import processes
from sandboxes.models import Run, RunOutcome, Sandbox
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import operations, workspace_limit
from sandboxes.state import data_sync
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import passes
from tests.api.conftest import ApiClient, select_fields
from tests.support.billing import create_budget
from tests.support.outages import LostAnswer, injected

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]


def advance_time(time: timedelta) -> None:
    """Move the times of all stored requests and runs back."""
    for model, columns in {
        IdempotentRequest: ("started_at", "deadline_at", "expires_at"), Run: ("started_at", "deadline_at", "ended_at")
    }.items():  # fmt: skip
        model.objects.update(**{name: F(name) - time for name in columns})


@pytest.fixture
def run_path(lease) -> str:
    return f"leases/{lease['id']}/exec"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("leases", {"environment_id": "game-2"}), ("leases/{id}/renew", None), ("leases/{id}/release", None),
        ("leases/{id}/exec", {"argv": ["echo", "hi"]}), ("leases/{id}/turns", {"turn_number": 1, "state": {}}),
        ("environments/game-1/conditions", {"condition": "game.finished"}), ("environments/game-1/join", {"sleep_after": 60}),
        ("leases/{id}/processes", {"argv": ["sleep", "300"]}), ("leases/{id}/chat", {"role": "user", "content": "Hello"}),
        ("leases/{id}/audit", {"action": "file.deleted"}),
    ],
)  # fmt: skip
def test_every_post_accepts_an_idempotency_key(ada: ApiClient, lease, acquire_body, path: str, body) -> None:
    url = path.format(**lease)
    body = body and select_fields("POST", url, acquire_body()) | body
    first, again = (ada.post(url, body, idempotency_key="k1") for _ in range(2))
    assert first.status_code == (201 if path.endswith(("leases", "processes", "chat", "audit")) else 200)
    assert (again.status_code, again.content, again["Idempotent-Replayed"]) == (first.status_code, first.content, "true")
    assert "Idempotent-Replayed" not in first.headers


def test_exec_runs_once_and_is_replayed_after_the_lease_has_ended(ada: ApiClient, lease, run_path: str) -> None:
    first = ada.post(run_path, {"argv": ["echo", "hi"]}, idempotency_key="k1")
    ada.post(f"leases/{lease['id']}/release")
    again = ada.post(run_path, {"argv": ["echo", "hi"]}, idempotency_key="k1")
    assert again.json() == first.json()
    assert Run.objects.count() == 1


@pytest.mark.parametrize("change", ["body", "query", "path"])
def test_another_request_with_the_same_key_is_refused(ada: ApiClient, lease, run_path: str, change: str) -> None:
    ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    path = {"query": f"{run_path}?encoding=base64", "path": f"leases/{lease['id']}/renew"}.get(change, run_path)
    body = {} if change == "path" else {"argv": ["false" if change == "body" else "true"]}
    response = ada.post(path, body, idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (409, "idempotency_key_reused")


def test_an_idempotency_key_belongs_to_its_key_holder(operator: ApiClient, issue, acquire_body) -> None:
    first = operator.post("leases", acquire_body(), idempotency_key="k1")
    other = issue(operator=True).post("leases", acquire_body(), idempotency_key="k1")
    assert (first.status_code, other.status_code) == (201, 200)
    assert "Idempotent-Replayed" not in other.headers


def test_a_concurrent_repetition_is_told_to_wait(ada: ApiClient, lease, run_path: str, at_checkpoint) -> None:
    seen = []
    at_checkpoint("key claimed", lambda: seen.append(ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")))
    assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code == 200
    assert (seen[0].status_code, seen[0].json()["code"]) == (409, "idempotency_in_progress")
    assert int(seen[0]["Retry-After"]) > 0
    assert Run.objects.count() == 1


def test_a_refused_request_frees_the_key(ada: ApiClient, acquire_body) -> None:
    assert ada.post("leases", acquire_body(environment_type="chess"), idempotency_key="k1").status_code == 400
    assert ada.post(f"leases/{uuid.uuid4()}/renew", idempotency_key="k1").status_code == 404
    assert not IdempotentRequest.objects.exists()
    assert ada.post("leases", acquire_body(), idempotency_key="k1").status_code == 201


def test_a_stored_response_expires(ada: ApiClient, lease, run_path: str, settings) -> None:
    ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    advance_time(settings.IDEMPOTENCY_TTL)
    assert "Idempotent-Replayed" not in ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").headers
    assert Run.objects.count() == 2


@pytest.mark.parametrize("step", ["key claimed", "acted"])
def test_a_repeatable_request_of_a_dead_process_is_taken_over(ada: ApiClient, acquire_body, crash_at, step: str) -> None:
    with crash_at(step):
        ada.post("leases", acquire_body(), idempotency_key="k1")
    waiting = ada.post("leases", acquire_body(), idempotency_key="k1")
    assert (waiting.status_code, waiting.json()["code"]) == (409, "idempotency_in_progress")
    advance_time(timedelta(minutes=2))
    assert ada.post("leases", acquire_body(), idempotency_key="k1").status_code == (201 if step == "key claimed" else 200)
    assert Lease.objects.count() == 1
    assert ada.post("leases", acquire_body(), idempotency_key="k1")["Idempotent-Replayed"] == "true"


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("failover")
@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("runs", {"queued": True, "agent_did": "did:plc:ada", "argv": ["true"]}, QueuedRun),
        ("budgets", {"scope": "agent", "subject": "did:plc:ada", "unit": "usd", "period": "month", "amount": "10"}, Budget),
        ("budgets/{budget}/top-ups", {"amount": "2.5"}, BudgetTopUp),
        ("leases", {"environment_id": "game-2"}, Lease),
    ],
)  # fmt: skip
def test_a_request_whose_commit_was_not_answered_acts_once(
    operator: ApiClient, acquire_body, lease, path: str, body, model
) -> None:
    """The row may be committed when the connection ends: the repeated request finds it by the id that the key gives it."""
    budget = create_budget(10, scope="agent", subject="did:plc:eve", now=timezone.now())
    url, existing = path.format(budget=budget.pk), model.objects.count()
    body = acquire_body() | body if path == "leases" else body
    with injected(LostAnswer(lambda: model.objects.count() > existing)) as lost:
        first = operator.post(url, body, idempotency_key="k1")
    assert (first.status_code, lost.has_begun) == (503, True), first.content
    again = operator.post(url, body, idempotency_key="k1")
    assert again.status_code in (200, 201, 202), again.content
    assert model.objects.count() == existing + 1


@pytest.mark.parametrize("step", ["key claimed", "reserved", "created", "prepared", "acted"])
def test_a_join_whose_answer_was_lost_returns_the_only_lease_when_it_is_repeated(
    ada: ApiClient, join_body, memory, crash_at, step: str
) -> None:
    with crash_at(step):
        ada.post("environments/game-1/join", join_body(), idempotency_key="k1")
    assert ada.post("environments/game-1/join", join_body(), idempotency_key="k1").json()["code"] == "idempotency_in_progress"
    advance_time(timedelta(minutes=10))
    passes.recover_stalled(now=timezone.now() + timedelta(minutes=10))
    again = ada.post("environments/game-1/join", join_body(), idempotency_key="k1")
    active = ada.get("leases?status=active").json()["results"]
    assert (again.status_code, [lease["id"] for lease in active]) == (
        201 if step == "key claimed" else 200,
        [again.json()["id"]],
    )


def drop_result(memory: MemoryProvider) -> None:
    memory.drop_results(Sandbox.objects.get().ref)


@pytest.mark.parametrize("step", ["key claimed", "run opened", "run answered"])
def test_exec_of_a_dead_process_is_never_repeated(ada: ApiClient, run_path: str, memory, crash_at, step: str) -> None:
    with crash_at(step):
        ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    if step == "run answered":
        drop_result(memory)
    advance_time(timedelta(hours=1))
    response = ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (409, "outcome_unknown")
    assert [response.json().get("run_id")] == ([str(run.pk) for run in Run.objects.all()] or [None])


@pytest.mark.parametrize("has_first_digest", [True, False])  # False: the key is of a version before the column
def test_an_interrupted_exec_keeps_its_run_across_a_rotation_of_the_key(
    ada: ApiClient, run_path: str, memory, crash_at, has_first_digest: bool
) -> None:
    if not has_first_digest:
        AgentKey.objects.update(first_digest="")
    with crash_at("run answered"):
        ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    drop_result(memory)
    advance_time(timedelta(hours=1))
    rotated = ApiClient(api_keys.rotate_key(AgentKey.objects.get().pk, now=timezone.now()))
    response = rotated.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    assert (response.json()["code"], response.json()["run_id"]) == ("outcome_unknown", str(Run.objects.get().pk))


def test_exec_whose_run_is_lost_is_answered_before_its_deadline(ada: ApiClient, run_path: str, crash_at) -> None:
    with crash_at("run opened"):
        ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").json()["code"] == "idempotency_in_progress"
    run = Run.objects.get()
    operations.close_run(run, now=run.started_at + timedelta(seconds=11), outcome=RunOutcome.LOST)
    response = ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (409, "outcome_unknown")
    problem = response.json()
    assert (problem["run_id"], problem["outcome"], problem.get("exit_code")) == (str(run.pk), "lost", None)
    assert "Retry-After" not in response.headers


def test_exec_whose_process_died_after_its_run_ended_is_answered_with_its_result(ada: ApiClient, run_path, crash_at) -> None:
    body = {"argv": ["sh", "-c", "echo out; echo err >&2; exit 3"]}
    with crash_at("acted"):
        ada.post(run_path, body, idempotency_key="k1")
    response = ada.post(run_path, body, idempotency_key="k1")
    expected = ada.post(run_path, body).json()
    assert (response.status_code, response.headers["Idempotent-Replayed"]) == (200, "true")
    differing = {"run_id", "duration_seconds"}
    assert {name: value for name, value in response.json().items() if name not in differing} == {
        name: value for name, value in expected.items() if name not in differing
    }
    assert response.json()["run_id"] == str(Run.objects.earliest("started_at").pk)


def test_abandoned_exec_is_answered_with_the_result_that_the_sandbox_retained(ada: ApiClient, run_path, crash_at) -> None:
    with crash_at("run answered"):
        ada.post(run_path, {"argv": ["echo", "hello"]}, idempotency_key="k1")
    assert ada.post(run_path, {"argv": ["echo", "hello"]}, idempotency_key="k1").json()["code"] == "idempotency_in_progress"
    passes.recover_stalled(now=timezone.now() + timedelta(hours=1))
    response = ada.post(run_path, {"argv": ["echo", "hello"]}, idempotency_key="k1")
    assert (response.status_code, response.json()["stdout"]) == (200, "hello\n")


def test_exec_with_output_that_is_not_stored_is_answered_with_its_exit_code(ada, run_path, crash_at, settings) -> None:
    settings.RUN_OUTPUT_KEPT = 0
    with crash_at("acted"):
        ada.post(run_path, {"argv": ["sh", "-c", "echo x; exit 1"]}, idempotency_key="k1")
    again = ada.post(run_path, {"argv": ["sh", "-c", "echo x; exit 1"]}, idempotency_key="k1")
    assert again.json()["code"] == "idempotency_in_progress"
    advance_time(timedelta(hours=1))
    problem = ada.post(run_path, {"argv": ["sh", "-c", "echo x; exit 1"]}, idempotency_key="k1").json()
    assert (problem["code"], problem["outcome"], problem["exit_code"]) == ("outcome_unknown", "failed", 1)


@pytest.mark.parametrize("step", ["key claimed", "run opened"])
def test_exec_of_a_dead_instance_is_answered_once_it_has_no_open_run(
    ada: ApiClient, run_path, crash_at, settings, step
) -> None:
    settings.INSTANCE = "up-a.web"
    with crash_at(step):
        ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    assert sweeps.release_instance("up-a", now=timezone.now())
    if step == "run opened":  # its command may be running
        assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").json()["code"] == "idempotency_in_progress"
        passes.recover_stalled(now=timezone.now())
    response = ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (409, "outcome_unknown")


def test_exec_with_unknown_outcome_is_not_repeated(ada: ApiClient, run_path: str, memory: MemoryProvider) -> None:
    memory.fail("exec", Unavailable("timed out"), times=1)
    assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code == 503
    response = ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (409, "outcome_unknown")
    assert response.json()["run_id"] == str(Run.objects.get().pk)


@pytest.mark.django_db(transaction=True)
def test_key_of_a_failed_exec_is_freed_after_a_failover(ada: ApiClient, run_path: str, memory, failover) -> None:
    failover(idempotency, "_record_failure")
    memory.fail("create", Unavailable("no engine"), times=1)
    assert [ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code for _ in range(2)] == [503, 200]


@pytest.mark.django_db(transaction=True)
def test_exec_whose_connection_is_lost_while_the_command_runs_is_answered_with_its_result(
    ada: ApiClient, run_path: str, memory
) -> None:
    def lose_connection(ref: str) -> None:
        raise OperationalError("terminating connection due to administrator command")

    with memory.after("exec", lose_connection):
        response = ada.post(run_path, {"argv": ["echo", "hello"]}, idempotency_key="k1")
    assert (response.status_code, response.json()["retryable"]) == (503, True)
    response = ada.post(run_path, {"argv": ["echo", "hello"]}, idempotency_key="k1")
    assert (response.status_code, response.json()["stdout"]) == (200, "hello\n")
    assert len([verb for verb, _ in memory.calls if verb == "exec"]) == 1


@pytest.mark.django_db(transaction=True)
def test_exec_whose_workspace_cannot_be_measured_for_a_lost_connection_is_answered(
    ada: ApiClient, run_path: str, memory, failover
) -> None:
    ada.post(run_path, {"argv": ["true"]})
    Sandbox.objects.update(created_at=F("created_at") - timedelta(minutes=1), measured_at=None)
    calls = failover(workspace_limit, "measure_workspace")
    response = ada.post(run_path, {"argv": ["echo", "hello"]}, idempotency_key="k1")
    assert (len(calls), response.status_code, response.json()["stdout"]) == (1, 200, "hello\n")


def test_exec_that_never_started_can_be_sent_again(ada: ApiClient, run_path: str, memory: MemoryProvider) -> None:
    memory.fail("create", Unavailable("no engine"), times=1)
    assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code == 503
    memory.fail("exec", Rejected("no"), times=1)
    assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code == 400
    assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code == 200


def test_exec_whose_data_was_not_attached_can_be_sent_again(ada: ApiClient, run_path: str, monkeypatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise StoreError("memory", "download", "timed out")

    with monkeypatch.context() as patch:
        patch.setattr(data_sync, "attach", fail)
        assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code == 503
    assert ada.post(run_path, {"argv": ["true"]}, idempotency_key="k1").status_code == 200


def test_a_late_process_does_not_overwrite_the_response_of_its_successor(ada: ApiClient, acquire_body, at_checkpoint) -> None:
    def take_over() -> None:
        advance_time(timedelta(minutes=2))
        assert ada.post("leases", acquire_body(), idempotency_key="k1").status_code == 200

    at_checkpoint("acted", take_over)
    assert ada.post("leases", acquire_body(), idempotency_key="k1").status_code == 201
    assert IdempotentRequest.objects.get().status_code == 200


def test_start_that_waits_for_output_is_in_progress_until_its_deadline(ada: ApiClient, lease, monkeypatch) -> None:
    """The run of a process start ends with the start, and the request may wait for the output for minutes after that."""
    path, body = f"leases/{lease['id']}/processes", {"argv": ["sleep", "300"], "wait_for": "ready", "wait_seconds": 300}
    answers: list[Any] = []

    def repeat(*args: Any, **options: Any) -> bool:
        for minutes in (0, 2, 2):
            advance_time(timedelta(minutes=minutes))
            answers.append(ada.post(path, body, idempotency_key="k1").json()["code"])
        return True

    monkeypatch.setattr(processes, "wait_for_log", repeat)
    response = ada.post(path, body, idempotency_key="k1")
    assert (answers, response.status_code) == (["idempotency_in_progress"] * 3, 201)
