"""WebSocket proxy between sandboxes and the relay. Adds the agent's identity to the upstream connection."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import aiohttp
import structlog
from aiohttp import WSMsgType, web
from django.conf import settings

from sandboxes.egress import authorization
from sandboxes.egress.authorization import CallerIdentity
from sandboxes.egress.call_tracking import CallTracker
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.responses import await_write, build_error_response
from sandboxes.errors import SigningKeyNotFound
from sandboxes.identity import signing
from sandboxes.models import LlmCall

log = structlog.get_logger(__name__)
OUTCOME = LlmCall.Outcome
MAX_MESSAGE_BYTES = 4 << 20  # one WebSocket message, in either direction
PING_INTERVAL_SECONDS = 30.0
# Pattern of the decoded path. A percent sign is not accepted: the relay would decode the rest of a double escape.
RELAY_PATH_PATTERN = re.compile(r"[A-Za-z0-9._~:/-]*")


class ByteCounts(Protocol):
    """Bytes of the messages of a connection."""

    sent_bytes: int | None  # to the upstream
    received_bytes: int


@dataclass
class RelayProxy:
    """Handler of `/relay/...` requests."""

    calls: CallTracker
    session: aiohttp.ClientSession

    async def handle(self, request: web.Request, slot: int, call_id: str) -> web.StreamResponse:
        """Connect the sandbox to the same path below RELAY_URL until either side closes. Raise CallRefused."""
        path = _check_handshake(request)
        row, caller = await self.calls.database.run(
            authorization.open_relay_call, slot, call_id, request.path, now=self.calls.now()
        )
        async with self.calls.track(row, caller) as result:
            try:
                headers = await self.calls.database.run(build_relay_headers, row, caller, now=self.calls.now())
                url = f"{settings.RELAY_URL.rstrip('/')}/{path}"
                connect = self.session.ws_connect(
                    url, params=request.query, headers=headers, heartbeat=PING_INTERVAL_SECONDS, max_msg_size=MAX_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=5.0),
                )  # fmt: skip
                async with connect as upstream:
                    result.status, result.first_byte_at = 101, self.calls.now()
                    client = web.WebSocketResponse(
                        max_msg_size=MAX_MESSAGE_BYTES, autoping=True, heartbeat=PING_INTERVAL_SECONDS
                    )
                    await await_write(client.prepare(request))
                    await relay_messages(client, upstream, result)
                    result.outcome = OUTCOME.OK
                    return client
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.warning("relay connection failed", error=type(error).__name__)
                result.outcome, result.status, result.code = OUTCOME.FAILED, 502, "relay_failed"
                return build_error_response(502, "relay_failed", "The relay is unreachable.")


def build_relay_headers(row: LlmCall, caller: CallerIdentity, *, now: datetime) -> dict[str, str]:
    """Build the identity headers of a relay connection, with a service token if the agent has a signing key."""
    headers = {"x-leasehold-agent": row.agent_did, "x-leasehold-call-id": row.call_id}
    if settings.RELAY_AUD:
        with suppress(SigningKeyNotFound):
            token = signing.create_service_token(
                row.agent_did, aud=settings.RELAY_AUD, lxm=settings.RELAY_LXM, now=now, holder=caller.holder, actor="relay",
                fence=partial(authorization.lock_holder, caller),
            )  # fmt: skip
            headers["Authorization"] = f"Bearer {token}"
    return headers


def _check_handshake(request: web.Request) -> str:
    """Return the path below the relay's URL. Raise CallRefused for a malformed handshake or a forbidden path."""
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise CallRefused(426, "websocket_expected", "The relay accepts WebSocket connections only.")
    path = request.match_info["path"]
    if not RELAY_PATH_PATTERN.fullmatch(path) or not {".", ".."}.isdisjoint(path.split("/")):
        raise CallRefused(403, "path_forbidden", "This path is not allowed on the relay.")
    if not web.WebSocketResponse().can_prepare(request):
        raise CallRefused(400, "malformed", "Malformed WebSocket handshake.")
    return path


async def relay_messages(client: web.WebSocketResponse, upstream: aiohttp.ClientWebSocketResponse, result: ByteCounts) -> None:
    """Forward messages in both directions until either side closes, then close both. Count bytes into `result`."""

    async def forward(source: Any, sink: Any, count: Callable[[int], None]) -> None:
        async for message in source:
            if message.type == WSMsgType.TEXT:
                await sink.send_str(message.data)
            elif message.type == WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            else:
                break
            count(len(message.data))

    def count_received(size: int) -> None:
        result.received_bytes += size

    def count_sent(size: int) -> None:
        result.sent_bytes = (result.sent_bytes or 0) + size

    directions: list[Coroutine[Any, Any, None]] = [
        forward(upstream, client, count_received),
        forward(client, upstream, count_sent),
    ]
    tasks = [asyncio.create_task(direction) for direction in directions]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (error := task.exception()) and not isinstance(error, ConnectionResetError):
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(ConnectionResetError, RuntimeError):
            await client.close(code=upstream.close_code or 1000)
