"""Who may still spend: what a budget has left, who is refused by it, and who is over it.

Spending is worked out by `settle`, a sweep, from usage and costs. In between a budget is kept in two ways. A grant reserves
the least that a lease costs (LEASEHOLD_MINIMUM_TIME, LEASEHOLD_MINIMUM_USD) for itself and for every active lease in scope,
under the budget's lock, so that so many acquires at once get no more than there is. And what is marked as spent refuses
whatever would go on: one look at an index, which is empty most often.

So a hard budget is overshot by what is used from the moment at which it was spent in truth until its leases have ended:

    overshoot <= leases x rate x (metering + settling + grace + settling + storing) + calls

    leases      active at once in its scope, at most (amount - spent) / minimum when the last of them was granted
    rate        of one lease: 1 hour an hour; or the USD of its sandbox, and of its model calls, in that time
    metering    how old usage is when it is summed up: one pass of `meter` and its price, 1 minute between two. What is priced
                by use is read every 5 minutes
    settling    between two passes of `budgets`: 1 minute until it is marked as spent, and again 1 minute from the end of
                the grace until that is seen. What waits is put to sleep at the first pass, without grace
    grace       of the budget: what runs then may go on for as long
    storing     until the state of one lease's sandbox is stored, for as many as are stored one after another
    calls       what model calls cost that were under way: a call's cost is known when it has ended. And what is collected
                of them late

An account's budget counts what is billed to the account: of an agent that moves what it uses before in one, what it uses
from then on in the other. Who is refused is decided by where it belongs today (UTC).

Sandboxes that nobody holds yet count for everything, and for the house; no lease ends with them, so a pool that warms some
up goes on. While the state of a sandbox cannot be stored it stays, and its lease with it, past any grace: a budget loses no
files. Meanwhile all is refused, so nothing new runs in it."""

from billing.budgets.gate import (
    close_tab,
    find_exhausted,
    find_exhausted_for_lease,
    get_minimum_reservation,
    open_tab,
    require_budget,
)
from billing.budgets.periods import build_marked_filter, get_grace_deadline, get_period_bounds, get_spent, is_exhausted
from billing.budgets.scopes import build_lease_filter, find_open_tabs, find_visible_budgets
from billing.budgets.settlement import save_budget, set_active, update_spending
from billing.budgets.spending import find_top_spenders, sum_spending_by_day

__all__ = [
    "build_lease_filter",
    "build_marked_filter",
    "close_tab",
    "find_exhausted",
    "find_exhausted_for_lease",
    "find_open_tabs",
    "find_top_spenders",
    "find_visible_budgets",
    "get_grace_deadline",
    "get_minimum_reservation",
    "get_period_bounds",
    "get_spent",
    "is_exhausted",
    "open_tab",
    "require_budget",
    "save_budget",
    "set_active",
    "sum_spending_by_day",
    "update_spending",
]
