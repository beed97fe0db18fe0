"""Models of the app. The package re-exports every model."""

from billing.membership import HOUSE_ACCOUNT_NAME
from billing.models.accounts import Account, Membership
from billing.models.budgets import Budget, BudgetTopUp, Tab
from billing.models.costs import CostRecord
from billing.models.model_totals import ModelTotal
from billing.models.period_totals import PeriodTotal
from billing.models.rates import BillableItem, Rate
from billing.models.statements import Credit, Statement, StatementCharge, StatementLine
from billing.models.usage import Meter, Unpriced, UsageKind, UsageRecord, Watermark

__all__ = [
    "HOUSE_ACCOUNT_NAME",
    "Account",
    "BillableItem",
    "Budget",
    "BudgetTopUp",
    "CostRecord",
    "Credit",
    "Membership",
    "Meter",
    "ModelTotal",
    "PeriodTotal",
    "Rate",
    "Statement",
    "StatementCharge",
    "StatementLine",
    "Tab",
    "Unpriced",
    "UsageKind",
    "UsageRecord",
    "Watermark",
]
