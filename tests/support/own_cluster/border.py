"""Connections between this machine and the network of a cluster: listeners on one side, connections on the other."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.emulators.kubernetes.node.namespaces import NetworkNamespace
from tests.emulators.kubernetes.node.network import relay
from tests.emulators.kubernetes.node.timers import Loop

Address = tuple[str, int]


class Border:
    """Both directions, as of one cluster. Connections end with `close`."""

    def __init__(self, process: int) -> None:
        """Enter the network namespace of a process."""
        self._inside, self._loop = NetworkNamespace(process), Loop()
        self._servers: list[asyncio.Server] = []

    def lead_inside(self, outside: Address, inside: Address) -> None:
        """Listen on this machine, and connect to a server in the cluster."""

        async def connect() -> socket.socket:
            opened = await asyncio.get_running_loop().run_in_executor(None, self._inside.open_socket)
            await asyncio.get_running_loop().sock_connect(opened, inside)
            return opened

        listening = socket.create_server(outside)
        listening.setblocking(False)
        self._serve(listening, connect)

    def lead_outside(self, inside: Address, outside: Address) -> None:
        """Listen in the cluster, and connect to a server on this machine."""

        async def connect() -> socket.socket:
            opened = socket.socket()
            opened.setblocking(False)
            await asyncio.get_running_loop().sock_connect(opened, outside)
            return opened

        self._serve(self._inside.listen(*inside), connect)

    def close(self) -> None:
        for server in self._servers:
            self._loop.loop.call_soon_threadsafe(server.close)
        self._loop.close()
        self._inside.close()

    def _serve(self, listening: socket.socket, connect: Callable[[], Awaitable[socket.socket]]) -> None:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                other_reader, other_writer = await asyncio.open_connection(sock=await connect())
            except OSError:  # the server is absent: so is this connection
                writer.transport.abort()
                return
            try:
                with suppress(asyncio.CancelledError):  # by `close`
                    await relay((reader, writer), (other_reader, other_writer))
            finally:
                other_writer.close()
                writer.close()

        async def start() -> asyncio.Server:
            return await asyncio.start_server(forward, sock=listening)

        self._servers.append(self._loop.run(start()))
