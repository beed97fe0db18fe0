"""Commands in sandboxes: a Run row is opened before the provider is called and closed after, whatever happens.

running <=> it has open Runs. Both the count and the state change in the transaction that opens or closes the Run, so
an eviction that looks at the state can never take a sandbox from under a command."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from sandboxes import eviction, lifecycle, pool, providers
from sandboxes.db import sql
from sandboxes.db.clock import clock_from
from sandboxes.errors import DataFull, ProviderCallFailed, SandboxError, SandboxLost, StoreUnavailable, WorkspaceFull
from sandboxes.lifecycle import checkpoint
from sandboxes.models import GONE_STATES, Attachment, Run, RunOutcome, Sandbox
from sandboxes.providers.base import WORKSPACE, ExecResult, Missing, NoSuchFile, Provider, ProviderError, Rejected
from sandboxes.state import data_sync
from sandboxes.storage.base import StoreError

T = TypeVar("T")
KILL_GRACE = timedelta(seconds=30)  # past its timeout, the time a provider has to kill the command and say so


@dataclass(frozen=True)
class Command:
    """What to run. Values of env may be secret and are never stored or logged."""

    argv: Sequence[str]
    timeout: timedelta
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKSPACE
    stdin: bytes = b""
    kind: str = "exec"
    turn_number: int | None = None
    needs_data: bool = True  # it may read or change /data
    run_id: uuid.UUID = field(default_factory=uuid.uuid4)


def exec_in_sandbox(want: pool.SandboxRequest, command: Command, *, now: datetime, actor: str = "") -> tuple[Run, ExecResult]:
    """Run a command in the holder's sandbox, which is made ready first. Blocks until it ended.

    A command that fails or times out is a result. Lost when the provider has lost the sandbox, ProviderFailed when it
    did not answer: then the Run says whether the command may have run. Also whatever `pool.ready` raises."""

    def act(provider: Provider, sandbox: Sandbox) -> ExecResult:
        require_workspace_space(provider, sandbox, now=now)
        return provider.exec(
            sandbox.ref,
            list(command.argv),
            env=command.env,
            cwd=command.cwd,
            stdin=command.stdin,
            timeout=command.timeout,
            cap=settings.EXEC_OUTPUT_CAP,
            mark=str(command.run_id),
        )

    return run_operation(want, command, act, now=now, actor=actor)


def run_operation(
    want: pool.SandboxRequest, command: Command, act: Callable[[Provider, Sandbox], T], *, now: datetime, actor: str = ""
) -> tuple[Run, T]:
    """Like exec_in for any one act, a file operation say: it has a Run, so nothing evicts the sandbox under it."""
    later = clock_from(now)
    while True:
        want.guard.check_proceed()
        sandbox = pool.ensure_running(want, now=later(), actor=actor)
        run = open_run(sandbox, command, now=later(), actor=actor)
        if run:
            return run, _execute_run(run, sandbox, act, want, command, now=later(), actor=actor)
        # It fell asleep or was given up between the two lines above: make it ready again.


def open_run(sandbox: Sandbox, command: Command, *, now: datetime, actor: str = "") -> Run | None:
    """Open a Run and count it in the sandbox, together. None if the sandbox is not this holder's and alive any more."""
    assert sandbox.holder is not None  # what pool.ready gives has one
    with transaction.atomic(durable=True):
        before = lifecycle.start_run(sandbox.pk, holder=sandbox.holder, now=now, actor=actor)
        if before is None:
            return None
        run = Run(
            id=command.run_id,
            sandbox=sandbox,
            holder=sandbox.holder,
            agent_did=sandbox.agent_did,
            incarnation=sandbox.incarnation,
            kind=command.kind,
            turn_number=command.turn_number,
            argv=list(command.argv),
            cwd=command.cwd,
            claimed_by=settings.INSTANCE,
            env_names=sorted(command.env),
            stdin_bytes=len(command.stdin),
            started_at=now,
            deadline_at=now + command.timeout + KILL_GRACE,
        )
        sql.insert(run)
    checkpoint("run opened", run)
    return run


def _execute_run(
    run: Run,
    sandbox: Sandbox,
    act: Callable[[Provider, Sandbox], T],
    want: pool.SandboxRequest,
    command: Command,
    *,
    now: datetime,
    actor: str,
) -> T:
    """Call the provider for an open Run and close it with what came back, or with why nothing did."""
    later = clock_from(now)
    provider = providers.get_provider(sandbox.provider)
    try:
        if not sandbox.prepared:
            pool.put_files(sandbox, provider, want.files)
            Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation).update(prepared=True)
        attached = data_sync.attach(sandbox, provider, skill=want.skill, now=later()) if command.needs_data else None
        if attached and command.kind != "file":  # files can still be removed
            data_sync.require_free_space(attached, sandbox, provider, now=later())
        answer = act(provider, sandbox)
    except Missing as gone:
        close_run(run, now=later(), outcome=RunOutcome.LOST, note=f"The provider has no such sandbox: {gone}", actor=actor)
        eviction.mark_lost(sandbox, str(gone), now=later())
        raise SandboxLost() from gone
    except (NoSuchFile, Rejected, SandboxError) as refused:
        close_run(run, now=later(), outcome=RunOutcome.FAILED, note=str(refused), actor=actor)
        raise
    except Exception as failed:
        close_run(run, now=later(), outcome=RunOutcome.ERROR, note=f"{type(failed).__name__}: {failed}", actor=actor)
        if isinstance(failed, ProviderError):
            raise ProviderCallFailed(f"The provider failed: {failed}") from failed
        if isinstance(failed, StoreError):
            raise StoreUnavailable(f"The store did not answer, so nothing was run: {failed}") from failed
        raise
    checkpoint("run answered", run)
    note = _persist_data(attached, sandbox, provider, now=later()) if attached else ""
    if isinstance(answer, ExecResult):
        close_run(run, now=later(), outcome=_classify_outcome(answer), result=answer, note=note, actor=actor)
    else:
        close_run(run, now=later(), outcome=RunOutcome.OK, note=note, actor=actor)
    return answer


