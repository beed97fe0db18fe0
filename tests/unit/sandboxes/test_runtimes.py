"""Runtime of sandboxes: that of the pool, else of the provider's configuration, at each start and wake."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from leases import execution
from leases.api.leases import serialize_sandbox
from leases.models import Lease
from sandboxes import eviction, providers
from sandboxes.errors import SandboxNotReady
from sandboxes.models import Pool, Sandbox
from sandboxes.pool import allocation, prewarmed, runtimes, starts
from sandboxes.providers.registry import PROVIDERS, RUNTIME_PROVIDERS
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db


@pytest.fixture
def with_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory provider have runtimes."""
    monkeypatch.setattr(runtimes, "RUNTIME_PROVIDERS", (*RUNTIME_PROVIDERS, "memory"))


def set_runtime(pool: Pool, runtime: str) -> None:
    Pool.objects.filter(pk=pool.pk).update(runtime=runtime)
    pool.refresh_from_db()


def show(sandbox: Sandbox) -> tuple[str, str, str | None]:
    return sandbox.runtime, starts.build_spec(sandbox).runtime, serialize_sandbox(sandbox)["runtime"]


@pytest.mark.usefixtures("with_runtimes")
def test_a_changed_runtime_applies_from_the_next_wake(pool: Pool, grant: Callable[..., Lease], now: datetime) -> None:
    lease = grant(ttl=timedelta(hours=4))
    first = execution.ensure_sandbox_ready(lease.pk, now=now)
    assert show(first) == ("", "", None)
    set_runtime(pool, "runsc")
    assert show(execution.ensure_sandbox_ready(lease.pk, now=now)) == ("", "", None)  # it runs
    assert eviction.evict(first.pk, now=now, reason="test")
    woken = execution.ensure_sandbox_ready(lease.pk, now=now + MINUTE)
    assert (woken.pk, woken.incarnation, show(woken)) == (first.pk, 2, ("runsc", "runsc", "runsc"))


@pytest.mark.usefixtures("with_runtimes")
def test_a_sandbox_that_was_warmed_with_another_runtime_is_not_claimed(
    pool: Pool, grant: Callable[..., Lease], now: datetime
) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    outdated = allocation.start_warm(pool, now=now)
    assert outdated
    set_runtime(pool, "runsc")
    present = allocation.start_warm(pool, now=now)
    assert present and [*prewarmed.find_unclaimed(pool)] == [present]
    first, second = (execution.ensure_sandbox_ready(grant(agent=f"did:plc:{name}").pk, now=now) for name in ("a", "b"))
    assert (first.pk, first.runtime, second.runtime) == (present.pk, "runsc", "runsc")
    assert Sandbox.objects.get(pk=outdated.pk).holder is None


def test_a_provider_without_runtimes_starts_nothing_with_one(
    pool: Pool, grant: Callable[..., Lease], now: datetime, memory: Any
) -> None:
    lease = grant()
    set_runtime(pool, "runsc")
    with pytest.raises(SandboxNotReady, match="names a runtime"):
        execution.ensure_sandbox_ready(lease.pk, now=now)
    assert memory.list(str(pool.owner)) == []
    with pytest.raises(ValidationError) as refused:
        pool.full_clean()
    assert [*refused.value.message_dict] == ["runtime"]


@pytest.mark.parametrize("name", ["a b", "-x", "a/b", "x" * 254])
def test_a_runtime_has_the_form_of_a_name(pool: Pool, name: str) -> None:
    pool.provider, pool.runtime = "docker", name
    with pytest.raises(ValidationError) as refused:
        pool.full_clean()
    assert [*refused.value.message_dict] == ["runtime"]


def test_a_pool_without_a_runtime_has_that_of_the_configuration(settings: Any) -> None:
    settings.DOCKER_RUNTIME = "kata-runtime"
    expected = {name: "kata-runtime" if name == "docker" else "" for name in PROVIDERS}
    assert {name: runtimes.get_runtime(Pool(name="p"), name) for name in PROVIDERS} == expected
    assert runtimes.get_runtime(Pool(name="p", runtime="runsc"), "docker") == "runsc"
    assert providers.get_default_runtime("docker", "p") == "kata-runtime"
