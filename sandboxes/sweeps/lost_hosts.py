"""Loss of a host: its engine and its sandboxes are gone for good, as declared by an operator.

The control plane cannot tell a lost host from one that is only unreachable. It therefore leaves the sandboxes of an unreachable
host alone, with their places and slots, until an operator declares the host lost."""

from datetime import datetime

import structlog
from django.db import transaction
from django.db.models import QuerySet

from sandboxes import audit, destruction, eviction
from sandboxes.lifecycle import COLD, DESTROYED, DESTROYING, advance
from sandboxes.models import GONE_STATES, Host, Sandbox, Sweep, TransitionReason

log = structlog.get_logger(__name__)


def declare_lost(host: Host, *, now: datetime, actor: audit.Actor) -> bool:
    """Record that a host is lost. The sweeps `mark_sandboxes_lost` and `release_sandboxes` act on it.

    Returns False if it was declared before."""
    with transaction.atomic():
        declared = Host.objects.filter(pk=host.pk, lost_at__isnull=True).update(lost_at=now)
        if declared:
            Sweep.objects.filter(host=host).delete()  # otherwise the host's sweeps would be reported as late for ever
            audit.record(host, "Declare host lost", actor=actor, now=now)
    if declared:
        log.warning("host declared lost", host=host.name, actor=actor)
    return bool(declared)


def find_sandboxes(host: Host) -> QuerySet[Sandbox]:
    """Select the sandboxes that are lost with a host. Cold ones have no process, and their state is in the store."""
    return Sandbox.objects.filter(host=host).exclude(state__in=(COLD, DESTROYED)).order_by("created_at")


def mark_sandboxes_lost(*, now: datetime) -> int:
    """Mark the held sandboxes of lost hosts as lost. The caller ends their leases. Returns the number marked."""
    held = Sandbox.objects.filter(host__lost_at__isnull=False, lost_at__isnull=True, holder__isnull=False)
    unmarked = held.exclude(state__in=(COLD, *GONE_STATES)).select_related("host")
    return sum(eviction.mark_lost(sandbox, f'the host "{sandbox.host}" was declared lost', now=now) for sandbox in unmarked)


def release_sandboxes(*, now: datetime, actor: str = "sweep") -> int:
    """Release the places and slots of sandboxes on lost hosts, without confirmation by their engines. Returns their number.

    Call this function after the leases of lost sandboxes have ended: sandboxes that a lease holds are left alone."""
    released = 0
    for sandbox in Sandbox.objects.filter(host__lost_at__isnull=False).exclude(state__in=(COLD, DESTROYED)):
        if sandbox.holder is None:
            destruction.schedule_destroy(sandbox.pk, now=now, code=TransitionReason.HOST_LOST, actor=actor)
        with transaction.atomic():
            if advance(
                sandbox.pk, DESTROYING, DESTROYED, now=now, code=TransitionReason.HOST_LOST, actor=actor,
                destroyed_at=now, deadline_at=None, claim=None, quarantined_at=None,
            ):  # fmt: skip
                destruction.release_place(sandbox)
                released += 1
    return released
