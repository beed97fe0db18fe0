from django.apps import AppConfig

from billing import membership
from sandboxes.egress import billing_accounts, spending


class BillingConfig(AppConfig):
    """Usage, costs, statements and budgets, derived from the facts that sandboxes record."""

    name = "billing"

    def ready(self) -> None:
        from billing import budgets  # models are loaded by now

        billing_accounts.register_query(membership.CALLER_ACCOUNT_SQL)
        spending.register(budgets.check_call, budgets.sum_lease_calls)
