"""Console pages of accounts."""

from datetime import date, datetime
from decimal import Decimal
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Sum
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from billing import statements
from billing.admin import members as admin_members
from billing.admin.formatting import build_total_cost_field, format_cents, format_money_brief
from billing.admin.usage import build_month_filter, get_month
from billing.api.statements import parse_month, render_lines_csv
from billing.models import HOUSE_ACCOUNT_NAME, Account, CostRecord, Credit, Membership, Statement
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.uncertainty import Uncertainty
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.fields import NormalizedDecimalField
from sandboxes.admin.base.formatting import SummaryField, build_changelist_url, render_two_lines
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.audit import Actor
from sandboxes.db import database_time

MAX_PANEL_ROWS = 12


class GrantCreditForm(ReasonForm):
    """Amount of a credit."""

    field_order = ["usd", "reason"]
    usd = NormalizedDecimalField(
        min_value=Decimal("0.01"),
        max_digits=15,
        decimal_places=2,
        label="Amount (USD)",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
        help_text="Applied to the account's next statements before any amount is due.",
    )


class CloseMonthForm(ReasonForm):
    """Month to close: the oldest open one."""

    field_order = ["month", "reason"]
    month = forms.TypedChoiceField(coerce=date.fromisoformat, label="Month", widget=UnfoldAdminSelectWidget())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raw = unquote(self.object_id or "")
        account = Account.objects.filter(pk=raw).first() if raw.isascii() and raw.isdigit() and len(raw) < 19 else None
        months = statements.find_open_months(account, now=database_time.now()) if account else []
        field: Any = self.fields["month"]
        field.choices = [(month.isoformat(), f"{month:%Y-%m}") for month in months[:1]]
        field.help_text = "Months are closed in order, oldest first." if months else "No month is open."
        self.account = account

    def get_warnings(self) -> list[str]:
        closed = Statement.objects.filter(account=self.account, month=self.cleaned_data["month"]).first()
        return [f"Model calls of {closed.month:%Y-%m}: {closed.uncertainty}."] if closed and closed.uncertainty else []


def _grant_credit(account: Account, actor: str, reason: str, now: datetime, usd: Decimal) -> bool:
    statements.grant_credit(account, usd, now=now, actor=actor, reason=reason)
    return True


def _close_month(account: Account, actor: Actor, reason: str, now: datetime, month: date) -> bool:
    return statements.close_month(account, month, now=now, actor=actor)[1]


GRANT_CREDIT_ACTION = AdminAction(
    title="Grant credit",
    warning="A credit cannot be edited. The unused part can be reversed by another entry.",
    done="credited",
    refusal_reason="not credited",
    legal=lambda account: True,
    verb=_grant_credit,
    icon="redeem",
    permissions=("billing.add_credit",),
    form=GrantCreditForm,
)
CLOSE_MONTH_ACTION = AdminAction(
    title="Close month",
    warning="Issues the statement of the month, which is final. Later price changes appear as corrections on the next one.",
    done="issued the statement",
    refusal_reason="that month is already closed",
    legal=lambda account: bool(statements.find_open_months(account, now=database_time.now())),
    verb=_close_month,
    icon="task_alt",
    permissions=("billing.close_statement",),
    form=CloseMonthForm,
)


