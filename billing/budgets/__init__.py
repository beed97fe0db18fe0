"""Budgets: spending limits in sandbox-hours, USD or model tokens, their admission control and their updates.

A sweep computes each budget's spending from usage and costs (`update_spending`). A hard budget is enforced in three ways:

1. A grant reserves a minimum (LEASEHOLD_MINIMUM_TIME, LEASEHOLD_MINIMUM_USD) for the new lease and for every active lease in
   scope. The grant holds the budget's row lock, so concurrent acquires never reserve more than is left.
2. The time of running sandboxes is reserved until they can be stopped (`compute_reservation`). A budget is exhausted, and a
   start is refused, if spending and reservation together exceed the amount. The warning compares the spending alone.
3. An exhausted budget refuses further work of the leases in scope. While no budget is exhausted, the check is one lookup in
   an empty partial index.

    reservation = sandboxes x rate x (metering + sweep + grace + sweep)
    overshoot  <= ended x rate x (metering + sweep) + starts x reservation of one + storing + calls + measured

    sandboxes   running sandboxes of active leases in scope
    rate        price of one sandbox per hour: 1 sandbox-hour, or the USD of its time, memory, CPU, disk and GPUs at its limits,
                without monthly allowances
    metering    age of the metered usage, normally up to 1 minute plus one pass
    sweep       1 minute between two passes of `budgets`: until the next pass, and, with a grace period, from its end until the
                leases are ended
    grace       the budget's grace period, for work that is running
    ended       sandboxes of leases that ended since the last metering: no longer reserved, and not spent yet
    starts      sandboxes started at the same instant, each of which found room for itself
    storing     time of each sandbox that waits until the state of others is stored
    calls       errors of the estimates of the model calls in flight (billing.budgets.call_admission)
    measured    CPU and memory priced by use are read every 5 minutes, and may be counted that much later

A budget for a model counts the calls of the models that match its pattern, and refuses such calls alone: it reserves nothing
for sandboxes, refuses no start and ends no lease. The same holds for a budget in tokens, with a model or without.

An account's budget counts the usage billed to the account. If an agent moves, its earlier usage counts for the old account
and its later usage for the new one. Admission depends on the agent's account today (UTC).

Sandboxes without a lease (pre-warmed) count for a budget on everything and for the house account. They are not ended, so a
pool continues to start warm sandboxes under an exhausted budget. While a sandbox's state cannot be stored, the sandbox and its
lease stay beyond any grace period, so that an exhausted budget never causes a loss of files. New work is refused
meanwhile."""

from billing.budgets.admission import (
    ANY_EXHAUSTED_SQL,
    ANY_HARD_SQL,
    close_tab,
    find_exhausted,
    find_exhausted_for_lease,
    get_minimum_reservation,
    lock_for_grant,
    require_budget,
    require_room,
)
from billing.budgets.call_admission import check_call, sum_lease_calls
from billing.budgets.call_blocks import update_call_blocks
from billing.budgets.disclosure import Disclosure, get_disclosure, restrict_refusal
from billing.budgets.model_patterns import is_model_match
from billing.budgets.periods import (
    build_marked_filter,
    compute_period_bounds,
    get_grace_deadline,
    get_limit,
    get_period_bounds,
    get_spent,
    get_topped_up,
    get_uncertainty,
)
from billing.budgets.reservation import (
    SWEEP_INTERVAL,
    ReservationBasis,
    compute_reservation,
    get_stop_delay,
    is_exhausted,
    is_over,
)
from billing.budgets.scopes import (
    build_agent_filter,
    build_tab_filter,
    build_tabs_filter,
    find_open_tabs,
    find_visible_budgets,
)
from billing.budgets.spending import DailySpending, find_top_spenders, sum_spending_by_day
from billing.budgets.top_ups import top_up
from billing.budgets.updates import change_budget, create_budget, remove_budget, set_active, update_spending

__all__ = [
    "ANY_EXHAUSTED_SQL",
    "ANY_HARD_SQL",
    "SWEEP_INTERVAL",
    "DailySpending",
    "Disclosure",
    "ReservationBasis",
    "build_agent_filter",
    "build_marked_filter",
    "build_tab_filter",
    "build_tabs_filter",
    "change_budget",
    "check_call",
    "close_tab",
    "compute_period_bounds",
    "compute_reservation",
    "create_budget",
    "find_exhausted",
    "find_exhausted_for_lease",
    "find_open_tabs",
    "find_top_spenders",
    "find_visible_budgets",
    "get_disclosure",
    "get_grace_deadline",
    "get_limit",
    "get_minimum_reservation",
    "get_period_bounds",
    "get_spent",
    "get_stop_delay",
    "get_topped_up",
    "get_uncertainty",
    "is_exhausted",
    "is_model_match",
    "is_over",
    "lock_for_grant",
    "remove_budget",
    "require_budget",
    "require_room",
    "restrict_refusal",
    "set_active",
    "sum_lease_calls",
    "sum_spending_by_day",
    "top_up",
    "update_call_blocks",
    "update_spending",
]
