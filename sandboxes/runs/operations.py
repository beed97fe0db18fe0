"""Operations in sandboxes, each recorded as a Run.

A Run is opened before the provider is called and closed afterwards, also on failure. A sandbox is `running` exactly while it
has open Runs: the transaction that opens or closes a Run also changes the sandbox's state and its count of open Runs. An
eviction checks the state, and therefore never stops a sandbox in which an operation is active."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction

from sandboxes import eviction, installation_marks, lifecycle, process_restarts, suspension
from sandboxes.claims import KILL_GRACE, hold
from sandboxes.db import sql, tracing
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import RetriesExhausted, retry_connection_errors
from sandboxes.egress.environment import build_environment
from sandboxes.errors import (
    ClaimLost,
    DataFull,
    OutcomeUnknown,
    RunExists,
    SandboxError,
    SandboxLost,
    SandboxNotReady,
)
from sandboxes.guard import OPEN_GUARD, Guard, HolderRenewal
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Attachment, Run, RunOutcome, Sandbox, SandboxState
from sandboxes.models.state import DataStorageMode
from sandboxes.pool import allocation, starts
from sandboxes.providers import recoveries
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import Missing, NoSuchFile, OutOfSpace, ProviderError, Rejected
from sandboxes.providers.recoveries import Recovery
from sandboxes.runs import failures, retention, workspace_limit
from sandboxes.runs.claims import RunClaim
from sandboxes.state import data_sync, unrecorded
from sandboxes.storage.base import DiskFull, StoreError

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Command:
    """Command of a Run. Values of `env` may be secret and are neither stored nor logged."""

    argv: Sequence[str]
    timeout: timedelta
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKSPACE
    stdin: bytes = b""
    kind: str = "exec"
    turn_number: int | None = None
    needs_data: bool = True  # attach /data before the command and persist it afterwards
    run_id: uuid.UUID = field(default_factory=uuid.uuid4)
    streamed: bool = False  # the sandbox retains the output after the end, for readers of its stream (runs.retention)
    has_recorder: bool = False  # a recorder reads the output to its end, and acknowledges the result
    max_output_bytes: int | None = None  # of each stream. None: LEASEHOLD_EXEC_OUTPUT_CAP_BYTES
    on_start: Callable[[], object] = bool  # called when the provider is about to be asked to execute the command
    attempt: int = 1  # of a queued run


@dataclass
class Operation:
    """An open Run, with its sandbox and the sandbox's provider."""

    run: Run
    sandbox: Sandbox
    provider: Provider
    claim: RunClaim
    result: ExecResult | None = None  # of the command; sets the outcome and the output of the Run
    entered: bool = False  # the body of the `with` has begun
    executing: bool = False  # the provider was asked to execute the command, and has not answered
    note: str = ""  # warning for the Run, such as a workspace over its limit
    found: str = ""  # note of the first run after a wake before which unrecorded files were found
    recoveries: Sequence[Recovery] = ()  # by calls of the provider, so far
    digest_data: bool = False  # the digest of /data after the command saves a listing; never asked of a mounted /data

    def describe_recovery(self) -> str:
        """Return the note about a stop of the sandbox or files that were found at its wake, or ""."""
        return " ".join(filter(None, [self.found, failures.describe_recovery(self.recoveries)]))


def exec_in_sandbox(
    request: allocation.SandboxRequest, command: Command, *, now: datetime, actor: str = ""
) -> tuple[Run, ExecResult]:
    """Execute a command in the holder's sandbox, which is started or woken first. Blocks until the command has ended.

    A command that fails or times out is a result. The Run's note warns if the workspace is over its limit afterwards. Raises
    WorkspaceFull and the errors of `operation`."""
    clock = clock_from(now)
    with operation(request, command, now=now, actor=actor) as opened:
        workspace_limit.require_workspace_space(opened.provider, opened.sandbox, now=clock())
        opened.claim.begin_command(command.timeout)
        opened.executing = True
        command.on_start()
        result = opened.provider.exec(
            opened.sandbox.ref,
            list(command.argv),
            env={**build_environment(opened.sandbox, opened.provider), **command.env},
            cwd=command.cwd,
            stdin=command.stdin,
            timeout=command.timeout,
            cap=command.max_output_bytes or settings.EXEC_OUTPUT_CAP,
            mark=str(command.run_id),
            output=opened.claim.output,
            retain=True,
            digest_data=opened.digest_data,
        )
        opened.executing = False
        opened.claim.end_command()
        opened.result = result
        opened.note = workspace_limit.warn_if_workspace_full(opened.provider, opened.sandbox, now=clock())
    if command.streamed:
        size = len(result.stdout) + len(result.stderr)
        retention.acknowledge_later(opened.provider, opened.sandbox.ref, str(command.run_id), size=size)
    elif not command.has_recorder:
        opened.provider.acknowledge_exec(opened.sandbox.ref, str(command.run_id))  # the result is recorded
    return opened.run, result


