"""Actions of operators on environments."""

from datetime import datetime

from django import forms
from unfold.widgets import UnfoldAdminTextInputWidget

from leases.environments import lifecycle, participants
from leases.environments.models import Environment
from leases.models import validate_did
from leases.tasks import enqueue_reclaim
from sandboxes.admin.base.actions import AdminAction, ReasonForm


class PhaseForm(ReasonForm):
    """New phase of an environment."""

    field_order = ["phase", "reason"]
    phase = forms.CharField(required=False, max_length=64, widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}))


class OutcomeForm(ReasonForm):
    """Outcome of an environment, as text."""

    field_order = ["outcome", "reason"]
    outcome = forms.CharField(required=False, max_length=500, widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}))


def _start(row: Environment, actor: str, reason: str, now: datetime) -> bool:
    return lifecycle.start(row.pk, now=now, actor=actor)


def _set_phase(row: Environment, actor: str, reason: str, now: datetime, phase: str) -> bool:
    return lifecycle.set_phase(row.pk, phase, actor=actor)


def _end(row: Environment, actor: str, reason: str, now: datetime, outcome: str = "") -> bool:
    is_open = row.ended_at is None
    ended = lifecycle.end(row.pk, outcome=outcome or lifecycle.NOTHING, now=now, actor=actor)
    return is_open or bool(ended)


START_ACTION = AdminAction(
    title="Start",
    warning="Records the start. Agents may hold leases before it.",
    done="started",
    refusal_reason="has started",
    legal=lambda row: row.status == "created",
    verb=_start,
    permissions=("leases.manage_environment",),
)
PHASE_ACTION = AdminAction(
    title="Set phase",
    warning="The phase is shown to operators and through the API.",
    done="updated with the new phase",
    refusal_reason="has that phase",
    legal=lambda row: row.ended_at is None,
    verb=_set_phase,
    icon="flag",
    permissions=("leases.manage_environment",),
    form=PhaseForm,
)
END_ACTION = AdminAction(
    title="End environment",
    warning="Every active lease in it ends: its agent loses access at once. The last state of each sandbox is stored and kept "
    "for LEASEHOLD_KEEP_STATE, then the sandbox is destroyed.",
    done="ended",
    refusal_reason="has ended",
    legal=lambda row: row.ended_at is None,
    verb=_end,
    icon="block",
    permissions=("leases.manage_environment", "leases.end_lease"),
    danger=True,
    enqueue=enqueue_reclaim,
)


class ParticipantForm(ReasonForm):
    """Agent that may enter an environment, or may not any more."""

    field_order = ["agent", "reason"]
    agent = forms.CharField(
        max_length=255, validators=[validate_did], label="Agent (DID)",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off"}),
    )  # fmt: skip


def _add(row: Environment, actor: str, reason: str, now: datetime, agent: str) -> bool:
    return bool(participants.add(row.pk, [agent], now=now, actor=actor))


def _remove(row: Environment, actor: str, reason: str, now: datetime, agent: str) -> bool:
    was_listed = row.participants.filter(agent_did=agent).exists()
    return bool(participants.remove(row.pk, agent, now=now, actor=actor)) or was_listed


ADD_PARTICIPANT_ACTION = AdminAction(
    title="Add participant",
    warning="The agent may hold a lease in the environment, and reads its task.",
    done="updated with the new participant",
    refusal_reason="has this participant",
    legal=lambda row: row.ended_at is None and not row.open_to_project,
    verb=_add,
    icon="person_add",
    permissions=("leases.manage_environment",),
    form=ParticipantForm,
)
REMOVE_PARTICIPANT_ACTION = AdminAction(
    title="Remove participant",
    warning="The agent's lease in the environment ends at once. The last state of its sandbox is stored.",
    done="updated without the participant",
    refusal_reason="has no such participant",
    legal=lambda row: row.ended_at is None and not row.open_to_project,
    verb=_remove,
    icon="person_remove",
    permissions=("leases.manage_environment", "leases.end_lease"),
    danger=True,
    form=ParticipantForm,
    enqueue=enqueue_reclaim,
)
OPEN_ACTION = AdminAction(
    title="Open to project",
    warning="Every agent of the project may hold a lease in the environment, and reads its task.",
    done="opened to its project",
    refusal_reason="is open to its project",
    legal=lambda row: row.ended_at is None and not row.open_to_project,
    verb=lambda row, actor, reason, now: participants.set_access(row.pk, True, now=now, actor=actor),
    icon="lock_open",
    permissions=("leases.manage_environment",),
)
RESTRICT_ACTION = AdminAction(
    title="Restrict to participants",
    warning="Agents without an active lease that are not participants may not enter any more. Active leases go on.",
    done="restricted to its participants",
    refusal_reason="is restricted",
    legal=lambda row: row.ended_at is None and row.open_to_project,
    verb=lambda row, actor, reason, now: participants.set_access(row.pk, False, now=now, actor=actor),
    icon="lock",
    permissions=("leases.manage_environment",),
)
