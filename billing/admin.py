"""Operators' pages on money: what was used, what it cost, who pays, and what was billed."""

from billing import admin_accounts, admin_costs, admin_members, admin_rates, admin_usage

__all__ = ["admin_accounts", "admin_costs", "admin_members", "admin_rates", "admin_usage"]
