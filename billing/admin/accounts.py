"""Operators' pages on who pays: accounts, their credits, and the months that were closed."""

from datetime import date, datetime
from decimal import Decimal
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import ChoicesRadioFilter, RelatedDropdownFilter
from unfold.decorators import action, display
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from billing import statements
from billing.admin import members as admin_members
from billing.admin.formatting import build_total_cost_field, format_money_brief, format_quantity_brief
from billing.admin.usage import build_month_filter, get_month
from billing.api.statements import render_lines_csv
from billing.models import HOUSE_ACCOUNT_NAME, Account, BillableItem, CostRecord, Credit, Membership, Statement, StatementLine
from billing.money_sums import nanos_to_decimal, sum_exact
from sandboxes.admin.base import (
    AdminAction,
    ConsoleModelAdmin,
    ListTab,
    ReadOnlyModelAdmin,
    ReasonForm,
    SummaryField,
    build_all_fields_fieldset,
)
from sandboxes.admin.fields import NormalizedDecimalField
from sandboxes.admin.formatting import (
    build_changelist_url,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)

MAX_PANEL_ROWS = 12  # rows of a panel
MAX_LINES_SHOWN = 1000  # of a statement on its page; its file has all


def format_cents(amount: Decimal) -> str:
    return f"{amount:,.2f}"


# --- acts -------------------------------------------------------------------------------------------------------------


class GrantCreditForm(ReasonForm):
    """How much."""

    field_order = ["usd", "reason"]
    usd = NormalizedDecimalField(
        min_value=Decimal("0.01"),
        max_digits=15,
        decimal_places=2,
        label="USD",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
        help_text="The account's next statements use it up before anything is to be paid.",
    )


class CloseMonthForm(ReasonForm):
    """Which month."""

    field_order = ["month", "reason"]
    month = forms.TypedChoiceField(coerce=date.fromisoformat, label="Month", widget=UnfoldAdminSelectWidget())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raw = unquote(self.object_id or "")
        account = Account.objects.filter(pk=raw).first() if raw.isascii() and raw.isdigit() and len(raw) < 19 else None
        months = statements.find_open_months(account, now=timezone.now()) if account else []
        field: Any = self.fields["month"]
        field.choices = [(month.isoformat(), f"{month:%Y-%m}") for month in months[:1]]
        field.help_text = "Months are closed in their order." if months else "No month is open."


def _grant_credit(account: Account, actor: str, why: str, now: datetime, usd: Decimal) -> bool:
    statements.grant_credit(account, usd, now=now, actor=actor, reason=why)
    return True


def _close_month(account: Account, actor: str, why: str, now: datetime, month: date) -> bool:
    return statements.close_month(account, month, now=now, actor=actor)[1]


def _reverse_credit(credit: Credit, actor: str, why: str, now: datetime) -> bool:
    return statements.reverse_credit(credit.pk, now=now, actor=actor, reason=why)


GRANT_CREDIT_ACTION = AdminAction(
    title="Grant credit",
    warning="It is booked for good. What is left of it can be taken back by another entry.",
    done="given credit",
    refusal_reason="given nothing",
    legal=lambda account: True,
    verb=_grant_credit,
    form=GrantCreditForm,
)
CLOSE_MONTH_ACTION = AdminAction(
    title="Close month",
    warning="Its statement is made and never changes. What is priced otherwise later is a correction on the next one.",
    done="given the statement of that month",
    refusal_reason="that month was closed before",
    legal=lambda account: bool(statements.find_open_months(account, now=timezone.now())),
    verb=_close_month,
    form=CloseMonthForm,
)
REVERSE_CREDIT_ACTION = AdminAction(
    title="Take back",
    warning="What is left of it is booked off. What statements have used of it stays used.",
    done="taken back",
    refusal_reason="nothing is left of it",
    legal=lambda credit: (
        credit.kind == Credit.Kind.GRANT and statements.get_remaining_credits(credit.account).get(credit.pk, 0) > 0
    ),
    verb=_reverse_credit,
)


# --- accounts ---------------------------------------------------------------------------------------------------------


