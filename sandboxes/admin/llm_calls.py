"""Operators' pages on what sandboxes asked their models. `leases` names the holders."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_time
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import (
    BooleanRadioFilter,
    ChoicesRadioFilter,
    RadioFilter,
    RangeDateTimeFilter,
    TextFilter,
)
from unfold.decorators import display

from sandboxes.admin.base import (
    HolderDisplayMixin,
    ListTab,
    ReadOnlyModelAdmin,
    SummaryField,
    build_all_fields_fieldset,
    parse_uuid,
)
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_bytes,
    format_duration,
    format_path,
    format_usd,
    pluralize,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.egress import model_pricing, upstream_records
from sandboxes.egress.totals import IS_FAILED, IS_REFUSED, IS_UNPRICED, CallTotals
from sandboxes.models import LlmCall, ModelRate

OUTCOME_BADGES = {
    LlmCall.Outcome.OPEN: "open",
    LlmCall.Outcome.OK: "ok",
    LlmCall.Outcome.FAILED: "failed",
    LlmCall.Outcome.CUT: "cut",
    LlmCall.Outcome.LOST: "lost",
    LlmCall.Outcome.REFUSED: "refused",
}


class StartedWithinFilter(RadioFilter):
    """How long ago it started: what other pages link by."""

    title = "time since it started"
    parameter_name = "since"
    lengths = {"1h": timedelta(hours=1), "1d": timedelta(days=1), "7d": timedelta(days=7), "30d": timedelta(days=30)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("1h", "Last hour"), ("1d", "Last 24 hours"), ("7d", "Last 7 days"), ("30d", "Last 30 days")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        length = self.lengths.get(self.value() or "")
        return queryset.filter(started_at__gte=timezone.now() - length) if length else queryset


class StartedBetweenFilter(RangeDateTimeFilter):
    """From a moment in UTC to another. A day alone means from its beginning, and to its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.title = "start, in UTC"

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        began, ended = self._moment("from", time.min), self._moment("to", time.max)
        queryset = queryset.filter(started_at__gte=began) if began else queryset
        return queryset.filter(started_at__lte=ended) if ended else queryset

    def _moment(self, end: str, usual: time) -> datetime | None:
        day, at = (str(self.used_parameters.get(f"{self.parameter_name}_{end}_{part}") or "") for part in (0, 1))
        try:
            found: date | None = parse_date(day)
            clock = parse_time(at) if at else usual
        except ValueError:
            return None
        return datetime.combine(found, clock, UTC) if found and clock else None


