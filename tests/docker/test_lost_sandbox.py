"""Sandboxes that end, or fill their workspace, during a command in a real container."""

import subprocess
from datetime import timedelta

import pytest
from django.utils import timezone

from leases import execution
from leases.errors import LeaseEnded
from leases.models import LeaseEvent
from sandboxes.errors import WorkspaceFull
from sandboxes.models import Pool, Run
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE
from tests.support.leases import get_sandbox, run, update_pool

pytestmark = [pytest.mark.docker, pytest.mark.django_db]


def test_killed_container_ends_the_lease_as_lost(grant, docker_pool: Pool) -> None:
    now = timezone.now()
    lease = grant(pool=docker_pool.name, now=now)
    ref = execution.ensure_sandbox_ready(lease.pk, now=now).ref
    killer = ["sh", "-c", f"until docker top {ref} | grep -q 'sleep 300'; do sleep 0.1; done; docker kill {ref}"]
    with subprocess.Popen(killer, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as kill:
        with pytest.raises(LeaseEnded):
            execution.exec_command(lease.pk, Command(["sleep", "300"], MINUTE), now=now)
        kill.wait()
    assert (Run.objects.get().outcome, Run.objects.get().exit_code) == ("lost", None)
    assert "stopped while the command ran" in LeaseEvent.objects.get(lease=lease, kind="ended").reason


def test_command_that_fills_the_workspace_is_warned_and_the_next_refused(grant, docker_pool: Pool) -> None:
    update_pool(docker_pool, workspace_limit_mib=10)
    now = timezone.now()
    lease = grant(pool=docker_pool.name, now=now - timedelta(seconds=10))
    run(lease, "sh", "-c", "head -c 20M /dev/zero >big", now=now)
    assert "/workspace holds 20 MiB" in Run.objects.get().note
    assert get_sandbox(lease).workspace_bytes > 20 << 20
    with pytest.raises(WorkspaceFull):
        run(lease, now=timezone.now())
