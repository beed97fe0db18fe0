"""Stop of all work on the pages of agents, environments and agent runs."""

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from leases.agent_runs.models import AgentRun
from leases.models import Agent, Environment, Lease
from sandboxes.models import Run
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.admin.conftest import NOW
from tests.conftest import MINUTE
from tests.support.billing import start_run
from tests.support.console import WHY, fetch, list_messages, row_url

pytestmark = pytest.mark.django_db


def test_operator_stops_an_agent_and_an_environment(operator: Client, lease: Lease) -> None:
    agent, environment = Agent.objects.get(), Environment.objects.get()
    AgentRun.objects.create(lease=lease, cli="program", started_at=NOW, recorder_deadline=NOW + MINUTE)
    assert "Stop all work…" in fetch(operator, row_url(agent))
    dialog = operator.get(row_url(agent, "stop")).content.decode()
    assert "Stop all work of the agent?" in dialog and "End active leases, too" in dialog
    assert list_messages(operator.post(row_url(agent, "stop"), WHY)) == ["1 agent stopped."]
    assert AgentRun.objects.get().interrupted_at
    assert list_messages(operator.post(row_url(agent, "stop"), WHY))[-1] == "Nothing changed: no work to stop."
    answer = operator.post(row_url(environment, "stop"), WHY | {"end_leases": "on"})
    assert list_messages(answer)[-1] == "1 environment stopped."
    lease.refresh_from_db()
    assert (lease.end_reason, lease.end_detail) == ("operator", WHY["reason"])
    assert LogEntry.objects.count() == 2


def test_partial_failure_is_shown_in_the_dialog_and_logged(operator: Client, lease: Lease, memory: MemoryProvider) -> None:
    start_run(lease)
    memory.fail("kill", Unavailable("engine gone"), times=1)
    answer = operator.post(row_url(Agent.objects.get(), "stop"), WHY)
    assert "HX-Redirect" not in answer.headers
    assert f"Not stopped: command {Run.objects.get().pk}: engine gone. Stop again" in answer.content.decode()
    assert LogEntry.objects.get().get_change_message() == f"Stop all work of the agent: {WHY['reason']}"


@pytest.mark.parametrize("page", ["agent", "agentrun"])
def test_operator_stops_the_installation_from_a_list(operator: Client, viewer: Client, lease: Lease, page: str) -> None:
    AgentRun.objects.create(lease=lease, cli="program", started_at=NOW, recorder_deadline=NOW + MINUTE)
    listing = f"/admin/leases/{page}/"
    url = f"{listing}stop_installation/"
    assert "Stop all agents…" in fetch(operator, listing)
    assert "Stop all agents…" not in fetch(viewer, listing)
    assert viewer.post(url, WHY).status_code == 403
    assert "HX-Redirect" not in operator.post(url, {"reason": ""}).headers
    answer = operator.post(url, WHY)
    assert answer.headers["HX-Redirect"] == listing
    assert list_messages(answer) == ["All work of the installation is stopped."]
    assert LogEntry.objects.get().get_change_message() == f"Stop all work of the installation: {WHY['reason']}"
