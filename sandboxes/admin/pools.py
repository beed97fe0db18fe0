"""Operators' pages on pools and on what each agent may take of them. `leases.admin.leases` names the agents."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Count, F, Q
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import action, display

from sandboxes import pool
from sandboxes import pool_stats as stats
from sandboxes.admin import tabs as slices
from sandboxes.admin.base import AdminAction, ConsoleModelAdmin, ListTab, ReasonForm, SummaryField, list_audit_entries
from sandboxes.admin.formatting import (
    build_changelist_url,
    decode_output,
    format_age,
    format_counts,
    pluralize,
    render_admin_link,
    render_badge,
    render_meter,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.models import Pool, Quota, SandboxState
from sandboxes.pool_stats import PoolStats

MAX_PANEL_ROWS = 12  # quotas on a pool's page, those of whoever uses most

DRAIN_ACTION = AdminAction(
    title="Drain",
    warning="It takes nothing new from now on. What it has goes on: leases run, and their sandboxes sleep and wake.",
    done="draining",
    refusal_reason="it is draining already",
    legal=lambda row: not row.draining,
    verb=lambda row, actor, reason, now: pool.set_draining(row, draining=True, actor=actor),
)
RESUME_ACTION = AdminAction(
    title="Resume",
    warning="It takes new sandboxes again.",
    done="resumed",
    refusal_reason="it is not draining",
    legal=lambda row: row.draining,
    verb=lambda row, actor, reason, now: pool.set_draining(row, draining=False, actor=actor),
)
CLOSE_CIRCUIT_ACTION = AdminAction(
    title="Warm up again",
    warning="The next sweep, within a minute, starts sandboxes ahead of demand again. Three more failures stop it again.",
    done="warming up again",
    refusal_reason="its circuit is not open",
    legal=lambda row: is_circuit_open(row, timezone.now()),
    verb=lambda row, actor, reason, now: pool.resume_warming(row, now=now, actor=actor),
)


def is_circuit_open(one: Pool | PoolStats, now: datetime) -> bool:
    """Its circuit is open: after repeated failures nothing is warmed up."""
    return one.warm_paused_until is not None and one.warm_paused_until > now


# --- what fills a pool, also on the first page ------------------------------------------------------------------------


@dataclass(frozen=True)
class StateShare:
    """The sandboxes of one pool in one state, and the list of exactly those."""

    state: str
    number: int
    percent: float
    href: str


@dataclass(frozen=True)
class PoolUsage:
    """A pool, what fills its places, and what has become of them."""

    stats: PoolStats
    href: str
    parts: list[StateShare]
    notes: list[SafeString]  # what an operator did to it, or should look at

    @property
    def said(self) -> str:
        held = ", ".join(f"{part.number} {part.state}" for part in self.parts) or "nothing"
        return f"{self.stats.used} of {self.stats.capacity} places used: {held}"

    @property
    def counts(self) -> list[str]:
        """What it keeps ready, and what has become of its sandboxes since it was made; only what there is."""
        one = self.stats
        ready = f"{one.warm_ready:,} of {one.warm_target:,} ready" if one.warm_target else ""
        became = [
            f"{title}: {format_counts(parts(one))}" for title, parts in TURNOVER_COUNTERS.items() if any(parts(one).values())
        ]
        return [each for each in (ready, *became) if each]


def count_evictions(one: PoolStats) -> dict[str, int]:
    """Whose place was taken for somebody else, by what it was before."""
    return {"cold": one.evicted_cold, "warm": one.evicted_warm, "waiting": one.evicted_waiting}


def count_starts_by_source(one: PoolStats) -> dict[str, int]:
    """Where what was asked for came from: started ahead of demand, or woken with state from here or there."""
    return {"prewarmed": one.claimed_warm, "local": one.woken_local, "cloud": one.woken_cloud, "fresh": one.woken_fresh}


TURNOVER_COUNTERS = {"Evicted": count_evictions, "Woken": count_starts_by_source}


def build_pool_usages(pools: Sequence[PoolStats], now: datetime) -> list[PoolUsage]:
    return [build_pool_usage(one, now) for one in pools]


def build_pool_usage(one: PoolStats, now: datetime) -> PoolUsage:
    parts = [
        StateShare(
            state,
            number,
            100 * number / max(one.capacity, one.total),
            build_changelist_url("sandboxes_sandbox", slice="live", pool__id__exact=one.pk, state__exact=state),
        )
        for state in SandboxState.values
        if (number := getattr(one, state, 0))
    ]
    notes = [render_badge("draining")] if one.draining else []
    if one.warm_paused_until and is_circuit_open(one, now):
        notes.append(render_badge("paused", f"circuit open for {format_age(one.warm_paused_until - now)}"))
    return PoolUsage(one, build_changelist_url("sandboxes_sandbox", slice="live", pool__id__exact=one.pk), parts, notes)


# --- pools ------------------------------------------------------------------------------------------------------------


@admin.register(Pool)
class PoolAdmin(ConsoleModelAdmin):
    list_display = ["name", "condition", "filled", "ready", "where", "size"]
    search_fields = ["name__startswith"]
    ordering = ["name"]
    slices = {
        "all": ListTab("All", "No pool yet: add one to let agents in."),
        "draining": ListTab("Draining", "No pool is draining.", lambda now: Q(draining=True)),
        "paused": ListTab("Circuit open", "Every pool may warm up.", lambda now: Q(warm_paused_until__gt=now)),
    }
    fieldsets = [
        (None, {"fields": ["name", "capacity", "warm_target", "provider", "image"]}),
        ("Each new sandbox gets", {"fields": ["memory_mib", "millicpus", "pids", "workspace_limit_mib"]}),
    ]
    labels = {
        "warm_target": "Kept ready",
        "memory_mib": "Memory in MiB",
        "millicpus": "Thousandths of a CPU",
        "pids": "Processes",
        "workspace_limit_mib": "Workspace in MiB",
    }
    change_form_outer_before_template = "admin/sandboxes/pool/filling.html"
    acts = {"drain": DRAIN_ACTION, "resume": RESUME_ACTION, "warm_again": CLOSE_CIRCUIT_ACTION}
    actions_detail = ["drain", "resume", "warm_again"]

    def get_readonly_fields(self, request: HttpRequest, obj: Pool | None = None) -> list[str]:
        return ["name"] if obj else []  # environment types, requests and scripts call it by its name

    def complete(self, rows: list[Pool]) -> None:
        found = {one.pk: one for one in stats.collect_pool_stats(now=timezone.now())}
        for row in rows:
            row.stats = found[row.pk]  # type: ignore[attr-defined]

    @display(description="State")
    def condition(self, row: Pool) -> SafeString:
        state = render_badge("draining") if row.draining else render_badge("ok", "in use")
        alarm = format_html('<b class="lh-alarm">{}</b>', "circuit open")
        return render_two_lines(state, alarm) if is_circuit_open(row, timezone.now()) else state

    @display(description="Used")
    def filled(self, row: Pool) -> SafeString:
        cold = row.stats.cold  # type: ignore[attr-defined]
        said = f"{row.used:,} of {row.capacity:,}"
        return render_two_lines(render_meter(row.used, row.capacity), f"{said}, {cold:,} cold" if cold else said)

    @display(description="Ready")
    def ready(self, row: Pool) -> str:
        ready = row.stats.warm_ready  # type: ignore[attr-defined]
        return f"{ready:,} of {row.warm_target:,}" if row.warm_target else "–"

    @display(description="Provider and image")
    def where(self, row: Pool) -> SafeString:
        return render_two_lines(row.provider or "as SANDBOX_PROVIDER says", row.image or "as LEASEHOLD_SANDBOX_IMAGE says")

    @display(description="Each sandbox")
    def size(self, row: Pool) -> SafeString:
        return render_two_lines(f"{row.memory_mib:,} MiB", f"{row.millicpus / 1000:g} CPU, {row.pids} processes")

    def page(self, request: HttpRequest, row: Pool) -> dict[str, Any]:
        now = timezone.now()
        one = next(each for each in stats.collect_pool_stats(now=now) if each.pk == row.pk)
        may_view = request.user.has_perm("sandboxes.view_quota")
        quotas = list(row.quotas.order_by("-used", "agent_did")[: MAX_PANEL_ROWS + 1]) if may_view else []
        return {
            "facts": build_pool_fields(row, one, now),
            "filling": build_pool_usage(one, now),
            "warm_error": decode_output(row.warm_error.encode()),
            "done": list_audit_entries(row, MAX_PANEL_ROWS),
            "quotas": [build_quota_row(quota, quota.agent_did) for quota in quotas[:MAX_PANEL_ROWS]],
            "quota_subject_label": "Agent",
            "all_quotas": build_changelist_url("sandboxes_quota", pool__id__exact=row.pk)
            if len(quotas) > MAX_PANEL_ROWS
            else "",
            "new_quota": build_add_quota_url(request, pool=row.pk),
            "may_view_quotas": may_view,
        }

    def has_drain_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.drain_pool")

    @action(description="Drain…", permissions=["drain"], icon="pause", dialog=DRAIN_ACTION.dialog)
    def drain(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, DRAIN_ACTION, form)

    @action(description="Resume…", permissions=["drain"], icon="play_arrow", dialog=RESUME_ACTION.dialog)
    def resume(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RESUME_ACTION, form)

    @action(description="Warm up again…", permissions=["drain"], icon="replay", dialog=CLOSE_CIRCUIT_ACTION.dialog)
    def warm_again(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, CLOSE_CIRCUIT_ACTION, form)


def build_pool_fields(row: Pool, one: PoolStats, now: datetime) -> list[SummaryField]:
    """The strip of a pool's page. Whatever is a number of sandboxes links to exactly those."""
    live = row.sandboxes.exclude(state=SandboxState.DESTROYED)
    asked = {name: Count("pk", filter=slices.SANDBOX_TABS[name].where(now)) for name in PROBLEM_TAB_LABELS}
    found = live.aggregate(unclaimed=Count("pk", filter=slices.UNCLAIMED_TAB.where(now)), **asked)
    outdated = found["unclaimed"] - one.warm_ready
    wanted = f"{row.warm_target:,} wanted" if row.warm_target else "none wanted"
    return [
        SummaryField("Takes new ones", render_badge("draining", "no: draining") if row.draining else render_badge("ok", "yes")),
        SummaryField(
            "Used",
            f"{one.used:,} of {one.capacity:,}",
            note=render_two_lines(render_meter(one.used, one.capacity), f"{one.cold:,} cold" if one.cold else ""),
            href=build_changelist_url("sandboxes_sandbox", slice="live", pool__id__exact=row.pk),
        ),
        SummaryField(
            "Ready, held by nobody",
            f"{found['unclaimed']:,}",
            note=f"{wanted}; {outdated:,} of another image or memory" if outdated else wanted,
            href=build_changelist_url("sandboxes_sandbox", slice="unclaimed", pool__id__exact=row.pk),
        ),
        build_circuit_field(row, now),
        *[
            SummaryField(
                label,
                f"{found[name]:,}",
                href=build_changelist_url("sandboxes_sandbox", slice=name, pool__id__exact=row.pk),
                alarm=found[name] > 0,
            )
            for name, label in PROBLEM_TAB_LABELS.items()
        ],
        SummaryField(
            "Evicted",
            f"{sum(count_evictions(one).values()):,}",
            note=format_counts(count_evictions(one)) or "no place was taken for somebody else",
        ),
        SummaryField("Put to sleep", f"{one.slept:,}", note="when idle, or to make room"),
        SummaryField(
            "Woken", f"{sum(count_starts_by_source(one).values()):,}", note=format_counts(count_starts_by_source(one))
        ),
        SummaryField("Owner label", row.owner, note="by which the provider lists its sandboxes"),
    ]


