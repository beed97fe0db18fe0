"""Console pages of pools."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.db.models import Count, Q
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes import pool_stats, providers
from sandboxes.admin import tabs
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.audit import list_audit_entries
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    decode_output,
    format_age,
    format_counts,
    render_badge,
    render_meter,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.limits import LIMIT_LABELS
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.engine_quotas import QuotaPanel, build_quota_fields, build_quota_panels
from sandboxes.admin.quotas import build_add_quota_url, build_quota_row
from sandboxes.db import database_time
from sandboxes.formatting import pluralize
from sandboxes.hosts import capacity, engine_quotas
from sandboxes.models import Host, Pool, SandboxState
from sandboxes.pool import allocation
from sandboxes.pool_stats import PoolStats

MAX_PANEL_ROWS = 12  # quotas on a pool's page, largest use first

DRAIN_ACTION = AdminAction(
    title="Drain",
    warning="The pool accepts no new sandboxes. Existing leases continue, and their sandboxes are evicted and woken as usual.",
    done="draining",
    refusal_reason="already draining",
    legal=lambda row: not row.draining,
    verb=lambda row, actor, reason, now: allocation.set_draining(row, draining=True, actor=actor),
    icon="pause",
    permissions=("sandboxes.drain_pool",),
)
RESUME_ACTION = AdminAction(
    title="Resume",
    warning="The pool accepts new sandboxes again.",
    done="resumed",
    refusal_reason="not draining",
    legal=lambda row: row.draining,
    verb=lambda row, actor, reason, now: allocation.set_draining(row, draining=False, actor=actor),
    permissions=("sandboxes.drain_pool",),
)
CLOSE_CIRCUIT_ACTION = AdminAction(
    title="Close circuit",
    warning="The next sweep, within a minute, starts warm sandboxes again. Three more failures in a row reopen the circuit.",
    done="warming up again",
    refusal_reason="its circuit is closed",
    legal=lambda row: is_circuit_open(row, database_time.now()),
    verb=lambda row, actor, reason, now: allocation.resume_warming(row, now=now, actor=actor),
    icon="replay",
    permissions=("sandboxes.drain_pool",),
)


def is_circuit_open(pool: Pool | PoolStats, now: datetime) -> bool:
    """Return whether warm starts are suspended after repeated failures."""
    return pool.warm_paused_until is not None and pool.warm_paused_until > now


# --- usage of a pool, also on the dashboard ------------------------------------------------------------------------


@dataclass(frozen=True)
class StateShare:
    """Number of a pool's sandboxes in one state, with a link to them."""

    state: str
    number: int
    percent: float
    href: str


@dataclass(frozen=True)
class PoolUsage:
    """Places of a pool by state of their sandboxes, and turnover counters."""

    stats: PoolStats
    href: str
    parts: list[StateShare]
    notes: list[SafeString]  # badges: draining, circuit open

    @property
    def summary(self) -> str:
        states = ", ".join(f"{part.number} {part.state}" for part in self.parts) or "no sandboxes"
        return f"{self.stats.used} of {self.stats.capacity} places used: {states}"

    @property
    def counts(self) -> list[str]:
        """Pre-warmed sandboxes, and turnover since the pool was created. Zero counters are left out."""
        stats = self.stats
        ready = f"Pre-warmed: {stats.warm_ready:,} of {stats.warm_target:,}" if stats.warm_target else ""
        turnover = [
            f"{title}: {format_counts(parts(stats))}"
            for title, parts in TURNOVER_COUNTERS.items()
            if any(parts(stats).values())
        ]
        return [each for each in (ready, *turnover) if each]


def count_evictions(stats: PoolStats) -> dict[str, int]:
    """Evictions that made room for another sandbox, by the state before."""
    return {"cold": stats.evicted_cold, "warm": stats.evicted_warm, "waiting": stats.evicted_waiting}


def count_starts_by_source(stats: PoolStats) -> dict[str, int]:
    """Sandboxes provisioned for leases, by source: pre-warmed, or state from the local copy, the store, the vendor, or none."""
    return {
        "pre-warmed": stats.claimed_warm,
        "from local copy": stats.woken_local,
        "from store": stats.woken_cloud,
        "from vendor's snapshot": stats.woken_vendor,
        "fresh": stats.woken_fresh,
    }