class PriceSourceFilter(RadioFilter):
    title = "price"
    parameter_name = "price"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        known = [(value, label.capitalize()) for value, label in LlmCall.Priced.choices if value]
        return [*known, ("none", "Unpriced")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        if self.value() == "none":
            return queryset.filter(IS_UNPRICED)
        return queryset.filter(priced=self.value()) if self.value() in LlmCall.Priced.values else queryset


class TextLookupFilter(TextFilter):
    """A column's value, typed in."""

    lookup = ""

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        said = (self.value() or "").replace("\0", "").strip()  # which PostgreSQL does not take
        return queryset.filter(**{self.lookup: said}) if said else queryset


class ModelNameFilter(TextLookupFilter):
    title, parameter_name, lookup = "model, or its beginning", "called", "model__startswith"


class ErrorCodeFilter(TextLookupFilter):
    title, parameter_name, lookup = "code of a refusal or failure", "code", "code"


class HttpStatusFilter(TextLookupFilter):
    title, parameter_name, lookup = "HTTP status", "status", "status"

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        said = (self.value() or "").strip()
        if said and not (said.isascii() and said.isdigit() and len(said) == 3):
            return queryset.none()
        return super().queryset(request, queryset)


@admin.register(LlmCall)
class LlmCallAdmin(HolderDisplayMixin, ReadOnlyModelAdmin):
    list_display = ["asked", "result", "tokens", "price", "who", "when", "lasted"]
    list_filter = [
        ("kind", ChoicesRadioFilter),
        ("outcome", ChoicesRadioFilter),
        ErrorCodeFilter,
        HttpStatusFilter,
        ModelNameFilter,
        ("streamed", BooleanRadioFilter),
        PriceSourceFilter,
        StartedWithinFilter,
        ("started_at", StartedBetweenFilter),
    ]
    list_select_related = ["sandbox"]
    search_fields = ["agent_did__startswith", "environment_id__startswith", "model__startswith"]
    search_help_text = "Agent, environment, model, or a whole id"
    ordering = ["-started_at", "-pk"]
    slices = {
        "all": ListTab("All", "No sandbox has asked a model yet."),
        "open": ListTab("Running", "No model is being asked now.", lambda now: Q(ended_at__isnull=True)),
        "failed": ListTab("Failed", "No call failed, was cut off or lost.", lambda now: IS_FAILED),
        "refused": ListTab("Refused", "Nothing was refused.", lambda now: IS_REFUSED),
        "unpriced": ListTab("Unpriced", "What each call cost is known.", lambda now: IS_UNPRICED),
        "unmetered": ListTab(
            "Unmetered",
            "No answered call is missing in the upstream's records.",
            lambda now: Q(pk__in=upstream_records.find_unmetered(now).values("pk")),
        ),
    }
    fieldsets = build_all_fields_fieldset(
        "call_id", "kind", "sandbox", "holder", "agent_did", "environment_id", "run", "path", "model", "streamed", "started_at",
        "deadline_at", "first_byte_at", "ended_at", "outcome", "status", "code", "sent_bytes", "received_bytes", "logged_at",
        "recorded_at", "input_tokens", "cached_tokens", "output_tokens", "cost", "priced",
    )  # fmt: skip

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """The id of a call, of a lease or of a sandbox: a call's looks like the others, so each is looked for."""
        whole = search_term.strip()
        if pk := parse_uuid(whole):
            return queryset.filter(Q(call_id__in=[whole, pk.hex]) | Q(holder=pk) | Q(sandbox=pk)), False
        return super().get_search_results(request, queryset, search_term)

    @display(description="Model")
    def asked(self, row: LlmCall) -> SafeString:
        return render_two_lines(format_model_name(row), "" if row.kind == LlmCall.Kind.LLM else format_path(row.path))

    @display(description="Outcome")
    def result(self, row: LlmCall) -> SafeString:
        return render_two_lines(
            render_call_outcome(row), " ".join(filter(None, [str(row.status or ""), format_path(row.code)])) if row.code else ""
        )

    @display(description="Tokens in / out")
    def tokens(self, row: LlmCall) -> str:
        return format_tokens(row)

    @display(description="USD")
    def price(self, row: LlmCall) -> str:
        return format_price(row)

    @display(description="Agent and environment")
    def who(self, row: LlmCall) -> SafeString:
        return render_two_lines(row.agent_did or "–", row.environment_id)

    @display(description="Started", ordering=F("started_at"))
    def when(self, row: LlmCall) -> SafeString | str:
        return render_time_ago(row.started_at)

    @display(description="Took")
    def lasted(self, row: LlmCall) -> str:
        return (
            format_duration(row.ended_at - row.started_at) if row.ended_at and row.outcome != LlmCall.Outcome.REFUSED else "–"
        )

    def page(self, request: HttpRequest, row: LlmCall) -> dict[str, Any]:
        cached = f"{row.cached_tokens:,} of those in cached" if row.cached_tokens else ""
        model = [
            SummaryField("Tokens in / out", format_tokens(row), note=cached),
            SummaryField("USD", format_price(row), note=describe_price_source(row)),
            SummaryField("Seen in the upstream's records", format_seen_at(row.recorded_at)),
        ]
        return {
            "facts": [
                SummaryField("Outcome", render_call_outcome(row), note=format_path(row.code)),
                SummaryField("Answered", row.status or "–", note="HTTP status" if row.status else ""),
                SummaryField(
                    "Model" if row.kind == LlmCall.Kind.LLM else "Kind",
                    format_model_name(row),
                    note="streamed" if row.streamed else "",
                ),
                SummaryField("Path", format_html('<span class="lh-command">{}</span>', format_path(row.path) or "–")),
                *(model if row.kind == LlmCall.Kind.LLM else []),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                SummaryField("Took", self.lasted(row), note=describe_first_byte(row)),
                SummaryField(
                    "Sent / received",
                    f"{format_bytes(row.sent_bytes)} / {format_bytes(row.received_bytes)}",
                    note="by the sandbox",
                ),
                SummaryField("Seen in the proxy's log", format_seen_at(row.logged_at)),
                *(
                    [SummaryField("Sandbox", render_admin_link("sandboxes_sandbox", row.sandbox_id, row.sandbox))]
                    if row.sandbox_id
                    else []
                ),
                *([SummaryField("Run", render_admin_link("sandboxes_run", row.run_id, "run"))] if row.run_id else []),
                self.agent(row.agent_did),
                *([self.holder(row.holder)] if row.holder else []),
            ]
        }


def render_call_outcome(row: LlmCall) -> SafeString:
    return render_badge(OUTCOME_BADGES[LlmCall.Outcome(row.outcome)], row.get_outcome_display())


def format_model_name(row: LlmCall) -> str:
    return "relay" if row.kind == LlmCall.Kind.RELAY else row.model or "–"


def format_seen_at(moment: datetime | None) -> SafeString | str:
    return render_timestamp(moment) if moment else "no"


def describe_first_byte(row: LlmCall) -> str:
    return f"first byte after {format_duration(row.first_byte_at - row.started_at)}" if row.first_byte_at else ""


def format_tokens(row: LlmCall) -> str:
    """What went in and what came out, as far as the upstream has said it."""
    said = ["?" if count is None else f"{count:,}" for count in (row.input_tokens, row.output_tokens)]
    return " / ".join(said) if is_billable(row) else "–"


def format_price(row: LlmCall) -> str:
    if row.cost is None:
        return "unpriced" if is_billable(row) else "–"
    return format_usd(row.cost)


def is_billable(row: LlmCall) -> bool:
    """Whether it went to a model, and is over."""
    return row.kind == LlmCall.Kind.LLM and row.ended_at is not None and row.outcome != LlmCall.Outcome.REFUSED


def describe_price_source(row: LlmCall) -> SafeString | str:
    """Where its price is from; the rate, if it is still the one that makes this price."""
    if row.priced != LlmCall.Priced.RATE:
        return row.get_priced_display() if row.priced else ""
    of = (row.model, row.input_tokens or 0, row.cached_tokens or 0, row.output_tokens or 0, row.started_at)
    rate = model_pricing.find_rate(ModelRate.objects.filter(valid_from__lte=row.started_at), row.model, row.started_at)
    if not isinstance(rate, ModelRate) or model_pricing.calculate_price([rate], *of) != row.cost:
        return "by a rate that has changed since"
    cached = rate.input_usd if rate.cached_usd is None else rate.cached_usd
    said = f"in {format_usd(rate.input_usd)}, cached {format_usd(cached)}, out {format_usd(rate.output_usd)} USD a million"
    return format_html("by rate {}: {}", render_admin_link("sandboxes_modelrate", rate.pk, rate), said)


def build_calls_field(total: CallTotals, label: str = "Model calls", **narrowed: Any) -> SummaryField:
    """How many of some calls there were, and of those how many did not go well. `narrowed` cuts the list down to them."""
    parts = [("failed", total.failed, "lh-link lh-alarm"), ("refused", total.refused, "lh-link")]
    links = [
        (css, build_changelist_url("sandboxes_llmcall", slice=name, kind__exact="llm", **narrowed), f"{number:,}", name)
        for name, number, css in parts
        if number
    ]
    note = format_html_join(", ", '<a class="{}" href="{}">{} {}</a>', links)
    href = build_changelist_url("sandboxes_llmcall", slice="all", kind__exact="llm", **narrowed)
    return SummaryField(label, f"{total.calls:,}", note=note, href=href)


def build_model_cost_field(total: CallTotals, of: Any, *, alarm: bool = False, **narrowed: Any) -> SummaryField:
    """What they cost, and how many of them are not in that sum. `of` says what it is to be measured by."""
    href, number = (
        build_changelist_url("sandboxes_llmcall", slice="unpriced", **narrowed),
        pluralize(total.unpriced, "call", "calls"),
    )
    unpriced = format_html(', <a class="lh-link" href="{}">{} unpriced</a>', href, number) if total.unpriced else ""
    return SummaryField(
        "Spent on models", f"{format_usd(total.spent)} USD", note=format_html("{}{}", of, unpriced), alarm=alarm
    )


def build_tokens_field(total: CallTotals) -> SummaryField:
    note = f"{total.cached_tokens:,} of those in cached" if total.cached_tokens else ""
    return SummaryField("Tokens in / out", f"{total.input_tokens:,} / {total.output_tokens:,}", note=note)
