"""Console pages of usage records, and the filters shared with cost records."""

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

from billing.dates import start_of_next_month, to_utc_date
from billing.models import UsageKind, UsageRecord
from billing.uncertainty import Uncertainty
from sandboxes.admin.base.changelist import ListTab, parse_uuid
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_duration,
    format_usd,
    render_admin_link,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.admin.readings import format_cpu_time
from sandboxes.formatting import format_bytes, pluralize


def get_month(now: datetime) -> date:
    return to_utc_date(now).replace(day=1)


def get_previous_month(now: datetime) -> date:
    return (get_month(now) - timedelta(days=1)).replace(day=1)


def build_month_filter(first: date) -> Q:
    return Q(day__gte=first, day__lt=start_of_next_month(first))


MONTH_TABS = {
    "month": ListTab(
        "This month",
        "No records for this month yet. Usage is metered and priced every minute.",
        lambda now: build_month_filter(get_month(now)),
    ),
    "before": ListTab("Last month", "No records for last month.", lambda now: build_month_filter(get_previous_month(now))),
    "all": ListTab("All", "No records yet. Usage of sandboxes is metered and priced every minute."),
}


class ExactValueFilter(TextFilter):
    """Filter with a text box for the complete value of a column. Other pages link with the same parameter."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = (self.value() or "").strip()
        return queryset.filter(**{str(self.parameter_name): value}) if value else queryset


class AgentFilter(ExactValueFilter):
    title, parameter_name = "agent (DID)", "agent_did"


class EnvironmentFilter(ExactValueFilter):
    title, parameter_name = "environment", "environment_id"


class ProviderFilter(ExactValueFilter):
    title, parameter_name = "provider", "provider"


class LeaseFilter(ExactValueFilter):
    title, parameter_name = "lease (id)", "holder"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = (self.value() or "").strip()
        pk = parse_uuid(value)
        return queryset.filter(holder=pk) if pk else queryset.none() if value else queryset


def render_usage_source(row: UsageRecord) -> SafeString:
    """Render a link to the fact that a usage record was derived from."""
    kind, _, rest = row.source.partition(" ")
    if kind == "snapshot" and parse_uuid(rest):
        return render_admin_link("sandboxes_snapshot", rest, "snapshot")
    if kind == "data":
        return format_html(
            '<a class="lh-link" href="{}">data</a>', build_changelist_url("sandboxes_agentdata", q=row.agent_did)
        )
    if row.item == UsageKind.TOKENS:
        by_lease = {"holder": row.holder} if row.holder else {}
        days = {"started_at_from_0": row.day, "started_at_to_0": row.day}
        href = build_changelist_url("sandboxes_llmcall", slice="all", called=row.model, **by_lease, **days)
        return format_html('<a class="lh-link" href="{}">calls of {}</a>', href, truncate_text(row.model or "no model", 60))
    if kind == "reading":
        return render_admin_link("sandboxes_reading", rest, row.source)
    if row.item == UsageKind.RUNS:
        return format_html(
            '<a class="lh-link" href="{}">runs</a>', build_changelist_url("sandboxes_run", slice="all", sandbox=row.sandbox_id)
        )
    rolled_up, _, start = rest.partition(" from ")
    name = f"{kind} from {start}" if rolled_up and start else row.source
    return render_admin_link("sandboxes_sandbox", row.sandbox_id, name) if row.sandbox_id else format_html("{}", name)


def format_usage_amount(row: UsageRecord) -> str:
    if row.item == UsageKind.TOKENS:
        uncertainty = str(Uncertainty(row.unpriced, row.estimated_usd))
        note = f" ({uncertainty})" if uncertainty else ""
        return f"{pluralize(row.calls, 'call', 'calls')}, {format_usd(row.usd)} USD{note}"
    if row.item == UsageKind.RUNS:
        return pluralize(row.calls, "run", "runs")
    if row.item == UsageKind.USE:
        held = format_duration(row.ended_at - row.began_at)
        return f"{format_cpu_time(row.cpu_micros)} of CPU, up to {row.memory_mib:,} MiB for {held}"
    if row.item == UsageKind.STORAGE:
        return f"{format_bytes(row.size_bytes)} for {format_duration(row.ended_at - row.began_at)}"
    return f"{row.memory_mib:,} MiB, {row.millicpus / 1000:g} CPU for {format_duration(row.ended_at - row.began_at)}"


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyModelAdmin):
    list_display = ["usage_label", "agent_label", "day_label", "amount", "fact"]
    list_filter = [
        ("day", RangeDateFilter),
        AgentFilter,
        LeaseFilter,
        EnvironmentFilter,
        ProviderFilter,
        ("item", ChoicesRadioFilter),
    ]
    list_select_related = ["sandbox"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment (prefix), or a complete lease id"
    ordering = ["-day", "-pk"]
    list_tabs = {
        **MONTH_TABS,
        "unpriced": ListTab(
            "Unpriced calls",
            "No unpriced calls: the cost of every model call is known.",
            lambda now: Q(unpriced__gt=0),  # of model calls alone; with that condition PostgreSQL may read all of them
        ),
    }
    fieldsets = build_all_fields_fieldset(
        "item", "source", "day", "began_at", "ended_at", "sandbox", "holder", "agent_did", "environment_id", "provider",
        "state", "memory_mib", "millicpus", "measured", "cpu_micros", "mib_micros",
        "size_bytes", "model", "calls", "unpriced", "input_tokens", "cached_tokens", "cache_written_tokens",
        "output_tokens", "usd", "estimated", "estimated_usd", "estimated_tokens",
    )  # fmt: skip

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if pk := parse_uuid(search_term):
            return queryset.filter(holder=pk), False
        return super().get_search_results(request, queryset, search_term)

    @display(description="Usage")
    def usage_label(self, row: UsageRecord) -> SafeString:
        return render_two_lines(row.get_item_display(), row.state or row.model)

    @display(description="Agent and environment")
    def agent_label(self, row: UsageRecord) -> SafeString:
        return render_two_lines(row.agent_did or "–", row.environment_id)

    @display(description="Day and provider")
    def day_label(self, row: UsageRecord) -> SafeString:
        return render_two_lines(row.day, row.provider or "–")

    @display(description="Quantity")
    def amount(self, row: UsageRecord) -> str:
        return format_usage_amount(row)

    @display(description="Source")
    def fact(self, row: UsageRecord) -> SafeString:
        return render_usage_source(row)

    def get_page_context(self, request: HttpRequest, row: UsageRecord) -> dict[str, Any]:
        columns = {"agent_did": row.agent_did, "environment_id": row.environment_id, "holder": row.holder}
        filters = {name: value for name, value in columns.items() if value}
        return {
            "facts": [
                SummaryField("Usage", row.get_item_display(), note=row.state or row.model),
                SummaryField("Quantity", format_usage_amount(row)),
                SummaryField("From", render_timestamp(row.began_at)),
                SummaryField("Until", render_timestamp(row.ended_at)),
                SummaryField("Source", render_usage_source(row)),
                SummaryField("Provider", row.provider or "–"),
                build_agent_field(row.agent_did),
                *([build_holder_field(row.holder)] if isinstance(row.holder, uuid.UUID) else []),
                SummaryField(
                    "Cost", "cost records of that day",
                    href=build_changelist_url("billing_costrecord", slice="all", day_from=row.day, day_to=row.day, **filters),
                ),
            ]
        }  # fmt: skip
