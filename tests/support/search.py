"""Budgets of searches: few seeds or examples by default, all of them with LEASEHOLD_SEARCH=full."""

import os

FULL = os.environ.get("LEASEHOLD_SEARCH") == "full"


def budget(*, fast: int, full: int) -> int:
    """Return the number of seeds or examples of this run: `full` in a full search, else `fast`."""
    return full if FULL else fast
