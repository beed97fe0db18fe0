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
from billing.admin.formatting import brief, cost_so_far, short
from billing.admin.usage import month_of, of_month
from billing.api.serializers_statements import lines_to_csv
from billing.models import HOUSE, Account, CostRecord, Credit, Membership, Priced, Statement, StatementLine
from billing.money_sums import exactly, nano_usd
from sandboxes.admin.base import Act, Fact, Facts, Page, Reason, Slice, all_fields
from sandboxes.admin.fields import Amount
from sandboxes.admin.formatting import ago, badge, link, rows, stamp, two

MOST = 12  # rows of a panel
LINES = 1000  # of a statement on its page; its file has all


def cents(amount: Decimal) -> str:
    return f"{amount:,.2f}"


# --- acts -------------------------------------------------------------------------------------------------------------


class Grant(Reason):
    """How much."""

    field_order = ["usd", "reason"]
    usd = Amount(
        min_value=Decimal("0.01"),
        max_digits=15,
        decimal_places=2,
        label="USD",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
        help_text="The account's next statements use it up before anything is to be paid.",
    )


class Month(Reason):
    """Which month."""

    field_order = ["month", "reason"]
    month = forms.TypedChoiceField(coerce=date.fromisoformat, label="Month", widget=UnfoldAdminSelectWidget())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raw = unquote(self.object_id or "")
        account = Account.objects.filter(pk=raw).first() if raw.isascii() and raw.isdigit() and len(raw) < 19 else None
        months = statements.open_months(account, now=timezone.now()) if account else []
        field: Any = self.fields["month"]
        field.choices = [(month.isoformat(), f"{month:%Y-%m}") for month in months[:1]]
        field.help_text = "Months are closed in their order." if months else "No month is open."


def _grant(account: Account, actor: str, why: str, now: datetime, usd: Decimal) -> bool:
    statements.grant(account, usd, now=now, actor=actor, reason=why)
    return True


def _close(account: Account, actor: str, why: str, now: datetime, month: date) -> bool:
    return statements.close(account, month, now=now, actor=actor)[1]


def _take_back(credit: Credit, actor: str, why: str, now: datetime) -> bool:
    return statements.reverse(credit.pk, now=now, actor=actor, reason=why)


GRANT = Act(
    title="Grant credit",
    warning="It is booked for good. What is left of it can be taken back by another entry.",
    done="given credit",
    illegal="given nothing",
    legal=lambda account: True,
    verb=_grant,
    form=Grant,
)
CLOSE = Act(
    title="Close month",
    warning="Its statement is made and never changes. What is priced otherwise later is a correction on the next one.",
    done="given the statement of that month",
    illegal="that month was closed before",
    legal=lambda account: bool(statements.open_months(account, now=timezone.now())),
    verb=_close,
    form=Month,
)
TAKE_BACK = Act(
    title="Take back",
    warning="What is left of it is booked off. What statements have used of it stays used.",
    done="taken back",
    illegal="nothing is left of it",
    legal=lambda credit: credit.kind == Credit.Kind.GRANT and statements.left(credit.account).get(credit.pk, 0) > 0,
    verb=_take_back,
)


# --- accounts ---------------------------------------------------------------------------------------------------------