@admin.register(Account)
class AccountAdmin(ConsoleModelAdmin):
    list_display = ["who", "members", "month", "balance", "closed"]
    search_fields = ["name__startswith", "title__startswith"]
    search_help_text = "Name or title, or its beginning"
    ordering = ["name"]
    fields = ["name", "title"]
    change_form_outer_after_template = "admin/billing/account/books.html"
    acts = {"close_month": CLOSE_MONTH_ACTION, "grant_credit": GRANT_CREDIT_ACTION}
    actions_detail = ["close_month", "grant_credit"]

    def get_readonly_fields(self, request: HttpRequest, obj: Account | None = None) -> list[str]:
        return ["name"] if obj else []  # scripts call it by its name

    def complete(self, rows: list[Account]) -> None:
        pks = [row.pk for row in rows]
        present = Membership.objects.on(admin_members.get_today()).filter(account__in=pks)
        members = dict(present.order_by().values_list("account").annotate(Count("pk")))
        spent = CostRecord.objects.filter(build_month_filter(get_month(timezone.now())), account__in=pks).order_by()
        costs = {
            account: nanos_to_decimal(nano) for account, nano in spent.values_list("account").annotate(nano=sum_exact("usd"))
        }
        closed = Statement.objects.filter(account__in=pks).order_by("account", "month").values_list("account", "month")
        last, credit = dict(closed), statements.get_balances()
        for row in rows:
            row.counted = members.get(row.pk, 0)  # type: ignore[attr-defined]
            row.spent = costs.get(row.pk, Decimal(0))  # type: ignore[attr-defined]
            row.credit = credit.get(row.pk, Decimal(0))  # type: ignore[attr-defined]
            row.last = last.get(row.pk)  # type: ignore[attr-defined]

    @display(description="Account")
    def who(self, row: Account) -> SafeString | str:
        return render_two_lines(row.name, row.title) if row.title else row.name

    @display(description="Members")
    def members(self, row: Account) -> str:
        return "all others" if row.name == HOUSE_ACCOUNT_NAME else f"{row.counted:,}"  # type: ignore[attr-defined]

    @display(description="USD this month")
    def month(self, row: Account) -> str:
        return format_money_brief(row.spent)  # type: ignore[attr-defined]

    @display(description="Credit left, USD")
    def balance(self, row: Account) -> str:
        return format_cents(row.credit)  # type: ignore[attr-defined]

    @display(description="Closed up to")
    def closed(self, row: Account) -> str:
        return f"{row.last:%Y-%m}" if row.last else "–"  # type: ignore[attr-defined]

    def page(self, request: HttpRequest, row: Account) -> dict[str, Any]:
        now = timezone.now()
        rest, months = statements.get_remaining_credits(row), statements.find_open_months(row, now=now)
        members = Membership.objects.on(admin_members.get_today()).filter(account=row).count()
        closed = Statement.objects.filter(account=row).order_by("-month")
        credits_ = Credit.objects.filter(account=row).order_by("-pk")[: MAX_PANEL_ROWS + 1]
        this = build_total_cost_field(account__id__exact=row.pk, day__gte=get_month(now))
        return {
            "facts": [
                SummaryField(
                    "This month so far",
                    this.value,
                    href=build_changelist_url("billing_costrecord", slice="month", account__id__exact=row.pk),
                ),
                SummaryField(
                    "Members",
                    "all others" if row.name == HOUSE_ACCOUNT_NAME else f"{members:,}",
                    href=build_changelist_url("billing_membership", slice="now", account__id__exact=row.pk),
                    note="who is in no other account" if row.name == HOUSE_ACCOUNT_NAME else "today",
                ),
                SummaryField(
                    "Credit left",
                    f"{format_cents(sum(rest.values(), Decimal(0)))} USD",
                    href=_build_account_url("billing_credit", row),
                ),
                SummaryField(
                    "Months to close",
                    ", ".join(f"{month:%Y-%m}" for month in months[:3]) or "none",
                    note=f"and {len(months) - 3} more" if len(months) > 3 else "",
                ),
                SummaryField("Spending", "by day", href=reverse("spending", query={"account": row.name})),
            ],
            "members": [*admin_members.list_members(row, MAX_PANEL_ROWS + 1)],
            "new_member": reverse("admin:billing_membership_add", query={"account": row.pk}),
            "may_add_members": request.user.has_perm("billing.add_membership"),
            "all_members": build_changelist_url("billing_membership", slice="all", account__id__exact=row.pk),
            "credits": [(each, format_cents(each.usd), _format_credit_left(each, rest)) for each in credits_],
            "all_credits": _build_account_url("billing_credit", row),
            "statements": [(each, format_cents(each.total)) for each in closed[: MAX_PANEL_ROWS + 1]],
            "all_statements": _build_account_url("billing_statement", row),
            "most": MAX_PANEL_ROWS,
        }

    def has_credit_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.add_credit")

    def has_close_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.close_statement")

    @action(description="Close month…", permissions=["close"], icon="task_alt", dialog=CLOSE_MONTH_ACTION.dialog)
    def close_month(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, CLOSE_MONTH_ACTION, form)

    @action(description="Grant credit…", permissions=["credit"], icon="redeem", dialog=GRANT_CREDIT_ACTION.dialog)
    def grant_credit(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, GRANT_CREDIT_ACTION, form)


