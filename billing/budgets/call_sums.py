"""Exact sums of model calls, in hand-written SQL: an admission takes one for each budget and for the spend limit.

Django takes about 5 ms to build one of these statements, the database a fraction of one to execute it
(tests/bench/calls.py). A sum is in USD or in tokens, by the measure of the budget (billing.call_measures).

The sum of the metered calls is kept with the budget until usage records of model calls change. Metering replaces each record
that it changes by a new one, so that the largest id identifies their state."""

from datetime import date, datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from billing.budgets.scopes import build_call_condition
from billing.call_measures import MEASURES, USD, CallMeasure
from billing.models import Budget, UsageRecord
from sandboxes.db import dialect, sql
from sandboxes.db.sql import ALWAYS, Statement
from sandboxes.models import LlmCall

USAGE, CALLS = UsageRecord._meta.db_table, LlmCall._meta.db_table
IS_MODEL_CALL = "kind = 'llm' AND outcome <> 'refused'"


class MeteredSum(NamedTuple):
    """Sum of metered calls, in parts of its measure, and the largest id of the usage records when it was summed."""

    parts: int
    mark: int


UNKNOWN = MeteredSum(0, -1)


def sum_lease(holder: UUID) -> Decimal:
    """Sum all model calls of a lease, in USD."""
    return _sum_all(USD, Statement("holder = %s", (holder,)), ALWAYS, ALWAYS, "llmcall_holder_uncounted")[0]


def sum_days(
    budget: Budget, first_day: date, began: datetime, ends: datetime | None, known: MeteredSum = UNKNOWN
) -> tuple[Decimal, MeteredSum]:
    """Sum a budget's model calls: the metered ones of `first_day` and later, and all unmetered ones since `began`.

    Return the sum, and the part that is metered. `known` is that part of an earlier sum of the same days."""
    last_day, until = (ALWAYS, ALWAYS) if ends is None else (_before("day", ends.date()), _before("started_at", ends))
    owned, days = build_call_condition(budget), _both(Statement("day >= %s", (first_day,)), last_day)
    return _sum_all(MEASURES[budget.unit], owned, days, _both(_since(began), until), "llmcall_uncounted", known)


def sum_between(budget: Budget, began: datetime, ends: datetime) -> Decimal:
    """Sum a budget's model calls that started between two times. Usage records have days only, so each call is read."""
    measure, period = MEASURES[budget.unit], _both(_since(began), _before("started_at", ends))
    return _fetch(measure, _build_sum_of_calls(measure, measure.owed_sql, build_call_condition(budget), period))


def sum_metered(budget: Budget, since: date, until: date) -> Decimal:
    """Sum a budget's metered model calls from day `since` up to but not including `until`."""
    measure, days = MEASURES[budget.unit], Statement("day >= %s AND day < %s", (since, until))
    return _fetch(measure, _build_sum_of_usage(measure, build_call_condition(budget), days))


def _sum_all(
    measure: CallMeasure, owned: Statement, days: Statement, period: Statement, index: str, known: MeteredSum = UNKNOWN
) -> tuple[Decimal, MeteredSum]:
    """Sum metered and unmetered calls that match `owned`. `days` selects usage records, and `period` calls, with `index`.

    One statement, because a metering pass that commits between two would be counted in neither or in both. A call that was
    metered, and whose cost or tokens changed later, counts with the difference."""
    owed = f"COALESCE({measure.owed_sql}, 0) - COALESCE({measure.metered}, 0)"
    unmetered = _build_sum_of_calls(measure, owed, owned, _both(Statement("NOT counted"), period), index)
    metered = _build_sum_of_usage(measure, owned, days)
    query = (
        f"SELECT mark, CASE WHEN mark = %s THEN %s ELSE ({metered.text}) END, ({unmetered.text}) "  # noqa: S608 - no user input
        f"FROM (SELECT COALESCE(MAX(id), 0) AS mark FROM {USAGE} WHERE item = 'tokens') AS newest"
    )
    [[mark, parts, open_parts]] = sql.fetch_all(query, known.mark, known.parts, *metered.values, *unmetered.values)
    return measure.to_amount(parts + open_parts), MeteredSum(int(parts), mark)


def _build_sum_of_usage(measure: CallMeasure, owned: Statement, days: Statement) -> Statement:
    where, total = _both(Statement("item = 'tokens'"), days, owned), measure.build_sum_sql(measure.usage_sql)
    return Statement(f"SELECT {total} FROM {USAGE} AS facts WHERE {where.text}", where.values)  # noqa: S608 - no user input


def _build_sum_of_calls(measure: CallMeasure, owed: str, owned: Statement, period: Statement, index: str = "") -> Statement:
    """Build the sum of `owed` over the calls of a period. Amounts out of range are left out, as in metering."""
    day, hint = dialect.utc_date("started_at"), dialect.force_index(index) if index else ""
    source = (
        f"SELECT holder, agent_did, model, {day} AS day, {owed} AS owed FROM {CALLS} {hint} "  # noqa: S608 - no user input
        f"WHERE {IS_MODEL_CALL} AND {period.text}"
    )
    text = f"SELECT {measure.build_sum_sql('owed')} FROM ({source}) AS facts WHERE owed < {measure.limit} AND {owned.text}"  # noqa: S608
    return Statement(text, (*period.values, *owned.values))


def _fetch(measure: CallMeasure, statement: Statement) -> Decimal:
    [[parts]] = sql.fetch_all(statement.text, *statement.values)
    return measure.to_amount(parts)


def _since(began: datetime) -> Statement:
    return Statement("started_at >= %s", (began,))


def _before(column: str, end: date) -> Statement:
    return Statement(f"{column} < %s", (end,))


def _both(*conditions: Statement) -> Statement:
    text = " AND ".join(each.text for each in conditions)
    return Statement(text, tuple(value for each in conditions for value in each.values))
