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
from sandboxes.admin.base import Act, Fact, Page, Reason, Slice, done_to
from sandboxes.admin.formatting import age, badge, counted, link, listed, meter, rows, shortened, stamp, text, two
from sandboxes.models import Pool, Quota, State
from sandboxes.pool_stats import PoolStats

SHOWN = 12  # quotas on a pool's page, those of whoever uses most

DRAIN = Act(
    title="Drain",
    warning="It takes nothing new from now on. What it has goes on: leases run, and their sandboxes sleep and wake.",
    done="draining",
    illegal="it is draining already",
    legal=lambda row: not row.draining,
    verb=lambda row, actor, reason, now: pool.drain(row, draining=True, actor=actor),
)
RESUME = Act(
    title="Resume",
    warning="It takes new sandboxes again.",
    done="resumed",
    illegal="it is not draining",
    legal=lambda row: row.draining,
    verb=lambda row, actor, reason, now: pool.drain(row, draining=False, actor=actor),
)
WARM_AGAIN = Act(
    title="Warm up again",
    warning="The next sweep, within a minute, starts sandboxes ahead of demand again. Three more failures stop it again.",
    done="warming up again",
    illegal="its circuit is not open",
    legal=lambda row: paused(row, timezone.now()),
    verb=lambda row, actor, reason, now: pool.warm_again(row, now=now, actor=actor),
)


def paused(one: Pool | PoolStats, now: datetime) -> bool:
    """Its circuit is open: after repeated failures nothing is warmed up."""
    return one.warm_paused_until is not None and one.warm_paused_until > now


# --- what fills a pool, also on the first page ------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The sandboxes of one pool in one state, and the list of exactly those."""

    state: str
    number: int
    percent: float
    href: str


@dataclass(frozen=True)
class Filling:
    """A pool, what fills its places, and what has become of them."""

    stats: PoolStats
    href: str
    parts: list[Part]
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
        became = [f"{title}: {listed(parts(one))}" for title, parts in BECAME.items() if any(parts(one).values())]
        return [each for each in (ready, *became) if each]


def evicted(one: PoolStats) -> dict[str, int]:
    """Whose place was taken for somebody else, by what it was before."""
    return {"cold": one.evicted_cold, "warm": one.evicted_warm, "waiting": one.evicted_waiting}


def woken(one: PoolStats) -> dict[str, int]:
    """Where what was asked for came from: started ahead of demand, or woken with state from here or there."""
    return {"prewarmed": one.claimed_warm, "local": one.woken_local, "cloud": one.woken_cloud, "fresh": one.woken_fresh}


BECAME = {"Evicted": evicted, "Woken": woken}


def fillings(pools: Sequence[PoolStats], now: datetime) -> list[Filling]:
    return [filling(one, now) for one in pools]


def filling(one: PoolStats, now: datetime) -> Filling:
    parts = [
        Part(
            state,
            number,
            100 * number / max(one.capacity, one.total),
            rows("sandboxes_sandbox", slice="live", pool__id__exact=one.pk, state__exact=state),
        )
        for state in State.values
        if (number := getattr(one, state, 0))
    ]
    notes = [badge("draining")] if one.draining else []
    if one.warm_paused_until and paused(one, now):
        notes.append(badge("paused", f"circuit open for {age(one.warm_paused_until - now)}"))
    return Filling(one, rows("sandboxes_sandbox", slice="live", pool__id__exact=one.pk), parts, notes)


# --- pools ------------------------------------------------------------------------------------------------------------


