"""Attributes by which costs, usage and model calls are grouped and filtered, and the stored totals that have them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from django.db.models import OuterRef, Q, Subquery, Value
from django.db.models.functions import Coalesce

from billing.dates import start_of_next_month
from billing.models import ModelTotal, Tab

# A lease keeps its project: an agent that changes its project leaves the costs of its earlier leases with the earlier one.
_PROJECT = Coalesce(Subquery(Tab.objects.filter(holder=OuterRef("holder")).values("project")[:1]), Value(""))
GROUP_BY_COLUMNS: dict[str, Any] = {
    "agent": "agent_did", "lease": "holder", "environment": "environment_id", "provider": "provider", "day": "day",
    "account": "account__name", "item": "item", "project": _PROJECT, "model": "model", "model_provider": "model",
}  # fmt: skip
MODEL_GROUPS = ("model", "model_provider")  # attributes of model calls alone
RECORD_GROUPS = ("lease", "environment", "project")  # attributes that only the records of single leases have
Period = ModelTotal.Period


@dataclass(frozen=True)
class Selection:
    """Costs from day `since` up to but not including `until`. `filters` are values by attribute."""

    since: date | None = None
    until: date | None = None
    agents: Collection[str] | None = None
    filters: Mapping[str, Any] = field(default_factory=dict)

    def build_filter(self, *, without: Collection[str] = ()) -> Q:
        """Match the rows of cost records, usage records or totals. `without` names filters that are left out."""
        condition = build_range_filter(self.since, self.until, self.agents)
        for name, value in self.filters.items():
            if name not in without:
                condition &= _build_value_filter(name, value)
        return condition

    def build_period_filter(self, groups: Collection[str]) -> Q | None:
        """Match the period totals that make up the range of days. None if only records have these groups and filters.

        Full months of agents are single totals, and the other days of the range are totals of days."""
        names = {*groups, *self.filters}
        if not names.isdisjoint(RECORD_GROUPS):
            return None
        if "agent" not in names and self.agents is None:
            return Q(period=Period.DAY)
        if "day" in names:
            return Q(period=Period.AGENT_DAY)
        begin = start_of_next_month(self.since) if self.since and self.since.day > 1 else self.since
        end = self.until.replace(day=1) if self.until else None
        months = build_range_filter(begin, end, None)
        is_edge = Q(day__lt=begin) if begin else Q(pk__in=[])
        is_edge |= Q(day__gte=end) if end else Q(pk__in=[])
        if begin and end and begin >= end:
            months, is_edge = Q(pk__in=[]), Q()
        return Q(months, period=Period.AGENT_MONTH) | Q(is_edge, period=Period.AGENT_DAY)


def build_range_filter(since: date | None, until: date | None, agents: Collection[str] | None) -> Q:
    condition = Q() if agents is None else Q(agent_did__in=[*agents])
    if since:
        condition &= Q(day__gte=since)
    if until:
        condition &= Q(day__lt=until)
    return condition


def _build_value_filter(name: str, value: Any) -> Q:
    if name == "project":
        return Q(holder__in=Tab.objects.filter(project=value).values("holder"))
    return Q(**{GROUP_BY_COLUMNS[name]: value})


def format_key(key: object) -> str:
    return "" if key is None else str(key)
