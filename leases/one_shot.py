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
from leases.errors import Conflict, Invalid, LeaseEnded
from leases.models import EnvironmentType, Lease, Status
from sandboxes import eviction, pool, runs
from sandboxes.db.clock import ticking
from sandboxes.errors import Busy, Lost, NotHeld, NotReady, ProviderFailed, SandboxError, StoreFailed
from sandboxes.lifecycle import step
from sandboxes.models import Outcome, Run, Sandbox, State
from sandboxes.pool import Want
from sandboxes.providers.base import WORKSPACE, ExecResult, Provider, ProviderError, Rejected, TooLarge, Unavailable
from sandboxes.runs import GRACE, Command
from sandboxes.state import directories
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
TYPE = "run"  # the environment type of a run that names none
COPY_WITHIN = timedelta(minutes=2)  # for the workspace's way in, and for its way out
GONE_WITHIN = timedelta(seconds=30)  # then the sweeps go on without us
LEAST_MEMORY = 16  # MiB


class How(StrEnum):
    """How a run ended."""

    OK = "ok"
    FAILED = "failed"  # the command ended with another code than 0
    TIMEOUT = "timeout"
    OOM_KILLED = "oom_killed"
    CONTAINER_FAILED = "container_failed"  # the sandbox could not be started, did not answer, or was lost
    INTERNAL = "internal"  # whatever else kept us from the command's own end


SAID = {Outcome.OK: How.OK, Outcome.FAILED: How.FAILED, Outcome.TIMED_OUT: How.TIMEOUT, Outcome.OOM: How.OOM_KILLED}
UNSTARTED = (NotReady, Lost, ProviderFailed, Busy)
OURS = (LeaseEnded, NotHeld, StoreFailed)


@dataclass(frozen=True)
class Wish:
    """What to run, and in what. Values of env may be secret and are never stored or logged."""

    agent_did: str
    argv: Sequence[str]
    timeout: timedelta
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKSPACE
    workspace: BinaryIO | None = None  # an uncompressed tar, checked, that is unpacked into /workspace before
    back: BinaryIO | None = None  # where /workspace is written as a tar after; its .home is left out
    most_back: int = 1 << 30  # bytes of that tar
    memory_mib: int | None = None  # None: what the pool gives
    environment_type: str = TYPE
    pool: str = ""
    key_id: str = ""  # of the API key that asks
    run_id: UUID = field(default_factory=uuid4)

    @property
    def copying(self) -> timedelta:
        return COPY_WITHIN * ((self.workspace is not None) + (self.back is not None))

    @property
    def longest(self) -> timedelta:
        """From the grant of its lease to its last act, at most: a run that its process left behind ends by then."""
        start: timedelta = settings.SANDBOX_START_TIMEOUT
        return start + self.copying + self.timeout + 2 * GRACE


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it said. Without an outcome it goes on still."""

    run_id: UUID
    lease_id: UUID
    outcome: How | None
    exit_code: int | None = None  # of the command, if it ended; 128 + n after signal n
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    duration: timedelta | None = None  # of the command, with what copying the workspace took
    note: str = ""  # why, where the command itself cannot say
    brought_back: bool = False  # the workspace is in Wish.back
    cleaned_up: bool = False  # the lease is over and the provider has confirmed that the sandbox is gone


def run_once(wish: Wish, *, now: datetime, actor: str = "", admit: Callable[[], object] = bool) -> Result:
    """Run one command in a sandbox of its own, which is gone afterwards.

    How the command ended is a result, and so is a sandbox that could not be had; what keeps the run from beginning at all
    is raised: Invalid, Conflict for an id that was used, no place, quota or budget, whatever `admit` raises. Nothing is left
    either way, or `cleaned_up` is False and the sweeps go on; also if this process dies, once the run's time is over."""
    later = ticking(now)
    lease = _grant(wish, now=now, actor=actor, admit=admit)
    step("run granted", lease)
    reason, note, carried = "released", "", _Carried(wish)
    result: ExecResult | None = None
    try:
        result = _play(lease, wish, carried, now=later(), actor=actor)
    except UNSTARTED as failed:
        reason, note = "failed", str(failed)
    except OURS as failed:
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
    known = result_of(Lease.objects.get(pk=lease.pk))
    if result:  # all of the output, not only what is kept with the Run
        known = replace(known, stdout=result.stdout, stderr=result.stderr, truncated=result.truncated)
    return replace(
        known,
        outcome=known.outcome or How.INTERNAL,
        note=note or carried.note or known.note,
        brought_back=carried.brought_back,
        cleaned_up=clean,
    )


