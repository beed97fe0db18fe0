"""Classification of failures: whether a run failed by its task, by the infrastructure, by a limit or by an interruption."""

from enum import StrEnum

from sandboxes.models import Run, RunOutcome, StopReason


class FailedBy(StrEnum):
    """Origin of a failure. Work that has not ended, or has not failed, has none."""

    TASK = "task"  # the command, its input or the request: a repetition fails in the same way
    INFRASTRUCTURE = "infrastructure"  # control plane, host, provider or store: the task may be right
    LIMIT = "limit"  # a budget, a quota, a policy or a clock of the lease ended or refused the work
    INTERRUPTION = "interruption"  # a client, an operator or the end of the environment stopped the work


RUN_OUTCOMES: dict[str, FailedBy | None] = {
    RunOutcome.OPEN: None,
    RunOutcome.OK: None,
    RunOutcome.FAILED: FailedBy.TASK,
    RunOutcome.TIMED_OUT: FailedBy.TASK,
    RunOutcome.OOM: FailedBy.TASK,
    RunOutcome.LOST: FailedBy.INFRASTRUCTURE,
    RunOutcome.ERROR: FailedBy.INFRASTRUCTURE,
}
STOP_REASONS: dict[str, FailedBy] = {
    StopReason.INTERRUPTED: FailedBy.INTERRUPTION,
    StopReason.OPERATOR: FailedBy.INTERRUPTION,
    StopReason.RESTART: FailedBy.INTERRUPTION,
    StopReason.RELEASED: FailedBy.INTERRUPTION,
    StopReason.CONDITION: FailedBy.INTERRUPTION,
    StopReason.TTL: FailedBy.LIMIT,
    StopReason.MAX_TTL: FailedBy.LIMIT,
    StopReason.BUDGET: FailedBy.LIMIT,
    StopReason.POLICY: FailedBy.LIMIT,
}
# Codes of errors, by origin. tests/unit/leases/test_failed_by.py lists all codes.
TASK_CODES = frozenset({
    "bad_path", "build_command_failed", "data_full", "data_mounted", "file_exists", "file_not_found", "file_too_large",
    "has_owner", "image_in_use", "invalid_template", "no_signing_key", "no_snapshot", "no_such_template", "not_adoptable",
    "not_held", "not_listed", "output_gone", "process_ended", "provider_rejected", "run_exists", "signing_key_exists",
    "signing_key_revoked", "store_refused", "template_in_use", "templates_not_supported", "workspace_full",
})  # fmt: skip
LIMIT_CODES = frozenset({"quota_exceeded", "too_many_processes", "too_many_runs", "too_many_streams"})
INFRASTRUCTURE_CODES = frozenset({
    "busy", "capacity_exhausted", "capacity_pending", "disk_full", "host_lost", "illegal_transition", "image_missing",
    "installation_mismatch", "no_capacity", "no_database_connection", "no_gateway", "no_pool_available", "no_progress",
    "not_delivered", "not_isolated", "observe_mode", "outcome_unknown", "pool_draining", "provider_conflict", "provider_error",
    "provider_list_expired", "provider_not_found", "provider_unavailable", "sandbox_asleep", "sandbox_error", "sandbox_lost",
    "sandbox_missing", "sandbox_not_ready", "sandbox_stopped", "sandbox_unreadable", "server_busy", "signing_key_unopened",
    "start_killed", "starts_paused", "store_unavailable", "template_busy", "too_many_starts",
    "too_many_waiting", "within_grace", "wrong_host",
})  # fmt: skip


def classify_code(code: str) -> FailedBy:
    """Return the origin of an error with this code. An unknown code is an error of the control plane."""
    if code in TASK_CODES:
        return FailedBy.TASK
    return FailedBy.LIMIT if code in LIMIT_CODES else FailedBy.INFRASTRUCTURE


def classify_run(run: Run) -> FailedBy | None:
    """Return the origin of the failure of a run, None if it is open or ended with exit code 0.

    A command that was to be stopped counts as stopped, unless it ended with exit code 0."""
    failed_by = RUN_OUTCOMES[run.outcome]
    if failed_by is None:
        return None
    if run.stop_reason:
        return STOP_REASONS[run.stop_reason]
    return classify_code(run.error_code) if run.outcome == RunOutcome.FAILED and run.exit_code is None else failed_by
