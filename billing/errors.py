"""Errors of billing. A class's docstring is its message unless a more specific one is given."""

from typing import Any

from sandboxes.errors import SandboxError


class BudgetNotFound(SandboxError):
    """There is no budget with this id."""

    code = "budget_not_found"


class TotalsPending(SandboxError):
    """Costs by model are not derived yet. The next pass of `meter` derives them, within a minute after an upgrade."""

    code = "totals_pending"


class BudgetExhausted(SandboxError):
    """No room in a budget. `resets_at` is the start of the budget's next period, or null for a lifetime budget."""

    code = "budget_exhausted"

    def __init__(
        self,
        detail: str = "",
        *,
        scope: str = "",
        subject: str = "",
        detail_with_amount: str = "",
        detail_without_figures: str = "",
        **extra: Any,
    ) -> None:
        """`detail` and `extra` have all figures; `budgets.restrict_refusal` removes those that a key may not read."""
        super().__init__(detail, **extra)
        self.scope, self.subject = scope, subject
        self.detail_with_amount, self.detail_without_figures = detail_with_amount, detail_without_figures
