"""Resources by request: limits of the API key, the environment type and the pool, and what a provider can set."""

from typing import Any

import pytest

from leases import fork
from leases.allow_lists import AllowLists
from leases.errors import InvalidRequest
from leases.leasing import LeaseRequest
from leases.models import AgentKey, AlternativePool, EnvironmentType, Lease
from leases.resources import Resources, fits, resolve_size
from sandboxes.models import Pool
from sandboxes.providers import load_class
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.registry import PROVIDERS
from tests.conftest import NOW
from tests.support.leases import evict, get_sandbox, run, update_pool

pytestmark = pytest.mark.django_db
GENEROUS = {"max_memory_mib": 4096, "max_millicpus": 4000, "max_disk_mib": 40_960, "max_gpus": 4, "allowed_images": ["a", "b"]}
LARGE = Resources(memory_mib=2048, millicpus=2000, disk_mib=20_480, gpus=2, gpu_type="H100")


@pytest.fixture(autouse=True)
def complete_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory provider state that it sets disk and GPUs."""
    for name in ("can_set_disk", "has_gpus"):
        monkeypatch.setattr(MemoryProvider, name, True)


def allow(**limits: Any) -> AllowLists:
    """Return the lists of an API key with these limits."""
    return AllowLists.of_key(AgentKey(**limits))


@pytest.mark.parametrize(
    ("limits", "resources", "field"),
    [
        ({"max_memory_mib": 1024}, LARGE, "memory_mib"),
        ({"max_millicpus": 1000}, LARGE, "millicpus"),
        ({"max_disk_mib": 10_240}, LARGE, "disk_mib"),
        ({"max_gpus": 1}, LARGE, "gpu"),
        ({"max_gpus": 0}, LARGE, "gpu"),
        ({"allowed_gpu_types": ["B200", "T4"]}, LARGE, "gpu_type"),
        ({"allowed_images": ["a"]}, Resources(image="b"), "image"),
        ({"allowed_sizes": ["lite"]}, resolve_size("basic"), "size"),
        ({"allowed_sizes": ["lite"]}, Resources(memory_mib=256), "size"),
    ],
)
@pytest.mark.parametrize("level", ["API key", "environment type", "pool"])
def test_each_level_limits_each_resource_and_is_named(level, limits, resources, field, grant, pool: Pool) -> None:
    update_pool(pool, **GENEROUS)
    if level == "environment type":
        EnvironmentType.objects.filter(name="catan").update(**limits)
    elif level == "pool":
        update_pool(pool, memory_mib=64, millicpus=100, **limits)
    with pytest.raises(InvalidRequest) as refused:
        grant(resources=resources, allowed=allow(**limits) if level == "API key" else allow())
    assert refused.value.extra["field"] == f"resources.{field}"
    assert level in str(refused.value) or field == "image"
    expected = {"memory_mib": "1024", "millicpus": "1000", "disk_mib": "10240", "gpu_type": "B200, T4", "size": "lite"}
    assert expected.get(field, "") in str(refused.value)
    assert not Lease.objects.exists()


def test_the_strictest_of_several_limits_is_named(grant, pool: Pool) -> None:
    update_pool(pool, **GENEROUS | {"max_memory_mib": 3000})
    EnvironmentType.objects.filter(name="catan").update(max_memory_mib=2000)
    with pytest.raises(InvalidRequest, match='to 2000: the limit of the environment type "catan"'):
        grant(resources=Resources(memory_mib=4000), allowed=allow(max_memory_mib=2500))
    with pytest.raises(InvalidRequest, match="to 1500: the limit of this API key"):
        grant(resources=Resources(memory_mib=4000), allowed=allow(max_memory_mib=1500))
    assert grant(resources=Resources(memory_mib=1500), allowed=allow(max_memory_mib=1500)).memory_mib == 1500


def test_limits_do_not_concern_what_is_not_requested(grant, pool: Pool) -> None:
    update_pool(pool, memory_mib=512, image="other")
    limits = allow(max_memory_mib=64, max_gpus=0, allowed_images=["a"], allowed_sizes=["lite"], allowed_gpu_types=["T4"])
    assert grant(allowed=limits).memory_mib is None


def test_listed_size_is_granted_with_its_memory_and_cpu(grant, pool: Pool) -> None:
    update_pool(pool, **GENEROUS, allowed_sizes=["basic"])
    lease = grant(resources=resolve_size("basic"), allowed=allow(allowed_sizes=["basic", "lite"]))
    assert (lease.size, lease.memory_mib, lease.millicpus) == ("basic", 1024, 250)


def test_wake_and_fork_keep_the_resources_unless_the_fork_states_its_own(grant, pool: Pool) -> None:
    update_pool(pool, **GENEROUS, warm_target=1)
    lease = grant(resources=LARGE)
    run(lease)
    evict(lease)
    run(lease)
    sandbox = get_sandbox(lease)
    assert sandbox.incarnation == 2
    assert Resources.of_lease(lease) == LARGE
    kept = (sandbox.memory_mib, sandbox.millicpus, sandbox.disk_mib, sandbox.gpus, sandbox.gpu_type, sandbox.sized)
    assert kept == (2048, 2000, 20_480, 2, "H100", True)
    own = Resources(memory_mib=128)
    for environment, resources, expected in (("kept", None, LARGE), ("own", own, own)):
        request = LeaseRequest(lease.agent_did, environment, "catan", pool=pool.name, resources=resources)
        assert Resources.of_lease(fork.fork(lease, request, now=NOW)[0]) == expected


def test_a_pool_without_gpus_is_passed_over(grant, pool: Pool) -> None:
    update_pool(pool, **GENEROUS | {"max_gpus": None})
    second = Pool.objects.create(name="second", provider="memory", **GENEROUS)
    AlternativePool.objects.create(environment_type=EnvironmentType.objects.create(name="duo", pool=pool), pool=second)
    lease = grant(environment_type="duo", pool="", resources=Resources(gpus=1))
    run(lease)
    assert get_sandbox(lease).pool == second


CAPABLE = {
    "memory_mib": {"docker", "kubernetes", "daytona", "langsmith", "modal", "runloop", "memory"},
    "disk_mib": {"kubernetes", "daytona", "langsmith", "runloop"},
    "gpus": {"daytona", "modal"},
}


@pytest.mark.parametrize("name", CAPABLE)
def test_a_pool_allows_what_its_provider_can_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    values = {"memory_mib": 1024, "disk_mib": 1024, "gpus": 1}
    resources = Resources(**{name: values[name]}, gpu_type="H100" if name == "gpus" else "")
    pools = [Pool(name=kind, provider=kind, image="python:3", memory_mib=256, **GENEROUS) for kind in PROVIDERS]
    assert {pool.name for pool in pools if fits(pool, resources)} == CAPABLE[name]


def test_a_vendor_may_need_an_image_or_a_gpu_type() -> None:
    assert load_class("daytona").sizes_need_image
    assert load_class("modal").needs_gpu_type
    daytona, modal = (Pool(name=kind, provider=kind, memory_mib=256, **GENEROUS) for kind in ("daytona", "modal"))
    assert not fits(daytona, Resources(memory_mib=1024))
    assert fits(daytona, Resources(memory_mib=1024, image="a"))
    assert not fits(daytona, Resources(gpus=1, gpu_type="T4", image="a"))
    assert fits(daytona, Resources(gpus=1, image="a"))
    assert not fits(modal, Resources(gpus=1))
    assert fits(modal, Resources(gpus=1, gpu_type="T4"))
