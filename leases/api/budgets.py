"""Budgets of leases, read only."""

from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from billing import budgets
from billing.api.views import format_day
from billing.budgets import Disclosure
from billing.forecast import predict_exhaustion_date
from billing.models.budgets import Budget, Period, Scope, Unit
from billing.pricing import format_decimal
from leases.api.base import schema
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, ApiView
from leases.models import KeyScope
from sandboxes.db.clock import format_optional_timestamp, format_timestamp


class BudgetSerializer(serializers.Serializer):
    id = serializers.IntegerField()
    scope = serializers.ChoiceField(Scope.values)
    subject = serializers.CharField(
        help_text="DID, id of an API key, or name of an environment type or account; empty for the whole installation."
    )
    unit = serializers.ChoiceField(Unit.values)
    amount = serializers.CharField(
        allow_null=True,
        help_text="Decimal number in `unit`; null: not disclosed to this key, which shares the budget with others.",
    )
    period = serializers.ChoiceField(Period.values, help_text="Calendar period in UTC.")
    hard = serializers.BooleanField(
        help_text="true: an exhausted budget refuses requests (402) and ends leases; false: it only warns."
    )
    warn_percent = serializers.IntegerField()
    grace_seconds = serializers.FloatField(help_text="Grace period of active leases after exhaustion.")
    active = serializers.BooleanField()
    spent = serializers.CharField(
        allow_null=True, help_text="Decimal number in `unit`: known spending in this period; null: not disclosed to this key."
    )
    estimated_usd = serializers.CharField(
        allow_null=True,
        help_text="Estimated part of `spent`, in USD; 0 for a budget in hours; null: not disclosed to this key.",
    )
    unpriced_calls = serializers.IntegerField(
        allow_null=True,
        help_text="Number of model calls in this period without a price, which `spent` does not include; 0 for a budget in "
        "hours; null: not disclosed to this key.",
    )
    reserved = serializers.CharField(
        allow_null=True,
        help_text="Decimal number in `unit`: price of the running sandboxes until they could be stopped, usage that is not "
        "metered yet included. Derived at the time of the request; 0 for a soft budget; null: not disclosed to this key.",
    )
    spent_at = serializers.DateTimeField(
        allow_null=True, help_text="Time of the last computation of `spent`; null: not computed yet."
    )
    exhausted = serializers.BooleanField(help_text="true: `amount` is spent, or `spent` and `reserved` together exceed it.")
    runs_out = serializers.DateField(
        allow_null=True,
        help_text="Day (UTC) of exhaustion: observed, or predicted from the average daily spending of the last days; "
        "null: not within this period, the budget is not active, or not disclosed to this key.",
    )
    resets_at = serializers.DateTimeField(allow_null=True, help_text="Start of the next period; null for a lifetime budget.")
    created_at = serializers.DateTimeField()


class BudgetListView(ApiView):
    key_scope = KeyScope.COSTS

    @extend_schema(
        operation_id="budgets_list",
        summary="List budgets",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(BudgetSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the budgets that apply to leases of this key's agents, newest first; with an operator's key, all budgets.

        An agent's key reads amount and spending of budgets for its agents and for the key itself, and the amount of budgets
        for an environment type. Of other budgets it reads only whether they are exhausted and when they reset."""
        key = self.caller.key
        visible = Budget.objects.all() if key.operator else budgets.find_visible_budgets(self.key_id, key.dids, now=self.now)
        page, next_url = paginate(visible, "created_at", request)
        basis = budgets.ReservationBasis.load()
        return Response({"results": [self._serialize_budget(budget, basis) for budget in page], "next": next_url})

    def _serialize_budget(self, budget: Budget, basis: budgets.ReservationBasis) -> dict[str, Any]:
        disclosure = budgets.get_disclosure(budget.scope, budget.subject, **self.caller.budget_access)
        spends, amounts = disclosure == Disclosure.SPENDING, disclosure != Disclosure.NOTHING
        spent, resets_at = budgets.get_spent(budget, self.now), budgets.get_period_bounds(budget.period, self.now)[1]
        uncertainty = budgets.get_uncertainty(budget, self.now)
        reserved = budgets.compute_reservation(budget, now=self.now, basis=basis)
        return {
            "id": budget.pk,
            "scope": budget.scope,
            "subject": budget.subject,
            "unit": budget.unit,
            "amount": format_decimal(budget.amount) if amounts else None,
            "period": budget.period,
            "hard": budget.hard,
            "warn_percent": budget.warn_percent,
            "grace_seconds": budget.grace.total_seconds(),
            "active": budget.active,
            "spent": format_decimal(spent) if spends else None,
            "estimated_usd": format_decimal(uncertainty.estimated_usd) if spends else None,
            "unpriced_calls": uncertainty.unpriced if spends else None,
            "reserved": format_decimal(reserved) if spends else None,
            "spent_at": format_optional_timestamp(budget.spent_at),
            "exhausted": budgets.is_over(budget, spent, reserved),
            "runs_out": format_day(predict_exhaustion_date(budget, self.now)) if spends else None,
            "resets_at": format_optional_timestamp(resets_at),
            "created_at": format_timestamp(budget.created_at),
        }
