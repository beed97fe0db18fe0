"""Containers whose commands stop the processes that read their files: that prevents neither a destroy nor an eviction.

Each test runs with commands killed in the kernel, and with a restart by the engine."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from leases import execution, leasing, sweeps
from leases.models import Lease
from sandboxes import processes
from sandboxes.models import Pool, Sandbox, Snapshot
from sandboxes.models.state import DataEvent, DataFile
from sandboxes.processes import ProcessSpec
from sandboxes.providers.docker.freezer import Freezer
from sandboxes.sweeps import passes
from tests.support.hostile import STOPPER
from tests.support.leases import get_sandbox, read, run
from tests.support.sandbox_agent import Gateway

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
MAX_SECONDS = 20.0  # for all sandboxes of a test; one stalled read takes a minute


@pytest.fixture(params=["kernel", "engine"], autouse=True)
def _killed_by(request: pytest.FixtureRequest, docker_ready: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "engine":
        monkeypatch.setattr(Freezer, "is_writable", lambda self: False)


@pytest.fixture
def begin(docker_pool: Pool, agent_gateway: Gateway, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Callable[..., Lease]:
    """Return a function that begins a lease with files in /workspace and /data, and starts STOPPER with the given pulse."""
    monkeypatch.setattr("sandboxes.egress.slots.ensure_agent_directory", lambda slot: agent_gateway.mount)
    settings.AGENT_GATEWAY = agent_gateway.client_path

    def begin_lease(environment: str, *, pulse: float | None = None) -> Lease:
        wanted = leasing.LeaseRequest(f"did:plc:{environment}", environment, "catan", pool=docker_pool.name)
        lease = leasing.acquire(wanted, now=timezone.now())[0]
        run(lease, "sh", "-c", "echo kept >f; echo kept >/data/f", now=timezone.now())
        if pulse is not None:
            with execution.use_lease(lease.pk, now=timezone.now()) as request:
                spec = ProcessSpec(["sh", "-c", f"echo late >/data/late; exec python3 -c '{STOPPER}' {pulse}"], {})
                process = processes.start_process(request, spec, now=timezone.now())
            assert processes.wait_for_log(process, "stopping", within=timedelta(seconds=30), now=timezone.now())
        return lease

    return begin_lease


def test_sandboxes_that_stop_their_readers_are_stored_and_destroyed_as_fast_as_others(begin: Callable[..., Lease]) -> None:
    leases = [begin("steady", pulse=0), begin("pulsing", pulse=40), begin("bystander")]
    for lease in leases:
        leasing.release(lease.pk, now=timezone.now())
    began = time.monotonic()
    assert sweeps.reclaim(now=timezone.now()).counts == {"destroyed": 3, "leases closed": 3}
    assert time.monotonic() - began < MAX_SECONDS
    assert Snapshot.objects.filter(holder__in=[lease.pk for lease in leases]).count() == 3
    assert DataFile.objects.filter(path="late").count() == 2
    assert not DataEvent.objects.exists()


def test_a_sandbox_that_stops_its_readers_is_put_to_sleep(begin: Callable[..., Lease]) -> None:
    lease = begin("steady", pulse=0)
    began = time.monotonic()
    assert passes.evict_idle(now=timezone.now() + timedelta(hours=1)).counts == {"put to sleep": 1}
    assert time.monotonic() - began < MAX_SECONDS
    assert Sandbox.objects.get().state == "cold"
    assert read(lease, now=timezone.now()) == "kept"
    assert get_sandbox(lease).source in ("local", "cloud")
