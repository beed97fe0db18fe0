"""Conditions posted to an environment, such as `game.finished`: each ends the leases that list it."""

from datetime import datetime

from django.db import transaction

from leases import leasing
from leases.models import Lease, LeaseStatus


def post_condition(
    environment_id: str, condition: str, *, now: datetime, agents: list[str] | None, actor: str = ""
) -> list[Lease]:
    """End the active leases of an environment that list `condition` among their expiry conditions, and return them.

    `agents` restricts this to the leases of these DIDs; None means every agent. All of them end in one transaction, with
    the reason `condition:<name>`. Idempotent: posting the same condition again returns an empty list."""
    with transaction.atomic(durable=True):
        active = (
            Lease.objects.select_for_update(no_key=True)
            # A lease past its expires_at has ended by its own clock, even if no sweep has recorded that yet.
            .filter(environment_id=environment_id, status=LeaseStatus.ACTIVE, expires_at__gt=now)
            .order_by("pk")
        )
        if agents is not None:
            active = active.filter(agent_did__in=agents)
        return [
            lease
            for lease in active
            if condition in lease.expiry_conditions
            and leasing.end(lease.pk, reason=f"condition:{condition}", now=now, actor=actor)
        ]
