"""Egress proxy without sockets: its own handler of model calls, between a scripted upstream and a scripted sandbox.

The bytes of an answer arrive in chunks that the test chooses, which a network would join or split. The server on sockets has
tests of its own (tests/unit/sandboxes/egress/test_egress_server.py)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock
from uuid import uuid4

import aiohttp
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from sandboxes.egress.call_tracking import CallTracker
from sandboxes.egress.model_calls import ModelCallProxy
from sandboxes.egress.responses import ClientDisconnected
from tests.conftest import SimulatedCrash


def break_off() -> None:
    """Lose the connection to the upstream."""
    raise aiohttp.ClientPayloadError


@dataclass
class ScriptedAnswer:
    """Response of the upstream, in these chunks. After the last one it ends, or `fail` raises."""

    chunks: list[bytes]
    content_type: str = "text/event-stream"
    status: int = 200
    cost: str | None = None  # stated in LiteLLM's header
    fail: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.headers = CIMultiDict({"Content-Type": self.content_type})
        if self.cost is not None:
            self.headers["x-litellm-response-cost"] = self.cost
        self.content_length = None
        self.content = self
        self._remaining = [*self.chunks]

    async def __aenter__(self) -> "ScriptedAnswer":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def readany(self) -> bytes:
        if self._remaining:
            return self._remaining.pop(0)
        if self.fail:
            self.fail()
        return b""

    async def read(self, size: int) -> bytes:
        return await self.readany()

    async def iter_any(self) -> AsyncIterator[bytes]:
        while chunk := await self.readany():
            yield chunk


class SandboxWriter(AbstractStreamWriter):
    """Connection to the sandbox, which leaves after `patience` writes. None: it reads the whole answer."""

    def __init__(self, patience: int | None = None) -> None:
        self.received, self._patience = bytearray(), patience

    async def write_headers(self, status_line: str, headers: "CIMultiDict[str]") -> None:
        pass

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        if self._patience is not None:
            if self._patience <= 0:
                raise ConnectionResetError
            self._patience -= 1
        self.received += chunk

    async def write_eof(self, chunk: bytes = b"") -> None:
        self.received += chunk

    async def drain(self) -> None:
        pass

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        raise NotImplementedError

    def enable_chunking(self) -> None:
        pass


@dataclass
class CallingThreadDatabase:
    """Database work in the test's thread, so that it is part of the test's transaction. A dead process does none."""

    is_dead: bool = False
    _jobs: "SimpleQueue[Callable[[], None] | None]" = field(default_factory=SimpleQueue)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_dead:
            raise SimulatedCrash
        result: Future[Any] = Future()

        def work() -> None:
            try:
                result.set_result(function(*args, **kwargs))
            except Exception as error:  # raised where the result is awaited
                result.set_exception(error)

        self._jobs.put(work)
        return await asyncio.wrap_future(result)

    def work_for(self, handler: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a thread of its own, and its database work in this thread."""
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(asyncio.run, handler)
            done.add_done_callback(lambda _: self._jobs.put(None))
            while work := self._jobs.get():
                work()
            done.result()


@dataclass
class ProxyProcess:
    """One process of the egress proxy, with the clock `now`."""

    now: Callable[[], datetime]
    database: CallingThreadDatabase = field(default_factory=CallingThreadDatabase)

    def call(
        self, slot: int, path: str, body: dict[str, Any], answer: ScriptedAnswer, patience: int | None = None
    ) -> tuple[str, bytes]:
        """Forward a request. Return the call's id and the bytes that the sandbox received. After a crash the row is open."""
        call_id, writer = uuid4().hex, SandboxWriter(patience)
        self.database.work_for(self._call(slot, call_id, path, body, answer, writer))
        return call_id, bytes(writer.received)

    def die(self) -> None:
        """Crash: nothing is written to the database any more."""
        self.database.is_dead = True
        raise SimulatedCrash

    async def _call(
        self, slot: int, call_id: str, path: str, body: dict[str, Any], answer: ScriptedAnswer, writer: SandboxWriter
    ) -> None:
        session = cast(aiohttp.ClientSession, SimpleNamespace(post=lambda *args, **kwargs: answer))
        proxy = ModelCallProxy(CallTracker(self.now, cast(Any, self.database)), session)
        payload = StreamReader(Mock(_reading_paused=False), 1 << 16, loop=asyncio.get_running_loop())
        payload.feed_data(json.dumps(body).encode())
        payload.feed_eof()
        request = make_mocked_request("POST", path, payload=payload, writer=writer)
        try:
            response = await proxy.handle(request, slot, call_id)
            if isinstance(response, web.Response):  # an error of the upstream, or a broken answer of which nothing was sent
                assert response.status >= 400
        except ClientDisconnected:
            pass
        except SimulatedCrash:
            assert self.database.is_dead
