"""Actions on snapshots that involve their lease: take, restore, fork."""

from datetime import datetime
from typing import Any
from uuid import UUID

from django import forms
from django.contrib.admin.utils import unquote
from django.http import HttpRequest
from django.urls import reverse
from unfold.widgets import UnfoldAdminTextInputWidget

from leases import fork as forking
from leases.admin.fields import EnvironmentIdField
from leases.leasing import LeaseRequest
from leases.models import Lease, LeaseEvent, LeaseStatus
from leases.placement import find_fork_pool
from leases.tasks import request_restore, request_snapshot
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.snapshots import SnapshotAdmin
from sandboxes.formatting import format_bytes, format_path
from sandboxes.models import ALIVE_STATES, Sandbox, SandboxState, Snapshot


class SnapshotForm(ReasonForm):
    """Name of a new snapshot."""

    field_order = ["name", "reason"]
    name = forms.CharField(
        required=False,
        max_length=100,
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off", "autofocus": True}),
        help_text="Optional. Shown in the list of snapshots.",
    )


class SnapshotReasonForm(ReasonForm):
    """Reason, below a description of the snapshot."""

    form_before_template = "admin/sandboxes/snapshot/description.html"

    def get_before_template_context(self, request: HttpRequest, object_id: str | None = None) -> dict[str, Any]:
        try:
            pk = UUID(unquote(object_id or ""))
        except ValueError:
            return {}
        snapshot = Snapshot.objects.select_related("sandbox").filter(pk=pk).first()
        if snapshot is None:
            return {}
        return {"snapshot": snapshot, "size": format_bytes(snapshot.size_bytes), "name": format_path(snapshot.name)}


class ForkForm(SnapshotReasonForm):
    """Environment of the new lease."""

    field_order = ["environment", "reason"]
    error_fields = {"environment_id": "environment", "environment_ended": "environment", "environment_not_found": "environment"}
    environment = EnvironmentIdField(autofocus=True, help_text="An environment in which this agent holds no lease.")


def _can_snapshot(sandbox: Sandbox) -> bool:
    return sandbox.state in (*ALIVE_STATES, SandboxState.COLD) and sandbox.holder is not None and sandbox.lost_at is None


def _is_lease_active(holder: UUID) -> bool:
    return Lease.objects.filter(pk=holder, status=LeaseStatus.ACTIVE).exists()


def _fork_snapshot(snapshot: Snapshot, actor: str, reason: str, now: datetime, environment: str) -> bool:
    lease = Lease.objects.select_related("pool").get(pk=snapshot.holder)
    request = LeaseRequest(lease.agent_did, environment, lease.environment_type_id, pool=find_fork_pool(lease))

    def record_reason() -> None:
        LeaseEvent.objects.create(lease=lease, at=now, kind="fork_asked_for", actor=actor, reason=reason)

    return forking.fork(lease, request, snapshot=snapshot.pk, now=now, actor=actor, admit=record_reason)[1]


def _get_forked_lease_url(row: Snapshot, form: ReasonForm) -> str:
    forked = Lease.objects.filter(
        agent_did=row.sandbox.agent_did, environment_id=form.cleaned_data["environment"], status=LeaseStatus.ACTIVE
    ).first()
    if forked is None:
        return reverse("admin:sandboxes_snapshot_change", args=[row.pk])
    return reverse("admin:leases_lease_change", args=[forked.pk])


TAKE_SNAPSHOT_ACTION = AdminAction(
    title="Take snapshot",
    warning="The workspace is stored as it is now. Processes keep running, so files may change while they are read.",
    done="queued for a snapshot",
    refusal_reason="its lease has ended, or it has no stored or running state",
    legal=_can_snapshot,
    verb=lambda sandbox, actor, reason, now, name: request_snapshot(sandbox, name, now=now, actor=actor, reason=reason),
    icon="photo_camera",
    permissions=("sandboxes.act_on_sandbox",),
    button="Snapshot",
    form=SnapshotForm,
)
RESTORE_ACTION = AdminAction(
    title="Restore",
    warning=(
        "This snapshot replaces the workspace. The current workspace is stored as a snapshot first, so the restore can be "
        "undone. /data is not changed. Refused while the sandbox is running."
    ),
    done="being restored",
    refusal_reason="the snapshot was deleted, or its lease has ended",
    legal=lambda snapshot: snapshot.forgotten_at is None and _is_lease_active(snapshot.holder),
    verb=lambda snapshot, actor, reason, now: request_restore(snapshot, now=now, actor=actor, reason=reason),
    icon="settings_backup_restore",
    permissions=("sandboxes.act_on_sandbox",),
    explain_refusal=lambda snapshot: "its lease has ended",
    form=SnapshotReasonForm,
    get_next_url=lambda row, form: reverse("admin:sandboxes_sandbox_change", args=[row.sandbox_id]),
)
FORK_ACTION = AdminAction(
    title="Fork",
    warning=("The agent gets a new lease of the same type in another environment. Its workspace starts from this snapshot."),
    done="forked",
    refusal_reason="the snapshot was deleted",
    legal=lambda snapshot: snapshot.forgotten_at is None,
    verb=_fork_snapshot,
    icon="call_split",
    button="Fork into",
    permissions=("sandboxes.act_on_sandbox",),
    explain_refusal=lambda snapshot: "that environment already has a lease forked from this snapshot",
    form=ForkForm,
    get_next_url=_get_forked_lease_url,
)

SnapshotAdmin.add_actions({"restore": RESTORE_ACTION, "fork": FORK_ACTION})
