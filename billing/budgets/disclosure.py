"""Disclosure of a budget's figures to the holder of an API key.

A budget of several agents or keys would show each of them the spending of the others."""

from collections.abc import Collection
from enum import Enum

from billing.errors import BudgetExhausted
from billing.models.budgets import Scope


class Disclosure(Enum):
    """Figures of a budget that a key may read. Exhaustion and the reset are always disclosed."""

    NOTHING = "nothing"
    AMOUNT = "amount"
    SPENDING = "spending"  # and the amount


def get_disclosure(scope: str, subject: str, *, operator: bool, dids: Collection[str], key_id: str) -> Disclosure:
    """Return the disclosure to a key: everything to an operator's key, spending only of the key and of its own agents."""
    own = (scope == Scope.AGENT and subject in dids) or (scope == Scope.KEY and subject == key_id)
    if operator or own:
        return Disclosure.SPENDING
    return Disclosure.AMOUNT if scope == Scope.ENVIRONMENT_TYPE else Disclosure.NOTHING


def restrict_refusal(error: BudgetExhausted, *, operator: bool, dids: Collection[str], key_id: str) -> BudgetExhausted:
    """Return the refusal with the figures that a key may read."""
    disclosure = get_disclosure(error.scope, error.subject, operator=operator, dids=dids, key_id=key_id)
    if disclosure == Disclosure.SPENDING:
        return error
    extra = {name: value for name, value in error.extra.items() if name not in ("spent", "limit", "unit")}
    if disclosure == Disclosure.AMOUNT:
        extra |= {"limit": error.extra["limit"], "unit": error.extra["unit"]}
    detail = error.detail_with_amount if disclosure == Disclosure.AMOUNT else error.detail_without_figures
    return BudgetExhausted(detail, scope=error.scope, subject=error.subject, **extra)
