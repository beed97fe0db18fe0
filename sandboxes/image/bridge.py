"""The way from a loopback port to a unix socket, inside a sandbox: so ordinary SDKs, which speak to an address, reach what
is behind the socket. It is what process 1 keeps running there. Standard library only, and one process without children
and threads, so that a fork bomb beside it takes nothing from it.

Usage: bridge.py PORT SOCKET. It only copies: who may do what is decided at the socket's other end."""

import contextlib
import selectors
import socket
import sys

MAX_CONNECTIONS = 64  # connections at once
CHUNK_BYTES = 1 << 16


class Bridge:
    def __init__(self, port: int, path: str) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.pending: dict[socket.socket, bytes] = {}  # socket -> what is to be written to it
        self.ended: set[socket.socket] = set()  # nothing more is read from these
        self.door = socket.create_server(("127.0.0.1", port), backlog=64)
        self.door.setblocking(False)
        self.selector.register(self.door, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, events in self.selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self.door:
                    self.accept()
                elif one in self.pairs:
                    self.move(one, events)

    def accept(self) -> None:
        try:
            near, _ = self.door.accept()
        except OSError:
            return
        far = socket.socket(socket.AF_UNIX)
        try:
            if len(self.pairs) >= 2 * MAX_CONNECTIONS:
                raise OSError
            far.connect(self.path)
        except OSError:  # nobody is there: refused, as where no server is
            near.close()
            far.close()
            return
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or a stream's events wait for each other, 40 ms each
        for one, other in ((near, far), (far, near)):
            one.setblocking(False)
            self.pairs[one], self.pending[one] = other, b""
            self.selector.register(one, selectors.EVENT_READ)

    def move(self, one: socket.socket, events: int) -> None:
        other = self.pairs[one]
        try:
            if events & selectors.EVENT_WRITE:
                self.write(one, self.pending[one])
            if events & selectors.EVENT_READ and not self.pending[other]:
                self.read(one, other)
        except OSError:
            self.close(one, other)
            return
        if {one, other} <= self.ended and not self.pending[one] and not self.pending[other]:
            self.close(one, other)
            return
        self.watch(one)
        self.watch(other)

    def read(self, one: socket.socket, other: socket.socket) -> None:
        try:
            chunk = one.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        if chunk:
            self.write(other, chunk)
        else:
            self.ended.add(one)
            other.shutdown(socket.SHUT_WR)

    def write(self, one: socket.socket, content: bytes) -> None:
        try:
            self.pending[one] = content[one.send(content) :]
        except BlockingIOError:
            self.pending[one] = content

    def watch(self, one: socket.socket) -> None:
        """What to wait for: to read, unless the other side is full; to write, if something is left to be."""
        reading = 0 if self.pending[self.pairs[one]] or one in self.ended else selectors.EVENT_READ
        wanted = reading | (selectors.EVENT_WRITE if self.pending[one] else 0)
        registered = one in self.selector.get_map()
        if wanted and registered:
            self.selector.modify(one, wanted)
        elif wanted:
            self.selector.register(one, wanted)
        elif registered:
            self.selector.unregister(one)

    def close(self, *both: socket.socket) -> None:
        for one in both:
            with contextlib.suppress(KeyError):
                self.selector.unregister(one)
            self.pairs.pop(one, None)
            self.pending.pop(one, None)
            self.ended.discard(one)
            one.close()


if __name__ == "__main__":
    Bridge(int(sys.argv[1]), sys.argv[2]).serve()
