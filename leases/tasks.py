"""Queued tasks of this app, and the functions that enqueue them."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q
from django_q.models import OrmQ
from django_q.tasks import schedule

from leases import execution, reclaim_threads, snapshots, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease, LeaseEvent, LeaseStatus
from sandboxes import eviction, installation_marks
from sandboxes.db import database_time, dialect
from sandboxes.errors import SandboxError
from sandboxes.hosts import queues, registry
from sandboxes.models import IN_FLIGHT_STATES, Host, ImageTemplate, Run, Sandbox, SandboxState, Snapshot
from sandboxes.pool import allocation
from sandboxes.queue_threads import DETACHED, StillRunning, run_in_work_thread
from sandboxes.sweep_log import SweepResult
from sandboxes.sweeps import passes
from sandboxes.templates import builds

RESUME_FUNCTION, RESUME_INTERVAL = f"{__name__}.resume", timedelta(minutes=10)
MAX_QUEUED_TASKS = 100  # with a longer queue the work is left to the next scheduled sweep


def begin_reclaim(leases: Iterable[Lease]) -> None:
    """Destroy the sandboxes of ended leases at once, in threads of this web process or by a queued sweep. Best effort.

    Left to the scheduled sweep while the installation is not recognised, which refuses it."""
    if installation_marks.find_refusal():
        return
    started = [reclaim_threads.THREADS.start(lease, on_remaining=enqueue_reclaim) for lease in leases]
    if not all(started):
        enqueue_reclaim()


def enqueue_reclaim() -> None:
    """Queue a `reclaim` sweep to destroy sandboxes of ended leases at once. Best effort: the schedule also runs it."""
    for host in _find_hosts_with_work(SandboxState.DESTROYING):
        if OrmQ.objects.count() < MAX_QUEUED_TASKS:
            queues.enqueue("leases.tasks.reclaim", group="reclaim", host=host)


def _find_hosts_with_work(*states: SandboxState) -> list[Host | None]:
    """Return the reachable hosts with sandboxes in these states, or [None], which means any host, if there are none."""
    hosts = Host.objects.filter(Exists(Sandbox.objects.filter(host=OuterRef("pk"), state__in=states)))
    return [host for host in hosts if not registry.is_unreachable(host, now=database_time.now())] or [None]


def _find_host(lease_id: UUID) -> Host | None:
    """Return the host whose worker acts on a lease's sandbox.

    None means any host: the lease has no sandbox, or a cold one of an unreachable host."""
    sandbox = allocation.find_by_holder(lease_id)
    if sandbox is None or sandbox.host is None:
        return None
    is_bound = sandbox.state != SandboxState.COLD
    return sandbox.host if is_bound or not registry.is_unreachable(sandbox.host, now=database_time.now()) else None


def reclaim() -> str:
    return _run_sweep("reclaim", sweeps.reclaim)


def _run_sweep(name: str, sweep: Callable[..., SweepResult]) -> str:
    if refusal := installation_marks.find_refusal():  # the scheduled sweep does the work once it may
        return f"Refused: {refusal}"
    try:
        return run_in_work_thread(name, lambda: str(sweep(now=database_time.now())))
    except StillRunning as running:
        return str(running)


def request_sleep(sandbox: Sandbox, *, now: datetime, actor: str, reason: str, guard: Q | None = None) -> bool:
    """Make a sandbox due for the next idle sweep, with an entry in the timeline. Return False if it cannot be evicted."""
    lease_id = sandbox.holder
    with transaction.atomic():
        if lease_id is None or not eviction.request_eviction(sandbox.pk, now=now, actor=actor, reason=reason, guard=guard):
            return False
        LeaseEvent.objects.create(lease_id=lease_id, at=now, kind="sleep_asked_for", actor=actor, reason=reason)
    return True


def enqueue_idle_sweep() -> None:
    """Queue an `idle` sweep to evict due sandboxes at once. Best effort: the schedule also runs it."""
    for host in _find_hosts_with_work(SandboxState.WAITING, SandboxState.SUSPENDED, SandboxState.WARM):
        if OrmQ.objects.count() < MAX_QUEUED_TASKS:
            queues.enqueue("leases.tasks.sweep_idle", group="idle", host=host)


def sweep_idle() -> str:
    return _run_sweep("idle", passes.evict_idle)


def request_wake(sandbox: Sandbox, *, now: datetime, actor: str, reason: str) -> bool:
    """Queue the wake of a lease's sandbox, with an entry in the timeline. Return False if it is not cold or the lease ended."""
    lease_id = sandbox.holder
    if lease_id is None or not Sandbox.objects.filter(pk=sandbox.pk, state=SandboxState.COLD, lost_at__isnull=True).exists():
        return False
    if not Lease.objects.filter(pk=lease_id, status=LeaseStatus.ACTIVE).exists():
        return False
    with transaction.atomic():  # the event and the task are rows of one database and commit together
        LeaseEvent.objects.create(lease_id=lease_id, at=now, kind="wake_asked_for", actor=actor, reason=reason)
        queues.enqueue("leases.tasks.wake_sandbox", str(lease_id), actor, group="wake", host=_find_host(lease_id))
    return True


