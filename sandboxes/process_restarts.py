"""Restart of background processes: after an exit, by their restart policy, and after the wake of a cold sandbox.

The control plane restarts processes, not the agent in the sandbox: the count, the backoff and a kill by the caller are columns
that survive the agent, a restart works with every provider and without an agent, and a sandbox that is woken has no state from
which an agent could restart. The price is latency: an exit is noticed by the next listing, at the latest by the sweep `stalled`
after a minute. The sweep opens no run, so a process that crashes again and again does not delay an eviction.

Each start has a mark of its own. A restart claims the row first, with a new mark, and then calls the provider. A crash in
between leaves a row whose start is not confirmed, which `process_ends.close_ended` closes as failed after the deadline of the
start."""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from django.db import transaction
from django.db.models import DateTimeField, F, QuerySet, Value
from django.db.models.functions import Coalesce

from sandboxes.claims import KILL_GRACE
from sandboxes.db import encryption
from sandboxes.db.clock import Clock, clock_from, compute_backoff
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.egress.environment import build_environment
from sandboxes.engine_turns import Engine, EngineTurns, list_by_engine
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox, SandboxState
from sandboxes.models.processes import MAY_RESTART, Process, ProcessStatus, RestartPolicy
from sandboxes.providers.base import Provider
from sandboxes.providers.command_results import ProcessState
from sandboxes.providers.errors import ProviderError, Rejected, StartKilled
from sandboxes.providers.launcher import KILLED_EXIT_CODE, LAUNCH_TIMEOUT
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
MAX_PROCESSES = 16  # running in one sandbox at once, with those that are to be restarted
USED_STATES = (SandboxState.RUNNING, SandboxState.WAITING)  # awake, and its first run has attached /data
START_TIMEOUT = LAUNCH_TIMEOUT + KILL_GRACE
MIN_BACKOFF, MAX_BACKOFF = timedelta(seconds=5), timedelta(minutes=10)


def seal_env(process_id: uuid.UUID, env: dict[str, str]) -> bytes:
    """Encrypt the variables of a process, which a restart needs."""
    return encryption.encrypt(json.dumps(env).encode(), row=f"process {process_id}")


def open_env(process: Process) -> dict[str, str]:
    """Return the variables of a process. Raise encryption.DecryptionFailed."""
    variables: dict[str, str] = json.loads(encryption.decrypt(bytes(process.sealed_env or b""), row=f"process {process.pk}")[0])
    return variables


def close_process(
    process: Process,
    state: ProcessStatus,
    *,
    now: datetime,
    exit_code: int | None = None,
    note: str = "",
    may_wake: bool = False,
    has_vanished: bool = False,
) -> bool:
    """Close an open row, and schedule the restart if the policy wants one. Return False if another process was first.

    Only the start that was observed is closed: a row that was restarted since has another mark. With `may_wake` the sandbox is
    gone, and its successor starts a process with `restart_after_wake` again. A process that `has_vanished` in its sandbox, as
    after a restart of the engine, has failed for its policy."""
    rows = Process.objects.filter(pk=process.pk, mark=process.mark, ended_at__isnull=True)
    columns = {"state": state, "ended_at": now, "exit_code": exit_code, "note": note}
    unkilled = rows.filter(kill_requested_at__isnull=True)  # a kill that was requested meanwhile prevents the restart
    if may_wake and unkilled.filter(restart_after_wake=True).update(**columns, wake_pending=True):
        return True
    plan = plan_restart(process, ProcessStatus.EXITED if has_vanished else state, exit_code, now=now)
    if plan.restart_at and unkilled.update(
        **columns, restart_at=plan.restart_at, window_started_at=plan.window_started_at, window_restarts=plan.window_restarts
    ):
        return True
    note = " ".join(filter(None, [note, plan.note]))
    return bool(rows.update(**columns | {"note": note}, sealed_env=None))


@dataclass(frozen=True)
class RestartPlan:
    """Decision about the restart of a process that has ended. `restart_at` is None if the process is not restarted."""

    restart_at: datetime | None = None
    window_started_at: datetime | None = None
    window_restarts: int = 0  # in the window so far
    note: str = ""