TURNOVER_COUNTERS = {"Evicted": count_evictions, "Provisioned": count_starts_by_source}


def build_pool_usages(pools: Sequence[PoolStats], now: datetime) -> list[PoolUsage]:
    return [build_pool_usage(stats, now) for stats in pools]


def build_pool_usage(stats: PoolStats, now: datetime) -> PoolUsage:
    parts = [
        StateShare(
            state,
            number,
            100 * number / max(stats.capacity, stats.total),
            build_changelist_url("sandboxes_sandbox", slice="live", pool__id__exact=stats.pk, state__exact=state),
        )
        for state in SandboxState.values
        if (number := getattr(stats, state, 0))
    ]
    notes = [render_badge("draining")] if stats.draining else []
    if stats.warm_paused_until and is_circuit_open(stats, now):
        notes.append(render_badge("paused", f"circuit open for {format_age(stats.warm_paused_until - now)}"))
    if stats.starts_failing_since:
        notes.append(render_badge("failed", f"starts failing for {format_age(now - stats.starts_failing_since)}"))
    return PoolUsage(stats, build_changelist_url("sandboxes_sandbox", slice="live", pool__id__exact=stats.pk), parts, notes)


@admin.register(Pool)
class PoolAdmin(ConsoleModelAdmin):
    list_display = ["name", "condition", "filled", "ready", "provider_label", "size"]
    search_fields = ["name__startswith"]
    search_help_text = "Name (prefix)"
    ordering = ["name"]
    list_tabs = {
        "all": ListTab("All", "No pools yet. Add a pool to let agents acquire leases."),
        "draining": ListTab("Draining", "No pool is draining.", lambda now: Q(draining=True)),
        "paused": ListTab(
            "Circuit open", "No open circuits: every pool can start sandboxes.", lambda now: Q(warm_paused_until__gt=now)
        ),
        "failing": ListTab(
            "Starts failing", "No pool fails to start sandboxes.", lambda now: Q(starts_failing_since__isnull=False)
        ),
    }
    fieldsets = [
        (
            None,
            {
                "fields": [
                    "name",
                    "capacity",
                    "automatic_capacity",
                    "max_starting",
                    "warm_target",
                    "provider",
                    "image",
                    "runtime",
                    "restricted",
                ]
            },
        ),
        (
            "Resources of each new sandbox",
            {
                "fields": [
                    "memory_mib",
                    "millicpus",
                    "pids",
                    "workspace_limit_mib",
                ]
            },
        ),
        ("Resources by request", {"fields": [*LIMIT_LABELS]}),
    ]
    labels = {
        "automatic_capacity": "Automatic capacity",
        "max_starting": "Concurrent starts",
        "warm_target": "Warm target",
        "memory_mib": "Memory (MiB)",
        "millicpus": "CPU (millicores)",
        **LIMIT_LABELS,
        "allowed_images": "Further images by request",
        "pids": "Process limit",
        "workspace_limit_mib": "Workspace limit (MiB)",
    }
    change_form_outer_before_template = "admin/sandboxes/pool/usage.html"
    row_actions = {"drain": DRAIN_ACTION, "resume": RESUME_ACTION, "warm_again": CLOSE_CIRCUIT_ACTION}

    def get_readonly_fields(self, request: HttpRequest, obj: Pool | None = None) -> list[str]:
        return ["name"] if obj else []  # environment types, requests and scripts refer to a pool by name

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        derived = capacity.try_derive_capacity("", settings.SANDBOX_MEMORY_MIB)
        return ({"capacity": derived.places} if derived else {}) | super().get_changeform_initial_data(request)

    def save_model(self, request: HttpRequest, obj: Pool, form: Any, change: bool) -> None:
        automatic = obj.automatic_capacity
        capacity.save_pool(obj, form.changed_data, now=database_time.now())
        if change and automatic and not obj.automatic_capacity:
            form.changed_data.append("automatic_capacity")  # stated in the log entry

    def annotate_rows(self, rows: list[Pool]) -> None:
        by_pool = {each.pk: each for each in pool_stats.collect_pool_stats(now=database_time.now())}
        for row in rows:
            row.stats = by_pool[row.pk]  # type: ignore[attr-defined]

    @display(description="State")
    def condition(self, row: Pool) -> SafeString:
        state = render_badge("draining") if row.draining else render_badge("ok", "active")
        problems = {"circuit open": is_circuit_open(row, database_time.now()), "starts failing": row.starts_failing_since}
        alarm = ", ".join(text for text, present in problems.items() if present)
        return render_two_lines(state, format_html('<b class="lh-alarm">{}</b>', alarm)) if alarm else state

    @display(description="Used")
    def filled(self, row: Pool) -> SafeString:
        cold = row.stats.cold  # type: ignore[attr-defined]
        text = f"{row.used:,} of {row.capacity:,}"
        return render_two_lines(render_meter(row.used, row.capacity), f"{text}, {cold:,} cold" if cold else text)

    @display(description="Pre-warmed")
    def ready(self, row: Pool) -> str:
        ready = row.stats.warm_ready  # type: ignore[attr-defined]
        return f"{ready:,} of {row.warm_target:,}" if row.warm_target else "–"

    @display(description="Provider and image")
    def provider_label(self, row: Pool) -> SafeString:
        provider = row.provider or "default provider"
        return render_two_lines(f"{provider}, {row.runtime}" if row.runtime else provider, row.image or "default image")

    @display(description="Resources")
    def size(self, row: Pool) -> SafeString:
        return render_two_lines(f"{row.memory_mib:,} MiB", f"{row.millicpus / 1000:g} CPU, {row.pids} processes")

    def get_page_context(self, request: HttpRequest, row: Pool) -> dict[str, Any]:
        now = database_time.now()
        stats = next(each for each in pool_stats.collect_pool_stats(now=now) if each.pk == row.pk)
        may_view = request.user.has_perm("sandboxes.view_quota")
        quotas = list(row.quotas.order_by("-used", "agent_did")[: MAX_PANEL_ROWS + 1]) if may_view else []
        hosts = engine_quotas.find_hosts(row.provider or providers.get_default_provider_name())
        panels = build_quota_panels(hosts, now)
        return {
            "facts": build_pool_fields(row, stats, now, panels),
            "engine_quotas": panels,
            "usage": build_pool_usage(stats, now),
            "warm_error": decode_output(row.warm_error.encode()),
            "audit": list_audit_entries(row, MAX_PANEL_ROWS),
            "quotas": [build_quota_row(quota, quota.agent_did) for quota in quotas[:MAX_PANEL_ROWS]],
            "quota_subject_label": "Agent",
            "all_quotas": build_changelist_url("sandboxes_quota", pool__id__exact=row.pk)
            if len(quotas) > MAX_PANEL_ROWS
            else "",
            "new_quota": build_add_quota_url(request, pool=row.pk),
            "may_view_quotas": may_view,
        }


