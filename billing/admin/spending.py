"""Spending page: cost of the last 30 days by day, provider, agent and item."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from billing import overview
from billing.admin.formatting import format_money, format_money_brief
from billing.model_providers import find_model_provider
from billing.models import Account, BillableItem, Watermark
from sandboxes.admin.base.formatting import SummaryField, build_changelist_url, render_time_ago
from sandboxes.db import database_time
from sandboxes.formatting import pluralize

COLOURED_SERIES = {
    "docker", "process", "memory", "cloudflare", "daytona", "modal", "runloop", "langsmith", "kubernetes", "store",
}  # fmt: skip


def get_series_class(name: str) -> str:
    """CSS class of a series. console.css has one colour for each, the same on every page."""
    return "models" if name == overview.MODEL_CALLS_SERIES else name if name in COLOURED_SERIES else "other"


def show_spending(request: HttpRequest) -> HttpResponse:
    """Render the spending page. The query parameters `account` and `agent` narrow it."""
    if not request.user.has_perm("billing.view_costrecord"):
        raise PermissionDenied
    now = database_time.now()
    account, agent = _get_query_param(request, "account")[:63], _get_query_param(request, "agent")[:255]
    account_row = Account.objects.filter(name=account).first() if account else None
    account = account_row.name if account_row else ""
    filters = ({"account__id__exact": account_row.pk} if account_row else {}) | ({"agent_did": agent} if agent else {})
    costs = overview.build_overview(now=now, account=account, agent=agent)
    metered = Watermark.objects.filter(name="time").first()
    context = {
        **admin.site.each_context(request),
        "title": "Spending",
        "facts": _build_fields(costs, metered, filters, now),
        "bars": [_build_bar(day, costs, filters) for day in costs.days],
        "series": [
            (name, get_series_class(name), format_money(amount))
            for name, amount in costs.series.items()
            if name != overview.PLANS_SERIES
        ],
        "plans": format_money(costs.series[overview.PLANS_SERIES]) if overview.PLANS_SERIES in costs.series else "",
        "columns": [*costs.series],
        "table": [
            (day.day, [_format_part(day, name) for name in costs.series], format_money_brief(day.usd))
            for day in costs.days[::-1]
        ],
        "spenders": [
            (
                each.agent_did,
                format_money(each.usd),
                _format_percent(each.usd, costs.usd),
                build_changelist_url(
                    "billing_costrecord", slice="all", **{**filters, "agent_did": each.agent_did, **_build_day_filter(costs)}
                ),
            )
            for each in costs.spenders
        ],
        "items": [
            (BillableItem(item).label, format_money(amount), _format_percent(amount, costs.usd))
            for item, amount in costs.items.items()
        ],
        "models": _build_model_rows(costs),
        "chart_summary": _describe_chart(costs),
        "accounts": Account.objects.values_list("name", flat=True).order_by("name")[:500],
        "account": account,
        "agent": agent,
        "top": format_money(costs.top),
        "middle": format_money(costs.top / 2),
    }
    return TemplateResponse(request, "admin/billing/overview.html", context)


def _build_model_rows(costs: overview.Overview) -> list[dict[str, Any]]:
    return [
        {
            "model": each.model,
            "vendor": find_model_provider(each.model),
            "usd": format_money(each.usd),
            "note": str(each.uncertainty),
            "calls": f"{each.calls:,}",
            "tokens": [f"{count:,}" for count in each.tokens],
        }
        for each in costs.models or ()
    ]


def _get_query_param(request: HttpRequest, name: str) -> str:
    return request.GET.get(name, "").replace("\0", "").strip()


def _format_percent(part: Decimal, whole: Decimal) -> str:
    return f"{100 * part / whole:.1f}" if whole else "0"


def _format_part(day: overview.DailyCost, name: str) -> str:
    return format_money_brief(day.parts[name]) if name in day.parts else "–"


def _build_day_filter(costs: overview.Overview) -> dict[str, Any]:
    return {"day_from": costs.days[0].day, "day_to": costs.days[-1].day}


def _build_bar(day: overview.DailyCost, costs: overview.Overview, filters: dict[str, Any]) -> dict[str, Any]:
    """Build one column of the chart, its parts from the bottom up."""
    return {
        "day": day.day,
        "parts": [
            (get_series_class(name), f"{100 * amount / costs.top:.3f}")
            for name, amount in day.parts.items()
            if name != overview.PLANS_SERIES
        ],
        "title": f"{day.day}: {format_money(day.usd)} USD"
        + "".join(f"\n{name} {format_money(amount)}" for name, amount in day.parts.items()),
    }


def _describe_chart(costs: overview.Overview) -> str:
    """Summarize the chart in a sentence for screen readers."""
    highest = max(costs.days, key=lambda day: day.bar)
    total = costs.usd - costs.series.get(overview.PLANS_SERIES, Decimal(0))
    return (
        f"Cost per day without plans, {costs.days[0].day} to {costs.days[-1].day}: {format_money(total)} USD in total, "
        f"highest on {highest.day} with {format_money(highest.bar)} USD. The table below has the numbers."
    )


def _build_fields(
    costs: overview.Overview, metered: Watermark | None, filters: dict[str, Any], now: datetime
) -> list[SummaryField]:
    forecast, today = costs.forecast, costs.days[-1]
    all_url = build_changelist_url("billing_costrecord", slice="all", **filters, **_build_day_filter(costs))
    rate = f"{format_money(forecast.a_day)} USD" if forecast.a_day is not None else "–"
    return [
        SummaryField(
            "This month",
            f"{format_money(forecast.spent)} USD",
            href=build_changelist_url("billing_costrecord", slice="month", **filters),
        ),
        SummaryField(
            "Today",
            f"{format_money(today.usd)} USD",
            href=build_changelist_url("billing_costrecord", slice="all", day_from=today.day, day_to=today.day, **filters),
        ),
        SummaryField(
            "Daily average", rate, note=f"over the last {pluralize(forecast.days, 'day', 'days')}" if forecast.days else ""
        ),
        SummaryField("Forecast for this month", f"{format_money(forecast.month)} USD", note="at the current daily average"),
        SummaryField("Last 30 days", f"{format_money(costs.usd)} USD", href=all_url, note=str(costs.uncertainty)),
        SummaryField(
            "Metered up to",
            render_time_ago(metered.at) if metered else "never",
            note="later usage is not included yet",
            alarm=_is_metering_late(metered, now),
        ),
    ]


def _is_metering_late(metered: Watermark | None, now: datetime) -> bool:
    return metered is not None and now - metered.at > timedelta(hours=1)
