"""Drivers of operations: one performs their steps, the other awaits them. Everything that knows httpx is here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, BinaryIO, Generic, TypeVar, cast

import anyio
import httpx
from anyio import to_thread

from .errors import ConfigurationError, ConnectionFailed, SandboxClosed
from .exchange import (
    ANSWER_ERRORS,
    Emit,
    OpenStream,
    Operation,
    Pause,
    ReadChunk,
    Request,
    Response,
    build_answer_error,
)
from .settings import Settings

CONNECT_TIMEOUT_SECONDS = 10.0
RESPONSE_TIMEOUT_SECONDS = 180.0  # a start, a wake, the transfer of state
STREAM_TIMEOUT_SECONDS = 60.0  # the server sends a comment at least every 15 seconds
CHUNK_BYTES = 1 << 18
UNSENT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
T = TypeVar("T")
Item = TypeVar("Item")


def translate_error(error: httpx.HTTPError) -> ConnectionFailed:
    return ConnectionFailed(
        f"The server does not respond: {str(error) or type(error).__name__}.", sent=not isinstance(error, UNSENT_ERRORS)
    )


def build_client_options(settings: Settings) -> dict[str, Any]:
    """Return the arguments for httpx. Raise ConfigurationError for an address or a key that cannot be sent."""
    try:
        httpx.URL(settings.base_url)
        settings.api_key.encode("ascii")
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigurationError(f"The address or the API key is invalid: {type(error).__name__}.") from None
    return {"base_url": settings.base_url, "headers": {"Authorization": f"Bearer {settings.api_key}"}}


def build_request_options(request: Request, *, response_seconds: float, streamed: bool = False) -> dict[str, Any]:
    """Return the arguments for httpx. A file gets its length, since the server takes no body of unknown length."""
    headers, content = dict(request.headers), request.body
    if not isinstance(content, bytes):
        headers["Content-Length"] = str(content.seek(0, 2))
        content.seek(0)
    read_seconds = response_seconds if streamed else response_seconds + request.seconds
    if streamed and request.method == "GET":  # the sandbox was started before
        read_seconds = STREAM_TIMEOUT_SECONDS
    timeout = httpx.Timeout(read_seconds, connect=CONNECT_TIMEOUT_SECONDS)
    return {
        "method": request.method, "url": request.path, "params": dict(request.query), "headers": headers, "timeout": timeout,
    }  # fmt: skip


def read_blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(CHUNK_BYTES):
        yield block


async def read_blocks_async(file: BinaryIO) -> AsyncIterator[bytes]:
    while block := await to_thread.run_sync(file.read, CHUNK_BYTES):
        yield block


def build_response(response: httpx.Response, body: bytes = b"") -> Response:
    return Response(response.status_code, {name.lower(): value for name, value in response.headers.items()}, body)


def resume(operation: Operation[T], reply: Any, failure: ConnectionFailed | None, answered: Request | None) -> Any:
    """Return the next step of an operation. An answer that it cannot read is a LeaseholdError, after the request `answered`."""
    try:
        return operation.throw(failure) if failure else operation.send(reply)
    except ANSWER_ERRORS as error:
        if answered is None:  # an argument of the caller
            raise
        raise build_answer_error(error, answered) from error


def truncate(sink: BinaryIO) -> None:
    sink.seek(0)
    sink.truncate()


class Transport:
    """Performs operations."""

    def __init__(self, settings: Settings, *, response_seconds: float = RESPONSE_TIMEOUT_SECONDS) -> None:
        self._response_seconds = response_seconds
        self._client = httpx.Client(**build_client_options(settings))

    def run(self, operation: Operation[T]) -> T:
        """Perform an operation that emits nothing, and return its result."""
        stream: Stream[Any, T] = Stream(self, operation)
        return stream.wait()

    def perform(self, request: Request) -> Response:
        options = build_request_options(request, response_seconds=self._response_seconds)
        content = request.body if isinstance(request.body, bytes) else read_blocks(request.body)
        with self._client.stream(**options, content=content) as response:
            if request.sink is None or not response.is_success:
                return build_response(response, response.read())
            truncate(request.sink)
            for block in response.iter_bytes():
                request.sink.write(block)
            return build_response(response)

    def open(self, request: Request) -> httpx.Response:
        options = build_request_options(request, response_seconds=self._response_seconds, streamed=True)
        built = self._client.build_request(**options, content=request.body)
        return self._client.send(built, stream=True)

    def close(self) -> None:
        self._client.close()


class Stream(Generic[Item, T]):
    """Items of an operation, and its result at the end. `close` ends the stream early."""

    def __init__(self, transport: Transport, operation: Operation[T]) -> None:
        self.result: T | None = None
        self._has_ended = False
        self._transport, self._operation = transport, operation
        self._response: httpx.Response | None = None
        self._answered: Request | None = None  # the last request that was answered
        self._chunks: Iterator[bytes] = iter(())

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        reply: Any = None
        failure: ConnectionFailed | None = None
        try:
            while True:
                step = resume(self._operation, reply, failure, self._answered)
                if isinstance(step, Emit):
                    item: Item = step.item
                    return item
                reply = failure = None
                try:
                    reply = self._perform(step)
                except httpx.HTTPError as error:
                    failure = translate_error(error)
                else:
                    self._answered = step if isinstance(step, Request) else getattr(step, "request", self._answered)
        except StopIteration as done:
            if not self._has_ended:
                self._has_ended, self.result = True, done.value
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _perform(self, step: Any) -> Any:
        match step:
            case Request():
                return self._transport.perform(step)
            case Pause():
                return time.sleep(step.seconds)
            case OpenStream():
                self._close_response()
                self._response = response = self._transport.open(step.request)
                if not response.is_success:
                    return build_response(response, response.read())
                self._chunks = response.iter_bytes()
                return build_response(response)
            case ReadChunk():
                return next(self._chunks, None)
        raise AssertionError(step)

    def wait(self) -> T:
        """Read the rest, and return the result."""
        for _ in self:
            pass
        if not self._has_ended:
            raise SandboxClosed("The stream was closed before its end.")
        return cast(T, self.result)

    def close(self) -> None:
        self._operation.close()
        self._close_response()

    def _close_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.close()


class AsyncTransport:
    """Awaits operations."""

    def __init__(self, settings: Settings, *, response_seconds: float = RESPONSE_TIMEOUT_SECONDS) -> None:
        self._response_seconds = response_seconds
        self._client = httpx.AsyncClient(**build_client_options(settings))

    async def run(self, operation: Operation[T]) -> T:
        """Perform an operation that emits nothing, and return its result."""
        stream: AsyncStream[Any, T] = AsyncStream(self, operation)
        return await stream.wait()

    async def perform(self, request: Request) -> Response:
        options = build_request_options(request, response_seconds=self._response_seconds)
        content = request.body if isinstance(request.body, bytes) else read_blocks_async(request.body)
        async with self._client.stream(**options, content=content) as response:
            if request.sink is None or not response.is_success:
                return build_response(response, await response.aread())
            truncate(request.sink)
            async for block in response.aiter_bytes():
                await to_thread.run_sync(request.sink.write, block)
            return build_response(response)

    async def open(self, request: Request) -> httpx.Response:
        options = build_request_options(request, response_seconds=self._response_seconds, streamed=True)
        built = self._client.build_request(**options, content=request.body)
        return await self._client.send(built, stream=True)

    async def close(self) -> None:
        await self._client.aclose()


class AsyncStream(Generic[Item, T]):
    """Items of an operation, and its result at the end. `close` ends the stream early."""

    def __init__(self, transport: AsyncTransport, operation: Operation[T]) -> None:
        self.result: T | None = None
        self._has_ended = False
        self._transport, self._operation = transport, operation
        self._response: httpx.Response | None = None
        self._answered: Request | None = None  # the last request that was answered
        self._chunks: AsyncIterator[bytes] | None = None

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        reply: Any = None
        failure: ConnectionFailed | None = None
        try:
            while True:
                step = resume(self._operation, reply, failure, self._answered)
                if isinstance(step, Emit):
                    item: Item = step.item
                    return item
                reply = failure = None
                try:
                    reply = await self._perform(step)
                except httpx.HTTPError as error:
                    failure = translate_error(error)
                else:
                    self._answered = step if isinstance(step, Request) else getattr(step, "request", self._answered)
        except StopIteration as done:
            if not self._has_ended:
                self._has_ended, self.result = True, done.value
            await self.close()
            raise StopAsyncIteration from None
        except BaseException:
            await self.close()
            raise

    async def _perform(self, step: Any) -> Any:
        match step:
            case Request():
                return await self._transport.perform(step)
            case Pause():
                return await anyio.sleep(step.seconds)
            case OpenStream():
                await self._close_response()
                self._response = response = await self._transport.open(step.request)
                if not response.is_success:
                    return build_response(response, await response.aread())
                self._chunks = response.aiter_bytes()
                return build_response(response)
            case ReadChunk():
                assert self._chunks is not None
                return await anext(self._chunks, None)
        raise AssertionError(step)

    async def wait(self) -> T:
        """Read the rest, and return the result."""
        async for _ in self:
            pass
        if not self._has_ended:
            raise SandboxClosed("The stream was closed before its end.")
        return cast(T, self.result)

    async def close(self) -> None:
        self._operation.close()
        await self._close_response()

    async def _close_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()
