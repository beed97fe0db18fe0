"""Console pages of accounts, memberships, credits, statements, budgets, rates, usage and costs."""

from billing.admin import accounts, budgets, costs, credits, members, rates, statements, usage

__all__ = ["accounts", "budgets", "costs", "credits", "members", "rates", "statements", "usage"]
