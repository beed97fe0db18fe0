"""Dashboard of the console: tiles, pools and panels of sandboxes that need attention."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.contrib import admin
from django.core.cache import cache
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache

from billing import overview
from billing.admin.budget_notices import BudgetNotice, build_all_notices
from billing.admin.budgets import BudgetAdmin
from billing.admin.formatting import format_money_brief
from billing.models import Budget
from leases.admin.leases import LeaseAdmin
from leases.models import Lease
from sandboxes import pool_stats
from sandboxes.admin import tabs
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import build_changelist_url, render_time_ago, truncate_text
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.llm_calls import StartedWithinFilter
from sandboxes.admin.pools import PoolAdmin, PoolUsage, build_pool_usages
from sandboxes.admin.sandboxes import SandboxAdmin
from sandboxes.admin.sweeps import SweepAdmin
from sandboxes.admin.webhooks import WebhookAdmin
from sandboxes.db import database_time
from sandboxes.egress.totals import calculate_totals
from sandboxes.models import LlmCall, Pool, Sandbox, Sweep, Webhook

ADMIN_MODELS: Mapping[type[ConsoleModelAdmin], type[Model]] = {
    BudgetAdmin: Budget, LeaseAdmin: Lease, PoolAdmin: Pool, SandboxAdmin: Sandbox, SweepAdmin: Sweep, WebhookAdmin: Webhook,
}  # fmt: skip
PANEL_ROWS = 6
FLEET_CACHE_SECONDS = 5


def can_view(request: HttpRequest, model: str) -> bool:
    """Return whether the user may view a model given as "app.model"."""
    app, name = model.split(".")
    return request.user.has_perm(f"{app}.view_{name}")


def get_url_name(model: type[Model]) -> str:
    """Return the part of a model's admin URL names before the page, such as "sandboxes_pool"."""
    return model._meta.label_lower.replace(".", "_")


@dataclass(frozen=True)
class Tile:
    """Number on the dashboard, with a link to the rows it counts."""

    title: str
    value: str
    href: str
    note: str = ""
    alarm: bool = False
    quiet: bool = False  # a zero that needs no attention, shown small
    view_permission: str = ""  # "app.model" that the user must be allowed to view; empty: any viewer of the dashboard


@dataclass(frozen=True)
class PanelRow:
    """Row of a panel."""

    href: str
    title: str
    note: str
    age: str


@dataclass(frozen=True)
class Panel:
    """First rows of a tab that need attention, with a link to all of them."""

    title: str
    empty_text: str
    href: str
    number: int
    rows: list[PanelRow]
    alarm: bool = False


@dataclass(frozen=True)
class FleetSummary:
    """Content of the dashboard. For display only: no decision reads it."""

    at: datetime
    quarantine: int
    tiles: list[Tile] = field(default_factory=list)
    pools: list[PoolUsage] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    notices: list[BudgetNotice] = field(default_factory=list)


def get_fleet_summary() -> FleetSummary:
    """Return the summary, at most FLEET_CACHE_SECONDS old. The cache bounds the queries of any number of open tabs."""
    summary: FleetSummary | None = cache.get("fleet")
    if summary is None:
        summary = build_fleet_summary()
        cache.set("fleet", summary, FLEET_CACHE_SECONDS)
    return summary


def build_fleet_summary(now: datetime | None = None) -> FleetSummary:
    """Compute the summary."""
    now = now or database_time.now()
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
        _build_tile("Running sandboxes", SandboxAdmin, "running", now),
        _build_tile("Suspended sandboxes", SandboxAdmin, "suspended", now, note="processes frozen, memory kept"),
        Tile(
            "Cold sandboxes",
            f"{cold:,}",
            build_changelist_url("sandboxes_sandbox", slice="cold"),
            note="state stored, no process",
        ),
        _build_model_calls_tile(now),
        *build_spending_tiles(now),
        _build_tile("Pools draining", PoolAdmin, "draining", now, note="accept no new sandboxes"),
        _build_tile("Circuits open", PoolAdmin, "paused", now, note="pools without warm starts", bad=True),
        _build_tile("Starts failing", PoolAdmin, "failing", now, note="pools without sandboxes for new leases", bad=True),
        _build_tile("In quarantine", SandboxAdmin, "quarantine", now, note="destroy not confirmed", bad=True),
        _build_tile("State not stored", SandboxAdmin, "unstored", now, note="eviction failed", bad=True),
        _build_tile("Data not stored", SandboxAdmin, "unsaved", now, note="unsaved changes in /data", bad=True),
        _build_tile("Lost sandboxes", SandboxAdmin, "lost", now, note="gone at the provider", bad=True),
        _build_tile("Stalled sandboxes", SandboxAdmin, "stalled", now, note="past their deadline", bad=True),
        _build_tile("Webhooks disabled", WebhookAdmin, "disabled", now, note="after failed deliveries", bad=True),
        _build_tile("Leases overdue", LeaseAdmin, "overdue", now, note="past their end, still active", bad=True),
        _build_tile("Sweeps late", SweepAdmin, "late", now, note="no success for 3 intervals", bad=True),
        *build_budget_tiles(now),
    ]
    panels = [
        _build_panel("quarantine", "quarantined_at", now, alarm=True),
        _build_panel("unstored", "state_since", now, title="State not stored", alarm=True),
        _build_panel("lost", "lost_at", now, alarm=True),
        _build_panel("waiting", "last_used_at", now, title="Waiting longest"),
    ]
    usages = build_pool_usages(pools, now)
    return FleetSummary(
        at=now,
        quarantine=panels[0].number,
        tiles=sorted(tiles, key=lambda tile: (not tile.alarm, tile.quiet)),
        pools=usages,
        panels=panels,
        notices=build_all_notices(now),
    )