def wake_sandbox(lease_id: str, actor: str) -> str:
    """Task: wake a lease's sandbox. Idempotent. Return the sandbox's state, or the reason why the lease has ended."""

    def wake() -> str:
        try:
            return str(execution.ensure_sandbox_ready(UUID(lease_id), now=database_time.now(), actor=actor).state)
        except LeaseEnded as ended:
            return str(ended)

    return _run_requested(wake, "wake_sandbox", lease_id, actor)


def request_restart(sandbox: Sandbox, *, now: datetime, actor: str, reason: str) -> bool:
    """Queue the restart of a lease's sandbox, with an entry in the timeline. Return False if the lease has ended."""
    return _enqueue_with_event(sandbox.holder, "restart_asked_for", "restart_sandbox", "", now=now, actor=actor, reason=reason)


def restart_sandbox(lease_id: str, argument: str, actor: str, request_id: int) -> str:
    """Task: restart a lease's sandbox, once for each request event. Return the sandbox's state, or the error's message.

    A second delivery would end processes that were started after the first one."""

    def restart() -> str:
        if earlier := LeaseEvent.objects.filter(request=request_id).first():
            return earlier.reason
        try:
            sandbox = execution.restart_sandbox(UUID(lease_id), now=database_time.now(), actor=actor)
            kind, outcome = "restarted", sandbox.state if sandbox else "no sandbox"
        except SandboxError as error:
            kind, outcome = "restart_failed", str(error)
        _record_outcome(lease_id, kind, actor, outcome, request_id)
        return str(outcome)

    return _run_requested(restart, "restart_sandbox", lease_id, argument, actor, request_id)


def request_snapshot(sandbox: Sandbox, name: str, *, now: datetime, actor: str, reason: str) -> bool:
    """Queue a snapshot of a lease's workspace, with an entry in the timeline. Return False if the lease has ended."""
    return _enqueue_with_event(sandbox.holder, "snapshot_asked_for", "take_snapshot", name, now=now, actor=actor, reason=reason)


def request_restore(snapshot: Snapshot, *, now: datetime, actor: str, reason: str) -> bool:
    """Queue the restore of a snapshot, with an entry in the timeline. Return False if the lease has ended."""
    return _enqueue_with_event(
        snapshot.holder, "restore_asked_for", "restore_snapshot", str(snapshot.pk), now=now, actor=actor, reason=reason
    )


def _enqueue_with_event(
    lease_id: UUID | None, kind: str, task: str, argument: str, *, now: datetime, actor: str, reason: str
) -> bool:
    if lease_id is None or not Lease.objects.filter(pk=lease_id, status=LeaseStatus.ACTIVE).exists():
        return False
    with transaction.atomic():  # as in request_wake
        request = LeaseEvent.objects.create(lease_id=lease_id, at=now, kind=kind, actor=actor, reason=reason)
        arguments = (str(lease_id), argument, actor, request.pk)
        queues.enqueue(f"leases.tasks.{task}", *arguments, group=task, host=_find_host(lease_id))
    return True


def take_snapshot(lease_id: str, name: str, actor: str, request_id: int) -> str:
    """Task: store a lease's workspace, once for each request event."""
    operation = partial(snapshots.take_snapshot, UUID(lease_id), name=name, now=database_time.now(), actor=actor)
    run = partial(_run_once, operation, lease_id, "snapshot_failed", actor, request_id)
    return _run_requested(run, "take_snapshot", lease_id, name, actor, request_id)


