"""manage.py egress: the way out of sandboxes, for as long as this runs."""

import asyncio
import signal
from argparse import ArgumentParser
from typing import Any

import structlog
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from sandboxes import providers
from sandboxes.egress import front, slots
from sandboxes.egress.front import Front
from sandboxes.egress.server import Server
from sandboxes.providers.base import ProviderError
from sandboxes.providers.engine import Engine

log = structlog.get_logger(__name__)
LOOK_EVERY = 5.0  # seconds between two looks at nginx's container


class Command(BaseCommand):
    help = "Pass model calls and relay connections of sandboxes on, until Ctrl-C or SIGTERM; nothing of it is left then."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--proxy", choices=["nginx", "none"], help="what LEASEHOLD_EGRESS_PROXY says otherwise")

    def handle(self, *args: Any, proxy: str | None, **options: Any) -> None:
        asyncio.run(self._serve(proxy or which()))

    async def _serve(self, proxy: str) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if proxy == "none":
            sockets = {slots.directory(slot) / slots.SOCKET: slot for slot in range(settings.EGRESS_SLOTS)}
            async with Server().listening({front.server_socket(): None, **sockets}):
                self.stdout.write(f"egress: {len(sockets)} ways out, without a proxy in front")
                await stop.wait()
            return
        try:
            nginx = await asyncio.to_thread(lambda: Front(Engine()))
            async with Server().listening({front.server_socket(): None}):
                await asyncio.to_thread(nginx.start)
                try:
                    self.stdout.write(f"egress: {settings.EGRESS_SLOTS} ways out through {nginx.name}")
                    await self._mind(nginx, stop)
                finally:
                    await asyncio.to_thread(nginx.stop)
        except ProviderError as failed:
            raise CommandError(str(failed)) from failed

    async def _mind(self, nginx: Front, stop: asyncio.Event) -> None:
        """Until the end: the engine starts it again when it dies, and this when somebody has removed or stopped it."""
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), LOOK_EVERY)
            except TimeoutError:
                pass
            else:
                return
            try:
                state = await asyncio.to_thread(nginx.look)
                if state not in ("running", "restarting"):
                    log.warning("egress proxy is gone: starting it again", state=state or "removed")
                    await asyncio.to_thread(nginx.start)
            except ProviderError as failed:  # the engine does not answer: the next look tells
                log.warning("egress proxy cannot be looked after", error=str(failed))


def which() -> str:
    """nginx where sandboxes are containers, unless the environment says otherwise."""
    if settings.EGRESS_PROXY != "auto":
        return str(settings.EGRESS_PROXY)
    return "nginx" if providers.default_name() == "docker" else "none"
