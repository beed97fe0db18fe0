"""Operators' pages on sandboxes, runs and quotas as seen from here: a holder is a lease, and an agent has a page."""

from dataclasses import replace
from datetime import datetime
from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html_join
from unfold.decorators import action
from unfold.enums import ActionVariant

from leases import leasing
from leases.admin.formatting import LeaseHolderMixin, build_agent_field
from leases.admin.state import TAKE_SNAPSHOT_ACTION
from leases.models import DID_DESCRIPTION, EnvironmentType, validate_did
from leases.tasks import enqueue_idle_sweep, enqueue_reclaim, request_sleep, request_wake
from sandboxes import destruction
from sandboxes.admin.base import AdminAction, ReasonForm, SummaryField
from sandboxes.admin.formatting import render_admin_link
from sandboxes.admin.policies import PolicyAdmin
from sandboxes.admin.pools import QuotaAdmin, QuotaForm
from sandboxes.admin.processes import ProcessAdmin
from sandboxes.admin.readings import ReadingAdmin
from sandboxes.admin.sandboxes import RunAdmin, SandboxAdmin
from sandboxes.models import GONE_STATES, Policy, Process, Quota, Reading, Run, Sandbox, SandboxState, TransitionReason

MAX_TYPES_SHOWN = 8  # on a policy's page


def _destroy_sandbox(sandbox: Sandbox, actor: str, why: str, now: datetime) -> bool:
    """A sandbox goes with the lease it is held for, so that its agent is told; one that nobody holds goes alone."""
    if sandbox.state in GONE_STATES:
        return False  # its holder may have the next one by now
    if sandbox.holder and leasing.end(sandbox.holder, reason="operator", now=now, actor=actor, detail=why):
        return True
    return destruction.schedule_destroy(
        sandbox.pk, now=now, code=TransitionReason.OPERATOR, reason=f"operator: {why}", actor=actor
    )


def _can_evict(sandbox: Sandbox) -> bool:
    return sandbox.state in (SandboxState.WAITING, SandboxState.WARM) and sandbox.holder is not None and sandbox.lost_at is None


def _describe_current_state(sandbox: Sandbox) -> str:
    """What it is, to whoever wanted something else of it."""
    if sandbox.state == SandboxState.RUNNING:
        return "it runs again"
    if sandbox.lost_at:
        return "the provider has lost it"
    return f"it is {sandbox.state} now" if sandbox.holder else "nobody holds it"


EVICT_ACTION = AdminAction(
    title="Evict",
    warning="Its state is stored and its process goes; the next use wakes it. What uses it before that keeps it awake.",
    done="asked to sleep",
    refusal_reason="not waiting",
    legal=_can_evict,
    verb=lambda sandbox, actor, why, now: request_sleep(sandbox, now=now, actor=actor, reason=why),
    after=enqueue_idle_sweep,
    explain_refusal=_describe_current_state,
)
EVICT_WAITING_ACTION = replace(
    EVICT_ACTION,
    legal=lambda sandbox: sandbox.state == SandboxState.WAITING and _can_evict(sandbox),
    verb=lambda sandbox, actor, why, now: request_sleep(
        sandbox, now=now, actor=actor, reason=why, guard=Q(state=SandboxState.WAITING)
    ),
)
WAKE_ACTION = AdminAction(
    title="Wake",
    warning="It is started with its stored state, as by a use of its agent: its lease is renewed, too.",
    done="being woken",
    refusal_reason="not cold",
    legal=lambda sandbox: sandbox.state == SandboxState.COLD and sandbox.lost_at is None,
    verb=lambda sandbox, actor, why, now: request_wake(sandbox, now=now, actor=actor, reason=why),
    explain_refusal=_describe_current_state,
)
DESTROY_ACTION = AdminAction(
    title="Destroy now",
    warning="An active lease that holds it ends. What runs in it is killed, and whatever is only in there is lost.",
    done="being destroyed",
    refusal_reason="given up before",
    legal=lambda sandbox: sandbox.state not in GONE_STATES,
    verb=_destroy_sandbox,
    after=enqueue_reclaim,
)


