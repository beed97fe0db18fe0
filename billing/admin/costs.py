"""Operators' pages on what usage cost, and why. `leases` names the holders."""

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
from django.db.models import Count, Q, QuerySet
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
from billing.admin.formatting import fixed, money, short, whole
from billing.admin.usage import MONTHS, Agent, Environment, Lease, Provider, amount_of, fact_of
from billing.costs import PAID
from billing.models import CostRecord, Item, Priced, Rate, UsageRecord
from billing.money_sums import exactly, nano_usd
from billing.pricing import plain
from sandboxes.admin.base import Fact, Facts, Held, SlicedList, all_fields, uuid_of
from sandboxes.admin.formatting import counted, link, rows, stamp, two, usd

SOURCES = 50  # usage records on the page of a cost record
EXPORTED = [
    "day", "account__name", "agent_did", "environment_id", "holder", "provider", "item", "quantity", "free", "usd",
    "rate__usd", "rate",
]  # fmt: skip
HEAD = [
    "day", "account", "agent", "environment", "lease", "provider", "item", "quantity", "free", "usd", "rate_usd", "rate",
]  # fmt: skip
# What usage a cost is of; of the others, time, unless it is by use.
ITEM_OF = {Priced.STORAGE: Item.STORAGE, Priced.LLM: Item.TOKENS, Priced.REQUEST: Item.RUNS}


@dataclass(frozen=True)
class Sums:
    """What all rows of a list come to, on every page of it."""

    usd: Decimal
    number: int
    items: list[tuple[str, Decimal]]

    @property
    def shown(self) -> str:
        return money(self.usd)

    @property
    def said(self) -> str:
        return counted(self.number, "record", "records")

    @property
    def parts(self) -> list[tuple[str, str]]:
        return [(label, money(amount)) for label, amount in self.items if amount]


class SummedList(SlicedList):
    """A list that says what all that it shows comes to."""

    @cached_property
    def sums(self) -> Sums:
        found = [*self.queryset.order_by().values_list("item").annotate(nano=exactly("usd"), number=Count("pk"))]
        items = sorted(((Priced(item).label, nano_usd(nano)) for item, nano, _ in found), key=lambda each: -each[1])
        return Sums(sum((amount for _, amount in items), Decimal(0)), sum(each[2] for each in found), items)

    def exported(self, shape: str) -> str:
        return f"{reverse('admin:billing_costrecord_export', args=[shape])}{self.get_query_string(remove=['p', 'e'])}"

    @property
    def as_csv(self) -> str:
        return self.exported("csv")

    @property
    def as_json(self) -> str:
        return self.exported("json")