@contextmanager
def operation(request: allocation.SandboxRequest, command: Command, *, now: datetime, actor: str = "") -> Iterator[Operation]:
    """Open a Run in the holder's sandbox for the body of the `with`. The sandbox is not evicted meanwhile.

    1. Start or wake the sandbox, and open the Run.
    2. Resume a suspended sandbox. Write the holder's first files and attach /data, if they are not in the sandbox yet.
    3. Run the body.
    4. Persist the changes in /data, and close the Run.

    The Run's claim is kept while /data or files are transferred, however long that takes.

    A failure in step 2 or 3 closes the Run and is raised: SandboxLost if the provider has lost the sandbox,
    ProviderCallFailed if the provider did not respond or the sandbox stopped (the Run's outcome shows whether the command may
    have run), StoreUnavailable if the store did not respond, ClaimLost if a transfer made no progress, any other error
    unchanged. Step 1 raises the errors of `allocation.ensure_running` and of the guard, TooManyRuns, and TooManyLongCalls
    before anything else.
    Step 4 does not fail the operation: the Run's note records unstored changes."""
    clock = clock_from(now)
    with LONG_CALLS.admit():
        opened, attached = _open_operation(request, command, clock, actor=actor), None
        with hold(opened.claim), recoveries.observe() as opened.recoveries:
            try:
                attached = _prepare_sandbox(opened, request, command, clock)
                opened.digest_data = attached is not None and attached.data.keeping != DataStorageMode.MOUNT
                opened.entered = True
                yield opened
            except Exception as failed:
                error = _record_failure(opened, failed, request.guard, clock, actor=actor)
                if isinstance(error, SandboxError | ProviderError):
                    error.provider = opened.sandbox.provider
                if error is failed:
                    raise
                raise error from failed
            checkpoint("run answered", opened.run)
            _record_success(opened, attached, request, clock, actor=actor)


def _record_success(
    opened: Operation, attached: Attachment | None, request: allocation.SandboxRequest, clock: Clock, *, actor: str
) -> None:
    """Persist /data and close the Run, with retries while the database does not respond.

    After an error the client would repeat an operation that has taken effect. Raises OutcomeUnknown if the database does not
    respond within FAILOVER_PERIOD."""
    outcome = classify_outcome(opened.result) if opened.result else RunOutcome.OK

    def record() -> None:
        digest = opened.result.data_digest if opened.result else ""
        unsaved = _persist_data(attached, opened.sandbox, opened.provider, digest, now=clock()) if attached else ""
        recovered = opened.describe_recovery()
        refused = failures.describe_unusable_directory(opened.run, opened.result)
        note = " ".join(filter(None, [recovered, refused, opened.note, unsaved]))
        close_run(
            opened.run, now=clock(), outcome=outcome, result=opened.result, note=note, renewal=request.renewal, actor=actor,
            resumed=opened.sandbox.frozen,
        )  # fmt: skip
        if recovered:
            request.guard.note_recovery(recovered, now=clock())

    run_id = str(opened.run.pk)
    try:
        retry_connection_errors(record, "run not closed", clock=clock, run=run_id)
    except RetriesExhausted as failed:
        exit_code = opened.result.exit_code if opened.result else None
        raise OutcomeUnknown(run_id=run_id, exit_code=exit_code) from failed


def _record_failure(opened: Operation, failed: Exception, guard: Guard, clock: Clock, *, actor: str) -> Exception:
    """Like _fail_operation, with retries while the database does not respond.

    If the retries are exhausted the Run stays open until a sweep closes it after its deadline. Until then the client is told to
    wait."""

    def record() -> Exception:
        error = _fail_operation(opened, failed, now=clock(), actor=actor)
        if recovered := opened.describe_recovery():
            guard.note_recovery(recovered, now=clock())
        return error

    try:
        return retry_connection_errors(record, "run not closed", clock=clock, run=str(opened.run.pk))
    except RetriesExhausted:
        return failures.translate_error(failed)


def _open_operation(request: allocation.SandboxRequest, command: Command, clock: Clock, *, actor: str) -> Operation:
    known = request.known
    while True:
        request.guard.check_proceed()
        sandbox = allocation.ensure_running(request, known=known, now=clock(), actor=actor)
        checkpoint("sandbox ready", sandbox)
        run = open_run(sandbox, command, now=clock(), actor=actor, guard=request.guard)
        if run:
            provider = registry.get_sandbox_provider(sandbox)
            is_first_of_wake = run.is_first and starts.has_stored_state(sandbox)
            found = unrecorded.describe_found(sandbox) if is_first_of_wake else ""
            return Operation(run, sandbox, provider, RunClaim(run, clock, provider), found=found)
        known = None  # outdated: the sandbox was evicted or destroyed, or the holder has ended
        request.guard.check_active()


