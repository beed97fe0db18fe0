from django.apps import AppConfig


class SandboxesConfig(AppConfig):
    """Facts: which sandboxes exist, in which state, and what ran in them. Knows neither leases nor money."""

    name = "sandboxes"
