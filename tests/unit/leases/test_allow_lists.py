"""Allow lists of API keys: environment types and pools that a key may use for new leases."""

from collections.abc import Callable

import pytest

from leases import api_keys, fork, leasing
from leases.allow_lists import AllowLists
from leases.errors import InvalidRequest, NotAllowed
from leases.models import AgentKey, EnvironmentType, Lease
from leases.one_shot import OneShotRequest, run_once
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.leases import run

pytestmark = pytest.mark.django_db
ADA = "did:plc:ada"
ORDINARY = AllowLists()


@pytest.fixture
def gpu(pool: Pool) -> Pool:
    """Restricted pool, with the restricted environment type "training" that uses it."""
    gpu = Pool.objects.create(name="gpu", provider="memory", restricted=True)
    EnvironmentType.objects.create(name="training", pool=gpu, restricted=True)
    return gpu


@pytest.mark.parametrize(
    ("environment_type", "pool_name", "field"), [("training", "", "environment_type"), ("catan", "gpu", "pool")]
)
def test_a_restricted_type_or_pool_needs_an_entry_in_the_list(gpu, grant, environment_type, pool_name, field) -> None:
    with pytest.raises(NotAllowed) as refused:
        grant(environment_type=environment_type, pool=pool_name, allowed=ORDINARY)
    assert refused.value.extra["field"] == field
    assert not Lease.objects.exists()
    listed = AllowLists(environment_types=["catan", "training"], pools=["gpu"])
    assert grant(environment_type=environment_type, pool=pool_name, allowed=listed).pool == gpu


def test_a_list_excludes_ordinary_rows_that_it_does_not_name(grant, pool: Pool) -> None:
    for allowed, field in [(AllowLists(environment_types=["coding"]), "environment_type"), (AllowLists(pools=["x"]), "pool")]:
        with pytest.raises(NotAllowed) as refused:
            grant(allowed=allowed)
        assert refused.value.extra["field"] == field
    assert grant(allowed=AllowLists(["catan"], [pool.name])).status == "active"


def test_the_restricted_pool_of_an_allowed_type_is_allowed_unless_the_pools_are_listed(gpu: Pool, grant, pool: Pool) -> None:
    training = AllowLists(environment_types=["training"])
    assert grant(environment_type="training", pool="", allowed=training).pool == gpu
    assert grant(environment="again", environment_type="training", pool="gpu", allowed=training).pool == gpu
    with pytest.raises(NotAllowed):
        grant(environment="other", environment_type="training", pool="", allowed=AllowLists(["training"], [pool.name]))


def test_the_message_for_an_unknown_type_names_only_types_that_the_key_may_use(gpu: Pool, grant) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grant(environment_type="none", allowed=AllowLists(environment_types=["coding"]))
    assert str(refused.value).endswith("Known: coding.")
    with pytest.raises(InvalidRequest) as refused:
        grant(environment_type="none", allowed=ORDINARY)
    assert "catan" in str(refused.value)
    assert "training" not in str(refused.value)


def test_a_one_shot_run_of_a_type_that_is_not_allowed_starts_nothing(gpu: Pool, memory: MemoryProvider) -> None:
    for fields, field in [({"environment_type": "training"}, "environment_type"), ({"pool": "gpu"}, "pool")]:
        with pytest.raises(NotAllowed) as refused:
            run_once(OneShotRequest(ADA, ["true"], timeout=999 * MINUTE, allowed=ORDINARY, **fields), now=NOW)
        assert refused.value.extra["field"] == field
    assert not Lease.objects.exists()


def test_a_fork_into_a_type_that_is_not_allowed_is_refused_before_a_snapshot(
    gpu: Pool, grant: Callable[..., Lease], at_checkpoint
) -> None:
    source = grant()
    run(source, "true")
    Sandbox.objects.filter(holder=source.pk).update(state="cold")
    request = leasing.LeaseRequest(ADA, "fork-1", "training", allowed=ORDINARY)
    with pytest.raises(NotAllowed) as refused:
        fork.fork(source, request, now=NOW)
    assert refused.value.extra["field"] == "environment_type"
    assert (Lease.objects.count(), Sandbox.objects.get().state) == (1, "cold")


def test_an_existing_lease_is_returned_whatever_the_list(gpu: Pool, grant: Callable[..., Lease]) -> None:
    first = grant(environment_type="training", pool="")
    assert grant(environment_type="training", pool="", allowed=ORDINARY) == first


def test_a_new_key_has_the_ordinary_types_and_pools() -> None:
    row, _ = api_keys.issue_key([ADA], now=NOW)
    assert AllowLists.of_key(AgentKey.objects.get(pk=row.pk)) == AllowLists([], [])


@pytest.mark.parametrize(("lists", "field"), [({"environment_types": ["x"]}, "environment_types"), ({"pools": ["x"]}, "pools")])
def test_a_key_for_an_unknown_type_or_pool_is_refused(lists: dict[str, list[str]], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        api_keys.issue_key([ADA], **lists, now=NOW)
    assert refused.value.extra["field"] == field
    assert not AgentKey.objects.exists()
