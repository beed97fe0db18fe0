"""Name server and metadata server of the emulated cluster."""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

from tests.emulators.kubernetes.api.resources import SERVICES
from tests.emulators.kubernetes.api.store import Store

NAME_SERVER = "10.96.0.10"
METADATA_ADDRESS = "169.254.169.254"
CLUSTER_DOMAIN = "svc.cluster.local"
QUERY_FLAGS, NAME_ERROR, NO_ERROR = 0x8180, 3, 0
TYPE_A, CLASS_IN, TTL_SECONDS = 1, 1, 5
METADATA = b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Emulated\r\nContent-Length: 13\r\nConnection: close\r\n\r\ninstance-name"


class NameServer:
    """Name server that knows the Services: NAME.NAMESPACE.svc.cluster.local."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def answer(self, query: bytes) -> bytes:
        """Return the answer to a query."""
        labels, position = [], 12
        while query[position]:
            labels.append(query[position + 1 : position + 1 + query[position]].decode(errors="replace"))
            position += 1 + query[position]
        question = query[12 : position + 5]
        name, _, domain = ".".join(labels).lower().partition(f".{CLUSTER_DOMAIN}")
        address = self._find_address(name) if not domain else None
        (kind,) = struct.unpack_from("!H", query, position + 1)
        head = struct.pack("!HHHH", 1, int(address is not None and kind == TYPE_A), 0, 0)
        flags = struct.pack("!H", QUERY_FLAGS | (NAME_ERROR if address is None else NO_ERROR))
        record = b""
        if address is not None and kind == TYPE_A:
            record = struct.pack("!HHHIH4s", 0xC00C, TYPE_A, CLASS_IN, TTL_SECONDS, 4, socket.inet_aton(address))
        return query[:2] + flags + head + question + record

    def _find_address(self, name: str) -> str | None:
        service, _, namespace = name.partition(".")
        found = self.store.find(SERVICES, namespace, service)
        return str(found["spec"]["clusterIP"]) if found else None


class NameServerProtocol(asyncio.DatagramProtocol):
    """Endpoint of the name server in one Pod."""

    def __init__(self, server: NameServer) -> None:
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        with suppress(IndexError, struct.error):
            self.transport.sendto(self.server.answer(data), addr)


async def answer_metadata(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request to the metadata server of a cloud."""
    with suppress(asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(METADATA)
        await writer.drain()


async def answer_queries(server: NameServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the queries of one TCP connection to the name server."""
    with suppress(asyncio.IncompleteReadError, IndexError, struct.error):
        while True:
            answer = server.answer(await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big")))
            writer.write(len(answer).to_bytes(2, "big") + answer)
            await writer.drain()
