from django.apps import AppConfig

from billing import membership
from sandboxes.egress import billing_accounts


class BillingConfig(AppConfig):
    """Usage, costs, statements and budgets, derived from the facts that sandboxes record."""

    name = "billing"

    def ready(self) -> None:
        billing_accounts.register_query(membership.CALLER_ACCOUNT_SQL)
