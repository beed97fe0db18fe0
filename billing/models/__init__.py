"""Models of the app: one module a noun. This package re-exports every model."""

from billing.models.accounts import HOUSE, Account, Membership
from billing.models.budgets import Budget, Tab
from billing.models.costs import CostRecord
from billing.models.rates import Priced, Rate
from billing.models.statements import Credit, Statement, StatementLine
from billing.models.usage import Item, Meter, Unpriced, UsageRecord, Watermark

__all__ = [
    "HOUSE", "Account", "Budget", "CostRecord", "Credit", "Item", "Membership", "Meter", "Priced", "Rate", "Statement",
    "StatementLine", "Tab", "Unpriced", "UsageRecord", "Watermark",
]  # fmt: skip
