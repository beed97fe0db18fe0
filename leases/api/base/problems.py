"""OpenAPI schema of problem documents (RFC 9457)."""

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.models.budgets import Unit
from leases.api.base.fields import FailedByField


class FieldProblemSerializer(serializers.Serializer):
    field = serializers.CharField()
    detail = serializers.CharField()


@extend_schema_field({"oneOf": [{"type": "integer"}, {"type": "string"}]})
class LimitField(serializers.Field):
    """Integer count, or decimal number in a string."""


class ProblemSerializer(serializers.Serializer):
    """Problem document (RFC 9457)."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField(help_text="Explanation for a person.")
    code = serializers.CharField(help_text="Stable error code for programs.")
    retryable = serializers.BooleanField(help_text="The same request may succeed later: after Retry-After.")
    operation = serializers.CharField(help_text="Operation id; the HTTP method of a request that no operation accepts.")
    provider = serializers.CharField(allow_null=True, help_text="Provider of the sandbox whose operation failed. Else null.")
    cause = serializers.CharField(
        allow_null=True,
        help_text="Code of the failure behind this error, such as engine_unreachable, agent_not_connected or timeout. Null: no "
        "other failure is known.",
    )
    field = serializers.CharField(required=False, help_text="Name of the invalid field, query parameter or header.")
    errors = FieldProblemSerializer(many=True, required=False, help_text="All invalid fields.")  # type: ignore[assignment]
    end_reason = serializers.CharField(required=False, help_text="With 410 lease_ended.")
    ended_at = serializers.DateTimeField(required=False, help_text="With 410 lease_ended.")
    sandbox_reason = serializers.CharField(
        required=False, help_text="With 410 lease_ended: reason of the last stop of a sandbox of the lease, if there was one."
    )
    sandbox_detail = serializers.CharField(required=False, help_text="With 410 lease_ended: text of `sandbox_reason`.")
    run_id = serializers.UUIDField(required=False, help_text="Run with the known part of the outcome.")
    outcome = serializers.CharField(required=False, help_text="With outcome_unknown: outcome of the run, if recorded.")
    failed_by = FailedByField(required=False, allow_null=False, help_text="With run_failed: origin of the failure of the run.")
    exit_code = serializers.IntegerField(required=False, help_text="With outcome_unknown: exit code of the run, if known.")
    limit = LimitField(
        required=False,
        help_text="With 429 quota_exceeded: maximum number of sandboxes; with too_many_runs: of open runs. With 402 "
        "budget_exhausted: amount of the budget, if the key may read it.",
    )
    spent = serializers.CharField(
        required=False,
        help_text="With 402 budget_exhausted: amount spent in this period, a decimal number, if the key may read it.",
    )
    unit = serializers.ChoiceField(Unit.values, required=False, help_text="With 402 budget_exhausted.")
    resets_at = serializers.DateTimeField(
        required=False,
        allow_null=True,
        help_text="With 402 budget_exhausted: start of the next period; null for a lifetime budget.",
    )
    position = serializers.IntegerField(
        required=False, help_text="With 503 capacity_exhausted: position in the queue for a place, counted from 1."
    )
    queue_length = serializers.IntegerField(
        required=False, help_text="With 503 capacity_exhausted: requests that wait for a place in the pool."
    )
    workspace_bytes = serializers.IntegerField(required=False, help_text="With 409 workspace_full.")
    host = serializers.CharField(required=False, help_text="With 503 wrong_host and host_lost: name of the host.")
    limit_bytes = serializers.IntegerField(required=False, help_text="With 409 workspace_full.")
