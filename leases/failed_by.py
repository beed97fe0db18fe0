"""Classification of the failures of leases, turns, agent runs, queued runs and one-shot runs, from their rows."""

from leases.agent_runs.models import AgentRun, AgentRunState
from leases.models import Turn
from leases.queue.models import QueuedRun, QueuedRunState
from sandboxes import failed_by
from sandboxes.failed_by import STOP_REASONS, FailedBy, classify_run
from sandboxes.models import Run, RunOutcome, StopReason

CONDITION_PREFIX = "condition:"
END_REASONS: dict[str, FailedBy | None] = {  # of a lease; conditions are not listed, and end it regularly
    "ttl": None,
    "max_ttl": None,
    "released": None,
    "budget": FailedBy.LIMIT,
    "operator": FailedBy.INTERRUPTION,
    "lost": FailedBy.INFRASTRUCTURE,
    "failed": FailedBy.INFRASTRUCTURE,
}
TASK_CODES = failed_by.TASK_CODES | {
    "agent_run_not_found", "artifact_not_found", "budget_not_found", "catalog_agent_not_found", "checkout_failed",
    "coding_task_not_found",
    "conflict", "idempotency_key_reused", "not_closable",
    "environment_not_found", "event_not_found", "invalid", "invalid_pack", "invalid_signature", "length_required",
    "no_active_lease", "queued_run_not_found", "range_not_satisfiable", "repository_not_found", "run_failed", "shell_exists",
    "shell_not_found", "terminal_not_found", "too_large", "unsupported_media_type",
    *(outcome.value for outcome in (RunOutcome.FAILED, RunOutcome.TIMED_OUT, RunOutcome.OOM)),
}  # fmt: skip
LIMIT_CODES = failed_by.LIMIT_CODES | {
    "budget_exhausted", "forbidden", "grant_ended", "host_not_allowed", "insufficient_scope", "key_expired",
    "origin_not_allowed", "previews_forbidden", "rate_limited", "signed_url_expired", "signed_url_invalid",
    "lease_ended", "too_many_queued_runs", "too_many_shells",
}  # fmt: skip
INTERRUPTION_CODES = frozenset({"coding_task_ended", "environment_ended", "queued_run_interrupted"})
INFRASTRUCTURE_CODES = failed_by.INFRASTRUCTURE_CODES | {
    "agent_run_closed", "coding_task_busy", "database_unavailable", "error", "internal", "lease_error",
    "idempotency_in_progress", "mcp_not_installed",
    "repository_unavailable", "shell_decryption_failed", "stop_incomplete", "stream_server_unavailable", "totals_pending",
}  # fmt: skip


def get_stop_reason(end_reason: str) -> StopReason | None:
    """Return the reason for which the end of a lease stops its commands. None if its sandbox was lost or did not start."""
    if end_reason.startswith(CONDITION_PREFIX):
        return StopReason.CONDITION
    return None if END_REASONS[end_reason] == FailedBy.INFRASTRUCTURE else StopReason(end_reason)


def classify_end_reason(end_reason: str) -> FailedBy | None:
    """Return the origin of the failure of a lease. None while it is active, and after a regular end."""
    return None if not end_reason or end_reason.startswith(CONDITION_PREFIX) else END_REASONS[end_reason]


def classify_lease_end(end_reason: str) -> FailedBy:
    """Return the origin of the failure of work that was refused or stopped because its lease had ended."""
    stop_reason = get_stop_reason(end_reason)
    return STOP_REASONS[stop_reason] if stop_reason else FailedBy.INFRASTRUCTURE


def classify_turn(turn: Turn) -> FailedBy | None:
    """Return the origin of the failure of a skipped turn. A turn command that ended with exit code 0 printed no action, or
    `skip_turn`."""
    if not turn.skipped:
        return None
    run = turn.run
    if run is None or run.ended_at is None:
        return FailedBy.INFRASTRUCTURE
    return classify_run(run) or FailedBy.TASK


def classify_agent_run(row: AgentRun, run: Run | None) -> FailedBy | None:
    """Return the origin of the failure of an agent run. `run` is the run of its CLI, if one was opened."""
    if row.state == AgentRunState.INTERRUPTED:
        return FailedBy.LIMIT if row.violation else FailedBy.INTERRUPTION
    if row.state != AgentRunState.FAILED:
        return None
    return FailedBy.INFRASTRUCTURE if run is None else classify_run(run) or FailedBy.TASK


def classify_queued_run(row: QueuedRun, turn: Turn | None = None) -> FailedBy | None:
    """Return the origin of the failure of a queued run. `turn` is the answer of a completed one that is a turn."""
    match row.state:
        case QueuedRunState.COMPLETED:
            return classify_turn(turn) if turn else None
        case QueuedRunState.INTERRUPTED:
            return FailedBy.INTERRUPTION
        case QueuedRunState.EXPIRED:
            return FailedBy.INFRASTRUCTURE
        case QueuedRunState.FAILED:
            error = row.error or {}
            return FailedBy(error["failed_by"]) if error.get("failed_by") else classify_code(error.get("code", ""))
        case _:
            return None


def classify_code(code: str) -> FailedBy:
    """Return the origin of an error with this code. An unknown code is an error of the control plane."""
    if code in TASK_CODES:
        return FailedBy.TASK
    if code in LIMIT_CODES:
        return FailedBy.LIMIT
    return FailedBy.INTERRUPTION if code in INTERRUPTION_CODES else FailedBy.INFRASTRUCTURE


def classify_one_shot(run: Run | None, end_reason: str) -> FailedBy | None:
    """Return the origin of the failure of a one-shot run whose lease has ended."""
    if run is not None and run.ended_at is not None:
        return classify_run(run)
    if end_reason in ("released", ""):
        return FailedBy.INFRASTRUCTURE
    return classify_lease_end(end_reason)
