"""Permission to hold a lease in an environment: that of its participants, or of the agents of its project."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from billing.models import Tab
from leases import leasing
from leases.allow_lists import AllowLists
from leases.api_keys import issue_key
from leases.environments import lifecycle, participants
from leases.environments.lifecycle import NewEnvironment
from leases.environments.models import Environment, Participant
from leases.errors import Conflict, EnvironmentEnded, EnvironmentNotFound, InvalidRequest
from leases.models import Agent, EnvironmentType, Lease
from leases.projects import registry
from tests.conftest import MINUTE, NOW
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db
KEY = AllowLists()  # of an agent's key
Grant = Callable[..., Lease]


@pytest.fixture(autouse=True)
def acme() -> int:
    """Project of other agents."""
    return registry.create("acme", now=NOW)[0].pk


def create(pk: str = "task-1", environment_type: str = "coding", **fields: object) -> Environment:
    return lifecycle.create(NewEnvironment(pk, environment_type, **fields), now=NOW)[0]  # type: ignore[arg-type]


def join(grant: Grant, agent: str = ADA, environment: str = "task-1", **fields: object) -> Lease:
    return grant(agent, environment, **{"environment_type": "coding", "allowed": KEY} | fields)


def test_first_lease_of_an_agent_creates_an_environment_for_that_agent_alone(grant: Grant) -> None:
    lease = join(grant)
    row = Environment.objects.get()
    assert (row.created_by_agent, row.open_to_project, row.started_at) == (True, False, NOW)
    with pytest.raises(EnvironmentNotFound):
        join(grant, BOB)
    leasing.release(lease.pk, now=NOW)
    with pytest.raises(EnvironmentNotFound):
        join(grant, BOB)
    assert join(grant, now=NOW + MINUTE) and Lease.objects.count() == 2


def test_first_lease_of_a_game_opens_the_environment_to_the_project(grant: Grant, acme: int) -> None:
    join(grant, environment_type="catan")
    assert join(grant, BOB, environment_type="catan")
    Agent.objects.create(did="did:plc:eve", project_id=acme)
    with pytest.raises(EnvironmentNotFound):
        join(grant, "did:plc:eve", environment_type="catan", allowed=AllowLists(project_id=acme))


def test_only_named_agents_enter_an_environment_of_an_operator(grant: Grant) -> None:
    create(agents=[ADA])
    assert join(grant)
    with pytest.raises(EnvironmentNotFound):
        join(grant, BOB)
    assert participants.add("task-1", [BOB, ADA], now=NOW) == 1
    assert join(grant, BOB)


def test_request_of_an_operator_adds_the_agent(grant: Grant) -> None:
    create()
    with pytest.raises(EnvironmentNotFound):
        join(grant)
    lease = join(grant, allowed=None)
    leasing.release(lease.pk, now=NOW)
    assert join(grant, now=NOW + MINUTE)
    assert Participant.objects.get().agent_did == ADA


@pytest.mark.parametrize("allowed", [KEY, None], ids=["agent's key", "operator"])
def test_every_lease_has_the_type_of_the_environment(grant: Grant, allowed: AllowLists | None) -> None:
    EnvironmentType.objects.filter(name="coding").update(restricted=True)
    create(agents=[ADA])
    with pytest.raises(Conflict) as refused:
        join(grant, environment_type="run", allowed=allowed)
    assert refused.value.extra["field"] == "environment_type"
    assert not Lease.objects.exists()


def test_stranger_learns_neither_type_nor_end_of_an_environment(grant: Grant) -> None:
    create(agents=[ADA])
    with pytest.raises(EnvironmentNotFound):
        join(grant, BOB, environment_type="run")
    lifecycle.end("task-1", now=NOW)
    with pytest.raises(EnvironmentNotFound):
        join(grant, BOB)
    with pytest.raises(EnvironmentEnded):
        join(grant)


def test_environment_that_an_operator_or_a_condition_has_ended_stays_ended_for_keys_of_agents(grant: Grant) -> None:
    join(grant)
    lifecycle.end("task-1", outcome={"winner": ADA}, now=NOW + MINUTE)
    for allowed in (KEY, None):
        with pytest.raises(EnvironmentEnded):
            join(grant, allowed=allowed, now=NOW + 2 * MINUTE)
    row = Environment.objects.get()
    assert (row.ended_at, row.outcome) == (NOW + MINUTE, {"winner": ADA})


def test_unused_environment_is_opened_again_by_an_agent_that_may_enter(grant: Grant) -> None:
    leasing.release(join(grant).pk, now=NOW)
    later = NOW + lifecycle.UNUSED_AFTER
    assert lifecycle.end_unused(now=later) == 1
    with pytest.raises(EnvironmentNotFound):
        join(grant, BOB, now=later)
    assert join(grant, now=later)
    assert Environment.objects.get().ended_at is None


def test_operator_opens_an_ended_environment_again_and_keeps_its_outcome(grant: Grant) -> None:
    join(grant, environment_type="run")
    lifecycle.end("task-1", outcome="first", now=NOW + MINUTE)
    with pytest.raises(Conflict):
        create(agents=[BOB])
    row = create(agents=[BOB], reopen=True)
    assert (row.type_id, row.created_by_agent, row.ended_at, row.outcome) == ("coding", False, None, "first")
    with pytest.raises(EnvironmentNotFound):
        join(grant)
    assert join(grant, BOB)
    lifecycle.end("task-1", outcome="second", now=NOW + 2 * MINUTE)
    assert [outcome.text for outcome in row.outcomes.all()] == ['"second"', '"first"']
    assert Environment.objects.with_outcome().get().outcome == "second"


def test_outcome_may_be_given_after_an_end_without_one(grant: Grant) -> None:
    join(grant)
    lifecycle.end("task-1", now=NOW + MINUTE)
    lifecycle.end("task-1", outcome="draw", now=NOW + 2 * MINUTE)
    lifecycle.end("task-1", outcome="other", now=NOW + 3 * MINUTE)
    row = Environment.objects.get()
    assert (row.ended_at, row.outcome, row.outcomes.count()) == (NOW + MINUTE, "draw", 1)


def test_name_that_an_agent_has_taken_gives_it_nothing_that_an_operator_puts_there(grant: Grant) -> None:
    join(grant, BOB)
    for agents in ([], [ADA]):
        with pytest.raises(Conflict) as refused:
            create(agents=agents)
        assert refused.value.extra["field"] == "environment_id"
    assert create(agents=[BOB]).created_by_agent


def test_operator_finds_the_open_environment_of_a_game_that_its_players_have_created(grant: Grant) -> None:
    join(grant, environment="game-1", environment_type="catan")
    assert lifecycle.create(NewEnvironment("game-1", "catan"), now=NOW)[1] is False


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"environment_type": "run"}, "type"), ({"project": "acme"}, "project"), ({"open_to_project": True}, "open_to_project"),
        ({"agents": [BOB]}, "agents"),
    ],
)  # fmt: skip
def test_environment_that_exists_with_other_values_is_a_conflict(fields: dict[str, object], field: str) -> None:
    create(agents=[ADA])
    with pytest.raises(Conflict) as refused:
        create(**fields)  # type: ignore[arg-type]
    assert refused.value.extra["field"] == field
    assert create(agents=[ADA]) == create()


def test_removed_participant_loses_its_lease_and_does_not_enter_again(grant: Grant) -> None:
    create(agents=[ADA, BOB])
    lease, other = join(grant), join(grant, BOB)
    assert participants.remove("task-1", ADA, now=NOW + MINUTE) == [lease]
    lease.refresh_from_db()
    assert (lease.end_reason, lease.end_detail) == ("operator", participants.REMOVED)
    assert participants.remove("task-1", ADA, now=NOW + MINUTE) == []
    with pytest.raises(EnvironmentNotFound):
        join(grant, now=NOW + MINUTE)
    assert leasing.require_active(other.pk, now=NOW + MINUTE)


def test_access_is_opened_and_restricted_to_the_agents_in_the_environment(grant: Grant) -> None:
    create(agents=[ADA])
    with pytest.raises(EnvironmentNotFound):
        join(grant, BOB)
    assert participants.set_access("task-1", True, now=NOW) and not participants.set_access("task-1", True, now=NOW)
    with pytest.raises(Conflict):
        participants.remove("task-1", ADA, now=NOW)
    lease = join(grant, BOB)
    assert participants.set_access("task-1", False, now=NOW)
    with pytest.raises(EnvironmentNotFound):
        join(grant, "did:plc:eve")
    leasing.release(lease.pk, now=NOW)
    assert join(grant, BOB, now=NOW + MINUTE)


def test_agent_of_another_project_is_neither_named_nor_added(grant: Grant, acme: int) -> None:
    Agent.objects.create(did="did:plc:eve", project_id=acme)
    with pytest.raises(InvalidRequest) as refused:
        create(agents=["did:plc:eve"])
    assert refused.value.extra["field"] == "agents" and not Environment.objects.exists()
    create()
    with pytest.raises(InvalidRequest):
        participants.add("task-1", ["did:plc:eve"], now=NOW)
    with pytest.raises(InvalidRequest) as refused:
        join(grant, "did:plc:eve", allowed=None)
    assert refused.value.extra["field"] == "agent_did"
    assert not Participant.objects.exists()


def test_unknown_agent_of_an_operator_belongs_to_the_project_of_the_environment(grant: Grant, acme: int) -> None:
    create(project="acme")
    join(grant, "did:plc:new", allowed=None)
    assert Agent.objects.get(did="did:plc:new").project_id == acme


def test_project_of_an_operators_key_decides_neither_for_the_agent_nor_for_its_budgets(grant: Grant) -> None:
    key = issue_key([], operator=True, project="acme", now=NOW)[0]
    lease = join(grant, "did:plc:new", allowed=AllowLists.of_key(key))
    assert Agent.objects.get(did="did:plc:new").project.name == "default"
    assert Tab.objects.get(holder=lease.pk).project == "default"


def test_refused_entry_leaves_no_agent_and_no_lease(grant: Grant) -> None:
    create()
    with pytest.raises(EnvironmentNotFound):
        join(grant, "did:plc:new")
    assert not Agent.objects.filter(did="did:plc:new").exists()


def test_held_lease_is_returned_whatever_became_of_the_environment(grant: Grant) -> None:
    lease = join(grant)
    Environment.objects.update(ended_at=NOW, end_reason="operator")
    assert join(grant, now=NOW + timedelta(seconds=1)) == lease