@admin.register(Account)
class AccountAdmin(Page):
    list_display = ["who", "members", "month", "balance", "closed"]
    search_fields = ["name__startswith", "title__startswith"]
    search_help_text = "Name or title, or its beginning"
    ordering = ["name"]
    fields = ["name", "title"]
    change_form_outer_after_template = "admin/billing/account/books.html"
    acts = {"close_month": CLOSE, "grant_credit": GRANT}
    actions_detail = ["close_month", "grant_credit"]

    def get_readonly_fields(self, request: HttpRequest, obj: Account | None = None) -> list[str]:
        return ["name"] if obj else []  # scripts call it by its name

    def complete(self, rows: list[Account]) -> None:
        pks = [row.pk for row in rows]
        present = Membership.objects.on(admin_members.today()).filter(account__in=pks)
        members = dict(present.order_by().values_list("account").annotate(Count("pk")))
        spent = CostRecord.objects.filter(of_month(month_of(timezone.now())), account__in=pks).order_by()
        costs = {account: nano_usd(nano) for account, nano in spent.values_list("account").annotate(nano=exactly("usd"))}
        closed = Statement.objects.filter(account__in=pks).order_by("account", "month").values_list("account", "month")
        last, credit = dict(closed), statements.balances()
        for row in rows:
            row.counted = members.get(row.pk, 0)  # type: ignore[attr-defined]
            row.spent = costs.get(row.pk, Decimal(0))  # type: ignore[attr-defined]
            row.credit = credit.get(row.pk, Decimal(0))  # type: ignore[attr-defined]
            row.last = last.get(row.pk)  # type: ignore[attr-defined]

    @display(description="Account")
    def who(self, row: Account) -> SafeString | str:
        return two(row.name, row.title) if row.title else row.name

    @display(description="Members")
    def members(self, row: Account) -> str:
        return "all others" if row.name == HOUSE else f"{row.counted:,}"  # type: ignore[attr-defined]

    @display(description="USD this month")
    def month(self, row: Account) -> str:
        return brief(row.spent)  # type: ignore[attr-defined]

    @display(description="Credit left, USD")
    def balance(self, row: Account) -> str:
        return cents(row.credit)  # type: ignore[attr-defined]

    @display(description="Closed up to")
    def closed(self, row: Account) -> str:
        return f"{row.last:%Y-%m}" if row.last else "–"  # type: ignore[attr-defined]

    def page(self, request: HttpRequest, row: Account) -> dict[str, Any]:
        now = timezone.now()
        rest, months = statements.left(row), statements.open_months(row, now=now)
        members = Membership.objects.on(admin_members.today()).filter(account=row).count()
        closed = Statement.objects.filter(account=row).order_by("-month")
        credits_ = Credit.objects.filter(account=row).order_by("-pk")[: MOST + 1]
        this = cost_so_far(account__id__exact=row.pk, day__gte=month_of(now))
        return {
            "facts": [
                Fact(
                    "This month so far", this.value,
                    href=rows("billing_costrecord", slice="month", account__id__exact=row.pk),
                ),
                Fact(
                    "Members", "all others" if row.name == HOUSE else f"{members:,}",
                    href=rows("billing_membership", slice="now", account__id__exact=row.pk),
                    note="who is in no other account" if row.name == HOUSE else "today",
                ),
                Fact("Credit left", f"{cents(sum(rest.values(), Decimal(0)))} USD", href=_its("billing_credit", row)),
                Fact(
                    "Months to close", ", ".join(f"{month:%Y-%m}" for month in months[:3]) or "none",
                    note=f"and {len(months) - 3} more" if len(months) > 3 else "",
                ),
                Fact("Spending", "by day", href=reverse("spending", query={"account": row.name})),
            ],
            "members": [*admin_members.of_account(row, MOST + 1)],
            "new_member": reverse("admin:billing_membership_add", query={"account": row.pk}),
            "may_add_members": request.user.has_perm("billing.add_membership"),
            "all_members": rows("billing_membership", slice="all", account__id__exact=row.pk),
            "credits": [(each, cents(each.usd), _rest(each, rest)) for each in credits_],
            "all_credits": _its("billing_credit", row),
            "statements": [(each, cents(each.total)) for each in closed[: MOST + 1]],
            "all_statements": _its("billing_statement", row),
            "most": MOST,
        }  # fmt: skip

    def has_credit_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.add_credit")

    def has_close_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.close_statement")

    @action(description="Close month…", permissions=["close"], icon="task_alt", dialog=CLOSE.dialog)
    def close_month(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, CLOSE, form)

    @action(description="Grant credit…", permissions=["credit"], icon="redeem", dialog=GRANT.dialog)
    def grant_credit(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, GRANT, form)


def _its(model: str, account: Account) -> str:
    return rows(model, account__id__exact=account.pk)


def _rest(credit: Credit, rest: dict[int, Decimal]) -> str:
    if credit.kind == Credit.Kind.REVERSAL:
        return "taken back"
    return f"{cents(rest[credit.pk])} left" if rest[credit.pk] else "nothing left"


# --- what is booked ---------------------------------------------------------------------------------------------------