@admin.register(Pool)
class PoolAdmin(Page):
    list_display = ["name", "condition", "filled", "ready", "where", "size"]
    search_fields = ["name__startswith"]
    ordering = ["name"]
    slices = {
        "all": Slice("All", "No pool yet: add one to let agents in."),
        "draining": Slice("Draining", "No pool is draining.", lambda now: Q(draining=True)),
        "paused": Slice("Circuit open", "Every pool may warm up.", lambda now: Q(warm_paused_until__gt=now)),
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
    acts = {"drain": DRAIN, "resume": RESUME, "warm_again": WARM_AGAIN}
    actions_detail = ["drain", "resume", "warm_again"]

    def get_readonly_fields(self, request: HttpRequest, obj: Pool | None = None) -> list[str]:
        return ["name"] if obj else []  # environment types, requests and scripts call it by its name

    def complete(self, rows: list[Pool]) -> None:
        found = {one.pk: one for one in stats.of_pools(now=timezone.now())}
        for row in rows:
            row.stats = found[row.pk]  # type: ignore[attr-defined]

    @display(description="State")
    def condition(self, row: Pool) -> SafeString:
        state = badge("draining") if row.draining else badge("ok", "in use")
        alarm = format_html('<b class="lh-alarm">{}</b>', "circuit open")
        return two(state, alarm) if paused(row, timezone.now()) else state

    @display(description="Used")
    def filled(self, row: Pool) -> SafeString:
        cold = row.stats.cold  # type: ignore[attr-defined]
        said = f"{row.used:,} of {row.capacity:,}"
        return two(meter(row.used, row.capacity), f"{said}, {cold:,} cold" if cold else said)

    @display(description="Ready")
    def ready(self, row: Pool) -> str:
        ready = row.stats.warm_ready  # type: ignore[attr-defined]
        return f"{ready:,} of {row.warm_target:,}" if row.warm_target else "–"

    @display(description="Provider and image")
    def where(self, row: Pool) -> SafeString:
        return two(row.provider or "as SANDBOX_PROVIDER says", row.image or "as LEASEHOLD_SANDBOX_IMAGE says")

    @display(description="Each sandbox")
    def size(self, row: Pool) -> SafeString:
        return two(f"{row.memory_mib:,} MiB", f"{row.millicpus / 1000:g} CPU, {row.pids} processes")

    def page(self, request: HttpRequest, row: Pool) -> dict[str, Any]:
        now = timezone.now()
        one = next(each for each in stats.of_pools(now=now) if each.pk == row.pk)
        may_view = request.user.has_perm("sandboxes.view_quota")
        quotas = list(row.quotas.order_by("-used", "agent_did")[: SHOWN + 1]) if may_view else []
        return {
            "facts": facts(row, one, now),
            "filling": filling(one, now),
            "warm_error": text(row.warm_error.encode()),
            "done": done_to(row, SHOWN),
            "quotas": [quota_line(quota, quota.agent_did) for quota in quotas[:SHOWN]],
            "quota_of": "Agent",
            "all_quotas": rows("sandboxes_quota", pool__id__exact=row.pk) if len(quotas) > SHOWN else "",
            "new_quota": new_quota(request, pool=row.pk),
            "may_view_quotas": may_view,
        }

    def has_drain_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.drain_pool")

    @action(description="Drain…", permissions=["drain"], icon="pause", dialog=DRAIN.dialog)
    def drain(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, DRAIN, form)

    @action(description="Resume…", permissions=["drain"], icon="play_arrow", dialog=RESUME.dialog)
    def resume(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RESUME, form)

    @action(description="Warm up again…", permissions=["drain"], icon="replay", dialog=WARM_AGAIN.dialog)
    def warm_again(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, WARM_AGAIN, form)


def facts(row: Pool, one: PoolStats, now: datetime) -> list[Fact]:
    """The strip of a pool's page. Whatever is a number of sandboxes links to exactly those."""
    live = row.sandboxes.exclude(state=State.DESTROYED)
    asked = {name: Count("pk", filter=slices.SANDBOXES[name].where(now)) for name in TROUBLES}
    found = live.aggregate(unclaimed=Count("pk", filter=slices.UNCLAIMED.where(now)), **asked)
    outdated = found["unclaimed"] - one.warm_ready
    wanted = f"{row.warm_target:,} wanted" if row.warm_target else "none wanted"
    return [
        Fact("Takes new ones", badge("draining", "no: draining") if row.draining else badge("ok", "yes")),
        Fact(
            "Used",
            f"{one.used:,} of {one.capacity:,}",
            note=two(meter(one.used, one.capacity), f"{one.cold:,} cold" if one.cold else ""),
            href=rows("sandboxes_sandbox", slice="live", pool__id__exact=row.pk),
        ),
        Fact(
            "Ready, held by nobody",
            f"{found['unclaimed']:,}",
            note=f"{wanted}; {outdated:,} of another image or memory" if outdated else wanted,
            href=rows("sandboxes_sandbox", slice="unclaimed", pool__id__exact=row.pk),
        ),
        circuit(row, now),
        *[
            Fact(
                label,
                f"{found[name]:,}",
                href=rows("sandboxes_sandbox", slice=name, pool__id__exact=row.pk),
                alarm=found[name] > 0,
            )
            for name, label in TROUBLES.items()
        ],
        Fact(
            "Evicted",
            f"{sum(evicted(one).values()):,}",
            note=listed(evicted(one)) or "no place was taken for somebody else",
        ),
        Fact("Put to sleep", f"{one.slept:,}", note="when idle, or to make room"),
        Fact("Woken", f"{sum(woken(one).values()):,}", note=listed(woken(one))),
        Fact("Owner label", row.owner, note="by which the provider lists its sandboxes"),
    ]


TROUBLES = {"quarantine": "Quarantine", "stalled": "Stalled", "lost": "Lost", "unstored": "State not stored"}


def circuit(row: Pool, now: datetime) -> Fact:
    """Whether it may warm up, and why not."""
    failed = counted(row.warm_failures, "failed start", "failed starts")
    if row.warm_paused_until and paused(row, now):
        left = stamp(row.warm_paused_until, f"open for {age(row.warm_paused_until - now)}")
        return Fact("Circuit", left, note=f"after {failed}: {shortened(row.warm_error)}", alarm=True)
    return Fact("Circuit", "closed", note=f"{failed} in a row" if row.warm_failures else "nothing keeps it from warming up")


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
class QuotaAdmin(Page):
    form = QuotaForm
    list_display = ["agent_did", "pool", "filled", "limit", "promised"]
    list_filter = ["pool"]
    list_select_related = ["pool"]
    search_fields = ["agent_did__startswith"]
    search_help_text = "Agent"
    ordering = ["pool_id", "agent_did"]
    slices = {
        "all": Slice("All", "No agent has had a place in any pool, and no limit is set."),
        "set": Slice(
            "Limited or guaranteed",
            "No agent has a limit or a guarantee.",
            lambda now: Q(most__isnull=False) | Q(guaranteed__gt=0),
        ),
        "full": Slice("At their limit", "Every agent has room left.", lambda now: Q(used__gte=F("most"))),
    }
    fields = ["pool", "agent_did", "most", "guaranteed"]
    labels = {"most": "At most", "guaranteed": "Guaranteed"}

    def get_readonly_fields(self, request: HttpRequest, obj: Quota | None = None) -> list[str]:
        return ["pool", "agent_did"] if obj else []

    @display(description="Used")
    def filled(self, row: Quota) -> SafeString | str:
        return used_of(row)

    @display(description="At most")
    def limit(self, row: Quota) -> str:
        return "no limit" if row.most is None else f"{row.most:,}"

    @display(description="Guaranteed")
    def promised(self, row: Quota) -> str:
        return f"{row.guaranteed:,}" if row.guaranteed else "–"

    def agent(self, did: str) -> Fact:
        """`leases.admin.leases` overrides it: for this app an agent is only a name."""
        return Fact("Agent", did)

    def page(self, request: HttpRequest, row: Quota) -> dict[str, Any]:
        spare = max(row.guaranteed - row.used, 0)
        return {
            "facts": [
                self.agent(row.agent_did),
                Fact("Pool", link("sandboxes_pool", row.pool_id, row.pool)),
                Fact(
                    "Used",
                    f"{row.used:,}",
                    note="no limit" if row.most is None else f"of {row.most:,} at most",
                    href=rows(
                        "sandboxes_sandbox", slice="live", agent_did=row.agent_did, pool__id__exact=row.pool_id
                    ),
                    alarm=row.most is not None and row.used >= row.most,
                ),
                Fact(
                    "Guaranteed",
                    f"{row.guaranteed:,}",
                    note="while it has no more, none of its places is taken for others" if row.guaranteed else "nothing",
                ),
                *([Fact("Not used of it", f"{spare:,}")] if spare else []),
            ]
        }  # fmt: skip


def used_of(quota: Quota) -> SafeString | str:
    """What an agent has of what it may have."""
    if quota.most is None:
        return f"{quota.used:,}"
    return two(meter(quota.used, quota.most), f"{quota.used:,} of {quota.most:,}")


def quota_line(quota: Quota, of: Any) -> tuple[SafeString, SafeString | str, str]:
    """A row of the tables of quotas on the pages of pools and agents."""
    return (
        link("sandboxes_quota", quota.pk, of),
        used_of(quota) if quota.most is not None else f"{quota.used:,}, no limit",
        f"{quota.guaranteed:,}" if quota.guaranteed else "–",
    )


def new_quota(request: HttpRequest, **known: Any) -> str:
    """Where this user may set one more, with what is known of it filled in."""
    if not request.user.has_perm("sandboxes.add_quota"):
        return ""
    return reverse("admin:sandboxes_quota_add", query=known)
