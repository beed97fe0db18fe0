"""One-shot runs: one command in a new sandbox that is destroyed afterwards.

A one-shot run is a lease whose environment is that run. Lease and Run share its id, so its result can be read from the rows."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import BinaryIO
from uuid import UUID, uuid4

import structlog
from django.conf import settings
from django.db import transaction

from leases import execution, leasing, run_ids, sweeps
from leases.allow_lists import AllowLists
from leases.errors import InvalidRequest, LeaseEnded
from leases.failed_by import classify_one_shot
from leases.models import Lease, LeaseStatus
from sandboxes import destruction
from sandboxes.claims import KILL_GRACE, track, track_transfer
from sandboxes.db.clock import clock_from
from sandboxes.deferred_writes import record_or_defer
from sandboxes.egress.environment import build_environment
from sandboxes.errors import (
    ClaimLost,
    ProviderCallFailed,
    ResultPending,
    RunExists,
    SandboxBusy,
    SandboxError,
    SandboxLost,
    SandboxNotHeld,
    SandboxNotReady,
    StoreUnavailable,
)
from sandboxes.failed_by import FailedBy
from sandboxes.lifecycle import checkpoint
from sandboxes.models import FinalPersist, Run, RunOutcome, Sandbox, SandboxState
from sandboxes.pool import allocation
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import ProviderError, Rejected
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.state import directories
from sandboxes.state.run_outputs import load_output
from sandboxes.storage.base import DiskFull, StoreError

log = structlog.get_logger(__name__)
DEFAULT_ENVIRONMENT_TYPE = "run"
WORKSPACE_COPY_TIMEOUT = timedelta(minutes=2)  # per direction
CLEANUP_TIMEOUT = timedelta(seconds=30)  # after this the sweeps finish the cleanup
MIN_MEMORY_MIB = 16


class OneShotOutcome(StrEnum):
    """Outcome of a one-shot run."""

    OK = "ok"
    FAILED = "failed"  # the command exited with a code other than 0
    TIMEOUT = "timeout"
    OOM_KILLED = "oom_killed"
    CONTAINER_FAILED = "container_failed"  # the sandbox could not be started, did not respond, or was lost
    INTERNAL = "internal"  # any other failure of the control plane


ONE_SHOT_OUTCOMES = {
    RunOutcome.OK: OneShotOutcome.OK,
    RunOutcome.FAILED: OneShotOutcome.FAILED,
    RunOutcome.TIMED_OUT: OneShotOutcome.TIMEOUT,
    RunOutcome.OOM: OneShotOutcome.OOM_KILLED,
}
CONTAINER_ERRORS = (SandboxNotReady, SandboxLost, ProviderCallFailed, SandboxBusy)
INTERNAL_ERRORS = (LeaseEnded, SandboxNotHeld, StoreUnavailable)


@dataclass(frozen=True)
class OneShotRequest:
    """Command of a one-shot run and its sandbox. Values of `env` may be secret and are never stored or logged."""

    agent_did: str
    argv: Sequence[str]
    timeout: timedelta
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKSPACE
    workspace: BinaryIO | None = None  # validated, uncompressed tar, unpacked into /workspace before the command
    output: BinaryIO | None = None  # receives /workspace as a tar afterwards, without .home
    max_returned_bytes: int = 1 << 30  # size limit of the returned tar
    memory_mib: int | None = None  # None: the limit of the pool
    environment_type: str = DEFAULT_ENVIRONMENT_TYPE
    pool: str = ""
    key_id: str = ""  # API key of the caller, "" without one
    allowed: AllowLists | None = None  # of the caller's API key; None: no restriction
    llm_proxy: bool = True  # False: the model calls of the command are refused
    run_id: UUID = field(default_factory=uuid4)
    attempt: int = 1  # of a queued run
    wrap_guard: execution.WrapGuard | None = None  # adds conditions to the guard of the lease

    @property
    def copy_timeout(self) -> timedelta:
        return WORKSPACE_COPY_TIMEOUT * ((self.workspace is not None) + (self.output is not None))

    @property
    def max_duration(self) -> timedelta:
        """Longest time from the grant of the lease to its end. If this process dies, the lease expires by then."""
        start: timedelta = settings.SANDBOX_START_TIMEOUT
        return start + self.copy_timeout + self.timeout + 2 * KILL_GRACE


@dataclass(frozen=True)
class OneShotResult:
    """Outcome and output of a one-shot run. Outcome None: the run has not ended."""

    run_id: UUID
    lease_id: UUID
    outcome: OneShotOutcome | None
    exit_code: int | None = None  # None if the command did not end; 128 + n after signal n
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    duration: timedelta | None = None  # of the command and of copying the workspace
    note: str = ""  # reason of a failure outside the command
    workspace_returned: bool = False  # the workspace is in OneShotRequest.output
    failed_by: FailedBy | None = None  # origin of the failure of a run that has ended
    cleaned_up: bool = False  # the lease is destroyed: the provider confirmed that the sandbox is gone


def run_once(request: OneShotRequest, *, now: datetime, actor: str = "", admit: Callable[[], object] = bool) -> OneShotResult:
    """Run one command in a new sandbox, which is destroyed afterwards.

    A command that fails, and a sandbox that does not start, are results. Errors that prevent the start are raised:
    InvalidRequest, NotAllowed, RunExists, exhausted capacity, quota or budget, and any exception of `admit`.
    In both cases the lease ends and its sandbox is destroyed: by the sweeps if `cleaned_up` is False or this process dies."""
    clock = clock_from(now)
    lease = _grant_lease(request, now=now, actor=actor, admit=admit)
    checkpoint("run granted", lease)
    reason, note, transfer = "released", "", _WorkspaceTransfer(request)
    result: ExecResult | None = None
    try:
        result = _execute(lease, request, transfer, now=clock(), actor=actor)
    except CONTAINER_ERRORS as failed:
        reason, note = "failed", str(failed)
    except INTERNAL_ERRORS as failed:
        note = str(failed)
    except ResultPending:
        pass  # the result is read from its row below, once the database responds
    except (SandboxError, Rejected, DiskFull) as refused:
        clean_up(lease.pk, reason=reason, detail=str(refused), now=clock(), actor=actor)
        raise
    except (KeyboardInterrupt, SystemExit):
        clean_up(lease.pk, reason=reason, detail="interrupted", now=clock(), actor=actor)
        raise
    except Exception as failed:
        log.exception("run failed", run=str(request.run_id))
        note = f"{type(failed).__name__}: {failed}"
    cleaned_up = clean_up(lease.pk, reason=reason, detail=note, now=clock(), actor=actor)
    stored = load_result(Lease.objects.get(pk=lease.pk))
    if result:  # the complete output; the Run row has only a part
        stored = replace(stored, stdout=result.stdout, stderr=result.stderr, truncated=result.truncated)
    return replace(
        stored,
        outcome=stored.outcome or OneShotOutcome.INTERNAL,
        failed_by=stored.failed_by if stored.outcome else FailedBy.INFRASTRUCTURE,
        note=note or transfer.note or stored.note,
        workspace_returned=transfer.workspace_returned,
        cleaned_up=cleaned_up,
    )


def load_result(lease: Lease) -> OneShotResult:
    """Read the result of a one-shot run from its rows. The output is limited to the part stored with the Run."""
    run = Run.objects.filter(pk=lease.pk).first()
    has_ended = lease.status != LeaseStatus.ACTIVE
    stored = OneShotResult(
        run_id=lease.pk,
        lease_id=lease.pk,
        outcome=determine_outcome(run, lease.end_reason) if has_ended else None,
        failed_by=classify_one_shot(run, lease.end_reason) if has_ended else None,
        note=lease.end_detail,
        cleaned_up=lease.status == LeaseStatus.DESTROYED,
    )
    if run is None:
        return stored
    output = load_output(run)
    return replace(
        stored,
        exit_code=run.exit_code,
        stdout=output.stdout,
        stderr=output.stderr,
        truncated=run.truncated or run.stdout_bytes > len(output.stdout) or run.stderr_bytes > len(output.stderr),
        duration=run.duration,
        note=stored.note or run.note,
    )


def determine_outcome(run: Run | None, end_reason: str) -> OneShotOutcome:
    """Outcome of a run whose lease has ended: that of its command if the command ended by itself."""
    if run and run.exit_code is not None:
        return ONE_SHOT_OUTCOMES[RunOutcome(run.outcome)]
    return OneShotOutcome.CONTAINER_FAILED if end_reason in ("failed", "lost") else OneShotOutcome.INTERNAL


def clean_up(pk: UUID, *, reason: str, detail: str, now: datetime, actor: str = "") -> bool:
    """End the lease of a run and destroy its sandbox. Return True once the provider has confirmed the destruction.

    Return False after CLEANUP_TIMEOUT or a provider error; the sweeps then retry. Waits for a sweep that is already
    destroying the sandbox. Never raises, so that the result of the command is not lost. The lease ends once the database
    responds, and after the deferred ends of runs are recorded: the destruction would close them as lost."""
    clock = clock_from(now)

    def end_lease() -> None:
        elapsed = leasing.find_elapsed_clock(Lease.objects.get(pk=pk), now)
        with transaction.atomic(durable=True):
            leasing.end(pk, reason=elapsed or reason, now=now, actor=actor, detail=detail)

    try:
        record_or_defer(end_lease, "lease not ended", clock=clock, lease=str(pk))
        checkpoint("run released", pk)
        remaining = Sandbox.objects.filter(holder=pk).exclude(state=SandboxState.DESTROYED)
        while sandbox := remaining.first():
            if destruction.destroy(sandbox.pk, now=clock(), actor=actor):
                continue
            sandbox.refresh_from_db()
            if sandbox.state != SandboxState.DESTROYED and (sandbox.last_error or clock() > now + CLEANUP_TIMEOUT):
                return False
            time.sleep(allocation.POLL_INTERVAL_SECONDS)
        sweeps.mark_destroyed(pk, now=clock(), actor=actor)
        return Lease.objects.filter(pk=pk, status=LeaseStatus.DESTROYED).exists()
    except Exception:
        log.exception("run not cleaned up", run=str(pk))
        return False


def _grant_lease(request: OneShotRequest, *, now: datetime, actor: str, admit: Callable[[], object]) -> Lease:
    lease_request = leasing.LeaseRequest(
        request.agent_did, f"run-{request.run_id}", request.environment_type,
        ttl=request.max_duration, max_ttl=request.max_duration, pool=request.pool, key_id=request.key_id,
        allowed=request.allowed, id=request.run_id, llm_enabled=request.llm_proxy,
    )  # fmt: skip
    environment_type, _ = leasing.find_type_and_pool(lease_request)
    if request.max_duration > environment_type.max_ttl:
        max_timeout = (environment_type.max_ttl - request.max_duration + request.timeout).total_seconds()
        raise InvalidRequest("limits.timeout_seconds", f"Must be at most {max(max_timeout, 0):.0f} for this environment type.")
    if request.memory_mib is not None and not MIN_MEMORY_MIB <= request.memory_mib <= settings.RUN_MEMORY_MOST_MIB:
        raise InvalidRequest("limits.memory_mib", f"Must be from {MIN_MEMORY_MIB} to {settings.RUN_MEMORY_MOST_MIB}.")
    run_ids.require_unused(request.run_id)
    lease, is_new = leasing.acquire(lease_request, now=now, actor=actor, admit=admit)
    if not is_new:
        raise RunExists()
    return lease


def _execute(lease: Lease, request: OneShotRequest, transfer: "_WorkspaceTransfer", *, now: datetime, actor: str) -> ExecResult:
    """Execute the command and both copies of the workspace as one Run, so that the sandbox is not evicted in between."""
    argv, total_timeout = list(request.argv), request.timeout + request.copy_timeout
    command = Command(
        argv, total_timeout, request.env, request.cwd, request.stdin, run_id=request.run_id, attempt=request.attempt
    )
    clock = clock_from(now)
    with execution.use_lease(lease.pk, now=now, spends=True) as sandbox_request:
        # No config.json, which would be returned with the workspace, and no skill.
        if request.wrap_guard:
            sandbox_request = replace(sandbox_request, guard=request.wrap_guard(sandbox_request.guard))
        bare_request = replace(
            sandbox_request, files={}, skill="", memory_mib=request.memory_mib, final_persist=FinalPersist.DATA
        )
        with operations.operation(bare_request, command, now=clock(), actor=actor) as opened:
            provider, sandbox = opened.provider, opened.sandbox
            transfer.unpack_workspace(provider, sandbox)
            checkpoint("workspace in", lease)
            opened.claim.begin_command(total_timeout)
            opened.result = result = provider.exec(
                sandbox.ref, argv, env={**build_environment(sandbox, provider), **request.env}, cwd=request.cwd,
                stdin=request.stdin, timeout=request.timeout, cap=settings.EXEC_OUTPUT_CAP, mark=str(request.run_id),
                output=opened.claim.output, retain=True,
            )  # fmt: skip
            opened.claim.end_command()
            checkpoint("command ended", lease)
            transfer.pack_workspace(provider, sandbox)
    return result


class _WorkspaceTransfer:
    """Copies the workspace into the sandbox and back."""

    def __init__(self, request: OneShotRequest) -> None:
        self.request, self.note, self.workspace_returned = request, "", False

    def unpack_workspace(self, provider: Provider, sandbox: Sandbox) -> None:
        if self.request.workspace is None:
            return
        try:
            provider.put_files(sandbox.ref, WORKSPACE, track_transfer(self.request.workspace))
        except Rejected as error:
            raise InvalidRequest("workspace", f"The workspace could not be unpacked: {error}") from error

    def pack_workspace(self, provider: Provider, sandbox: Sandbox) -> None:
        """Write /workspace to `output`. A failure is a note only, since the command has run."""
        output = self.request.output
        if output is None:
            return
        try:
            chunks = provider.get_files(
                sandbox.ref, WORKSPACE, exclude=directories.EXCLUDED_NAMES,
                max_bytes=self.request.max_returned_bytes, timeout=WORKSPACE_COPY_TIMEOUT,
            )  # fmt: skip
            for chunk in track(chunks):
                output.write(chunk)
            self.workspace_returned = True
        except (ProviderError, StoreError, ClaimLost) as failed:
            self.note = f"The workspace could not be returned: {failed}"
