"""What can go wrong with money. The docstring of a class is its message unless a better one is given."""

from sandboxes.errors import SandboxError


class BudgetExhausted(SandboxError):
    """A budget leaves no room for this. `resets_at` says when it begins anew; null: never by itself."""

    code = "budget_exhausted"
