"""The page that says where the money goes."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone

from billing import overview
from billing.admin.formatting import format_money, format_money_brief
from billing.models import Account, BillableItem, Watermark
from sandboxes.admin.base import SummaryField
from sandboxes.admin.formatting import build_changelist_url, pluralize, render_time_ago

COLOURED_SERIES = {
    "docker", "process", "memory", "cloudflare", "daytona", "modal", "runloop", "langsmith", "kubernetes", "store",
}  # fmt: skip


def get_series_class(name: str) -> str:
    """Of a series: console.css has one colour for each, the same on every page."""
    return "models" if name == overview.MODEL_CALLS_SERIES else name if name in COLOURED_SERIES else "other"


def show_spending(request: HttpRequest) -> HttpResponse:
    """The page that says where the money goes."""
    if not request.user.has_perm("billing.view_costrecord"):
        raise PermissionDenied
    now = timezone.now()
    account, agent = _get_query_param(request, "account")[:63], _get_query_param(request, "agent")[:255]
    known = Account.objects.filter(name=account).first() if account else None
    account = known.name if known else ""
    narrowed = ({"account__id__exact": known.pk} if known else {}) | ({"agent_did": agent} if agent else {})
    found = overview.build_overview(now=now, account=account, agent=agent)
    metered = Watermark.objects.filter(name="time").first()
    context = {
        **admin.site.each_context(request),
        "title": "Spending",
        "found": found,
        "facts": _build_fields(found, metered, narrowed, now),
        "bars": [_build_bar(day, found, narrowed) for day in found.days],
        "series": [
            (name, get_series_class(name), format_money(amount))
            for name, amount in found.series.items()
            if name != overview.PLANS_SERIES
        ],
        "plans": format_money(found.series[overview.PLANS_SERIES]) if overview.PLANS_SERIES in found.series else "",
        "columns": [*found.series],
        "table": [
            (day.day, [_format_part(day, name) for name in found.series], format_money_brief(day.usd))
            for day in found.days[::-1]
        ],
        "spenders": [
            (
                each.agent_did,
                format_money(each.usd),
                _format_percent(each.usd, found.usd),
                build_changelist_url(
                    "billing_costrecord", slice="all", **{**narrowed, "agent_did": each.agent_did, **_build_day_filter(found)}
                ),
            )
            for each in found.spenders
        ],
        "items": [
            (BillableItem(item).label, format_money(amount), _format_percent(amount, found.usd))
            for item, amount in found.items.items()
        ],
        "said": _describe_chart(found),
        "accounts": Account.objects.values_list("name", flat=True).order_by("name")[:500],
        "account": account,
        "agent": agent,
        "top": format_money(found.top),
        "middle": format_money(found.top / 2),
    }
    return TemplateResponse(request, "admin/billing/overview.html", context)


def _get_query_param(request: HttpRequest, name: str) -> str:
    return request.GET.get(name, "").replace("\0", "").strip()


def _format_percent(part: Decimal, whole: Decimal) -> str:
    return f"{100 * part / whole:.1f}" if whole else "0"


def _format_part(day: overview.DailyCost, name: str) -> str:
    return format_money_brief(day.parts[name]) if name in day.parts else "–"


def _build_day_filter(found: overview.Overview) -> dict[str, Any]:
    return {"day_from": found.days[0].day, "day_to": found.days[-1].day}


def _build_bar(day: overview.DailyCost, found: overview.Overview, narrowed: dict[str, Any]) -> dict[str, Any]:
    """One column of the chart, from the bottom up."""
    return {
        "day": day.day,
        "parts": [
            (get_series_class(name), f"{100 * amount / found.top:.3f}")
            for name, amount in day.parts.items()
            if name != overview.PLANS_SERIES
        ],
        "title": f"{day.day}: {format_money(day.usd)} USD"
        + "".join(f"\n{name} {format_money(amount)}" for name, amount in day.parts.items()),
    }


def _describe_chart(found: overview.Overview) -> str:
    """The chart in a sentence."""
    dearest = max(found.days, key=lambda day: day.bar)
    together = found.usd - found.series.get(overview.PLANS_SERIES, Decimal(0))
    return (
        f"Cost per day without plans, {found.days[0].day} to {found.days[-1].day}: {format_money(together)} USD together, "
        f"{format_money(dearest.bar)} USD on {dearest.day}, the dearest day. The table below has the numbers."
    )


def _build_fields(
    found: overview.Overview, metered: Watermark | None, narrowed: dict[str, Any], now: datetime
) -> list[SummaryField]:
    ahead, today = found.forecast, found.days[-1]
    all_ = build_changelist_url("billing_costrecord", slice="all", **narrowed, **_build_day_filter(found))
    rate = f"{format_money(ahead.a_day)} USD" if ahead.a_day is not None else "–"
    return [
        SummaryField(
            "This month so far",
            f"{format_money(ahead.spent)} USD",
            href=build_changelist_url("billing_costrecord", slice="month", **narrowed),
        ),
        SummaryField(
            "Today so far",
            f"{format_money(today.usd)} USD",
            href=build_changelist_url("billing_costrecord", slice="all", day_from=today.day, day_to=today.day, **narrowed),
        ),
        SummaryField(
            "A day", rate, note=f"on average of the last {pluralize(ahead.days, 'day', 'days')}" if ahead.days else ""
        ),
        SummaryField("This month, forecast", f"{format_money(ahead.month)} USD", note="if days go on costing that"),
        SummaryField("In these 30 days", f"{format_money(found.usd)} USD", href=all_),
        SummaryField(
            "Metered",
            render_time_ago(metered.at) if metered else "never",
            note="what is used later is not in it yet",
            alarm=_is_metering_late(metered, now),
        ),
    ]


def _is_metering_late(metered: Watermark | None, now: datetime) -> bool:
    return metered is not None and now - metered.at > timedelta(hours=1)
