"""Queued tasks that the queue delivers more than once."""

import ast
from collections.abc import Callable

import pytest
from django.utils import timezone
from django_q.models import OrmQ, Schedule

from leases import execution, snapshots, tasks
from leases.models import LeaseEvent
from sandboxes.models import Run, Sandbox, Snapshot
from sandboxes.queue_threads import StillRunning
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import MINUTE

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("queue: SKIP LOCKED and hand-written SQL")]


def sh(lease, line: str) -> bytes:
    return execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=timezone.now())[1].stdout


def deliver() -> str:
    """Run the only queued task, as a worker does. The task stays in the queue and can be delivered again."""
    task = OrmQ.objects.get().task
    return getattr(tasks, task["func"].rpartition(".")[2])(*task["args"])


def test_redelivered_restore_does_not_discard_later_work(grant) -> None:
    lease = grant(now=timezone.now())
    sh(lease, "echo before >f")
    snapshot = snapshots.take_snapshot(lease.pk, now=timezone.now())
    assert tasks.request_restore(snapshot, now=timezone.now(), actor="operator", reason="")
    deliver()
    sh(lease, "echo after >f")
    deliver()
    assert sh(lease, "cat f") == b"after\n"
    assert LeaseEvent.objects.filter(lease=lease, kind="restored").count() == 1


def test_redelivered_snapshot_is_taken_once(grant) -> None:
    lease = grant(now=timezone.now())
    sh(lease, "echo 1 >f")
    assert tasks.request_snapshot(Sandbox.objects.get(holder=lease.pk), "one", now=timezone.now(), actor="operator", reason="")
    first, second = deliver(), deliver()
    assert first in second
    assert Snapshot.objects.count() == 1


def test_failed_restore_has_one_entry_in_the_timeline(grant) -> None:
    lease = grant(now=timezone.now())
    sh(lease, "echo 1 >f")
    snapshot = snapshots.take_snapshot(lease.pk, now=timezone.now())
    assert tasks.request_restore(snapshot, now=timezone.now(), actor="operator", reason="")
    Snapshot.objects.update(forgotten_at=timezone.now())
    assert deliver() == deliver()
    assert LeaseEvent.objects.filter(lease=lease, kind="restore_failed").count() == 1


def test_a_requested_snapshot_whose_process_died_after_its_task_is_taken_by_a_later_one(grant, monkeypatch, crash_at) -> None:
    lease = grant(now=timezone.now())
    sh(lease, "echo 1 >f")
    assert tasks.request_snapshot(Sandbox.objects.get(holder=lease.pk), "one", now=timezone.now(), actor="operator", reason="")

    def outlast(name: str, work: Callable[[], str]) -> str:
        with crash_at("snapshot stored"):
            work()
        raise StillRunning("still running")

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "run_in_work_thread", outlast)
        assert deliver() == "still running"
    assert resume() == "still running"  # the claim of the run is not over
    Run.objects.filter(kind="file").update(released=True)
    passes.recover_stalled(now=timezone.now())
    OrmQ.objects.all().delete()  # the first task has ended
    assert resume() == "queued again"
    assert deliver() == str(Snapshot.objects.get().pk)


def resume() -> str:
    """Run the newest task that looks after a requested one, as the scheduler does."""
    row = Schedule.objects.filter(func="leases.tasks.resume").order_by("-pk").first()
    assert row and row.next_run > timezone.now()
    return tasks.resume(*ast.literal_eval(row.args))
