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

from billing.admin.formatting import build_total_cost_field
from billing.admin.members import build_account_field
from leases import api_keys, leasing
from leases.admin import budgets, identity, spending
from leases.admin.formatting import build_agent_field
from leases.admin.spending import SET_SPEND_LIMIT_ACTION, SpendLimitForm
from leases.admin.timeline import SOURCE_LABELS, load_timeline, render_turn_status
from leases.models import DID_DESCRIPTION, Agent, AgentKey, EnvironmentType, Lease, LeaseStatus, Turn, validate_did
from leases.tasks import enqueue_reclaim
from sandboxes.admin.base import (
    AdminAction,
    ConsoleModelAdmin,
    ListTab,
    ReadOnlyModelAdmin,
    ReasonForm,
    SummaryField,
    build_all_fields_fieldset,
)
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_age,
    format_bytes,
    format_duration,
    pluralize,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.pools import build_add_quota_url, build_quota_row
from sandboxes.models import AgentData, Quota, Run, RunOutcome, Sandbox, SandboxState
from sandboxes.models.policies import SEALED_POLICY_NAME

ENDING_SOON_WINDOW = timedelta(minutes=5)


def _end_lease(lease: Lease, actor: str, why: str, now: datetime) -> bool:
    return leasing.end(lease.pk, reason="operator", now=now, actor=actor, detail=why)


END_LEASE_ACTION = AdminAction(
    title="End lease",
    warning="Its agent is refused from now on. Its sandbox is destroyed, with whatever is only in there.",
    done="ended",
    refusal_reason="not active any more",
    legal=lambda lease: lease.status == LeaseStatus.ACTIVE,
    verb=_end_lease,
    after=enqueue_reclaim,
)
REVOKE_KEY_ACTION = AdminAction(
    title="Revoke key",
    warning="Whoever uses it is refused from the next request on. A revoked key never works again.",
    done="revoked",
    refusal_reason="revoked before",
    legal=lambda key: key.revoked_at is None,
    verb=lambda key, actor, why, now: api_keys.revoke_key(key.pk, now=now),
)


def render_lease_end(lease: Lease, now: datetime) -> SafeString:
    """When it ends or ended, in the words of a list."""
    if lease.ended_at:
        return render_timestamp(lease.ended_at, f"ended {format_age(now - lease.ended_at)} ago")
    if lease.expires_at > now:
        return render_timestamp(lease.expires_at, f"in {format_age(lease.expires_at - now)}")
    return format_html(
        '<b class="lh-alarm">{}</b>', render_timestamp(lease.expires_at, f"overdue {format_age(now - lease.expires_at)}")
    )


