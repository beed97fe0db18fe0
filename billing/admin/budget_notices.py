"""Notices about warned and exhausted budgets, shown on other pages."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db.models import F
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from billing import budgets
from billing.admin.budget_usage import (
    compute_percent_spent,
    describe_exhaustion,
    format_usage,
    get_level,
    render_budget_state,
    render_reset_time,
)
from billing.models import Budget
from sandboxes.admin.base.formatting import build_changelist_url, render_badge

MAX_NOTICES = 5  # on the dashboard


@dataclass(frozen=True)
class BudgetNotice:
    """Line on other pages about a budget past its warning level."""

    level: str
    state: SafeString
    href: str
    budget: str
    text: SafeString


def build_notices(budgets_: Iterable[Budget], now: datetime) -> list[BudgetNotice]:
    """Build notices of the warned and exhausted budgets among `budgets_`, exhausted ones first."""
    affected = [each for each in budgets_ if get_level(each, now) in ("warned", "exhausted")]
    affected.sort(key=lambda each: (get_level(each, now) != "exhausted", not each.hard, each.pk))
    return [
        BudgetNotice(
            get_level(each, now),
            render_budget_state(each, now),
            reverse("admin:billing_budget_change", args=[each.pk]),
            str(each),
            format_html(
                "{} spent ({} %){}; {}",
                format_usage(each, now),
                compute_percent_spent(each, now),
                _describe_consequence(each, now),
                render_reset_time(each, now),
            ),
        )
        for each in affected
    ]


def _describe_consequence(budget: Budget, now: datetime) -> str:
    if get_level(budget, now) != "exhausted":
        return ""
    return f", {describe_exhaustion(budget)}"


def build_all_notices(now: datetime) -> list[BudgetNotice]:
    """Build notices of all budgets past their warning level, at most MAX_NOTICES and a link to the rest. Two queries."""
    affected = Budget.objects.filter(budgets.build_marked_filter("warned_for", now))
    rows = [*affected.order_by(F("exhausted_for").asc(nulls_last=True), "-hard", "pk")[: MAX_NOTICES + 1]]
    notices = build_notices(rows[:MAX_NOTICES], now)
    if len(rows) > MAX_NOTICES:
        href = build_changelist_url("billing_budget", slice="exhausted" if rows[-1].exhausted_for else "warned")
        notices.append(
            BudgetNotice(
                "warned", render_badge("late", "more"), href, "More budgets are past their warning level", SafeString()
            )
        )
    return notices
