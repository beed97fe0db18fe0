"""Errors of billing. A class's docstring is its message unless a more specific one is given."""

from sandboxes.errors import SandboxError


class BudgetExhausted(SandboxError):
    """A budget leaves no room for this. `resets_at` is the start of its next period, or null if the budget never resets."""

    code = "budget_exhausted"