@admin.register(Lease)
class LeaseAdmin(ReadOnlyModelAdmin):
    list_display = ["who", "state", "ends", "held", "kind", "last_used"]
    list_filter = ["status", "pool", "environment_type"]
    list_select_related = ["pool"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-leased_at", "-pk"]
    slices = {
        "active": ListTab("Active", "No lease is active.", lambda now: Q(status=LeaseStatus.ACTIVE)),
        "soon": ListTab(
            "Ending soon",
            "No lease ends within five minutes.",
            lambda now: Q(
                status=LeaseStatus.ACTIVE,
                expires_minute__lte=leasing.to_epoch_minute(now + ENDING_SOON_WINDOW),
                expires_at__range=(now, now + ENDING_SOON_WINDOW),
            ),
        ),
        "overdue": ListTab(
            "Overdue",
            "No lease is past its end: the sweep that ends them is on time.",
            lambda now: Q(status=LeaseStatus.ACTIVE, expires_minute__lte=leasing.to_epoch_minute(now), expires_at__lt=now),
        ),
        "undead": ListTab(
            "Expired, not destroyed",
            "Of every ended lease, the sandbox is gone.",
            lambda now: Q(status=LeaseStatus.EXPIRED),
        ),
        "history": ListTab("History", "No lease was ever granted."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "agent_did", "environment_id", "environment_type", "pool", "status", "leased_at", "last_activity_at",
        "ttl", "expires_at", "max_expires_at", "sleep_after", "expiry_conditions", "llm_limit", "ended_at", "end_reason",
        "destroyed_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/leases/lease/timeline.html"
    acts = {"limit_spending": SET_SPEND_LIMIT_ACTION, "end_lease": END_LEASE_ACTION}
    actions_detail = ["limit_spending", "end_lease"]
    actions = ["end_leases"]

    @display(description="Agent and environment")
    def who(self, row: Lease) -> SafeString:
        return render_two_lines(row.agent_did, row.environment_id)

    @display(description="State")
    def state(self, row: Lease) -> SafeString:
        return render_two_lines(render_badge(row.status), row.end_reason) if row.end_reason else render_badge(row.status)

    @display(description="Ends")
    def ends(self, row: Lease) -> SafeString:
        return render_lease_end(row, timezone.now())

    @display(description="Held")
    def held(self, row: Lease) -> str:
        return format_duration((row.ended_at or timezone.now()) - row.leased_at)

    @display(description="Type and pool")
    def kind(self, row: Lease) -> SafeString:
        return render_two_lines(row.environment_type_id, row.pool)

    @display(description="Last used")
    def last_used(self, row: Lease) -> SafeString | str:
        return render_time_ago(row.last_activity_at)

    def page(self, request: HttpRequest, row: Lease) -> dict[str, Any]:
        now = timezone.now()
        before, only = _parse_datetime(request.GET.get("before", "")), request.GET.get("only", "")
        entries, older = load_timeline(row, before=before, only=only)
        notices, within = budgets.summarize_lease_budgets(request, row, now)
        return {
            "notices": notices,
            "facts": [*self.facts(row, now), *within],
            "entries": entries,
            "newer": before,
            "older": "?" + urlencode({"only": only, "before": older.isoformat()}) if older else "",
            "source_filters": [(name, label, only == name) for name, label in {"": "Everything", **SOURCE_LABELS}.items()],
        }

    def facts(self, row: Lease, now: datetime) -> list[SummaryField]:
        sandboxes = Sandbox.objects.filter(holder=row.pk).select_related("pool").order_by("-created_at")
        ran = Run.objects.filter(holder=row.pk).aggregate(
            all=Count("pk"), bad=Count("pk", filter=~Q(outcome__in=[RunOutcome.OK, RunOutcome.OPEN]))
        )
        sandbox = sandboxes.first()
        return [
            SummaryField("State", render_badge(row.status), note=row.end_reason),
            build_agent_field(row.agent_did),
            SummaryField("Environment", row.environment_id, note=row.environment_type_id),
            SummaryField(
                "Held",
                format_duration((row.ended_at or now) - row.leased_at),
                note=format_html("since {}", render_timestamp(row.leased_at)),
            ),
            SummaryField(
                "Ends", render_lease_end(row, now), note=format_html("at the latest {}", render_timestamp(row.max_expires_at))
            ),
            SummaryField(
                "Last used", render_time_ago(row.last_activity_at), note=f"ends unless used for {format_duration(row.ttl)}"
            ),
            SummaryField(
                "Sandbox",
                render_admin_link("sandboxes_sandbox", sandbox.pk, render_badge(sandbox.state)) if sandbox else "none yet",
                note=f"{sandbox.pool}, {sandbox.provider}" if sandbox else "",
            ),
            SummaryField(
                "Runs",
                f"{ran['all']:,}",
                href=build_changelist_url("sandboxes_run", slice="all", holder=row.pk),
                note=format_html(
                    '<a class="lh-link lh-alarm" href="{}">{} not ok</a>',
                    build_changelist_url("sandboxes_run", slice="failed", holder=row.pk),
                    f"{ran['bad']:,}",
                )
                if ran["bad"]
                else "",
            ),
            *spending.build_lease_spending_fields(row),
            build_total_cost_field(holder=row.pk),
        ]

    def has_end_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("leases.end_lease")

    @action(description="Spend limit…", permissions=["end"], icon="savings", dialog=SET_SPEND_LIMIT_ACTION.dialog)
    def limit_spending(self, request: HttpRequest, form: SpendLimitForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, SET_SPEND_LIMIT_ACTION, form)

    @action(
        description="End lease…",
        permissions=["end"],
        icon="block",
        variant=ActionVariant.DANGER,
        dialog=END_LEASE_ACTION.dialog,
    )
    def end_lease(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, END_LEASE_ACTION, form)

    @action(description="End leases… (active only)", permissions=["end"])
    def end_leases(self, request: HttpRequest, queryset: QuerySet[Lease]) -> HttpResponse | None:
        return self.ask(request, queryset, END_LEASE_ACTION)


def _parse_datetime(raw: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(raw)
    except ValueError:
        return None
    return moment if timezone.is_aware(moment) else None


@admin.register(Turn)
class TurnAdmin(ReadOnlyModelAdmin):
    list_display = ["turn", "who", "state", "action_summary", "lasted", "started"]
    list_filter = ["skipped"]
    list_select_related = ["lease"]
    search_fields = ["lease__agent_did__startswith", "lease__environment_id__startswith"]
    search_help_text = "Agent or environment"
    ordering = ["-pk"]
    slices = {
        "all": ListTab("All", "No turn was played yet."),
        "skipped": ListTab("Skipped", "Every turn was answered with an action.", lambda now: Q(skipped=True)),
        "open": ListTab("Being played", "No turn is being played.", lambda now: Q(ended_at__isnull=True)),
    }
    fieldsets = build_all_fields_fieldset("lease", "number", "run", "started_at", "deadline_at", "ended_at", "skipped")
    change_form_outer_before_template = "admin/leases/turn/action.html"

    @display(description="Turn")
    def turn(self, row: Turn) -> str:
        return str(row.number)

    @display(description="Agent and environment")
    def who(self, row: Turn) -> SafeString:
        return render_two_lines(row.lease.agent_did, row.lease.environment_id)

    @display(description="State")
    def state(self, row: Turn) -> SafeString:
        return render_turn_status(row)

    @display(description="Action")
    def action_summary(self, row: Turn) -> SafeString:
        return format_html('<span class="lh-command">{}</span>', truncate_text(row.answer) or "–")

    @display(description="Took")
    def lasted(self, row: Turn) -> str:
        return format_duration((row.ended_at or timezone.now()) - row.started_at)

    @display(description="Started")
    def started(self, row: Turn) -> SafeString | str:
        return render_time_ago(row.started_at)

    def page(self, request: HttpRequest, row: Turn) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Turn", row.number, note=render_turn_status(row)),
                SummaryField("Lease", render_admin_link("leases_lease", row.lease_id, row.lease)),
                SummaryField("Run", render_admin_link("sandboxes_run", row.run_id, row.run_id) if row.run_id else "none"),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                SummaryField("Took" if row.ended_at else "Playing for", self.lasted(row)),
            ],
            "action_json": json.dumps(row.action, indent=2, ensure_ascii=False) if row.answer else "",
        }


@admin.register(Agent)
class AgentAdmin(ConsoleModelAdmin):
    list_display = ["did", "name", "active", "created"]
    search_fields = ["did__startswith", "name__startswith"]
    search_help_text = "DID or name"
    ordering = ["did"]
    fields = ["did", "name"]
    change_form_outer_after_template = "admin/leases/agent/keys.html"

    def get_readonly_fields(self, request: HttpRequest, obj: Agent | None = None) -> list[str]:
        return ["did"] if obj else []

    def complete(self, rows: list[Agent]) -> None:
        active = Lease.objects.filter(agent_did__in=[row.did for row in rows], status=LeaseStatus.ACTIVE)
        counts = dict(active.order_by().values_list("agent_did").annotate(Count("pk")))
        for row in rows:
            row.active_leases = counts.get(row.did, 0)  # type: ignore[attr-defined]

    @display(description="Active leases")
    def active(self, row: Agent) -> SafeString:
        href = build_changelist_url("leases_lease", slice="active", agent_did=row.did)
        return format_html('<a class="lh-link" href="{}">{}</a>', href, row.active_leases)  # type: ignore[attr-defined]

    @display(description="Known since")
    def created(self, row: Agent) -> SafeString | str:
        return render_time_ago(row.created_at)

    def page(self, request: HttpRequest, row: Agent) -> dict[str, Any]:
        mine = Lease.objects.filter(agent_did=row.did)
        active, latest = mine.filter(status=LeaseStatus.ACTIVE).count(), mine.order_by("-leased_at").first()
        living = Sandbox.objects.filter(agent_did=row.did).exclude(state=SandboxState.DESTROYED).count()
        return {
            "notices": budgets.build_agent_notices(request, row.did, timezone.now()),
            "facts": [
                SummaryField(
                    "Active leases", active, href=build_changelist_url("leases_lease", slice="active", agent_did=row.did)
                ),
                SummaryField(
                    "Every lease", mine.count(), href=build_changelist_url("leases_lease", slice="history", agent_did=row.did)
                ),
                SummaryField(
                    "Sandboxes", living, href=build_changelist_url("sandboxes_sandbox", slice="live", agent_did=row.did)
                ),
                SummaryField(
                    "Runs", "newest first", href=build_changelist_url("sandboxes_run", slice="all", agent_did=row.did)
                ),
                *spending.build_agent_spending_fields(row.did),
                build_account_field(row.did),
                build_total_cost_field(agent_did=row.did),
                self.data(row),
                identity.build_signing_key_field(request, row.did),
                SummaryField("Last used", render_time_ago(latest.last_activity_at) if latest else "never"),
                SummaryField("Known since", render_time_ago(row.created_at)),
            ],
            "keys": [key for key in AgentKey.objects.filter(dids__icontains=row.did) if row.did in key.dids],
            "may_view_keys": request.user.has_perm("leases.view_agentkey"),
            **self.quotas(request, row),
        }

    def data(self, row: Agent) -> SummaryField:
        """What it keeps from sandbox to sandbox."""
        kept = AgentData.objects.filter(agent_did=row.did).first()
        if kept is None:
            return SummaryField("Data", "nothing yet", note="what it writes to /data is kept")
        note = format_html("{}, changed {}", pluralize(kept.files, "file", "files"), render_time_ago(kept.changed_at))
        return SummaryField("Data", render_admin_link("sandboxes_agentdata", kept.pk, format_bytes(kept.size_bytes)), note=note)

    def quotas(self, request: HttpRequest, row: Agent) -> dict[str, Any]:
        may_view = request.user.has_perm("sandboxes.view_quota")
        mine = Quota.objects.filter(agent_did=row.did).select_related("pool").order_by("-used", "pool__name")
        return {
            "quotas": [build_quota_row(quota, quota.pool) for quota in mine] if may_view else [],
            "quota_subject_label": "Pool",
            "new_quota": build_add_quota_url(request, agent_did=row.did),
            "may_view_quotas": may_view,
        }


class AgentKeyForm(forms.ModelForm):
    """What a new key is for."""

    def clean_dids(self) -> list[str]:
        dids: list[str] = self.cleaned_data["dids"]
        for did in dids:
            try:
                validate_did(did)
            except ValidationError:
                raise ValidationError(f"{did[:80]!r} is not {DID_DESCRIPTION}.") from None
        return dids

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or {}
        if not self.errors and not cleaned.get("dids") and not cleaned.get("operator"):
            self.add_error("dids", "A key speaks for at least one agent, or is an operator's.")
        return cleaned


@admin.register(AgentKey)
class AgentKeyAdmin(ConsoleModelAdmin):
    form = AgentKeyForm
    list_display = ["shown", "name", "speaks_for", "state", "last_used", "created"]
    list_filter = ["operator"]
    search_fields = ["prefix__startswith", "name__startswith", "dids__icontains"]
    search_help_text = "Prefix, name or DID"
    ordering = ["-created_at", "-pk"]
    slices = {
        "valid": ListTab("Valid", "No key is valid: no agent can call.", lambda now: Q(revoked_at__isnull=True)),
        "history": ListTab("History", "No key was ever issued."),
    }
    readonly_fields = ["agents"]
    acts = {"revoke": REVOKE_KEY_ACTION}
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
        return render_two_lines(row.dids[0], rest) if rest else row.dids[0] if row.dids else "nobody"

    @display(description="State")
    def state(self, row: AgentKey) -> SafeString:
        return render_badge("expired", "revoked") if row.revoked_at else render_badge("ok", "valid")

    @display(description="Last used")
    def last_used(self, row: AgentKey) -> SafeString | str:
        return render_time_ago(row.last_used_at)

    @display(description="Issued")
    def created(self, row: AgentKey) -> SafeString | str:
        return render_time_ago(row.created_at)

    def page(self, request: HttpRequest, row: AgentKey) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Key", self.shown(row), note="kept as a digest: it cannot be shown again"),
                SummaryField("State", self.state(row), note=render_time_ago(row.revoked_at, "")),
                SummaryField("Last used", self.last_used(row)),
                SummaryField("Issued", self.created(row), note=render_timestamp(row.created_at)),
            ]
        }

    def save_model(self, request: HttpRequest, obj: AgentKey, form: Any, change: bool) -> None:
        row, key = api_keys.issue_key(obj.dids, operator=obj.operator, name=obj.name, now=timezone.now())
        obj.pk, obj.prefix = row.pk, row.prefix
        messages.warning(request, f"Copy the new key now, it is not shown again: {key}")

    def has_revoke_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("leases.revoke_key")

    @action(
        description="Revoke key…",
        permissions=["revoke"],
        icon="key_off",
        variant=ActionVariant.DANGER,
        dialog=REVOKE_KEY_ACTION.dialog,
    )
    def revoke(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, REVOKE_KEY_ACTION, form)

    @action(description="Revoke keys…", permissions=["revoke"])
    def revoke_all(self, request: HttpRequest, queryset: QuerySet[AgentKey]) -> HttpResponse | None:
        return self.ask(request, queryset, REVOKE_KEY_ACTION)