def _build_account_url(model: str, account: Account) -> str:
    return build_changelist_url(model, account__id__exact=account.pk)


def _format_credit_left(credit: Credit, rest: dict[int, Decimal]) -> str:
    if credit.kind == Credit.Kind.REVERSAL:
        return "taken back"
    return f"{format_cents(rest[credit.pk])} left" if rest[credit.pk] else "nothing left"


# --- what is booked ---------------------------------------------------------------------------------------------------


@admin.register(Credit)
class CreditAdmin(ReadOnlyModelAdmin):
    list_display = ["entry", "amount", "reason", "actor", "booked"]
    list_filter = [("account", RelatedDropdownFilter), ("kind", ChoicesRadioFilter)]
    list_select_related = ["account"]
    search_fields = ["account__name__startswith"]
    search_help_text = "Account, or its beginning"
    ordering = ["-at", "-pk"]
    slices = {"all": ListTab("All", "No account was given credit yet. That is done on the account's page.")}
    fieldsets = build_all_fields_fieldset("account", "kind", "usd", "at", "reason", "actor", "reversed")
    acts = {"take_back": REVERSE_CREDIT_ACTION}
    actions_detail = ["take_back"]

    @display(description="Account")
    def entry(self, row: Credit) -> SafeString:
        return render_two_lines(row.account, row.get_kind_display())

    @display(description="USD")
    def amount(self, row: Credit) -> str:
        return format_cents(row.usd)

    @display(description="Booked")
    def booked(self, row: Credit) -> SafeString | str:
        return render_time_ago(row.at)

    def page(self, request: HttpRequest, row: Credit) -> dict[str, Any]:
        rest = statements.get_remaining_credits(row.account).get(row.pk)
        back = Credit.objects.filter(reversed=row).first()
        kind = render_badge("ok", "granted") if row.kind == Credit.Kind.GRANT else render_badge("skipped", "taken back")
        return {
            "facts": [
                SummaryField("Account", render_admin_link("billing_account", row.account_id, row.account)),
                SummaryField("USD", format_cents(row.usd), note=kind),
                *(
                    [SummaryField("Left of it", f"{format_cents(rest)} USD", note="the oldest is used first")]
                    if rest is not None
                    else []
                ),
                *(
                    [
                        SummaryField(
                            "Taken back",
                            render_admin_link("billing_credit", back.pk, render_time_ago(back.at)),
                            note=back.reason,
                        )
                    ]
                    if back
                    else []
                ),
                *(
                    [SummaryField("Takes back", render_admin_link("billing_credit", row.reversed_id, row.reversed))]
                    if row.reversed_id
                    else []
                ),
                SummaryField("Booked", render_time_ago(row.at), note=render_timestamp(row.at)),
                SummaryField("By", row.actor, note=row.reason),
            ]
        }

    def has_book_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.add_credit")

    @action(description="Take back…", permissions=["book"], icon="undo", dialog=REVERSE_CREDIT_ACTION.dialog)
    def take_back(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, REVERSE_CREDIT_ACTION, form)


