"""What agents see of budgets: those that their leases count against, and nothing to write."""

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers

from billing import budgets
from billing.api.serializers import format_day
from billing.forecast import predict_exhaustion_date
from billing.models.budgets import Budget, Period, Scope, Unit
from billing.pricing import format_decimal
from leases.api import schema
from leases.api.leases import AgentApiView
from leases.api.pagination import paginate
from sandboxes.db.clock import format_timestamp


class BudgetSerializer(serializers.Serializer):
    id = serializers.IntegerField()
    scope = serializers.ChoiceField(Scope.values)
    subject = serializers.CharField(help_text="A DID, an API key's id, the name of a type or an account; empty: everything.")
    unit = serializers.ChoiceField(Unit.values)
    amount = serializers.CharField(help_text="A decimal number.")
    period = serializers.ChoiceField(Period.values, help_text="Of the calendar in UTC.")
    hard = serializers.BooleanField(help_text="Once it is spent, leases are refused and ended. A soft one only warns.")
    warn_percent = serializers.IntegerField()
    grace_seconds = serializers.FloatField(help_text="How long what runs may go on once it is spent.")
    active = serializers.BooleanField()
    spent = serializers.CharField(help_text="A decimal number: what is known to be spent in this period.")
    spent_at = serializers.DateTimeField(allow_null=True, help_text="When that was worked out; null: not yet.")
    exhausted = serializers.BooleanField()
    runs_out = serializers.DateField(
        allow_null=True,
        help_text="The day (UTC) at whose end it is spent if each day to come takes what the last ones have taken on average, "
        "or on which it was; null: not in this period, never, or it is not active.",
    )
    resets_at = serializers.DateTimeField(allow_null=True, help_text="When it begins anew; null: not by itself.")
    created_at = serializers.DateTimeField()


class BudgetListView(AgentApiView):
    @extend_schema(
        operation_id="budgets_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(BudgetSerializer)),
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """The budgets that leases of this key's agents count against, or all for an operator's, newest first."""
        key = self.caller.key
        mine = Budget.objects.all() if key.operator else budgets.find_visible_budgets(self.key_id, key.dids, now=self.now)
        found, following = paginate(mine, "created_at", request)
        return JsonResponse({"results": [self._shown(budget) for budget in found], "next": following})

    def _shown(self, budget: Budget) -> dict[str, Any]:
        spent, ends = budgets.get_spent(budget, self.now), budgets.get_period_bounds(budget.period, self.now)[1]
        return {
            "id": budget.pk,
            "scope": budget.scope,
            "subject": budget.subject,
            "unit": budget.unit,
            "amount": format_decimal(budget.amount),
            "period": budget.period,
            "hard": budget.hard,
            "warn_percent": budget.warn_percent,
            "grace_seconds": budget.grace.total_seconds(),
            "active": budget.active,
            "spent": format_decimal(spent),
            "spent_at": format_timestamp(budget.spent_at) if budget.spent_at else None,
            "exhausted": spent >= budget.amount,
            "runs_out": format_day(predict_exhaustion_date(budget, self.now)),
            "resets_at": format_timestamp(ends) if ends else None,
            "created_at": format_timestamp(budget.created_at),
        }