def _build_panel(name: str, since: str, now: datetime, *, title: str = "", alarm: bool = False) -> Panel:
    tab: ListTab = tabs.SANDBOX_TABS[name]
    matching = Sandbox.objects.filter(tab.get_filter(now))
    first = list(matching.order_by(since)[: PANEL_ROWS + 1])
    number = matching.count() if len(first) > PANEL_ROWS else len(first)
    rows = [_build_panel_row(each, getattr(each, since), alarm) for each in first[:PANEL_ROWS]]
    return Panel(
        title or tab.title,
        tab.empty_text,
        build_changelist_url("sandboxes_sandbox", slice=name),
        number,
        rows,
        alarm and number > 0,
    )


def _build_tile(
    title: str,
    page: type[ConsoleModelAdmin],
    name: str,
    now: datetime,
    *,
    note: str = "",
    bad: bool = False,
    view_permission: str = "",
) -> Tile:
    """Build a tile that counts the rows of a tab. Tiles with a note count exceptions, so their zeros are quiet."""
    model = ADMIN_MODELS[page]
    number = model._default_manager.filter(page.list_tabs[name].get_filter(now)).count()
    return Tile(
        title,
        f"{number:,}",
        build_changelist_url(get_url_name(model), slice=name),
        note=note,
        alarm=bad and number > 0,
        quiet=bool(note) and number == 0,
        view_permission=view_permission,
    )


def build_spending_tiles(now: datetime) -> list[Tile]:
    """Build the cost of today and of this month. One query."""
    today, month = overview.get_costs_to_date(now)
    href, view_permission = reverse("spending"), "billing.costrecord"
    return [
        Tile(title, format_money_brief(cost.usd), href, note=_format_usd_note(cost), view_permission=view_permission)
        for title, cost in (("Cost today", today), ("Cost this month", month))
    ]


def _format_usd_note(cost: overview.CostToDate) -> str:
    return ", ".join(filter(None, ("USD", str(cost.uncertainty))))


def build_budget_tiles(now: datetime) -> list[Tile]:
    """Build the numbers of warned and exhausted budgets. Two queries."""
    view_permission = "billing.budget"
    return [
        _build_tile(
            "Budgets warned", BudgetAdmin, "warned", now, note="past the warning level", view_permission=view_permission
        ),
        _build_tile(
            "Budgets exhausted",
            BudgetAdmin,
            "exhausted",
            now,
            note="in the present period",
            bad=True,
            view_permission=view_permission,
        ),
    ]


def _build_model_calls_tile(now: datetime) -> Tile:
    """Build the number and cost of model calls in the last 24 hours."""
    total = calculate_totals(LlmCall.objects.filter(started_at__gte=now - StartedWithinFilter.lengths["1d"]))
    refused = f"{total.refused:,} refused, " if total.refused else ""
    href = build_changelist_url("sandboxes_llmcall", slice="all", kind__exact="llm", since="1d")
    return Tile("Model calls, 24 h", f"{total.calls:,}", href, note=f"{refused}{total.spent:,.2f} USD")


def _build_panel_row(sandbox: Sandbox, at: datetime | None, alarm: bool) -> PanelRow:
    href = reverse("admin:sandboxes_sandbox_change", args=[sandbox.pk])
    error = truncate_text(sandbox.last_error or "No reason given by the provider.", 200) if alarm else ""
    return PanelRow(href, str(sandbox), error, render_time_ago(at))


def can_view_fleet(request: HttpRequest) -> bool:
    return request.user.has_perms(
        ["leases.view_lease", "sandboxes.view_sandbox", "sandboxes.view_pool", "sandboxes.view_sweep"]
    )


def extend_index_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Extend the template context of the admin index."""
    return context | {"title": "Dashboard", **_build_fleet_context(request)}


def _build_fleet_context(request: HttpRequest) -> dict[str, Any]:
    summary = get_fleet_summary() if can_view_fleet(request) else None
    return {
        "fleet": summary,
        "tiles": [tile for tile in summary.tiles if not tile.view_permission or can_view(request, tile.view_permission)]
        if summary
        else [],
        "notices": summary.notices if summary and can_view(request, "billing.budget") else [],
    }


@never_cache
def fleet_fragment(request: HttpRequest) -> HttpResponse:
    """Render the content of the dashboard, which htmx fetches every ten seconds. On status 286 htmx stops polling."""
    if not admin.site.has_permission(request):
        return render(request, "admin/signed_out.html", status=286)
    return render(request, "admin/fleet.html", _build_fleet_context(request))
