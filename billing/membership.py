"""Accounts of an agent by day, and the effect of a change to its memberships. No database access.

An AccountHistory holds the memberships of one agent as (since, account id), ordered by date."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import date
from operator import itemgetter

AccountHistory = Sequence[tuple[date, int]]
HOUSE_ACCOUNT_NAME = "house"  # account of agents without a membership
# Account of the agent of a row of sandboxes_sandbox. The parameter is the UTC date.
CALLER_ACCOUNT_SQL = f"""SELECT COALESCE((SELECT name FROM billing_membership
    JOIN billing_account ON billing_account.id = billing_membership.account_id
    WHERE billing_membership.agent_did = sandboxes_sandbox.agent_did AND since <= %s
    ORDER BY since DESC LIMIT 1), '{HOUSE_ACCOUNT_NAME}')"""  # noqa: S608 - no user input


def find_account_on(history: AccountHistory, day: date, house: int) -> int:
    """Return the account of the latest membership begun by `day`, or `house` if there is none."""
    begun = bisect_right(history, day, key=itemgetter(0))
    return history[begun - 1][1] if begun else house


def find_account_changes(old: AccountHistory, new: AccountHistory, house: int) -> Iterator[tuple[date, int, int]]:
    """Yield (first day, old account, new account) for each difference between two histories of one agent."""
    for day in sorted({since for since, _ in (*old, *new)}):
        before, after = find_account_on(old, day, house), find_account_on(new, day, house)
        if before != after:
            yield day, before, after
