"""Operators' pages on what was used, and the filters of all lists of it and its costs. `leases` names the holders."""

import uuid
from datetime import date, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import (
    ChoicesRadioFilter,
    RangeDateFilter,
    TextFilter,
)
from unfold.decorators import display

from billing.dates import day_of, following
from billing.models import Item, UsageRecord
from sandboxes.admin.base import Fact, Facts, Held, Slice, all_fields, uuid_of
from sandboxes.admin.formatting import counted, link, rows, shortened, size, span, stamp, two, usd
from sandboxes.admin.readings import cpu_time


def month_of(now: datetime) -> date:
    return day_of(now).replace(day=1)


def month_before(now: datetime) -> date:
    return (month_of(now) - timedelta(days=1)).replace(day=1)


def of_month(first: date) -> Q:
    return Q(day__gte=first, day__lt=following(first))


MONTHS = {
    "month": Slice("This month", "Nothing is recorded for this month.", lambda now: of_month(month_of(now))),
    "before": Slice("Last month", "Nothing is recorded for last month.", lambda now: of_month(month_before(now))),
    "all": Slice("All", "Nothing is recorded yet: sandboxes that are used are metered and priced by sweeps."),
}


class Exactly(TextFilter):
    """A column's whole value, typed in. The address is the same as that of pages that link here."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        said = (self.value() or "").strip()
        return queryset.filter(**{str(self.parameter_name): said}) if said else queryset


class Agent(Exactly):
    title, parameter_name = "agent, its DID", "agent_did"


class Environment(Exactly):
    title, parameter_name = "environment", "environment_id"


class Provider(Exactly):
    title, parameter_name = "provider", "provider"


class Lease(Exactly):
    title, parameter_name = "lease, its id", "holder"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        said = (self.value() or "").strip()
        pk = uuid_of(said)
        return queryset.filter(holder=pk) if pk else queryset.none() if said else queryset


def fact_of(row: UsageRecord) -> SafeString:
    """The fact that usage was read off, with a link to the page that shows it."""
    kind, _, rest = row.source.partition(" ")
    if kind == "snapshot" and uuid_of(rest):
        return link("sandboxes_snapshot", rest, "snapshot")
    if kind == "data":
        return format_html('<a class="lh-link" href="{}">data</a>', rows("sandboxes_agentdata", q=row.agent_did))
    if row.item == Item.TOKENS:
        asked = {"holder": row.holder} if row.holder else {}
        when = {"started_at_from_0": row.day, "started_at_to_0": row.day}
        href = rows("sandboxes_llmcall", slice="all", called=row.model, **asked, **when)
        return format_html('<a class="lh-link" href="{}">calls of {}</a>', href, shortened(row.model or "no model", 60))
    if kind == "reading":
        return link("sandboxes_reading", rest, row.source)
    if row.item == Item.RUNS:
        return format_html('<a class="lh-link" href="{}">runs</a>', rows("sandboxes_run", slice="all", sandbox=row.sandbox_id))
    return link("sandboxes_sandbox", row.sandbox_id, row.source) if row.sandbox_id else format_html("{}", row.source)


def amount_of(row: UsageRecord) -> str:
    if row.item == Item.TOKENS:
        return f"{counted(row.calls, 'call', 'calls')}, {usd(row.usd)} USD"
    if row.item == Item.RUNS:
        return counted(row.calls, "run", "runs")
    if row.item == Item.USE:
        return f"{cpu_time(row.cpu_micros)} of CPU, {row.memory_mib:,} MiB for {span(row.ended_at - row.began_at)}"
    if row.item == Item.STORAGE:
        return f"{size(row.size_bytes)} for {span(row.ended_at - row.began_at)}"
    return f"{row.memory_mib:,} MiB, {row.millicpus / 1000:g} CPU for {span(row.ended_at - row.began_at)}"


@admin.register(UsageRecord)
class UsageRecordAdmin(Held, Facts):
    list_display = ["what", "who", "when", "amount", "fact"]
    list_filter = [("day", RangeDateFilter), Agent, Lease, Environment, Provider, ("item", ChoicesRadioFilter)]
    list_select_related = ["sandbox"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id of a lease"
    ordering = ["-day", "-pk"]
    slices = {
        **MONTHS,
        "unpriced": Slice(
            "Calls without a price", "What each model call cost is known.", lambda now: Q(item=Item.TOKENS, unpriced__gt=0)
        ),
    }
    fieldsets = all_fields(
        "item", "source", "day", "began_at", "ended_at", "sandbox", "holder", "agent_did", "environment_id", "provider",
        "state", "memory_mib", "millicpus", "measured", "cpu_micros", "mib_micros",
        "size_bytes", "model", "calls", "unpriced", "input_tokens", "cached_tokens",
        "output_tokens", "usd",
    )  # fmt: skip

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if pk := uuid_of(search_term):
            return queryset.filter(holder=pk), False
        return super().get_search_results(request, queryset, search_term)

    @display(description="What")
    def what(self, row: UsageRecord) -> SafeString:
        return two(row.get_item_display(), row.state or row.model)

    @display(description="Agent and environment")
    def who(self, row: UsageRecord) -> SafeString:
        return two(row.agent_did or "–", row.environment_id)

    @display(description="Day and provider")
    def when(self, row: UsageRecord) -> SafeString:
        return two(row.day, row.provider or "–")

    @display(description="How much")
    def amount(self, row: UsageRecord) -> str:
        return amount_of(row)

    @display(description="Read off")
    def fact(self, row: UsageRecord) -> SafeString:
        return fact_of(row)

    def page(self, request: HttpRequest, row: UsageRecord) -> dict[str, Any]:
        known = {"agent_did": row.agent_did, "environment_id": row.environment_id, "holder": row.holder}
        given = {name: value for name, value in known.items() if value}
        return {
            "facts": [
                Fact("What", row.get_item_display(), note=row.state or row.model),
                Fact("How much", amount_of(row)),
                Fact("From", stamp(row.began_at)),
                Fact("Until", stamp(row.ended_at)),
                Fact("Read off", fact_of(row)),
                Fact("Provider", row.provider or "–"),
                self.agent(row.agent_did),
                *([self.holder(row.holder)] if isinstance(row.holder, uuid.UUID) else []),
                Fact(
                    "What it cost", "cost records of that day",
                    href=rows("billing_costrecord", slice="all", day_from=row.day, day_to=row.day, **given),
                ),
            ]
        }  # fmt: skip
