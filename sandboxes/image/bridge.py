"""TCP-to-unix-socket bridge inside a sandbox: lets SDKs that need a host and port reach the egress proxy's socket.

    bridge.py PORT SOCKET

The bridge is the long-running program of a sandbox. It only copies bytes; authorization happens at the other end of the socket.
Standard library only. A single process without children or threads, so that a fork bomb in the sandbox cannot starve it."""

import contextlib
import selectors
import socket
import sys

MAX_CONNECTIONS = 64
CHUNK_BYTES = 1 << 16


class Bridge:
    """Listener on a loopback port, and its open pairs of connections."""

    def __init__(self, port: int, path: str) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.pending: dict[socket.socket, bytes] = {}  # socket -> bytes still to be written to it
        self.ended: set[socket.socket] = set()  # sockets whose peer has finished sending
        self.listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Copy bytes until the process is killed."""
        while True:
            for key, events in self.selector.select():
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self.listener:
                    self.accept()
                elif ready in self.pairs:
                    self.transfer(ready, events)

    def accept(self) -> None:
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        upstream = socket.socket(socket.AF_UNIX)
        try:
            if len(self.pairs) >= 2 * MAX_CONNECTIONS:
                raise OSError
            upstream.connect(self.path)
        except OSError:  # no proxy, or too many connections: close the client's connection
            client.close()
            upstream.close()
            return
        # Nagle's algorithm would delay each event of a stream by 40 ms.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for side, other in ((client, upstream), (upstream, client)):
            side.setblocking(False)
            self.pairs[side], self.pending[side] = other, b""
            self.selector.register(side, selectors.EVENT_READ)

    def transfer(self, side: socket.socket, events: int) -> None:
        other = self.pairs[side]
        try:
            if events & selectors.EVENT_WRITE:
                self.write(side, self.pending[side])
            if events & selectors.EVENT_READ and not self.pending[other]:
                self.read(side, other)
        except OSError:
            self.close(side, other)
            return
        if {side, other} <= self.ended and not self.pending[side] and not self.pending[other]:
            self.close(side, other)
            return
        self.watch(side)
        self.watch(other)

    def read(self, side: socket.socket, other: socket.socket) -> None:
        try:
            chunk = side.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        if chunk:
            self.write(other, chunk)
        else:
            self.ended.add(side)
            other.shutdown(socket.SHUT_WR)

    def write(self, side: socket.socket, content: bytes) -> None:
        try:
            self.pending[side] = content[side.send(content) :]
        except BlockingIOError:
            self.pending[side] = content

    def watch(self, side: socket.socket) -> None:
        """Wait for reading, unless the other side has unwritten bytes, and for writing, if bytes are pending."""
        read_interest = 0 if self.pending[self.pairs[side]] or side in self.ended else selectors.EVENT_READ
        interest = read_interest | (selectors.EVENT_WRITE if self.pending[side] else 0)
        registered = side in self.selector.get_map()
        if interest and registered:
            self.selector.modify(side, interest)
        elif interest:
            self.selector.register(side, interest)
        elif registered:
            self.selector.unregister(side)

    def close(self, *both: socket.socket) -> None:
        for side in both:
            with contextlib.suppress(KeyError):
                self.selector.unregister(side)
            self.pairs.pop(side, None)
            self.pending.pop(side, None)
            self.ended.discard(side)
            side.close()


if __name__ == "__main__":
    Bridge(int(sys.argv[1]), sys.argv[2]).serve()
