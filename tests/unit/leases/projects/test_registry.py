"""Projects: an agent, and the keys that list it, belong to one."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import api_keys, leasing
from leases.errors import Conflict, InvalidRequest
from leases.models import Agent, AgentKey, Lease
from leases.projects import registry
from leases.projects.models import Project
from tests.conftest import NOW
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def acme() -> Project:
    return registry.create("acme", now=NOW)[0]


def issue(*dids: str, **fields: object) -> AgentKey:
    return api_keys.issue_key(dids, now=NOW, **fields)[0]  # type: ignore[arg-type]


def read_projects() -> tuple[dict[str, str], list[str]]:
    agents = dict(Agent.objects.values_list("did", "project__name"))
    return agents, list(AgentKey.objects.order_by("pk").values_list("project__name", flat=True))


def test_key_puts_new_agents_into_its_project() -> None:
    assert issue(ADA).project.name == "default"
    assert issue(BOB, project="acme").project.name == "acme"
    assert read_projects() == ({ADA: "default", BOB: "acme"}, ["default", "acme"])


def test_key_lists_no_agent_of_another_project() -> None:
    issue(ADA)
    with pytest.raises(InvalidRequest) as refused:
        issue(ADA, project="acme")
    assert refused.value.extra["field"] == "agent"
    with pytest.raises(InvalidRequest) as refused:
        issue(BOB, project="globex")
    assert refused.value.extra["field"] == "project"
    assert AgentKey.objects.count() == 1


def test_moved_agent_takes_its_keys_along() -> None:
    issue(ADA)
    issue(ADA, BOB)
    assert registry.move_agents("acme", [ADA, BOB], now=NOW) == 2
    assert read_projects() == ({ADA: "acme", BOB: "acme"}, ["acme", "acme"])
    assert registry.move_agents("acme", [ADA, BOB], now=NOW) == 0


def test_agent_that_shares_a_key_does_not_move_alone() -> None:
    shared = issue(ADA, BOB)
    with pytest.raises(Conflict, match=BOB):
        registry.move_agents("acme", [ADA], now=NOW)
    assert set(read_projects()[0].values()) == {"default"}
    api_keys.revoke_key(shared, now=NOW)
    assert registry.move_agents("acme", [ADA], now=NOW) == 1


def test_expired_key_that_could_be_extended_holds_its_agents_together() -> None:
    issue(ADA, BOB, expires_at=NOW + timedelta(seconds=1))
    with pytest.raises(Conflict):
        registry.move_agents("acme", [ADA], now=NOW)


def test_agent_with_an_active_lease_does_not_move(grant: Callable[..., Lease]) -> None:
    lease = grant()
    with pytest.raises(Conflict, match=str(lease.pk)):
        registry.move_agents("acme", [lease.agent_did], now=NOW)
    leasing.release(lease.pk, now=NOW)
    assert registry.move_agents("acme", [lease.agent_did], now=NOW) == 1


def test_unknown_agent_or_project_moves_nothing() -> None:
    issue(ADA)
    for name, did in (("globex", ADA), ("acme", BOB)):
        with pytest.raises(InvalidRequest):
            registry.move_agents(name, [ADA, did], now=NOW)
    assert read_projects()[0] == {ADA: "default"}
