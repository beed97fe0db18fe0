"""Budgets: spending limits in sandbox-hours or USD, their admission control and their updates.

A sweep computes each budget's spending from usage and costs (`update_spending`). Between two sweeps a hard budget is enforced
in two ways:

1. A grant reserves a minimum (LEASEHOLD_MINIMUM_TIME, LEASEHOLD_MINIMUM_USD) for the new lease and for every active lease in
   scope. The grant holds the budget's row lock, so concurrent acquires never reserve more than is left.
2. An exhausted budget refuses further work of the leases in scope. While no budget is exhausted, the check is one lookup in
   an empty partial index.

A hard budget is therefore exceeded by the usage between the moment of actual exhaustion and the end of its leases:

    overshoot <= leases x rate x (metering + sweep + grace + sweep + storing) + calls

    leases      leases active at the same time in scope; at most (amount - spent) / minimum at the last grant
    rate        spending of one lease per hour: 1 sandbox-hour, or the USD of its sandbox and its model calls
    metering    age of the usage when it is summed: 1 minute between two passes of `meter`, plus the duration of one. Items
                priced by use are read every 5 minutes
    sweep       1 minute between two passes of `budgets`: once until the budget is marked as exhausted, and again from the end
                of the grace period until the leases are ended. A waiting sandbox is put to sleep in the first pass, without
                a grace period
    grace       the budget's grace period, for work that is running
    storing     time to store the state of one lease's sandbox, for as many sandboxes as are stored one after another
    calls       cost of the model calls in flight, which is known when a call ends, and of records that arrive late

An account's budget counts the usage billed to the account. If an agent moves, its earlier usage counts for the old account
and its later usage for the new one. Admission depends on the agent's account today (UTC).

Sandboxes without a lease (pre-warmed) count for a budget on everything and for the house account. They are not ended, so a
pool continues to start warm sandboxes under an exhausted budget. While a sandbox's state cannot be stored, the sandbox and its
lease stay beyond any grace period, so that an exhausted budget never causes a loss of files. New work is refused
meanwhile."""

from billing.budgets.admission import (
    close_tab,
    find_exhausted,
    find_exhausted_for_lease,
    get_minimum_reservation,
    open_tab,
    require_budget,
)
from billing.budgets.call_blocks import update_call_blocks
from billing.budgets.disclosure import Disclosure, get_disclosure, restrict_refusal
from billing.budgets.periods import build_marked_filter, get_grace_deadline, get_period_bounds, get_spent, is_exhausted
from billing.budgets.scopes import build_lease_filter, find_open_tabs, find_visible_budgets
from billing.budgets.spending import find_top_spenders, sum_spending_by_day
from billing.budgets.updates import save_budget, set_active, update_spending

__all__ = [
    "Disclosure",
    "build_lease_filter",
    "build_marked_filter",
    "close_tab",
    "find_exhausted",
    "find_exhausted_for_lease",
    "find_open_tabs",
    "find_top_spenders",
    "find_visible_budgets",
    "get_disclosure",
    "get_grace_deadline",
    "get_minimum_reservation",
    "get_period_bounds",
    "get_spent",
    "is_exhausted",
    "open_tab",
    "require_budget",
    "restrict_refusal",
    "save_budget",
    "set_active",
    "sum_spending_by_day",
    "update_call_blocks",
    "update_spending",
]