@admin.register(CostRecord)
class CostRecordAdmin(Held, Facts):
    list_display = ["what", "who", "when", "quantity_shown", "free_shown", "cost"]
    list_filter = [
        ("day", RangeDateFilter), Agent, Lease, Environment, Provider, ("item", ChoicesRadioFilter),
        ("account", RelatedDropdownFilter),
    ]  # fmt: skip
    list_select_related = ["account"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id of a lease"
    ordering = ["-day", "-pk"]
    slices = MONTHS
    list_before_template = "admin/billing/costrecord/sums.html"
    change_form_outer_before_template = "admin/billing/costrecord/why.html"
    fieldsets = all_fields(
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
    )

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[SlicedList]:
        return SummedList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if pk := uuid_of(search_term):
            return queryset.filter(holder=pk), False
        return super().get_search_results(request, queryset, search_term)

    def get_urls(self) -> list[URLPattern]:
        export = self.admin_site.admin_view(self.export)
        return [path("export/<str:shape>/", export, name="billing_costrecord_export"), *super().get_urls()]

    @display(description="What")
    def what(self, row: CostRecord) -> SafeString:
        return two(Priced(row.item).label, row.provider or "–")

    @display(description="Agent and environment")
    def who(self, row: CostRecord) -> SafeString:
        return two(row.agent_did or "–", row.environment_id)

    @display(description="Day and account")
    def when(self, row: CostRecord) -> SafeString:
        return two(row.day, row.account)

    @display(description="Quantity")
    def quantity_shown(self, row: CostRecord) -> str:
        return short(row.quantity)

    @display(description="Free of it")
    def free_shown(self, row: CostRecord) -> str:
        return short(row.free) if row.free else "–"

    @display(description="USD")
    def cost(self, row: CostRecord) -> str:
        return fixed(row.usd)

    def page(self, request: HttpRequest, row: CostRecord) -> dict[str, Any]:
        used = _usage_of(row)
        found = [*used[: SOURCES + 1]] if row.item != Priced.PLAN else []
        return {
            "facts": [
                Fact("USD", usd(row.usd)),
                Fact("Day", row.day, href=rows("billing_costrecord", slice="all", day_from=row.day, day_to=row.day)),
                Fact("Account", link("billing_account", row.account_id, row.account)),
                Fact("Provider", row.provider or "–"),
                self.agent(row.agent_did),
                *([Fact("Environment", row.environment_id)] if row.environment_id else []),
                *([self.holder(row.holder)] if row.holder else []),
            ],
            "why": why(row),
            "sources": [(each, fact_of(each), amount_of(each)) for each in found[:SOURCES]],
            "more_sources": len(found) > SOURCES,
            "all_sources": _narrowed(row, found),
            "cut": _is_cut(row, found),
            "rate": row.rate,
        }

    # --- all that is filtered, as a file ------------------------------------------------------------------------------

    def export(self, request: HttpRequest, shape: str) -> HttpResponse | StreamingHttpResponse:
        """The rows that the list would show, all of them."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if shape not in ("csv", "json"):
            raise Http404
        try:
            found = self.get_changelist_instance(request).queryset
        except IncorrectLookupParameters:
            return HttpResponseRedirect(rows("billing_costrecord", e=1))
        values = found.values_list(*EXPORTED).iterator(chunk_size=2000)
        lines = _csv(values) if shape == "csv" else _json(values)
        kind = "text/csv; charset=utf-8" if shape == "csv" else "application/json"
        return StreamingHttpResponse(
            lines, content_type=kind, headers={"Content-Disposition": f'attachment; filename="costs.{shape}"'}
        )


def _csv(values: Iterator[Any]) -> Iterator[str]:
    buffer = StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEAD)
    for value in values:
        writer.writerow([_exported(each) for each in value])
        if buffer.tell() > 1 << 16:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _json(values: Iterator[Any]) -> Iterator[str]:
    """A list of objects, one on each line."""
    between = "[\n"
    for value in values:
        yield between + json.dumps({name: _exported(each) or None for name, each in zip(HEAD, value, strict=True)})
        between = ",\n"
    yield "[]\n" if between == "[\n" else "\n]\n"


def _exported(value: Any) -> str:
    if value is None:
        return ""
    return plain(value) if isinstance(value, Decimal) else str(value)


@dataclass(frozen=True)
class Step:
    """A line of the sum that an amount is."""

    what: str
    amount: str
    note: Any = ""


def why(row: CostRecord) -> list[Step]:
    """Quantity less what was free, times the rate: exactly, then rounded once."""
    label = Priced(row.item).label
    if row.rate is None:
        return [
            Step(label.capitalize(), whole(row.quantity), "priced one by one when they were made"),
            Step("USD", usd(row.usd), "the sum of what each call cost"),
        ]
    used = pricing.rounded(pricing.units(row.item, int(row.whole)))
    free = f"within {whole(row.rate.allowance)} a month, shared by all of the account" if row.rate.allowance else "no allowance"
    its = format_html("{}, since {}", link("billing_rate", row.rate_id, row.rate), stamp(row.rate.valid_from))
    return [
        Step(f"Used, {label}", whole(used), "" if row.item != Priced.PLAN else "on the first day of use"),
        Step("− free", whole(row.free), free),
        Step("= paid for", whole(used - row.free)),
        Step("× rate, USD", usd(row.rate.usd), its),
        Step("= USD", usd(row.usd), "worked out exactly and rounded once, to nine places"),
    ]


def _usage_of(row: CostRecord) -> QuerySet[UsageRecord]:
    item = _item_of(row)
    kind = Q(item=item, state__in=PAID) if item == Item.TIME else Q(item=item)
    if item == Item.USE:  # where nobody measures, what was given
        kind |= Q(item=Item.TIME, state__in=PAID, measured=False)
    if row.rate and row.item != Priced.REQUEST:  # which is priced as at the beginning of the day
        kind &= Q(ended_at__gt=row.rate.valid_from)
        same = Rate.objects.filter(provider=row.rate.provider, item=row.rate.item, instance_type=row.rate.instance_type)
        if following := same.filter(valid_from__gt=row.rate.valid_from).order_by("valid_from").first():
            kind &= Q(began_at__lt=following.valid_from)
    return UsageRecord.objects.filter(
        kind, day=row.day, agent_did=row.agent_did, environment_id=row.environment_id, holder=row.holder,
        provider=row.provider,
    ).order_by("began_at", "pk")  # fmt: skip


def _is_cut(row: CostRecord, found: Sequence[UsageRecord]) -> bool:
    """Did another rate begin while some of this was used?"""
    began = Rate.objects.filter(provider=row.provider, item=row.item, valid_from__date=row.day)
    moments = [*began.values_list("valid_from", flat=True)] if found and row.rate and row.item != Priced.REQUEST else []
    return any(each.began_at < moment < each.ended_at for each in found for moment in moments)


def _item_of(row: CostRecord) -> Item:
    return Item.USE if row.rate and row.rate.by_use else ITEM_OF.get(Priced(row.item), Item.TIME)


def _narrowed(row: CostRecord, found: Sequence[UsageRecord]) -> str:
    """A list of what was found: where one kind of usage is all of it, of that."""
    items = {each.item for each in found}
    known = {"agent_did": row.agent_did, "environment_id": row.environment_id, "holder": row.holder, "provider": row.provider}
    given = {name: value for name, value in known.items() if value}
    if len(items) == 1:
        given["item__exact"] = items.pop()
    return rows("billing_usagerecord", slice="all", day_from=row.day, day_to=row.day, **given)
