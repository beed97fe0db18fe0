"""Leases that an operator grants, and environments that an operator creates, in the console."""

from collections.abc import Callable

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.test import Client

from leases import leasing
from leases.environments import lifecycle
from leases.environments.lifecycle import NewEnvironment
from leases.environments.models import Environment
from leases.models import Agent, EnvironmentType, Lease
from leases.projects import registry
from sandboxes.models import Pool, Sandbox
from tests.admin.conftest import ADA, NOW
from tests.conftest import MINUTE
from tests.support.billing import BOB, create_budget
from tests.support.console import WHY, fetch, list_messages, row_url

pytestmark = pytest.mark.django_db
GRANT, CREATE = "/admin/leases/lease/grant/", "/admin/leases/environment/create/"


def type_pk(name: str) -> str:
    return str(EnvironmentType.objects.get(name=name).pk)


def grant_fields(**changes: object) -> dict[str, object]:
    return {**WHY, "agent_did": ADA, "environment_id": "game-9", "environment_type": type_pk("catan"), **changes}


def creation_fields(**changes: object) -> dict[str, object]:
    default = registry.find("")
    return {**WHY, "environment_id": "game-9", "type": type_pk("catan"), "project": str(default.pk), **changes}


def list_errors(answer: object) -> dict[str, list[str]]:
    return dict(answer.context["form"].errors)  # type: ignore[attr-defined]


# --- grant a lease ------------------------------------------------------------------------------------------------


def test_operator_grants_a_lease_whose_sandbox_starts_later(operator: Client, pool: Pool) -> None:
    assert GRANT in fetch(operator, "/admin/leases/lease/")
    assert "starts when the agent first uses the lease" in fetch(operator, GRANT)
    answer = operator.post(GRANT, grant_fields(pool=str(pool.pk), ttl="5m"))
    lease = Lease.objects.get()
    assert answer["HX-Redirect"] == row_url(lease)
    assert (lease.agent_did, lease.environment_id, lease.pool, lease.ttl) == (ADA, "game-9", pool, 5 * MINUTE)
    assert lease.events.get().actor == "operator"
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id, entry.get_change_message()) == (
        ADDITION, str(lease.pk), "Grant lease: it was agreed"
    )  # fmt: skip
    assert not Sandbox.objects.exists()
    assert list_messages(operator.get(row_url(lease))) == [
        "1 lease granted. Its sandbox starts when the agent first uses it.", f"The agent {ADA} is new.",
    ]  # fmt: skip
    page = fetch(operator, row_url(lease))
    assert "on first use" in page and row_url(Environment.objects.get()) in page


def test_operator_grants_a_lease_on_the_page_of_its_environment(operator: Client, pool: Pool) -> None:
    row, _ = lifecycle.create(NewEnvironment("task-1", "coding"), now=NOW)
    url = row_url(row, "grant_lease")
    assert url in fetch(operator, row_url(row))
    answer = operator.post(url, {**WHY, "agent_did": ADA, "pool": str(pool.pk)})
    lease = Lease.objects.get()
    assert answer["HX-Redirect"] == row_url(lease)
    assert (lease.environment_id, lease.environment_type_id, lease.agent_did) == ("task-1", "coding", ADA)
    assert row.participants.get().agent_did == ADA
    assert LogEntry.objects.get().get_change_message() == "Grant lease: it was agreed"


def test_a_new_agent_with_a_name_like_a_known_one_is_pointed_out(operator: Client) -> None:
    Agent.objects.create(did="did:plc:grace")
    typo = "The agent did:plc:grce is new. Did you mean did:plc:grace?"
    granted = operator.post(GRANT, grant_fields(agent_did="did:plc:grce"))
    assert typo in list_messages(operator.get(granted["HX-Redirect"]))
    Agent.objects.filter(did="did:plc:grce").delete()
    created = operator.post(CREATE, creation_fields(environment_id="game-10", agents="did:plc:grce\ndid:plc:grace"))
    assert list_messages(operator.get(created["HX-Redirect"])) == ["1 environment created.", typo]
    known = operator.post(GRANT, grant_fields(agent_did="did:plc:grace"))
    assert len(list_messages(operator.get(known["HX-Redirect"]))) == 1


