"""Operators' pages on what was used and what it cost. `leases` names the holders."""

import csv
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from io import StringIO
from typing import Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import (
    ChoicesRadioFilter,
    RangeDateFilter,
    RelatedDropdownFilter,
    TextFilter,
)
from unfold.decorators import display

from billing import overview, pricing
from billing.costs import PAID
from billing.days import day_of, following
from billing.models import Account, CostRecord, Item, Priced, UsageRecord, Watermark
from billing.pricing import plain
from billing.sums import exactly, nano_usd
from sandboxes.admin_readings import cpu_time
from sandboxes.cells import ago, counted, link, rows, shortened, size, span, stamp, two, usd
from sandboxes.pages import Fact, Facts, Held, Slice, SlicedList, all_fields, uuid_of

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
        said = (self.value() or "").replace("\0", "").strip()
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
        return usd(row.usd)

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
            "all_sources": _narrowed(row),
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


def _asked(request: HttpRequest, name: str) -> str:
    return request.GET.get(name, "").replace("\0", "").strip()


def money(amount: Decimal) -> str:
    """In cents; what is less than one, but something, in full."""
    cents = pricing.rounded(Fraction(amount), pricing.CENTS)
    return f"{cents:,.2f}" if cents or not amount else usd(amount)


def short(quantity: Decimal) -> str:
    """A quantity as far as a list needs it; its page has all of it."""
    shown = plain(quantity.quantize(Decimal("0.001")))
    return f"{Decimal(shown):,f}" if shown != "0" or not quantity else "< 0.001"


def _share(part: Decimal, whole: Decimal) -> str:
    return f"{100 * part / whole:.1f}" if whole else "0"


def _part(day: overview.Day, name: str) -> str:
    return brief(day.parts[name]) if name in day.parts else "–"


def brief(amount: Decimal) -> str:
    """Money for a column: whole cents."""
    return "< 0.01" if 0 < amount < Decimal("0.005") else money(amount)


def _range(found: overview.Overview) -> dict[str, Any]:
    return {"day_from": found.days[0].day, "day_to": found.days[-1].day}


KINDS = {
    "docker", "process", "memory", "cloudflare", "daytona", "modal", "runloop", "langsmith", "kubernetes", "store",
}  # fmt: skip


def kind(name: str) -> str:
    """Of a series: console.css has one colour for each, the same on every page."""
    return "models" if name == overview.MODELS else name if name in KINDS else "other"


def _bar(day: overview.Day, found: overview.Overview, narrowed: dict[str, Any]) -> dict[str, Any]:
    """One column of the chart, from the bottom up."""
    return {
        "day": day.day,
        "parts": [
            (kind(name), f"{100 * amount / found.top:.3f}") for name, amount in day.parts.items() if name != overview.PLANS
        ],
        "title": f"{day.day}: {money(day.usd)} USD"
        + "".join(f"\n{name} {money(amount)}" for name, amount in day.parts.items()),
    }


def _said(found: overview.Overview) -> str:
    """The chart in a sentence."""
    dearest = max(found.days, key=lambda day: day.bar)
    together = found.usd - found.series.get(overview.PLANS, Decimal(0))
    return (
        f"Cost per day without plans, {found.days[0].day} to {found.days[-1].day}: {money(together)} USD together, "
        f"{money(dearest.bar)} USD on {dearest.day}, the dearest day. The table below has the numbers."
    )


def _facts_of(found: overview.Overview, metered: Watermark | None, narrowed: dict[str, Any], now: datetime) -> list[Fact]:
    ahead, today = found.forecast, found.days[-1]
    all_ = rows("billing_costrecord", slice="all", **narrowed, **_range(found))
    rate = f"{money(ahead.a_day)} USD" if ahead.a_day is not None else "–"
    return [
        Fact("This month so far", f"{money(ahead.spent)} USD", href=rows("billing_costrecord", slice="month", **narrowed)),
        Fact(
            "Today so far", f"{money(today.usd)} USD",
            href=rows("billing_costrecord", slice="all", day_from=today.day, day_to=today.day, **narrowed),
        ),
        Fact("A day", rate, note=f"on average of the last {counted(ahead.days, 'day', 'days')}" if ahead.days else ""),
        Fact("This month, forecast", f"{money(ahead.month)} USD", note="if days go on costing that"),
        Fact("In these 30 days", f"{money(found.usd)} USD", href=all_),
        Fact(
            "Metered", ago(metered.at) if metered else "never", note="what is used later is not in it yet",
            alarm=_late(metered, now),
        ),
    ]  # fmt: skip


