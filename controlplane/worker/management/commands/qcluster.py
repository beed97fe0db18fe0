"""manage.py qcluster: run the queue worker of this host."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane import checks
from controlplane.worker.cluster import Cluster
from controlplane.worker.heartbeat import HeartbeatFile
from sandboxes.db import dialect
from sandboxes.hosts import registry
from sandboxes.management.base import refuse_unmigrated
from sandboxes.providers.errors import ProviderError


class Command(BaseCommand):
    requires_system_checks = checks.LONG_RUNNING
    help = "Run the queue worker of this host: its sweeps, and the tasks of its sandboxes."

    def handle(self, *args: Any, **options: Any) -> None:
        refuse_unmigrated()
        dialect.keep_idle_connections()
        try:
            queue = registry.get_queue_name()
        except ProviderError as error:
            raise CommandError(f"The queue of this host is named after its engine, which does not respond: {error}") from error
        for line in checks.list_engine_problems():
            self.stderr.write(line)
        cluster = Cluster(queue, HeartbeatFile())
        cluster.install_signal_handlers()
        cluster.run()
