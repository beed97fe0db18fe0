"""manage.py egress: the way out of sandboxes, for as long as this runs."""

import asyncio
import resource
import signal
import time
from argparse import ArgumentParser
from contextlib import suppress
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, close_old_connections
from django.utils import timezone

from sandboxes.egress import access_log, reconciliation, slots
from sandboxes.egress import nginx as front
from sandboxes.egress.nginx import NginxProxy
from sandboxes.egress.server import EgressServer
from sandboxes.providers.base import ProviderError
from sandboxes.providers.docker.engine import Engine
from sandboxes.sweep_log import SweepResult, run_recorded

log = structlog.get_logger(__name__)
PROXY_CHECK_INTERVAL_SECONDS = 5.0  # seconds between two looks at nginx's container
HEARTBEAT_INTERVAL = timedelta(minutes=1)


class Command(BaseCommand):
    help = "Pass model calls and relay connections of sandboxes on, until Ctrl-C or SIGTERM; nothing of it is left then."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--proxy", choices=["nginx", "none"], help="what LEASEHOLD_EGRESS_PROXY says otherwise")

    def handle(self, *args: Any, proxy: str | None, **options: Any) -> None:
        asyncio.run(self._serve(proxy or front.get_proxy_kind()))

    async def _serve(self, proxy: str) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each call takes two
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if proxy == "none":
            sockets = {slots.ensure_slot_directory(slot) / slots.SOCKET_NAME: slot for slot in range(settings.EGRESS_SLOTS)}
            async with EgressServer().listening({front.get_server_socket_path(): None, **sockets}):
                self.stdout.write(f"egress: {len(sockets)} ways out, without a proxy in front")
                await self._supervise(None, stop)
            return
        try:
            nginx = await asyncio.to_thread(lambda: NginxProxy(Engine()))
            async with EgressServer().listening({front.get_server_socket_path(): None}):
                await asyncio.to_thread(nginx.start)
                try:
                    self.stdout.write(f"egress: {settings.EGRESS_SLOTS} ways out through {nginx.name}")
                    await self._supervise(nginx, stop)
                finally:
                    await asyncio.to_thread(nginx.stop)
        except ProviderError as failed:
            raise CommandError(str(failed)) from failed

    async def _supervise(self, nginx: NginxProxy | None, stop: asyncio.Event) -> None:
        """Until the end, say once a minute that this is there, and look after nginx: the engine starts it again when it dies,
        and this when somebody has removed or stopped it."""
        beaten_at = -HEARTBEAT_INTERVAL.total_seconds()
        while not stop.is_set():
            if time.monotonic() - beaten_at >= HEARTBEAT_INTERVAL.total_seconds():
                beaten_at = time.monotonic()
                await asyncio.to_thread(self._beat, nginx)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PROXY_CHECK_INTERVAL_SECONDS)
                return
            try:
                if nginx and (state := await asyncio.to_thread(nginx.look)) not in ("running", "restarting"):
                    log.warning("egress proxy is gone: starting it again", state=state or "removed")
                    await asyncio.to_thread(nginx.start)
            except ProviderError as failed:  # the engine does not answer: the next look tells
                log.warning("egress proxy cannot be looked after", error=str(failed))

    def _beat(self, nginx: NginxProxy | None) -> None:
        close_old_connections()
        record_heartbeat(nginx)


def record_heartbeat(nginx: NginxProxy | None) -> None:
    """Leave a row that says when, for health; and keep nginx's log small, once it is collected."""
    now = timezone.now()

    def rotate() -> SweepResult:
        swept = SweepResult()
        if nginx and access_log.rotate_log(reconciliation.access_log_path(), nginx.reopen_log, now=now):
            swept.note("logs rotated")
        return swept

    try:
        run_recorded("egress", rotate, now=now, every=HEARTBEAT_INTERVAL)
    except (DatabaseError, ProviderError, OSError) as failed:
        log.error("no heartbeat of the way out", error=f"{type(failed).__name__}: {failed}")
