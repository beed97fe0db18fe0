"""Forward proxy of the allow list: CONNECT for TLS, and http requests in absolute form.

Each slot has a socket in the directory of its gateway socket, to which the bridge in the sandbox connects. A tunnel carries TLS
only, and its ClientHello has to name the domain of the CONNECT request: another name would reach another site on the same
address. The proxy connects to an address that was checked."""

import asyncio
import socket
import ssl
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import structlog
from django.db import Error as DatabaseError

from sandboxes.agent.gateway import bind_listener
from sandboxes.background import repeat
from sandboxes.db.encryption import DecryptionFailed
from sandboxes.egress.allow_list import connections, destinations
from sandboxes.egress.allow_list.client_hello import InvalidHello, parse_client_hello
from sandboxes.egress.allow_list.credentials import HTTP_PORT, HTTPS_PORT, Credential
from sandboxes.egress.allow_list.request_head import MAX_HEAD_BYTES, InvalidRequest, RequestHead, parse_request_head
from sandboxes.egress.allow_list.tunnel import ConnectionCut, TlsServer, Traffic, Tunnel, flush
from sandboxes.egress.authorization import filter_held
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.egress.refusals import CallRefused
from sandboxes.redaction.streams import SecretRedactor, list_secrets

log = structlog.get_logger(__name__)
HEAD_TIMEOUT_SECONDS = 10.0  # for the request head, and for the ClientHello
CONNECT_TIMEOUT_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.5  # after an accept failed: too many open files
CHECK_INTERVAL_SECONDS = 1.0  # upper bound on how long a connection outlives its lease
HEARTBEAT_CHECKS = 20  # checks between two records of the bytes
MAX_SOCKETS_PER_SLOT = 64  # including those without a request
MAX_RESOLVER_THREADS = 32
UNRECOGNIZED_NAME_ALERT = b"\x15\x03\x03\x00\x02\x02\x70"  # fatal, unrecognized_name
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
Outcome = connections.Outcome


@dataclass(eq=False)
class OpenConnection:
    """A connection of a sandbox that was admitted."""

    admission: connections.Admission
    traffic: Traffic
    task: "asyncio.Task[Any] | None"


