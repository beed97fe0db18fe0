"""Console pages of LLM and relay calls through the egress proxy."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest
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

from sandboxes.admin.base.changelist import ListTab, parse_uuid
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_duration,
    format_usd,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.db import database_time
from sandboxes.egress import model_pricing
from sandboxes.egress.amounts import REFUSED_CODES
from sandboxes.egress.logs import upstream_records
from sandboxes.egress.totals import IS_FAILED, IS_REFUSED, IS_UNPRICED, CallTotals
from sandboxes.formatting import format_bytes, format_path, pluralize
from sandboxes.models import LlmCall, TokenKind, TokenRate

OUTCOME_BADGES = {
    LlmCall.Outcome.OPEN: "open",
    LlmCall.Outcome.OK: "ok",
    LlmCall.Outcome.FAILED: "failed",
    LlmCall.Outcome.CUT: "cut",
    LlmCall.Outcome.LOST: "lost",
    LlmCall.Outcome.REFUSED: "refused",
}


class StartedWithinFilter(RadioFilter):
    """Filter by time since the start. Other pages link by its values."""

    title = "time since it started"
    parameter_name = "since"
    lengths = {"1h": timedelta(hours=1), "1d": timedelta(days=1), "7d": timedelta(days=7), "30d": timedelta(days=30)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("1h", "Last hour"), ("1d", "Last 24 hours"), ("7d", "Last 7 days"), ("30d", "Last 30 days")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        length = self.lengths.get(self.value() or "")
        return queryset.filter(started_at__gte=database_time.now() - length) if length else queryset


class StartedBetweenFilter(RangeDateTimeFilter):
    """Filter by start between two UTC moments. A date without a time means the beginning or the end of that day."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.title = "start (UTC)"

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        first, last = self._parse_bound("from", time.min), self._parse_bound("to", time.max)
        queryset = queryset.filter(started_at__gte=first) if first else queryset
        return queryset.filter(started_at__lte=last) if last else queryset

    def _parse_bound(self, bound: str, default: time) -> datetime | None:
        day, at = (str(self.used_parameters.get(f"{self.parameter_name}_{bound}_{part}") or "") for part in (0, 1))
        try:
            parsed: date | None = parse_date(day)
            clock = parse_time(at) if at else default
        except ValueError:
            return None
        return datetime.combine(parsed, clock, UTC) if parsed and clock else None


