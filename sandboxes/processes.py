"""Programs in the background of a holder's sandbox: started, listened to, killed.

A row is there before the provider is asked. From then on it is the provider that knows: a row is closed by whoever looks
after its program has ended, at the latest by a sweep, and with its sandbox in the transaction that gives that up."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet

from sandboxes import providers, runs
from sandboxes.db.clock import Clock, clock_from
from sandboxes.errors import ProcessOutputGone, ProviderCallFailed, SandboxBusy, SandboxNotHeld, TooManyProcesses
from sandboxes.lifecycle import checkpoint
from sandboxes.models import ALIVE_STATES, Run, RunOutcome, Sandbox, SandboxState
from sandboxes.models.processes import Process, ProcessStatus
from sandboxes.pool import SandboxRequest
from sandboxes.providers.base import WORKSPACE, Missing, ProcessOutput, ProcessState, Provider, ProviderError, Rejected
from sandboxes.providers.launcher import LAUNCH_TIMEOUT
from sandboxes.runs import Command, Operation
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

MAX_PROCESSES = 16  # in one sandbox at once
START_TIMEOUT = LAUNCH_TIMEOUT + runs.KILL_GRACE
LOG_CHUNK_BYTES = 1 << 18  # bytes of a log that are searched at once
POLL_DELAYS_SECONDS = (0.05, 0.1, 0.2, 0.4)  # seconds between looks at a log, and then the last of them


@dataclass(frozen=True)
class ProcessSpec:
    """What to start. Values of env may be secret and are never stored or logged."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKSPACE
    name: str = ""
    process_id: uuid.UUID = field(default_factory=uuid.uuid4)


def start_process(request: SandboxRequest, launch: ProcessSpec, *, now: datetime, actor: str = "") -> Process:
    """Start a program in the background of the holder's sandbox, which is made ready first; its row.

    It is a Run of kind "process" that ends once the program has begun, so nothing takes the sandbox away meanwhile, and
    if whoever starts it dies, the program is killed with that Run. TooManyProcesses, and whatever an exec raises."""
    clock = clock_from(now)
    command = Command(launch.argv, START_TIMEOUT, launch.env, launch.cwd, kind="process", run_id=launch.process_id)
    with runs.operation(request, command, now=now, actor=actor) as opened:
        runs.require_workspace_space(opened.provider, opened.sandbox, now=clock())
        process = _insert_process(opened.sandbox, launch, now=clock())
        checkpoint("process noted", process)
        _launch(process, launch, opened, clock)
    return Process.objects.get(pk=launch.process_id)


def _launch(process: Process, launch: ProcessSpec, opened: Operation, clock: Clock) -> None:
    try:
        state = opened.provider.start(
            opened.sandbox.ref, list(launch.argv), env=launch.env, cwd=launch.cwd, mark=str(process.pk)
        )
    except Rejected as refused:
        _close_process(process, ProcessStatus.FAILED, now=clock(), note=str(refused)[:500])
        raise
    checkpoint("process started", process)
    if not state.running:
        _close_process(process, ProcessStatus.EXITED, now=clock(), exit_code=state.exit_code)


def _insert_process(sandbox: Sandbox, launch: ProcessSpec, *, now: datetime) -> Process:
    """Insert the row, unless the sandbox has enough of them, or was given up."""
    same = Sandbox.objects.filter(pk=sandbox.pk, holder=sandbox.holder, incarnation=sandbox.incarnation)
    assert sandbox.holder is not None  # what pool.ready gives has one
    with transaction.atomic():
        # This locks the sandbox's row: whoever gives it up finds the process, or else we find it given up.
        if not same.filter(state=SandboxState.RUNNING).update(last_used_at=now):
            raise SandboxNotHeld()
        if Process.objects.filter(sandbox=sandbox, ended_at__isnull=True).count() >= MAX_PROCESSES:
            raise TooManyProcesses(f"{MAX_PROCESSES} processes run in this sandbox, which are as many as may. Kill one first.")
        return Process.objects.create(
            pk=launch.process_id,
            sandbox=sandbox,
            holder=sandbox.holder,
            agent_did=sandbox.agent_did,
            incarnation=sandbox.incarnation,
            name=launch.name,
            argv=list(launch.argv),
            cwd=launch.cwd,
            env_names=sorted(launch.env),
            started_at=now,
            starts_by=now + START_TIMEOUT,
        )


def find_by_holder(holder: uuid.UUID) -> QuerySet[Process]:
    """What was ever started for a holder."""
    return Process.objects.filter(holder=holder)


def refresh_by_holder(holder: uuid.UUID, *, now: datetime) -> None:
    """Have the holder's rows say what runs now. ProviderFailed if that cannot be known."""
    try:
        _close_ended_in_sandbox(find_by_holder(holder).filter(ended_at__isnull=True).select_related("sandbox"), now=now)
    except ProviderError as failed:
        raise ProviderCallFailed(f"It cannot be seen what runs now: {failed}") from failed


