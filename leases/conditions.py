"""Conditions posted to an environment, such as `game.finished`: each ends the leases that list it."""

from datetime import datetime
from typing import Any

from django.db import transaction

from leases import leasing
from leases.environments import lifecycle
from leases.models import Lease


def post_condition(
    environment_id: str,
    condition: str,
    *,
    now: datetime,
    agents: list[str] | None,
    outcome: Any = lifecycle.NOTHING,
    actor: str = "",
) -> list[Lease]:
    """End the active leases of an environment that list `condition` among their expiry conditions, and return them.

    `agents` restricts this to the leases of these DIDs; None means every agent. All of them end in one transaction, with
    the reason `condition:<name>`. If no lease is active afterwards, the environment ends with them, and with `outcome`.
    Idempotent: posting the same condition again returns an empty list."""
    reason = f"condition:{condition}"
    with transaction.atomic(durable=True):
        lifecycle.lock_for_condition(environment_id)
        # A lease past its expires_at has ended by its own clock, even if no sweep has recorded that yet.
        active = lifecycle.select_active_leases(environment_id).filter(expires_at__gt=now)
        if agents is not None:
            active = active.filter(agent_did__in=agents)
        ended = [
            lease
            for lease in active
            if condition in lease.expiry_conditions and leasing.end(lease.pk, reason=reason, now=now, actor=actor)
        ]
        if ended or agents is None:
            lifecycle.close_if_empty(environment_id, reason, outcome=outcome, now=now, actor=actor)
        return ended
