"""What stands around the operators' pages: navigation, tabs, the environment; and the first page, the fleet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.core.cache import cache
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache

from billing import overview
from billing.admin.budgets import BudgetAdmin, BudgetNotice, build_all_notices
from billing.admin.formatting import format_money_brief
from billing.models import Budget
from leases.admin.leases import LeaseAdmin
from leases.models import Lease
from sandboxes import pool_stats
from sandboxes.admin import tabs as slices
from sandboxes.admin.base import ConsoleModelAdmin, ListTab
from sandboxes.admin.formatting import build_changelist_url, render_time_ago, truncate_text
from sandboxes.admin.llm_calls import StartedWithinFilter
from sandboxes.admin.pools import PoolUsage, build_pool_usages
from sandboxes.admin.sandboxes import PoolAdmin, SandboxAdmin, SweepAdmin, WebhookAdmin
from sandboxes.egress.totals import calculate_totals
from sandboxes.models import LlmCall, Pool, Sandbox, Sweep, Webhook

# title -> [(what, icon, "app.model", the name of a page if it is not the model's list)]
MENU: Mapping[str, list[tuple[str, ...]]] = {
    "Leases": [
        ("Leases", "contract", "leases.lease"),
        ("Turns", "casino", "leases.turn"),
        ("Agents", "smart_toy", "leases.agent"),
        ("API keys", "key", "leases.agentkey"),
        ("Environment types", "category", "leases.environmenttype"),
    ],
    "Sandboxes": [
        ("Sandboxes", "deployed_code", "sandboxes.sandbox"),
        ("Runs", "terminal", "sandboxes.run"),
        ("Processes", "memory", "sandboxes.process"),
        ("Readings", "speed", "sandboxes.reading"),
        ("Model calls", "forum", "sandboxes.llmcall"),
        ("Model rates", "sell", "sandboxes.modelrate"),
        ("Pools", "database", "sandboxes.pool"),
        ("Policies", "policy", "sandboxes.policy"),
        ("Quotas", "pie_chart", "sandboxes.quota"),
    ],
    "Money": [
        ("Spending", "bar_chart", "billing.costrecord", "spending"),
        ("Cost records", "receipt_long", "billing.costrecord"),
        ("Usage", "timer", "billing.usagerecord"),
        ("Rates", "price_change", "billing.rate"),
        ("Accounts", "account_balance_wallet", "billing.account"),
        ("Members", "group_add", "billing.membership"),
        ("Credits", "redeem", "billing.credit"),
        ("Statements", "request_quote", "billing.statement"),
        ("Budgets", "savings", "billing.budget"),
    ],
    "Identity": [
        ("Signing keys", "fingerprint", "sandboxes.signingkey"),
        ("Service tokens", "confirmation_number", "sandboxes.mintedtoken"),
    ],
    "State": [
        ("Agent data", "folder_shared", "sandboxes.agentdata"),
        ("Snapshots", "history", "sandboxes.snapshot"),
        ("Data events", "rule", "sandboxes.dataevent"),
    ],
    "Webhooks": [
        ("Webhooks", "webhook", "sandboxes.webhook"),
        ("Events", "campaign", "sandboxes.event"),
        ("Deliveries", "outgoing_mail", "sandboxes.delivery"),
    ],
    "Health": [
        ("Sweeps", "cleaning_services", "sandboxes.sweep"),
        ("Schedules", "schedule", "django_q.schedule"),
        ("Queue", "low_priority", "django_q.ormq"),
        ("Failed tasks", "error", "django_q.failure"),
    ],
    "Access": [("Users", "person", "auth.user"), ("Groups", "group", "auth.group")],
}
ADMIN_MODELS: Mapping[type[ConsoleModelAdmin], type[Model]] = {
    BudgetAdmin: Budget, LeaseAdmin: Lease, PoolAdmin: Pool, SandboxAdmin: Sandbox, SweepAdmin: Sweep, WebhookAdmin: Webhook,
}  # fmt: skip
PANEL_ROWS = 6  # rows of a panel
FLEET_CACHE_SECONDS = 5  # seconds for which a snapshot is shown to everybody


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """The sidebar: what this user may see, and how many sandboxes ask for an operator."""
    groups: list[dict[str, Any]] = [{"items": [{"title": "Fleet", "icon": "monitoring", "link": reverse("admin:index")}]}]
    for title, items in MENU.items():
        seen = [_build_menu_item(*item) for item in items if can_view(request, item[2])]
        groups += [{"title": title, "items": seen}] if seen else []
    return groups


def _build_menu_item(title: str, icon: str, model: str, page: str = "") -> dict[str, Any]:
    badge = str(get_fleet_summary().quarantine or "") if model == "sandboxes.sandbox" else ""
    link = reverse(page) if page else build_changelist_url(model.replace(".", "_"))
    return {"title": title, "icon": icon, "link": link, "badge": badge}


def can_view(request: HttpRequest, model: str) -> bool:
    app, name = model.split(".")
    return request.user.has_perm(f"{app}.view_{name}")


def tabs(request: HttpRequest) -> list[dict[str, Any]]:
    """A tab for each slice of the list that is shown; its search and filters go along."""
    for model, page in admin.site._registry.items():
        if isinstance(page, ConsoleModelAdmin) and page.slices and request.path == build_changelist_url(_get_url_name(model)):
            chosen = request.GET.get("slice")
            shown = chosen if chosen in page.slices else next(iter(page.slices))
            kept = {name: value for name, value in request.GET.items() if name not in ("slice", "p", "e")}
            items = [
                {
                    "title": part.title,
                    "link": build_changelist_url(_get_url_name(model), **{**kept, "slice": name}),
                    "active": name == shown,
                }
                for name, part in page.slices.items()
            ]
            return [{"models": [model._meta.label_lower], "items": items}]
    return []


def _get_url_name(model: type[Model]) -> str:
    return model._meta.label_lower.replace(".", "_")


def environment(request: HttpRequest) -> list[str]:
    """Where you are, on every page."""
    return ["Development", "info"] if settings.DEBUG else ["Production", "danger"]


# --- the fleet ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """One number of the first page and the list of exactly what it counts."""

    title: str
    value: str
    href: str
    note: str = ""
    alarm: bool = False
    of: str = ""  # "app.model": whoever may view that is shown it; empty: whoever sees the fleet


@dataclass(frozen=True)
class PanelRow:
    """A row of a panel."""

    href: str
    who: str
    note: str
    age: str


@dataclass(frozen=True)
class Panel:
    """Rows that want a look: the first few of a slice, and the list of all of them."""

    title: str
    empty: str
    href: str
    number: int
    lines: list[PanelRow]
    alarm: bool = False


@dataclass(frozen=True)
class FleetSummary:
    """What the first page shows, for display only: nothing decides by it."""

    at: datetime
    quarantine: int
    tiles: list[Tile] = field(default_factory=list)
    pools: list[PoolUsage] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    notices: list[BudgetNotice] = field(default_factory=list)


def get_fleet_summary() -> FleetSummary:
    """The fleet as it was at most FRESH seconds ago, however many tabs are open."""
    found: FleetSummary | None = cache.get("fleet")
    if found is None:
        found = build_fleet_summary()
        cache.set("fleet", found, FLEET_CACHE_SECONDS)
    return found


def build_fleet_summary(now: datetime | None = None) -> FleetSummary:
    """Count everything on the first page."""
    now = now or timezone.now()
    pools = sorted(pool_stats.collect_pool_stats(now=now), key=lambda one: (-one.used, one.name))
    used, capacity, cold = (sum(getattr(one, name) for one in pools) for name in ("used", "capacity", "cold"))
    tiles = [
        _build_tile("Active leases", LeaseAdmin, "active", now),
        Tile(
            "Capacity used",
            f"{100 * used // capacity} %" if capacity else "–",
            build_changelist_url("sandboxes_pool"),
            note=f"{used:,} of {capacity:,} places",
            alarm=bool(capacity) and used >= capacity,
        ),
        _build_tile("Running now", SandboxAdmin, "running", now),
        Tile("Cold", f"{cold:,}", build_changelist_url("sandboxes_sandbox", slice="cold"), note="asleep, their state stored"),
        _build_model_calls_tile(now),
        *build_spending_tiles(now),
        _build_tile("Pools draining", PoolAdmin, "draining", now, note="take nothing new"),
        _build_tile("Circuits open", PoolAdmin, "paused", now, note="pools that warm nothing up", bad=True),
        _build_tile("In quarantine", SandboxAdmin, "quarantine", now, note="destroy never confirmed", bad=True),
        _build_tile("State not stored", SandboxAdmin, "unstored", now, note="waiting, sleep failed", bad=True),
        _build_tile("Data not stored", SandboxAdmin, "unsaved", now, note="changes in /data, only there", bad=True),
        _build_tile("Lost", SandboxAdmin, "lost", now, note="gone at the provider", bad=True),
        _build_tile("Stalled", SandboxAdmin, "stalled", now, note="past their deadline", bad=True),
        _build_tile("Webhooks given up", WebhookAdmin, "disabled", now, note="told of nothing", bad=True),
        _build_tile("Leases overdue", LeaseAdmin, "overdue", now, note="past their end, still active", bad=True),
        _build_tile("Sweeps late", SweepAdmin, "late", now, note="no success for 3 times their period", bad=True),
        *build_budget_tiles(now),
    ]
    panels = [
        _build_panel("quarantine", "quarantined_at", now, alarm=True),
        _build_panel("unstored", "state_since", now, title="State not stored", alarm=True),
        _build_panel("lost", "lost_at", now, alarm=True),
        _build_panel("waiting", "last_used_at", now, title="Waiting longest"),
    ]
    filled = build_pool_usages(pools, now)
    return FleetSummary(
        at=now, quarantine=panels[0].number, tiles=tiles, pools=filled, panels=panels, notices=build_all_notices(now)
    )


def _build_panel(name: str, since: str, now: datetime, *, title: str = "", alarm: bool = False) -> Panel:
    part: ListTab = slices.SANDBOX_TABS[name]
    found = Sandbox.objects.filter(part.where(now))
    first = list(found.order_by(since)[: PANEL_ROWS + 1])
    number = found.count() if len(first) > PANEL_ROWS else len(first)
    lines = [_build_panel_row(each, getattr(each, since), alarm) for each in first[:PANEL_ROWS]]
    return Panel(
        title or part.title,
        part.empty,
        build_changelist_url("sandboxes_sandbox", slice=name),
        number,
        lines,
        alarm and number > 0,
    )


def _build_tile(
    title: str, page: type[ConsoleModelAdmin], name: str, now: datetime, *, note: str = "", bad: bool = False, of: str = ""
) -> Tile:
    model = ADMIN_MODELS[page]
    number = model._default_manager.filter(page.slices[name].where(now)).count()
    return Tile(
        title, f"{number:,}", build_changelist_url(_get_url_name(model), slice=name), note=note, alarm=bad and number > 0, of=of
    )


def build_spending_tiles(now: datetime) -> list[Tile]:
    """What all that is used costs. One query."""
    today, month = overview.get_costs_to_date(now)
    where, of = reverse("spending"), "billing.costrecord"
    return [
        Tile("Spent today", format_money_brief(today), where, note="USD", of=of),
        Tile("This month", format_money_brief(month), where, note="USD spent", of=of),
    ]


def build_budget_tiles(now: datetime) -> list[Tile]:
    """How many are past a mark in their present period. Two queries."""
    of = "billing.budget"
    return [
        _build_tile("Budgets warned of", BudgetAdmin, "warned", now, note="not exhausted yet", of=of),
        _build_tile("Budgets exhausted", BudgetAdmin, "exhausted", now, note="in their present period", bad=True, of=of),
    ]


def _build_model_calls_tile(now: datetime) -> Tile:
    """What models were asked in a day, and what that cost."""
    total = calculate_totals(LlmCall.objects.filter(started_at__gte=now - StartedWithinFilter.lengths["1d"]))
    refused = f"{total.refused:,} refused, " if total.refused else ""
    href = build_changelist_url("sandboxes_llmcall", slice="all", kind__exact="llm", since="1d")
    return Tile("Model calls in 24 h", f"{total.calls:,}", href, note=f"{refused}{total.spent:,.2f} USD")


def _build_panel_row(sandbox: Sandbox, at: datetime | None, alarm: bool) -> PanelRow:
    href = reverse("admin:sandboxes_sandbox_change", args=[sandbox.pk])
    why = truncate_text(sandbox.last_error or "The provider gave no reason.", 200) if alarm else ""
    return PanelRow(href, str(sandbox), why, render_time_ago(at))


def can_view_fleet(request: HttpRequest) -> bool:
    return request.user.has_perms(
        ["leases.view_lease", "sandboxes.view_sandbox", "sandboxes.view_pool", "sandboxes.view_sweep"]
    )


def fleet(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """The context of the first page."""
    return context | {"title": "Fleet", **_build_fleet_context(request)}


def _build_fleet_context(request: HttpRequest) -> dict[str, Any]:
    found = get_fleet_summary() if can_view_fleet(request) else None
    return {
        "fleet": found,
        "tiles": [tile for tile in found.tiles if not tile.of or can_view(request, tile.of)] if found else [],
        "notices": found.notices if found and can_view(request, "billing.budget") else [],
    }


@never_cache
def fleet_fragment(request: HttpRequest) -> HttpResponse:
    """What the first page replaces itself with every ten seconds. 286 is htmx's word for: show this and stop asking."""
    if not admin.site.has_permission(request):
        return render(request, "admin/signed_out.html", status=286)
    return render(request, "admin/fleet.html", _build_fleet_context(request))