def test_a_held_lease_is_shown_and_not_logged_again(operator: Client, grant: Callable[..., Lease]) -> None:
    lease = grant()
    fields = grant_fields(environment_id=lease.environment_id, agent_did=lease.agent_did)
    assert operator.post(GRANT, fields)["HX-Redirect"] == row_url(lease)
    assert list_messages(operator.get(row_url(lease))) == ["Nothing changed: the agent holds this lease already."]
    assert Lease.objects.count() == 1 and not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent_did", "ada"), ("agent_did", ""), ("environment_id", "a b"), ("environment_id", "\0"),
        ("environment_type", "999999"), ("pool", "x"), ("ttl", "soon"), ("ttl", "366d"), ("reason", "x"),
    ],
)  # fmt: skip
def test_an_invalid_grant_is_refused_at_its_field(operator: Client, field: str, value: str) -> None:
    answer = operator.post(GRANT, grant_fields(**{field: value}))
    assert answer.status_code == 200 and "HX-Redirect" not in answer.headers
    assert [*list_errors(answer)] == [field]
    assert not Lease.objects.exists() and not LogEntry.objects.exists()


def test_refusals_of_the_domain_are_shown_at_their_fields(operator: Client, pool: Pool) -> None:
    acme, _ = registry.create("acme", now=NOW)
    Agent.objects.create(did=BOB, project=acme)
    lifecycle.create(NewEnvironment("task-1", "coding"), now=NOW)
    lifecycle.create(NewEnvironment("over", "catan"), now=NOW)
    lifecycle.end("over", now=NOW)
    lifecycle.create(NewEnvironment("theirs", "catan", project="acme"), now=NOW)
    leasing.acquire(leasing.LeaseRequest(ADA, "held", "coding", pool=pool.name), now=NOW)
    for field, changes in (
        ("environment_type", {"environment_id": "task-1"}), ("environment_type", {"environment_id": "held"}),
        ("environment_id", {"environment_id": "over"}), ("ttl", {"ttl": "30d"}),
        ("agent_did", {"environment_id": "task-1", "environment_type": type_pk("coding"), "agent_did": BOB}),
    ):  # fmt: skip
        answer = operator.post(GRANT, grant_fields(**changes))
        assert [*list_errors(answer)] == [field], changes
    assert Lease.objects.count() == 1
    row = Environment.objects.get(pk="task-1")
    answer = operator.post(row_url(row, "grant_lease"), {**WHY, "agent_did": BOB})
    assert [*list_errors(answer)] == ["agent_did"]


def test_an_exhausted_budget_refuses_the_grant_above_the_fields(operator: Client) -> None:
    create_budget("0.0001", "hours", "ever", now=NOW)
    answer = operator.post(GRANT, grant_fields())
    assert [*list_errors(answer)] == ["__all__"] and b"No room in the budget" in answer.content
    assert not Lease.objects.exists()


def test_only_operators_grant_leases_and_create_environments(as_role: Callable[..., Client]) -> None:
    viewer = as_role("Viewer")
    forged = as_role("Operator", enforce_csrf_checks=True)
    for listing, url, fields in (("lease", GRANT, grant_fields()), ("environment", CREATE, creation_fields())):
        assert url not in fetch(viewer, f"/admin/leases/{listing}/")
        for client in (viewer, as_role("None"), forged):
            assert client.post(url, fields).status_code == 403
        assert as_role("Operator").get(url, fields).status_code == 200  # opens the dialog alone
    assert not Lease.objects.exists() and not Environment.objects.exists() and not LogEntry.objects.exists()


# --- create an environment ----------------------------------------------------------------------------------------


