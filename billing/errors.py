"""Errors of billing. A class's docstring is its message unless a more specific one is given."""

from sandboxes.errors import SandboxError


class BudgetExhausted(SandboxError):
    """No room in a budget. `resets_at` is the start of the budget's next period, or null for a lifetime budget."""

    code = "budget_exhausted"
