"""Admission of model calls: what a lease or a budget has spent at this moment, with the calls that no sweep has metered yet.

The sum is exact at each admission: usage records of metered calls, and the calls that are not metered, in one statement. An
open call counts with its reservation. A call that was metered and whose cost changed later counts with the difference. The sum
of the metered calls is kept with the budget: `update_spending`, a change of the budget and a change of an account's members
delete it, and a change of the usage records makes it invalid (billing.budgets.call_sums)."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

from billing.budgets import call_sums
from billing.budgets.call_sums import CALLS, UNKNOWN, MeteredSum
from billing.budgets.disclosure import Disclosure, get_disclosure, restrict_refusal
from billing.budgets.model_patterns import is_model_match
from billing.budgets.periods import get_limit, get_period_bounds
from billing.budgets.refusal import Shortage, build_refusal
from billing.budgets.scopes import LEASE_BUDGET_SQL
from billing.call_measures import MEASURES
from billing.dates import to_utc_date
from billing.errors import BudgetExhausted
from billing.models import Budget
from billing.models.budgets import Unit
from sandboxes.db import dialect, sql
from sandboxes.db.clock import format_optional_timestamp
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.spending import NO_LIMIT, CallReservation, CallUnit, Funds, build_not_priced_refusal, format_amount

# Hard budgets of a lease that count model calls. Parameters: whether those in USD apply, and those in tokens; then those of
# LEASE_BUDGET_SQL.
HARD_SQL = f"active AND hard AND (unit = 'usd' AND %s OR unit = 'tokens' AND %s) AND {LEASE_BUDGET_SQL}"
EXPLANATIONS = {Unit.USD.value: "and this call may cost {}", Unit.TOKENS.value: "and this call may use {}"}


def sum_lease_calls(holder: UUID, unit: CallUnit = "usd") -> Decimal:
    """Return the cost or the tokens of a lease's model calls: ended calls as settled, open ones at their reservation."""
    return call_sums.sum_lease(holder, MEASURES[unit])


def check_call(call: CallReservation, now: datetime) -> Funds:
    """Check a model call against the hard budgets of its lease in USD and tokens. Return what remains. Raise CallRefused.

    The budgets are locked until the transaction ends, so that concurrent calls count each other's reservation."""
    hard_budgets = _lock_budgets(call, now)
    if not hard_budgets:
        return NO_LIMIT
    if call.usd is None and any(budget.unit == Unit.USD for budget in hard_budgets):
        raise build_not_priced_refusal(call.model)
    needed = {Unit.USD.value: call.usd or Decimal(0), Unit.TOKENS.value: Decimal(call.tokens)}
    spent = {budget: sum_spent_now(budget, now=now, locked=True) for budget in hard_budgets}
    rest = {budget: get_limit(budget, now) - spent[budget] - budget.reserved - needed[budget.unit] for budget in hard_budgets}
    shortages = {
        budget: Shortage(spent[budget], EXPLANATIONS[budget.unit].format(format_amount(needed[budget.unit])))
        for budget in hard_budgets
        if rest[budget] < 0 or spent[budget] >= get_limit(budget, now)
    }
    if shortages:
        raise _to_call_refusal(build_refusal(shortages, now=now), call.agent_did)
    known = [budget for budget in hard_budgets if _is_spending_known(budget, call.agent_did)]
    in_usd, in_tokens = (
        min((rest[budget] for budget in known if budget.unit == unit), default=None) for unit in (Unit.USD, Unit.TOKENS)
    )
    return Funds(has_limit=True, remaining_usd=in_usd, remaining_tokens=in_tokens)


def _lock_budgets(call: CallReservation, now: datetime) -> list[Budget]:
    """Lock the hard budgets that count a call. A call that is free of charge is not counted by those in USD."""
    condition = f"{HARD_SQL} ORDER BY id {dialect.row_lock()}"
    applicable = sql.find_all(Budget, condition, call.usd != 0, call.tokens != 0, call.holder, to_utc_date(now))
    names = {call.model, _find_last_answer(call)} if any(budget.model for budget in applicable) else {call.model}
    return [budget for budget in applicable if any(is_model_match(budget.model, name) for name in names)]


def _find_last_answer(call: CallReservation) -> str:
    """Return the model that answered the lease's last call with the same name, which may be an alias of the upstream's."""
    answered = "holder = %s AND requested_model = %s AND outcome NOT IN ('open', 'refused')"
    query = f"SELECT model FROM {CALLS} WHERE {answered} ORDER BY started_at DESC, id DESC LIMIT 1"  # noqa: S608 - no user input
    rows = sql.fetch_all(query, call.holder, call.model)
    return str(rows[0][0]) if rows else call.model


def _is_spending_known(budget: Budget, agent_did: str) -> bool:
    """Return whether the agent may know what the budget has spent."""
    disclosure = get_disclosure(budget.scope, budget.subject, operator=False, dids=[agent_did], key_id="")
    return disclosure == Disclosure.SPENDING


def _to_call_refusal(error: BudgetExhausted, agent_did: str) -> CallRefused:
    restricted = restrict_refusal(error, operator=False, dids=[agent_did], key_id="")
    resets_at = format_optional_timestamp(restricted.extra["resets_at"])
    return CallRefused(402, "budget_exhausted", str(restricted), **restricted.extra | {"resets_at": resets_at})


def sum_spent_now(budget: Budget, *, now: datetime, locked: bool = False) -> Decimal:
    """Return what a budget has spent at this moment: sandboxes as of its last update, and all model calls.

    With a locked budget, the sum of the metered calls is kept for the next admissions."""
    began, ends = get_period_bounds(budget, now)
    is_current = budget.period_began == began
    is_kept = is_current and budget.calls_day is not None and budget.calls_metered_mark is not None
    others = budget.spent - budget.calls_spent if is_current else Decimal(0)
    since = budget.calls_day if is_current and budget.calls_day else began.date()
    known = MeteredSum(budget.calls_metered, budget.calls_metered_mark or 0) if is_kept else UNKNOWN
    calls, metered = call_sums.sum_period(budget, since, began, ends, known)
    if locked and is_current and budget.calls_day and metered != known:
        sql.update(Budget, "calls_metered = %s, calls_metered_mark = %s WHERE id = %s", *metered, budget.pk)
    return others + (budget.calls_before if is_current else Decimal(0)) + calls