@admin.register(Statement)
class StatementAdmin(ReadOnlyModelAdmin):
    list_display = ["of", "before", "credit", "amount_due", "line_count", "closed"]
    list_filter = [("account", RelatedDropdownFilter)]
    list_select_related = ["account"]
    search_fields = ["account__name__startswith"]
    search_help_text = "Account, or its beginning"
    ordering = ["-month", "-pk"]
    slices = {"all": ListTab("All", "No month is closed yet. That is done on an account's page, once the month is over.")}
    fieldsets = build_all_fields_fieldset("account", "month", "closed_at", "closed_by", "subtotal", "credit_used", "total")
    change_form_outer_before_template = "admin/billing/statement/paper.html"

    def complete(self, rows: list[Statement]) -> None:
        found = StatementLine.objects.filter(statement__in=[row.pk for row in rows]).order_by()
        counts = dict(found.values_list("statement").annotate(Count("pk")))
        for row in rows:
            row.number = counts.get(row.pk, 0)  # type: ignore[attr-defined]

    def get_urls(self) -> list[URLPattern]:
        lines = self.admin_site.admin_view(self.lines)
        return [path("<int:pk>/lines.csv", lines, name="billing_statement_lines"), *super().get_urls()]

    def lines(self, request: HttpRequest, pk: int) -> HttpResponse:
        """All lines of a statement, as a file."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = get_object_or_404(Statement.objects.select_related("account"), pk=pk)
        name = f"{row.account.name}-{row.month:%Y-%m}.csv"
        return HttpResponse(
            render_lines_csv(row.lines.all()),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    @display(description="Account and month")
    def of(self, row: Statement) -> SafeString:
        return render_two_lines(row.account, f"{row.month:%Y-%m}")

    @display(description="Subtotal, USD")
    def before(self, row: Statement) -> str:
        return format_cents(row.subtotal)

    @display(description="Credit used")
    def credit(self, row: Statement) -> str:
        return format_cents(row.credit_used) if row.credit_used else "–"

    @display(description="To pay, USD")
    def amount_due(self, row: Statement) -> str:
        return format_cents(row.total)

    @display(description="Lines")
    def line_count(self, row: Statement) -> str:
        return f"{row.number:,}"  # type: ignore[attr-defined]

    @display(description="Closed")
    def closed(self, row: Statement) -> SafeString:
        return render_two_lines(render_time_ago(row.closed_at), f"by {row.closed_by}")

    def page(self, request: HttpRequest, row: Statement) -> dict[str, Any]:
        lines, number = [*row.lines.all()[:MAX_LINES_SHOWN]], row.lines.count()
        return {
            "lines": f"{number:,} lines" if number > len(lines) else "",
            "shown": f"{len(lines):,}",
            "file": reverse("admin:billing_statement_lines", args=[row.pk]),
            "usage": [_build_line(line) for line in lines if line.kind == StatementLine.Kind.USAGE],
            "corrections": [_build_line(line) for line in lines if line.kind == StatementLine.Kind.CORRECTION],
            "account": row.account,
            "account_link": render_admin_link("billing_account", row.account_id, row.account),
            "subtotal": format_cents(row.subtotal),
            "credit_used": format_cents(-row.credit_used) if row.credit_used else "",
            "total": format_cents(row.total),
            "back": row.total < 0,
            "costs": build_changelist_url(
                "billing_costrecord", slice="all", account__id__exact=row.account_id, day_from=row.month,
                day_to=statements.last_day_of_month(row.month),
            ),
        }  # fmt: skip


def _build_line(line: StatementLine) -> dict[str, Any]:
    return {
        "agent": line.agent_did or "no agent",
        "provider": line.provider or "–",
        "item": BillableItem(line.item).label,
        "month": f"{line.for_month:%Y-%m}",
        "quantity": format_quantity_brief(line.quantity),
        "usd": format_cents(line.usd),
    }


__all__ = ["AccountAdmin", "CreditAdmin", "StatementAdmin"]
