"""Exact sums of model calls, in hand-written SQL: an admission takes one for each budget and each limit of the lease.

Django takes about 5 ms to build one of these statements, the database a fraction of one to execute it
(tests/bench/calls.py). A sum is in USD or in tokens, by the measure of the budget or limit (billing.call_measures).

The sum of the metered calls is kept with the budget until usage records of model calls change. Metering replaces each record
that it changes by a new one, so that the largest id identifies their state."""

from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from billing.budgets.periods import PeriodParts, split_period
from billing.budgets.scopes import build_call_condition
from billing.call_measures import MEASURES, USD, CallMeasure
from billing.models import Budget, UsageRecord
from sandboxes.db import dialect, sql
from sandboxes.db.sql import ALWAYS, Statement
from sandboxes.models import LlmCall

USAGE, CALLS = UsageRecord._meta.db_table, LlmCall._meta.db_table
IS_MODEL_CALL = "kind = 'llm' AND outcome <> 'refused'"
UNMETERED = Statement("NOT counted")


class MeteredSum(NamedTuple):
    """Sum of metered calls, in parts of its measure, and the largest id of the usage records when it was summed."""

    parts: int
    mark: int


UNKNOWN = MeteredSum(0, -1)


def sum_lease(holder: UUID, measure: CallMeasure = USD) -> Decimal:
    """Sum all model calls of a lease."""
    owned = Statement("holder = %s", (holder,))
    unmetered = _build_unmetered_sum(measure, _both(UNMETERED, owned), ALWAYS, "llmcall_holder_uncounted")
    return _add_unmetered(measure, [_build_sum_of_usage(measure, owned, ALWAYS)], unmetered)[0]


def sum_period(
    budget: Budget, since: date, began: datetime, ends: datetime | None, known: MeteredSum = UNKNOWN
) -> tuple[Decimal, MeteredSum]:
    """Sum a budget's model calls of a period: the metered ones of the day `since` and later, and all unmetered ones.

    Return the sum, and the part that is metered. `known` is that part of an earlier sum with the same arguments."""
    measure, owned = MEASURES[budget.unit], build_call_condition(budget)
    metered = _build_metered_sums(measure, owned, split_period(began, ends), since)
    until = ALWAYS if ends is None else _before("started_at", ends)
    unmetered = _build_unmetered_sum(measure, UNMETERED, _both(_since(began), until, owned), "llmcall_uncounted")
    return _add_unmetered(measure, metered, unmetered, known)


def sum_metered_before(budget: Budget, began: datetime, ends: datetime | None, day: date) -> Decimal:
    """Sum a budget's metered model calls from the start of a period to the day before `day`."""
    measure, owned = MEASURES[budget.unit], build_call_condition(budget)
    total = _add(_build_metered_sums(measure, owned, split_period(began, ends), began.date(), day))
    [[parts]] = sql.fetch_all(f"SELECT {total.text}", *total.values)
    return measure.to_amount(parts)


def _add_unmetered(
    measure: CallMeasure, metered_sums: Sequence[Statement], unmetered: Statement, known: MeteredSum = UNKNOWN
) -> tuple[Decimal, MeteredSum]:
    """Add sums of metered calls and the sum of unmetered ones. Return the total, and the part that is metered.

    One statement, because a metering pass that commits between two would be counted in neither or in both."""
    metered = _add(metered_sums)
    query = (
        f"SELECT mark, CASE WHEN mark = %s THEN %s ELSE {metered.text} END, ({unmetered.text}) "  # noqa: S608 - no user input
        f"FROM (SELECT COALESCE(MAX(id), 0) AS mark FROM {USAGE} WHERE item = 'tokens') AS newest"
    )
    [[mark, parts, open_parts]] = sql.fetch_all(query, known.mark, known.parts, *metered.values, *unmetered.values)
    return measure.to_amount(parts + open_parts), MeteredSum(int(parts), mark)


def _build_metered_sums(
    measure: CallMeasure, owned: Statement, period: PeriodParts, since: date, until: date | None = None
) -> list[Statement]:
    """Build the sums of the metered calls of a period, from the day `since` on, and before the day `until`.

    Full days are read from usage records. These have no hours: for the parts of days at the edges each call is read."""
    first, last = max(since, period.first_day), min((day for day in (until, period.until) if day), default=None)
    sums = []
    if last is None or first < last:
        days = _both(Statement("day >= %s", (first,)), ALWAYS if last is None else _before("day", last))
        sums.append(_build_sum_of_usage(measure, owned, days))
    # A version before this one has left the column of the metered tokens empty.
    metered = f"COALESCE({measure.metered}, CASE WHEN counted THEN {measure.owed_sql} END, 0)"
    for began, ends in period.edges:
        if since <= began.date() and (until is None or began.date() < until):
            sums.append(_build_sum_of_calls(measure, metered, _both(_since(began), _before("started_at", ends)), owned))
    return sums


def _build_sum_of_usage(measure: CallMeasure, owned: Statement, days: Statement) -> Statement:
    where, total = _both(Statement("item = 'tokens'"), days, owned), measure.build_sum_sql(measure.usage_sql)
    return Statement(f"SELECT {total} FROM {USAGE} AS facts WHERE {where.text}", where.values)  # noqa: S608 - no user input


def _build_unmetered_sum(measure: CallMeasure, selected: Statement, owned: Statement, index: str) -> Statement:
    """Build the sum of the unmetered calls that match both conditions. The `selected` ones are read by `index`.

    A call that was metered, and whose cost or tokens changed later, counts with the difference."""
    owed = f"COALESCE({measure.owed_sql}, 0) - COALESCE({measure.metered}, 0)"
    return _build_sum_of_calls(measure, owed, selected, owned, index)


def _build_sum_of_calls(measure: CallMeasure, owed: str, selected: Statement, owned: Statement, index: str = "") -> Statement:
    """Build the sum of `owed` over the calls that match both conditions. Amounts out of range are left out, as in metering.

    With `index` only the `selected` calls are read, and the others of a period or an owner are not."""
    day = dialect.utc_date("started_at")
    hint, fence = (dialect.force_index(index), dialect.fence()) if index else ("", "")
    source = (
        f"SELECT holder, agent_did, model, kind, outcome, started_at, {day} AS day, {owed} AS owed "  # noqa: S608 - no user input
        f"FROM {CALLS} {hint} WHERE {selected.text} {fence}"
    )
    condition = f"{IS_MODEL_CALL} AND owed < {measure.limit} AND {owned.text}"
    text = f"SELECT {measure.build_sum_sql('owed')} FROM ({source}) AS facts WHERE {condition}"  # noqa: S608 - no user input
    return Statement(text, (*selected.values, *owned.values))


def _add(sums: Sequence[Statement]) -> Statement:
    return Statement(
        " + ".join(f"({each.text})" for each in sums) or "0", tuple(value for each in sums for value in each.values)
    )


def _since(began: datetime) -> Statement:
    return Statement("started_at >= %s", (began,))


def _before(column: str, end: date) -> Statement:
    return Statement(f"{column} < %s", (end,))


def _both(*conditions: Statement) -> Statement:
    text = " AND ".join(each.text for each in conditions)
    return Statement(text, tuple(value for each in conditions for value in each.values))
