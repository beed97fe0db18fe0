"""Channels of remote sandboxes' runners at the gateway: requests of this host's processes, delivered by long polls.

A sandbox polls with its token, which names it. Processes of the control plane hand in requests through a unix socket. A sandbox
gets requests for itself only, and can settle only those. Nothing here is needed for correctness: a request that is lost is
repeated by the vendor's exec."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from sandboxes.egress import gateway_tokens
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.egress.responses import read_bearer

POLL_SECONDS = 25.0  # a poll without requests is answered after this time
RECONNECT_SECONDS = 3.0  # between two polls of a connected sandbox, and until it takes note of a request
MAX_PENDING_CALLS = 64  # of one sandbox
MAX_POLLS = 4  # of one sandbox at once
MAX_DELIVERED = 16  # requests in the answer to one poll
MAX_RESULT_BYTES = 8 << 20


@dataclass
class _Channel:
    """Requests for one sandbox that wait for its next poll."""

    pending: deque[dict[str, Any]] = field(default_factory=deque)
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    polls: int = 0  # in progress
    answered_at: float = 0.0  # monotonic end of the last poll that was answered
    seen_at: float = 0.0  # monotonic start of the last poll, or arrival of the last result

    def is_connected(self) -> bool:
        return self.polls > 0 or time.monotonic() < self.answered_at + RECONNECT_SECONDS


@dataclass
class RunnerChannels:
    """Handlers of the gateway's paths for runners, and of the socket for this host's processes."""

    database: DatabaseThreads
    confirm: Callable[[web.BaseRequest], None]  # called once a request is authenticated
    _channels: dict[str, _Channel] = field(default_factory=dict)  # by ref
    _calls: dict[str, tuple[str, asyncio.Future[Any]]] = field(default_factory=dict)  # id -> (ref, response)
    _is_closed: bool = False

    def close(self) -> None:
        """End all polls and calls in progress."""
        self._is_closed = True
        for channel in self._channels.values():
            channel.wakeup.set()
        for _, response in self._calls.values():
            response.cancel()

    def build_gateway_routes(self) -> list[web.RouteDef]:
        return [web.post("/runner/next", self._answer_poll), web.post("/runner/result", self._accept_results)]

    def build_local_routes(self) -> list[web.RouteDef]:
        return [web.post("/call", self._call)]

    async def _answer_poll(self, request: web.Request) -> web.Response:
        """Accept the results in a poll, wait for requests, and return them."""
        ref = await self._identify(request)
        self._settle(ref, (await _read_json(request)).get("results", []))
        channel = self._channels.setdefault(ref, _Channel())
        if channel.polls >= MAX_POLLS:
            raise web.HTTPTooManyRequests
        channel.seen_at = time.monotonic()
        channel.polls += 1
        try:
            if not channel.pending and not self._is_closed:
                channel.wakeup.clear()
                await asyncio.wait_for(channel.wakeup.wait(), POLL_SECONDS)
        except TimeoutError:
            pass
        finally:
            channel.polls -= 1
        if self._is_closed:
            raise web.HTTPServiceUnavailable
        channel.answered_at = time.monotonic()
        delivered = [channel.pending.popleft() for _ in range(min(len(channel.pending), MAX_DELIVERED))]
        return web.json_response({"requests": delivered})

    async def _accept_results(self, request: web.Request) -> web.Response:
        ref = await self._identify(request)
        self._settle(ref, (await _read_json(request)).get("results", []))
        return web.json_response({})

    async def _call(self, request: web.Request) -> web.Response:
        """Pass the request of a process of this host to a sandbox, and return the response of its runner.

        404: the sandbox is not connected; 503: too many requests wait for it; 504: no response within `timeout` seconds."""
        ref, timeout = request.query["ref"], float(request.query["timeout"])
        channel = self._channels.get(ref)
        if channel is None or not channel.is_connected():
            self._channels.pop(ref, None)
            return web.Response(status=404)
        if len(channel.pending) >= MAX_PENDING_CALLS:
            return web.Response(status=503)
        call_id, started = uuid.uuid4().hex, time.monotonic()
        response = asyncio.get_running_loop().create_future()
        self._calls[call_id] = ref, response
        entry = {"id": call_id, "call": await request.json()}
        channel.pending.append(entry)
        channel.wakeup.set()
        try:
            await asyncio.wait([response], timeout=min(RECONNECT_SECONDS, timeout))
            if not response.done() and channel.seen_at < started:
                raise TimeoutError  # a sandbox that has taken the request polls again at once
            return web.json_response(await asyncio.wait_for(response, max(timeout - RECONNECT_SECONDS, 0.0)))
        except TimeoutError:
            self._channels.pop(ref, None)  # it may be gone without an end of its connection: the next poll tells
            return web.Response(status=504)
        except asyncio.CancelledError:
            if self._is_closed:
                return web.Response(status=503)
            raise
        finally:
            del self._calls[call_id]
            if entry in channel.pending:
                channel.pending.remove(entry)

    async def _identify(self, request: web.Request) -> str:
        ref = await self.database.run(gateway_tokens.find_ref, read_bearer(request))
        if ref is None:
            raise web.HTTPUnauthorized
        self.confirm(request)
        return ref

    def _settle(self, ref: str, results: Iterable[Any]) -> None:
        if channel := self._channels.get(ref):
            channel.seen_at = time.monotonic()
        for result in results:
            if not isinstance(result, dict):
                continue
            owner, response = self._calls.get(str(result.get("id")), ("", None))
            if owner == ref and response is not None and not response.done():
                response.set_result(result.get("response"))


async def _read_json(request: web.Request) -> dict[str, Any]:
    """Return the object in the body. Raise HTTPBadRequest, or HTTPRequestEntityTooLarge."""
    try:
        content = await request.json()
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest from None
    if not isinstance(content, dict) or not isinstance(content.get("results", []), list):
        raise web.HTTPBadRequest
    return content
