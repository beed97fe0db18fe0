"""Limits of one lease on the cost and the tokens of its model calls."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db import transaction

from leases import leasing
from leases.models import Lease, LeaseEvent
from sandboxes import audit
from sandboxes.audit import CONTROL_PLANE, Actor
from sandboxes.call_limits import CallLimits
from sandboxes.pool import allocation

REQUEST_FIELDS = {"limit": "usd", "token_limit": "tokens"}  # limits by field of requests and forms


def change_call_limits(
    pk: UUID, changes: Mapping[str, Any], *, now: datetime, actor: Actor = CONTROL_PLANE, detail: str = ""
) -> bool:
    """Set limits on the model calls of an active lease, by field of CallLimits. Return False if nothing changed.

    None removes a limit, and a limit that is not among the changes stays.
    Applies from the next model call. The lease's current sandbox is updated in the same transaction; a later sandbox reads
    the limits from the lease. Raise LeaseEnded or Lease.DoesNotExist."""
    with transaction.atomic():
        # A claim of a sandbox also locks this row and reads the limits afterwards, so it cannot miss the change.
        locked = Lease.objects.select_for_update(no_key=True, of=("self",)).filter(pk=pk).first()
        lease = leasing.check_active(locked, now=now)
        before = CallLimits.of(lease)
        limits = replace(before, **changes)
        if limits == before:
            return False
        Lease.objects.filter(pk=pk).update(**limits.columns)
        change = _describe_change(before, limits)
        LeaseEvent.objects.create(
            lease=lease, at=now, kind="call_limits", actor=actor, reason=f"{change}: {detail}" if detail else change
        )
        audit.record(lease, "Limit model calls", change, actor=actor, now=now)
        allocation.set_call_limits(pk, limits)
    return True


def _describe_change(before: CallLimits, after: CallLimits) -> str:
    changes = []
    if after.usd != before.usd:
        changes.append(f"{_describe_usd(after.usd)} instead of {_describe_usd(before.usd)}")
    if after.tokens != before.tokens:
        changes.append(f"{_describe_tokens(after.tokens)} instead of {_describe_tokens(before.tokens)}")
    return ", ".join(changes)


def _describe_usd(limit: Decimal | None) -> str:
    return "no spend limit" if limit is None else f"{limit.normalize():f} USD"


def _describe_tokens(limit: int | None) -> str:
    return "no token limit" if limit is None else f"{limit} tokens"
