"""Inventory by the HTTP API: documents, keys, and refusals of what has an owner."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ApiClient
from tests.support.billing import create_rate

pytestmark = pytest.mark.django_db
WHY = {"reason": "not needed"}


@pytest.fixture
def orphan(pool: Pool, memory: MemoryProvider, settings: Any) -> str:
    settings.ORPHAN_GRACE = timedelta(0)
    name = f"leasehold-{uuid4().hex}-1"
    memory.create(SandboxSpec(name, str(pool.owner), memory_mib=2048))
    return name


def test_inventory_lists_whose_since_when_and_at_what_price(
    operator: ApiClient, ada: ApiClient, lease: dict[str, Any], orphan: str, memory: MemoryProvider
) -> None:
    ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]})
    create_rate("memory", "0.009", provider="memory")
    listed = operator.get("inventory").json()
    assert [(each["provider"], each["state"], each["sandboxes"]) for each in listed["engines"]] == [("memory", "listed", 2)]
    first, second = listed["sandboxes"]
    assert (first["name"], first["finding"], first["sandbox"], first["usd_per_hour"]) == (orphan, "no_row", None, "0.018")
    assert (second["lease_id"], second["sandbox_id"], second["process_state"]) == (lease["id"], lease["sandbox_id"], "running")
    assert operator.get("inventory?finding=no_row").json()["sandboxes"] == [first]
    assert operator.get(f"inventory/memory/{second['name']}").json() == second
    with memory.fail("list", Unavailable("out of order")):
        [engine] = operator.get("inventory").json()["engines"]
    assert (engine["state"], engine["error"], engine["sandboxes"]) == ("unavailable", "out of order", None)


def test_only_what_has_no_owner_is_destroyed_or_adopted_and_only_by_an_operator(
    operator: ApiClient, ada: ApiClient, issue: Callable[..., ApiClient], lease: dict[str, Any], orphan: str, pool: Pool
) -> None:
    ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]})
    held = Sandbox.objects.get().name
    for key in (ada, issue(operator=True, pools=[pool.name]), issue(operator=True, scopes=["read"])):
        assert key.post(f"inventory/memory/{orphan}/destroy", WHY).status_code == 403
    assert ada.get("inventory").status_code == 403
    for path, body, status, code in (
        (f"inventory/memory/{held}/destroy", WHY, 409, "has_owner"),
        (f"inventory/memory/{held}/adopt", WHY, 409, "has_owner"),
        (f"inventory/memory/{orphan}/destroy", {"reason": ""}, 400, "invalid"),
        (f"inventory/memory/{orphan}/adopt", {**WHY, "pool": "none"}, 400, "invalid"),
        (f"inventory/memory/{orphan}/adopt", {**WHY, "lease_id": str(uuid4())}, 400, "invalid"),
        ("inventory/memory/other/adopt", WHY, 404, "not_listed"),
        ("inventory/daytona/other/adopt", WHY, 503, "provider_unavailable"),
        ("inventory/none/other/destroy", WHY, 404, "not_found"),
    ):
        refused = operator.post(path, body)
        assert (refused.status_code, refused.json()["code"]) == (status, code), refused.json()
    assert operator.get("inventory?finding=other").json()["field"] == "finding"
    assert operator.get("inventory/memory/other").status_code == 404
    adopted = operator.post(f"inventory/memory/{orphan}/adopt", {**WHY, "lease_id": lease["id"]}).json()
    snapshots = ada.get(f"leases/{lease['id']}/snapshots").json()["results"]
    assert [each["id"] for each in snapshots] == [adopted["snapshot_id"]]
    Sandbox.objects.filter(pk=adopted["sandbox"]).update(incarnation=2, ref="moved")
    assert operator.post(f"inventory/memory/{orphan}/destroy", WHY).json() == {"destroyed": True}
    assert operator.post(f"inventory/memory/{orphan}/destroy", WHY).json() == {"destroyed": False}