@admin.register(EnvironmentType)
class EnvironmentTypeAdmin(ConsoleModelAdmin):
    list_display = ["name", "lifetime_limits", "sleeps", "conditions", "where", "spends"]
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
    def lifetime_limits(self, row: EnvironmentType) -> SafeString:
        return render_two_lines(
            f"after {format_duration(row.ttl)} unused", f"after {format_duration(row.max_ttl)} at the latest"
        )

    @display(description="Sleeps after")
    def sleeps(self, row: EnvironmentType) -> str:
        return row.sleep_after

    @display(description="Ended by")
    def conditions(self, row: EnvironmentType) -> str:
        return ", ".join(row.expiry_conditions) or "–"

    @display(description="Pool and policy")
    def where(self, row: EnvironmentType) -> SafeString:
        return render_two_lines(row.pool or "default", row.policy or SEALED_POLICY_NAME)

    @display(description="A lease may spend")
    def spends(self, row: EnvironmentType) -> str:
        return spending.format_spend_limit(row.llm_limit)

    def page(self, request: HttpRequest, row: EnvironmentType) -> dict[str, Any]:
        active = row.leases.filter(status=LeaseStatus.ACTIVE).count()
        href = build_changelist_url("leases_lease", slice="active", environment_type__name__exact=row.name)
        return {
            "facts": [
                SummaryField("Active leases", active, href=href),
                SummaryField(
                    "Spend limit", spending.format_spend_limit(row.llm_limit), note="for the model calls of each new lease"
                ),
            ]
        }
