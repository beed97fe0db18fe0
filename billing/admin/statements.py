"""Console pages of statements."""

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Count
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import RelatedDropdownFilter
from unfold.decorators import display

from billing import statements
from billing.admin.formatting import describe_tokens, format_cents, format_quantity
from billing.api.focus import build_csv_response
from billing.api.statements import find_lines, render_lines_csv
from billing.focus.export import AccountMonth
from billing.model_sums import TokenCounts
from billing.models import BillableItem, Statement, StatementLine
from billing.pricing import format_decimal
from billing.uncertainty import Uncertainty
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import build_changelist_url, render_admin_link, render_time_ago, render_two_lines
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset

MAX_LINES_SHOWN = 1000  # of a statement on its page; the CSV file has all


@admin.register(Statement)
class StatementAdmin(ReadOnlyModelAdmin):
    list_display = ["of", "before", "credit", "amount_due", "line_count", "closed"]
    list_filter = [("account", RelatedDropdownFilter)]
    list_select_related = ["account"]
    search_fields = ["account__name__startswith"]
    search_help_text = "Account (prefix)"
    ordering = ["-month", "-pk"]
    list_tabs = {"all": ListTab("All", "No statements yet. Close a month on an account's page once the month is over.")}
    fieldsets = build_all_fields_fieldset(
        "account", "month", "closed_at", "closed_by", "subtotal", "credit_used", "total", "unpriced", "estimated_usd"
    )
    change_form_outer_before_template = "admin/billing/statement/document.html"

    def annotate_rows(self, rows: list[Statement]) -> None:
        lines = StatementLine.objects.filter(statement__in=[row.pk for row in rows]).order_by()
        counts = dict(lines.values_list("statement").annotate(Count("pk")))
        for row in rows:
            row.number = counts.get(row.pk, 0)  # type: ignore[attr-defined]

    def get_urls(self) -> list[URLPattern]:
        lines = self.admin_site.admin_view(self.download_lines)
        focus = self.admin_site.admin_view(self.download_focus)
        return [
            path("<int:pk>/lines.csv", lines, name="billing_statement_lines"),
            path("<int:pk>/focus.csv", focus, {"daily": False}, name="billing_statement_focus"),
            path("<int:pk>/focus-daily.csv", focus, {"daily": True}, name="billing_statement_focus_daily"),
            *super().get_urls(),
        ]

    def download_lines(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Send all lines of a statement as CSV."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = get_object_or_404(Statement.objects.select_related("account"), pk=pk)
        name = f"{row.account.name}-{row.month:%Y-%m}.csv"
        return HttpResponse(
            render_lines_csv(find_lines(row)),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    def download_focus(self, request: HttpRequest, pk: int, daily: bool) -> StreamingHttpResponse:
        """Send the month of a statement in the FOCUS format."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = get_object_or_404(Statement.objects.select_related("account"), pk=pk)
        return build_csv_response(AccountMonth.of(row), daily=daily)

    @display(description="Account and month")
    def of(self, row: Statement) -> SafeString:
        return render_two_lines(row.account, f"{row.month:%Y-%m}")

    @display(description="Subtotal, USD")
    def before(self, row: Statement) -> str:
        return format_cents(row.subtotal)

    @display(description="Credit used")
    def credit(self, row: Statement) -> str:
        return format_cents(row.credit_used) if row.credit_used else "–"

    @display(description="Amount due, USD")
    def amount_due(self, row: Statement) -> SafeString | str:
        return render_two_lines(format_cents(row.total), row.uncertainty) if row.uncertainty else format_cents(row.total)

    @display(description="Lines")
    def line_count(self, row: Statement) -> str:
        return f"{row.number:,}"  # type: ignore[attr-defined]

    @display(description="Closed")
    def closed(self, row: Statement) -> SafeString:
        return render_two_lines(render_time_ago(row.closed_at), f"by {row.closed_by}")

    def get_page_context(self, request: HttpRequest, row: Statement) -> dict[str, Any]:
        lines, number = [*find_lines(row)[:MAX_LINES_SHOWN]], row.lines.count()
        return {
            "lines": f"{number:,} lines" if number > len(lines) else "",
            "shown": f"{len(lines):,}",
            "file": reverse("admin:billing_statement_lines", args=[row.pk]),
            "focus_file": reverse("admin:billing_statement_focus", args=[row.pk]),
            "focus_daily_file": reverse("admin:billing_statement_focus_daily", args=[row.pk]),
            "usage": [_build_line(line) for line in lines if line.kind == StatementLine.Kind.USAGE],
            "corrections": [_build_line(line) for line in lines if line.kind == StatementLine.Kind.CORRECTION],
            "account": row.account,
            "account_link": render_admin_link("billing_account", row.account_id, row.account),
            "subtotal": format_cents(row.subtotal),
            "credit_used": format_cents(-row.credit_used) if row.credit_used else "",
            "total": format_cents(row.total),
            "uncertainty": row.uncertainty,
            "is_refund": row.total < 0,
            "costs": build_changelist_url(
                "billing_costrecord", slice="all", account__id__exact=row.account_id, day_from=row.month,
                day_to=statements.last_day_of_month(row.month),
            ),
        }  # fmt: skip


def _describe_uncertainty(line: StatementLine) -> str:
    """Describe the uncertainty of a line, with a sign in a correction."""
    if line.kind == StatementLine.Kind.USAGE:
        return str(Uncertainty(line.unpriced, line.estimated_usd))
    estimated = f"{line.estimated_usd:+,f} USD estimated" if line.estimated_usd else ""
    unpriced = f"{line.unpriced:+,} calls without a price" if line.unpriced else ""
    return ", ".join(filter(None, (estimated, unpriced)))


def _describe_tokens(line: StatementLine) -> str:
    return describe_tokens(TokenCounts.of(line), signed=line.kind == StatementLine.Kind.CORRECTION)


def _build_line(line: StatementLine) -> dict[str, Any]:
    return {
        "agent": line.agent_did or "no agent",
        "provider": line.provider or "–",
        "model": line.model,
        "item": line.model or BillableItem(line.item).label,
        "month": f"{line.for_month:%Y-%m}",
        "quantity": format_quantity(line.quantity),
        "free": format_quantity(line.free) if line.free else "–",
        "note": ", ".join(filter(None, (_describe_tokens(line), _describe_uncertainty(line)))),
        "rate": format_decimal(line.rate.usd) if line.rate else "as stated" if line.item == BillableItem.LLM else "–",
        "rate_from": f"from {line.rate.valid_from:%Y-%m-%d %H:%M}" if line.rate else "",
        "usd": format_cents(line.usd),
    }
