"""Console pages of cost records, with their derivation and an export."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from io import StringIO
from typing import Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q, QuerySet, Sum
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import (
    ChoicesRadioFilter,
    RangeDateFilter,
    RelatedDropdownFilter,
)
from unfold.decorators import display

from billing import pricing
from billing.admin.formatting import format_money, format_money_aligned, format_quantity, format_quantity_brief
from billing.admin.usage import (
    MONTH_TABS,
    AgentFilter,
    EnvironmentFilter,
    LeaseFilter,
    ProviderFilter,
    format_usage_amount,
    render_usage_source,
)
from billing.models import BillableItem, CostRecord, Rate, UsageKind, UsageRecord
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.pricing import format_decimal
from billing.totals import BILLABLE_STATES
from billing.uncertainty import Uncertainty
from sandboxes.admin.base.changelist import TabbedChangeList, parse_uuid
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_usd,
    render_admin_link,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.formatting import pluralize
from sandboxes.models import SandboxState

MAX_USAGE_RECORDS_SHOWN = 50  # on the page of a cost record
EXPORT_FIELDS = [
    "day", "account__name", "agent_did", "environment_id", "holder", "provider", "item", "quantity", "free", "usd",
    "rate__usd", "rate", "estimated_usd", "unpriced",
]  # fmt: skip
EXPORT_HEADER = [
    "day", "account", "agent", "environment", "lease", "provider", "item", "quantity", "free", "usd", "rate_usd", "rate",
    "estimated_usd", "unpriced_calls",
]  # fmt: skip
# Kind of usage behind an item. The items not listed are priced by time, or by use if their rate says so.
USAGE_ITEM_BY_PRICED_ITEM = {
    BillableItem.STORAGE: UsageKind.STORAGE,
    BillableItem.LLM: UsageKind.TOKENS,
    BillableItem.REQUEST: UsageKind.RUNS,
}

# States of the time behind an item. The items not listed are priced by awake time.
STATES_BY_PRICED_ITEM = {
    BillableItem.SUSPENSION: (SandboxState.SUSPENDED,),
    BillableItem.DISK: (*BILLABLE_STATES, SandboxState.SUSPENDED),
}


@dataclass(frozen=True)
class CostTotals:
    """Totals of all rows of a changelist, over all its pages."""

    usd: Decimal
    number: int
    items: list[tuple[str, Decimal]]
    uncertainty: str

    @property
    def shown(self) -> str:
        return format_money(self.usd)

    @property
    def count_label(self) -> str:
        return pluralize(self.number, "record", "records")

    @property
    def parts(self) -> list[tuple[str, str]]:
        return [(label, format_money(amount)) for label, amount in self.items if amount]


class CostChangeList(TabbedChangeList):
    """Changelist with the totals of its rows."""

    @cached_property
    def totals(self) -> CostTotals:
        by_item = self.queryset.order_by().values_list("item")
        sums = [
            *by_item.annotate(
                nano=sum_exact("usd"), number=Count("pk"), calls=Sum("unpriced"), estimated=sum_exact("estimated_usd")
            )
        ]
        items = sorted(((BillableItem(row[0]).label, nanos_to_decimal(row[1])) for row in sums), key=lambda each: -each[1])
        return CostTotals(
            sum((amount for _, amount in items), Decimal(0)),
            sum(row[2] for row in sums),
            items,
            str(Uncertainty(sum(int(row[3]) for row in sums), nanos_to_decimal(sum(row[4] for row in sums)))),
        )

    def build_export_url(self, shape: str) -> str:
        return f"{reverse('admin:billing_costrecord_export', args=[shape])}{self.get_query_string(remove=['p', 'e'])}"

    @property
    def as_csv(self) -> str:
        return self.build_export_url("csv")

    @property
    def as_json(self) -> str:
        return self.build_export_url("json")


@admin.register(CostRecord)
class CostRecordAdmin(ReadOnlyModelAdmin):
    list_display = ["item_label", "agent_label", "day_label", "quantity_label", "free_quantity", "cost"]
    list_filter = [
        ("day", RangeDateFilter), AgentFilter, LeaseFilter, EnvironmentFilter, ProviderFilter, ("item", ChoicesRadioFilter),
        ("account", RelatedDropdownFilter),
    ]  # fmt: skip
    list_select_related = ["account"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment (prefix), or a complete lease id"
    ordering = ["-day", "-pk"]
    list_tabs = MONTH_TABS
    list_before_template = "admin/billing/costrecord/totals.html"
    change_form_outer_before_template = "admin/billing/costrecord/derivation.html"
    fieldsets = build_all_fields_fieldset(
        "account",
        "day",
        "provider",
        "item",
        "agent_did",
        "holder",
        "environment_id",
        "rate",
        "whole",
        "quantity",
        "free",
        "usd",
        "unpriced",
        "estimated_usd",
    )

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[TabbedChangeList]:
        return CostChangeList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if pk := parse_uuid(search_term):
            return queryset.filter(holder=pk), False
        return super().get_search_results(request, queryset, search_term)

    def get_urls(self) -> list[URLPattern]:
        export = self.admin_site.admin_view(self.export)
        return [path("export/<str:shape>/", export, name="billing_costrecord_export"), *super().get_urls()]

    @display(description="Item and provider")
    def item_label(self, row: CostRecord) -> SafeString:
        return render_two_lines(BillableItem(row.item).label, row.provider or "–")

    @display(description="Agent and environment")
    def agent_label(self, row: CostRecord) -> SafeString:
        return render_two_lines(row.agent_did or "–", row.environment_id)

    @display(description="Day and account")
    def day_label(self, row: CostRecord) -> SafeString:
        return render_two_lines(row.day, row.account)

    @display(description="Quantity")
    def quantity_label(self, row: CostRecord) -> str:
        return format_quantity_brief(row.quantity)

    @display(description="Allowance used")
    def free_quantity(self, row: CostRecord) -> str:
        return format_quantity_brief(row.free) if row.free else "–"

    @display(description="USD")
    def cost(self, row: CostRecord) -> SafeString | str:
        usd, uncertainty = format_money_aligned(row.usd), str(Uncertainty(row.unpriced, row.estimated_usd))
        return render_two_lines(usd, uncertainty) if uncertainty else usd

    def get_page_context(self, request: HttpRequest, row: CostRecord) -> dict[str, Any]:
        usage = _find_usage_records(row)
        records = [*usage[: MAX_USAGE_RECORDS_SHOWN + 1]] if row.item != BillableItem.PLAN else []
        return {
            "facts": [
                SummaryField("USD", format_usd(row.usd), note=str(Uncertainty(row.unpriced, row.estimated_usd))),
                SummaryField(
                    "Day",
                    row.day,
                    href=build_changelist_url("billing_costrecord", slice="all", day_from=row.day, day_to=row.day),
                ),
                SummaryField("Account", render_admin_link("billing_account", row.account_id, row.account)),
                SummaryField("Provider", row.provider or "–"),
                build_agent_field(row.agent_did),
                *([SummaryField("Environment", row.environment_id)] if row.environment_id else []),
                *([build_holder_field(row.holder)] if row.holder else []),
            ],
            "steps": explain_amount(row),
            "sources": [
                (each, render_usage_source(each), format_usage_amount(each)) for each in records[:MAX_USAGE_RECORDS_SHOWN]
            ],
            "more_sources": len(records) > MAX_USAGE_RECORDS_SHOWN,
            "all_sources": _build_usage_url(row, records),
            "split_by_rate": _is_split_by_rate(row, records),
            "rate": row.rate,
        }

    # --- export ------------------------------------------------------------------------------

    def export(self, request: HttpRequest, shape: str) -> HttpResponse | StreamingHttpResponse:
        """Send all rows that the changelist would show with the same query string."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if shape not in ("csv", "json"):
            raise Http404
        try:
            rows = self.get_changelist_instance(request).queryset
        except IncorrectLookupParameters:
            return HttpResponseRedirect(build_changelist_url("billing_costrecord", e=1))
        values = rows.values_list(*EXPORT_FIELDS).iterator(chunk_size=2000)
        lines = _iter_csv(values) if shape == "csv" else _iter_json(values)
        kind = "text/csv; charset=utf-8" if shape == "csv" else "application/json"
        return StreamingHttpResponse(
            lines, content_type=kind, headers={"Content-Disposition": f'attachment; filename="costs.{shape}"'}
        )