def plan_restart(process: Process, state: ProcessStatus, exit_code: int | None, *, now: datetime) -> RestartPlan:
    """Decide about the restart of a process. Pure: reads the row's columns only.

    The window begins with the first end after the previous window. The backoff doubles with each restart in the window. A
    process that could not be started at all (FAILED without a mark, or rejected) is not restarted."""
    has_failed = state == ProcessStatus.FAILED or exit_code != 0
    is_restart_wanted = process.restart == RestartPolicy.ALWAYS or (process.restart == RestartPolicy.ON_FAILURE and has_failed)
    if state not in (ProcessStatus.EXITED, ProcessStatus.FAILED) or not is_restart_wanted or process.kill_requested_at:
        return RestartPlan()
    if state == ProcessStatus.FAILED and process.start_confirmed:
        return RestartPlan()
    began, count, window = process.window_started_at, process.window_restarts, timedelta(seconds=process.restart_window_seconds)
    if began is None or now >= began + window:
        began, count = now, 0
    if count >= process.max_restarts:
        limit = f"Restart limit reached: {process.max_restarts} restarts in {process.restart_window_seconds} s."
        return RestartPlan(note=limit)
    return RestartPlan(now + compute_backoff(count + 1, initial=MIN_BACKOFF, maximum=MAX_BACKOFF), began, count)


def find_due(*, now: datetime) -> QuerySet[Process]:
    """Select the ended processes of this host's sandboxes that are to be restarted now."""
    due = Process.objects.filter(registry.filter_local("sandbox__"), restart_at__lte=now, kill_requested_at__isnull=True)
    return due.select_related("sandbox").order_by("restart_at")


def restart_due(*, now: datetime, limit: int = 200) -> SweepResult:
    """Sweep: restart the processes that are due in awake sandboxes, the engines in turns.

    A suspended sandbox is left alone until its next use."""
    due = find_due(now=now).filter(sandbox__state__in=USED_STATES, sandbox__frozen=False, sandbox__lost_at__isnull=True)
    return _restart_all(list_by_engine(due, limit=limit, prefix="sandbox__"), clock_from(now))


def schedule_after_wake(sandbox: Sandbox, *, now: datetime) -> int:
    """Schedule the processes that ended with the previous sandbox of a holder and are to run after a wake. Return their number.

    Called in the transaction that makes the new sandbox ready. The first run in the sandbox then restarts them."""
    assert sandbox.holder is not None  # ensured by allocation.ensure_running
    pending = Process.objects.filter(holder=sandbox.holder, wake_pending=True, kill_requested_at__isnull=True)
    return pending.update(
        sandbox=sandbox.pk, incarnation=sandbox.incarnation, wake_pending=False, restart_at=now, window_started_at=None,
        window_restarts=0,
    )  # fmt: skip


def are_due(sandbox: Sandbox, *, now: datetime) -> bool:
    """Return whether processes of this sandbox are to be restarted."""
    return Process.objects.filter(sandbox=sandbox.pk, restart_at__lte=now).exists()


def restart_after_wake(sandbox: Sandbox, *, now: datetime) -> None:
    """Restart the scheduled processes of a sandbox that was just woken. A failure is left to the sweep."""
    due = Process.objects.filter(sandbox=sandbox.pk, incarnation=sandbox.incarnation, restart_at__lte=now)
    rows = due.select_related("sandbox").order_by("started_at")
    result = _restart_all([((sandbox.provider, sandbox.host_id), process) for process in rows], clock_from(now))
    if result.failures:
        log.warning("processes not restarted after a wake", sandbox=str(sandbox.pk), failures=result.failures)


def _restart_all(due: Iterable[tuple[Engine, Process]], clock: Clock) -> SweepResult:
    result = SweepResult()
    for process in (turns := EngineTurns(due, clock=clock, until=clock() + PASS_TIME_LIMIT)):
        try:
            result.note("processes restarted" if restart(process, now=clock()) else "lost race")
        except (ProviderError, encryption.DecryptionFailed) as failed:
            if isinstance(failed, ProviderError):
                turns.note_failure()
            result.failures.append(f"process {process.pk}: {failed or type(failed).__name__}")
    return result


