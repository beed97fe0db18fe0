"""TCP-to-unix-socket bridge inside a sandbox: lets SDKs that need a host and port reach the egress proxy's socket.

The agent (agent.py) serves it in its event loop. The bridge only copies bytes; authorization happens at the other end of the
socket. Standard library only."""

import _socket as socket  # without the standard module's 1.3 MiB of enumerations and helpers
import contextlib
import select

MAX_CONNECTIONS = 64
CHUNK_BYTES = 1 << 16
BACKLOG = 64


class Side:
    """One socket of a pair."""

    def __init__(self, connection):
        self.connection, self.fd = connection, connection.fileno()
        self.pending = b""  # bytes still to be written to this socket
        self.ended = False  # the peer has finished sending
        self.other = None


class Bridge:
    """Listener on a loopback port, and its open pairs of connections."""

    def __init__(self, loop, port, path):
        """Listen. `loop` has watch(fd, events, handler) and unwatch(fd)."""
        self.loop, self.path, self.count = loop, path, 0
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        loop.watch(self.listener.fileno(), select.EPOLLIN, lambda _: self.accept())

    def accept_client(self):
        """Return the connection of a client. None if it has gone, or if there are too many."""
        try:
            fd, _ = self.listener._accept()
        except OSError:
            return None
        client = socket.socket(fileno=fd)
        if self.count >= MAX_CONNECTIONS:
            client.close()
            return None
        client.setblocking(False)
        # Nagle's algorithm would delay each event of a stream by 40 ms.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    def accept(self):
        client = self.accept_client()
        if client is None:
            return
        upstream = socket.socket(socket.AF_UNIX)
        try:
            upstream.setblocking(False)  # a full backlog is an error, and does not stop the agent
            upstream.connect(self.path)
        except OSError:  # no proxy
            client.close()
            upstream.close()
            return
        self.count += 1
        side = self.pair(client, upstream)
        self.watch(side)
        self.watch(side.other)

    def pair(self, client, upstream):
        """Return the side of `upstream`. `transfer` copies between both once they are watched."""
        sides = Side(client), Side(upstream)
        for side, other in (sides, sides[::-1]):
            side.other = other
        return sides[1]

    def transfer(self, side, events):
        try:
            if events & select.EPOLLOUT:
                self.write(side, side.pending)
            if events & ~select.EPOLLOUT and not side.other.pending:
                self.read(side)
        except OSError:
            self.close(side)
            return
        if side.ended and side.other.ended and not side.pending and not side.other.pending:
            self.close(side)
            return
        self.watch(side)
        self.watch(side.other)

    def read(self, side):
        try:
            chunk = side.connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        if chunk:
            self.write(side.other, chunk)
        else:
            side.ended = True
            side.other.connection.shutdown(socket.SHUT_WR)

    def write(self, side, content):
        try:
            side.pending = content[side.connection.send(content) :]
        except BlockingIOError:
            side.pending = content

    def watch(self, side):
        """Wait for reading, unless the other side has unwritten bytes, and for writing, if bytes are pending."""
        interest = 0 if side.other.pending or side.ended else select.EPOLLIN
        interest |= select.EPOLLOUT if side.pending else 0
        if interest:
            self.loop.watch(side.fd, interest, lambda events: self.transfer(side, events))
        else:
            self.loop.unwatch(side.fd)

    def close(self, side):
        self.count -= 1
        for half in (side, side.other):
            with contextlib.suppress(OSError):
                self.loop.unwatch(half.fd)
            half.connection.close()
