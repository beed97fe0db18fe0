from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate

from sandboxes.agent import addresses
from sandboxes.db import migrations
from sandboxes.providers.kubernetes import records


class SandboxesConfig(AppConfig):
    """Sandboxes, pools, runs and stored state. Imports neither leases nor billing."""

    name = "sandboxes"

    def ready(self) -> None:
        addresses.register_factory("sandboxes.hosts.agent_routes.build_routed_gateway")
        records.register_factory("sandboxes.hosts.pod_records.PodRows")
        pre_migrate.connect(migrations.note_begin, sender=self)
        post_migrate.connect(migrations.note_end, sender=self)