for model in (Sandbox, Run, Process, Reading, Quota, Policy):
    admin.site.unregister(model)


@admin.register(Sandbox)
class LeasedSandboxAdmin(LeaseHolderMixin, SandboxAdmin):
    acts = {
        "evict": EVICT_ACTION,
        "wake": WAKE_ACTION,
        "take_snapshot": TAKE_SNAPSHOT_ACTION,
        "destroy_now": DESTROY_ACTION,
        **SandboxAdmin.acts,
    }
    actions_detail = ["evict", "wake", "take_snapshot", *SandboxAdmin.actions_detail, "destroy_now"]
    actions = ["evict_all", *SandboxAdmin.actions, "destroy_all"]
    snapshot_actions = {"restore": "Restore…", "fork": "Fork…"}

    @action(description="Evict…", permissions=["act"], icon="bedtime", dialog=EVICT_ACTION.dialog)
    def evict(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, EVICT_ACTION, form)

    @action(description="Wake…", permissions=["act"], icon="wb_sunny", dialog=WAKE_ACTION.dialog)
    def wake(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, WAKE_ACTION, form)

    @action(description="Snapshot…", permissions=["act"], icon="photo_camera", dialog=TAKE_SNAPSHOT_ACTION.dialog)
    def take_snapshot(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, TAKE_SNAPSHOT_ACTION, form)

    @action(description="Evict… (waiting only)", permissions=["act"])
    def evict_all(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> HttpResponse | None:
        return self.ask(request, queryset, EVICT_WAITING_ACTION)

    def has_destroy_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        """Destroying a held sandbox ends its lease."""
        return request.user.has_perms(["sandboxes.act_on_sandbox", "leases.end_lease"])

    @action(
        description="Destroy now…",
        permissions=["destroy"],
        icon="delete_forever",
        variant=ActionVariant.DANGER,
        dialog=DESTROY_ACTION.dialog,
    )
    def destroy_now(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, DESTROY_ACTION, form)

    @action(description="Destroy now…", permissions=["destroy"])
    def destroy_all(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> HttpResponse | None:
        return self.ask(request, queryset, DESTROY_ACTION)


@admin.register(Run)
class LeasedRunAdmin(LeaseHolderMixin, RunAdmin):
    pass


@admin.register(Reading)
class LeasedReadingAdmin(LeaseHolderMixin, ReadingAdmin):
    pass


@admin.register(Process)
class LeasedProcessAdmin(LeaseHolderMixin, ProcessAdmin):
    pass


class AgentDidFormMixin:
    """A form in which an operator names an agent."""

    cleaned_data: dict[str, Any]

    def clean_agent_did(self) -> str:
        did: str = self.cleaned_data["agent_did"].strip()
        try:
            validate_did(did)
        except ValidationError:
            raise ValidationError(f"{did[:80]!r} is not {DID_DESCRIPTION}.") from None
        return did


class LeasedQuotaForm(AgentDidFormMixin, QuotaForm):
    pass


@admin.register(Quota)
class LeasedQuotaAdmin(QuotaAdmin):
    form = LeasedQuotaForm

    def agent(self, did: str) -> SummaryField:
        return build_agent_field(did)


@admin.register(Policy)
class LeasedPolicyAdmin(PolicyAdmin):
    def wanted_by(self, row: Policy) -> list[SummaryField]:
        """The environment types whose next sandboxes get it; of the built-in one also those that name none."""
        theirs = Q(policy=row) | Q(policy__isnull=True) if row.built_in else Q(policy=row)
        found = EnvironmentType.objects.filter(theirs).order_by("name")
        shown = [render_admin_link("leases_environmenttype", each.pk, each.name) for each in found[:MAX_TYPES_SHOWN]]
        more = len(found) - len(shown)
        named = format_html_join(", ", "{}", ((each,) for each in shown))
        return [SummaryField("Environment types", named or "none", note=f"and {more} more" if more else "")]