def result_of(lease: Lease) -> Result:
    """What the rows say of a run: its output as far as it is kept with the Run."""
    run = Run.objects.filter(pk=lease.pk).first()
    over = lease.status != Status.ACTIVE
    told = lease.events.filter(kind="ended").first() if over else None
    known = Result(
        run_id=lease.pk,
        lease_id=lease.pk,
        outcome=judge(run, lease.end_reason) if over else None,
        note=told.reason.partition(": ")[2] if told else "",
        cleaned_up=lease.status == Status.DESTROYED,
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


def judge(run: Run | None, end_reason: str) -> How:
    """How a run ended whose lease is over: as its command did, if that came to an end of its own."""
    if run and run.exit_code is not None:
        return SAID[Outcome(run.outcome)]
    return How.CONTAINER_FAILED if end_reason in ("failed", "lost") else How.INTERNAL


def clean_up(pk: UUID, *, reason: str, why: str, now: datetime, actor: str = "") -> bool:
    """End a run's lease and destroy its sandbox; True once the provider has confirmed that it is gone.

    False after GONE_WITHIN, and when the provider fails at it: then the sweeps try again. A sweep that is at it already
    is waited for. Never raises: the result of the command is worth more, and the lease ends by its clock."""
    later = ticking(now)
    try:
        over = leasing.why_elapsed(Lease.objects.get(pk=pk), now)
        with transaction.atomic(durable=True):
            leasing.end(pk, reason=over or reason, now=now, actor=actor, why=why[:400])
        step("run released", pk)
        left = Sandbox.objects.filter(holder=pk).exclude(state=State.DESTROYED)
        while sandbox := left.first():
            if eviction.destroy(sandbox.pk, now=later(), actor=actor):
                continue
            sandbox.refresh_from_db()
            if sandbox.state != State.DESTROYED and (sandbox.tries or later() > now + GONE_WITHIN):
                return False
            time.sleep(pool.POLL)
        sweeps.close(pk, now=later(), actor=actor)
        return Lease.objects.filter(pk=pk, status=Status.DESTROYED).exists()
    except Exception:
        log.exception("run not cleaned up", run=str(pk))
        return False


def _grant(wish: Wish, *, now: datetime, actor: str, admit: Callable[[], object]) -> Lease:
    kind = EnvironmentType.objects.filter(name=wish.environment_type).first()
    if kind and wish.longest > kind.max_ttl:
        most = (kind.max_ttl - wish.longest + wish.timeout).total_seconds()
        raise Invalid("limits.timeout_seconds", f"At most {max(most, 0):.0f} for this environment type.")
    if wish.memory_mib is not None and not LEAST_MEMORY <= wish.memory_mib <= settings.RUN_MEMORY_MOST_MIB:
        raise Invalid("limits.memory_mib", f"From {LEAST_MEMORY} to {settings.RUN_MEMORY_MOST_MIB}.")
    if Lease.objects.filter(pk=wish.run_id).exists():
        raise Conflict("There is a run with this id already.")
    ask = leasing.Ask(
        wish.agent_did, f"run-{wish.run_id}", wish.environment_type,
        ttl=wish.longest, max_ttl=wish.longest, pool=wish.pool, key_id=wish.key_id, id=wish.run_id,
    )  # fmt: skip
    lease, is_new = leasing.acquire(ask, now=now, actor=actor, admit=admit)
    if not is_new:
        raise Conflict("There is a run with this id already.")
    return lease


def _play(lease: Lease, wish: Wish, carried: "_Carried", *, now: datetime, actor: str) -> ExecResult:
    """One Run from the workspace's way in to its way out: so nothing takes the sandbox away in between."""
    argv, within_time = list(wish.argv), wish.timeout + wish.copying
    command = Command(argv, within_time, wish.env, wish.cwd, wish.stdin, run_id=wish.run_id)

    def act(provider: Provider, sandbox: Sandbox) -> ExecResult:
        carried.take_in(provider, sandbox)
        step("workspace in", lease)
        result = provider.exec(
            sandbox.ref, argv, env=wish.env, cwd=wish.cwd, stdin=wish.stdin, timeout=wish.timeout,
            cap=settings.EXEC_OUTPUT_CAP, mark=str(wish.run_id),
        )  # fmt: skip
        step("command ended", lease)
        carried.bring_back(provider, sandbox)
        return result

    def within(want: Want, at: datetime) -> ExecResult:
        # Nothing in it that was not given: no config.json, which would come back with the workspace, and no skill.
        bare = replace(want, files={}, skill="", memory_mib=wish.memory_mib)
        return runs.act_in(bare, command, act, now=at, actor=actor)[1]

    return execution.for_lease(lease.pk, within, now=now, actor=actor, spends=True)


class _Carried:
    """The workspace on its way in and out."""

    def __init__(self, wish: Wish) -> None:
        self.wish, self.note, self.brought_back = wish, "", False

    def take_in(self, provider: Provider, sandbox: Sandbox) -> None:
        if self.wish.workspace is None:
            return
        try:
            provider.put_files(sandbox.ref, WORKSPACE, self.wish.workspace)
        except Rejected as wrong:
            raise Invalid("workspace", f"It could not be unpacked: {wrong}") from wrong

    def bring_back(self, provider: Provider, sandbox: Sandbox) -> None:
        """What the command did it has done: a workspace that does not come back is no more than a note."""
        out, size, until = self.wish.back, 0, time.monotonic() + COPY_WITHIN.total_seconds()
        if out is None:
            return
        try:
            for chunk in provider.get_files(sandbox.ref, WORKSPACE, exclude=directories.LEFT_OUT):
                size += len(chunk)
                if size > self.wish.most_back:
                    raise TooLarge(f"as a tar it has more than {self.wish.most_back} bytes.")
                if time.monotonic() > until:
                    raise Unavailable(f"it took longer than {COPY_WITHIN.total_seconds():.0f} seconds.")
                out.write(chunk)
            self.brought_back = True
        except (ProviderError, StoreError) as failed:
            self.note = f"The workspace could not be brought back: {failed}"
