"""History of ended leases past LEASEHOLD_KEEP_HISTORY.

The period begins at the end of the lease, whose sandbox must be destroyed. The lease goes last, when nothing refers to it. What
an ended lease has cost stays: usage and cost records name the lease by its id."""

from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Exists, OuterRef, Q, QuerySet

from leases.agent_runs.models import AgentRun
from leases.atproto.models import AtprotoRecord, RecordStatus
from leases.coding.models import CodingTask
from leases.environments.models import Environment
from leases.models import Lease, LeaseEvent, LeaseStatus, Turn
from sandboxes.models import (
    AgentRoute,
    Attachment,
    DataEvent,
    GatewayToken,
    Process,
    ProcessStatus,
    SandboxState,
    Snapshot,
)  # fmt: skip


def find_expired(*, now: datetime) -> dict[str, QuerySet[Any]]:
    """Return the expired rows of each kind, children before parents."""
    before = now - settings.KEEP_HISTORY
    ended_children = {"lease__status": LeaseStatus.DESTROYED, "lease__ended_at__lte": before}
    without_lease = ~Exists(_find_later_leases(before))
    stored = Snapshot.objects.filter(holder=OuterRef("pk"), forgotten_at__isnull=True)
    gone = {"sandbox__state": SandboxState.DESTROYED, "sandbox__destroyed_at__lte": now - settings.KEEP_STATE}
    leases = Lease.objects.filter(environment_id=OuterRef("pk"))
    active = Lease.objects.filter(environment_id=OuterRef("environment"), status=LeaseStatus.ACTIVE)
    # An order by the indexed time of the end makes PostgreSQL read the oldest leases first, and of each its few rows.
    return {
        "sync states of /data": Attachment.objects.filter(**gone, unsaved_since__isnull=True).order_by("pk"),
        "gateway tokens": GatewayToken.objects.filter(**gone).order_by("pk"),
        "agent routes": AgentRoute.objects.filter(**gone).order_by("pk"),
        "processes": Process.objects.filter(
            without_lease, ~Q(state=ProcessStatus.RUNNING), started_at__lte=before, ended_at__lte=before,
            restart_at__isnull=True, wake_pending=False,
        ).order_by("started_at"),
        "data incidents": DataEvent.objects.filter(without_lease, at__lte=before).order_by("at"),
        "AT Protocol records": AtprotoRecord.objects.filter(
            ~Q(status=RecordStatus.PENDING), **ended_children
        ).order_by("lease__ended_at"),
        "agent runs": AgentRun.objects.filter(ended_at__isnull=False, **ended_children).order_by("lease__ended_at"),
        "turns": Turn.objects.filter(ended_at__isnull=False, **ended_children).order_by("lease__ended_at"),
        "lease events": LeaseEvent.objects.filter(**ended_children).order_by("lease__ended_at"),
        "leases": Lease.objects.filter(
            ~Exists(stored), status=LeaseStatus.DESTROYED, ended_at__lte=before
        ).order_by("ended_at"),
        "coding tasks": CodingTask.objects.filter(
            ~Exists(active), created_at__lte=before, ended_at__lte=before
        ).order_by("created_at"),
        "environments": Environment.objects.filter(
            ~Exists(leases), coding_task__isnull=True, ended_at__lte=before
        ).order_by("ended_at"),
    }  # fmt: skip


def _find_later_leases(before: datetime) -> QuerySet[Lease]:
    """Return the lease of a row's `holder` unless it has ended before the retention period, with its sandbox destroyed."""
    return Lease.objects.filter(pk=OuterRef("holder")).exclude(status=LeaseStatus.DESTROYED, ended_at__lte=before)