def _prepare_sandbox(
    opened: Operation, request: allocation.SandboxRequest, command: Command, clock: Clock
) -> Attachment | None:
    sandbox, provider = opened.sandbox, opened.provider
    if sandbox.frozen:
        suspension.thaw_for_run(sandbox, provider)
    # Processes that run again after a wake may need /data.
    has_processes = opened.run.is_first and starts.has_stored_state(sandbox) and process_restarts.are_due(sandbox, now=clock())
    if not sandbox.prepared:
        starts.put_files(sandbox, provider, request.files)
        sql.update(Sandbox, "prepared = TRUE WHERE id = %s AND incarnation = %s", sandbox.pk, sandbox.incarnation)
    if not command.needs_data and not has_processes:
        return None
    attached = data_sync.attach(sandbox, provider, skill=request.skill, is_first=opened.run.is_first, now=clock())
    if attached and command.kind != "file":  # a full /data must not prevent the removal of files
        data_sync.require_free_space(attached, sandbox, provider, now=clock())
    if has_processes:
        process_restarts.restart_after_wake(sandbox, now=clock())
    return attached


def _fail_operation(opened: Operation, failed: Exception, *, now: datetime, actor: str) -> Exception:
    """Close the Run of an operation that failed, and return the error to raise."""
    if isinstance(failed, Missing):
        note = f"The provider has no such sandbox: {failed}"
        if not opened.entered:
            close_run(opened.run, now=now, outcome=RunOutcome.FAILED, note=note, code=failed.code, actor=actor)
            recorded = eviction.record_missing(opened.sandbox, str(failed), now=now, actor=actor, unstarted_run=opened.run.pk)
            if recorded == "lost":
                return SandboxLost()
            return SandboxNotReady("The sandbox is gone, and nothing unsaved was in it. The next use starts it again.")
        note = f"Sandbox lost during the run: {failed}"
        opened.claim.store_output()
        close_run(opened.run, now=now, outcome=RunOutcome.LOST, note=note, code=failed.code, actor=actor)
        if installation_marks.has_lost_changes():
            if eviction.record_missing(opened.sandbox, str(failed), now=now, actor=actor) != "lost":
                return SandboxNotReady("The sandbox is gone since the database lost changes. The next use starts it again.")
            return SandboxLost(note)
        eviction.mark_lost(opened.sandbox, str(failed), now=now)
        if not eviction.is_lost(opened.sandbox):  # it was given up with this run, stored and stopped: nothing is lost
            return OutcomeUnknown(run_id=str(opened.run.pk))
        return SandboxLost(note)
    code = getattr(failed, "code", "internal")
    if isinstance(failed, OutOfSpace) and not opened.executing:
        close_run(opened.run, now=now, outcome=RunOutcome.FAILED, note=str(failed), code=code, actor=actor)
        return failures.translate_error(failed)
    if isinstance(failed, (NoSuchFile, Rejected, SandboxError, DiskFull)):
        outcome = classify_outcome(opened.result) if opened.result else RunOutcome.FAILED
        close_run(opened.run, now=now, outcome=outcome, result=opened.result, note=str(failed), code=code, actor=actor)
        return failed
    note = f"{type(failed).__name__}: {failed}"
    opened.claim.store_output()
    if opened.executing and failures.may_run_on(opened.run, opened.provider, failed):
        failures.abandon_run(opened.run, note)
    else:
        outcome = RunOutcome.ERROR if opened.entered else RunOutcome.FAILED
        if opened.result:
            outcome = classify_outcome(opened.result)
        close_run(opened.run, now=now, outcome=outcome, result=opened.result, note=note, code=code, actor=actor)
    return failures.translate_error(failed)


def open_run(
    sandbox: Sandbox,
    command: Command,
    *,
    now: datetime,
    actor: str = "",
    guard: Guard = OPEN_GUARD,
) -> Run | None:
    """Open a Run and count it in the sandbox, in one transaction.

    The condition of `guard` is built after the wait for the lock. Returns None if the condition does not hold, or if the
    sandbox is no longer alive or no longer held by this holder. Raises TooManyRuns at a limit of open Runs, RunExists if the id
    of the command is in use. The lock serializes an agent's calls: concurrent calls do not exceed the limits."""
    assert sandbox.holder is not None  # ensured by allocation.ensure_running
    run = Run(
        id=command.run_id,
        sandbox=sandbox,
        holder=sandbox.holder,
        agent_did=sandbox.agent_did,
        incarnation=sandbox.incarnation,
        kind=command.kind,
        turn_number=command.turn_number,
        attempt=command.attempt,
        has_recorder=command.has_recorder,
        argv=list(command.argv),
        cwd=command.cwd,
        claim=uuid.uuid4(),
        claimed_by=settings.INSTANCE,
        env_names=sorted(command.env),
        stdin_bytes=len(command.stdin),
        started_at=now,
        deadline_at=now + command.timeout + KILL_GRACE,
    )
    insert = sql.build_insert_from(run, "changed")
    try:
        with transaction.atomic(durable=True):
            sql.lock_key(f"runs of {sandbox.agent_did}")
            was = lifecycle.start_run(
                sandbox.pk, sandbox.incarnation, holder=sandbox.holder, now=now, actor=actor,
                likely=SandboxState(sandbox.state), frozen=sandbox.frozen, run=insert, permission=guard.build_condition(),
            )  # fmt: skip
            if was is None:
                return None
            guard.note_run_opened(now=now)
    except IntegrityError as error:
        if Run.objects.filter(pk=run.pk).exists():
            raise RunExists() from error
        raise
    run._state.adding, run.is_first = False, was == SandboxState.WARM
    checkpoint("run opened", run)
    return run