def restart(process: Process, *, now: datetime) -> bool:
    """Restart a process that is due. Return False if it was killed, restarted or evicted since. Raises ProviderError.

    1. Claim the row: a new mark, and one restart more. From then on the row is open.
    2. Start the program. A caller that has killed the process meanwhile finds the row open, and is told to try again.
    3. Confirm the start, and kill the program if a kill was requested since the claim."""
    clock = clock_from(now)
    try:
        env = open_env(process) if process.sealed_env else {}
    except encryption.DecryptionFailed:
        Process.objects.filter(pk=process.pk, restart_at=process.restart_at).update(
            restart_at=None, note="No configured key decrypts the variables of this process."
        )
        raise
    if not _claim(process, now=now):
        return False
    checkpoint("process restart claimed", process)
    sandbox, mark = process.sandbox, str(process.mark)
    provider = registry.get_sandbox_provider(sandbox)
    env = {**build_environment(sandbox, provider), **env}
    try:
        state = provider.start(
            sandbox.ref, list(process.argv), env=env, cwd=process.cwd, mark=mark, stdin=process.has_stdin
        )  # fmt: skip
    except Rejected as refused:
        process.start_confirmed = True  # not restarted again
        close_process(process, ProcessStatus.FAILED, now=clock(), note=str(refused))
        return True
    except StartKilled:  # `kill_process` kills by the mark, which the start has, too
        process.refresh_from_db()
        if not process.kill_requested_at:
            raise
        state = ProcessState(running=False, exit_code=KILLED_EXIT_CODE)
    checkpoint("process restarted", process)
    Process.objects.filter(pk=process.pk, mark=process.mark).update(start_confirmed=True)
    process.refresh_from_db()
    checkpoint("process restart confirmed", process)
    log.info("process restarted", process=str(process.pk), restarts=process.restarts, holder=str(process.holder))
    if str(process.mark) == mark and process.ended_at is None:
        _settle(process, provider, is_running=state.running, exit_code=state.exit_code, now=clock())
    return True


def _settle(process: Process, provider: Provider, *, is_running: bool, exit_code: int | None, now: datetime) -> None:
    if process.kill_requested_at:
        provider.kill(process.sandbox.ref, str(process.mark))
        close_process(process, ProcessStatus.KILLED, now=now, exit_code=137)
    elif not is_running:
        close_process(process, ProcessStatus.EXITED, now=now, exit_code=exit_code)


def _claim(process: Process, *, now: datetime) -> bool:
    """Open the row again with a new mark. Return False if the process or its sandbox is not in the expected state any more."""
    mark = uuid.uuid4()
    awake = Sandbox.objects.filter(
        pk=process.sandbox_id, holder=process.holder, incarnation=process.incarnation, state__in=USED_STATES, frozen=False,
        lost_at__isnull=True,
    )  # fmt: skip
    if process.restart_at is None:  # as a filter, None would select a row that has been restarted
        return False
    due = Process.objects.filter(pk=process.pk, restart_at=process.restart_at, kill_requested_at__isnull=True)
    own = Process.objects.filter(pk=process.pk, mark=mark, start_confirmed=False, ended_at__isnull=True)
    with end_if_unanswered(partial(own.update, starts_by=now), process), transaction.atomic():
        # Locks the sandbox's row: a concurrent eviction either closes this row afterwards, or makes this query find nothing.
        if not awake.select_for_update(no_key=True).first():
            return False
        if Process.objects.filter(sandbox=process.sandbox_id, ended_at__isnull=True).count() >= MAX_PROCESSES:
            due.update(restart_at=now + MIN_BACKOFF)
            return False
        claimed = due.update(
            state=ProcessStatus.RUNNING, ended_at=None, exit_code=None, note="", restart_at=None, mark=mark,
            start_confirmed=False, restarts=F("restarts") + 1, window_restarts=F("window_restarts") + 1, restarted_at=now,
            starts_by=now + START_TIMEOUT,
        )  # fmt: skip
    if claimed:
        process.refresh_from_db()
    return bool(claimed)


def forbid(process: Process, *, now: datetime) -> None:
    """Record that the caller kills a process: from now on the process is not restarted, also if its restart has begun."""
    Process.objects.filter(pk=process.pk).update(
        kill_requested_at=Coalesce("kill_requested_at", Value(now, output_field=DateTimeField())), restart_at=None,
        wake_pending=False, sealed_env=None,
    )  # fmt: skip
    process.refresh_from_db()


def forget_restarts(processes: QuerySet[Process]) -> int:
    """Give up the restarts of these processes, and delete their variables. Return the number of changed rows."""
    return processes.filter(MAY_RESTART).update(restart_at=None, wake_pending=False, sealed_env=None)


def reencrypt_env() -> encryption.ReencryptionResult[Process]:
    """Encrypt the variables of every process under the first encryption key. Idempotent."""
    result: encryption.ReencryptionResult[Process] = encryption.ReencryptionResult()
    for process in Process.objects.filter(sealed_env__isnull=False).order_by("pk"):
        sealed, row = bytes(process.sealed_env or b""), f"process {process.pk}"
        try:
            content, is_current = encryption.decrypt(sealed, row=row)
        except encryption.DecryptionFailed:
            result.undecryptable.append(process)
            continue
        if is_current:
            result.current += 1
            continue
        # Guarded by the old value: a concurrent end of the process deletes its variables.
        changed: dict[str, Any] = {"sealed_env": encryption.encrypt(content, row=row)}
        result.changed += Process.objects.filter(pk=process.pk, sealed_env=sealed).update(**changed)
    return result
