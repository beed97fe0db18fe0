"""Operations in sandboxes, each recorded as a Run.

A Run is opened before the provider is called and closed afterwards, also on failure. A sandbox is `running` exactly while it
has open Runs: the transaction that opens or closes a Run also changes the sandbox's state and its count of open Runs. An
eviction checks the state, and therefore never stops a sandbox in which an operation is active."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import structlog
from django.conf import settings
from django.db import IntegrityError, OperationalError, transaction

from sandboxes import deferred_writes, eviction, installation_marks, lifecycle, process_restarts, suspension
from sandboxes.claims import KILL_GRACE, hold
from sandboxes.db import dialect, sql
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import CONNECTION_ERRORS, RetriesExhausted, retry_connection_errors
from sandboxes.egress.environment import build_environment
from sandboxes.errors import (
    ClaimLost,
    DataFull,
    OutcomeUnknown,
    ResultPending,
    RunExists,
    SandboxError,
    SandboxLost,
    SandboxNotReady,
)
from sandboxes.guard import OPEN_GUARD, Guard
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
from sandboxes.runs.ends import classify_outcome, close_run
from sandboxes.state import data_sync, unrecorded
from sandboxes.storage.base import DiskFull, StoreError

log = structlog.get_logger(__name__)
ERRORS_WITHOUT_EFFECT = (NoSuchFile, Rejected, SandboxError, DiskFull)
RUN_NOT_CLOSED = "run not closed"  # message of the log


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
    entered: bool = False  # the body of the `with` has begun, and may have had an effect
    executing: bool = False  # the provider was asked to execute the command, and has not answered
    note: str = ""  # warning for the Run, such as a workspace over its limit
    found: str = ""  # note of the first run after a wake before which unrecorded files were found
    recoveries: Sequence[Recovery] = ()  # by calls of the provider, so far
    digest_data: bool = False  # the digest of /data after the command saves a listing; never asked of a mounted /data

    def describe_recovery(self) -> str:
        """Return the note about a stop of the sandbox or files that were found at its wake, or ""."""
        return " ".join(filter(None, [self.found, failures.describe_recovery(self.recoveries)]))

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Steps of the body before its effect. After a failure in them the Run counts as never started."""
        self.entered = False
        yield
        self.entered = True


