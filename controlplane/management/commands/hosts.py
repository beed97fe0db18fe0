"""manage.py hosts: list the hosts, and declare one lost."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases import sweeps as leases
from leases.management.base import report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.hosts import registry
from sandboxes.models import Host
from sandboxes.pool import start_breaker
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
        parser.add_argument(
            "--resume-starts", metavar="NAME", help="start sandboxes on this host again, before the pause after failures ends"
        )
        parser.add_argument("--dry-run", action="store_true", help="with --lost: list the sandboxes, without changes")

    def handle(self, *args: Any, lost: str | None, resume_starts: str | None, dry_run: bool, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            if resume_starts is not None:
                self._resume_starts(self._find(resume_starts))
            elif lost is not None:
                self._declare_lost(self._find(lost), dry_run=dry_run)
            else:
                self._list()

    def _find(self, name: str) -> Host:
        host = Host.objects.filter(name=name).first()
        if host is None:
            raise CommandError(f"Unknown host: {name}. Known: {', '.join(Host.objects.values_list('name', flat=True))}.")
        return host

    def _resume_starts(self, host: Host) -> None:
        resumed = start_breaker.reset(host, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{host.name}: {'starts resumed' if resumed else 'starts were not paused'}")

    def _list(self) -> None:
        now = database_time.now()
        for host in Host.objects.all():
            seen = f"{host.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC" if host.heartbeat_at else "never"
            memory = f"{host.memory_mib:,} MiB" if host.memory_mib else "memory not known"
            sandboxes = lost_hosts.find_sandboxes(host).count()
            state = registry.get_state(host, now=now)
            engine = f"{host.provider} engine {host.engine_id}"
            paused = (
                f", starts paused until {host.starts_paused_until:%H:%M:%S} UTC" if start_breaker.is_open(host, now=now) else ""
            )
            self.stdout.write(f"{host.name}: {state}, last heartbeat {seen}, {sandboxes} sandboxes, {memory}, {engine}{paused}")

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
        leases.declare_host_lost(host, now=now, actor=COMMAND_LINE)
        remaining = lost_hosts.find_sandboxes(host).count()
        self.stdout.write(f"{host.name}: declared lost, {len(sandboxes) - remaining} sandboxes released, {remaining} remain")
