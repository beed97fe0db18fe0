from django.apps import AppConfig


class SandboxesConfig(AppConfig):
    """Sandboxes, pools, runs and stored state. Does not know leases or prices."""

    name = "sandboxes"