def restore_snapshot(lease_id: str, snapshot_id: str, actor: str, request_id: int) -> str:
    """Task: restore a snapshot into a lease's workspace, once for each request event.

    The queue delivers a task again after its retry time. A second restore would discard the work done after the first."""
    operation = partial(snapshots.restore_snapshot, UUID(lease_id), UUID(snapshot_id), now=database_time.now(), actor=actor)
    run = partial(_run_once, operation, lease_id, "restore_failed", actor, request_id)
    return _run_requested(run, "restore_snapshot", lease_id, snapshot_id, actor, request_id)


def _run_requested(run: Callable[[], str], task: str, *arguments: Any) -> str:
    """Run a task that an operator has requested. If it outlasts its delivery, `resume` checks whether its process has died.

    A restored or copied database has tasks in its queue that were executed since. While it is not recognised, tasks are
    dropped."""
    if refusal := installation_marks.find_refusal():
        return f"Refused: {refusal}"
    try:
        return run_in_work_thread(task, run)
    except StillRunning as running:
        _schedule_resume(task, *arguments)
        return str(running)


def _schedule_resume(task: str, *arguments: Any) -> None:
    next_run = database_time.now() + RESUME_INTERVAL
    schedule(RESUME_FUNCTION, task, *arguments, next_run=next_run, cluster=queues.choose_queue())


def resume(task: str, lease_id: str, *arguments: Any) -> str:
    """Task: queue a requested task again whose process may have died. The task does nothing if it has an outcome already.

    While a claim of the lease's sandbox is extended, the requested task is alive. This check is then repeated after
    RESUME_INTERVAL."""
    alive = Q(holder=lease_id, deadline_at__gt=database_time.now())
    in_flight = Sandbox.objects.filter(alive, state__in=IN_FLIGHT_STATES).exists()
    if in_flight or Run.objects.filter(alive, kind="file", ended_at__isnull=True, released=False).exists():
        _schedule_resume(task, lease_id, *arguments)
        return "still running"
    queues.enqueue(f"leases.tasks.{task}", lease_id, *arguments, group=task, host=_find_host(UUID(lease_id)))
    return "queued again"


def _run_once(operation: Callable[..., Snapshot], lease_id: str, failure_kind: str, actor: str, request_id: int) -> str:
    """Return the id of the resulting snapshot, or record the error in the lease's timeline and return its message.

    The outcome of an earlier or concurrent delivery is returned instead of a second one."""
    if earlier := LeaseEvent.objects.filter(request=request_id).first():
        return earlier.reason
    try:
        return str(operation(request_id=request_id).pk)
    except IntegrityError as error:
        dialect.raise_unless_unique(error)
        return LeaseEvent.objects.get(request=request_id).reason
    except SandboxError as error:
        _record_outcome(lease_id, failure_kind, actor, str(error), request_id)
        return str(error)


def _record_outcome(lease_id: str, kind: str, actor: str, reason: str, request_id: int) -> None:
    """Record the outcome of a request in the lease's timeline, unless another delivery of the request was first."""
    try:
        with transaction.atomic():
            LeaseEvent.objects.create(
                lease_id=lease_id, at=database_time.now(), kind=kind, actor=actor, reason=reason, request_id=request_id
            )
    except IntegrityError as error:
        dialect.raise_unless_unique(error)


def enqueue_template_build(template: ImageTemplate) -> None:
    """Queue the build of a template for the worker of its host. A sweep queues a build again that does not begin."""
    queues.enqueue("leases.tasks.build_template", str(template.pk), group="build_template", host=template.host)


def build_template(template_id: str) -> str:
    """Task: build a waiting template. Idempotent: a build that another worker has begun, or that has ended, is left alone."""

    def build() -> str:
        return "built" if builds.build(UUID(template_id), now=database_time.now()) else "nothing to build"

    if refusal := installation_marks.find_refusal():  # a sweep queues the build again
        return f"Refused: {refusal}"
    try:
        return run_in_work_thread("build_template", build, wait=DETACHED)
    except StillRunning as running:
        return str(running)
    except ImageTemplate.DoesNotExist:
        return "removed"
