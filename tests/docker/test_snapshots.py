"""Snapshot, restore, wake and fork in real containers."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from leases import execution, leasing, snapshots
from leases import fork as forking
from leases.leasing import LeaseRequest
from leases.models import Lease
from sandboxes import files, providers
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import WORKSPACE
from sandboxes.runs import Command
from sandboxes.state.file_tree import FileTree

pytestmark = [pytest.mark.docker, pytest.mark.django_db]
MINUTE = timedelta(minutes=1)


def sh(lease: Lease, script: str) -> str:
    _, result = execution.exec_command(lease.pk, Command(argv=["sh", "-ec", script], timeout=MINUTE), now=timezone.now())
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def looked(lease: Lease) -> tuple[list[str], bytes, str]:
    """Return (paths in the workspace, content of one file, source of the reading)."""

    def act(tree: FileTree) -> tuple[list[str], bytes]:
        return sorted(tree.list_entries("", deep=True, limit=100)), tree.read_range("src/run", start=0, length=100)[0]

    command, now = Command(argv=["look"], kind="file", timeout=MINUTE, needs_data=False), timezone.now()
    with execution.use_lease(lease.pk, now=now) as request:
        (names, content), source = files.read_files(request, WORKSPACE, command, act, now=now)
    return names, content, source


def test_snapshot_restore_wake_and_fork(docker_pool: Pool) -> None:
    ask = LeaseRequest(agent_did="did:plc:ada", environment_id="one", environment_type="catan", pool=docker_pool.name)
    lease, _ = leasing.acquire(ask, now=timezone.now())
    sh(lease, "mkdir -p src && printf '#!/bin/sh\\necho one\\n' > src/run && chmod 755 src/run && ln -s src/run link")
    taken = snapshots.take_snapshot(lease.pk, name="one", now=timezone.now())
    sh(lease, "echo two > src/run; rm link; touch new; echo kept > /data/diary")

    names, content, source = looked(lease)
    assert ("new" in names, "link" in names, content, source) == (True, False, b"two\n", "sandbox")
    snapshots.restore_snapshot(lease.pk, taken.pk, now=timezone.now())
    assert providers.get_provider("docker").list(str(docker_pool.owner)) == []
    names, content, source = looked(lease)
    assert ("new" in names, "link" in names, content, source) == (False, True, b"#!/bin/sh\necho one\n", "snapshot")
    assert Sandbox.objects.get().state == "cold"

    assert sh(lease, "./link; test ! -e new; cat /data/diary") == "one\nkept"
    assert looked(lease) == (names, content, "sandbox")

    into = LeaseRequest(agent_did="did:plc:ada", environment_id="two", environment_type="catan", pool=docker_pool.name)
    fork, _ = forking.fork(lease, into, now=timezone.now())
    assert sh(fork, "./link; cat /data/diary") == "one\nkept"
    assert json.loads(sh(fork, "cat config.json"))["leaseId"] == str(fork.pk)
    sh(fork, "echo three > src/run")
    assert sh(lease, "./link") == "one"
    for one in (lease, fork):
        leasing.release(one.pk, now=timezone.now())
