"""Console action that tops up a budget."""

from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

from django import forms
from django.contrib.admin.utils import unquote
from unfold.widgets import UnfoldAdminTextInputWidget

from billing import budgets
from billing.admin.budget_usage import format_limit
from billing.models import Budget
from billing.models.budgets import MIN_BUDGET_AMOUNT
from sandboxes.admin.base.actions import REASON_HELP_TEXT, AdminAction, ReasonForm
from sandboxes.admin.base.fields import NormalizedDecimalField
from sandboxes.audit import Actor
from sandboxes.db import database_time


class TopUpForm(ReasonForm):
    """Amount of a top-up, and a note. The id makes a repeated submission of one dialog harmless."""

    field_order = ["amount", "reason"]
    amount = NormalizedDecimalField(
        min_value=MIN_BUDGET_AMOUNT,
        max_digits=18,
        decimal_places=6,
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
    )
    request_id = forms.UUIDField(widget=forms.HiddenInput, initial=uuid4)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].label = "Note"
        self.fields["reason"].help_text = f"Shown with the top-up. {REASON_HELP_TEXT}"
        raw = unquote(str(self.object_id or ""))
        budget = Budget.objects.filter(pk=raw).first() if raw.isascii() and raw.isdigit() and len(raw) < 19 else None
        if budget is not None:
            self.fields["amount"].label = f"Amount ({budget.unit_label})"
            self.fields["amount"].help_text = _describe_present_limit(budget, database_time.now())


def _describe_present_limit(budget: Budget, now: datetime) -> str:
    topped_up, ends = budgets.get_topped_up(budget, now), budgets.get_period_bounds(budget, now)[1]
    limit = f"{format_limit(budgets.get_limit(budget, now), budget)} {budget.unit_label}"
    limit += f", {format_limit(topped_up, budget)} of it topped up" if topped_up else ""
    return (
        f"The period has {limit}. It ends at {ends:%Y-%m-%d %H:%M} UTC." if ends else f"The budget has {limit}, and no reset."
    )


def _top_up(budget: Budget, actor: Actor, reason: str, now: datetime, *, amount: Decimal, request_id: UUID) -> bool:
    return budgets.top_up(budget.pk, amount, note=reason, actor=actor, request_id=request_id, now=now)[2]


TOP_UP_ACTION = AdminAction(
    title="Top up budget",
    warning="Adds an amount to the present period alone. Leases and model calls that fit are admitted at once. A top-up "
    "cannot be withdrawn.",
    done="topped up",
    refusal_reason="this form was submitted before, and its amount was added once",
    legal=lambda budget: budget.active,
    verb=_top_up,
    icon="add_card",
    permissions=("billing.change_budget",),
    creates=True,
    button="Top up",
    form=TopUpForm,
)
