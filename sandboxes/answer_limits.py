"""Time and size limits of whole answers, for HTTP clients that are built on urllib3 (requests, boto3) or httpx.

The read timeout of these clients is that of each read: a server that sends a byte every few seconds holds a call for ever. Here
the read timeout of a request is the time for the whole answer, headers included. A long answer has more time: one second for
each `MIN_BYTES_PER_SECOND` received. The place of the limit is `response_class` of http.client for clients on urllib3, and the
network stream of httpcore for those on httpx."""

import http.client
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter

MIN_BYTES_PER_SECOND = 16 << 10
UNLIMITED_BYTES = 1 << 62


class _AnswerTime:
    """Time and bytes of the reads of one answer."""

    def __init__(self) -> None:
        self.received, self._waited = 0, 0.0

    def compute_remaining(self, timeout: float) -> float:
        """Return the seconds for the next read. Raise TimeoutError if the time of the answer is over."""
        allowed = timeout + self.received / MIN_BYTES_PER_SECOND
        if self._waited >= allowed:
            raise TimeoutError(f"the answer is not complete after {allowed:.0f} s")
        return min(allowed - self._waited, timeout)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a read. The time of the reader between two reads does not count."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started


class _LimitedReader(io.RawIOBase):
    """Reader of a connection within the limits of its answer."""

    def __init__(self, raw: Any, connection: Any, max_bytes: int) -> None:
        self._raw, self._socket, self._max_bytes = raw, connection, max_bytes
        self._timeout, self._time = connection.gettimeout(), _AnswerTime()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._timeout is None:
            return self._count(self._raw.readinto(buffer))
        self._socket.settimeout(self._time.compute_remaining(self._timeout))
        try:
            with self._time.waiting():
                return self._count(self._raw.readinto(buffer))
        finally:
            if self._socket.fileno() >= 0:
                self._socket.settimeout(self._timeout)

    def _count(self, size: int | None) -> int | None:
        self._time.received += size or 0
        if self._time.received > self._max_bytes:
            raise OSError(f"the answer is larger than {self._max_bytes} bytes")
        return size

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


@cache
def _build_pool_class(pool_class: Any, max_bytes: int) -> Any:
    """Return a subclass of a connection pool whose connections limit their answers."""

    class LimitedResponse(http.client.HTTPResponse):
        def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
            super().__init__(sock, *args, **options)
            raw = self.fp.detach()
            self.fp = io.BufferedReader(_LimitedReader(raw, sock, max_bytes))

    class LimitedConnection(pool_class.ConnectionCls):
        response_class = LimitedResponse

    class LimitedPool(pool_class):
        ConnectionCls = LimitedConnection

    return LimitedPool


def limit_answers(manager: urllib3.PoolManager, *, max_bytes: int = UNLIMITED_BYTES) -> None:
    """Limit the answers of all connections that a pool manager opens from now on. `max_bytes` includes the headers."""
    classes = manager.pool_classes_by_scheme
    manager.pool_classes_by_scheme = {scheme: _build_pool_class(found, max_bytes) for scheme, found in classes.items()}


class _LimitedAdapter(HTTPAdapter):
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        limit_answers(self.poolmanager, max_bytes=self._max_bytes)

    def proxy_manager_for(self, proxy: Any, **options: Any) -> Any:
        is_new = proxy not in self.proxy_manager
        manager = super().proxy_manager_for(proxy, **options)
        if is_new:
            limit_answers(manager, max_bytes=self._max_bytes)
        return manager


def limit_session(session: requests.Session, *, max_bytes: int = UNLIMITED_BYTES) -> requests.Session:
    """Limit the answers of a session of `requests`. Return the session."""
    for scheme in ("http://", "https://"):
        session.mount(scheme, _LimitedAdapter(max_bytes))
    return session


class _LimitedStream:
    """Network stream of httpcore within the time of its answer, which begins after the last byte of the request."""

    def __init__(self, stream: Any, timeout_error: type[Exception]) -> None:
        self._stream, self._timeout_error, self._time = stream, timeout_error, _AnswerTime()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if timeout is None:
            return bytes(self._stream.read(max_bytes, timeout))
        try:
            remaining = self._time.compute_remaining(timeout)
        except TimeoutError as late:
            raise self._timeout_error(str(late)) from None
        with self._time.waiting():
            content = bytes(self._stream.read(max_bytes, remaining))
        self._time.received += len(content)
        return content

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._time = _AnswerTime()
        self._stream.write(buffer, timeout)

    def start_tls(self, *args: Any, **options: Any) -> "_LimitedStream":
        return _LimitedStream(self._stream.start_tls(*args, **options), self._timeout_error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _LimitedBackend:
    def __init__(self, backend: Any, timeout_error: type[Exception]) -> None:
        self._backend, self._timeout_error = backend, timeout_error

    def connect_tcp(self, *args: Any, **options: Any) -> _LimitedStream:
        return _LimitedStream(self._backend.connect_tcp(*args, **options), self._timeout_error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def limit_transport(transport: Any, timeout_error: type[Exception]) -> Any:
    """Limit the time of the answers of an HTTPTransport of httpx. Return the transport.

    Not for HTTP/2, where a connection has several answers at once. `timeout_error` is ReadTimeout of the transport's httpcore.
    Relies on private attributes of httpx; test_answer_limits.py fails without effect."""
    transport._pool._network_backend = _LimitedBackend(transport._pool._network_backend, timeout_error)
    return transport
