"""Network namespaces of Pods: addresses of the loopback device, and sockets inside a namespace.

A thread that enters a namespace ends after its work, because it cannot be used for anything else."""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

CLONE_NEWNET = 0x40000000
RTM_NEWADDR, RTM_DELADDR = 20, 21
NLM_REQUEST, NLM_ACK, NLM_REPLACE, NLM_CREATE = 0x1, 0x4, 0x100, 0x400
IFA_ADDRESS, IFA_LOCAL = 1, 2
LOOPBACK_INDEX = 1

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkNamespace:
    """Network namespace of a process, kept alive by an open file."""

    def __init__(self, process: int) -> None:
        self._file = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            os.close(self._file)
            self._file = -1

    def run(self, work: Callable[[], Result]) -> Result:
        """Call a function in the namespace. Raise what it raises, and OSError if the namespace is gone."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def enter() -> None:
            try:
                with self._lock:
                    if _libc.setns(self._file, CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def set_addresses(self, added: set[str], removed: set[str]) -> None:
        """Add and remove addresses of the loopback device."""

        def change() -> None:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
                for address in sorted(removed):
                    _request(netlink, RTM_DELADDR, NLM_REQUEST | NLM_ACK, address)
                for address in sorted(added):
                    _request(netlink, RTM_NEWADDR, NLM_REQUEST | NLM_ACK | NLM_CREATE | NLM_REPLACE, address)

        if added or removed:
            self.run(change)

    def listen(self, address: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a non-blocking socket bound in the namespace, which listens if it is a stream."""

        def bind() -> socket.socket:
            bound = socket.socket(socket.AF_INET, kind)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((address, port))
            if kind == socket.SOCK_STREAM:
                bound.listen(128)
            bound.setblocking(False)
            return bound

        return self.run(bind)

    def open_socket(self) -> socket.socket:
        """Return a non-blocking TCP socket of the namespace."""
        opened = self.run(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        opened.setblocking(False)
        return opened


def _request(netlink: socket.socket, kind: int, flags: int, address: str) -> None:
    packed = socket.inet_aton(address)
    attributes = b"".join(struct.pack("=HH4s", 8, attribute, packed) for attribute in (IFA_LOCAL, IFA_ADDRESS))
    body = struct.pack("=BBBBi", socket.AF_INET, 32, 0, 0, LOOPBACK_INDEX) + attributes
    netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
    answer = netlink.recv(4096)
    error = -struct.unpack_from("=i", answer, 16)[0]
    if error:
        raise OSError(error, f"address {address}: {os.strerror(error)}")
