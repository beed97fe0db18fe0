"""The page that says where the money goes."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone

from billing import spending as overview
from billing.admin.formatting import brief, money
from billing.models import Account, Priced, Watermark
from sandboxes.admin.base import Fact
from sandboxes.admin.formatting import ago, counted, rows

KINDS = {
    "docker", "process", "memory", "cloudflare", "daytona", "modal", "runloop", "langsmith", "kubernetes", "store",
}  # fmt: skip


def kind(name: str) -> str:
    """Of a series: console.css has one colour for each, the same on every page."""
    return "models" if name == overview.MODELS else name if name in KINDS else "other"


def spending(request: HttpRequest) -> HttpResponse:
    """The page that says where the money goes."""
    if not request.user.has_perm("billing.view_costrecord"):
        raise PermissionDenied
    now = timezone.now()
    account, agent = _asked(request, "account")[:63], _asked(request, "agent")[:255]
    known = Account.objects.filter(name=account).first() if account else None
    account = known.name if known else ""
    narrowed = ({"account__id__exact": known.pk} if known else {}) | ({"agent_did": agent} if agent else {})
    found = overview.look(now=now, account=account, agent=agent)
    metered = Watermark.objects.filter(name="time").first()
    context = {
        **admin.site.each_context(request),
        "title": "Spending",
        "found": found,
        "facts": _facts_of(found, metered, narrowed, now),
        "bars": [_bar(day, found, narrowed) for day in found.days],
        "series": [(name, kind(name), money(amount)) for name, amount in found.series.items() if name != overview.PLANS],
        "plans": money(found.series[overview.PLANS]) if overview.PLANS in found.series else "",
        "columns": [*found.series],
        "table": [(day.day, [_part(day, name) for name in found.series], brief(day.usd)) for day in found.days[::-1]],
        "spenders": [
            (each.agent_did, money(each.usd), _share(each.usd, found.usd),
             rows("billing_costrecord", slice="all", **{**narrowed, "agent_did": each.agent_did, **_range(found)}))
            for each in found.spenders
        ],
        "items": [(Priced(item).label, money(amount), _share(amount, found.usd)) for item, amount in found.items.items()],
        "said": _said(found),
        "accounts": Account.objects.values_list("name", flat=True).order_by("name")[:500],
        "account": account,
        "agent": agent,
        "top": money(found.top),
        "middle": money(found.top / 2),
    }  # fmt: skip
    return TemplateResponse(request, "admin/billing/overview.html", context)


def _asked(request: HttpRequest, name: str) -> str:
    return request.GET.get(name, "").replace("\0", "").strip()


def _share(part: Decimal, whole: Decimal) -> str:
    return f"{100 * part / whole:.1f}" if whole else "0"


def _part(day: overview.Day, name: str) -> str:
    return brief(day.parts[name]) if name in day.parts else "–"


def _range(found: overview.Overview) -> dict[str, Any]:
    return {"day_from": found.days[0].day, "day_to": found.days[-1].day}


def _bar(day: overview.Day, found: overview.Overview, narrowed: dict[str, Any]) -> dict[str, Any]:
    """One column of the chart, from the bottom up."""
    return {
        "day": day.day,
        "parts": [
            (kind(name), f"{100 * amount / found.top:.3f}") for name, amount in day.parts.items() if name != overview.PLANS
        ],
        "title": f"{day.day}: {money(day.usd)} USD"
        + "".join(f"\n{name} {money(amount)}" for name, amount in day.parts.items()),
    }


def _said(found: overview.Overview) -> str:
    """The chart in a sentence."""
    dearest = max(found.days, key=lambda day: day.bar)
    together = found.usd - found.series.get(overview.PLANS, Decimal(0))
    return (
        f"Cost per day without plans, {found.days[0].day} to {found.days[-1].day}: {money(together)} USD together, "
        f"{money(dearest.bar)} USD on {dearest.day}, the dearest day. The table below has the numbers."
    )


def _facts_of(found: overview.Overview, metered: Watermark | None, narrowed: dict[str, Any], now: datetime) -> list[Fact]:
    ahead, today = found.forecast, found.days[-1]
    all_ = rows("billing_costrecord", slice="all", **narrowed, **_range(found))
    rate = f"{money(ahead.a_day)} USD" if ahead.a_day is not None else "–"
    return [
        Fact("This month so far", f"{money(ahead.spent)} USD", href=rows("billing_costrecord", slice="month", **narrowed)),
        Fact(
            "Today so far", f"{money(today.usd)} USD",
            href=rows("billing_costrecord", slice="all", day_from=today.day, day_to=today.day, **narrowed),
        ),
        Fact("A day", rate, note=f"on average of the last {counted(ahead.days, 'day', 'days')}" if ahead.days else ""),
        Fact("This month, forecast", f"{money(ahead.month)} USD", note="if days go on costing that"),
        Fact("In these 30 days", f"{money(found.usd)} USD", href=all_),
        Fact(
            "Metered", ago(metered.at) if metered else "never", note="what is used later is not in it yet",
            alarm=_late(metered, now),
        ),
    ]  # fmt: skip


def _late(metered: Watermark | None, now: datetime) -> bool:
    return metered is not None and now - metered.at > timedelta(hours=1)
