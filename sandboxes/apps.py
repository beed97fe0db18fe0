from django.apps import AppConfig


class SandboxesConfig(AppConfig):
    """Sandboxes, pools, runs and stored state. Imports neither leases nor billing."""

    name = "sandboxes"