def _persist_data(attached: Attachment, sandbox: Sandbox, provider: Provider, digest: str, *, now: datetime) -> str:
    """Store the changes in /data, whose current digest may be known. Returns "", or a note with the cause of the failure.

    A failure does not change the outcome of the Run: the sandbox still has the changes, and a sweep stores them later."""
    try:
        data_sync.persist(attached, sandbox, provider, now=now, digest=digest)
    except Missing as missing:
        eviction.mark_lost(sandbox, str(missing), now=now)
        return f"The sandbox was lost after the command, and its changes are not stored: {missing}"
    except (StoreError, ProviderError, DataFull, ClaimLost) as failed:
        data_sync.mark_unsaved(attached, failed, now=now)
        return f"/data is not stored yet: {failed}"
    return ""


def close_run(
    run: Run,
    *,
    now: datetime,
    outcome: RunOutcome,
    result: ExecResult | None = None,
    note: str = "",
    code: str = "",
    renewal: HolderRenewal | None = None,
    resumed: bool = False,
    actor: str = "",
) -> bool:
    """Close an open Run and subtract it from its sandbox's count. Returns False if the Run was closed before.

    With `resumed`, the Run has resumed its sandbox (`suspension.thaw_for_run`), and that is recorded as well.
    `code` is that of the error that ended the Run; it is stored if the command has no result.
    Also executes `renewal`, in the same transaction. In both cases `run` has the stored values afterwards. Each output stream
    is stored up to RUN_OUTPUT_KEPT bytes."""
    max_bytes = settings.RUN_OUTPUT_KEPT
    values: dict[str, object] = {"ended_at": now, "outcome": outcome.value, "note": note[:500]}
    if result:
        values |= {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "oom": result.oom,
            "truncated": result.truncated,
            "stdout": result.stdout[:max_bytes],
            "stderr": result.stderr[:max_bytes],
            "stdout_bytes": len(result.stdout),
            "stderr_bytes": len(result.stderr),
        }
    elif code:
        values["error_code"] = code[:64]
    changes = ", ".join(f"{name} = %s" for name in values)
    text = f"UPDATE sandboxes_run SET {changes} WHERE id = %s AND ended_at IS NULL"  # noqa: S608 - names of columns
    close = sql.Statement(text, (*values.values(), run.pk))
    finished = lifecycle.finish_run(
        run.sandbox_id, run.incarnation, idle_after=run.sandbox.idle_after, close=close,
        renew=renewal.build(now) if renewal else None, resumed=resumed, now=now, actor=actor,
    )  # fmt: skip
    if renewal:
        renewal.done = finished.renewed
    if finished.closed:
        for name, value in values.items():
            setattr(run, name, value)
        if outcome != RunOutcome.OK:
            run.refresh_from_db(fields=["stop_reason"])  # another process writes it
        _trace(run)
    else:
        run.refresh_from_db()
    return finished.closed


def _trace(run: Run) -> None:
    """Record the span of a closed Run."""
    error = "" if run.outcome == RunOutcome.OK else str(run.outcome)
    attributes = {
        "leasehold.lease_id": str(run.holder), "leasehold.agent": run.agent_did, "leasehold.sandbox_id": str(run.sandbox_id),
        "leasehold.outcome": str(run.outcome), "leasehold.attempt": run.attempt, "process.exit.code": run.exit_code,
    }  # fmt: skip
    tracing.record_run_span(f"run {run.kind}", run.pk, run.started_at, run.ended_at or run.started_at, attributes, error=error)


def classify_outcome(result: ExecResult) -> RunOutcome:
    """Return the outcome of a Run whose command has this result."""
    if result.timed_out:
        return RunOutcome.TIMED_OUT
    if result.oom:
        return RunOutcome.OOM
    return RunOutcome.OK if result.exit_code == 0 else RunOutcome.FAILED
