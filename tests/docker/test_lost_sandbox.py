"""Sandboxes that stop, lose their container or fill their workspace in a real engine. Only those without files are lost."""

import subprocess
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from leases import execution, leasing
from leases.errors import LeaseEnded
from leases.models import Lease, LeaseEvent
from sandboxes.errors import ProviderCallFailed, WorkspaceFull
from sandboxes.models import Pool, Run, Sandbox, Snapshot
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes, reconciliation
from tests.conftest import MINUTE
from tests.docker.test_provider import docker
from tests.support.leases import evict, get_sandbox, read, run, update_pool, write

pytestmark = [pytest.mark.docker, pytest.mark.django_db]
STOPS = {
    "kill": "restarted",
    "stop -t 1": "restarted",
    "restart -t 1": "",  # the engine has started it again, so that the next command does not
    "rm -f": "removed at its engine, and made again on its volumes",
}


@pytest.fixture
def lease(grant: Callable[..., Lease], docker_pool: Pool) -> Lease:
    """Lease whose sandbox has a file that is stored nowhere else."""
    lease = grant(pool=docker_pool.name, now=timezone.now())
    write(lease, "precious", now=timezone.now())
    return lease


def start_killer(ref: str, stop: str, *, then: str = "true") -> "subprocess.Popen[bytes]":
    """Run a command of the engine, and another command, once `sleep 300` runs in the container."""
    script = f"until docker top {ref} | grep -q 'sleep 300'; do sleep 0.1; done; docker {stop} {ref} && {then}"
    return subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("stop", STOPS)
def test_stop_during_a_command_ends_its_run_and_the_next_use_finds_the_files(lease: Lease, stop: str) -> None:
    with start_killer(get_sandbox(lease).ref, stop), pytest.raises(ProviderCallFailed, match="Its files are kept"):
        execution.exec_command(lease.pk, Command(["sleep", "300"], MINUTE), now=timezone.now())
    ended = Run.objects.latest("started_at")
    assert (ended.outcome, ended.exit_code, ended.note.partition(":")[0]) == ("error", None, "Stopped")
    assert get_sandbox(lease).lost_at is None
    assert read(lease, now=timezone.now()) == "precious"
    assert_recovered(lease, STOPS[stop])


@pytest.mark.parametrize("stop", ["kill", "rm -f"])
def test_next_command_says_that_the_sandbox_was_stopped_between_two_commands(lease: Lease, stop: str) -> None:
    docker(*stop.split(), get_sandbox(lease).ref)
    assert read(lease, now=timezone.now()) == "precious"
    assert_recovered(lease, STOPS[stop])
    assert read(lease, now=timezone.now()) == "precious"
    assert Run.objects.latest("started_at").note == ""


def assert_recovered(lease: Lease, how: str) -> None:
    """Check the note of the last Run and the events of the lease. Empty: no recovery."""
    note, events = Run.objects.latest("started_at").note, LeaseEvent.objects.filter(lease=lease, kind="recovered")
    assert (note.startswith(f"The sandbox was {how}."), events.count()) == (bool(how), bool(how))
    assert not events or events[0].reason == note


@pytest.mark.parametrize("volume", ["data", "workspace"])
def test_sandbox_is_lost_with_its_container_and_one_of_its_volumes(lease: Lease, volume: str) -> None:
    ref = get_sandbox(lease).ref
    docker("rm", "-f", ref)
    docker("volume", "rm", f"{ref}-{volume}")
    with pytest.raises(LeaseEnded):
        read(lease, now=timezone.now())
    assert Lease.objects.get().end_reason == "lost"


def test_removal_of_container_and_volumes_during_a_command_ends_the_lease_as_lost(lease: Lease) -> None:
    ref = get_sandbox(lease).ref
    # The look at the volumes may come before they are gone.
    expected = pytest.raises((LeaseEnded, ProviderCallFailed))
    with start_killer(ref, "rm -f", then=f"docker volume rm {ref}-data {ref}-workspace"), expected:
        execution.exec_command(lease.pk, Command(["sleep", "300"], MINUTE), now=timezone.now())
    with pytest.raises(LeaseEnded):
        read(lease, now=timezone.now())
    assert Lease.objects.get().end_reason == "lost"


def test_state_of_a_sandbox_without_its_container_is_stored_by_its_eviction(lease: Lease) -> None:
    docker("rm", "-f", get_sandbox(lease).ref)
    evict(lease, now=timezone.now())
    assert (get_sandbox(lease).state, read(lease, now=timezone.now())) == ("cold", "precious")


def test_state_of_a_sandbox_without_its_container_is_stored_at_the_end_of_its_lease(lease: Lease) -> None:
    docker("rm", "-f", get_sandbox(lease).ref)
    leasing.release(lease.pk, now=timezone.now())
    assert not passes.destroy_due(now=timezone.now()).failures
    assert Sandbox.objects.get().state == "destroyed"
    assert Snapshot.objects.filter(holder=lease.pk).exists()


def test_sweep_keeps_a_sandbox_whose_volumes_are_left(lease: Lease, grant: Callable[..., Lease], docker_pool: Pool) -> None:
    other = grant(pool=docker_pool.name, agent="did:plc:other", now=timezone.now())
    write(other, now=timezone.now())
    docker("rm", "-f", get_sandbox(lease).ref)
    assert "lost" not in reconciliation.reconcile(now=timezone.now(), grace=timedelta(days=1)).counts
    assert read(lease, now=timezone.now()) == "precious"


def test_container_that_is_created_again_has_the_settings_of_the_first_one(lease: Lease) -> None:
    provider, ref = DockerProvider(), get_sandbox(lease).ref
    before = provider._engine.client.inspect_container(ref)
    docker("rm", "-f", ref)
    read(lease, now=timezone.now())
    after = provider._engine.client.inspect_container(ref)
    assert after["Id"] != before["Id"]
    assert {**after["HostConfig"], "NetworkMode": "", "Mounts": []} == {**before["HostConfig"], "NetworkMode": "", "Mounts": []}
    assert {**after["Config"], "Hostname": ""} == {**before["Config"], "Hostname": ""}
    assert {*map(describe_mount, after["Mounts"])} == {*map(describe_mount, before["Mounts"])}


def describe_mount(mount: dict[str, object]) -> tuple[object, ...]:
    return mount["Type"], mount.get("Name"), mount["Destination"], mount["RW"]


def test_command_that_fills_the_workspace_is_warned_and_the_next_refused(grant, docker_pool: Pool) -> None:
    update_pool(docker_pool, workspace_limit_mib=10)
    now = timezone.now()
    lease = grant(pool=docker_pool.name, now=now - timedelta(seconds=10))
    run(lease, "sh", "-c", "head -c 20M /dev/zero >big", now=now)
    assert "/workspace holds 20 MiB" in Run.objects.get().note
    assert get_sandbox(lease).workspace_bytes > 20 << 20
    with pytest.raises(WorkspaceFull):
        run(lease, now=timezone.now())
