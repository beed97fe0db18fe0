from django.apps import AppConfig


class LeasesConfig(AppConfig):
    """Authority: who may use a sandbox, and until when."""

    name = "leases"
