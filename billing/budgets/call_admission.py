"""Admission of model calls: what a lease or a budget has spent at this moment, with the calls that no sweep has metered yet.

The sum is exact at each admission: usage records of metered calls, and the calls that are not metered, in one statement. An
open call counts with its reservation. A call that was metered and whose cost changed later counts with the difference."""

from datetime import date, datetime
from decimal import Decimal
from uuid import UUID

from billing.budgets import call_sums
from billing.budgets.call_sums import CALLS
from billing.budgets.disclosure import Disclosure, get_disclosure, restrict_refusal
from billing.budgets.model_patterns import is_model_match
from billing.budgets.periods import get_limit, get_period_bounds, split_period
from billing.budgets.refusal import Shortage, build_refusal
from billing.budgets.scopes import LEASE_BUDGET_SQL
from billing.dates import start_of_day, to_utc_date
from billing.errors import BudgetExhausted
from billing.models import Budget
from billing.models.budgets import Unit
from sandboxes.db import dialect, sql
from sandboxes.db.clock import format_optional_timestamp
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.spending import NO_LIMIT, CallReservation, Funds, build_not_priced_refusal, format_amount

HARD_USD_SQL = f"active AND hard AND unit = 'usd' AND {LEASE_BUDGET_SQL}"


def sum_lease_calls(holder: UUID) -> Decimal:
    """Return the cost of a lease's model calls: ended calls at their price, open ones at their reservation. In USD."""
    return call_sums.sum_lease(holder)


def sum_calls_before(budget: Budget, began: datetime, ends: datetime | None, *, day: date) -> Decimal:
    """Return the cost of a budget's model calls from the period's start to the day before `day`, in USD.

    Kept with the budget, so that an admission sums one day. Full days count their metered calls, a part of a day all calls. 0
    for an hour, which is in one day."""
    if budget.unit != Unit.USD:
        return Decimal(0)
    parts = split_period(began, ends)
    edges = (call_sums.sum_between(budget, *edge) for edge in parts.edges if edge[0].date() < day)
    until = min(day, parts.until) if parts.until else day
    metered = call_sums.sum_metered(budget, parts.first_day, until) if parts.first_day < until else Decimal(0)
    return metered + sum(edges, Decimal(0))


def check_call(call: CallReservation, now: datetime) -> Funds:
    """Check a model call against the hard USD budgets of its lease. Return what remains of them. Raise CallRefused.

    The budgets are locked until the transaction ends, so that concurrent calls count each other's reservation."""
    lock = f"ORDER BY id {dialect.row_lock()}"
    applicable = sql.find_all(Budget, f"{HARD_USD_SQL} {lock}", call.holder, to_utc_date(now))
    names = {call.model, _find_last_answer(call)} if any(budget.model for budget in applicable) else {call.model}
    hard_budgets = [budget for budget in applicable if any(is_model_match(budget.model, name) for name in names)]
    if not hard_budgets:
        return NO_LIMIT
    if call.usd is None:
        raise build_not_priced_refusal(call.model)
    spent = {budget: sum_spent_now(budget, now=now) for budget in hard_budgets}
    limits = {budget: get_limit(budget, now) for budget in hard_budgets}
    shortages = {
        budget: Shortage(spent[budget], f"and this call may cost {format_amount(call.usd)}")
        for budget in hard_budgets
        if spent[budget] >= limits[budget] or spent[budget] + budget.reserved + call.usd > limits[budget]
    }
    if shortages:
        raise _to_call_refusal(build_refusal(shortages, now=now), call.agent_did)
    known = [
        limits[budget] - spent[budget] - budget.reserved - call.usd
        for budget in hard_budgets
        if _get_disclosure(budget.scope, budget.subject, call.agent_did) == Disclosure.SPENDING
    ]
    return Funds(has_limit=True, remaining=min(known, default=None))


def _find_last_answer(call: CallReservation) -> str:
    """Return the model that answered the lease's last call with the same name, which may be an alias of the upstream's."""
    answered = "holder = %s AND requested_model = %s AND outcome NOT IN ('open', 'refused')"
    query = f"SELECT model FROM {CALLS} WHERE {answered} ORDER BY started_at DESC, id DESC LIMIT 1"  # noqa: S608 - no user input
    rows = sql.fetch_all(query, call.holder, call.model)
    return str(rows[0][0]) if rows else call.model


def _get_disclosure(scope: str, subject: str, agent_did: str) -> Disclosure:
    return get_disclosure(scope, subject, operator=False, dids=[agent_did], key_id="")


def _to_call_refusal(error: BudgetExhausted, agent_did: str) -> CallRefused:
    restricted = restrict_refusal(error, operator=False, dids=[agent_did], key_id="")
    resets_at = format_optional_timestamp(restricted.extra["resets_at"])
    return CallRefused(402, "budget_exhausted", str(restricted), **restricted.extra | {"resets_at": resets_at})


def sum_spent_now(budget: Budget, *, now: datetime) -> Decimal:
    """Return the USD that a budget has spent at this moment: sandboxes as of its last update, and all model calls."""
    began, ends = get_period_bounds(budget, now)
    is_current = budget.period_began == began
    others = budget.spent - budget.calls_spent if is_current else Decimal(0)
    since = budget.calls_day if is_current and budget.calls_day else began.date()
    before = budget.calls_before if is_current else Decimal(0)
    parts = split_period(began, ends)
    edges = (call_sums.sum_between(budget, *edge) for edge in parts.edges if edge[0].date() >= since)
    spent = others + before + sum(edges, Decimal(0))
    if not parts.has_days:
        return spent
    until = start_of_day(parts.until) if parts.until else None
    return spent + call_sums.sum_days(budget, max(since, parts.first_day), start_of_day(parts.first_day), until)