def build_pool_fields(row: Pool, stats: PoolStats, now: datetime, quotas: Sequence[QuotaPanel]) -> list[SummaryField]:
    """Build the summary of a pool. Each number of sandboxes links to those sandboxes."""
    live = row.sandboxes.exclude(state=SandboxState.DESTROYED)
    problems = {name: Count("pk", filter=tabs.SANDBOX_TABS[name].get_filter(now)) for name in PROBLEM_TAB_LABELS}
    counts = live.aggregate(unclaimed=Count("pk", filter=tabs.UNCLAIMED_TAB.get_filter(now)), **problems)
    outdated = counts["unclaimed"] - stats.warm_ready
    target = f"target {row.warm_target:,}" if row.warm_target else "no warm target"
    return [
        SummaryField("State", render_badge("draining") if row.draining else render_badge("ok", "active")),
        SummaryField(
            "Used",
            f"{stats.used:,} of {stats.capacity:,}",
            note=render_two_lines(render_meter(stats.used, stats.capacity), f"{stats.cold:,} cold" if stats.cold else ""),
            href=build_changelist_url("sandboxes_sandbox", slice="live", pool__id__exact=row.pk),
        ),
        build_queue_field(row, stats, now),
        SummaryField(
            "Capacity",
            *describe_capacity(row),
        ),
        *build_quota_fields(quotas),
        SummaryField(
            "Unclaimed",
            f"{counts['unclaimed']:,}",
            note=f"{target}; {outdated:,} outdated (image or memory changed)" if outdated else target,
            href=build_changelist_url("sandboxes_sandbox", slice="unclaimed", pool__id__exact=row.pk),
        ),
        build_last_start_field(row, now),
        build_circuit_field(row, now),
        build_hosts_field(row, now),
        *[
            SummaryField(
                label,
                f"{counts[name]:,}",
                href=build_changelist_url("sandboxes_sandbox", slice=name, pool__id__exact=row.pk),
                alarm=counts[name] > 0,
            )
            for name, label in PROBLEM_TAB_LABELS.items()
        ],
        SummaryField(
            "Evicted",
            f"{sum(count_evictions(stats).values()):,}",
            note=format_counts(count_evictions(stats)) or "to make room for other sandboxes",
        ),
        SummaryField("Became cold", f"{stats.slept:,}", note="when idle or to make room"),
        SummaryField(
            "Provisioned",
            f"{sum(count_starts_by_source(stats).values()):,}",
            note=format_counts(count_starts_by_source(stats)),
        ),
        SummaryField("Owner label", row.owner, note="label of this pool's sandboxes at the provider"),
    ]


