from django.apps import AppConfig

from sandboxes.agent import companions


class LeasesConfig(AppConfig):
    """Leases: the right of an agent to a sandbox, its end, and the HTTP API."""

    name = "leases"

    def ready(self) -> None:
        companions.register("leases.stream_server.server.listening")
