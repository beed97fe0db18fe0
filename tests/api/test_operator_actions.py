"""Operations that need an operator's key leave a record of the key, the row and the change."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.urls import resolve

from leases.api.base import permissions
from leases.models import Agent, KeyScope
from sandboxes.models import ImageTemplate, OperatorAction, Pool
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import PATH_PARAMETERS, ApiClient, load_openapi
from tests.support.billing import ADA

pytestmark = pytest.mark.django_db
AGENT_PERMISSIONS = {permissions.HasKey, permissions.CanAccessLease}
OPERATOR_PERMISSIONS = {
    each
    for each in vars(permissions).values()
    if isinstance(each, type) and issubclass(each, permissions.BasePermission) and each is not permissions.BasePermission
} - AGENT_PERMISSIONS
BUDGET = {"scope": "all", "unit": "usd", "amount": "10", "period": "day"}
RATE = {"model": "m", "prices": {"input": "1"}, "valid_from": "2026-11-01T00:00:00Z", "source": "price page"}
WHY = {"reason": "not needed"}
STOPPED = (
    "result: 0 leases ended, 0 queued runs interrupted, 0 direct agent runs interrupted, 0 commands killed, "
    "0 background processes killed"
)

# Operation -> request, the action recorded last, and its detail.
RECORDED: dict[str, tuple[str, str, Any, str, str]] = {
    "budgets_create": ("POST", "budgets", BUDGET, "Create budget", ""),
    "budgets_update": ("PATCH", "budgets/{budget}", {"amount": "30"}, "Change budget", "amount 10 → 30"),
    "budgets_delete": ("DELETE", "budgets/{budget}", None, "Delete budget", ""),
    "budgets_top_up": ("POST", "budgets/{budget}/top-ups", {"amount": "5"}, "Top up budget", "5 USD"),
    "leases_calls_limits_update": (
        "PATCH", "leases/{lease}/calls/limits", {"limit": "5"}, "Limit model calls", "5 USD instead of no spend limit",
    ),
    "model_rates_create": (
        "POST", "model-rates", RATE | {"prices": {"input": "2"}}, "Add model rate",
        "1 → 2 USD per million tokens, from 2026-11-01 00:00 UTC, price page",
    ),
    "agents_create": ("POST", "agents", {"did": "did:plc:new"}, "Create agent", "project default"),
    "agents_stop": ("POST", f"agents/{ADA}/stop", {"end_leases": True}, "Stop all work", f"ends leases; {STOPPED}"),
    "environments_stop": ("POST", "environments/game-1/stop", {}, "Stop all work", f"keeps leases; {STOPPED}"),
    "stop": ("POST", "stop", {}, "Stop all work", f"keeps leases; {STOPPED}"),
    "environments_update": (
        "PATCH", "environments/game-1", {"open_to_project": True}, "Change access", "open to its project",
    ),
    "environments_add_participants": ("POST", "environments/game-1/participants", {"agents": [ADA]}, "Add participants", ADA),
    "environments_remove_participant": (
        "DELETE", "environments/game-1/participants/did:plc:in", None, "Remove participant", "did:plc:in",
    ),
    "environments_create_secret": (
        "POST", "environments/game-1/secrets", {"revoke_previous": True}, "Add secret", "earlier secrets are revoked",
    ),
    "inventory_destroy": (
        "POST", "inventory/memory/{orphan}/destroy", WHY, "Destroy sandbox without owner",
        "memory {orphan}: not needed; result: destroyed",
    ),
    "inventory_adopt": ("POST", "inventory/memory/{orphan}/adopt", WHY, "Adopt sandbox", "not needed"),
    "templates_create": ("POST", "templates", {"name": "n", "commands": ["true"]}, "Build template", ""),
    "templates_delete": ("DELETE", "templates/{template}", None, "Remove template", ""),
}  # fmt: skip
NOT_RECORDED = {
    "environments_create": "one for each game: the row has the time, and its participants have the key",
    "environments_start": "one for each game: the row has the time",
    "environments_end": "one for each game: the row has the time, and the events of its leases have the key",
    "environments_create_coding_task": "one for each task: the row has the time and the key",
}


def iter_permissions(holder: Any) -> Iterator[Any]:
    """Yield the classes of a permission that may be composed of others."""
    operands = [getattr(holder, name) for name in ("op1_class", "op2_class") if hasattr(holder, name)]
    if not operands:
        yield holder
    for operand in operands:
        yield from iter_permissions(operand)


def list_operator_operations() -> set[str]:
    found = set()
    for path, methods in load_openapi()["paths"].items():
        view = resolve(path.format(**PATH_PARAMETERS | {"id": str(uuid4())})).func.view_class  # type: ignore[attr-defined]
        classes = {each for holder in view.permission_classes for each in iter_permissions(holder)}
        if classes & OPERATOR_PERMISSIONS:
            found |= {operation["operationId"] for method, operation in methods.items() if method != "get"}
    return found


@pytest.fixture
def names(
    operator: ApiClient, pool: Pool, memory: MemoryProvider, settings: Any, monkeypatch: pytest.MonkeyPatch, builder: ApiClient
) -> dict[str, str]:
    """Create the rows that the requests name."""
    settings.ORPHAN_GRACE = timedelta(0)
    monkeypatch.setattr(MemoryProvider, "builds_images", True)
    for method in ("remove_image", "remove_build"):  # of an engine that has the image no more
        monkeypatch.setattr(MemoryProvider, method, lambda self, name: None)
    orphan = f"leasehold-{uuid4().hex}-1"
    memory.create(SandboxSpec(orphan, str(pool.owner), memory_mib=2048))
    Agent.objects.get_or_create(did=ADA)
    operator.post(
        "environments", {"environment_id": "game-1", "type": "catan", "agents": ["did:plc:in"], "open_to_project": False}
    )
    lease = operator.post(
        "leases", {"agent_did": "did:plc:in", "environment_id": "game-1", "environment_type": "catan"}
    ).json()["id"]
    operator.post("model-rates", RATE)
    budget = operator.post("budgets", BUDGET).json()["id"]
    template = builder.post("templates", {"name": "tools", "commands": ["true"]}).json()["id"]
    ImageTemplate.objects.update(state="ready", image="x", deadline_at=None)
    OperatorAction.objects.all().delete()
    return {"lease": lease, "orphan": orphan, "budget": str(budget), "template": template}


def test_every_operation_of_operators_is_recorded_or_has_a_reason() -> None:
    assert list_operator_operations() == RECORDED.keys() | NOT_RECORDED.keys()
    assert not RECORDED.keys() & NOT_RECORDED.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_an_operation_records_the_key_and_the_change(name: str, issue: Callable[..., ApiClient], names: dict[str, str]) -> None:
    method, path, body, action, detail = RECORDED[name]
    client = issue(operator=True, scopes=KeyScope.values)
    response = client(method, path.format(**names), body)
    assert response.status_code < 300, response.content
    recorded = OperatorAction.objects.get()
    assert (recorded.action, recorded.summary) == (action, detail.format(**names))
    assert recorded.actor == f"key {client.key.split('_')[1]}"
