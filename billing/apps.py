from django.apps import AppConfig


class BillingConfig(AppConfig):
    """Usage, costs, statements and budgets, derived from the facts that sandboxes record."""

    name = "billing"
