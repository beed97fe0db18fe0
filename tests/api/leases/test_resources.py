"""Resources by request over HTTP."""

import pytest

from leases.models import AgentKey, Lease
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ApiClient

pytestmark = pytest.mark.django_db


def test_resources_are_those_of_the_lease_or_the_refusal_names_the_field(ada: ApiClient, pool: Pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(memory_mib=256, max_memory_mib=1024)
    body = {"agent_did": "did:plc:ada", "environment_id": "large", "environment_type": "catan", "pool": pool.name}
    refused = ada.post("leases", body | {"resources": {"memory_mib": 2048}})
    assert (refused.status_code, refused.json()["field"]) == (400, "resources.memory_mib")
    unknown = ada.post("leases", body | {"resources": {"gpus": 1}})
    assert (unknown.status_code, unknown.json()["field"]) == (400, "resources.gpus")
    untyped = ada.post("leases", body | {"resources": {"gpu_type": "H100"}})
    assert (untyped.status_code, untyped.json()["field"]) == (400, "resources.gpu_type")
    disk = ada.post("leases", body | {"resources": {"disk_mib": 1024}})
    assert (disk.status_code, disk.json()["field"]) == (400, "resources.disk_mib")
    both = ada.post("leases", body | {"resources": {"memory_mib": 1024, "size": "basic"}})
    assert (both.status_code, both.json()["field"]) == (400, "resources.size")
    size = ada.post("leases", body | {"resources": {"size": "huge"}})
    assert (size.status_code, size.json()["field"], "standard-1" in size.json()["detail"]) == (400, "resources.size", True)
    image = ada.post("leases", body | {"resources": {"image": "other:1"}})
    assert (image.status_code, image.json()["field"]) == (400, "resources.image")
    assert ada.post("leases", body | {"resources": {"memory_mib": 1024}}).status_code == 201
    assert Lease.objects.get(environment_id="large").memory_mib == 1024
    named = {"environment_id": "named", "resources": {"size": "basic", "image": "own:1"}}
    Pool.objects.filter(pk=pool.pk).update(allowed_images=["own:1"])
    assert ada.post("leases", body | named).status_code == 201
    lease = Lease.objects.get(environment_id="named")
    assert (lease.memory_mib, lease.millicpus, lease.image) == (1024, 250, "own:1")


def test_answers_state_the_requested_and_the_effective_resources(
    ada: ApiClient, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for name in ("can_set_disk", "has_gpus"):
        monkeypatch.setattr(MemoryProvider, name, True)
    Pool.objects.filter(pk=pool.pk).update(memory_mib=256, max_memory_mib=1024, max_disk_mib=9999, max_gpus=2, image="own:1")
    body = {"agent_did": "did:plc:ada", "environment_id": "gpu", "environment_type": "catan", "pool": pool.name}
    stated = {"size": "basic", "disk_mib": 5000, "gpu": 2, "gpu_type": "h100"}
    created = ada.post("leases", body | {"resources": stated}).json()
    requested = stated | {"gpu_type": "H100", "memory_mib": 1024, "millicpus": 250, "image": None}
    assert created["resources"] == {"requested": requested, "effective": None}
    ada.post(f"leases/{created['id']}/exec", {"argv": ["true"]})
    effective = {"memory_mib": 1024, "millicpus": 250, "disk_mib": 5000, "gpu": 2, "gpu_type": "H100", "image": "own:1"}
    shown = ada.get(f"leases/{created['id']}").json()["resources"]
    assert shown == {"requested": requested, "effective": effective}
    [listed] = [lease["resources"] for lease in ada.get("leases").json()["results"] if lease["id"] == created["id"]]
    assert listed == shown


def test_limits_of_the_key_apply_to_its_requests(ada: ApiClient, pool: Pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(memory_mib=256, max_memory_mib=4096)
    AgentKey.objects.update(max_memory_mib=1024)
    body = {"agent_did": "did:plc:ada", "environment_id": "large", "environment_type": "catan", "pool": pool.name}
    refused = ada.post("leases", body | {"resources": {"memory_mib": 2048}})
    assert (refused.status_code, refused.json()["field"]) == (400, "resources.memory_mib")
    assert refused.json()["detail"] == "Must be from 16 to 1024: the limit of this API key."
