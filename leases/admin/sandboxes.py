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
from leases.admin.formatting import HeldByLease, agent_fact
from leases.admin.state import TAKE
from leases.models import DID_ACCEPTS, EnvironmentType, is_did
from leases.tasks import sleep_soon, wake_idle, wake_reclaim, wake_soon
from sandboxes import eviction
from sandboxes.admin.base import Act, Fact, Reason
from sandboxes.admin.formatting import link
from sandboxes.admin.policies import PolicyAdmin
from sandboxes.admin.pools import QuotaAdmin, QuotaForm
from sandboxes.admin.processes import ProcessAdmin
from sandboxes.admin.readings import ReadingAdmin
from sandboxes.admin.sandboxes import RunAdmin, SandboxAdmin
from sandboxes.models import GONE, Policy, Process, Quota, Reading, Run, Sandbox, State

MOST_TYPES = 8  # on a policy's page


def _destroy(sandbox: Sandbox, actor: str, why: str, now: datetime) -> bool:
    """A sandbox goes with the lease it is held for, so that its agent is told; one that nobody holds goes alone."""
    if sandbox.state in GONE:
        return False  # its holder may have the next one by now
    if sandbox.holder and leasing.end(sandbox.holder, reason="operator", now=now, actor=actor, why=why):
        return True
    return eviction.give_up(sandbox.pk, now=now, reason=f"operator: {why}", actor=actor)


def _sleeps(sandbox: Sandbox) -> bool:
    return sandbox.state in (State.WAITING, State.WARM) and sandbox.holder is not None and sandbox.lost_at is None


def _by_now(sandbox: Sandbox) -> str:
    """What it is, to whoever wanted something else of it."""
    if sandbox.state == State.RUNNING:
        return "it runs again"
    if sandbox.lost_at:
        return "the provider has lost it"
    return f"it is {sandbox.state} now" if sandbox.holder else "nobody holds it"


EVICT = Act(
    title="Evict",
    warning="Its state is stored and its process goes; the next use wakes it. What uses it before that keeps it awake.",
    done="asked to sleep",
    illegal="not waiting",
    legal=_sleeps,
    verb=lambda sandbox, actor, why, now: sleep_soon(sandbox, now=now, actor=actor, reason=why),
    after=wake_idle,
    because=_by_now,
)
EVICT_WAITING = replace(
    EVICT,
    legal=lambda sandbox: sandbox.state == State.WAITING and _sleeps(sandbox),
    verb=lambda sandbox, actor, why, now: sleep_soon(sandbox, now=now, actor=actor, reason=why, guard=Q(state=State.WAITING)),
)
WAKE = Act(
    title="Wake",
    warning="It is started with its stored state, as by a use of its agent: its lease is renewed, too.",
    done="being woken",
    illegal="not cold",
    legal=lambda sandbox: sandbox.state == State.COLD and sandbox.lost_at is None,
    verb=lambda sandbox, actor, why, now: wake_soon(sandbox, now=now, actor=actor, reason=why),
    because=_by_now,
)
DESTROY = Act(
    title="Destroy now",
    warning="An active lease that holds it ends. What runs in it is killed, and whatever is only in there is lost.",
    done="being destroyed",
    illegal="given up before",
    legal=lambda sandbox: sandbox.state not in GONE,
    verb=_destroy,
    after=wake_reclaim,
)


for model in (Sandbox, Run, Process, Reading, Quota, Policy):
    admin.site.unregister(model)


@admin.register(Sandbox)
class LeasedSandboxAdmin(HeldByLease, SandboxAdmin):
    acts = {"evict": EVICT, "wake": WAKE, "take_snapshot": TAKE, "destroy_now": DESTROY, **SandboxAdmin.acts}
    actions_detail = ["evict", "wake", "take_snapshot", *SandboxAdmin.actions_detail, "destroy_now"]
    actions = ["evict_all", *SandboxAdmin.actions, "destroy_all"]
    copy_acts = {"restore": "Restore…", "fork": "Fork…"}

    @action(description="Evict…", permissions=["act"], icon="bedtime", dialog=EVICT.dialog)
    def evict(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, EVICT, form)

    @action(description="Wake…", permissions=["act"], icon="wb_sunny", dialog=WAKE.dialog)
    def wake(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, WAKE, form)

    @action(description="Snapshot…", permissions=["act"], icon="photo_camera", dialog=TAKE.dialog)
    def take_snapshot(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, TAKE, form)

    @action(description="Evict… (waiting only)", permissions=["act"])
    def evict_all(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> HttpResponse | None:
        return self.ask(request, queryset, EVICT_WAITING)

    def has_destroy_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        """Destroying a held sandbox ends its lease."""
        return request.user.has_perms(["sandboxes.act_on_sandbox", "leases.end_lease"])

    @action(
        description="Destroy now…",
        permissions=["destroy"],
        icon="delete_forever",
        variant=ActionVariant.DANGER,
        dialog=DESTROY.dialog,
    )
    def destroy_now(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, DESTROY, form)

    @action(description="Destroy now…", permissions=["destroy"])
    def destroy_all(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> HttpResponse | None:
        return self.ask(request, queryset, DESTROY)


@admin.register(Run)
class LeasedRunAdmin(HeldByLease, RunAdmin):
    pass


@admin.register(Reading)
class LeasedReadingAdmin(HeldByLease, ReadingAdmin):
    pass


@admin.register(Process)
class LeasedProcessAdmin(HeldByLease, ProcessAdmin):
    pass


class NamesAgent:
    """A form in which an operator names an agent."""

    cleaned_data: dict[str, Any]

    def clean_agent_did(self) -> str:
        did: str = self.cleaned_data["agent_did"].strip()
        try:
            is_did(did)
        except ValidationError:
            raise ValidationError(f"{did[:80]!r} is not {DID_ACCEPTS}.") from None
        return did


class AgentsQuotaForm(NamesAgent, QuotaForm):
    pass


@admin.register(Quota)
class AgentsQuotaAdmin(QuotaAdmin):
    form = AgentsQuotaForm

    def agent(self, did: str) -> Fact:
        return agent_fact(did)


@admin.register(Policy)
class WantedPolicyAdmin(PolicyAdmin):
    def wanted_by(self, row: Policy) -> list[Fact]:
        """The environment types whose next sandboxes get it; of the built-in one also those that name none."""
        theirs = Q(policy=row) | Q(policy__isnull=True) if row.built_in else Q(policy=row)
        found = EnvironmentType.objects.filter(theirs).order_by("name")
        shown = [link("leases_environmenttype", each.pk, each.name) for each in found[:MOST_TYPES]]
        more = len(found) - len(shown)
        named = format_html_join(", ", "{}", ((each,) for each in shown))
        return [Fact("Environment types", named or "none", note=f"and {more} more" if more else "")]