def _persist_data(attached: Attachment, sandbox: Sandbox, provider: Provider, *, now: datetime) -> str:
    """Store what was changed in /data; "" or why that did not work. What was run has been run: its answer stands, the
    sandbox keeps what it has, and a sweep tries again."""
    try:
        data_sync.persist(attached, sandbox, provider, now=now)
    except (StoreError, ProviderError, DataFull) as failed:
        data_sync.mark_unsaved(attached, failed, now=now)
        return f"What it changed in /data is not stored yet: {failed}"
    return ""


def close_run(
    run: Run, *, now: datetime, outcome: RunOutcome, result: ExecResult | None = None, note: str = "", actor: str = ""
) -> bool:
    """Close an open Run, once, and count it out of its sandbox. False if somebody else has closed it."""
    kept = settings.RUN_OUTPUT_KEPT
    values: dict[str, object] = {"ended_at": now, "outcome": outcome.value, "note": note[:500]}
    if result:
        values |= {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "oom": result.oom,
            "truncated": result.truncated,
            "stdout": result.stdout[:kept],
            "stderr": result.stderr[:kept],
            "stdout_bytes": len(result.stdout),
            "stderr_bytes": len(result.stderr),
        }
    with transaction.atomic():
        # Its sandbox before the Run, as whoever gives that up locks them.
        lifecycle.finish_run(run.sandbox_id, run.incarnation, idle_after=run.sandbox.idle_after, now=now, actor=actor)
        changes = ", ".join(f"{name} = %s" for name in values)
        closed = sql.update(Run, f"{changes} WHERE id = %s AND ended_at IS NULL", *values.values(), run.pk)
        if not closed:
            transaction.set_rollback(True)  # whoever closed it has counted it out
    if closed:
        for name, value in values.items():
            setattr(run, name, value)
    else:
        run.refresh_from_db()
    return bool(closed)


def require_workspace_space(provider: Provider, sandbox: Sandbox, *, now: datetime) -> None:
    """WorkspaceFull if the workspace was too large when last measured and, measured now, still is."""
    limit = sandbox.pool.workspace_limit_mib << 20
    if (sandbox.workspace_bytes or 0) > limit and (size := measure_workspace(provider, sandbox, now=now)) > limit:
        raise WorkspaceFull(
            f"/workspace has {size >> 20} MiB and may have {limit >> 20}. Delete files through the files API, then try again.",
            workspace_bytes=size,
            limit_bytes=limit,
        )


def measure_workspace(provider: Provider, sandbox: Sandbox, *, now: datetime) -> int:
    """Bytes in /workspace, which the row then says, too."""
    size = provider.size(sandbox.ref, WORKSPACE)
    Sandbox.objects.filter(pk=sandbox.pk).update(workspace_bytes=size, measured_at=now)
    return size


def close_abandoned_run(run: Run, *, now: datetime) -> bool:
    """Close a Run past its deadline: whoever waited for it is dead, and its exit is unknown. False if it was closed.

    What it may still be running is killed first: else a command that nobody waits for goes on in a sandbox that says
    it waits. ProviderError if that could not be done; then the Run stays open for the next try."""
    why = "Past its deadline: the process that waited for it is gone, so how it ended is not known."
    return interrupt_run(run, why=why, now=now, actor="sweep")


def interrupt_run(run: Run, *, why: str, now: datetime, actor: str = "") -> bool:
    """Kill what an open Run runs, and close it. False if it was closed before; ProviderError if it could not be killed."""
    sandbox = run.sandbox
    if sandbox.state not in GONE_STATES and sandbox.incarnation == run.incarnation:
        with suppress(Missing):  # gone with whatever ran in it: reconcile finds that it is lost
            providers.get_provider(sandbox.provider).kill(sandbox.ref, str(run.pk))
    return close_run(run, now=now, outcome=RunOutcome.LOST, note=why, actor=actor)


def find_overdue(*, now: datetime) -> QuerySet[Run]:
    """Runs that should have been closed by now."""
    late = Run.objects.filter(ended_at__isnull=True, deadline_at__lt=now)
    return late.select_related("sandbox").order_by("deadline_at")


def _classify_outcome(result: ExecResult) -> RunOutcome:
    if result.timed_out:
        return RunOutcome.TIMED_OUT
    if result.oom:
        return RunOutcome.OOM
    return RunOutcome.OK if result.exit_code == 0 else RunOutcome.FAILED
