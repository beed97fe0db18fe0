"""Exact sums of model calls, in hand-written SQL: an admission takes one for each budget and for the spend limit.

Django takes about 5 ms to build one of these statements, the database a fraction of one to execute it
(tests/bench/calls.py). A sum is in USD or in tokens, by the measure of the budget (billing.call_measures)."""

from datetime import date, datetime
from decimal import Decimal
from uuid import UUID

from billing.budgets.scopes import build_call_condition
from billing.call_measures import MEASURES, USD, CallMeasure
from billing.models import Budget, UsageRecord
from sandboxes.db import dialect, sql
from sandboxes.db.sql import ALWAYS, Statement
from sandboxes.models import LlmCall

USAGE, CALLS = UsageRecord._meta.db_table, LlmCall._meta.db_table
IS_MODEL_CALL = "kind = 'llm' AND outcome <> 'refused'"


def sum_lease(holder: UUID) -> Decimal:
    """Sum all model calls of a lease, in USD."""
    return _sum_all(USD, Statement("holder = %s", (holder,)), ALWAYS, ALWAYS)


def sum_days(budget: Budget, first_day: date, began: datetime, ends: datetime | None) -> Decimal:
    """Sum a budget's model calls: the metered ones of `first_day` and later, and all unmetered ones since `began`."""
    last_day, until = (ALWAYS, ALWAYS) if ends is None else (_before("day", ends.date()), _before("started_at", ends))
    owned = build_call_condition(budget)
    return _sum_all(
        MEASURES[budget.unit], owned, _both(Statement("day >= %s", (first_day,)), last_day), _both(_since(began), until)
    )


def sum_between(budget: Budget, began: datetime, ends: datetime) -> Decimal:
    """Sum a budget's model calls that started between two times. Usage records have days only, so each call is read."""
    measure, period = MEASURES[budget.unit], _both(_since(began), _before("started_at", ends))
    return _fetch(measure, _build_sum_of_calls(measure, measure.owed_sql, build_call_condition(budget), period))


def sum_metered(budget: Budget, since: date, until: date) -> Decimal:
    """Sum a budget's metered model calls from day `since` up to but not including `until`."""
    measure, days = MEASURES[budget.unit], Statement("day >= %s AND day < %s", (since, until))
    return _fetch(measure, _build_sum_of_usage(measure, build_call_condition(budget), days))


def _sum_all(measure: CallMeasure, owned: Statement, days: Statement, period: Statement) -> Decimal:
    """Sum metered and unmetered calls that match `owned`. `days` selects usage records, and `period` calls.

    One statement, because a metering pass that commits between two would be counted in neither or in both. A call that was
    metered, and whose cost or tokens changed later, counts with the difference."""
    owed = f"COALESCE({measure.owed_sql}, 0) - COALESCE({measure.metered}, 0)"
    unmetered = _build_sum_of_calls(measure, owed, owned, _both(Statement("NOT counted"), period))
    return _fetch(measure, _build_sum_of_usage(measure, owned, days), unmetered)


def _build_sum_of_usage(measure: CallMeasure, owned: Statement, days: Statement) -> Statement:
    where, total = _both(Statement("item = 'tokens'"), days, owned), measure.build_sum_sql(measure.usage_sql)
    return Statement(f"SELECT {total} FROM {USAGE} AS facts WHERE {where.text}", where.values)  # noqa: S608 - no user input


def _build_sum_of_calls(measure: CallMeasure, owed: str, owned: Statement, period: Statement) -> Statement:
    """Build the sum of `owed` over the calls of a period. Amounts out of range are left out, as in metering."""
    day = dialect.utc_date("started_at")
    source = (
        f"SELECT holder, agent_did, model, {day} AS day, {owed} AS owed FROM {CALLS} WHERE {IS_MODEL_CALL} AND {period.text}"  # noqa: S608
    )
    text = f"SELECT {measure.build_sum_sql('owed')} FROM ({source}) AS facts WHERE owed < {measure.limit} AND {owned.text}"  # noqa: S608
    return Statement(text, (*period.values, *owned.values))


def _fetch(measure: CallMeasure, *sums: Statement) -> Decimal:
    terms = " + ".join(f"({each.text})" for each in sums)
    [[parts]] = sql.fetch_all(f"SELECT {terms}", *(value for each in sums for value in each.values))
    return measure.to_amount(parts)


def _since(began: datetime) -> Statement:
    return Statement("started_at >= %s", (began,))


def _before(column: str, end: date) -> Statement:
    return Statement(f"{column} < %s", (end,))


def _both(*conditions: Statement) -> Statement:
    text = " AND ".join(each.text for each in conditions)
    return Statement(text, tuple(value for each in conditions for value in each.values))