PROBLEM_TAB_LABELS = {"quarantine": "Quarantine", "stalled": "Stalled", "lost": "Lost", "unstored": "State not stored"}


def build_circuit_field(row: Pool, now: datetime) -> SummaryField:
    """Whether it may warm up, and why not."""
    failed = pluralize(row.warm_failures, "failed start", "failed starts")
    if row.warm_paused_until and is_circuit_open(row, now):
        left = render_timestamp(row.warm_paused_until, f"open for {format_age(row.warm_paused_until - now)}")
        return SummaryField("Circuit", left, note=f"after {failed}: {truncate_text(row.warm_error)}", alarm=True)
    return SummaryField(
        "Circuit", "closed", note=f"{failed} in a row" if row.warm_failures else "nothing keeps it from warming up"
    )


# --- quotas -----------------------------------------------------------------------------------------------------------


class QuotaForm(forms.ModelForm):
    """What one agent may have in one pool."""

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or {}
        most, guaranteed = cleaned.get("most"), cleaned.get("guaranteed")
        if most is not None and guaranteed is not None and guaranteed > most:
            self.add_error("guaranteed", f"It may have at most {most:,}: no more than those can be guaranteed.")
        return cleaned


@admin.register(Quota)
class QuotaAdmin(ConsoleModelAdmin):
    form = QuotaForm
    list_display = ["agent_did", "pool", "filled", "limit", "guaranteed_places"]
    list_filter = ["pool"]
    list_select_related = ["pool"]
    search_fields = ["agent_did__startswith"]
    search_help_text = "Agent"
    ordering = ["pool_id", "agent_did"]
    slices = {
        "all": ListTab("All", "No agent has had a place in any pool, and no limit is set."),
        "set": ListTab(
            "Limited or guaranteed",
            "No agent has a limit or a guarantee.",
            lambda now: Q(most__isnull=False) | Q(guaranteed__gt=0),
        ),
        "full": ListTab("At their limit", "Every agent has room left.", lambda now: Q(used__gte=F("most"))),
    }
    fields = ["pool", "agent_did", "most", "guaranteed"]
    labels = {"most": "At most", "guaranteed": "Guaranteed"}

    def get_readonly_fields(self, request: HttpRequest, obj: Quota | None = None) -> list[str]:
        return ["pool", "agent_did"] if obj else []

    @display(description="Used")
    def filled(self, row: Quota) -> SafeString | str:
        return render_quota_usage(row)

    @display(description="At most")
    def limit(self, row: Quota) -> str:
        return "no limit" if row.most is None else f"{row.most:,}"

    @display(description="Guaranteed")
    def guaranteed_places(self, row: Quota) -> str:
        return f"{row.guaranteed:,}" if row.guaranteed else "–"

    def agent(self, did: str) -> SummaryField:
        """`leases.admin.leases` overrides it: for this app an agent is only a name."""
        return SummaryField("Agent", did)

    def page(self, request: HttpRequest, row: Quota) -> dict[str, Any]:
        spare = max(row.guaranteed - row.used, 0)
        return {
            "facts": [
                self.agent(row.agent_did),
                SummaryField("Pool", render_admin_link("sandboxes_pool", row.pool_id, row.pool)),
                SummaryField(
                    "Used",
                    f"{row.used:,}",
                    note="no limit" if row.most is None else f"of {row.most:,} at most",
                    href=build_changelist_url(
                        "sandboxes_sandbox", slice="live", agent_did=row.agent_did, pool__id__exact=row.pool_id
                    ),
                    alarm=row.most is not None and row.used >= row.most,
                ),
                SummaryField(
                    "Guaranteed",
                    f"{row.guaranteed:,}",
                    note="while it has no more, none of its places is taken for others" if row.guaranteed else "nothing",
                ),
                *([SummaryField("Not used of it", f"{spare:,}")] if spare else []),
            ]
        }  # fmt: skip


def render_quota_usage(quota: Quota) -> SafeString | str:
    """What an agent has of what it may have."""
    if quota.most is None:
        return f"{quota.used:,}"
    return render_two_lines(render_meter(quota.used, quota.most), f"{quota.used:,} of {quota.most:,}")


def build_quota_row(quota: Quota, of: Any) -> tuple[SafeString, SafeString | str, str]:
    """A row of the tables of quotas on the pages of pools and agents."""
    return (
        render_admin_link("sandboxes_quota", quota.pk, of),
        render_quota_usage(quota) if quota.most is not None else f"{quota.used:,}, no limit",
        f"{quota.guaranteed:,}" if quota.guaranteed else "–",
    )


def build_add_quota_url(request: HttpRequest, **known: Any) -> str:
    """Where this user may set one more, with what is known of it filled in."""
    if not request.user.has_perm("sandboxes.add_quota"):
        return ""
    return reverse("admin:sandboxes_quota_add", query=known)
