"""One-shot runs: from nothing to a result in one call, and nothing is left after. A run is a lease whose environment is
that run; lease and Run have its id, so that the rows alone can say what became of it."""

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

from leases import execution, leasing, sweeps
from leases.errors import Conflict, InvalidRequest, LeaseEnded
from leases.models import EnvironmentType, Lease, LeaseStatus
from sandboxes import destruction, pool, runs
from sandboxes.db.clock import clock_from
from sandboxes.errors import (
    ProviderCallFailed,
    SandboxBusy,
    SandboxError,
    SandboxLost,
    SandboxNotHeld,
    SandboxNotReady,
    StoreUnavailable,
)
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Run, RunOutcome, Sandbox, SandboxState
from sandboxes.providers.base import WORKSPACE, ExecResult, Provider, ProviderError, Rejected, TooLarge, Unavailable
from sandboxes.runs import KILL_GRACE, Command
from sandboxes.state import directories
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
DEFAULT_ENVIRONMENT_TYPE = "run"  # the environment type of a run that names none
WORKSPACE_COPY_TIMEOUT = timedelta(minutes=2)  # for the workspace's way in, and for its way out
CLEANUP_TIMEOUT = timedelta(seconds=30)  # then the sweeps go on without us
MIN_MEMORY_MIB = 16  # MiB


class OneShotOutcome(StrEnum):
    """How a run ended."""

    OK = "ok"
    FAILED = "failed"  # the command ended with another code than 0
    TIMEOUT = "timeout"
    OOM_KILLED = "oom_killed"
    CONTAINER_FAILED = "container_failed"  # the sandbox could not be started, did not answer, or was lost
    INTERNAL = "internal"  # whatever else kept us from the command's own end


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
    """What to run, and in what. Values of env may be secret and are never stored or logged."""

    agent_did: str
    argv: Sequence[str]
    timeout: timedelta
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKSPACE
    workspace: BinaryIO | None = None  # an uncompressed tar, checked, that is unpacked into /workspace before
    back: BinaryIO | None = None  # where /workspace is written as a tar after; its .home is left out
    max_returned_bytes: int = 1 << 30  # bytes of that tar
    memory_mib: int | None = None  # None: what the pool gives
    environment_type: str = DEFAULT_ENVIRONMENT_TYPE
    pool: str = ""
    key_id: str = ""  # of the API key that asks
    run_id: UUID = field(default_factory=uuid4)

    @property
    def copy_timeout(self) -> timedelta:
        return WORKSPACE_COPY_TIMEOUT * ((self.workspace is not None) + (self.back is not None))

    @property
    def longest(self) -> timedelta:
        """From the grant of its lease to its last act, at most: a run that its process left behind ends by then."""
        start: timedelta = settings.SANDBOX_START_TIMEOUT
        return start + self.copy_timeout + self.timeout + 2 * KILL_GRACE


@dataclass(frozen=True)
class OneShotResult:
    """How a run ended, and what it said. Without an outcome it goes on still."""

    run_id: UUID
    lease_id: UUID
    outcome: OneShotOutcome | None
    exit_code: int | None = None  # of the command, if it ended; 128 + n after signal n
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    duration: timedelta | None = None  # of the command, with what copying the workspace took
    note: str = ""  # why, where the command itself cannot say
    workspace_returned: bool = False  # the workspace is in Wish.back
    cleaned_up: bool = False  # the lease is over and the provider has confirmed that the sandbox is gone