def build_queue_field(row: Pool, stats: PoolStats, now: datetime) -> SummaryField:
    """Build the length of the queue for places, with the longest wait."""
    first = row.admission_requests.filter(expires_at__gt=now).order_by("enqueued_at").first()
    note = f"requests that wait for a place, longest {format_age(now - first.enqueued_at)}" if first else "no request waits"
    return SummaryField("Queue", f"{stats.queue_length:,}", note=note, alarm=stats.queue_length > 0)


def describe_capacity(row: Pool) -> tuple[str, str]:
    """Return the capacity and its origin, as they were last derived: a page must not wait for the engine."""
    if not row.automatic_capacity:
        return f"{row.capacity:,}", "set by an operator"
    if not row.capacity_origin:
        return "not derived yet", f"{row.capacity:,} until a recount sweep reaches the provider"
    return f"{row.capacity:,}, automatic", row.capacity_origin


def build_hosts_field(row: Pool, now: datetime) -> SummaryField:
    """Build the number of hosts of the pool's provider whose starts are paused."""
    hosts = Host.objects.filter(provider=row.provider or providers.get_default_provider_name())
    paused = hosts.filter(starts_paused_until__gt=now).count()
    limit = f"at most {row.max_starting:,} at the same time" if row.max_starting else "no limit of concurrent starts"
    state = f"paused on {pluralize(paused, 'host', 'hosts')}" if paused else "allowed"
    return SummaryField("Starts", state, note=limit, href=build_changelist_url("sandboxes_host"), alarm=paused > 0)


PROBLEM_TAB_LABELS = {"quarantine": "Quarantine", "stalled": "Stalled", "lost": "Lost", "unstored": "State not stored"}


def build_last_start_field(row: Pool, now: datetime) -> SummaryField:
    """Build the outcome of the pool's last start, and the error of a failed one."""
    if row.starts_failing_since is None:
        return SummaryField("Last start", "no failure", note="it succeeded, or there was none yet")
    failing = render_timestamp(row.starts_failing_since, f"failing for {format_age(now - row.starts_failing_since)}")
    return SummaryField("Last start", failing, note=truncate_text(row.start_error), alarm=True)


def build_circuit_field(row: Pool, now: datetime) -> SummaryField:
    """Build the state of the circuit breaker for warm starts."""
    failed = pluralize(row.warm_failures, "failed start", "failed starts")
    if row.warm_paused_until and is_circuit_open(row, now):
        left = render_timestamp(row.warm_paused_until, f"open for {format_age(row.warm_paused_until - now)}")
        return SummaryField("Circuit breaker", left, note=f"after {failed}: {truncate_text(row.warm_error)}", alarm=True)
    note = f"{failed} in a row" if row.warm_failures else "no failed warm starts"
    return SummaryField("Circuit breaker", "closed", note=note)
