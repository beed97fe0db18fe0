"""Access to an environment in the console: participants, and every agent of the project."""

import pytest
from django.test import Client

from leases import leasing
from leases.allow_lists import AllowLists
from leases.environments import lifecycle
from leases.environments.models import Environment
from leases.leasing import LeaseRequest
from leases.models import Agent, AgentKey, Lease
from leases.projects import registry
from sandboxes.models import Pool
from tests.admin.conftest import ADA, NOW
from tests.support.billing import BOB
from tests.support.console import WHY, fetch, row_url

pytestmark = pytest.mark.django_db


@pytest.fixture
def task(pool: Pool) -> Environment:
    return lifecycle.create(lifecycle.NewEnvironment("task-1", "coding", agents=[ADA]), now=NOW)[0]


def test_participants_are_added_and_removed_with_their_lease(superuser: Client, task: Environment, pool: Pool) -> None:
    request = LeaseRequest(ADA, task.pk, "coding", pool=pool.name, allowed=AllowLists())
    leasing.acquire(request, now=NOW)
    superuser.post(row_url(task, "participants"), {**WHY, "add": BOB, "remove": ADA})
    assert list(task.participants.values_list("agent_did", flat=True)) == [BOB]
    assert Lease.objects.get().end_reason == "operator"
    assert "participants only" in fetch(superuser, row_url(task))


@pytest.mark.parametrize("fields", [{}, {"add": "nonsense"}, {"remove": "did:plc:a b"}])
def test_invalid_participants_change_nothing(superuser: Client, task: Environment, fields: dict[str, str]) -> None:
    answer = superuser.post(row_url(task, "participants"), {**WHY, **fields})
    assert answer.status_code == 200 and "HX-Redirect" not in answer.headers
    assert list(task.participants.values_list("agent_did", flat=True)) == [ADA]


def test_agent_of_another_project_is_refused_with_a_message(superuser: Client, task: Environment) -> None:
    acme, _ = registry.create("acme", now=NOW)
    Agent.objects.create(did=BOB, project=acme)
    answer = superuser.post(row_url(task, "participants"), {**WHY, "add": BOB})
    assert answer.context["form"].errors == {"add": [f"{BOB} belongs to another project."]}
    assert task.participants.count() == 1


def test_access_is_opened_and_restricted(superuser: Client, task: Environment) -> None:
    superuser.post(row_url(task, "open_to_project"), WHY)
    page = fetch(superuser, row_url(task))
    assert "every agent" in page and row_url(task, "participants") not in page
    superuser.post(row_url(task, "restrict"), WHY)
    assert Environment.objects.get().open_to_project is False


def test_key_of_an_agent_of_another_project_is_refused_in_the_form(superuser: Client) -> None:
    acme, _ = registry.create("acme", now=NOW)
    Agent.objects.create(did=BOB, project=acme)
    form = {"name": "x", "dids": BOB, "scopes": ["leases"]}
    assert "belongs to the project acme" in superuser.post("/admin/leases/agentkey/add/", form).content.decode()
    assert not AgentKey.objects.exists()
    superuser.post("/admin/leases/agentkey/add/", form | {"project": str(acme.pk)})
    assert AgentKey.objects.get().project == acme


def test_project_page_counts_its_agents(superuser: Client) -> None:
    superuser.post("/admin/leases/project/add/", {"name": "acme"})
    row = registry.find("acme")
    Agent.objects.create(did=BOB, project=row)
    assert "moved by manage.py project move" in fetch(superuser, row_url(row))
    assert ">1<" in fetch(superuser, "/admin/leases/project/").replace(" ", "").replace("\n", "")
