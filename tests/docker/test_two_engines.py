"""Two real engines with one database: neither touches the other's sandboxes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from leases import leasing, sweeps
from leases.models import Lease, LeaseStatus
from sandboxes import providers
from sandboxes.errors import WrongHost
from sandboxes.hosts import registry
from sandboxes.models import Pool, Sandbox, SandboxState
from sandboxes.providers.errors import Unavailable
from sandboxes.sweeps import heartbeat
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.support.leases import evict, get_sandbox, read, run, write
from tests.support.servers.engines import private_engine

pytestmark = [
    pytest.mark.docker,
    pytest.mark.django_db,
    pytest.mark.matrix("restarts of an engine; test_hosts.py has identities"),
]
OnEngine = Callable[[str], Any]


@pytest.fixture(scope="module")
def second_engine(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """DOCKER_HOST of a second engine on this machine."""
    with private_engine(tmp_path_factory.mktemp("engine") / "data", images=(DOCKER_IMAGE,)) as engine:
        yield engine.url


@pytest.fixture
def on_engine(monkeypatch: pytest.MonkeyPatch) -> OnEngine:
    """Act as a process on the host of an engine, given by its DOCKER_HOST: `with on_engine(url): ...`."""

    @contextmanager
    def act(url: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", url) if url else patch.delenv("DOCKER_HOST", raising=False)
            providers._create_provider.cache_clear()
            yield
        providers._create_provider.cache_clear()

    return act


@pytest.fixture
def lease(docker_pool: Pool, grant: Callable[..., Lease], settings: Any) -> Lease:
    """Lease whose container runs on the machine's own engine, with a file that is stored nowhere."""
    settings.SANDBOX_PROVIDER = "docker"
    lease = grant(pool=docker_pool.name, now=timezone.now())
    write(lease, "kept", now=timezone.now())
    return lease


def sweep_all() -> None:
    now = timezone.now() + MINUTE
    heartbeat.record_heartbeats(now=now)
    for sweep in (sweeps.recover_stalled, sweeps.reclaim, sweeps.destroy_cold):
        assert not sweep(now=now).failures
    assert not sweeps.reconcile(now=now, grace=MINUTE).failures


def test_the_other_engine_ends_no_lease_confirms_no_destroy_and_frees_no_slot(
    lease: Lease, docker_pool: Pool, second_engine: str, on_engine: OnEngine
) -> None:
    sandbox = get_sandbox(lease)
    with on_engine(second_engine):
        assert registry.get_local_host_id("docker") != sandbox.host_id
        with pytest.raises(WrongHost):
            run(lease, now=timezone.now())
        sweep_all()
        assert Lease.objects.get(pk=lease.pk).status == LeaseStatus.ACTIVE
    assert read(lease, now=timezone.now()) == "kept"
    with on_engine(second_engine):
        leasing.release(lease.pk, now=timezone.now())
        sweep_all()
        sandbox.refresh_from_db()
        assert (sandbox.state, sandbox.slot is None) == (SandboxState.DESTROYING, False)
    sweep_all()
    assert Sandbox.objects.get(pk=sandbox.pk).state == SandboxState.DESTROYED
    assert providers.get_provider("docker").list(str(docker_pool.owner)) == []


def test_a_cold_sandbox_moves_to_the_engine_that_wakes_it(lease: Lease, second_engine: str, on_engine: OnEngine) -> None:
    evict(lease, now=timezone.now())
    with on_engine(second_engine):
        assert read(lease, now=timezone.now()) == "kept"
        sandbox = get_sandbox(lease)
        assert sandbox.host_id == registry.get_local_host_id("docker")
    with pytest.raises(Unavailable):
        registry.get_sandbox_provider(sandbox)
    with on_engine(second_engine):
        leasing.release(lease.pk, now=timezone.now())
        sweep_all()
        assert Sandbox.objects.get(pk=sandbox.pk).state == SandboxState.DESTROYED


def test_a_process_whose_docker_host_was_repointed_loses_no_sandbox(
    lease: Lease, second_engine: str, on_engine: OnEngine
) -> None:
    sandbox = get_sandbox(lease)
    bound = registry.get_sandbox_provider(sandbox)
    with on_engine(second_engine):
        other = providers.get_provider("docker")
        other.engine_id()  # connects
    bound._provider = other  # type: ignore[attr-defined]
    with pytest.raises(Unavailable, match="another engine"):
        bound.inspect(sandbox.ref)
    with pytest.raises(Unavailable, match="another engine"):
        bound.destroy(sandbox.ref)
    assert read(lease, now=timezone.now()) == "kept"


def test_the_engine_keeps_its_identity_over_a_restart(tmp_path: Path, docker_ready: None, on_engine: OnEngine) -> None:
    with private_engine(tmp_path / "data", images=(DOCKER_IMAGE,)) as engine, on_engine(engine.url):
        before = providers.get_provider("docker").engine_id()
        engine.kill()
        engine.start()
        providers._create_provider.cache_clear()
        assert providers.get_provider("docker").engine_id() == before