@admin.register(Credit)
class CreditAdmin(Facts):
    list_display = ["entry", "amount", "reason", "actor", "booked"]
    list_filter = [("account", RelatedDropdownFilter), ("kind", ChoicesRadioFilter)]
    list_select_related = ["account"]
    search_fields = ["account__name__startswith"]
    search_help_text = "Account, or its beginning"
    ordering = ["-at", "-pk"]
    slices = {"all": Slice("All", "No account was given credit yet. That is done on the account's page.")}
    fieldsets = all_fields("account", "kind", "usd", "at", "reason", "actor", "reversed")
    acts = {"take_back": TAKE_BACK}
    actions_detail = ["take_back"]

    @display(description="Account")
    def entry(self, row: Credit) -> SafeString:
        return two(row.account, row.get_kind_display())

    @display(description="USD")
    def amount(self, row: Credit) -> str:
        return cents(row.usd)

    @display(description="Booked")
    def booked(self, row: Credit) -> SafeString | str:
        return ago(row.at)

    def page(self, request: HttpRequest, row: Credit) -> dict[str, Any]:
        rest = statements.left(row.account).get(row.pk)
        back = Credit.objects.filter(reversed=row).first()
        kind = badge("ok", "granted") if row.kind == Credit.Kind.GRANT else badge("skipped", "taken back")
        return {
            "facts": [
                Fact("Account", link("billing_account", row.account_id, row.account)),
                Fact("USD", cents(row.usd), note=kind),
                *([Fact("Left of it", f"{cents(rest)} USD", note="the oldest is used first")] if rest is not None else []),
                *([Fact("Taken back", link("billing_credit", back.pk, ago(back.at)), note=back.reason)] if back else []),
                *([Fact("Takes back", link("billing_credit", row.reversed_id, row.reversed))] if row.reversed_id else []),
                Fact("Booked", ago(row.at), note=stamp(row.at)),
                Fact("By", row.actor, note=row.reason),
            ]
        }

    def has_book_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.add_credit")

    @action(description="Take back…", permissions=["book"], icon="undo", dialog=TAKE_BACK.dialog)
    def take_back(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, TAKE_BACK, form)


@admin.register(Statement)
class StatementAdmin(Facts):
    list_display = ["of", "before", "credit", "pays", "lines_shown", "closed"]
    list_filter = [("account", RelatedDropdownFilter)]
    list_select_related = ["account"]
    search_fields = ["account__name__startswith"]
    search_help_text = "Account, or its beginning"
    ordering = ["-month", "-pk"]
    slices = {"all": Slice("All", "No month is closed yet. That is done on an account's page, once the month is over.")}
    fieldsets = all_fields("account", "month", "closed_at", "closed_by", "subtotal", "credit_used", "total")
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
            lines_to_csv(row.lines.all()),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    @display(description="Account and month")
    def of(self, row: Statement) -> SafeString:
        return two(row.account, f"{row.month:%Y-%m}")

    @display(description="Subtotal, USD")
    def before(self, row: Statement) -> str:
        return cents(row.subtotal)

    @display(description="Credit used")
    def credit(self, row: Statement) -> str:
        return cents(row.credit_used) if row.credit_used else "–"

    @display(description="To pay, USD")
    def pays(self, row: Statement) -> str:
        return cents(row.total)

    @display(description="Lines")
    def lines_shown(self, row: Statement) -> str:
        return f"{row.number:,}"  # type: ignore[attr-defined]

    @display(description="Closed")
    def closed(self, row: Statement) -> SafeString:
        return two(ago(row.closed_at), f"by {row.closed_by}")

    def page(self, request: HttpRequest, row: Statement) -> dict[str, Any]:
        lines, number = [*row.lines.all()[:LINES]], row.lines.count()
        return {
            "lines": f"{number:,} lines" if number > len(lines) else "",
            "shown": f"{len(lines):,}",
            "file": reverse("admin:billing_statement_lines", args=[row.pk]),
            "usage": [_line(line) for line in lines if line.kind == StatementLine.Kind.USAGE],
            "corrections": [_line(line) for line in lines if line.kind == StatementLine.Kind.CORRECTION],
            "account": row.account,
            "account_link": link("billing_account", row.account_id, row.account),
            "subtotal": cents(row.subtotal),
            "credit_used": cents(-row.credit_used) if row.credit_used else "",
            "total": cents(row.total),
            "back": row.total < 0,
            "costs": rows(
                "billing_costrecord", slice="all", account__id__exact=row.account_id, day_from=row.month,
                day_to=statements.last_of(row.month),
            ),
        }  # fmt: skip


def _line(line: StatementLine) -> dict[str, Any]:
    return {
        "agent": line.agent_did or "no agent",
        "provider": line.provider or "–",
        "item": Priced(line.item).label,
        "month": f"{line.for_month:%Y-%m}",
        "quantity": short(line.quantity),
        "usd": cents(line.usd),
    }


__all__ = ["AccountAdmin", "CreditAdmin", "StatementAdmin"]
