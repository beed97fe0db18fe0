"""Derivation of the totals of model calls by model: UsageRecord -> ModelTotal.

Part of the derivation of the period totals, in the same transaction and under the same lock (billing.period_totals)."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from typing import NamedTuple
from uuid import UUID

from billing.model_usage import NO_USAGE, ModelUsage, iter_model_usage
from billing.models import ModelTotal
from billing.totals import build_account_lookup

Period = ModelTotal.Period
SQL_BATCH_SIZE = 500  # rows per statement; SQLite limits the number of values


class ModelKey(NamedTuple):
    """Unique key of a total."""

    period: str
    day: date
    account: int
    provider: str
    model: str
    agent_did: str
    environment_id: str = ""
    holder: UUID | None = None


Sums = dict[ModelKey, ModelUsage]
Stored = dict[ModelKey, tuple[int, ModelUsage]]  # with the ids of the rows


def update_model_totals(days: Collection[date]) -> None:
    """Derive the totals of days of one month from the usage, and those of the month from the difference."""
    account_on = build_account_lookup()
    by_agent: Sums = defaultdict(lambda: NO_USAGE)
    outdated = _find_days_of_leases(days)
    for day, usage_of_day in iter_model_usage(days):
        leases: Sums = {}
        for owner, lease in usage_of_day:
            account = account_on(owner.agent_did, day)
            for model, usage in lease.models.items():
                key = ModelKey(
                    Period.LEASE_DAY, day, account, owner.provider, model, owner.agent_did, owner.environment_id, owner.holder
                )
                leases[key] = usage
                by_agent[_get_agent_key(key)] = by_agent[_get_agent_key(key)].plus(usage)
        _replace(_load(Period.LEASE_DAY, [day]), leases)
        outdated.discard(day)
    for day in outdated:
        _replace(_load(Period.LEASE_DAY, [day]), {})
    before = _load(Period.AGENT_DAY, days)
    _replace(_load(Period.DAY, days), _sum_agents(by_agent))
    _update_months(before, by_agent)
    _replace(before, by_agent)


def _find_days_of_leases(days: Collection[date]) -> set[date]:
    stored = ModelTotal.objects.filter(period=Period.LEASE_DAY, day__in=sorted(days))
    return {*stored.order_by().values_list("day", flat=True).distinct()}


def delete_model_totals() -> None:
    ModelTotal.objects.all().delete()


def _get_agent_key(key: ModelKey) -> ModelKey:
    return key._replace(period=Period.AGENT_DAY, environment_id="", holder=None)


def _sum_agents(by_agent: Sums) -> Sums:
    total: Sums = defaultdict(lambda: NO_USAGE)
    for key, usage in by_agent.items():
        whole = key._replace(period=Period.DAY, agent_did="")
        total[whole] = total[whole].plus(usage)
    return total


def _update_months(before: Stored, after: Sums) -> None:
    """Add the differences of the days of agents to the months of the same agents."""
    differences: Sums = defaultdict(lambda: NO_USAGE)
    for key in {*before, *after}:
        old, new = before[key][1] if key in before else NO_USAGE, after.get(key, NO_USAGE)
        if old != new:
            month = key._replace(period=Period.AGENT_MONTH, day=key.day.replace(day=1))
            differences[month] = differences[month].plus(new.minus(old))
    if not differences:
        return
    agents = {key.agent_did for key in differences}
    few = {"agent_did__in": sorted(agents)} if len(agents) <= SQL_BATCH_SIZE else {}
    months = _load(Period.AGENT_MONTH, {key.day for key in differences}, **few)
    stored = {key: months[key] for key in differences if key in months}
    sums = {key: (stored[key][1] if key in stored else NO_USAGE).plus(usage) for key, usage in differences.items()}
    _replace(stored, {key: usage for key, usage in sums.items() if usage.records})


def _load(period: Period, days: Collection[date], **filters: object) -> Stored:
    rows = ModelTotal.objects.filter(period=period, day__in=sorted(days), **filters).order_by()
    size = len(ModelKey._fields)
    return {
        ModelKey(*row[:size]): (row[size], ModelUsage(*row[size + 1 :]))
        for row in rows.values_list(*ModelKey._fields, "pk", *ModelUsage._fields)
    }


def _replace(before: Stored, after: Mapping[ModelKey, ModelUsage]) -> None:
    """Replace the stored totals that differ from `after`."""
    changed = {key: usage for key, usage in after.items() if key not in before or before[key][1] != usage}
    _delete(pk for key, (pk, usage) in before.items() if after.get(key) != usage)
    rows = [_build_row(key, usage) for key, usage in changed.items()]
    ModelTotal.objects.bulk_create(rows, batch_size=SQL_BATCH_SIZE)


def _delete(pks: Iterable[int]) -> None:
    outdated = [*pks]
    for start in range(0, len(outdated), SQL_BATCH_SIZE):
        ModelTotal.objects.filter(pk__in=outdated[start : start + SQL_BATCH_SIZE]).delete()


def _build_row(key: ModelKey, usage: ModelUsage) -> ModelTotal:
    columns = {name: value for name, value in key._asdict().items() if name != "account"}
    return ModelTotal(account_id=key.account, **columns, **usage._asdict())
