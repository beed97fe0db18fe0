"""Operators' pages on who may use a sandbox, until when and by which key."""

import json
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import action, display
from unfold.enums import ActionVariant

from billing.admin.formatting import cost_so_far
from billing.admin.members import account_of
from leases import api_keys, leasing
from leases.admin import budgets, identity, spending
from leases.admin.formatting import agent_fact
from leases.admin.spending import SPENDING, Limit
from leases.admin.timeline import SOURCES, played, timeline
from leases.models import DID_ACCEPTS, Agent, AgentKey, EnvironmentType, Lease, Status, Turn, is_did
from leases.tasks import wake_reclaim
from sandboxes.admin.base import Act, Fact, Facts, Page, Reason, Slice, all_fields
from sandboxes.admin.formatting import age, ago, badge, counted, link, rows, shortened, size, span, stamp, two
from sandboxes.admin.pools import new_quota, quota_line
from sandboxes.models import AgentData, Outcome, Quota, Run, Sandbox, State
from sandboxes.models.policies import SEALED

SOON = timedelta(minutes=5)


def _end(lease: Lease, actor: str, why: str, now: datetime) -> bool:
    return leasing.end(lease.pk, reason="operator", now=now, actor=actor, why=why)


END = Act(
    title="End lease",
    warning="Its agent is refused from now on. Its sandbox is destroyed, with whatever is only in there.",
    done="ended",
    illegal="not active any more",
    legal=lambda lease: lease.status == Status.ACTIVE,
    verb=_end,
    after=wake_reclaim,
)
REVOKE = Act(
    title="Revoke key",
    warning="Whoever uses it is refused from the next request on. A revoked key never works again.",
    done="revoked",
    illegal="revoked before",
    legal=lambda key: key.revoked_at is None,
    verb=lambda key, actor, why, now: api_keys.revoke(key.pk, now=now),
)


def ends(lease: Lease, now: datetime) -> SafeString:
    """When it ends or ended, in the words of a list."""
    if lease.ended_at:
        return stamp(lease.ended_at, f"ended {age(now - lease.ended_at)} ago")
    if lease.expires_at > now:
        return stamp(lease.expires_at, f"in {age(lease.expires_at - now)}")
    return format_html('<b class="lh-alarm">{}</b>', stamp(lease.expires_at, f"overdue {age(now - lease.expires_at)}"))


