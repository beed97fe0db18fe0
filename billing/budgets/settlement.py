"""Budget settlement"""

from datetime import datetime
from decimal import Decimal

import structlog
from django.db import transaction

from billing import derivation
from billing.budgets.periods import get_period_bounds
from billing.budgets.spending import sum_spending
from billing.models import Budget
from billing.pricing import format_decimal
from sandboxes.db.clock import format_timestamp
from sandboxes.lifecycle import checkpoint
from sandboxes.models.webhooks import EventType
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
GRACE_RESET_FIELDS = ["scope", "subject", "unit", "period", "hard", "active"]  # of these, what decides when its grace began
OPERATOR_FIELDS = ["scope", "subject", "unit", "amount", "period", "hard", "warn_percent", "grace", "active"]  # by operators


def update_spending(pk: int, *, now: datetime) -> list[str]:
    """Work out what an active budget has spent in its present period, and what follows from that: "warned of", "spent",
    "open again". It may stop anywhere, and run twice, or beside itself: an event is said once.

    While usage and costs are derived anew their sums say too little: what is known to be spent stays until they are there."""
    budget = Budget.objects.filter(pk=pk, active=True).first()
    if budget is None or derivation.is_rebuilding():
        return []
    began, ends = get_period_bounds(budget.period, now)
    spent = sum_spending(budget, began, ends)  # before its lock: a grant waits for that
    checkpoint("budget summed", budget)
    same = {field: getattr(budget, field) for field in ("scope", "subject", "unit", "period", "spent_at")}
    with transaction.atomic():
        locked = Budget.objects.select_for_update(no_key=True).filter(pk=pk, active=True, **same).first()
        # Changed meanwhile, or worked out by somebody else, who may know of more: the next pass has it.
        said = _apply_thresholds(locked, spent, began, now=now) if locked and not derivation.is_rebuilding() else []
        checkpoint("budget marked", budget)
    checkpoint("budget settled", budget)
    return said


def _apply_thresholds(budget: Budget, spent: Decimal, began: datetime, *, now: datetime) -> list[str]:
    """Write what is spent, and an event where that has come to a mark: once in a period, unless the amount is changed."""
    said = []
    budget.spent, budget.spent_at, budget.period_began = spent, now, began
    if spent * 100 < budget.amount * budget.warn_percent:
        budget.warned_for = None
    elif budget.warned_for != began:
        budget.warned_for = began
        _emit_event(budget, EventType.BUDGET_WARNING, now=now)
        said.append("warned of")
    if spent < budget.amount:
        if budget.exhausted_at is not None:
            said.append("open again")
        budget.exhausted_for = budget.exhausted_at = None
    elif budget.exhausted_for != began:
        budget.exhausted_for, budget.exhausted_at = began, now
        _emit_event(budget, EventType.BUDGET_EXHAUSTED, now=now)
        said.append("spent")
    budget.save(update_fields=["spent", "spent_at", "period_began", "warned_for", "exhausted_for", "exhausted_at"])
    return said


def _emit_event(budget: Budget, event: EventType, *, now: datetime) -> None:
    """Once for each period, amount and whom it is for, whatever becomes of what is spent in between."""
    began, ends = get_period_bounds(budget.period, now)
    payload = {
        "budget": budget.pk, "scope": budget.scope, "subject": budget.subject, "unit": budget.unit, "period": budget.period,
        "amount": format_decimal(budget.amount), "spent": format_decimal(budget.spent), "warn_percent": budget.warn_percent,
        "hard": budget.hard, "period_began": format_timestamp(began), "resets_at": format_timestamp(ends) if ends else None,
    }  # fmt: skip
    outbox.enqueue_event(event, key=f"{budget.pk} {began:%Y-%m-%d} {budget}"[:255], payload=payload, now=now)
    log.info(event.value, budget=budget.pk, what=str(budget), spent=format_decimal(budget.spent), hard=budget.hard)


def save_budget(budget: Budget, *, now: datetime) -> None:
    """State a budget, or state it anew, and work out at once what that means. ValidationError names the field."""
    budget.full_clean()
    with transaction.atomic():
        if budget.pk is None:
            budget.created_at = now
            budget.save()
        else:
            same = {field: getattr(budget, field) for field in GRACE_RESET_FIELDS}
            # It was spent for others, or ended nothing yet: whom it is for from now on has all of its grace.
            Budget.objects.filter(pk=budget.pk).exclude(**same).update(exhausted_for=None, exhausted_at=None)
            budget.save(update_fields=OPERATOR_FIELDS)
    update_spending(budget.pk, now=now)
    budget.refresh_from_db()


def set_active(pk: int, *, active: bool, now: datetime) -> bool:
    """Turn a budget on or off; whether this call did. What it has spent is worked out as soon as it is on, and its grace
    begins then."""
    anew = {"exhausted_for": None, "exhausted_at": None}
    if not Budget.objects.filter(pk=pk, active=not active).update(active=active, **anew):
        return False
    update_spending(pk, now=now)
    return True
