"""Spend limit of the model calls of one lease."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.db import transaction

from leases.models import Lease, LeaseEvent, LeaseStatus
from sandboxes.pool import allocation


def set_spend_limit(pk: UUID, limit: Decimal | None, *, now: datetime, actor: str = "", detail: str = "") -> bool:
    """Set the limit in USD on the model calls of an active lease; None removes it. Return False if nothing changed.

    Applies from the next model call. The lease's current sandbox is updated in the same transaction; a later sandbox reads
    the limit from the lease. An ended lease is not changed."""
    with transaction.atomic():
        # A claim of a sandbox also locks this row and reads the limit afterwards, so it cannot miss the change.
        lease = Lease.objects.select_for_update(no_key=True, of=("self",)).filter(pk=pk, status=LeaseStatus.ACTIVE).first()
        if lease is None or lease.llm_limit == limit:
            return False
        Lease.objects.filter(pk=pk).update(llm_limit=limit)
        change = f"{_format_usd(limit)} instead of {_format_usd(lease.llm_limit)}"
        LeaseEvent.objects.create(
            lease=lease, at=now, kind="spend_limit", actor=actor, reason=f"{change}: {detail}" if detail else change
        )
        allocation.set_llm_limit(pk, limit)
    return True


def _format_usd(limit: Decimal | None) -> str:
    return "no limit" if limit is None else f"{limit.normalize():f} USD"