def run_once(wish: OneShotRequest, *, now: datetime, actor: str = "", admit: Callable[[], object] = bool) -> OneShotResult:
    """Run one command in a sandbox of its own, which is gone afterwards.

    How the command ended is a result, and so is a sandbox that could not be had; what keeps the run from beginning at all
    is raised: Invalid, Conflict for an id that was used, no place, quota or budget, whatever `admit` raises. Nothing is left
    either way, or `cleaned_up` is False and the sweeps go on; also if this process dies, once the run's time is over."""
    later = clock_from(now)
    lease = _grant_lease(wish, now=now, actor=actor, admit=admit)
    checkpoint("run granted", lease)
    reason, note, transfer = "released", "", _WorkspaceTransfer(wish)
    result: ExecResult | None = None
    try:
        result = _execute(lease, wish, transfer, now=later(), actor=actor)
    except CONTAINER_ERRORS as failed:
        reason, note = "failed", str(failed)
    except INTERNAL_ERRORS as failed:
        note = str(failed)
    except (SandboxError, Rejected) as refused:
        clean_up(lease.pk, reason=reason, why=str(refused), now=later(), actor=actor)
        raise
    except (KeyboardInterrupt, SystemExit):
        clean_up(lease.pk, reason=reason, why="interrupted", now=later(), actor=actor)
        raise
    except Exception as failed:
        log.exception("run failed", run=str(wish.run_id))
        note = f"{type(failed).__name__}: {failed}"
    clean = clean_up(lease.pk, reason=reason, why=note, now=later(), actor=actor)
    known = load_result(Lease.objects.get(pk=lease.pk))
    if result:  # all of the output, not only what is kept with the Run
        known = replace(known, stdout=result.stdout, stderr=result.stderr, truncated=result.truncated)
    return replace(
        known,
        outcome=known.outcome or OneShotOutcome.INTERNAL,
        note=note or transfer.note or known.note,
        workspace_returned=transfer.workspace_returned,
        cleaned_up=clean,
    )


def load_result(lease: Lease) -> OneShotResult:
    """What the rows say of a run: its output as far as it is kept with the Run."""
    run = Run.objects.filter(pk=lease.pk).first()
    over = lease.status != LeaseStatus.ACTIVE
    known = OneShotResult(
        run_id=lease.pk,
        lease_id=lease.pk,
        outcome=determine_outcome(run, lease.end_reason) if over else None,
        note=lease.end_detail,
        cleaned_up=lease.status == LeaseStatus.DESTROYED,
    )
    if run is None:
        return known
    return replace(
        known,
        exit_code=run.exit_code,
        stdout=bytes(run.stdout),
        stderr=bytes(run.stderr),
        truncated=run.truncated or run.stdout_bytes > len(run.stdout) or run.stderr_bytes > len(run.stderr),
        duration=run.duration,
        note=known.note or run.note,
    )


def determine_outcome(run: Run | None, end_reason: str) -> OneShotOutcome:
    """How a run ended whose lease is over: as its command did, if that came to an end of its own."""
    if run and run.exit_code is not None:
        return ONE_SHOT_OUTCOMES[RunOutcome(run.outcome)]
    return OneShotOutcome.CONTAINER_FAILED if end_reason in ("failed", "lost") else OneShotOutcome.INTERNAL


def clean_up(pk: UUID, *, reason: str, why: str, now: datetime, actor: str = "") -> bool:
    """End a run's lease and destroy its sandbox; True once the provider has confirmed that it is gone.

    False after GONE_WITHIN, and when the provider fails at it: then the sweeps try again. A sweep that is at it already
    is waited for. Never raises: the result of the command is worth more, and the lease ends by its clock."""
    later = clock_from(now)
    try:
        over = leasing.find_elapsed_clock(Lease.objects.get(pk=pk), now)
        with transaction.atomic(durable=True):
            leasing.end(pk, reason=over or reason, now=now, actor=actor, why=why[:400])
        checkpoint("run released", pk)
        left = Sandbox.objects.filter(holder=pk).exclude(state=SandboxState.DESTROYED)
        while sandbox := left.first():
            if destruction.destroy(sandbox.pk, now=later(), actor=actor):
                continue
            sandbox.refresh_from_db()
            if sandbox.state != SandboxState.DESTROYED and (sandbox.tries or later() > now + CLEANUP_TIMEOUT):
                return False
            time.sleep(pool.POLL_INTERVAL_SECONDS)
        sweeps.mark_destroyed(pk, now=later(), actor=actor)
        return Lease.objects.filter(pk=pk, status=LeaseStatus.DESTROYED).exists()
    except Exception:
        log.exception("run not cleaned up", run=str(pk))
        return False


