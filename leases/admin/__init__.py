"""Admin pages on leases, turns, agents, keys and environment types."""

from leases.admin import budgets, costs, identity, leases, sandboxes, spending, state

__all__ = ["budgets", "costs", "identity", "leases", "sandboxes", "spending", "state"]
