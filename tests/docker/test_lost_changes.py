"""A database that has lost its last changes, on a real engine: the container of a later life and its volumes are left alone."""

from collections.abc import Callable

import pytest
from django.db import transaction
from django.utils import timezone

from leases import snapshots
from leases.models import Lease
from sandboxes.models import Pool, Run, Snapshot
from sandboxes.providers import get_provider
from tests.support.leases import evict, get_sandbox, read, run, write

pytestmark = [pytest.mark.docker, pytest.mark.django_db]


def test_wake_of_a_sandbox_that_runs_already_neither_adopts_nor_overwrites_its_later_life(
    grant: Callable[..., Lease], docker_pool: Pool
) -> None:
    docker = get_provider("docker")
    lease = grant(pool=docker_pool.name, now=timezone.now())
    write(lease, "one", now=timezone.now())
    evict(lease, now=timezone.now())
    before = transaction.savepoint()
    write(lease, "two", now=timezone.now())
    run(lease, "sh", "-c", "echo new >g", now=timezone.now())
    later = get_sandbox(lease).ref
    transaction.savepoint_rollback(before)  # the database is that of the time before the wake
    try:
        assert read(lease, now=timezone.now()) == "one"
        assert run(lease, "test", "-e", "g", now=timezone.now()).exit_code == 1
        assert docker.read_file(later, "/workspace/f", limit=9) == b"two\n"
        found = Snapshot.objects.get(holder=lease.pk, kind="found")
        assert str(found.pk) in Run.objects.exclude(note="").get().note
        snapshots.restore_snapshot(lease.pk, found.pk, now=timezone.now())
        assert read(lease, now=timezone.now()) == "two"
        assert run(lease, "cat", "g", now=timezone.now()).stdout == b"new\n"
    finally:
        docker.destroy(later)