def _grant_lease(wish: OneShotRequest, *, now: datetime, actor: str, admit: Callable[[], object]) -> Lease:
    kind = EnvironmentType.objects.filter(name=wish.environment_type).first()
    if kind and wish.longest > kind.max_ttl:
        most = (kind.max_ttl - wish.longest + wish.timeout).total_seconds()
        raise InvalidRequest("limits.timeout_seconds", f"At most {max(most, 0):.0f} for this environment type.")
    if wish.memory_mib is not None and not MIN_MEMORY_MIB <= wish.memory_mib <= settings.RUN_MEMORY_MOST_MIB:
        raise InvalidRequest("limits.memory_mib", f"From {MIN_MEMORY_MIB} to {settings.RUN_MEMORY_MOST_MIB}.")
    if Lease.objects.filter(pk=wish.run_id).exists():
        raise Conflict("There is a run with this id already.")
    ask = leasing.LeaseRequest(
        wish.agent_did, f"run-{wish.run_id}", wish.environment_type,
        ttl=wish.longest, max_ttl=wish.longest, pool=wish.pool, key_id=wish.key_id, id=wish.run_id,
    )  # fmt: skip
    lease, is_new = leasing.acquire(ask, now=now, actor=actor, admit=admit)
    if not is_new:
        raise Conflict("There is a run with this id already.")
    return lease


def _execute(lease: Lease, wish: OneShotRequest, transfer: "_WorkspaceTransfer", *, now: datetime, actor: str) -> ExecResult:
    """One Run from the workspace's way in to its way out: so nothing takes the sandbox away in between."""
    argv, within_time = list(wish.argv), wish.timeout + wish.copy_timeout
    command = Command(argv, within_time, wish.env, wish.cwd, wish.stdin, run_id=wish.run_id)
    with execution.use_lease(lease.pk, now=now, spends=True) as request:
        # Nothing in it that was not given: no config.json, which would come back with the workspace, and no skill.
        bare = replace(request, files={}, skill="", memory_mib=wish.memory_mib)
        with runs.operation(bare, command, now=now, actor=actor) as opened:
            provider, sandbox = opened.provider, opened.sandbox
            transfer.unpack_workspace(provider, sandbox)
            checkpoint("workspace in", lease)
            opened.result = result = provider.exec(
                sandbox.ref, argv, env=wish.env, cwd=wish.cwd, stdin=wish.stdin, timeout=wish.timeout,
                cap=settings.EXEC_OUTPUT_CAP, mark=str(wish.run_id),
            )  # fmt: skip
            checkpoint("command ended", lease)
            transfer.bring_back(provider, sandbox)
    return result


class _WorkspaceTransfer:
    """The workspace on its way in and out."""

    def __init__(self, wish: OneShotRequest) -> None:
        self.wish, self.note, self.workspace_returned = wish, "", False

    def unpack_workspace(self, provider: Provider, sandbox: Sandbox) -> None:
        if self.wish.workspace is None:
            return
        try:
            provider.put_files(sandbox.ref, WORKSPACE, self.wish.workspace)
        except Rejected as wrong:
            raise InvalidRequest("workspace", f"It could not be unpacked: {wrong}") from wrong

    def bring_back(self, provider: Provider, sandbox: Sandbox) -> None:
        """What the command did it has done: a workspace that does not come back is no more than a note."""
        out, size, until = self.wish.back, 0, time.monotonic() + WORKSPACE_COPY_TIMEOUT.total_seconds()
        if out is None:
            return
        try:
            for chunk in provider.get_files(sandbox.ref, WORKSPACE, exclude=directories.EXCLUDED_NAMES):
                size += len(chunk)
                if size > self.wish.max_returned_bytes:
                    raise TooLarge(f"as a tar it has more than {self.wish.max_returned_bytes} bytes.")
                if time.monotonic() > until:
                    raise Unavailable(f"it took longer than {WORKSPACE_COPY_TIMEOUT.total_seconds():.0f} seconds.")
                out.write(chunk)
            self.workspace_returned = True
        except (ProviderError, StoreError) as failed:
            self.note = f"The workspace could not be brought back: {failed}"
