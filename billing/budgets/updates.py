"""Updates of budgets: spending, threshold marks and events, and changes by operators."""

from collections.abc import Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import structlog
from django.db import transaction

from billing import horizon
from billing.budgets import call_sums
from billing.budgets.call_blocks import update_call_blocks
from billing.budgets.periods import DAY, get_limit, get_period_bounds
from billing.budgets.reservation import compute_reservation, is_over
from billing.budgets.spending import sum_spending
from billing.dates import to_utc_date
from billing.errors import BudgetNotFound
from billing.models import Budget
from billing.models.budgets import Unit
from billing.pricing import format_decimal
from sandboxes import audit
from sandboxes.db import sql
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.lifecycle import checkpoint
from sandboxes.models.webhooks import EventType
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
UPDATED_FIELDS = [
    "spent", "unpriced", "estimated_usd", "estimated_tokens", "calls_spent", "calls_before", "calls_day",
    "calls_metered_mark", "reserved",
    "spent_at", "period_began", "warned_for", "warned_percent", "exhausted_for", "exhausted_at",
]  # fmt: skip
SUMMED_FIELDS = ["scope", "subject", "model", "unit", "period", "time_zone"]  # a change of one changes the sum
GRACE_RESET_FIELDS = [*SUMMED_FIELDS, "hard", "active"]  # a change of one restarts the grace period


def update_spending(pk: int, *, now: datetime) -> list[str]:
    """Compute an active budget's spending in its current period and apply its thresholds.

    Return the changes among "warned", "exhausted" and "reopened". Safe to interrupt, repeat and run concurrently: each event
    is emitted once. While usage and costs are being rebuilt nothing is updated, because their sums are too low."""
    budget = Budget.objects.filter(pk=pk, active=True).first()
    if budget is None or horizon.is_rebuilding():
        return []
    began, ends = get_period_bounds(budget, now)
    spent = sum_spending(budget, began, ends)  # before the lock, because a grant would wait for the sum
    calls_day = to_utc_date(now) - DAY  # calls of yesterday are metered today
    calls_before = _sum_calls_before(budget, began, ends, calls_day)
    checkpoint("budget summed", budget)
    unchanged = {field: getattr(budget, field) for field in (*SUMMED_FIELDS, "spent_at")}
    with transaction.atomic():
        # No row matches after an operator's change, or after a concurrent update, which may have summed newer costs. The next
        # pass updates the budget then.
        locked = Budget.objects.select_for_update(no_key=True).filter(pk=pk, active=True, **unchanged).first()
        changes = []
        if locked and not horizon.is_rebuilding():
            locked.spent, locked.calls_spent, locked.spent_at, locked.period_began = spent.total, spent.calls, now, began
            locked.unpriced, locked.estimated_usd, locked.estimated_tokens = spent.uncertainty
            locked.calls_before, locked.calls_day, locked.calls_metered_mark = calls_before, calls_day, None
            locked.reserved = compute_reservation(locked, now=now)
            changes = _apply_thresholds(locked, now=now)
        checkpoint("budget marked", budget)
    checkpoint("budget settled", budget)
    return changes


def _sum_calls_before(budget: Budget, began: datetime, ends: datetime | None, day: date) -> Decimal:
    """Return the cost or the tokens of a budget's metered model calls from the period's start to the day before `day`.

    Kept with the budget, so that an admission sums the calls of two days (billing.budgets.call_admission)."""
    return Decimal(0) if budget.unit == Unit.HOURS else call_sums.sum_metered_before(budget, began, ends, day)


def _apply_thresholds(budget: Budget, *, now: datetime) -> list[str]:
    """Write the spending and the marks of a locked budget. Enqueue an event for each newly reached threshold.

    The warnings compare the spending alone; the exhaustion includes the reservation. If the spending jumps over several
    warnings, only the highest is sent."""
    changes = []
    spent, began, limit = budget.spent, budget.period_began, get_limit(budget, now)
    reached = max((percent for percent in budget.warn_percents if spent * 100 >= limit * percent), default=None)
    sent = budget.warned_percent if budget.warned_for == began else None
    budget.warned_for, budget.warned_percent = began if reached else None, reached
    if reached and reached > (sent or 0):
        _emit_event(budget, EventType.BUDGET_WARNING, reached, now=now)
        changes.append("warned")
    if not is_over(budget, spent, budget.reserved, now=now):
        if budget.exhausted_at is not None:
            changes.append("reopened")
        budget.exhausted_for = budget.exhausted_at = None
    elif budget.exhausted_for != began:
        budget.exhausted_for, budget.exhausted_at = began, now
        _emit_event(budget, EventType.BUDGET_EXHAUSTED, 100, now=now)
        changes.append("exhausted")
    budget.save(update_fields=UPDATED_FIELDS)
    return changes


