from django.apps import AppConfig


class LeasesConfig(AppConfig):
    """Leases: the right of an agent to a sandbox, its end, and the HTTP API."""

    name = "leases"
