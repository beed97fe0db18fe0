"""The agent's way to a gateway on another machine: HTTP over TLS, with a token that is good for one join.

The agent chooses a secret, and joins with the token and the secret's digest. A join whose answer was lost is repeated with the
same digest; no other process can join with the token afterwards. The secret opens the session, an upgraded HTTP connection with
the frames of the unix socket, and authenticates the HTTP requests of the sandbox's programs. The secret is in the memory of
process 1 only, which commands of the same user cannot read.

Nothing here blocks the event loop: each operation is a generator that yields the descriptor and the events that it waits for.
Loaded only for a gateway on another machine: ssl and OpenSSL take several MiB. Standard library only."""

import contextlib
import json
import os
import select
import socket
import ssl
import time
from urllib.parse import urlsplit

import bridge
from digests import sha256

SECRET_PREFIX = "lhs_"  # noqa: S105 - lets scanners for leaked credentials recognize a secret
DIAL_SECONDS = 15.0  # for address, connection, handshake and answer
RECONNECT_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # each times 0.5 to 1.5, so that agents do not reconnect at once
REFUSED_SECONDS = 5.0  # after a refusal, times 0.5 to 1.5: the token may be replaced
SILENCE_SECONDS = 45.0  # without a request, after which the connection is replaced; the gateway pings three times meanwhile
MAX_HEAD_BYTES = 32 << 10
MAX_ADDRESS_BYTES = 256
RECORD_BYTES = 16 << 10  # of TLS
SOCKET_OPTIONS = (  # a machine that has gone is noticed within half a minute
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.IPPROTO_TCP, socket.TCP_SYNCNT, 3),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)  # fmt: skip
REPLACED_HEADERS = (b"authorization", b"x-api-key", b"proxy-authorization", b"host", b"connection", b"keep-alive", b"upgrade")


class Refused(Exception):
    """The gateway answers with another status than the expected one."""


class TlsStream:
    """Connected, non-blocking TLS connection with the methods of a socket that the event loop uses."""

    def __init__(self, connection):
        self.connection = connection
        self.fileno, self.close = connection.fileno, connection.close

    def recv(self, size):
        """Return about `size` bytes. Nothing stays in a buffer of TLS, for which the kernel would report no event."""
        content = bytearray()
        try:
            while len(content) < size or self.connection.pending():
                chunk = self.connection.recv(RECORD_BYTES)
                if not chunk:
                    if content:  # the peer answers with its FIN, an event at which the end is read
                        self.connection.shutdown(socket.SHUT_WR)
                    break
                content += chunk
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not content:
                raise BlockingIOError from None
        return bytes(content)

    def send(self, content):
        try:
            return self.connection.send(content)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendmsg(self, parts):
        return self.send(b"".join(parts))

    def shutdown(self, _how):
        """Ignore the end of one direction: TLS would end both."""


class Operation:
    """Steps of a generator, resumed by the event loop. `loop` has watch and unwatch. Errors are up to the generator."""

    def __init__(self, loop, steps):
        """The first step follows by `resume`."""
        self.loop, self.steps, self.fd = loop, steps, None

    def resume(self, _events=0):
        self.pause()
        try:
            self.fd, events = next(self.steps)
        except StopIteration:
            return
        self.loop.watch(self.fd, events, self.resume)

    def pause(self):
        if self.fd is not None:
            self.loop.unwatch(self.fd)
            self.fd = None

    def cancel(self):
        self.pause()
        self.steps.close()


