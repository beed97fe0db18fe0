"""Many leases at once: end what is over, and see to it that nothing is left of what has ended."""

from datetime import datetime

from django.db import transaction
from django.db.models import Exists, OuterRef

from leases import leasing, turns
from leases.models import IdempotentRequest, Lease, LeaseEvent, Status
from sandboxes import sweeps as below
from sandboxes.models import Sandbox, State
from sandboxes.sweeps import Swept


def expire_due(*, now: datetime, limit: int = 500) -> Swept:
    """End active leases whose clock has run out."""
    swept = Swept()
    due = Lease.objects.filter(
        status=Status.ACTIVE, expires_minute__lte=leasing.minute_of(now), expires_at__lte=now
    ).order_by("expires_minute")
    for lease in due[:limit]:
        reason = leasing.why_elapsed(lease, now)
        swept.note("expired" if _end_if_elapsed(lease, reason, now) else "lost race")
    return swept


def _end_if_elapsed(lease: Lease, reason: str, now: datetime) -> bool:
    with transaction.atomic():
        # Renewed since we looked? The guard repeats why it was due, under the row's lock.
        still = Lease.objects.select_for_update().filter(pk=lease.pk, status=Status.ACTIVE, expires_at__lte=now).exists()
        return still and leasing.end(lease.pk, reason=reason, now=now, actor="sweep")


def end_matching(environment_id: str, condition: str, *, now: datetime, agents: list[str] | None, actor: str = "") -> list[Lease]:
    """End every active lease in an environment that waits for this condition, in one transaction; of these agents only,
    or of all (None). What was ended; a repeat ends nothing."""
    with transaction.atomic(durable=True):
        active = Lease.objects.select_for_update().filter(environment_id=environment_id, status=Status.ACTIVE).order_by("pk")
        if agents is not None:
            active = active.filter(agent_did__in=agents)
        return [
            lease
            for lease in active
            if condition in lease.expiry_conditions
            and leasing.end(lease.pk, reason=f"condition:{condition}", now=now, actor=actor)
        ]


def reclaim(*, now: datetime, limit: int = 200) -> Swept:
    """Destroy what was given up, then mark ended leases destroyed: those of which no sandbox is left."""
    swept = below.reclaim(now=now, limit=limit)
    left = Sandbox.objects.filter(holder=OuterRef("pk")).exclude(state=State.DESTROYED)
    for lease in Lease.objects.filter(~Exists(left), status=Status.EXPIRED).order_by("ended_at")[: limit * 5]:
        with transaction.atomic():
            if Lease.objects.filter(pk=lease.pk, status=Status.EXPIRED).update(status=Status.DESTROYED, destroyed_at=now):
                LeaseEvent.objects.create(lease=lease, at=now, kind="destroyed", actor="sweep")
                swept.note("leases closed")
    return swept


def stalled(*, now: datetime, limit: int = 200) -> Swept:
    """What was left half done: in-flight sandboxes, open Runs and turns past their deadline, old stored answers."""
    swept = below.stalled(now=now, limit=limit)
    swept.note("turns skipped", turns.skip_overdue(now=now, limit=limit))
    old, _ = IdempotentRequest.objects.filter(expires_at__lt=now).delete()
    swept.note("answers forgotten", old)
    return swept
