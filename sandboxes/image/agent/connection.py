"""The agent's connection to the gateway, and its event loop.

Standard library only: compiled into the sandbox image beside main.py."""

import _socket as socket  # without the standard module's 1.3 MiB of enumerations and helpers
import contextlib
import json
import os
import select
import struct
import time

VERSION = 2
HEADER = struct.Struct(">III")  # request id, bytes of the JSON head, bytes of the body
MAX_HEAD_BYTES = 8 << 10
MAX_REQUEST_BODY_BYTES = 4 << 20
MAX_UNSENT_BYTES = 1 << 20  # no further request is read while more is unsent
RECONNECT_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class InvalidRequest(Exception):
    """The request is malformed."""


class GatewayConnection:
    """One outgoing connection, opened again after a loss. Subclasses have `dispatch` and `drop_requests`.

    `remote` is a gateway on another machine (remote.py) in place of the unix socket at `path`."""

    def __init__(self, path, remote=None):
        self.path, self.remote, self.boot = path, remote, os.urandom(16).hex()
        self.received_at = 0.0  # monotonic time of the last bytes from the gateway
        self.connection, self.received, self.unsent = None, bytearray(), bytearray()
        self.attempts, self.next_attempt = 0, 0.0
        self.handlers = {}  # fd -> function(events)
        self.epoll = select.epoll()

    def watch(self, fd, events, handler):
        if fd in self.handlers:
            self.epoll.modify(fd, events)
        else:
            self.epoll.register(fd, events)
        self.handlers[fd] = handler

    def unwatch(self, fd):
        if self.handlers.pop(fd, None):
            self.epoll.unregister(fd)

    def connect(self):
        if self.remote:
            self.remote.connect(self)
            return
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)  # a full backlog is an error
        try:
            connection.connect(self.path)
        except OSError:
            connection.close()
            self.postpone_connect()
            return
        self.use(connection)

    def use(self, connection, received=b""):
        """Greet the gateway on a new connection, from which these bytes were received already."""
        self.connection, self.received_at = connection, time.monotonic()
        self.received += received
        self.watch(connection.fileno(), select.EPOLLIN, self.transfer)
        self.respond(0, {"protocol": "leasehold-agent", "version": VERSION, "boot": self.boot})

    def postpone_connect(self):
        """Set the time of the next attempt: later and later, until a gateway sends a request."""
        if self.remote:
            self.remote.postpone_connect(self)
            return
        delay = RECONNECT_SECONDS[min(self.attempts, len(RECONNECT_SECONDS) - 1)]
        self.attempts, self.next_attempt = self.attempts + 1, time.monotonic() + delay

    def disconnect(self):
        self.unwatch(self.connection.fileno())
        self.connection.close()
        self.connection, self.received, self.unsent = None, bytearray(), bytearray()
        self.drop_requests()
        self.postpone_connect()

    def transfer(self, events):
        try:
            if events & select.EPOLLOUT:
                self.flush()
            if events & ~select.EPOLLOUT:
                chunk = self.connection.recv(1 << 18)
                if not chunk:
                    raise ConnectionError
                self.received += chunk
                self.received_at = time.monotonic()
            self.parse()
        except BlockingIOError:
            pass
        except (OSError, InvalidRequest, ValueError, KeyError, TypeError):
            self.disconnect()

    def parse(self):
        while self.connection and len(self.unsent) < MAX_UNSENT_BYTES and len(self.received) >= HEADER.size:
            request_id, head_size, body_size = HEADER.unpack_from(self.received)
            if head_size > MAX_HEAD_BYTES or body_size > MAX_REQUEST_BODY_BYTES:
                raise InvalidRequest
            end = HEADER.size + head_size + body_size
            if len(self.received) < end:
                break
            head = json.loads(bytes(self.received[HEADER.size : HEADER.size + head_size]))
            body = bytes(self.received[HEADER.size + head_size : end])
            del self.received[:end]
            self.attempts = 0
            self.dispatch(request_id, head, body)

    def respond(self, request_id, head, body=b""):
        content = json.dumps(head, separators=(",", ":")).encode()
        parts = [HEADER.pack(request_id, len(content), len(body)) + content, body]
        if not self.unsent:  # a large body is sent without a copy
            with contextlib.suppress(BlockingIOError):
                sent = self.connection.sendmsg(parts)
                parts = [parts[0][sent:], memoryview(body)[max(sent - len(parts[0]), 0) :]]
        for part in parts:
            self.unsent += part
        if self.unsent:
            self.flush()

    def flush(self):
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        reading = select.EPOLLIN if len(self.unsent) < MAX_UNSENT_BYTES else 0
        self.watch(self.connection.fileno(), reading | (select.EPOLLOUT if self.unsent else 0), self.transfer)
