from django.apps import AppConfig

from sandboxes.agent import addresses


class SandboxesConfig(AppConfig):
    """Sandboxes, pools, runs and stored state. Imports neither leases nor billing."""

    name = "sandboxes"

    def ready(self) -> None:
        addresses.register_factory("sandboxes.hosts.agent_routes.build_routed_gateway")
