"""Updates of budgets: spending, threshold marks and events, and changes by operators."""

from datetime import datetime

import structlog
from django.db import transaction

from billing import horizon
from billing.budgets.call_admission import sum_calls_before
from billing.budgets.call_blocks import update_call_blocks
from billing.budgets.periods import get_period_bounds
from billing.budgets.reservation import compute_reservation, is_over
from billing.budgets.spending import sum_spending
from billing.dates import to_utc_date
from billing.models import Budget
from billing.models.budgets import Period
from billing.pricing import format_decimal
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.lifecycle import checkpoint
from sandboxes.models.webhooks import EventType
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
OPERATOR_FIELDS = ["scope", "subject", "unit", "amount", "period", "hard", "warn_percent", "grace", "active"]
UPDATED_FIELDS = [
    "spent", "unpriced", "estimated_usd", "calls_spent", "calls_before", "calls_day", "reserved", "spent_at", "period_began",
    "warned_for", "exhausted_for", "exhausted_at",
]  # fmt: skip
GRACE_RESET_FIELDS = ["scope", "subject", "unit", "period", "hard", "active"]  # a change of one restarts the grace period


def update_spending(pk: int, *, now: datetime) -> list[str]:
    """Compute an active budget's spending in its current period and apply its thresholds.

    Return the changes among "warned", "exhausted" and "reopened". Safe to interrupt, repeat and run concurrently: each event
    is emitted once. While usage and costs are being rebuilt nothing is updated, because their sums are too low."""
    budget = Budget.objects.filter(pk=pk, active=True).first()
    if budget is None or horizon.is_rebuilding():
        return []
    began, ends = get_period_bounds(budget.period, now)
    spent = sum_spending(budget, began, ends)  # before the lock, because a grant would wait for the sum
    calls_before = sum_calls_before(budget, began, to_utc_date(now))
    checkpoint("budget summed", budget)
    unchanged = {field: getattr(budget, field) for field in ("scope", "subject", "unit", "period", "spent_at")}
    with transaction.atomic():
        # No row matches after an operator's change, or after a concurrent update, which may have summed newer costs. The next
        # pass updates the budget then.
        locked = Budget.objects.select_for_update(no_key=True).filter(pk=pk, active=True, **unchanged).first()
        changes = []
        if locked and not horizon.is_rebuilding():
            locked.spent, locked.calls_spent, locked.spent_at, locked.period_began = spent.total, spent.calls, now, began
            locked.unpriced, locked.estimated_usd = spent.uncertainty
            locked.calls_before, locked.calls_day = calls_before, to_utc_date(now)
            locked.reserved = compute_reservation(locked, now=now)
            changes = _apply_thresholds(locked, now=now)
        checkpoint("budget marked", budget)
    checkpoint("budget settled", budget)
    return changes


def _apply_thresholds(budget: Budget, *, now: datetime) -> list[str]:
    """Write the spending and the marks of a locked budget. Enqueue an event for each newly reached threshold.

    The warning compares the spending alone; the exhaustion includes the reservation."""
    changes = []
    spent, began = budget.spent, budget.period_began
    if spent * 100 < budget.amount * budget.warn_percent:
        budget.warned_for = None
    elif budget.warned_for != began:
        budget.warned_for = began
        _emit_event(budget, EventType.BUDGET_WARNING, now=now)
        changes.append("warned")
    if not is_over(budget, spent, budget.reserved):
        if budget.exhausted_at is not None:
            changes.append("reopened")
        budget.exhausted_for = budget.exhausted_at = None
    elif budget.exhausted_for != began:
        budget.exhausted_for, budget.exhausted_at = began, now
        _emit_event(budget, EventType.BUDGET_EXHAUSTED, now=now)
        changes.append("exhausted")
    budget.save(update_fields=UPDATED_FIELDS)
    return changes


def _emit_event(budget: Budget, event: EventType, *, now: datetime) -> None:
    """Enqueue an event at most once per period, amount, unit, scope and subject, even if spending falls and rises again."""
    began, ends = get_period_bounds(budget.period, now)
    payload = {
        "budget": budget.pk, "scope": budget.scope, "subject": budget.subject, "unit": budget.unit, "period": budget.period,
        "amount": format_decimal(budget.amount), "spent": format_decimal(budget.spent),
        "estimated_usd": format_decimal(budget.estimated_usd), "unpriced_calls": budget.unpriced,
        "warn_percent": budget.warn_percent,
        "hard": budget.hard, "period_began": format_timestamp(began), "resets_at": format_optional_timestamp(ends),
    }  # fmt: skip
    period_key = f"{began:%Y-%m-%dT%H}" if budget.period == Period.HOUR else f"{began:%Y-%m-%d}"
    outbox.enqueue_event(event, key=f"{budget.pk} {period_key} {budget}"[:255], payload=payload, now=now)
    log.info(event.value, budget=budget.pk, description=str(budget), spent=format_decimal(budget.spent), hard=budget.hard)


def save_budget(budget: Budget, *, now: datetime) -> None:
    """Create a budget or change the fields that operators set, and update its spending at once.

    Raise ValidationError with the name of an invalid field."""
    budget.full_clean()
    with transaction.atomic():
        if budget.pk is None:
            budget.created_at = now
            budget.save()
        else:
            unchanged = {field: getattr(budget, field) for field in GRACE_RESET_FIELDS}
            # Leases that were not subject to this budget before get a full grace period.
            Budget.objects.filter(pk=budget.pk).exclude(**unchanged).update(exhausted_for=None, exhausted_at=None)
            budget.save(update_fields=OPERATOR_FIELDS)
    update_spending(budget.pk, now=now)
    update_call_blocks(now=now)
    budget.refresh_from_db()


def remove_budget(pk: int, *, now: datetime) -> bool:
    """Delete a budget, and admit the model calls that only this budget refused. Return whether this call deleted it."""
    if not Budget.objects.filter(pk=pk).delete()[0]:
        return False
    update_call_blocks(now=now)
    return True


def set_active(pk: int, *, active: bool, now: datetime) -> bool:
    """Enable or disable a budget. Return whether this call changed it.

    An enabled budget's spending is updated at once. If it is exhausted, its grace period starts then."""
    cleared = {"exhausted_for": None, "exhausted_at": None}
    if not Budget.objects.filter(pk=pk, active=not active).update(active=active, **cleared):
        return False
    update_spending(pk, now=now)
    update_call_blocks(now=now)
    return True
