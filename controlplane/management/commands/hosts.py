"""manage.py hosts: list the hosts, and declare one lost."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases import sweeps as leases
from leases.management.base import report_errors
from sandboxes.db import database_time
from sandboxes.hosts import registry
from sandboxes.models import Host
from sandboxes.sweeps import lost_hosts


class Command(BaseCommand):
    help = (
        "List the hosts with their state, last heartbeat and sandboxes. A host without a recent heartbeat is unreachable: its "
        "sandboxes and leases wait for it, until --lost declares it gone for good."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--lost", metavar="NAME", help="end the leases of this host's sandboxes as lost, and release their places"
        )
        parser.add_argument("--dry-run", action="store_true", help="with --lost: list the sandboxes, without changes")

    def handle(self, *args: Any, lost: str | None, dry_run: bool, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            if lost is None:
                self._list()
                return
            host = Host.objects.filter(name=lost).first()
            if host is None:
                raise CommandError(f"Unknown host: {lost}. Known: {', '.join(Host.objects.values_list('name', flat=True))}.")
            self._declare_lost(host, dry_run=dry_run)

    def _list(self) -> None:
        now = database_time.now()
        for host in Host.objects.all():
            seen = f"{host.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC" if host.heartbeat_at else "never"
            memory = f"{host.memory_mib:,} MiB" if host.memory_mib else "memory not known"
            sandboxes = lost_hosts.find_sandboxes(host).count()
            state = registry.get_state(host, now=now)
            engine = f"{host.provider} engine {host.engine_id}"
            self.stdout.write(f"{host.name}: {state}, last heartbeat {seen}, {sandboxes} sandboxes, {memory}, {engine}")

    def _declare_lost(self, host: Host, *, dry_run: bool) -> None:
        now = database_time.now()
        sandboxes = [*lost_hosts.find_sandboxes(host)]
        for sandbox in sandboxes:
            self.stdout.write(f"{'would release' if dry_run else 'releasing'} {sandbox.pk} {sandbox.state} {sandbox}")
        state = registry.get_state(host, now=now)
        if dry_run:
            self.stdout.write(f"{host.name}: {state}, {len(sandboxes)} sandboxes. Nothing was changed.")
            return
        if state == "live":
            raise CommandError(f"{host.name} has a recent heartbeat. Stop its worker first, or end its leases instead.")
        leases.declare_host_lost(host, now=now, actor="command line")
        remaining = lost_hosts.find_sandboxes(host).count()
        self.stdout.write(f"{host.name}: declared lost, {len(sandboxes) - remaining} sandboxes released, {remaining} remain")
