"""Ends of Runs: the statement that closes one, and the outcome of a command."""

from datetime import datetime

from django.conf import settings

from sandboxes import lifecycle
from sandboxes.db import sql, tracing
from sandboxes.db.message_fields import fit_column
from sandboxes.guard import HolderRenewal
from sandboxes.models import Run, RunOutcome
from sandboxes.providers.command_results import ExecResult


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
    ended_at: datetime | None = None,
) -> bool:
    """Close an open Run and subtract it from its sandbox's count. Returns False if the Run was closed before.

    `ended_at` is the end of its command, if that is recorded later than usual; it is `now` without.
    With `resumed`, the Run has resumed its sandbox (`suspension.thaw_for_run`), and that is recorded as well.
    `code` is that of the error that ended the Run; it is stored if the command has no result.
    Also executes `renewal`, in the same transaction. In both cases `run` has the stored values afterwards. Each output stream
    is stored up to RUN_OUTPUT_KEPT bytes."""
    max_bytes = settings.RUN_OUTPUT_KEPT
    ended_at = min(max(ended_at or now, run.started_at), now)
    values: dict[str, object] = {"ended_at": ended_at, "outcome": outcome.value, "note": fit_column(Run, "note", note)}
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