def _late(metered: Watermark | None, now: datetime) -> bool:
    return metered is not None and now - metered.at > timedelta(hours=1)


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


# --- where it goes -----------------------------------------------------------------------------------------------------


def spending(request: HttpRequest) -> HttpResponse:
    """The page that says where the money goes."""
    if not request.user.has_perm("billing.view_costrecord"):
        raise PermissionDenied
    now = timezone.now()
    account, agent = _asked(request, "account")[:63], _asked(request, "agent")[:255]
    known = Account.objects.filter(name=account).first() if account else None
    account = known.name if known else ""
    narrowed = ({"account__id__exact": known.pk} if known else {}) | ({"agent_did": agent} if agent else {})
    found = overview.look(now=now, account=account, agent=agent)
    metered = Watermark.objects.filter(name="time").first()
    context = {
        **admin.site.each_context(request),
        "title": "Spending",
        "found": found,
        "facts": _facts_of(found, metered, narrowed, now),
        "bars": [_bar(day, found, narrowed) for day in found.days],
        "series": [(name, kind(name), money(amount)) for name, amount in found.series.items() if name != overview.PLANS],
        "plans": money(found.series[overview.PLANS]) if overview.PLANS in found.series else "",
        "columns": [*found.series],
        "table": [(day.day, [_part(day, name) for name in found.series], brief(day.usd)) for day in found.days[::-1]],
        "spenders": [
            (each.agent_did, money(each.usd), _share(each.usd, found.usd),
             rows("billing_costrecord", slice="all", **{**narrowed, "agent_did": each.agent_did, **_range(found)}))
            for each in found.spenders
        ],
        "items": [(Priced(item).label, money(amount), _share(amount, found.usd)) for item, amount in found.items.items()],
        "said": _said(found),
        "accounts": Account.objects.values_list("name", flat=True).order_by("name")[:500],
        "account": account,
        "agent": agent,
        "top": money(found.top),
        "middle": money(found.top / 2),
    }  # fmt: skip
    return TemplateResponse(request, "admin/billing/overview.html", context)


# --- why an amount ----------------------------------------------------------------------------------------------------


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
            Step(label.capitalize(), plain(row.quantity), "priced one by one when they were made"),
            Step("USD", usd(row.usd), "the sum of what each call cost"),
        ]
    whole = pricing.units(row.item, int(row.whole))
    free = f"within {plain(row.rate.allowance)} a month, shared by all of the account" if row.rate.allowance else "no allowance"
    its = format_html("{}, since {}", link("billing_rate", row.rate_id, row.rate), stamp(row.rate.valid_from))
    return [
        Step(f"Used, {label}", plain(pricing.rounded(whole)), "" if row.item != Priced.PLAN else "on the first day of use"),
        Step("− free", plain(row.free), free),
        Step("= paid for", plain(pricing.rounded(whole) - row.free)),
        Step("× rate, USD", usd(row.rate.usd), its),
        Step("= USD", usd(row.usd), "worked out exactly and rounded once, to nine places"),
    ]


def _usage_of(row: CostRecord) -> QuerySet[UsageRecord]:
    item = _item_of(row)
    kind = Q(item=item, state__in=PAID) if item == Item.TIME else Q(item=item)
    if item == Item.USE:  # where nobody measures, what was given
        kind |= Q(item=Item.TIME, state__in=PAID, measured=False)
    return UsageRecord.objects.filter(
        kind, day=row.day, agent_did=row.agent_did, environment_id=row.environment_id, holder=row.holder,
        provider=row.provider,
    ).order_by("began_at", "pk")  # fmt: skip


def _item_of(row: CostRecord) -> Item:
    return Item.USE if row.rate and row.rate.by_use else ITEM_OF.get(Priced(row.item), Item.TIME)


def _narrowed(row: CostRecord) -> str:
    item = _item_of(row)
    known = {"agent_did": row.agent_did, "environment_id": row.environment_id, "holder": row.holder, "provider": row.provider}
    given = {name: value for name, value in known.items() if value}
    return rows("billing_usagerecord", slice="all", item__exact=item, day_from=row.day, day_to=row.day, **given)


# --- usage ------------------------------------------------------------------------------------------------------------


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


# --- elsewhere --------------------------------------------------------------------------------------------------------


def cost_so_far(**only: Any) -> Fact:
    """What a lease or an agent has cost, with a link to exactly these rows. One query."""
    nano = CostRecord.objects.filter(**only).aggregate(nano=exactly("usd"))["nano"]
    return Fact("Cost so far", f"{money(nano_usd(nano))} USD", href=rows("billing_costrecord", slice="all", **only))