@dataclass
class AllowListProxy:
    """Proxy of one host. All methods run in the event loop of `listening`."""

    now: Callable[[], datetime]
    database: DatabaseThreads
    counts: Counter[str] = field(default_factory=Counter)  # "admitted" and "refused" since the start
    _open: set[OpenConnection] = field(default_factory=set)
    _checks: int = 0
    _sockets: Counter[int] = field(default_factory=Counter)  # accepted connections by slot
    _budgets: dict[int, "LeaseBudget"] = field(default_factory=dict)  # by slot, while it has connections
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _tls: ssl.SSLContext | None = None

    @asynccontextmanager
    async def listening(self, sockets: dict[Path, int]) -> AsyncIterator[None]:
        """Serve on unix sockets (path -> slot) during the body of the `with`. At its end all connections are cut."""
        loop = asyncio.get_running_loop()
        self._resolver = ThreadPoolExecutor(MAX_RESOLVER_THREADS, thread_name_prefix="resolver")
        listeners = {bind_listener(path, mode=0o666): slot for path, slot in sockets.items()}
        watcher = loop.create_task(repeat(self._watch, "connections not checked", seconds=CHECK_INTERVAL_SECONDS))
        try:
            for listener, slot in listeners.items():
                loop.add_reader(listener, self._accept, listener, slot)
            yield
        finally:
            for listener in listeners:
                loop.remove_reader(listener)
                listener.close()
            for task in (watcher, *self._tasks):
                task.cancel()
            await asyncio.gather(watcher, *self._tasks, return_exceptions=True)
            self._resolver.shutdown(wait=False, cancel_futures=True)
            for path in sockets:
                path.unlink(missing_ok=True)

    def read_counts(self) -> dict[str, int]:
        """Return the numbers of admitted and refused connections since the start, and of those open now."""
        counts = {event: self.counts[event] for event in connections.PROXY_EVENTS}
        return {f"connections {event}": count for event, count in counts.items()} | {"connections open": len(self._open)}

    def _accept(self, listener: socket.socket, slot: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("proxy accepts no connection", error=str(error))
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume, listener, slot)
            return
        if self._sockets[slot] >= MAX_SOCKETS_PER_SLOT:
            connection.close()
            return
        connection.setblocking(False)
        self._sockets[slot] += 1
        task = loop.create_task(self._serve(connection, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resume(self, listener: socket.socket, slot: int) -> None:
        if listener.fileno() != -1:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, slot)

    async def _serve(self, connection: socket.socket, slot: int) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_HEAD_BYTES)
        budget = self._budgets.setdefault(slot, LeaseBudget())
        budget.users += 1
        head = None
        try:
            head = await _read_head(reader)
            await self._handle(Tunnel(reader, writer), head, slot, budget)
        except (CallRefused, InvalidRequest) as refusal:
            self.counts["refused"] += 1
            await _answer_refusal(writer, refusal.status, str(refusal))
        except DecryptionFailed:
            log.error("credential not decrypted", host=head.host if head else "")
            await _answer_refusal(writer, 503, "The credential of this domain cannot be decrypted.")
        except DatabaseError as error:
            log.error("connection not recorded", error=str(error))
            await _answer_refusal(writer, 503, "The connection could not be recorded. Try again.")
        except (OSError, EOFError, ConnectionCut):  # EOFError: asyncio.IncompleteReadError
            pass
        finally:
            writer.transport.abort()  # close() would wait without end for a client that does not read
            self._sockets[slot] -= 1
            budget.users -= 1
            if not budget.users:
                del self._budgets[slot]

    async def _handle(self, tunnel: Tunnel, head: RequestHead, slot: int, budget: "LeaseBudget") -> None:
        """Admit one connection and serve it to its end. Its row is closed also after an exception."""
        admission = await self.database.run(
            connections.open_connection, slot, uuid.uuid4().hex, head.host, head.port, is_plain=head.path is not None,
            now=self.now(),
        )  # fmt: skip
        self.counts["admitted"] += 1
        budget.begin(admission)
        result = connections.ConnectionResult()
        traffic = Traffic(result, budget, admission.policy.max_connection_mib << 20)
        opened = OpenConnection(admission, traffic, asyncio.current_task())
        self._open.add(opened)
        try:
            await self._forward(tunnel, head, traffic, admission.credential)
            result.outcome = Outcome.OK
        except CallRefused as refusal:
            result.outcome = Outcome.FAILED if refusal.status == 502 else Outcome.REFUSED
            result.code = refusal.code
            raise
        except ConnectionCut as cut:
            result.outcome, result.code = Outcome.CUT, cut.code
            raise
        except asyncio.CancelledError:
            result.outcome, result.code = Outcome.CUT, traffic.cut_reason or "proxy_stopped"
            raise
        except (OSError, EOFError) as error:
            result.outcome, result.code = Outcome.FAILED, type(error).__name__
            raise
        finally:
            self._open.discard(opened)
            try:
                await self.database.run(connections.settle, admission.row, result, now=self.now())
            except DatabaseError as error:  # the row stays open until a sweep closes it
                log.error("end of a connection not recorded", connection=admission.row.connection_id, error=str(error))

    async def _forward(self, tunnel: Tunnel, head: RequestHead, traffic: Traffic, credential: Credential | None) -> None:
        """Connect and relay. With a credential the request is sent over TLS: the credential is never sent in clear text."""
        if credential and not (credential.writes or head.only_reads):
            message = f"The credential of {head.host} is for downloads: GET, HEAD and git's fetch."
            raise CallRefused(403, "method_not_allowed", message)
        addresses = await destinations.resolve(head.host, self._resolver)
        server, port, authorization = None, head.port, ""
        if credential:
            authorization, tunnel.redactor = credential.authorization, SecretRedactor(*list_secrets(credential.authorization))
            server = TlsServer(self._get_tls_context(), head.host)
            port = HTTPS_PORT if head.port == HTTP_PORT else head.port
        targets = [str(address) for address in addresses]
        await tunnel.connect(targets, port, traffic, timeout=CONNECT_TIMEOUT_SECONDS, server=server)
        try:
            if head.path is None:
                tunnel.client_writer.write(ESTABLISHED)
                hello = await _read_hello(tunnel, head)
                await tunnel.relay(traffic, first=hello)
            else:
                if head.expects_continue and head.content_length:
                    tunnel.client_writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await tunnel.relay(traffic, first=head.encode(authorization), body_bytes=head.content_length)
        finally:
            tunnel.close_upstream()

    def _get_tls_context(self) -> ssl.SSLContext:
        """Return the context of requests with a credential, with the authorities of the host. Loaded at the first use."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    async def _watch(self) -> None:
        """Cut connections that are idle, too long or of an ended lease. Record the bytes. Raise DatabaseError."""
        self._checks += 1
        for opened in [*self._open]:
            if reason := opened.traffic.find_timeout():
                _cut(opened, reason)
        await self._cut_unheld()
        if self._checks % HEARTBEAT_CHECKS == 0 and self._open:
            results = {opened.admission.row.pk: opened.traffic.result for opened in self._open}
            await self.database.run(connections.record_progress, results, now=self.now())

    async def _cut_unheld(self) -> None:
        holdings = {opened: (opened.admission.caller.sandbox.pk, opened.admission.caller.holder) for opened in self._open}
        if not holdings:
            return
        held = await self.database.run(filter_held, {*holdings.values()})
        for opened, holding in holdings.items():
            if holding not in held:
                _cut(opened, "lease_ended")


@dataclass
class LeaseBudget:
    """Bytes that the connections of a lease may still transfer. Shared by all connections of a slot.

    The budget lives from before the first connection is admitted until after the last row is closed, so that no connection is
    missing both in the rows and in the budget."""

    holder: uuid.UUID | None = None
    remaining: int = 0
    users: int = 0

    def begin(self, admission: connections.Admission) -> None:
        if self.holder != admission.caller.holder:
            self.holder, self.remaining = admission.caller.holder, admission.remaining_lease_bytes


def _cut(opened: OpenConnection, reason: str) -> None:
    opened.traffic.cut_reason = reason
    if opened.task:
        opened.task.cancel()


async def _read_head(reader: asyncio.StreamReader) -> RequestHead:
    try:
        async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
            return parse_request_head(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError as error:
        raise InvalidRequest(431, "The request head is too large.") from error
    except TimeoutError as error:
        raise InvalidRequest(408, "No request was received.") from error


async def _read_hello(tunnel: Tunnel, head: RequestHead) -> bytes:
    """Read the ClientHello of a tunnel. Raise CallRefused unless it names the domain of the CONNECT request."""
    received = b""
    try:
        async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
            while (hello := parse_client_hello(received)) is None:
                if not (chunk := await tunnel.client_reader.read(MAX_HEAD_BYTES)):
                    raise InvalidHello("the connection ended")
                received += chunk
    except (InvalidHello, TimeoutError) as error:
        raise TunnelRefused("tls_expected") from error
    if hello.is_encrypted or hello.server_name != head.host:
        with suppress(OSError):
            tunnel.client_writer.write(UNRECOGNIZED_NAME_ALERT)
        raise TunnelRefused("encrypted_hello" if hello.is_encrypted else "server_name_mismatch")
    return received


class TunnelRefused(CallRefused):
    """An established tunnel is refused: no HTTP response can be sent any more."""

    def __init__(self, code: str) -> None:
        super().__init__(0, code, "")


async def _answer_refusal(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    if not status:
        return
    body = f"{message}\n".encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
            writer.write(head.encode() + body)
            await flush(writer)
