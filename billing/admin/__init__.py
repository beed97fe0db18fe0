"""Admin pages on usage, costs, accounts, rates, budgets and statements."""

from billing.admin import accounts, costs, members, rates, usage

__all__ = ["accounts", "costs", "members", "rates", "usage"]
