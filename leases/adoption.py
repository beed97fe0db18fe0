"""Adoption of a sandbox without an owner, with its files as a snapshot of a lease."""

from datetime import datetime
from uuid import UUID

from django.conf import settings

from leases import leasing
from leases.errors import InvalidRequest
from leases.models import Lease, LeaseEvent
from sandboxes.audit import Actor
from sandboxes.inventory import adoption
from sandboxes.inventory.adoption import Adoption, Recipient
from sandboxes.models import Pool

SNAPSHOT_EVENT = "snapshot"


def adopt_sandbox(
    provider_name: str, name: str, *, pool_name: str = "", lease_id: UUID | None = None, now: datetime, actor: Actor,
    reason: str,
) -> Adoption:  # fmt: skip
    """Adopt a sandbox that an engine lists and no row names (sandboxes.inventory.adoption).

    With a lease its files become a snapshot of the lease, and an entry of the lease's timeline. Raise InvalidRequest naming
    `pool` or `lease_id`, LeaseEnded, and the errors of `adoption.adopt`."""
    pool = _get_pool(pool_name) if pool_name else None
    recipient = _get_recipient(lease_id, now=now) if lease_id else None
    adopted = adoption.adopt(
        provider_name, name, pool=pool, recipient=recipient, now=now, grace=settings.ORPHAN_GRACE, actor=actor, reason=reason
    )
    if lease_id and adopted.snapshot:
        LeaseEvent.objects.create(
            lease_id=lease_id, at=now, kind=SNAPSHOT_EVENT, actor=actor, reason=f"files of the adopted sandbox: {reason}"
        )
    return adopted


def _get_pool(name: str) -> Pool:
    pool = Pool.objects.filter(name=name).first()
    if pool is None:
        raise InvalidRequest("pool", f"There is no pool {name[:63]!r}.")
    return pool


def _get_recipient(lease_id: UUID, *, now: datetime) -> Recipient:
    try:
        lease = leasing.require_active(lease_id, now=now)
    except Lease.DoesNotExist:
        raise InvalidRequest("lease_id", "There is no such lease.") from None
    return Recipient(lease.pk, lease.agent_did, lease.environment_id)
