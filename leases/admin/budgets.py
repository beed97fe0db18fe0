"""Budgets on the pages of leases and agents."""

from datetime import datetime
from decimal import Decimal

from django.db.models import Q
from django.http import HttpRequest
from django.utils.html import format_html

from billing import budgets
from billing.admin.budget_notices import BudgetNotice, build_notices
from billing.admin.budget_usage import format_amount
from billing.models import Budget, Tab
from leases.budget_enforcement import END_REASON
from leases.models import Lease, LeaseStatus
from sandboxes.admin.base.formatting import SummaryField, render_admin_link
from sandboxes.formatting import pluralize


def can_view_budgets(request: HttpRequest) -> bool:
    return request.user.has_perm("billing.view_budget")


def _build_lease_filter(lease: Lease, at: datetime) -> Q:
    by_tab = budgets.build_tabs_filter(Tab.objects.filter(holder=lease.pk))
    return budgets.build_agent_filter(lease.agent_did, now=at) | by_tab


def summarize_lease_budgets(request: HttpRequest, lease: Lease, now: datetime) -> tuple[list[BudgetNotice], list[SummaryField]]:
    """Summarize the budgets that a lease counts against and the tightest hard one, or the budget that ended the lease."""
    if not can_view_budgets(request):
        return [], []
    if lease.status != LeaseStatus.ACTIVE:
        return [], [_build_ended_by_field(lease)] if lease.end_reason == END_REASON else []
    applicable = [*Budget.objects.filter(_build_lease_filter(lease, now), active=True).order_by("pk")]
    hard = [each for each in applicable if each.hard and not each.counts_calls_alone]
    return build_notices(applicable, now), [_build_tightest_budget_field(hard, now)]


def _build_tightest_budget_field(hard: list[Budget], now: datetime) -> SummaryField:
    if not hard:
        return SummaryField("Hard budgets", "none", note="cost does not end this lease")
    tightest = max(hard, key=lambda each: budgets.get_spent(each, now) / budgets.get_limit(each, now))
    left = max(budgets.get_limit(tightest, now) - budgets.get_spent(tightest, now), Decimal(0))
    return SummaryField(
        pluralize(len(hard), "hard budget", "hard budgets").capitalize(),
        f"{format_amount(left, tightest)} {tightest.unit_label} left",
        note=format_html("of {}", render_admin_link("billing_budget", tightest.pk, tightest)),
        alarm=left == 0,
    )


def _build_ended_by_field(lease: Lease) -> SummaryField:
    """Build the budget named at the end of the lease. The budget may have been changed or removed since."""
    name = lease.end_detail or "unknown"
    assert lease.ended_at
    candidates = Budget.objects.filter(_build_lease_filter(lease, lease.ended_at)).order_by("pk")
    budget = next((each for each in candidates if name == str(each) or name.startswith(f"{each}: ")), None)
    return SummaryField("Ended by budget", render_admin_link("billing_budget", budget.pk, name) if budget else name)


def build_agent_notices(request: HttpRequest, did: str, now: datetime) -> list[BudgetNotice]:
    """Build notices of the budgets that an agent or one of its open leases counts against. Two queries."""
    if not can_view_budgets(request):
        return []
    open_tabs = Tab.objects.filter(agent_did=did, closed_at__isnull=True)
    applicable = budgets.build_agent_filter(did, now=now) | budgets.build_tabs_filter(open_tabs)
    return build_notices(Budget.objects.filter(applicable, budgets.build_marked_filter("warned_for", now)), now)
