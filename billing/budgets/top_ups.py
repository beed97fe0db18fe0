"""Top-ups of budgets: amounts that operators add to the current period."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID, uuid4

import structlog
from django.core.exceptions import ValidationError
from django.db import transaction

from billing.budgets.periods import get_period_bounds, get_topped_up
from billing.budgets.updates import refresh
from billing.errors import BudgetNotFound
from billing.models import Budget, BudgetTopUp
from billing.pricing import format_decimal
from sandboxes import audit
from sandboxes.lifecycle import checkpoint

log = structlog.get_logger(__name__)
MAX_TOPPED_UP = Decimal(10**12)  # of the column


def top_up(
    pk: int, amount: Decimal, *, note: str = "", actor: audit.Actor, request_id: UUID | None = None, now: datetime
) -> tuple[Budget, BudgetTopUp, bool]:
    """Add an amount to the current period of a budget, once for a request. It expires with the period.

    Return the budget, the row, and whether this call added the row. Admission counts the amount at once. Raise BudgetNotFound,
    or ValidationError with the name of an invalid field."""
    with transaction.atomic():
        budget = Budget.objects.select_for_update(no_key=True).filter(pk=pk).first()
        if budget is None:
            raise BudgetNotFound
        present = BudgetTopUp.objects.filter(pk=request_id).first() if request_id else None
        row = present or _add_top_up(budget, amount, note=note, actor=actor, request_id=request_id, now=now)
        checkpoint("budget topped up", budget)
    refresh(budget, now=now)
    return budget, row, present is None


def _add_top_up(
    budget: Budget, amount: Decimal, *, note: str, actor: audit.Actor, request_id: UUID | None, now: datetime
) -> BudgetTopUp:
    """Record a top-up of a locked budget, and add it to the sum of the period."""
    began = get_period_bounds(budget, now)[0]
    row = BudgetTopUp(
        id=request_id or uuid4(), budget=budget, period_began=began, amount=amount, note=note, actor=actor, created_at=now
    )
    row.clean_fields()
    row.clean()
    budget.topped_up, budget.topped_up_for = get_topped_up(budget, now) + amount, began
    if budget.topped_up >= MAX_TOPPED_UP:
        raise ValidationError({"amount": "The top-ups of a period must be less than 1,000,000,000,000."})
    row.save(force_insert=True)
    budget.save(update_fields=["topped_up", "topped_up_for"])
    detail = ", ".join(filter(None, [f"{format_decimal(amount)} {budget.unit_label}", note]))
    audit.record(budget, "Top up budget", detail, actor=actor, now=now)
    log.info("budget topped up", budget=budget.pk, amount=format_decimal(amount), actor=actor, note=note)
    return row