@admin.register(Account)
class AccountAdmin(ConsoleModelAdmin):
    list_display = ["account_label", "members", "month", "balance", "closed"]
    search_fields = ["name__startswith", "title__startswith"]
    search_help_text = "Name or title (prefix)"
    ordering = ["name"]
    list_tabs = {"all": ListTab("All", "No accounts yet. Add one to group agents for billing.")}
    fields = ["name", "title"]
    change_form_outer_after_template = "admin/billing/account/books.html"
    row_actions = {"close_month": CLOSE_MONTH_ACTION, "grant_credit": GRANT_CREDIT_ACTION}

    def get_readonly_fields(self, request: HttpRequest, obj: Account | None = None) -> list[str]:
        return ["name"] if obj else []  # scripts refer to an account by name

    def annotate_rows(self, rows: list[Account]) -> None:
        pks = [row.pk for row in rows]
        present = Membership.objects.on(admin_members.get_today()).filter(account__in=pks)
        members = dict(present.order_by().values_list("account").annotate(Count("pk")))
        spent = CostRecord.objects.filter(build_month_filter(get_month(database_time.now())), account__in=pks).order_by()
        sums = spent.values_list("account").annotate(a=sum_exact("usd"), b=Sum("unpriced"), c=sum_exact("estimated_usd"))
        costs = {
            account: (nanos_to_decimal(nano), Uncertainty(int(unpriced), nanos_to_decimal(estimated)))
            for account, nano, unpriced, estimated in sums
        }
        closed = Statement.objects.filter(account__in=pks).order_by("account", "month").values_list("account", "month")
        last, credit = dict(closed), statements.get_balances()
        for row in rows:
            row.member_count = members.get(row.pk, 0)  # type: ignore[attr-defined]
            row.spent, row.uncertainty = costs.get(row.pk, (Decimal(0), ""))  # type: ignore[attr-defined]
            row.credit = credit.get(row.pk, Decimal(0))  # type: ignore[attr-defined]
            row.last = last.get(row.pk)  # type: ignore[attr-defined]

    @display(description="Account")
    def account_label(self, row: Account) -> SafeString | str:
        return render_two_lines(row.name, row.title) if row.title else row.name

    @display(description="Members")
    def members(self, row: Account) -> str:
        return "all other agents" if row.name == HOUSE_ACCOUNT_NAME else f"{row.member_count:,}"  # type: ignore[attr-defined]

    @display(description="USD this month")
    def month(self, row: Account) -> SafeString | str:
        spent, note = format_money_brief(row.spent), str(row.uncertainty)  # type: ignore[attr-defined]
        return render_two_lines(spent, note) if note else spent

    @display(description="Remaining credit, USD")
    def balance(self, row: Account) -> str:
        return format_cents(row.credit)  # type: ignore[attr-defined]

    @display(description="Last closed month")
    def closed(self, row: Account) -> str:
        return f"{row.last:%Y-%m}" if row.last else "–"  # type: ignore[attr-defined]

    def get_urls(self) -> list[URLPattern]:
        lines = self.admin_site.admin_view(self.download_preview)
        return [path("<int:pk>/preliminary/<str:month>.csv", lines, name="billing_account_preview"), *super().get_urls()]

    def download_preview(self, request: HttpRequest, pk: int, month: str) -> HttpResponse:
        """Send the lines of a month that is not closed as CSV, each marked as preliminary."""
        if not request.user.has_perm("billing.view_statement"):
            raise PermissionDenied
        account, begin = get_object_or_404(Account, pk=pk), parse_month(month)
        if begin is None or Statement.objects.filter(account=account, month=begin).exists():
            raise Http404("This month is closed, or is not a month.")
        return HttpResponse(
            render_lines_csv(statements.preview_month(account, begin), preliminary=True),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{account.name}-{month}-preliminary.csv"'},
        )

    def get_page_context(self, request: HttpRequest, row: Account) -> dict[str, Any]:
        now = database_time.now()
        remaining, months = statements.get_remaining_credits(row), statements.find_open_months(row, now=now)
        members = Membership.objects.on(admin_members.get_today()).filter(account=row).count()
        closed = Statement.objects.filter(account=row).order_by("-month")
        credits_ = Credit.objects.filter(account=row).order_by("-pk")[: MAX_PANEL_ROWS + 1]
        month_cost = build_total_cost_field(account__id__exact=row.pk, day__gte=get_month(now))
        return {
            "facts": [
                SummaryField(
                    "This month",
                    month_cost.value,
                    note=month_cost.note,
                    href=build_changelist_url("billing_costrecord", slice="month", account__id__exact=row.pk),
                ),
                SummaryField(
                    "Members",
                    "all other agents" if row.name == HOUSE_ACCOUNT_NAME else f"{members:,}",
                    href=build_changelist_url("billing_membership", slice="now", account__id__exact=row.pk),
                    note="default account" if row.name == HOUSE_ACCOUNT_NAME else "today",
                ),
                SummaryField(
                    "Remaining credit",
                    f"{format_cents(sum(remaining.values(), Decimal(0)))} USD",
                    href=_build_account_url("billing_credit", row),
                ),
                SummaryField(
                    "Open months",
                    ", ".join(f"{month:%Y-%m}" for month in months[:3]) or "none",
                    note=f"and {len(months) - 3} more" if len(months) > 3 else "",
                ),
                SummaryField("Spending", "view by day", href=reverse("spending", query={"account": row.name})),
            ],
            "members": [*admin_members.list_members(row, MAX_PANEL_ROWS + 1)],
            "new_member": reverse("admin:billing_membership_add", query={"account": row.pk}),
            "may_add_members": request.user.has_perm("billing.add_membership"),
            "all_members": build_changelist_url("billing_membership", slice="all", account__id__exact=row.pk),
            "credits": [(each, format_cents(each.usd), _format_credit_left(each, remaining)) for each in credits_],
            "all_credits": _build_account_url("billing_credit", row),
            "statements": [(each, format_cents(each.total)) for each in closed[: MAX_PANEL_ROWS + 1]],
            "all_statements": _build_account_url("billing_statement", row),
            "previews": [
                (name, reverse("admin:billing_account_preview", args=[row.pk, name]))
                for name in (f"{month:%Y-%m}" for month in [*months[:3], get_month(now)])
            ],
            "limit": MAX_PANEL_ROWS,
        }


def _build_account_url(model: str, account: Account) -> str:
    return build_changelist_url(model, account__id__exact=account.pk)


def _format_credit_left(credit: Credit, remaining: dict[int, Decimal]) -> str:
    if credit.kind == Credit.Kind.REVERSAL:
        return "reversal"
    return f"{format_cents(remaining[credit.pk])} remaining" if remaining[credit.pk] else "used up"