class PriceSourceFilter(RadioFilter):
    """Filter by source of the price."""

    title = "price"
    parameter_name = "price"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        sources = [(value, label.capitalize()) for value, label in LlmCall.Priced.choices if value]
        return [*sources, ("none", "Unpriced")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        if self.value() == "none":
            return queryset.filter(IS_UNPRICED)
        return queryset.filter(priced=self.value()) if self.value() in LlmCall.Priced.values else queryset


class TextLookupFilter(TextFilter):
    """Filter with a text box for one lookup."""

    lookup = ""

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        value = (self.value() or "").replace("\0", "").strip()  # PostgreSQL rejects NUL in text
        return queryset.filter(**{self.lookup: value}) if value else queryset


class ModelNameFilter(TextLookupFilter):
    title, parameter_name, lookup = "model (prefix)", "called", "model__startswith"


class ErrorCodeFilter(TextLookupFilter):
    title, parameter_name, lookup = "error code", "code", "code"


class HttpStatusFilter(TextLookupFilter):
    title, parameter_name, lookup = "HTTP status", "status", "status"

    def queryset(self, request: HttpRequest, queryset: QuerySet[LlmCall]) -> QuerySet[LlmCall]:
        value = (self.value() or "").strip()
        if value and not (value.isascii() and value.isdigit() and len(value) == 3):
            return queryset.none()
        return super().queryset(request, queryset)


@admin.register(LlmCall)
class LlmCallAdmin(ReadOnlyModelAdmin):
    list_display = ["call_label", "result", "tokens", "price", "agent_label", "start_time", "lasted"]
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
    search_help_text = "Agent, environment or model (prefix), or a complete id"
    ordering = ["-started_at", "-pk"]
    list_tabs = {
        "all": ListTab("All", "No model calls yet. Each call through the egress proxy is recorded here."),
        "open": ListTab("In progress", "No calls in progress.", lambda now: Q(ended_at__isnull=True)),
        "failed": ListTab("Failed", "No failed calls: none failed, was interrupted or lost.", lambda now: IS_FAILED),
        "refused": ListTab("Refused", "No refused calls.", lambda now: IS_REFUSED),
        "unpriced": ListTab("Unpriced", "No unpriced calls: the cost of every call is known.", lambda now: IS_UNPRICED),
        "unmetered": ListTab(
            "Unmetered",
            "No unmetered calls: every answered call is in the upstream's records.",
            lambda now: Q(pk__in=upstream_records.find_unmetered(now).values("pk")),
        ),
    }
    fieldsets = build_all_fields_fieldset(
        "call_id", "kind", "sandbox", "holder", "agent_did", "environment_id", "run", "path", "model", "streamed", "started_at",
        "deadline_at", "first_byte_at", "ended_at", "outcome", "status", "code", "sent_bytes", "received_bytes", "logged_at",
        "recorded_at", "input_tokens", "cached_tokens", "output_tokens", "cost", "priced",
        "requested_model", "service_tier", "token_counts", "usage", "reserved", "rate_ids",
        "tokens", "reserved_tokens", "recorded_attempts",
    )  # fmt: skip

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search all id columns for a complete id: ids of calls, leases and sandboxes have the same form."""
        text = search_term.strip()
        if pk := parse_uuid(text):
            return queryset.filter(Q(call_id__in=[text, pk.hex]) | Q(holder=pk) | Q(sandbox=pk)), False
        return super().get_search_results(request, queryset, search_term)

    @display(description="Model")
    def call_label(self, row: LlmCall) -> SafeString:
        return render_two_lines(format_model_name(row), "" if row.kind == LlmCall.Kind.LLM else format_path(row.path))

    @display(description="Result")
    def result(self, row: LlmCall) -> SafeString:
        return render_two_lines(
            render_call_outcome(row), " ".join(filter(None, [str(row.status or ""), format_path(row.code)])) if row.code else ""
        )

    @display(description="Tokens in / out")
    def tokens(self, row: LlmCall) -> str:
        return format_tokens(row)

    @display(description="USD")
    def price(self, row: LlmCall) -> SafeString:
        return render_two_lines(format_price(row), "estimated" if row.priced == LlmCall.Priced.ESTIMATE else "")

    @display(description="Agent and environment")
    def agent_label(self, row: LlmCall) -> SafeString:
        return render_two_lines(row.agent_did or "–", row.environment_id)

    @display(description="Started", ordering=F("started_at"))
    def start_time(self, row: LlmCall) -> SafeString | str:
        return render_time_ago(row.started_at)

    @display(description="Duration")
    def lasted(self, row: LlmCall) -> str:
        return (
            format_duration(row.ended_at - row.started_at) if row.ended_at and row.outcome != LlmCall.Outcome.REFUSED else "–"
        )

    def get_page_context(self, request: HttpRequest, row: LlmCall) -> dict[str, Any]:
        cached = f"{row.cached_tokens:,} input tokens cached" if row.cached_tokens else ""
        usage = [
            SummaryField("Tokens in / out", format_tokens(row), note=cached),
            SummaryField("USD", format_price(row), note=describe_price_source(row)),
            SummaryField("In upstream records", format_seen_at(row.recorded_at)),
        ]
        return {
            "facts": [
                SummaryField("Result", render_call_outcome(row), note=format_path(row.code)),
                SummaryField("HTTP status", row.status or "–"),
                SummaryField(
                    "Model" if row.kind == LlmCall.Kind.LLM else "Kind",
                    format_model_name(row),
                    note="streamed" if row.streamed else "",
                ),
                SummaryField("Path", format_html('<span class="lh-command">{}</span>', format_path(row.path) or "–")),
                *(usage if row.kind == LlmCall.Kind.LLM else []),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                SummaryField("Duration", self.lasted(row), note=describe_first_byte(row)),
                SummaryField(
                    "Sent / received",
                    f"{format_bytes(row.sent_bytes)} / {format_bytes(row.received_bytes)}",
                    note="by the sandbox",
                ),
                SummaryField("In proxy log", format_seen_at(row.logged_at)),
                *(
                    [SummaryField("Sandbox", render_admin_link("sandboxes_sandbox", row.sandbox_id, row.sandbox))]
                    if row.sandbox_id
                    else []
                ),
                *([SummaryField("Run", render_admin_link("sandboxes_run", row.run_id, "run"))] if row.run_id else []),
                build_agent_field(row.agent_did),
                *([build_holder_field(row.holder)] if row.holder else []),
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
    """Format input and output tokens, "?" for a count that the upstream did not report."""
    counts = ["?" if count is None else f"{count:,}" for count in (row.input_tokens, row.output_tokens)]
    return " / ".join(counts) if is_billable(row) else "–"


def format_price(row: LlmCall) -> str:
    """Format the cost in USD, "unpriced" if it is not known, a dash if there is none."""
    if row.cost is None:
        return "unpriced" if is_billable(row) else "–"
    return format_usd(row.cost)


def is_billable(row: LlmCall) -> bool:
    """Return whether the call reached a model and has ended."""
    return row.kind == LlmCall.Kind.LLM and row.ended_at is not None and row.outcome != LlmCall.Outcome.REFUSED


def describe_price_source(row: LlmCall) -> SafeString | str:
    """Name the source of the price, and for each kind of tokens the count, the rate and a link to it."""
    source = row.get_priced_display() if row.priced else ""
    if row.cost is None and is_billable(row):
        return describe_missing_rate(row)
    if not row.rate_ids:
        return f"{source} of a version that did not keep its rows" if row.priced == LlmCall.Priced.RATE else source
    book = model_pricing.RateBook(TokenRate.objects.filter(pk__in=row.rate_ids))
    lines = format_html_join(", ", "{}", [(render_price_line(line),) for line in get_price_lines(row, book)])
    return format_html("{}: {}", source, lines)


def get_price_lines(row: LlmCall, book: model_pricing.RateBook) -> list[model_pricing.PriceLine]:
    return book.list_lines(model_pricing.get_counts(row), row.service_tier)


def describe_missing_rate(row: LlmCall) -> str:
    """Say why an unpriced call has no price by rate."""
    names = model_pricing.find_candidate_names(row.model, row.requested_model)
    book = model_pricing.load_rates(names, at=row.started_at)
    if not book.rows:
        return f"no rate for {' or '.join(names)}" if names else ""
    return "" if row.code in REFUSED_CODES else f"the rates for {book.pattern} apply once the usage is known"


def render_price_line(line: model_pricing.PriceLine) -> SafeString:
    """Render one kind of a price: the count, and the price with the rate it comes from."""
    label = TokenKind(line.kind).label if line.kind in TokenKind.values else line.kind
    if line.rate is None:
        return format_html("{} {} without a rate", f"{line.count:,}", label)
    price = f"{format_usd(line.rate.stated_usd)} USD per {line.rate.unit_name}"
    link = render_admin_link("sandboxes_tokenrate", line.rate.pk, line.rate)
    return format_html("{} {} at {} ({})", f"{line.count:,}", label, price, link)


def build_calls_field(total: CallTotals, label: str = "Model calls", **filters: Any) -> SummaryField:
    """Build the number of calls with failed and refused ones. `filters` narrow the linked list to the same calls."""
    parts = [("failed", total.failed, "lh-link lh-alarm"), ("refused", total.refused, "lh-link")]
    links = [
        (css, build_changelist_url("sandboxes_llmcall", slice=name, kind__exact="llm", **filters), f"{number:,}", name)
        for name, number, css in parts
        if number
    ]
    note = format_html_join(", ", '<a class="{}" href="{}">{} {}</a>', links)
    href = build_changelist_url("sandboxes_llmcall", slice="all", kind__exact="llm", **filters)
    return SummaryField(label, f"{total.calls:,}", note=note, href=href)


def build_model_cost_field(total: CallTotals, note: Any, *, alarm: bool = False, **filters: Any) -> SummaryField:
    """Build the cost of calls after a note, such as a limit, with the number of unpriced calls not in the sum."""
    href, number = (
        build_changelist_url("sandboxes_llmcall", slice="unpriced", **filters),
        pluralize(total.unpriced, "call", "calls"),
    )
    unpriced = format_html(', <a class="lh-link" href="{}">{} unpriced</a>', href, number) if total.unpriced else ""
    estimated = f", {format_usd(total.estimated)} estimated" if total.estimated else ""
    text = format_html("{}{}{}", note, estimated, unpriced)
    return SummaryField("Model cost", f"{format_usd(total.spent)} USD", note=text, alarm=alarm)


def build_tokens_field(total: CallTotals) -> SummaryField:
    parts = ((total.cached_tokens, "cached"), (total.cache_written_tokens, "written to the cache"))
    notes = [f"{count:,} input tokens {label}" for count, label in parts if count]
    if total.estimated_tokens:
        notes.append(f"{total.estimated_tokens:,} further tokens estimated")
    note = ", ".join(notes)
    return SummaryField("Tokens in / out", f"{total.input_tokens:,} / {total.output_tokens:,}", note=note)
