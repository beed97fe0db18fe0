"""manage.py egress: runs the LLM egress proxy of this host."""

import asyncio
import resource
import signal
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import structlog
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, close_old_connections

from sandboxes.agent import companions
from sandboxes.agent.gateway import AgentGateway
from sandboxes.db import database_time, dialect, tracing
from sandboxes.egress import nginx, slots
from sandboxes.egress.allow_list.proxy import AllowListProxy
from sandboxes.egress.logs import access_log, collection
from sandboxes.egress.nginx import NginxProxy
from sandboxes.egress.server import EgressServer, GatewayListener
from sandboxes.hosts import registry
from sandboxes.management.base import refuse_unmigrated
from sandboxes.providers.docker.engine import Engine
from sandboxes.providers.errors import ProviderError
from sandboxes.sweep_log import SweepResult, run_recorded

log = structlog.get_logger(__name__)
PROXY_CHECK_INTERVAL_SECONDS = 5.0
HEARTBEAT_INTERVAL = timedelta(minutes=1)


class Command(BaseCommand):
    requires_system_checks = ("configuration",)
    help = (
        "Forward model calls and relay connections of sandboxes until Ctrl-C or SIGTERM. Removes the proxy container at exit."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--proxy", choices=["nginx", "none", "gateway"], help="overrides LEASEHOLD_EGRESS_PROXY")

    def handle(self, *args: Any, proxy: str | None, **options: Any) -> None:
        refuse_unmigrated()
        dialect.keep_idle_connections()
        asyncio.run(self._serve_until_signal(proxy or nginx.get_proxy_kind()))

    async def _serve_until_signal(self, proxy: str) -> None:
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        await self.serve(proxy, stop)

    async def serve(self, proxy: str, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. `proxy` is "nginx", "none" or "gateway"."""
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # two files per call
        await asyncio.to_thread(database_time.get_skew)  # the servers' clocks make no query of their own
        if proxy != "nginx":
            listener = read_gateway_listener()
            if proxy == "gateway" and listener is None:
                raise CommandError("--proxy gateway serves LEASEHOLD_GATEWAY_LISTEN, which is not set.")
            local_slots = range(settings.EGRESS_SLOTS if proxy == "none" else 0)
            sockets = {slots.ensure_slot_directory(slot) / slots.SOCKET_NAME: slot for slot in local_slots}
            gateway = AgentGateway()
            server = EgressServer(agents=gateway)
            async with (
                server.listening({nginx.get_server_socket_path(): None, **sockets}, listener),
                companions.serving(gateway) if listener else nullcontext(),
            ):
                served = f"{len(sockets)} slots, without nginx" if sockets else f"gateway on {settings.GATEWAY_LISTEN}"
                self.stdout.write(f"egress: {served}")
                await self._supervise(
                    None,
                    stop,
                    lambda: {**(gateway.read_counts() if listener else {}), **server.dropped_fields.read_counts()},
                )
            return
        try:
            container = await asyncio.to_thread(lambda: NginxProxy(Engine()))
            directories = [slots.ensure_agent_directory(slot) for slot in range(settings.EGRESS_SLOTS)]
            agents = [directory / slots.AGENT_SOCKET_NAME for directory in directories]
            proxies = {directory / slots.PROXY_SOCKET_NAME: slot for slot, directory in enumerate(directories)}
            gateway = AgentGateway()
            server = EgressServer(agents=gateway)
            allow_list = AllowListProxy(server.now, server.database)
            async with (
                gateway.listening(agents, settings.AGENT_GATEWAY),
                server.listening({nginx.get_server_socket_path(): None}, read_gateway_listener()),
                allow_list.listening(proxies),
                companions.serving(gateway),
            ):
                await asyncio.to_thread(container.start)
                try:
                    self.stdout.write(f"egress: {settings.EGRESS_SLOTS} slots through {container.name}")
                    await self._supervise(
                        container,
                        stop,
                        lambda: {
                            **gateway.read_counts(),
                            **allow_list.read_counts(),
                            **server.dropped_fields.read_counts(),
                        },
                    )
                finally:
                    await asyncio.to_thread(container.stop)
        except ProviderError as error:
            raise CommandError(str(error)) from error
        finally:
            await asyncio.to_thread(tracing.flush)

    async def _supervise(
        self, container: NginxProxy | None, stop: asyncio.Event, read_counts: Callable[[], Mapping[str, int]]
    ) -> None:
        """Record heartbeats and restart a removed or stopped container, until `stop` is set.

        The engine itself restarts a container whose process has crashed."""
        last_heartbeat = -HEARTBEAT_INTERVAL.total_seconds()
        while not stop.is_set():
            if time.monotonic() - last_heartbeat >= HEARTBEAT_INTERVAL.total_seconds():
                last_heartbeat = time.monotonic()
                await asyncio.to_thread(self._record_heartbeat, container, read_counts())
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PROXY_CHECK_INTERVAL_SECONDS)
                return
            try:
                if container and (state := await asyncio.to_thread(container.get_state)) not in ("running", "restarting"):
                    log.warning("egress proxy not running, restarting", state=state or "removed")
                    await asyncio.to_thread(container.start)
            except ProviderError as error:  # the engine is unavailable: retried at the next check
                log.warning("egress proxy check failed", error=str(error))

    def _record_heartbeat(self, container: NginxProxy | None, counts: Mapping[str, int]) -> None:
        close_old_connections()
        record_heartbeat(container, counts)


def record_heartbeat(container: NginxProxy | None, counts: Mapping[str, int] = MappingProxyType({})) -> None:
    """Record a sweep row, which the health check reads, and rotate nginx's access log.

    `counts` are the read_counts of the gateway, the allow list's proxy and the dropped fields. The row and the metrics show the
    counts."""
    now = database_time.now()

    def rotate() -> SweepResult:
        result = SweepResult()
        if container and access_log.rotate_log(collection.access_log_path(), container.reopen_log, now=now):
            result.note("logs rotated")
        for name, count in counts.items():
            result.note(f"agent {name}", count)
        return result

    try:
        host = registry.find_worker_host(now=now)
        run_recorded("egress", rotate, now=now, every=HEARTBEAT_INTERVAL, host=host, started_by=host)
    except (DatabaseError, ProviderError, OSError) as error:
        log.error("egress heartbeat not recorded", error=f"{type(error).__name__}: {error}")


def read_gateway_listener() -> GatewayListener | None:
    """Return the address of LEASEHOLD_GATEWAY_LISTEN, or None if it is not set."""
    if not settings.GATEWAY_LISTEN:
        return None
    host, port = _split_address(settings.GATEWAY_LISTEN)
    internal_host, internal_port = _split_address(settings.GATEWAY_INTERNAL_LISTEN)
    return GatewayListener(
        host,
        port,
        settings.GATEWAY_CERTIFICATE,
        settings.GATEWAY_CERTIFICATE_KEY,
        internal_host,
        internal_port,
        settings.GATEWAY_INTERNAL_ADDRESS,
        settings.GATEWAY_INTERNAL_CERTIFICATE,
        settings.GATEWAY_INTERNAL_CERTIFICATE_KEY,
    )


def _split_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
