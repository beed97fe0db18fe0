"""Stop of all work of an agent, of an environment or of the installation, by an operator."""

from dataclasses import replace
from datetime import datetime

from django import forms
from unfold.widgets import UnfoldBooleanSwitchWidget

from leases import stops
from leases.environments.models import Environment
from leases.models import Agent
from leases.stops import Scope
from leases.tasks import enqueue_reclaim
from sandboxes.admin.base.actions import AdminAction, ListAction, ReasonForm
from sandboxes.audit import Actor

EFFECT = (
    "queued runs and agent runs are interrupted; commands, turns and background processes are killed. Files stay. Work that "
    "begins afterwards is not affected."
)


class StopForm(ReasonForm):
    """Choice of ending the leases with the work."""

    field_order = ["end_leases", "reason"]
    end_leases = forms.BooleanField(
        required=False, label="End active leases, too", widget=UnfoldBooleanSwitchWidget,
        help_text="The agents lose access at once. The last state of each sandbox is stored, then the sandbox is destroyed.",
    )  # fmt: skip

    def clean_end_leases(self) -> bool:
        chosen: bool = self.cleaned_data["end_leases"]
        if chosen and not self.request.user.has_perm("leases.end_lease"):
            raise forms.ValidationError("You may not end leases.")
        return chosen


def _stop(scope: Scope, actor: Actor, reason: str, now: datetime, end_leases: bool) -> bool:
    result = stops.stop(scope, end_leases=end_leases, now=now, actor=actor, detail=reason)
    result.require_complete()
    return result.has_stopped


def _stop_agent(row: Agent, actor: Actor, reason: str, now: datetime, end_leases: bool = False) -> bool:
    return _stop(Scope(agent_did=row.did), actor, reason, now, end_leases)


def _stop_environment(row: Environment, actor: Actor, reason: str, now: datetime, end_leases: bool = False) -> bool:
    return _stop(Scope(environment_id=row.pk), actor, reason, now, end_leases)


def _stop_installation(actor: Actor, now: datetime, reason: str, end_leases: bool) -> bool:
    return _stop(Scope(), actor, reason, now, end_leases)


STOP_AGENT_ACTION = AdminAction(
    title="Stop all work of the agent",
    warning=f"In all its leases {EFFECT}",
    done="stopped",
    refusal_reason="no work to stop",
    legal=lambda row: True,
    verb=_stop_agent,
    icon="stop_circle",
    permissions=("leases.interrupt_run",),
    danger=True,
    enqueue=enqueue_reclaim,
    form=StopForm,
    button="Stop all work",
    bulk_button="Stop all work…",
)
STOP_ENVIRONMENT_ACTION = replace(
    STOP_AGENT_ACTION,
    title="Stop all work in the environment",
    warning=f"In the leases of all agents {EFFECT} The environment stays open.",
    verb=_stop_environment,
)
STOP_INSTALLATION_ACTION = ListAction(
    title="Stop all work of the installation",
    description=f"In the leases of all agents {EFFECT}",
    done="All work of the installation is stopped.",
    unchanged="no work to stop",
    verb=_stop_installation,
    form=StopForm,
    permissions=("leases.interrupt_run",),
    icon="stop_circle",
    button="Stop all agents",
    enqueue=enqueue_reclaim,
)
