"""manage.py stop: all work of an agent, an environment or the installation."""

import io

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from leases.agent_runs.models import AgentRun
from leases.models import Lease
from sandboxes.models import Run
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.billing import start_run

pytestmark = pytest.mark.django_db


def stop(*args: str) -> str:
    output = io.StringIO()
    call_command("stop", *args, stdout=output)
    return output.getvalue()


def test_work_is_counted_then_stopped(lease: Lease) -> None:
    AgentRun.objects.create(lease=lease, cli="program", started_at=NOW, recorder_deadline=NOW + MINUTE)
    assert "active leases: 1\nqueued runs: 0\ndirect agent runs: 1\n" in stop("--all", "--end-leases", "--dry-run")
    assert ", 1 direct agent run interrupted, " in stop("--agent", lease.agent_did)
    assert ", 0 direct agent runs interrupted, " in stop("--environment", lease.environment_id)
    assert stop("--all", "--end-leases").startswith("1 lease ended, ")


def test_failure_is_named_and_exits_with_1(lease: Lease, memory: MemoryProvider) -> None:
    start_run(lease)
    memory.fail("kill", Unavailable("engine gone"), times=1)
    with pytest.raises(CommandError, match=f"Not stopped: command {Run.objects.get().pk}: engine gone"):
        stop("--all")
    assert ", 1 command killed, " in stop("--all")


def test_scope_is_required_and_must_exist(lease: Lease) -> None:
    for args in (
        [],
        ["--agent", "did:plc:none"],
        ["--agent", "x"],
        ["--environment", "none"],
        ["--all", "--agent", "did:plc:a"],
    ):
        with pytest.raises(CommandError):
            stop(*args)