def test_operator_creates_an_environment_with_participants(operator: Client) -> None:
    assert CREATE in fetch(operator, "/admin/leases/environment/")
    acme, _ = registry.create("acme", now=NOW)
    fields = creation_fields(project=str(acme.pk), agents=f"{ADA}\n\n {BOB} \n", access="participants", phase="lobby")
    answer = operator.post(CREATE, fields)
    row = Environment.objects.get()
    assert answer["HX-Redirect"] == row_url(row)
    assert (row.pk, row.type_id, row.project, row.phase) == ("game-9", "catan", acme, "lobby")
    assert (row.open_to_project, row.status) == (False, "created")
    assert [*row.participants.values_list("agent_did", "added_by")] == [(ADA, "operator"), (BOB, "operator")]
    assert LogEntry.objects.get().get_change_message() == "Create environment: it was agreed"
    assert "1 environment created." in fetch(operator, row_url(row))


@pytest.mark.parametrize(
    ("access", "type_is_open", "is_open"), [("", True, True), ("", False, False), ("project", False, True)]
)
def test_access_of_a_created_environment(operator: Client, access: str, type_is_open: bool, is_open: bool) -> None:
    EnvironmentType.objects.filter(name="catan").update(open_to_project=type_is_open)
    operator.post(CREATE, creation_fields(access=access))
    assert Environment.objects.get().open_to_project is is_open


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("environment_id", "a/b"), ("environment_id", ""), ("type", ""), ("project", "999999"), ("agents", f"{ADA}\nbob"),
        ("agents", "\n".join(f"did:plc:a{number}" for number in range(101))), ("access", "none"), ("phase", "x" * 65),
    ],
)  # fmt: skip
def test_an_invalid_environment_is_refused_at_its_field(operator: Client, field: str, value: str) -> None:
    answer = operator.post(CREATE, creation_fields(**{field: value}))
    assert answer.status_code == 200 and [*list_errors(answer)] == [field]
    assert not Environment.objects.exists()


def test_an_environment_that_exists_differently_is_refused_at_the_field(operator: Client) -> None:
    acme, _ = registry.create("acme", now=NOW)
    Agent.objects.create(did="did:plc:theirs", project=acme)
    lifecycle.create(NewEnvironment("game-9", "catan", agents=[ADA], open_to_project=False), now=NOW)
    for field, changes in (
        ("type", {"type": type_pk("coding")}), ("project", {"project": str(acme.pk)}), ("access", {"access": "project"}),
        ("agents", {"agents": BOB}), ("agents", {"environment_id": "new", "agents": "did:plc:theirs"}),
    ):  # fmt: skip
        answer = operator.post(CREATE, creation_fields(**changes))
        assert [*list_errors(answer)] == [field], changes
    assert Environment.objects.count() == 1 and not LogEntry.objects.exists()
    answer = operator.post(CREATE, creation_fields(agents=ADA))
    assert "Nothing changed: the environment exists with these values." in fetch(operator, answer["HX-Redirect"])


def test_an_ended_environment_is_opened_again_on_request_alone(operator: Client) -> None:
    lifecycle.create(NewEnvironment("game-9", "catan"), now=NOW)
    lifecycle.end("game-9", now=NOW)
    operator.post(CREATE, creation_fields())
    assert Environment.objects.get().status == "ended"
    operator.post(CREATE, creation_fields(reopen="on"))
    assert Environment.objects.get().status == "created"


# --- signing secrets ----------------------------------------------------------------------------------------------


def test_a_signing_secret_is_shown_once_and_its_origin_stays(operator: Client) -> None:
    row, _ = lifecycle.create(NewEnvironment("game-9", "catan"), now=NOW)
    assert "Signing secrets" not in fetch(operator, row_url(row))
    operator.post(row_url(row, "issue_secret"), WHY)
    first = fetch(operator, row_url(row))
    assert first.count("whsec_") == 1 and "1 valid" in first and "by operator" in first
    assert "whsec_" not in fetch(operator, row_url(row))
    operator.post(row_url(row, "issue_secret"), WHY)
    page = fetch(operator, row_url(row))
    assert "2 valid" in page and "earlier one ends in 23 h 59 m" in page
    operator.post(row_url(row, "issue_secret"), {**WHY, "revoke_previous": "on"})
    assert row.secrets.count() == 1 and "1 valid" in fetch(operator, row_url(row))
    assert not any("whsec_" in entry.change_message for entry in LogEntry.objects.all())
