"""What stands around the operators' pages: navigation, tabs, the environment; and the first page, the fleet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.core.cache import cache
from django.db.models import Count, Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache

from leases.admin import LeaseAdmin
from leases.models import Lease
from sandboxes.admin import SandboxAdmin, SweepAdmin
from sandboxes.cells import ago, rows, shortened
from sandboxes.models import Pool, Sandbox, State, Sweep
from sandboxes.pages import Page

# title -> [(what, icon, "app.model")]
MENU: Mapping[str, list[tuple[str, str, str]]] = {
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
        ("Pools", "database", "sandboxes.pool"),
    ],
    "Health": [
        ("Sweeps", "cleaning_services", "sandboxes.sweep"),
        ("Schedules", "schedule", "django_q.schedule"),
        ("Queue", "low_priority", "django_q.ormq"),
        ("Failed tasks", "error", "django_q.failure"),
    ],
    "Access": [("Users", "person", "auth.user"), ("Groups", "group", "auth.group")],
}
MODELS: Mapping[type[Page], type[Model]] = {LeaseAdmin: Lease, SandboxAdmin: Sandbox, SweepAdmin: Sweep}
OLDEST = 6  # rows of a panel
FRESH = 5  # seconds for which a snapshot is shown to everybody


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """The sidebar: what this user may see, and how many sandboxes ask for an operator."""
    groups: list[dict[str, Any]] = [{"items": [{"title": "Fleet", "icon": "monitoring", "link": reverse("admin:index")}]}]
    for title, items in MENU.items():
        seen = [_item(*item) for item in items if may_view(request, item[2])]
        groups += [{"title": title, "items": seen}] if seen else []
    return groups


def _item(title: str, icon: str, model: str) -> dict[str, Any]:
    badge = str(snapshot().quarantine or "") if model == "sandboxes.sandbox" else ""
    return {"title": title, "icon": icon, "link": rows(model.replace(".", "_")), "badge": badge}


def may_view(request: HttpRequest, model: str) -> bool:
    app, name = model.split(".")
    return request.user.has_perm(f"{app}.view_{name}")


def tabs(request: HttpRequest) -> list[dict[str, Any]]:
    """A tab for each slice of the list that is shown; its search and filters go along."""
    for model, page in admin.site._registry.items():
        if isinstance(page, Page) and page.slices and request.path == rows(_name(model)):
            chosen = request.GET.get("slice")
            shown = chosen if chosen in page.slices else next(iter(page.slices))
            kept = {name: value for name, value in request.GET.items() if name not in ("slice", "p", "e")}
            items = [
                {"title": part.title, "link": rows(_name(model), **{**kept, "slice": name}), "active": name == shown}
                for name, part in page.slices.items()
            ]
            return [{"models": [model._meta.label_lower], "items": items}]
    return []


def _name(model: type[Model]) -> str:
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


@dataclass(frozen=True)
class Bar:
    """A pool and what fills its places."""

    pool: Pool
    href: str
    parts: list[tuple[str, int, float, str]]  # state, how many, percent of the capacity, list

    @property
    def said(self) -> str:
        held = ", ".join(f"{number} {state}" for state, number, _, _ in self.parts) or "nothing"
        return f"{self.pool.used} of {self.pool.capacity} places used: {held}"


@dataclass(frozen=True)
class Line:
    """A row of a panel."""

    href: str
    who: str
    note: str
    age: str


@dataclass(frozen=True)
class Fleet:
    """What the first page shows, for display only: nothing decides by it."""

    at: datetime
    quarantine: int
    tiles: list[Tile] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    quarantined: list[Line] = field(default_factory=list)
    waiting: list[Line] = field(default_factory=list)


def snapshot() -> Fleet:
    """The fleet as it was at most FRESH seconds ago, however many tabs are open."""
    found: Fleet | None = cache.get("fleet")
    if found is None:
        found = look()
        cache.set("fleet", found, FRESH)
    return found


def look(now: datetime | None = None) -> Fleet:
    """Count everything on the first page."""
    now = now or timezone.now()
    pools = list(Pool.objects.order_by("-used", "name"))
    used, capacity = sum(each.used for each in pools), sum(each.capacity for each in pools)
    quarantine = Sandbox.objects.filter(SandboxAdmin.slices["quarantine"].where(now))
    waiting = Sandbox.objects.filter(SandboxAdmin.slices["waiting"].where(now))
    lost = quarantine.count()
    tiles = [
        _tile("Active leases", LeaseAdmin, "active", now),
        Tile(
            "Capacity used",
            f"{100 * used // capacity} %" if capacity else "–",
            rows("sandboxes_pool"),
            note=f"{used:,} of {capacity:,} places",
            alarm=bool(capacity) and used >= capacity,
        ),
        _tile("Running now", SandboxAdmin, "running", now),
        _tile("In quarantine", SandboxAdmin, "quarantine", now, note="destroy never confirmed", bad=True),
        _tile("Stalled", SandboxAdmin, "stalled", now, note="past their deadline", bad=True),
        _tile("Leases overdue", LeaseAdmin, "overdue", now, note="past their end, still active", bad=True),
        _tile("Sweeps late", SweepAdmin, "late", now, note="no success for 3 times their period", bad=True),
    ]
    return Fleet(
        at=now,
        quarantine=lost,
        tiles=tiles,
        bars=_bars(pools),
        quarantined=[
            _line(each, each.last_error or "The provider gave no reason.", each.quarantined_at)
            for each in quarantine.order_by("quarantined_at")[:OLDEST]
        ],
        waiting=[_line(each, "", each.last_used_at) for each in waiting.order_by("last_used_at")[:OLDEST]],
    )


def _tile(title: str, page: type[Page], name: str, now: datetime, *, note: str = "", bad: bool = False) -> Tile:
    model = MODELS[page]
    number = model._default_manager.filter(page.slices[name].where(now)).count()
    return Tile(title, f"{number:,}", rows(_name(model), slice=name), note=note, alarm=bad and number > 0)


def _bars(pools: list[Pool]) -> list[Bar]:
    living = Sandbox.objects.exclude(state=State.DESTROYED).order_by().values_list("pool", "state")
    numbers = {(pool, state): number for pool, state, number in living.annotate(Count("pk"))}
    return [
        Bar(
            pool,
            rows("sandboxes_sandbox", slice="live", pool__id__exact=pool.pk),
            [
                (
                    state,
                    number,
                    100 * number / max(pool.capacity, pool.used),
                    rows("sandboxes_sandbox", slice="live", pool__id__exact=pool.pk, state__exact=state),
                )
                for state in State.values
                if (number := numbers.get((pool.pk, state), 0))
            ],
        )
        for pool in pools
    ]


def _line(sandbox: Sandbox, note: str, at: datetime | None) -> Line:
    href = reverse("admin:sandboxes_sandbox_change", args=[sandbox.pk])
    return Line(href, str(sandbox), shortened(note, 200), ago(at))


def may_see_fleet(request: HttpRequest) -> bool:
    return request.user.has_perms(
        ["leases.view_lease", "sandboxes.view_sandbox", "sandboxes.view_pool", "sandboxes.view_sweep"]
    )


def fleet(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """The context of the first page."""
    return context | {"title": "Fleet", "fleet": snapshot() if may_see_fleet(request) else None}


@never_cache
def fragment(request: HttpRequest) -> HttpResponse:
    """What the first page replaces itself with every ten seconds. 286 is htmx's word for: show this and stop asking."""
    if not admin.site.has_permission(request):
        return render(request, "admin/signed_out.html", status=286)
    return render(request, "admin/fleet.html", {"fleet": snapshot() if may_see_fleet(request) else None})