def _iter_csv(values: Iterator[Any]) -> Iterator[str]:
    buffer = StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(EXPORT_HEADER)
    for value in values:
        writer.writerow([_format_exported_value(each) for each in value])
        if buffer.tell() > 1 << 16:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _iter_json(values: Iterator[Any]) -> Iterator[str]:
    """Yield a JSON list of objects, one per line."""
    between = "[\n"
    for value in values:
        yield between + json.dumps(
            {name: _format_exported_value(each) or None for name, each in zip(EXPORT_HEADER, value, strict=True)}
        )
        between = ",\n"
    yield "[]\n" if between == "[\n" else "\n]\n"


def _format_exported_value(value: Any) -> str:
    if value is None:
        return ""
    return format_decimal(value) if isinstance(value, Decimal) else str(value)


@dataclass(frozen=True)
class CalculationStep:
    """Line of the derivation of an amount."""

    label: str
    amount: str
    note: Any = ""


def explain_amount(row: CostRecord) -> list[CalculationStep]:
    """Derive the amount: quantity minus allowance, times rate, exact, then rounded once."""
    label = BillableItem(row.item).label
    if row.rate is None:
        estimated = f", {format_usd(row.estimated_usd)} of it estimated" if row.estimated_usd else ""
        return [
            CalculationStep(label.capitalize(), format_quantity(row.quantity), "priced individually when the calls ended"),
            *([CalculationStep("Without a price", f"{row.unpriced:,}", "not included in the sum")] if row.unpriced else []),
            CalculationStep("USD", format_usd(row.usd), f"sum over all calls{estimated}"),
        ]
    used = pricing.round_half_up(pricing.to_units(row.item, int(row.whole)))
    free = (
        f"allowance of {format_quantity(row.rate.allowance)} per month, shared by the account"
        if row.rate.allowance
        else "no allowance"
    )
    rate_note = format_html(
        "{}, in force since {}", render_admin_link("billing_rate", row.rate_id, row.rate), render_timestamp(row.rate.valid_from)
    )
    return [
        CalculationStep(
            f"Used, {label}", format_quantity(used), "" if row.item != BillableItem.PLAN else "on the first day of use"
        ),
        CalculationStep("− allowance", format_quantity(row.free), free),
        CalculationStep("= billable", format_quantity(used - row.free)),
        CalculationStep("× rate, USD", format_usd(row.rate.usd), rate_note),
        CalculationStep("= USD", format_usd(row.usd), "computed exactly, then rounded once to nine decimals"),
    ]


