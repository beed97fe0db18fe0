"""Whose account a day is, and what a change to memberships makes of that. No database here.

A history is what one agent's memberships say: (since, account), in the order of time."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import date
from operator import itemgetter

AccountHistory = Sequence[tuple[date, int]]


def find_account_on(history: AccountHistory, day: date, house: int) -> int:
    """The account of the latest membership that has begun, or the house."""
    begun = bisect_right(history, day, key=itemgetter(0))
    return history[begun - 1][1] if begun else house


def find_account_changes(was: AccountHistory, becomes: AccountHistory, house: int) -> Iterator[tuple[date, int, int]]:
    """From which day on which account is replaced by which, where one history becomes another."""
    for day in sorted({since for since, _ in (*was, *becomes)}):
        before, after = find_account_on(was, day, house), find_account_on(becomes, day, house)
        if before != after:
            yield day, before, after
