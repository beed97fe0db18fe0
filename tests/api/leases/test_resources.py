"""Resources by request over HTTP."""

import pytest

from leases.models import Lease
from sandboxes.models import Pool
from tests.api.conftest import ApiClient

pytestmark = pytest.mark.django_db


def test_resources_are_those_of_the_lease_or_the_refusal_names_the_field(ada: ApiClient, pool: Pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(memory_mib=256, max_memory_mib=1024)
    body = {"agent_did": "did:plc:ada", "environment_id": "large", "environment_type": "catan", "pool": pool.name}
    refused = ada.post("leases", body | {"resources": {"memory_mib": 2048}})
    assert (refused.status_code, refused.json()["field"]) == (400, "resources.memory_mib")
    unknown = ada.post("leases", body | {"resources": {"gpus": 1}})
    assert (unknown.status_code, unknown.json()["field"]) == (400, "resources.gpus")
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
