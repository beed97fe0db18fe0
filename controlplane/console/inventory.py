"""Inventory page: everything that exists at the engines and vendors, what it costs, and what has no owner."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import structlog
from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.cache import never_cache
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from billing.admin.formatting import format_money, format_money_aligned
from billing.models import Rate
from billing.standing_price import StandingPrice, find_entry_price
from leases.adoption import adopt_sandbox
from sandboxes import providers
from sandboxes.admin.base.actions import ReasonForm
from sandboxes.admin.base.audit import get_actor
from sandboxes.admin.base.changelist import parse_uuid
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    render_admin_link,
    render_badge,
    render_time_since,
    truncate_text,
)
from sandboxes.admin.base.registry import render_holders
from sandboxes.db import database_time
from sandboxes.errors import SandboxError
from sandboxes.formatting import format_path, pluralize
from sandboxes.hosts import registry
from sandboxes.inventory.entries import WITHOUT_OWNER, Entry, Finding, Inventory, collect_inventory
from sandboxes.inventory.listings import WITHOUT_RESPONSE, EngineListing, ListingState
from sandboxes.inventory.removal import destroy_ownerless
from sandboxes.models import Host, Pool, Sandbox
from sandboxes.models.names import parse_name
from sandboxes.providers.errors import ProviderError

log = structlog.get_logger(__name__)
MAX_ROWS = 200  # of sandboxes without a finding; the page of sandboxes has all
VIEW_PERMISSIONS = ("sandboxes.view_sandbox", "sandboxes.view_host")
ACT_PERMISSION = "sandboxes.act_on_sandbox"
FINDING_BADGES = {
    Finding.UNKNOWN_OWNER: ("failed", "unknown owner"),
    Finding.NO_ROW: ("failed", "no row"),
    Finding.MISSING: ("lost", "missing"),
    Finding.UNCONFIRMED: ("late", "not confirmed"),
    Finding.STARTING: ("warming", "starting"),
}
PROCESS_BADGES = {"running": "running", "suspended": "suspended", "stopped": "cold", "volumes": "left"}


@dataclass(frozen=True)
class InventoryRow:
    """Entry as the tables show it."""

    entry: Entry
    title: Any
    note: Any
    status: SafeString
    process: SafeString | str
    explanation: str
    since: SafeString
    price: str
    adopt_url: str = ""
    destroy_url: str = ""


@never_cache
def show_inventory(request: HttpRequest) -> HttpResponse:
    """Render the inventory. Each view lists all engines anew."""
    if not request.user.has_perms(VIEW_PERMISSIONS):
        raise PermissionDenied
    now = database_time.now()
    inventory = collect_inventory(now=now, grace=settings.ORPHAN_GRACE)
    rates = [*Rate.objects.all()]
    prices = {id(entry): find_entry_price(entry, rates, now=now) for entry in inventory.entries}
    urgent = [entry for entry in inventory.entries if entry.finding != Finding.NONE]
    usual = [entry for entry in inventory.entries if entry.finding == Finding.NONE]
    holders = render_holders({entry.row.holder for entry in inventory.entries if entry.row and entry.row.holder})
    may_act = request.user.has_perm(ACT_PERMISSION)

    def build(entry: Entry) -> InventoryRow:
        return _build_row(entry, prices[id(entry)], holders, may_act=may_act)

    context = {
        **admin.site.each_context(request),
        "title": "Inventory",
        "facts": _build_facts(inventory, [*prices.values()]),
        "engines": [_build_engine(engine) for engine in inventory.engines],
        "urgent": [build(entry) for entry in urgent],
        "usual": [build(entry) for entry in usual[:MAX_ROWS]],
        "may_act": may_act and any(entry.finding in WITHOUT_OWNER for entry in urgent),
        "total": len(usual),
        "all_url": build_changelist_url("sandboxes_sandbox", slice="live") if len(usual) > MAX_ROWS else "",
        "at": inventory.at,
        "is_complete": all(engine.state == ListingState.LISTED for engine in inventory.engines),
    }
    return TemplateResponse(request, "admin/inventory/page.html", context)


def _build_facts(inventory: Inventory, prices: list[StandingPrice | None]) -> list[SummaryField]:
    counts = {finding: sum(entry.finding == finding for entry in inventory.entries) for finding in Finding}
    without_owner = sum(counts[finding] for finding in WITHOUT_OWNER)
    held = sum(1 for entry in inventory.entries if entry.row and entry.row.holder)
    silent = [engine for engine in inventory.engines if engine.state in WITHOUT_RESPONSE]
    listed = sum(engine.state == ListingState.LISTED for engine in inventory.engines)
    known = [price for price in prices if price]
    total = sum((price.usd for price in known), Decimal(0))
    unknown = len(prices) - len(known)
    at_most = "at most " if any(price.is_maximum for price in known) else ""
    return [
        SummaryField(
            "Without an owner",
            f"{without_owner:,}",
            note=f"{counts[Finding.UNKNOWN_OWNER]:,} with an unknown owner label" if counts[Finding.UNKNOWN_OWNER] else "",
            alarm=without_owner > 0,
        ),
        SummaryField(
            "Missing at the engine",
            f"{counts[Finding.MISSING]:,}",
            note=f"{counts[Finding.UNCONFIRMED]:,} more not confirmed" if counts[Finding.UNCONFIRMED] else "",
            alarm=counts[Finding.MISSING] > 0,
        ),
        SummaryField(
            "Engines listed",
            f"{listed:,} of {len(inventory.engines):,}",
            note=f"{len(silent):,} without a listing" if silent else "",
            alarm=bool(silent),
        ),
        SummaryField(
            "Sandboxes",
            f"{len(inventory.entries):,}",
            note=f"{held:,} held by leases",
        ),
        SummaryField(
            "Price per hour",
            f"{at_most}{format_money(total)} USD" if known else "–",
            note=f"{unknown:,} without a price" if unknown else "",
        ),
        SummaryField(
            "Cold sandboxes",
            f"{inventory.cold:,}",
            note="state stored, no process",
            href=build_changelist_url("sandboxes_sandbox", slice="cold"),
        ),
    ]  # fmt: skip


def _build_engine(engine: EngineListing) -> dict[str, Any]:
    listed = pluralize(len(engine.sandboxes), "sandbox", "sandboxes")
    host_state = engine.host_state or "not used yet"
    states = {
        ListingState.LISTED: (render_badge("ok", "listed"), listed),
        ListingState.UNAVAILABLE: (render_badge("failing", "no response"), engine.error),
        ListingState.NOT_CONFIGURED: (render_badge("failing", "not configured"), engine.error),
        ListingState.NOT_SUPPORTED: (render_badge("skipped", "cannot list"), "Only the rows of its sandboxes are shown."),
        ListingState.OTHER_HOST: (
            render_badge("ok" if host_state == "live" else "late", f"other host, {host_state}"),
            "This server does not reach it. Open the inventory on a server of that host.",
        ),
    }
    badge, detail = states[engine.state]
    return {
        "name": render_admin_link("sandboxes_host", engine.host.pk, engine.host) if engine.host else engine.provider,
        "provider": engine.provider,
        "address": truncate_text(engine.host.engine_id, 60) if engine.host else "",
        "badge": badge,
        "detail": truncate_text(format_path(detail), 300),
    }


def _build_row(entry: Entry, price: StandingPrice | None, holders: Any, *, may_act: bool) -> InventoryRow:
    kind, label = FINDING_BADGES.get(entry.finding, ("", ""))
    query = {"provider": entry.engine.provider, "name": entry.name}
    may_destroy = may_act and entry.finding in WITHOUT_OWNER
    may_adopt = may_destroy and parse_name(entry.name) and not entry.former and entry.process_state != "volumes"
    return InventoryRow(
        entry=entry,
        title=_build_title(entry),
        note=_build_note(entry, holders),
        status=render_badge(kind, label) if label else render_badge(entry.row.state if entry.row else "left"),
        process=render_badge(PROCESS_BADGES[entry.process_state], entry.process_state) if entry.process_state else "–",
        explanation=_explain(entry),
        since=render_time_since(entry.created_at),
        price=_format_price(price),
        adopt_url=reverse("inventory_adopt", query=query) if may_adopt else "",
        destroy_url=reverse("inventory_destroy", query=query) if may_destroy else "",
    )


def _build_title(entry: Entry) -> Any:
    if entry.row:
        return render_admin_link("sandboxes_sandbox", entry.row.pk, entry.sandbox_id or entry.name)
    parts = parse_name(entry.name)
    short = f"leasehold-{parts.pk.hex[:8]}…-{parts.incarnation}" if parts else format_path(truncate_text(entry.name, 40))
    return format_html('<span title="{}">{}</span>', format_path(entry.name), short)


def _build_note(entry: Entry, holders: Any) -> Any:
    if entry.row and entry.row.holder:
        return format_html("lease {}", holders[entry.row.holder])
    if entry.row:
        return "in quarantine" if entry.row.quarantined_at else "unclaimed"
    if entry.former:
        return render_admin_link("sandboxes_sandbox", entry.former.pk, entry.sandbox_id or "its former row")
    if entry.pool or entry.listed is None:
        return ""
    return f"owner label {format_path(truncate_text(entry.listed.owner, 40))}"


def _explain(entry: Entry) -> str:
    """Explain a finding and the next step of the sweeps."""
    if entry.former and entry.finding == Finding.NO_ROW:
        return (
            f"Its row is {entry.former.state}, incarnation {entry.former.incarnation}: it should not exist any more. The next "
            "reconcile sweep destroys it, and keeps its files before as a snapshot of the lease if its row does not record it."
        )
    return {
        Finding.UNKNOWN_OWNER: "No pool has its owner label: it may belong to another installation. No sweep touches it.",
        Finding.NO_ROW: "No row names it. The next reconcile sweep destroys it, unless you adopt it.",
        Finding.MISSING: "Its engine does not list it. The next reconcile sweep decides whether its state is lost.",
        Finding.UNCONFIRMED: "Its engine has no conclusive listing. Nothing is done until there is one.",
        Finding.STARTING: "Younger than the grace period: a start may be in progress.",
        Finding.NONE: "",
    }[entry.finding]


def _format_price(price: StandingPrice | None) -> str:
    if price is None:
        return "–"
    return f"{'≤ ' if price.is_maximum else ''}{format_money_aligned(price.usd)}"


# --- actions on sandboxes without an owner ----------------------------------------------------------------------------


class DestroyForm(ReasonForm):
    """Confirmation of a destroy: the name again, and a reason."""

    field_order = ["confirmed_name", "reason"]
    confirmed_name = forms.CharField(
        label="Name of the sandbox",
        max_length=80,
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "spellcheck": "false"}),
        help_text="Type or paste the name above. Its files are not stored.",
    )

    def clean_confirmed_name(self) -> str:
        name = str(self.cleaned_data["confirmed_name"])
        if name != self.object_id:
            raise forms.ValidationError("This is not the name of the sandbox.")
        return name


class AdoptForm(ReasonForm):
    """Pool of the new row, the lease that gets the files, and a reason."""

    field_order = ["pool", "lease", "reason"]
    pool = forms.ModelChoiceField(
        Pool.objects.none(), required=False, empty_label="The pool with its owner label", widget=UnfoldAdminSelectWidget,
        to_field_name="name", help_text="The sandbox takes a place there until it is destroyed.",
    )  # fmt: skip
    lease = forms.CharField(
        required=False, max_length=40, label="Lease that gets its files",
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
        help_text="Id of an active lease, which gets /workspace as a snapshot that can be restored. Empty: not stored.",
    )  # fmt: skip

    def __init__(self, *args: Any, provider: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = [provider, *([""] if provider == providers.get_default_provider_name() else [])]
        self.fields["pool"].queryset = Pool.objects.filter(provider__in=names).order_by("name")

    def clean_lease(self) -> Any:
        text = self.cleaned_data["lease"].strip()
        if text and parse_uuid(text) is None:
            raise forms.ValidationError("This is not the id of a lease.")
        return parse_uuid(text) if text else None


def destroy_sandbox(request: HttpRequest) -> HttpResponse:
    """Confirm and destroy a sandbox without an owner."""
    provider, name = _read_target(request)
    form = DestroyForm(request=request, object_id=name, data=request.POST or None)
    context = {
        "title": "Destroy a sandbox without an owner?", "verb": "Destroy", "danger": True,
        "warning": "The engine removes it with all of its files. Nothing is stored, and this cannot be undone. A sandbox with "
        "an unknown owner label may be in use by another installation: make sure that it is not.",
    }  # fmt: skip
    if request.method == "POST" and form.is_valid():
        reason, now = form.cleaned_data["reason"], database_time.now()

        def act() -> str:
            actor = get_actor(request)
            if not destroy_ownerless(provider, name, now=now, grace=settings.ORPHAN_GRACE, actor=actor, reason=reason):
                return f"{name} did not exist any more."
            _log_action(request, Host, registry.get_local_host_id(provider), f"Destroy without an owner: {name}: {reason}")
            return f"{name} is destroyed."

        if response := _run(request, form, act):
            return response
    return _render_confirmation(request, provider, name, form, context)


def adopt(request: HttpRequest) -> HttpResponse:
    """Confirm and adopt a sandbox without an owner."""
    provider, name = _read_target(request)
    form = AdoptForm(request=request, provider=provider, data=request.POST or None)
    context = {
        "title": "Adopt a sandbox without an owner?", "verb": "Adopt", "danger": False,
        "warning": "The sandbox gets a row in quarantine and takes a place in a pool. No sweep destroys it, and no agent gets "
        "it. Retry its destroy on its page once its files are not needed.",
    }  # fmt: skip
    if request.method == "POST" and form.is_valid():
        reason, chosen, lease = (form.cleaned_data[field] for field in ("reason", "pool", "lease"))

        def act() -> str:
            adopted = adopt_sandbox(
                provider, name, pool_name=chosen.name if chosen else "", lease_id=lease, now=database_time.now(),
                actor=get_actor(request), reason=reason,
            )  # fmt: skip
            _log_action(request, Sandbox, adopted.sandbox.pk, f"Adopt: {reason}")
            files = " Its files are a snapshot of the lease." if adopted.snapshot else ""
            return f"{name} is adopted, in quarantine.{files}"

        if response := _run(request, form, act):
            return response
    return _render_confirmation(request, provider, name, form, context)


def _read_target(request: HttpRequest) -> tuple[str, str]:
    if not request.user.has_perms((*VIEW_PERMISSIONS, ACT_PERMISSION)):
        raise PermissionDenied
    provider, name = (request.GET.get(key, "").replace("\0", "")[:80] for key in ("provider", "name"))
    return provider, name


def _run(request: HttpRequest, form: ReasonForm, act: Any) -> HttpResponse | None:
    """Run an act and return to the inventory with its message. None, with the error in the form, if it is refused."""
    try:
        messages.success(request, act())
    except (SandboxError, ProviderError, ImproperlyConfigured) as refused:
        form.add_error(None, str(refused))
        return None
    return HttpResponseRedirect(reverse("inventory"))


def _log_action(request: HttpRequest, model: type[Host] | type[Sandbox], pk: Any, text: str) -> None:
    rows = model._default_manager.filter(pk=pk)
    LogEntry.objects.log_actions(request.user.pk, rows, CHANGE, text)  # type: ignore[arg-type]


def _render_confirmation(
    request: HttpRequest, provider: str, name: str, form: ReasonForm, context: dict[str, Any]
) -> HttpResponse:
    shared = {**admin.site.each_context(request), "provider": provider, "name": format_path(name), "form": form}
    return TemplateResponse(request, "admin/inventory/confirm.html", shared | context)