class Gateway:
    """Gateway named by a file with `url`, `token` and `ca` (PEM certificates; empty: those of the system)."""

    silence_seconds = SILENCE_SECONDS

    def __init__(self, path):
        self.path, self.secret = path, ""
        self.offered_token = self.refused_token = ""
        self.is_joined = False
        self.dial = self.context = None
        self.read_file()

    def read_file(self):
        with open(self.path) as file:
            content = json.load(file)
        self.url, self.token, self.ca = urlsplit(content["url"]), content["token"], content.get("ca") or None

    # Session

    def connect(self, agent):
        """Begin to connect, in place of an attempt that did not end in time. `agent` is a GatewayConnection."""
        if self.dial:
            self.dial.cancel()
            self.dial = None
            self.postpone_connect(agent)
            return
        agent.next_attempt = time.monotonic() + DIAL_SECONDS
        self.dial = Operation(agent, self.open_session(agent))
        self.dial.resume()

    def postpone_connect(self, agent, seconds=0.0):
        """Set the time of the next attempt: after about `seconds`, by default later and later."""
        seconds = seconds or RECONNECT_SECONDS[min(agent.attempts, len(RECONNECT_SECONDS) - 1)]
        jitter = 0.5 + int.from_bytes(os.urandom(2), "big") / 0x10000
        agent.attempts, agent.next_attempt = agent.attempts + 1, time.monotonic() + seconds * jitter

    def open_session(self, agent):
        """Join if necessary, and give the upgraded connection to the agent."""
        try:
            yield from self.join()
            stream = yield from self.open_stream()
            headers = b"Connection: Upgrade\r\nUpgrade: leasehold-agent\r\n"
            received = yield from self.exchange(stream, b"GET", b"/agent/session", self.secret, headers, b"", 101)
        except Refused:
            self.is_joined = False  # the secret may not be valid any more: a replaced token permits another join
            self.postpone_connect(agent, REFUSED_SECONDS)
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            self.postpone_connect(agent)
        else:
            try:
                agent.use(stream, received)
            except OSError:
                agent.disconnect()
        finally:
            self.dial = None

    def join(self):
        """Exchange the token for a session secret, once for each token. Raise Refused for a token that was refused before."""
        if self.is_joined:
            return
        self.read_file()
        if self.token == self.refused_token:
            raise Refused
        if self.token != self.offered_token:  # a replaced token gets a secret of its own
            self.offered_token, self.secret = self.token, ""
        self.secret = self.secret or SECRET_PREFIX + os.urandom(32).hex()
        body = json.dumps({"session_sha256": sha256(self.secret.encode()).hexdigest()}).encode()
        stream = yield from self.open_stream()
        try:
            yield from self.exchange(stream, b"POST", b"/agent/join", self.token, b"", body, 200)
        except Refused:
            self.refused_token = self.token
            raise
        finally:
            stream.close()
        self.is_joined = True

    def exchange(self, stream, method, path, token, headers, body, expected):
        """Send a request. Return the bytes after the head of its answer. Raise Refused, OSError, ValueError."""
        try:
            head = b"%s %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n%sContent-Length: %d\r\n\r\n"
            unsent = head % (method, self.prefix() + path, self.host(), token.encode(), headers, len(body)) + body
            while unsent:
                try:
                    unsent = unsent[stream.send(unsent) :]
                except BlockingIOError:
                    yield stream.fileno(), select.EPOLLOUT
            received = yield from read_head(stream)
        except BaseException:
            stream.close()
            raise
        head, _, rest = received.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status in (401, 403):
            stream.close()
            raise Refused(status)
        if status != expected:
            stream.close()
            raise ConnectionError(status)
        return rest

    def prefix(self):
        return self.url.path.rstrip("/").encode()

    def host(self):
        return self.url.netloc.encode()

    # Connections

    def open_stream(self):
        """Return a connection to the gateway, after its certificate was verified. Raise OSError, ValueError."""
        address = yield from resolve(self.url.hostname, self.url.port or (443 if self.url.scheme == "https" else 80))
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            for level, option, value in SOCKET_OPTIONS:
                connection.setsockopt(level, option, value)
            try:
                connection.connect(address)
            except BlockingIOError:
                yield connection.fileno(), select.EPOLLOUT
            if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            if self.url.scheme != "https":
                return connection
            self.context = self.context or ssl.create_default_context(cadata=self.ca)
            connection = self.context.wrap_socket(connection, server_hostname=self.url.hostname, do_handshake_on_connect=False)
            while True:
                try:
                    connection.do_handshake()
                    return TlsStream(connection)
                except ssl.SSLWantReadError:
                    yield connection.fileno(), select.EPOLLIN
                except ssl.SSLWantWriteError:
                    yield connection.fileno(), select.EPOLLOUT
        except BaseException:
            connection.close()
            raise


def read_head(stream):
    """Return the head of an HTTP message, and what follows it in the same read. Raise OSError, ValueError, EOFError."""
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) > MAX_HEAD_BYTES:
            raise ValueError
        yield stream.fileno(), select.EPOLLIN
        with contextlib.suppress(BlockingIOError):
            chunk = stream.recv(RECORD_BYTES)
            if not chunk:
                raise EOFError
            received += chunk
    return received


def resolve(host, port):
    """Return (IP address, port). A name is resolved in a fork, since a name server that does not answer takes many seconds."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return host, port
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writing, socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0].encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield reading, select.EPOLLIN
        address = os.read(reading, MAX_ADDRESS_BYTES).decode()
    finally:
        os.close(reading)
    if not address:
        raise OSError("unknown host")
    return address, port


class GatewayBridge(bridge.Bridge):
    """Port of the loopback interface for HTTP requests of the sandbox's programs, sent to the gateway with the session secret.

    One request a connection. Each may carry any credentials; the secret takes their place."""

    def __init__(self, loop, port, gateway):
        super().__init__(loop, port, "")
        self.gateway = gateway

    def accept(self):
        client = self.accept_client()
        if client is not None:
            self.count += 1
            Operation(self.loop, self.serve(client)).resume()

    def serve(self, client):
        """Read the head of a request, connect to the gateway and relay from then on."""
        try:
            received = yield from read_head(client)
            stream = yield from self.gateway.open_stream()
        except (EOFError, ValueError):
            client.close()
            self.count -= 1
            return
        except OSError as error:
            with contextlib.suppress(OSError):
                client.send(format_error(f"The gateway cannot be reached: {type(error).__name__}"))
            client.close()
            self.count -= 1
            return
        upstream = self.pair(client, stream)
        upstream.pending = self.replace_headers(received)
        self.watch(upstream)
        self.watch(upstream.other)

    def replace_headers(self, received):
        """Return a request with this sandbox's credentials, on a connection for this request alone."""
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        method, _, rest = first.partition(b" ")
        kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in REPLACED_HEADERS]
        own = [b"Host: " + self.gateway.host(), b"Authorization: Bearer " + self.gateway.secret.encode(), b"Connection: close"]
        first = method + b" " + self.gateway.prefix() + rest
        return b"\r\n".join([first, *own, *kept]) + b"\r\n\r\n" + body


def format_error(message):
    content = json.dumps({"error": {"type": "gateway_error", "message": message}}).encode()
    head = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(content) + content