@admin.register(Lease)
class LeaseAdmin(Facts):
    list_display = ["who", "state", "ends", "held", "kind", "last_used"]
    list_filter = ["status", "pool", "environment_type"]
    list_select_related = ["pool"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-leased_at", "-pk"]
    slices = {
        "active": Slice("Active", "No lease is active.", lambda now: Q(status=Status.ACTIVE)),
        "soon": Slice(
            "Ending soon",
            "No lease ends within five minutes.",
            lambda now: Q(
                status=Status.ACTIVE,
                expires_minute__lte=leasing.minute_of(now + SOON),
                expires_at__range=(now, now + SOON),
            ),
        ),
        "overdue": Slice(
            "Overdue",
            "No lease is past its end: the sweep that ends them is on time.",
            lambda now: Q(status=Status.ACTIVE, expires_minute__lte=leasing.minute_of(now), expires_at__lt=now),
        ),
        "undead": Slice(
            "Expired, not destroyed",
            "Of every ended lease, the sandbox is gone.",
            lambda now: Q(status=Status.EXPIRED),
        ),
        "history": Slice("History", "No lease was ever granted."),
    }
    fieldsets = all_fields(
        "id", "agent_did", "environment_id", "environment_type", "pool", "status", "leased_at", "last_activity_at",
        "ttl", "expires_at", "max_expires_at", "sleep_after", "expiry_conditions", "llm_limit", "ended_at", "end_reason",
        "destroyed_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/leases/lease/timeline.html"
    acts = {"limit_spending": SPENDING, "end_lease": END}
    actions_detail = ["limit_spending", "end_lease"]
    actions = ["end_leases"]

    @display(description="Agent and environment")
    def who(self, row: Lease) -> SafeString:
        return two(row.agent_did, row.environment_id)

    @display(description="State")
    def state(self, row: Lease) -> SafeString:
        return two(badge(row.status), row.end_reason) if row.end_reason else badge(row.status)

    @display(description="Ends")
    def ends(self, row: Lease) -> SafeString:
        return ends(row, timezone.now())

    @display(description="Held")
    def held(self, row: Lease) -> str:
        return span((row.ended_at or timezone.now()) - row.leased_at)

    @display(description="Type and pool")
    def kind(self, row: Lease) -> SafeString:
        return two(row.environment_type_id, row.pool)

    @display(description="Last used")
    def last_used(self, row: Lease) -> SafeString | str:
        return ago(row.last_activity_at)

    def page(self, request: HttpRequest, row: Lease) -> dict[str, Any]:
        now = timezone.now()
        before, only = _moment(request.GET.get("before", "")), request.GET.get("only", "")
        entries, older = timeline(row, before=before, only=only)
        notices, within = budgets.of_lease(request, row, now)
        return {
            "notices": notices,
            "facts": [*self.facts(row, now), *within],
            "entries": entries,
            "newer": before,
            "older": "?" + urlencode({"only": only, "before": older.isoformat()}) if older else "",
            "chips": [(name, label, only == name) for name, label in {"": "Everything", **SOURCES}.items()],
        }

    def facts(self, row: Lease, now: datetime) -> list[Fact]:
        sandboxes = Sandbox.objects.filter(holder=row.pk).select_related("pool").order_by("-created_at")
        ran = Run.objects.filter(holder=row.pk).aggregate(
            all=Count("pk"), bad=Count("pk", filter=~Q(outcome__in=[Outcome.OK, Outcome.OPEN]))
        )
        sandbox = sandboxes.first()
        return [
            Fact("State", badge(row.status), note=row.end_reason),
            agent_fact(row.agent_did),
            Fact("Environment", row.environment_id, note=row.environment_type_id),
            Fact("Held", span((row.ended_at or now) - row.leased_at), note=format_html("since {}", stamp(row.leased_at))),
            Fact("Ends", ends(row, now), note=format_html("at the latest {}", stamp(row.max_expires_at))),
            Fact("Last used", ago(row.last_activity_at), note=f"ends unless used for {span(row.ttl)}"),
            Fact(
                "Sandbox",
                link("sandboxes_sandbox", sandbox.pk, badge(sandbox.state)) if sandbox else "none yet",
                note=f"{sandbox.pool}, {sandbox.provider}" if sandbox else "",
            ),
            Fact(
                "Runs",
                f"{ran['all']:,}",
                href=rows("sandboxes_run", slice="all", holder=row.pk),
                note=format_html(
                    '<a class="lh-link lh-alarm" href="{}">{} not ok</a>',
                    rows("sandboxes_run", slice="failed", holder=row.pk),
                    f"{ran['bad']:,}",
                )
                if ran["bad"]
                else "",
            ),
            *spending.of_lease(row),
            cost_so_far(holder=row.pk),
        ]

    def has_end_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("leases.end_lease")

    @action(description="Spend limit…", permissions=["end"], icon="savings", dialog=SPENDING.dialog)
    def limit_spending(self, request: HttpRequest, form: Limit, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, SPENDING, form)

    @action(description="End lease…", permissions=["end"], icon="block", variant=ActionVariant.DANGER, dialog=END.dialog)
    def end_lease(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, END, form)

    @action(description="End leases… (active only)", permissions=["end"])
    def end_leases(self, request: HttpRequest, queryset: QuerySet[Lease]) -> HttpResponse | None:
        return self.ask(request, queryset, END)


def _moment(raw: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(raw)
    except ValueError:
        return None
    return moment if timezone.is_aware(moment) else None


@admin.register(Turn)
class TurnAdmin(Facts):
    list_display = ["turn", "who", "state", "action_line", "lasted", "started"]
    list_filter = ["skipped"]
    list_select_related = ["lease"]
    search_fields = ["lease__agent_did__startswith", "lease__environment_id__startswith"]
    search_help_text = "Agent or environment"
    ordering = ["-pk"]
    slices = {
        "all": Slice("All", "No turn was played yet."),
        "skipped": Slice("Skipped", "Every turn was answered with an action.", lambda now: Q(skipped=True)),
        "open": Slice("Being played", "No turn is being played.", lambda now: Q(ended_at__isnull=True)),
    }
    fieldsets = all_fields("lease", "number", "run", "started_at", "deadline_at", "ended_at", "skipped")
    change_form_outer_before_template = "admin/leases/turn/action.html"

    @display(description="Turn")
    def turn(self, row: Turn) -> str:
        return str(row.number)

    @display(description="Agent and environment")
    def who(self, row: Turn) -> SafeString:
        return two(row.lease.agent_did, row.lease.environment_id)

    @display(description="State")
    def state(self, row: Turn) -> SafeString:
        return played(row)

    @display(description="Action")
    def action_line(self, row: Turn) -> SafeString:
        return format_html('<span class="lh-command">{}</span>', shortened(row.answer) or "–")

    @display(description="Took")
    def lasted(self, row: Turn) -> str:
        return span((row.ended_at or timezone.now()) - row.started_at)

    @display(description="Started")
    def started(self, row: Turn) -> SafeString | str:
        return ago(row.started_at)

    def page(self, request: HttpRequest, row: Turn) -> dict[str, Any]:
        return {
            "facts": [
                Fact("Turn", row.number, note=played(row)),
                Fact("Lease", link("leases_lease", row.lease_id, row.lease)),
                Fact("Run", link("sandboxes_run", row.run_id, row.run_id) if row.run_id else "none"),
                Fact("Started", ago(row.started_at), note=stamp(row.started_at)),
                Fact("Took" if row.ended_at else "Playing for", self.lasted(row)),
            ],
            "action_json": json.dumps(row.action, indent=2, ensure_ascii=False) if row.answer else "",
        }


@admin.register(Agent)
class AgentAdmin(Page):
    list_display = ["did", "name", "active", "created"]
    search_fields = ["did__startswith", "name__startswith"]
    search_help_text = "DID or name"
    ordering = ["did"]
    fields = ["did", "name"]
    change_form_outer_after_template = "admin/leases/agent/keys.html"

    def get_readonly_fields(self, request: HttpRequest, obj: Agent | None = None) -> list[str]:
        return ["did"] if obj else []

    def complete(self, rows: list[Agent]) -> None:
        active = Lease.objects.filter(agent_did__in=[row.did for row in rows], status=Status.ACTIVE)
        counts = dict(active.order_by().values_list("agent_did").annotate(Count("pk")))
        for row in rows:
            row.active_leases = counts.get(row.did, 0)  # type: ignore[attr-defined]

    @display(description="Active leases")
    def active(self, row: Agent) -> SafeString:
        href = rows("leases_lease", slice="active", agent_did=row.did)
        return format_html('<a class="lh-link" href="{}">{}</a>', href, row.active_leases)  # type: ignore[attr-defined]

    @display(description="Known since")
    def created(self, row: Agent) -> SafeString | str:
        return ago(row.created_at)

    def page(self, request: HttpRequest, row: Agent) -> dict[str, Any]:
        mine = Lease.objects.filter(agent_did=row.did)
        active, latest = mine.filter(status=Status.ACTIVE).count(), mine.order_by("-leased_at").first()
        living = Sandbox.objects.filter(agent_did=row.did).exclude(state=State.DESTROYED).count()
        return {
            "notices": budgets.of_agent(request, row.did, timezone.now()),
            "facts": [
                Fact("Active leases", active, href=rows("leases_lease", slice="active", agent_did=row.did)),
                Fact("Every lease", mine.count(), href=rows("leases_lease", slice="history", agent_did=row.did)),
                Fact("Sandboxes", living, href=rows("sandboxes_sandbox", slice="live", agent_did=row.did)),
                Fact("Runs", "newest first", href=rows("sandboxes_run", slice="all", agent_did=row.did)),
                *spending.of_agent(row.did),
                account_of(row.did),
                cost_so_far(agent_did=row.did),
                self.data(row),
                identity.signs(request, row.did),
                Fact("Last used", ago(latest.last_activity_at) if latest else "never"),
                Fact("Known since", ago(row.created_at)),
            ],
            "keys": [key for key in AgentKey.objects.filter(dids__icontains=row.did) if row.did in key.dids],
            "may_view_keys": request.user.has_perm("leases.view_agentkey"),
            **self.quotas(request, row),
        }

    def data(self, row: Agent) -> Fact:
        """What it keeps from sandbox to sandbox."""
        kept = AgentData.objects.filter(agent_did=row.did).first()
        if kept is None:
            return Fact("Data", "nothing yet", note="what it writes to /data is kept")
        note = format_html("{}, changed {}", counted(kept.files, "file", "files"), ago(kept.changed_at))
        return Fact("Data", link("sandboxes_agentdata", kept.pk, size(kept.size_bytes)), note=note)

    def quotas(self, request: HttpRequest, row: Agent) -> dict[str, Any]:
        may_view = request.user.has_perm("sandboxes.view_quota")
        mine = Quota.objects.filter(agent_did=row.did).select_related("pool").order_by("-used", "pool__name")
        return {
            "quotas": [quota_line(quota, quota.pool) for quota in mine] if may_view else [],
            "quota_of": "Pool",
            "new_quota": new_quota(request, agent_did=row.did),
            "may_view_quotas": may_view,
        }


class Issue(forms.ModelForm):
    """What a new key is for."""

    def clean_dids(self) -> list[str]:
        dids: list[str] = self.cleaned_data["dids"]
        for did in dids:
            try:
                is_did(did)
            except ValidationError:
                raise ValidationError(f"{did[:80]!r} is not {DID_ACCEPTS}.") from None
        return dids

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or {}
        if not self.errors and not cleaned.get("dids") and not cleaned.get("operator"):
            self.add_error("dids", "A key speaks for at least one agent, or is an operator's.")
        return cleaned


@admin.register(AgentKey)
class KeyAdmin(Page):
    form = Issue
    list_display = ["shown", "name", "speaks_for", "state", "last_used", "created"]
    list_filter = ["operator"]
    search_fields = ["prefix__startswith", "name__startswith", "dids__icontains"]
    search_help_text = "Prefix, name or DID"
    ordering = ["-created_at", "-pk"]
    slices = {
        "valid": Slice("Valid", "No key is valid: no agent can call.", lambda now: Q(revoked_at__isnull=True)),
        "history": Slice("History", "No key was ever issued."),
    }
    readonly_fields = ["agents"]
    acts = {"revoke": REVOKE}
    actions_detail = ["revoke"]
    actions = ["revoke_all"]

    def has_change_permission(self, request: HttpRequest, obj: AgentKey | None = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: AgentKey | None = None) -> list[str]:
        return ["name", "agents"] if obj else ["name", "dids", "operator"]

    @display(description="Speaks for")
    def agents(self, row: AgentKey) -> SafeString | str:
        return "every agent" if row.operator else format_html_join("", "<div>{}</div>", ([did] for did in row.dids))

    @display(description="Key")
    def shown(self, row: AgentKey) -> str:
        return f"lh_{row.prefix}_…"

    @display(description="Speaks for")
    def speaks_for(self, row: AgentKey) -> SafeString | str:
        if row.operator:
            return "every agent"
        rest = f"and {len(row.dids) - 1:,} more" if len(row.dids) > 1 else ""
        return two(row.dids[0], rest) if rest else row.dids[0] if row.dids else "nobody"

    @display(description="State")
    def state(self, row: AgentKey) -> SafeString:
        return badge("expired", "revoked") if row.revoked_at else badge("ok", "valid")

    @display(description="Last used")
    def last_used(self, row: AgentKey) -> SafeString | str:
        return ago(row.last_used_at)

    @display(description="Issued")
    def created(self, row: AgentKey) -> SafeString | str:
        return ago(row.created_at)

    def page(self, request: HttpRequest, row: AgentKey) -> dict[str, Any]:
        return {
            "facts": [
                Fact("Key", self.shown(row), note="kept as a digest: it cannot be shown again"),
                Fact("State", self.state(row), note=ago(row.revoked_at, "")),
                Fact("Last used", self.last_used(row)),
                Fact("Issued", self.created(row), note=stamp(row.created_at)),
            ]
        }

    def save_model(self, request: HttpRequest, obj: AgentKey, form: Any, change: bool) -> None:
        row, key = api_keys.issue(obj.dids, operator=obj.operator, name=obj.name, now=timezone.now())
        obj.pk, obj.prefix = row.pk, row.prefix
        messages.warning(request, f"Copy the new key now, it is not shown again: {key}")

    def has_revoke_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("leases.revoke_key")

    @action(
        description="Revoke key…",
        permissions=["revoke"],
        icon="key_off",
        variant=ActionVariant.DANGER,
        dialog=REVOKE.dialog,
    )
    def revoke(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, REVOKE, form)

    @action(description="Revoke keys…", permissions=["revoke"])
    def revoke_all(self, request: HttpRequest, queryset: QuerySet[AgentKey]) -> HttpResponse | None:
        return self.ask(request, queryset, REVOKE)


@admin.register(EnvironmentType)
class EnvironmentTypeAdmin(Page):
    list_display = ["name", "clocks", "sleeps", "conditions", "where", "spends"]
    list_select_related = ["pool", "policy"]
    search_fields = ["name__startswith"]
    ordering = ["name"]
    fieldsets = [
        (None, {"fields": ["name", "pool", "policy"]}),
        ("When its leases end", {"fields": ["ttl", "max_ttl", "expiry_conditions"]}),
        ("Turns and sleep", {"fields": ["turn_argv", "turn_timeout", "sleep_after", "snapshot_excludes"]}),
        (
            "Calls to models",
            {
                "fields": ["llm_limit"],
                "description": "What a lease of this type may spend on them. Leases that exist keep theirs; it can be changed "
                "on the page of each.",
            },
        ),
    ]
    labels = {
        "ttl": "Unused for",
        "max_ttl": "At the latest after",
        "expiry_conditions": "Conditions",
        "turn_argv": "Command",
        "snapshot_excludes": "Left out of snapshots",
        "llm_limit": "Spend limit in USD",
    }

    def get_readonly_fields(self, request: HttpRequest, obj: EnvironmentType | None = None) -> list[str]:
        return ["name"] if obj else []  # its leases refer to it by name

    @display(description="Its leases end")
    def clocks(self, row: EnvironmentType) -> SafeString:
        return two(f"after {span(row.ttl)} unused", f"after {span(row.max_ttl)} at the latest")

    @display(description="Sleeps after")
    def sleeps(self, row: EnvironmentType) -> str:
        return row.sleep_after

    @display(description="Ended by")
    def conditions(self, row: EnvironmentType) -> str:
        return ", ".join(row.expiry_conditions) or "–"

    @display(description="Pool and policy")
    def where(self, row: EnvironmentType) -> SafeString:
        return two(row.pool or "default", row.policy or SEALED)

    @display(description="A lease may spend")
    def spends(self, row: EnvironmentType) -> str:
        return spending.shown(row.llm_limit)

    def page(self, request: HttpRequest, row: EnvironmentType) -> dict[str, Any]:
        active = row.leases.filter(status=Status.ACTIVE).count()
        href = rows("leases_lease", slice="active", environment_type__name__exact=row.name)
        return {
            "facts": [
                Fact("Active leases", active, href=href),
                Fact("Spend limit", spending.shown(row.llm_limit), note="for the model calls of each new lease"),
            ]
        }
