"""manage.py runs: queued runs on the command line."""

import io
import json
import uuid
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from leases.agent_runs.models import AgentRun
from leases.models import Lease
from leases.queue import queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from sandboxes.models import Pool
from tests.conftest import NOW

pytestmark = pytest.mark.django_db


def runs(*args: str) -> str:
    output = io.StringIO()
    call_command("runs", *args, stdout=output)
    return output.getvalue()


def enqueue(pool: Pool, lease: Lease | None = None, agent: str = "did:plc:bob") -> QueuedRun:
    request: dict[str, Any] = {"kind": "exec", "argv": ["true"]}
    return queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did if lease else agent, lease=lease, pool=pool, request=request,
        secrets={"env": {}}, options=QueueOptions(), now=NOW,
    )  # fmt: skip


def test_runs_are_counted_listed_and_interrupted(pool: Pool, lease: Lease) -> None:
    own, other = enqueue(pool, lease), enqueue(pool)
    assert json.loads(runs("stats", "--json"))["queued"] == 2
    assert "queued: 2\n" in runs("stats")
    assert "direct_agent_runs: 0\nrunning: 0\n" in runs("stats")
    assert {line.split()[0] for line in runs("list").splitlines()} == {str(own.pk), str(other.pk)}
    assert runs("list", "--agent", "did:plc:bob").startswith(f"{other.pk} queued did:plc:bob attempt 0 ")
    assert runs("interrupt", str(other.pk)) == "1 interrupted\n"
    assert runs("interrupt", "--lease", str(lease.pk)) == "1 interrupted\n"
    assert runs("list", "--state", "queued") == ""


def test_agent_run_without_the_queue_is_interrupted(lease: Lease) -> None:
    def start() -> AgentRun:
        return AgentRun.objects.create(lease=lease, cli="program", started_at=NOW, recorder_deadline=NOW)

    row = start()
    assert runs("interrupt", "--agent", "did:plc:bob") == runs("interrupt", "--state", "queued") == "0 interrupted\n"
    assert [runs("interrupt", str(row.pk)) for _ in range(2)] == ["1 interrupted\n", "0 interrupted\n"]
    start()
    assert json.loads(runs("stats", "--json"))["direct_agent_runs"] == 2
    assert runs("interrupt", "--lease", str(lease.pk)) == "1 interrupted\n"


def test_all_runs_are_interrupted_only_on_request(pool: Pool) -> None:
    enqueue(pool)
    with pytest.raises(CommandError, match="--all"):
        runs("interrupt")
    with pytest.raises(CommandError, match="not an id"):
        runs("interrupt", "x")
    assert runs("interrupt", "--all") == "1 interrupted\n"