def exec_in_sandbox(
    request: allocation.SandboxRequest, command: Command, *, now: datetime, actor: str = ""
) -> tuple[Run, ExecResult]:
    """Execute a command in the holder's sandbox, which is started or woken first. Blocks until the command has ended.

    A command that fails or times out is a result. The Run's note warns if the workspace is over its limit afterwards. Raises
    WorkspaceFull and the errors of `operation`."""
    clock = clock_from(now)
    with operation(request, command, now=now, actor=actor) as opened:
        with opened.prepare():
            workspace_limit.require_workspace_space(opened.provider, opened.sandbox, now=clock())
            opened.claim.begin_command(command.timeout)
        opened.executing = True
        command.on_start()
        dialect.release_connection()  # the command may run for hours
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
                if opened.run.is_first and starts.has_stored_state(opened.sandbox):
                    opened.found = unrecorded.describe_found(opened.sandbox)
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

    After an error the client would repeat an operation that has taken effect. If the database does not respond within
    FAILOVER_PERIOD, the Run is closed once the database responds, and ResultPending is raised."""
    outcome = classify_outcome(opened.result) if opened.result else RunOutcome.OK
    ended_at: datetime | None = None  # at the first try: the time without a database is not part of the operation

    def close(unsaved: str) -> None:
        recovered = opened.describe_recovery()
        refused = failures.describe_unusable_directory(opened.run, opened.result)
        note = " ".join(filter(None, [recovered, refused, opened.note, unsaved]))
        close_run(
            opened.run, now=clock(), outcome=outcome, result=opened.result, note=note, renewal=request.renewal, actor=actor,
            resumed=opened.sandbox.frozen, ended_at=ended_at,
        )  # fmt: skip
        if recovered:
            request.guard.note_recovery(recovered, now=clock())

    def record() -> None:
        nonlocal ended_at
        digest = opened.result.data_digest if opened.result else ""
        try:
            unsaved = _persist_data(attached, opened.sandbox, opened.provider, digest, now=clock()) if attached else ""
        finally:
            ended_at = ended_at or clock()
        close(unsaved)

    def record_later() -> None:  # without a transfer of /data, which would delay the heartbeat
        unsaved = ""
        if attached and attached.data.keeping != DataStorageMode.MOUNT:
            error = OperationalError("The database did not respond.")
            data_sync.mark_unsaved(attached, error, now=clock())
            unsaved = f"/data is not stored yet: {error}"
        close(unsaved)

    run_id = str(opened.run.pk)
    try:
        retry_connection_errors(record, RUN_NOT_CLOSED, clock=clock, run=run_id)
    except RetriesExhausted as failed:
        deferred_writes.DEFERRED.add(record_later, RUN_NOT_CLOSED, run=run_id)
        exit_code = opened.result.exit_code if opened.result else None
        raise ResultPending(run_id=run_id, exit_code=exit_code) from failed


def _record_failure(opened: Operation, failed: Exception, guard: Guard, clock: Clock, *, actor: str) -> Exception:
    """Like _fail_operation, with retries while the database does not respond.

    If the retries are exhausted, the end is recorded once the database responds. Until then the client is told to wait."""

    def record() -> Exception:
        error = _fail_operation(opened, failed, now=clock(), actor=actor)
        if recovered := opened.describe_recovery():
            guard.note_recovery(recovered, now=clock())
        return error

    try:
        return retry_connection_errors(record, RUN_NOT_CLOSED, clock=clock, run=str(opened.run.pk))
    except RetriesExhausted:
        record_later = partial(_fail_operation_later, opened, failed, clock, actor=actor)
        deferred_writes.DEFERRED.add(record_later, RUN_NOT_CLOSED, run=str(opened.run.pk))
        return failures.translate_error(failed)


def _fail_operation_later(opened: Operation, failed: Exception, clock: Clock, *, actor: str) -> None:
    """Like _fail_operation, without calls of the provider: a sweep looks for a command that may run, and for a lost sandbox."""
    note = f"{type(failed).__name__}: {failed}"
    if opened.entered and opened.executing and not isinstance(failed, ERRORS_WITHOUT_EFFECT):
        failures.abandon_run(opened.run, note)
        return
    outcome = RunOutcome.FAILED if not opened.entered or isinstance(failed, ERRORS_WITHOUT_EFFECT) else RunOutcome.ERROR
    if opened.result:
        outcome = classify_outcome(opened.result)
    code = getattr(failed, "code", "internal")
    close_run(opened.run, now=clock(), outcome=outcome, result=opened.result, note=note, code=code, actor=actor)


def _open_operation(request: allocation.SandboxRequest, command: Command, clock: Clock, *, actor: str) -> Operation:
    known = request.known
    while True:
        request.guard.check_proceed()
        sandbox = allocation.ensure_running(request, known=known, now=clock(), actor=actor)
        checkpoint("sandbox ready", sandbox)
        provider, claim = registry.get_sandbox_provider(sandbox), uuid.uuid4()
        try:
            run = open_run(sandbox, command, now=clock(), actor=actor, guard=request.guard, claim=claim)
        except CONNECTION_ERRORS as failed:  # the transaction may have been committed
            close = partial(_close_unstarted, command.run_id, claim, failed, clock, actor=actor)
            deferred_writes.DEFERRED.add(close, RUN_NOT_CLOSED, run=str(command.run_id))
            raise
        if run:
            return Operation(run, sandbox, provider, RunClaim(run, clock, provider))
        known = None  # outdated: the sandbox was evicted or destroyed, or the holder has ended
        request.guard.check_active()


def _close_unstarted(pk: uuid.UUID, claim: uuid.UUID, failed: Exception, clock: Clock, *, actor: str) -> None:
    """Close a Run that was opened by a transaction whose answer was lost, if it was committed."""
    run = Run.objects.select_related("sandbox").filter(pk=pk, claim=claim, ended_at__isnull=True).first()
    if run is not None:
        note = f"{type(failed).__name__}: {failed}"
        close_run(run, now=clock(), outcome=RunOutcome.FAILED, note=note, code="internal", actor=actor)


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
    if isinstance(failed, ERRORS_WITHOUT_EFFECT):
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
    claim: uuid.UUID | None = None,
) -> Run | None:
    """Open a Run and count it in the sandbox, in one transaction. `claim` is the token of the caller, by default a new one.

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
        claim=claim or uuid.uuid4(),
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