def _emit_event(budget: Budget, event: EventType, percent: int, *, now: datetime) -> None:
    """Enqueue an event at most once per period, percentage, amount with top-ups, unit, scope and subject.

    That holds even if the spending falls and rises again."""
    (began, ends), limit = get_period_bounds(budget, now), get_limit(budget, now)
    payload = {
        "budget": budget.pk, "scope": budget.scope, "subject": budget.subject, "model": budget.model, "unit": budget.unit,
        "period": budget.period, "time_zone": budget.time_zone, "amount": format_decimal(budget.amount),
        "topped_up": format_decimal(limit - budget.amount), "spent": format_decimal(budget.spent),
        "remaining": format_decimal(max(limit - budget.spent, Decimal(0))), "percent": percent,
        "estimated_usd": format_decimal(budget.estimated_usd), "estimated_tokens": budget.estimated_tokens,
        "unpriced_calls": budget.unpriced, "hard": budget.hard,
        "period_began": format_timestamp(began), "resets_at": format_optional_timestamp(ends),
    }  # fmt: skip
    key = f"{budget.pk} {began:%Y-%m-%dT%H} {percent} {format_decimal(limit)} {budget}"
    outbox.enqueue_event(event, key=key[:255], payload=payload, now=now)
    log.info(
        event.value, budget=budget.pk, description=str(budget), percent=percent, spent=format_decimal(budget.spent),
        hard=budget.hard,
    )  # fmt: skip


def create_budget(
    budget: Budget, *, request_id: UUID | None = None, actor: audit.Actor = audit.CONTROL_PLANE, now: datetime
) -> tuple[Budget, bool]:
    """Create a budget, once for a request, and update its spending at once. Return it, and whether this call created it.

    Raise ValidationError with the name of an invalid field."""
    budget.request_id = request_id
    with transaction.atomic():
        present = _lock_created(request_id) if request_id else None
        if present is None:
            budget.full_clean()
            budget.created_at = now
            budget.save(force_insert=True)
            audit.record(budget, "Create budget", actor=actor, now=now)
    created = present or budget
    refresh(created, now=now)
    return created, present is None


def _lock_created(request_id: UUID) -> Budget | None:
    """Return the budget that this request has created. A concurrent repetition of the request waits until the commit."""
    sql.lock_key(f"budget request {request_id}")
    return Budget.objects.filter(request_id=request_id).first()


def change_budget(pk: int, changes: Mapping[str, Any], *, actor: audit.Actor = audit.CONTROL_PLANE, now: datetime) -> Budget:
    """Change the stated fields of the current row, and update its spending at once. Concurrent changes of others are kept.

    Raise BudgetNotFound, or ValidationError with the name of an invalid field."""
    with transaction.atomic():
        budget = Budget.objects.select_for_update(no_key=True).filter(pk=pk).first()
        if budget is None:
            raise BudgetNotFound
        before = {field: getattr(budget, field) for field in changes}
        for field, value in changes.items():
            setattr(budget, field, value)
        budget.full_clean()
        _write_changes(budget, changes)
        if detail := audit.describe_changes(before, budget):
            audit.record(budget, "Change budget", detail, actor=actor, now=now)
        checkpoint("budget changed", budget)
    refresh(budget, now=now)
    return budget


def _write_changes(budget: Budget, fields: Iterable[str]) -> None:
    unchanged = {field: getattr(budget, field) for field in GRACE_RESET_FIELDS}
    # Leases that were not subject to this budget before get a full grace period.
    changed = Budget.objects.filter(pk=budget.pk).exclude(**unchanged)
    changed.update(exhausted_for=None, exhausted_at=None, calls_metered_mark=None)
    budget.save(update_fields=fields)


def refresh(budget: Budget, *, now: datetime) -> None:
    """Update the spending, and admit or refuse model calls, after a change. If interrupted, the next sweep does so."""
    update_spending(budget.pk, now=now)
    update_call_blocks(now=now)
    budget.refresh_from_db()


def remove_budget(pk: int, *, actor: audit.Actor, now: datetime) -> bool:
    """Delete a budget, and admit the model calls that only this budget refused. Return whether this call deleted it."""
    with transaction.atomic():
        budget = Budget.objects.select_for_update().filter(pk=pk).first()
        if budget is None:
            return False
        Budget.objects.filter(pk=pk).delete()
        audit.record(budget, "Delete budget", actor=actor, now=now)
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
