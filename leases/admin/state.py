"""Operators' pages on what is stored, as seen from here: a holder is a lease, an agent has a page, and what was stored of
a lease can be gone back to, or started from."""

from datetime import datetime
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from unfold.decorators import action
from unfold.widgets import UnfoldAdminTextInputWidget

from leases import fork as forking
from leases.admin.formatting import LeaseHolderMixin
from leases.leasing import LeaseRequest
from leases.models import ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN, Lease, LeaseEvent, LeaseStatus
from leases.tasks import request_restore, request_snapshot
from sandboxes.admin.base import AdminAction, ReasonForm
from sandboxes.admin.formatting import format_bytes, format_path
from sandboxes.admin.llm_calls import LlmCallAdmin
from sandboxes.admin.state import AgentDataAdmin, DataEventAdmin, SnapshotAdmin
from sandboxes.models import ALIVE_STATES, AgentData, DataEvent, LlmCall, Sandbox, SandboxState, Snapshot


class SnapshotForm(ReasonForm):
    """What to call a copy."""

    field_order = ["name", "reason"]
    name = forms.CharField(
        required=False,
        max_length=100,
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off", "autofocus": True}),
        help_text="As you will look for it later; may be empty.",
    )


class SnapshotReasonForm(ReasonForm):
    """Why, about a copy that the dialog names."""

    form_before_template = "admin/sandboxes/snapshot/which.html"

    def get_before_template_context(self, request: HttpRequest, object_id: str | None = None) -> dict[str, Any]:
        try:
            pk = UUID(unquote(object_id or ""))
        except ValueError:
            return {}
        copy = Snapshot.objects.select_related("sandbox").filter(pk=pk).first()
        return {"copy": copy, "size": format_bytes(copy.size_bytes), "name": format_path(copy.name)} if copy else {}


class ForkForm(SnapshotReasonForm):
    """Where the new lease is held."""

    field_order = ["environment", "reason"]
    environment = forms.RegexField(
        rf"\A{ENVIRONMENT_ID_PATTERN}\Z",
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off", "autofocus": True}),
        error_messages={"invalid": f"Not {ENVIRONMENT_ID_DESCRIPTION}."},
        help_text="The id of an environment in which this agent holds no lease yet.",
    )


def _can_snapshot(sandbox: Sandbox) -> bool:
    return sandbox.state in (*ALIVE_STATES, SandboxState.COLD) and sandbox.holder is not None and sandbox.lost_at is None


def _is_lease_active(holder: UUID) -> bool:
    return Lease.objects.filter(pk=holder, status=LeaseStatus.ACTIVE).exists()


def _fork_snapshot(snapshot: Snapshot, actor: str, why: str, now: datetime, environment: str) -> bool:
    lease = Lease.objects.select_related("pool").get(pk=snapshot.holder)
    ask = LeaseRequest(lease.agent_did, environment, lease.environment_type_id, pool=lease.pool.name)

    def say_why() -> None:
        LeaseEvent.objects.create(lease=lease, at=now, kind="fork_asked_for", actor=actor, reason=why)

    return forking.fork(lease, ask, snapshot=snapshot.pk, now=now, actor=actor, admit=say_why)[1]


TAKE_SNAPSHOT_ACTION = AdminAction(
    title="Take a snapshot",
    warning="Its workspace is stored as it is, awake or asleep. Programs go on; each file is as it is when it is read.",
    done="being stored",
    refusal_reason="its lease has ended, or its sandbox is not there",
    legal=_can_snapshot,
    verb=lambda sandbox, actor, why, now, name: request_snapshot(sandbox, name, now=now, actor=actor, reason=why),
    form=SnapshotForm,
)
RESTORE_ACTION = AdminAction(
    title="Restore",
    warning=(
        "The next use finds this copy in the workspace, in the place of what is there now. That is stored first, as a "
        "snapshot, and can be gone back to. /data is not changed. Refused while something runs in the sandbox."
    ),
    done="being restored",
    refusal_reason="it was forgotten, or its lease has ended",
    legal=lambda snapshot: snapshot.forgotten_at is None and _is_lease_active(snapshot.holder),
    verb=lambda snapshot, actor, why, now: request_restore(snapshot, now=now, actor=actor, reason=why),
    explain_refusal=lambda snapshot: "its lease has ended",
    form=SnapshotReasonForm,
)
FORK_ACTION = AdminAction(
    title="Fork",
    warning=(
        "Its agent gets a lease in another environment, of the same type, in whose workspace the first use finds this copy."
    ),
    done="forked",
    refusal_reason="it was forgotten",
    legal=lambda snapshot: snapshot.forgotten_at is None,
    verb=_fork_snapshot,
    explain_refusal=lambda snapshot: "that lease was forked from it before",
    form=ForkForm,
)

for model in (AgentData, DataEvent, LlmCall, Snapshot):
    admin.site.unregister(model)


@admin.register(AgentData)
class LeasedAgentDataAdmin(LeaseHolderMixin, AgentDataAdmin):
    pass


@admin.register(DataEvent)
class LeasedDataEventAdmin(LeaseHolderMixin, DataEventAdmin):
    pass


@admin.register(LlmCall)
class LeasedLlmCallAdmin(LeaseHolderMixin, LlmCallAdmin):
    pass


@admin.register(Snapshot)
class LeasedSnapshotAdmin(LeaseHolderMixin, SnapshotAdmin):
    acts = {"restore": RESTORE_ACTION, "fork": FORK_ACTION}
    actions_detail = ["restore", "fork"]

    def has_act_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.act_on_sandbox")

    @action(description="Restore…", permissions=["act"], icon="settings_backup_restore", dialog=RESTORE_ACTION.dialog)
    def restore(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RESTORE_ACTION, form)

    @action(description="Fork into…", permissions=["act"], icon="call_split", dialog=FORK_ACTION.dialog)
    def fork(self, request: HttpRequest, form: ForkForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, FORK_ACTION, form)

    def after(self, act: AdminAction, row: Snapshot, form: ReasonForm) -> str:
        """Where the act is to be seen: on the page of the sandbox, or of the lease that was forked."""
        if act is not FORK_ACTION:
            return reverse("admin:sandboxes_sandbox_change", args=[row.sandbox_id])
        forked = Lease.objects.filter(
            agent_did=row.sandbox.agent_did, environment_id=form.cleaned_data["environment"], status=LeaseStatus.ACTIVE
        ).first()
        return reverse("admin:leases_lease_change", args=[forked.pk]) if forked else super().after(act, row, form)