def kill_process(process: Process, *, now: datetime) -> Process:
    """Have no process of this program there any more, whatever it had started; its row. What had exited before stays
    exited, and what it has left behind is killed. Safe to repeat; ProviderFailed if it could not be done, Busy before
    it has begun, and while its sandbox falls asleep: it ends with that, unless that fails."""
    if _is_sandbox_alive(process):
        try:
            provider = providers.get_provider(process.sandbox.provider)
            provider.kill(process.sandbox.ref, str(process.pk))
            state = provider.processes(process.sandbox.ref, [str(process.pk)]).get(str(process.pk))
        except Missing as gone:  # reconcile decides what that means for the sandbox
            _close_process(process, ProcessStatus.GONE, now=now, note=f"Its sandbox is not there: {gone}"[:500])
        except ProviderError as failed:
            raise ProviderCallFailed(f"It could not be killed: {failed}") from failed
        else:
            if state is None and _may_still_start(process, now=now):
                raise SandboxBusy("It is still being started.")
            if state is None or state.running or state.exit_code == 137:
                _close_process(process, ProcessStatus.KILLED, now=now, exit_code=137)
            else:
                _close_process(process, ProcessStatus.EXITED, now=now, exit_code=state.exit_code)
    process.refresh_from_db()
    if process.ended_at is None:
        raise SandboxBusy("Its sandbox is falling asleep.")
    return process


def read_log(process: Process, *, start: int, length: int) -> ProcessOutput:
    """Some of what it has printed. OutputGone once its sandbox sleeps or is gone; ProviderFailed."""
    if not _is_sandbox_alive(process):
        raise ProcessOutputGone()
    try:
        return providers.get_provider(process.sandbox.provider).log(
            process.sandbox.ref, str(process.pk), start=start, length=length
        )
    except Missing as gone:
        raise ProcessOutputGone() from gone
    except ProviderError as failed:
        raise ProviderCallFailed(f"What it printed cannot be read now: {failed}") from failed


def wait_for_log(process: Process, text: str, *, start: int = 0, within: timedelta, now: datetime) -> bool:
    """Wait until it has printed `text` at or after offset `start`. False when the time is up, or once it has ended without.

    Plain text: an expression could take for ever. What is dropped from a long log before we look is not found."""
    wanted, tail, clock = text.encode(), b"", clock_from(now)
    pauses, pause = iter(POLL_DELAYS_SECONDS), 0.0
    while True:
        over = clock() >= now + within  # and asked before the last look
        _refresh_process(process, now=clock())
        ended = process.ended_at is not None
        while True:
            try:
                content, after = read_log(process, start=start, length=LOG_CHUNK_BYTES)
            except ProcessOutputGone:
                return False
            fresh = content if after - len(content) > start else tail + content
            if wanted in fresh:
                return True
            tail, start = fresh[-(len(wanted) - 1) :] if len(wanted) > 1 else b"", after
            if len(content) < LOG_CHUNK_BYTES:
                break
        if over or ended:
            return False
        pause = next(pauses, pause)
        time.sleep(pause)


def close_ended(*, now: datetime, limit: int = 500) -> SweepResult:
    """Close the rows of what has ended by itself, sandbox by sandbox."""
    result, clock = SweepResult(), clock_from(now)
    running = Process.objects.filter(ended_at__isnull=True).select_related("sandbox").order_by("sandbox", "started_at")
    grouped: dict[uuid.UUID, list[Process]] = {}
    for process in running[:limit]:
        grouped.setdefault(process.sandbox_id, []).append(process)
    for theirs in grouped.values():
        if clock() > now + PASS_TIME_LIMIT:
            break
        try:
            result.note("processes ended", _close_ended_in_sandbox(theirs, now=clock()))
        except ProviderError as failed:
            result.failures.append(f"processes in {theirs[0].sandbox_id}: {failed}")
    return result


def _refresh_process(process: Process, *, now: datetime) -> None:
    if process.ended_at is None:
        refresh_by_holder(process.holder, now=now)
        process.refresh_from_db()


def _close_ended_in_sandbox(opened: Iterable[Process], *, now: datetime) -> int:
    """Close those of one sandbox's open rows whose program has ended; how many. ProviderError."""
    running = [process for process in opened if _is_sandbox_alive(process)]
    if not running:
        return 0
    sandbox = running[0].sandbox
    provider = providers.get_provider(sandbox.provider)
    try:
        seen = provider.processes(sandbox.ref, [str(process.pk) for process in running])
    except Missing:
        return 0  # reconcile decides what that means
    return sum(_close_if_ended(process, seen.get(str(process.pk)), provider, now=now) for process in running)


def _close_if_ended(process: Process, state: ProcessState | None, provider: Provider, *, now: datetime) -> bool:
    if state and not state.running:
        return _close_process(process, ProcessStatus.EXITED, now=now, exit_code=state.exit_code)
    if state is None and not _may_still_start(process, now=now):
        provider.kill(process.sandbox.ref, str(process.pk))
        if Run.objects.filter(pk=process.pk, outcome=RunOutcome.OK).exists():
            return _close_process(process, ProcessStatus.GONE, now=now, note="Its sandbox was started again without it.")
        return _close_process(
            process, ProcessStatus.FAILED, now=now, note="Whoever was to start it died, or its provider did not answer."
        )
    return False


def _may_still_start(process: Process, *, now: datetime) -> bool:
    """May a program that is not there yet still come? Also a call whose answer was lost may be on its way in there."""
    return now <= process.starts_by or Run.objects.filter(pk=process.pk, ended_at__isnull=True).exists()


def _close_process(
    process: Process, state: ProcessStatus, *, now: datetime, exit_code: int | None = None, note: str = ""
) -> bool:
    """Close a row, once. False if somebody else has closed it."""
    same = Process.objects.filter(pk=process.pk, ended_at__isnull=True)
    return bool(same.update(state=state, ended_at=now, exit_code=exit_code, note=note))


def _is_sandbox_alive(process: Process) -> bool:
    """Is the sandbox it was started in still alive?"""
    here = Sandbox.objects.filter(pk=process.sandbox_id, incarnation=process.incarnation, state__in=ALIVE_STATES)
    return here.filter(lost_at__isnull=True).exists()
