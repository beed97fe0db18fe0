"""Catalog of runnable agents through the API. The agent CLI is `cat`, which prints its prompt."""

import json
from collections.abc import Iterator
from decimal import Decimal

import pytest
from django.core.exceptions import ValidationError
from django.db import connections

from leases.api import command_threads
from leases.models import CatalogAgent, EnvironmentType, Lease
from leases.queue.models import QueuedRun
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ApiClient, assert_refused
from tests.support.billing import ADA
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
RESULT = json.dumps({"type": "result", "text": "Done."}) + "\n"
RUNS = "agent-catalog/sandbox:fixer/runs"


@pytest.fixture
def fixer(memory: MemoryProvider) -> Iterator[CatalogAgent]:
    agent = CatalogAgent(
        name="fixer", title="Fixer", cli="program", argv=["cat"], environment_type=EnvironmentType.objects.get(name="coding"),
        max_turns=20, denied_commands=["git push*"],
    )  # fmt: skip
    agent.full_clean()
    agent.save()
    yield agent
    command_threads.join_all()
    connections.close_all()


def test_enabled_agents_are_listed_with_pack_and_limits(ada: ApiClient, fixer: CatalogAgent) -> None:
    CatalogAgent.objects.create(name="off", title="Off", environment_type=fixer.environment_type, enabled=False)
    [listed] = ada.get("agent-catalog").json()["results"]
    assert (listed["id"], listed["cli"], listed["environment_type"], listed["policy"]) == (
        "sandbox:fixer", "program", "coding", "sealed",
    )  # fmt: skip
    assert listed["pack"].startswith("coding ")
    assert (listed["limits"]["max_turns"], listed["limits"]["denied_commands"]) == (20, ["git push*"])
    assert ada.get("agent-catalog/sandbox:fixer").json() == listed
    for catalog_id in ("fixer", "sandbox:off", "sandbox:nobody", "graph:fixer"):
        assert ada.get(f"agent-catalog/{catalog_id}").json()["code"] == "catalog_agent_not_found"


def test_run_grants_a_lease_and_uses_it_again(ada: ApiClient, fixer: CatalogAgent) -> None:
    body = {"agent_did": ADA, "prompt": RESULT, "max_turns": 50}
    response = ada.post(RUNS, body, idempotency_key="once")
    assert response.status_code == 201, response.content
    run = response.json()
    lease = Lease.objects.get(pk=run["lease_id"])
    assert (lease.environment_id, lease.environment_type_id) == ("catalog:fixer", "coding")
    assert (run["cli"], run["policy"]["max_turns"], run["policy"]["denied_commands"]) == ("program", 20, ["git push*"])
    url = f"leases/{lease.pk}/agent-runs/{run['run_id']}"
    wait_until(lambda: ada.get(url).json()["ended_at"], "the agent run is closed")
    assert ada.get(url).json()["result"] == "Done."
    assert ada.post(RUNS, body, idempotency_key="once").json()["run_id"] == run["run_id"]
    assert ada.post(RUNS, body).json()["lease_id"] == str(lease.pk)
    other = ada.post(RUNS, body | {"environment_id": "repository-7"}).json()
    assert Lease.objects.get(pk=other["lease_id"]).environment_id == "repository-7"


def test_run_can_be_queued(ada: ApiClient, fixer: CatalogAgent) -> None:
    response = ada.post(RUNS, {"agent_did": ADA, "prompt": RESULT, "queued": True})
    assert response.status_code == 202, response.content
    row = QueuedRun.objects.get(pk=response.json()["queued_run_id"])
    assert (row.request["cli"], row.request["policy"]["max_turns"]) == ("program", 20)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"prompt": "x"}, 400, "agent_did"),
        ({"agent_did": ADA}, 400, "prompt"),
        ({"agent_did": ADA, "prompt": "x", "cli": "codex"}, 400, "cli"),
        ({"agent_did": ADA, "prompt": "x", "argv": ["sh"]}, 400, "argv"),
        ({"agent_did": ADA, "prompt": "x", "environment_id": "/"}, 400, "environment_id"),
        ({"agent_did": "did:plc:bob", "prompt": "x"}, 403, None),
    ],
)
def test_fields_of_the_catalog_and_other_agents_are_refused(
    ada: ApiClient, fixer: CatalogAgent, body: dict[str, object], status: int, field: str | None
) -> None:
    assert_refused(ada, "POST", RUNS, body, status, field)


def test_entry_that_its_cli_does_not_support_is_invalid(fixer: CatalogAgent) -> None:
    for name, value in {"argv": [], "model": "x", "max_turns": 0, "allowed_tools": [""], "max_cost": Decimal(-1)}.items():
        changed = CatalogAgent(**{**{f.name: getattr(fixer, f.name) for f in CatalogAgent._meta.fields}, name: value})
        with pytest.raises(ValidationError) as refused:
            changed.full_clean(exclude=["id", "name"])
        assert [*refused.value.message_dict] == [name]
