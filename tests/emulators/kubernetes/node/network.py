"""Network of the Pods.

A Pod has no network device but loopback. Each destination that the policies allow is an address of its loopback device, with a
listener that forwards connections. Differences from a cluster: other destinations are unreachable at once instead of after a
timeout, an established connection outlives a change of the policies, and of other Pods only declared ports are reachable."""

import asyncio
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from tests.emulators.kubernetes.api.resources import ENDPOINTS, PODS, SERVICES
from tests.emulators.kubernetes.api.selectors import parse_object_selector, select_labels
from tests.emulators.kubernetes.api.store import Object, Store
from tests.emulators.kubernetes.node.names import (
    METADATA_ADDRESS,
    NAME_SERVER,
    NameServer,
    NameServerProtocol,
    answer_metadata,
    answer_queries,
)
from tests.emulators.kubernetes.node.namespaces import NetworkNamespace
from tests.emulators.kubernetes.node.policies import Destination, is_reachable
from tests.emulators.kubernetes.node.timers import Loop

API_ADDRESS = "10.96.0.1"  # of the API server, inside Pods
CHUNK_BYTES = 64 << 10
NAME_SERVER_LABELS = (("k8s-app", "kube-dns"),)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_relays: set[asyncio.Task[object]] = set()  # event loops hold tasks weakly, and one that waits for streams alone is collected
INTERNAL = "internal"  # target of the destinations that the emulator serves itself


@dataclass
class Attachment:
    """Network namespace of one Pod, and its listeners by destination."""

    pod: Object
    address: str
    namespace: NetworkNamespace
    listeners: dict[Destination, asyncio.Server | asyncio.DatagramTransport] = field(default_factory=dict)
    addresses: set[str] = field(default_factory=set)