def _find_usage_records(row: CostRecord) -> QuerySet[UsageRecord]:
    item = _get_usage_item(row)
    states = STATES_BY_PRICED_ITEM.get(BillableItem(row.item), BILLABLE_STATES)
    kind = Q(item=item, state__in=states) if item == UsageKind.TIME else Q(item=item)
    if item == UsageKind.USE:  # without measurement, the allocated amount is priced
        kind |= Q(item=UsageKind.TIME, state__in=BILLABLE_STATES, measured=False)
    if row.rate and row.item != BillableItem.REQUEST:  # requests are priced by the rate at the start of the day
        kind &= Q(ended_at__gt=row.rate.valid_from)
        same = Rate.objects.filter(provider=row.rate.provider, item=row.rate.item, instance_type=row.rate.instance_type)
        if following := same.filter(valid_from__gt=row.rate.valid_from).order_by("valid_from").first():
            kind &= Q(began_at__lt=following.valid_from)
    return UsageRecord.objects.filter(
        kind, day=row.day, agent_did=row.agent_did, environment_id=row.environment_id, holder=row.holder,
        provider=row.provider,
    ).order_by("began_at", "pk")  # fmt: skip


def _is_split_by_rate(row: CostRecord, records: Sequence[UsageRecord]) -> bool:
    """Return whether another rate came into force during this usage."""
    began = Rate.objects.filter(provider=row.provider, item=row.item, valid_from__date=row.day)
    moments = [*began.values_list("valid_from", flat=True)] if records and row.rate and row.item != BillableItem.REQUEST else []
    return any(each.began_at < moment < each.ended_at for each in records for moment in moments)


def _get_usage_item(row: CostRecord) -> UsageKind:
    return (
        UsageKind.USE if row.rate and row.rate.by_use else USAGE_ITEM_BY_PRICED_ITEM.get(BillableItem(row.item), UsageKind.TIME)
    )


def _build_usage_url(row: CostRecord, records: Sequence[UsageRecord]) -> str:
    """Build the URL of the list of these usage records, filtered by their kind if they all have the same."""
    items = {each.item for each in records}
    columns = {"agent_did": row.agent_did, "environment_id": row.environment_id, "holder": row.holder, "provider": row.provider}
    filters = {name: value for name, value in columns.items() if value}
    if len(items) == 1:
        filters["item__exact"] = items.pop()
    return build_changelist_url("billing_usagerecord", slice="all", day_from=row.day, day_to=row.day, **filters)
