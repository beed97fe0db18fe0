"""Actions of operators on environments."""

from datetime import datetime
from typing import Any

from django import forms
from unfold.widgets import UnfoldAdminTextInputWidget

from leases.environments import lifecycle, participants
from leases.environments.models import Environment
from leases.models import validate_did
from leases.tasks import enqueue_reclaim
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.audit import Actor


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


def _set_phase(row: Environment, actor: Actor, reason: str, now: datetime, phase: str) -> bool:
    return lifecycle.set_phase(row.pk, phase, now=now, actor=actor)


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
    button="Phase",
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
    button="End",
    enqueue=enqueue_reclaim,
)


class ParticipantsForm(ReasonForm):
    """Agents that may enter an environment, or may not any more."""

    field_order = ["add", "remove", "reason"]
    error_fields = {"agents": "add"}
    add = forms.CharField(
        required=False, max_length=255, validators=[validate_did], label="Add agent (DID)",
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
    )  # fmt: skip
    remove = forms.CharField(
        required=False, max_length=255, validators=[validate_did], label="Remove agent (DID)",
        help_text="Its lease in the environment ends at once. The last state of its sandbox is stored.",
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
    )  # fmt: skip

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if not self.errors and not cleaned.get("add") and not cleaned.get("remove"):
            self.add_error("add", "Enter an agent to add or to remove.")
        if cleaned.get("remove") and not self.request.user.has_perm("leases.end_lease"):
            self.add_error("remove", "You may not end leases.")
        return cleaned


def _change_participants(row: Environment, actor: Actor, reason: str, now: datetime, add: str = "", remove: str = "") -> bool:
    was_listed = row.participants.filter(agent_did=remove).exists()
    added = bool(add) and participants.add(row.pk, [add], now=now, actor=actor) > 0
    ended = participants.remove(row.pk, remove, now=now, actor=actor) if remove else []
    return added or was_listed or bool(ended)


PARTICIPANTS_ACTION = AdminAction(
    title="Change participants",
    warning="A participant may hold a lease in the environment, and reads its task.",
    done="updated with the new participants",
    refusal_reason="has these participants",
    legal=lambda row: row.ended_at is None and not row.open_to_project,
    verb=_change_participants,
    icon="group",
    permissions=("leases.manage_environment",),
    form=ParticipantsForm,
    enqueue=enqueue_reclaim,
    button="Participants",
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
    button="Open",
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
    button="Restrict",
)