class PodNetwork:
    """Networks of all Pods. `is_enforced` is a switch: without it, policies do nothing, as with a plugin without support."""

    def __init__(self, store: Store, loop: Loop) -> None:
        self.store, self.loop, self.is_enforced = store, loop, True
        self.api_port = 0
        self._names = NameServer(store)
        self._attachments: dict[str, Attachment] = {}
        self._lock = threading.RLock()

    def attach(self, pod: Object, address: str, process: int) -> None:
        """Connect the namespace of a process to what the Pod may reach."""
        with self._lock:
            attachment = Attachment(pod, address, NetworkNamespace(process))
            attachment.namespace.set_addresses({address}, set())
            self._attachments[pod["metadata"]["uid"]] = attachment
            self._update(attachment, self._list_destinations())
            if _list_ports(pod):
                self.refresh()

    def detach(self, uid: str) -> None:
        """Close everything of a Pod. Idempotent."""
        with self._lock:
            attachment = self._attachments.pop(uid, None)
            if attachment is None:
                return
            self.loop.run(_close(attachment.listeners.values()))
            with suppress(OSError):
                attachment.namespace.set_addresses(set(), {*attachment.addresses, attachment.address})
            attachment.namespace.close()
            if _list_ports(attachment.pod):
                self.refresh()

    def refresh(self) -> None:
        """Apply the present policies and Services to all Pods."""
        with self._lock:
            destinations = self._list_destinations()
            for attachment in self._attachments.values():
                self._update(attachment, destinations)

    def close(self) -> None:
        with self._lock:
            for uid in list(self._attachments):
                attachment = self._attachments.pop(uid)
                self.loop.run(_close(attachment.listeners.values()))
                attachment.namespace.close()

    def _list_destinations(self) -> list[Destination]:
        found = [
            Destination(API_ADDRESS, 443, "127.0.0.1", self.api_port, policy_port=6443),
            Destination(METADATA_ADDRESS, 80, INTERNAL, 80),
            Destination(NAME_SERVER, 53, INTERNAL, 53, "kube-system", NAME_SERVER_LABELS, "UDP"),
            Destination(NAME_SERVER, 53, INTERNAL, 53, "kube-system", NAME_SERVER_LABELS),
        ]
        for uid, attachment in self._attachments.items():
            metadata = attachment.pod["metadata"]
            labels = tuple((metadata.get("labels") or {}).items())
            for port in _list_ports(attachment.pod):
                found.append(Destination(attachment.address, port, uid, port, metadata["namespace"], labels))
        for service in self.store.list(SERVICES):
            found += self._list_service(service)
        return found

    def _list_service(self, service: Object) -> list[Destination]:
        """Return the ports of a Service, with its Endpoints object or the first Pod that it selects as the target."""
        namespace, name, spec = service["metadata"]["namespace"], service["metadata"]["name"], service["spec"]
        selector = spec.get("selector") or {}
        labels, found = tuple(selector.items()), []
        endpoints = self.store.find(ENDPOINTS, namespace, name)
        for index, port in enumerate(spec.get("ports") or ()):
            if endpoints:
                subset = (endpoints.get("subsets") or [{}])[0]
                addresses, ports = subset.get("addresses") or (), subset.get("ports") or ()
                if addresses and index < len(ports):
                    target, target_port = addresses[0]["ip"], ports[index]["port"]
                    policy_port = port["targetPort"] if isinstance(port["targetPort"], int) else target_port
                    found.append(
                        Destination(spec["clusterIP"], port["port"], target, target_port, namespace, labels, "TCP", policy_port)
                    )
                continue
            for uid, attachment in self._attachments.items() if selector else ():
                metadata = attachment.pod["metadata"]
                if metadata["namespace"] == namespace and select_labels(
                    parse_object_selector({"matchLabels": selector}), metadata.get("labels")
                ):
                    found.append(Destination(spec["clusterIP"], port["port"], uid, port["targetPort"], namespace, labels))
                    break
        return found

    def _update(self, attachment: Attachment, destinations: list[Destination]) -> None:
        """Open and close listeners of one Pod until they are those of the reachable destinations."""
        current = self.store.find(PODS, attachment.pod["metadata"]["namespace"], attachment.pod["metadata"]["name"])
        pod = current or attachment.pod
        wanted = {}
        for destination in destinations:
            is_own = destination.target == attachment.pod["metadata"]["uid"] and destination.address == attachment.address
            if not is_own and (not self.is_enforced or is_reachable(self.store, pod, destination)):
                wanted.setdefault(destination.key, destination)
        kept = {destination for destination in attachment.listeners if wanted.get(destination.key) == destination}
        closed = [
            attachment.listeners.pop(destination) for destination in list(attachment.listeners) if destination not in kept
        ]
        self.loop.run(_close(closed))
        addresses = {destination.address for destination in wanted.values()}
        attachment.namespace.set_addresses(addresses - attachment.addresses, attachment.addresses - addresses)
        attachment.addresses = addresses
        for destination in wanted.values():
            if destination not in kept:
                attachment.listeners[destination] = self._open(attachment, destination)

    def _open(self, attachment: Attachment, destination: Destination) -> asyncio.Server | asyncio.DatagramTransport:
        kind = socket.SOCK_DGRAM if destination.protocol == "UDP" else socket.SOCK_STREAM
        bound = attachment.namespace.listen(destination.address, destination.port, kind)
        return self.loop.run(self._serve(bound, destination))

    async def _serve(self, bound: socket.socket, destination: Destination) -> asyncio.Server | asyncio.DatagramTransport:
        if destination.protocol == "UDP":
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: NameServerProtocol(self._names), sock=bound
            )
            return transport

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                await self._forward(destination, reader, writer)
            writer.close()

        return await asyncio.start_server(forward, sock=bound)

    async def _forward(self, destination: Destination, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if destination.target == INTERNAL:
            if destination.address == METADATA_ADDRESS:
                await answer_metadata(reader, writer)
            else:
                await answer_queries(self._names, reader, writer)
            return
        other_reader, other_writer = await self._connect(destination)
        try:
            await relay((reader, writer), (other_reader, other_writer))
        finally:
            other_writer.close()

    async def _connect(self, destination: Destination) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        attachment = self._attachments.get(destination.target)
        if attachment is None:
            return await asyncio.open_connection(destination.target, destination.target_port)
        loop = asyncio.get_running_loop()
        opened = await loop.run_in_executor(None, attachment.namespace.open_socket)
        await loop.sock_connect(opened, (attachment.address, destination.target_port))
        return await asyncio.open_connection(sock=opened)


def _list_ports(pod: Object) -> list[int]:
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
    return [port["containerPort"] for port in ports if port.get("protocol", "TCP") == "TCP"]


async def _close(listeners: Iterable[asyncio.Server | asyncio.DatagramTransport]) -> None:
    for listener in listeners:
        listener.close()


async def relay(one: Connection, other: Connection) -> None:
    """Copy both directions of two connections to their ends."""
    task = asyncio.current_task()
    assert task
    _relays.add(task)
    try:
        await asyncio.gather(_copy(one[0], other[1]), _copy(other[0], one[1]))
    finally:
        _relays.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection to its end, and pass the end on."""
    with suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()
