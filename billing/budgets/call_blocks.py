"""Marks on sandboxes whose model calls the egress proxy refuses, because a hard budget of their lease is exhausted."""

from datetime import datetime
from uuid import UUID

from billing.budgets.admission import find_exhausted
from billing.budgets.periods import get_grace_deadline
from billing.budgets.scopes import find_open_tabs
from sandboxes.egress import authorization


def update_call_blocks(*, now: datetime) -> int:
    """Refuse the model calls of all leases over budget from the end of the grace period on, and admit those of all others.

    Return the number of changed sandboxes. Idempotent. The proxy reads the marks with the row of the sandbox, so a call needs
    no further query and `sandboxes` knows no budgets."""
    blocked_at: dict[UUID, datetime] = {}
    for budget in find_exhausted(now=now):
        deadline = get_grace_deadline(budget)
        for holder in find_open_tabs(budget, now=now).values_list("holder", flat=True):
            blocked_at[holder] = min(deadline, blocked_at.get(holder, deadline))
    return authorization.set_call_blocks(blocked_at)
