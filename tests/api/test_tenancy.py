"""Every operation of the API against callers without a right to what it names.

The victim is an agent with a lease in an environment with a private coding task. The operations come from the OpenAPI document:
one without an entry in EXPECTED fails the test. Each request is valid otherwise, and names the victim's lease, environment and
agent, or the caller's own agent where that may be a way in."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from leases import api_keys, leasing
from leases.coding import repositories
from leases.environments import lifecycle
from leases.models import AgentKey, CatalogAgent, Environment, EnvironmentType, KeyScope, Lease, Participant
from leases.projects import registry
from sandboxes.models import Pool
from tests.api.conftest import ANY_BODY, PATH_PARAMETERS, ApiClient, close_response, load_openapi, select_fields
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db
EVE = "did:plc:eve"
TASK = "task-1"
QUERIES = {
    "environments_get_position": "?agent_did={did}", "estimate_get": "?agents=1", "estimate_comparison_get": "?agents=1",
}  # fmt: skip
COSTS_PATHS = ("costs", "estimate", "forecast", "statements", "budgets", "model-rates")


# Status for strangers, and for the agent after the end of its lease and environment -> operations. Without a key and with a
# revoked key every operation is 401, and with a key of other scopes 403.
EXPECTED_NAMES = {
    (200, 200): (
        "leases_list leases_renew_many environments_list runs_create queued_runs_list queued_runs_interrupt_all "
        "runs_stats agent_catalog_list events_stream budgets_list pool_get templates_list agents_list costs_get "
        "estimate_get estimate_comparison_get forecast_get "
    ),
    (404, 409): ("leases_acquire environments_join "),
    (404, 200): (
        "leases_get leases_timeline_list leases_release leases_turns_list leases_runs_list leases_agent_runs_list "
        "leases_processes_list leases_shells_list leases_snapshots_list leases_chat_list leases_artifacts_list "
        "leases_audit_list leases_sessions_list leases_calls_list leases_calls_totals leases_connections_list "
        "leases_records_list environments_get environments_post_condition environments_get_coding_task agents_get "
    ),
    (404, 410): (
        "leases_renew leases_exec leases_exec_stream leases_take_turn leases_agent_runs_create leases_restart "
        "leases_processes_start leases_terminals_open leases_terminals_url leases_previews_create leases_check_out "
        "leases_submit leases_shells_create leases_shells_delete leases_files_list leases_files_mkdir leases_files_move "
        "leases_files_urls leases_files_watch leases_files_get leases_files_put leases_files_delete leases_archive_get "
        "leases_archive_put leases_snapshots_create leases_restore leases_chat_append leases_artifacts_put "
        "leases_artifacts_delete leases_audit_append leases_sessions_put leases_service_token "
    ),
    (404, 404): (
        "leases_runs_get leases_runs_stream leases_agent_runs_get leases_agent_runs_interrupt leases_agent_runs_stream "
        "leases_processes_get leases_processes_kill leases_processes_logs leases_processes_wait leases_processes_signal "
        "leases_processes_stdin leases_shells_get leases_fork leases_chat_get leases_artifacts_get leases_audit_get "
        "leases_sessions_get environments_get_position environments_post_event queued_runs_get queued_runs_interrupt "
        "agent_catalog_get agent_catalog_run runs_get templates_get budgets_get "
    ),
    (404, 403): ("leases_calls_limits_update "),
    (403, 403): (
        "agents_stop environments_stop stop environments_create environments_update environments_start environments_end "
        "environments_add_participants "
        "environments_remove_participant environments_create_coding_task environments_create_secret inventory_list "
        "inventory_get inventory_destroy inventory_adopt templates_create templates_delete agents_create statements_list "
        "statements_get statements_export_focus model_rates_list model_rates_create budgets_create budgets_update "
        "budgets_delete budgets_list_top_ups budgets_top_up "
    ),
}
EXPECTED = {name: statuses for statuses, names in EXPECTED_NAMES.items() for name in names.split()}
NEEDS_TRANSACTIONS = {"leases_exec_stream"}  # waits for threads: tests/api/sandbox/test_streams.py
SECRETS = (ADA, TASK, "Secret plan", "private")  # in no answer to a stranger, whose own names are others


@dataclass(frozen=True)
class Operation:
    """Operation of the OpenAPI document that needs an API key."""

    name: str
    method: str
    path: str  # relative to /api/v1/, with the placeholders of the document


def list_operations() -> list[Operation]:
    return [
        Operation(operation["operationId"], method.upper(), path.removeprefix("/api/v1/"))
        for path, methods in load_openapi()["paths"].items()
        for method, operation in methods.items()
        if operation["security"] == [{"key": []}]
    ]


@pytest.fixture
def victim(operator: ApiClient, ada: ApiClient, issue: Callable[..., ApiClient], pool: Pool, tmp_path: Path) -> Lease:
    """Lease of ADA in TASK. BOB has joined an environment of the same project, EVE one of another project."""
    registry.create("acme", now=timezone.now())
    repositories.save("private", clone_url=str(tmp_path), now=timezone.now())
    operator.post(f"environments/{TASK}/coding-task", {"repository": "private", "title": "Secret plan", "agents": [ADA]})
    body = {"environment_type": "coding", "pool": pool.name}
    assert ada.post("leases", body | {"agent_did": ADA, "environment_id": TASK}).status_code == 201
    return Lease.objects.get()


def send(client: ApiClient, operation: Operation, lease: Lease, pool: Pool, did: str) -> Any:
    parameters = PATH_PARAMETERS | {"environment_id": TASK}
    path = operation.path.format(**parameters).format(id=lease.pk)
    own = {
        "agent_did": did, "environment_id": TASK, "environment_type": "coding", "pool": pool.name, "repository": "private",
        "ids": [str(lease.pk)], "project": "default",
    }  # fmt: skip
    query = QUERIES.get(operation.name, "").format(did=did)
    body: Any = None
    if operation.method == "PUT" and operation.name != "leases_sessions_put":
        body = b"x"
    elif operation.method not in ("GET", "DELETE"):
        body = select_fields(operation.method, path, ANY_BODY | own)
    response = client(operation.method, f"{path}{query}", body)
    close_response(response)
    return response


def join(issue: Callable[..., ApiClient], pool: Pool, did: str, **fields: Any) -> ApiClient:
    """Return the client of an agent that has joined an environment of its own."""
    client = issue(did, **fields)
    body = {"environment_type": "coding", "pool": pool.name, "agent_did": did, "environment_id": f"{did[-3:]}-1"}
    assert client.post("leases", body).status_code == 201
    return client


def test_every_operation_has_its_entry() -> None:
    assert EXPECTED.keys() == {operation.name for operation in list_operations()}


@pytest.mark.parametrize(("did", "project"), [(BOB, "default"), (EVE, "acme")], ids=["not admitted", "other project"])
def test_stranger_who_has_joined_something_reaches_nothing_of_another_agent(
    victim: Lease, issue: Callable[..., ApiClient], pool: Pool, did: str, project: str
) -> None:
    client = join(issue, pool, did, project=project)
    for operation in list_operations():
        response = send(client, operation, victim, pool, did)
        assert response.status_code == EXPECTED[operation.name][0], operation
        if not response.streaming:
            assert not [secret for secret in SECRETS if secret.encode() in response.content], (operation, response.content)
    assert leasing.require_active(victim.pk, now=timezone.now()).expires_at == victim.expires_at
    environment = Environment.objects.get(pk=TASK)
    assert (environment.ended_at, environment.phase, environment.outcome) == (None, "", None)
    assert [row.agent_did for row in environment.participants.all()] == [ADA]


def test_agent_whose_environment_has_ended_reads_its_past_and_changes_nothing(
    victim: Lease, ada: ApiClient, pool: Pool
) -> None:
    lifecycle.end(TASK, outcome="draw", now=timezone.now())
    for operation in list_operations():
        if operation.name not in NEEDS_TRANSACTIONS:
            response = send(ada, operation, victim, pool, ADA)
            assert response.status_code == EXPECTED[operation.name][1], (operation, response.content)
    environment = Environment.objects.get(pk=TASK)
    assert environment.ended_at and environment.outcome == "draw"
    assert not Lease.objects.filter(environment_id=TASK, status="active").exists()


def test_key_without_the_scope_or_revoked_is_refused_by_every_operation(
    victim: Lease, issue: Callable[..., ApiClient], pool: Pool
) -> None:
    leases, costs, revoked = (issue(ADA, scopes=[scope]) for scope in (KeyScope.LEASES, KeyScope.COSTS, KeyScope.LEASES))
    api_keys.revoke_key(AgentKey.objects.order_by("-pk")[0], now=timezone.now())
    for operation in list_operations():
        narrowed = leases if operation.path.split("/")[0] in COSTS_PATHS else costs
        for client, status in ((ApiClient(), 401), (revoked, 401), (narrowed, 403)):
            assert send(client, operation, victim, pool, ADA).status_code == status, operation


@pytest.mark.parametrize(("did", "project"), [(BOB, "default"), (EVE, "acme")], ids=["not admitted", "other project"])
@pytest.mark.parametrize("environment_type", ["coding", "run", "catan"])
def test_every_way_into_an_environment_is_closed(
    victim: Lease, issue: Callable[..., ApiClient], pool: Pool, did: str, project: str, environment_type: str
) -> None:
    client = join(issue, pool, did, project=project)
    own = Lease.objects.get(agent_did=did)
    assert client.post(f"leases/{own.pk}/exec", {"argv": ["true"]}).status_code == 200  # leaves a workspace to fork
    CatalogAgent.objects.create(
        name="fixer", cli="codex", model="m", environment_type=EnvironmentType.objects.get(name=environment_type)
    )
    body = {"agent_did": did, "environment_type": environment_type, "pool": pool.name}
    ways = [
        ("leases", body | {"environment_id": TASK}),
        (f"environments/{TASK}/join", body),
        (f"leases/{own.pk}/fork", {"environment_id": TASK}),
        ("agent-catalog/sandbox:fixer/runs", {"agent_did": did, "environment_id": TASK, "prompt": "x"}),
    ]
    for path, content in ways:
        response = client.post(path, content)
        assert (response.status_code, response.json()["code"]) == (404, "environment_not_found"), path
    assert not Lease.objects.filter(agent_did=did, environment_id=TASK).exists()
    assert not Participant.objects.filter(agent_did=did, environment=TASK).exists()
