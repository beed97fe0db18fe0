from django.apps import AppConfig

from sandboxes.agent import addresses
from sandboxes.providers.kubernetes import records


class SandboxesConfig(AppConfig):
    """Sandboxes, pools, runs and stored state. Imports neither leases nor billing."""

    name = "sandboxes"

    def ready(self) -> None:
        addresses.register_factory("sandboxes.hosts.agent_routes.build_routed_gateway")
        records.register_factory("sandboxes.hosts.pod_records.PodRows")
