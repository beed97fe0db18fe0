"""Schema of problem documents."""

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.models.budgets import Unit


class FieldProblemSerializer(serializers.Serializer):
    field = serializers.CharField()
    detail = serializers.CharField()


@extend_schema_field({"oneOf": [{"type": "integer"}, {"type": "string"}]})
class LimitField(serializers.Field):
    """A whole number of things, or a decimal number as text."""


class ProblemSerializer(serializers.Serializer):
    """RFC 9457."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField(help_text="For people.")
    code = serializers.CharField(help_text="For programs.")
    field = serializers.CharField(required=False, help_text="What is at fault.")
    errors = FieldProblemSerializer(many=True, required=False, help_text="All that is at fault.")  # type: ignore[assignment]
    end_reason = serializers.CharField(required=False, help_text="With 410 lease_ended.")
    ended_at = serializers.DateTimeField(required=False, help_text="With 410 lease_ended.")
    run_id = serializers.UUIDField(required=False, help_text="The Run that says what is known.")
    limit = LimitField(
        required=False,
        help_text="With 429 quota_exceeded: sandboxes the agent may have. With 402 budget_exhausted: a decimal number.",
    )
    spent = serializers.CharField(required=False, help_text="With 402 budget_exhausted: a decimal number, in this period.")
    unit = serializers.ChoiceField(Unit.values, required=False, help_text="With 402 budget_exhausted.")
    resets_at = serializers.DateTimeField(
        required=False, allow_null=True, help_text="With 402 budget_exhausted: when it begins anew; null: not by itself."
    )
    workspace_bytes = serializers.IntegerField(required=False, help_text="With 409 workspace_full.")
    limit_bytes = serializers.IntegerField(required=False, help_text="With 409 workspace_full.")
