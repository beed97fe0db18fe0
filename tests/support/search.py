"""Budgets of searches: few examples at each change, all of them in `make test-all`.

TEST_SEARCH is `fast` (the default), `full`, or a number: as many times the full budget, for a search by hand."""

import os

SEARCH = os.environ.get("TEST_SEARCH", "fast")


def budget(*, fast: int, full: int) -> int:
    """Return the number of seeds or examples of this run."""
    if SEARCH == "fast":
        return fast
    return full if SEARCH == "full" else full * int(SEARCH)
