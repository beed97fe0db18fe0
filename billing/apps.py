from django.apps import AppConfig


class BillingConfig(AppConfig):
    """What the facts amount to. Reads what sandboxes recorded; nobody pushes a charge."""

    name = "billing"
