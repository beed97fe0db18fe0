"""The end of the way out: who it is, what may leave, with whose key, and what is written down of it.

In front of it stands nginx, which speaks with sandboxes, lets only a few paths through, drops every header they sent and
says through which slot a request came. Keys are here alone. Where there is no container to put nginx in, this listens on
the slots itself."""

import asyncio
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import structlog
from aiohttp import WSMsgType, web
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, close_old_connections, connection
from django.utils import timezone

from sandboxes.egress import authorization, offline_model
from sandboxes.egress.amounts import parse_usd
from sandboxes.egress.authorization import CallerIdentity, CallRefused, CallResult
from sandboxes.egress.redaction import SecretRedactor
from sandboxes.egress.request_filter import FIELDS_BY_PATH, MODELS_PATH, InvalidRequest, build_error_body, sanitize_request
from sandboxes.egress.token_usage import UsageReader
from sandboxes.errors import SandboxError, SigningKeyNotFound, SigningKeyRevoked
from sandboxes.identity import signing
from sandboxes.models import LlmCall

log = structlog.get_logger(__name__)
T = TypeVar("T")
SLOT_HEADER, CALL_ID_HEADER, CODE_HEADER = (
    "X-Leasehold-Slot",
    "X-Request-Id",
    "X-Leasehold-Code",
)  # headers between nginx and here
UNCHECKED_BODY_BYTES = 4 << 20  # bytes that are read before anybody is asked whether they may be sent
MAX_MESSAGE_BYTES = 4 << 20  # bytes, to and from the relay
MAX_ERROR_BYTES = 16 << 10  # bytes of an upstream's error that are passed on
HOLDER_CHECK_INTERVAL_SECONDS = (
    1.0  # seconds between two looks at whether those who are being served still hold their sandboxes
)
RELAY_HEARTBEAT_INTERVAL_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS = (
    10.0,
    300.0,
)  # seconds until an upstream is there, and between two bytes of its answer
CONNECTION_CHECK_INTERVAL_SECONDS = 1.0  # seconds for which a connection to the database that worked is taken to work
MAX_DATABASE_THREADS = 8
RELAY_PATH_PATTERN = re.compile(r"[A-Za-z0-9._~:/-]*")  # decoded: what is left of an escape would be decoded again on its way
OUTCOME = LlmCall.Outcome
SLOT_KEY: web.AppKey[int | None] = web.AppKey("slot")


class ClientDisconnected(Exception):
    """The sandbox does not take the rest of its answer."""


@dataclass
class ActiveCall:
    """A call that is under way."""

    row: LlmCall
    caller: CallerIdentity
    task: asyncio.Task[Any] | None
    has_lease_ended: bool = False


@dataclass
class EgressServer:
    """One process's server. `now` is the clock of what is written down."""

    now: Callable[[], datetime] = timezone.now
    served: dict[int, ActiveCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checked = threading.local()  # when each thread last made sure of its connection
        self.threads = ThreadPoolExecutor(MAX_DATABASE_THREADS, thread_name_prefix="egress")

    # --- being there --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def listening(self, sockets: dict[Path, int | None]) -> AsyncIterator[None]:
        """Serve on these unix sockets while the block runs: one whose slot is None is nginx's, which says the slot."""
        timeout = aiohttp.ClientTimeout(
            total=settings.LLM_TIMEOUT.total_seconds(), sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=READ_TIMEOUT_SECONDS
        )
        runners: list[web.AppRunner] = []
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_redirect)
        connector = aiohttp.TCPConnector(limit=0)  # how many calls there are at once is for the gate to say
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=True, trust_env=False, trace_configs=[tracing]
        ) as self.session:
            watch = asyncio.create_task(self._watch_leases())
            try:
                for path, slot in sockets.items():
                    runners.append(await self._listen(path, slot))
                yield
            finally:
                watch.cancel()
                for each in [*self.served.values()]:
                    if each.task:
                        each.task.cancel()
                for runner in runners:
                    await runner.cleanup()
                for path in sockets:
                    path.unlink(missing_ok=True)
                await asyncio.to_thread(self.threads.shutdown)

    async def _listen(self, path: Path, slot: int | None) -> web.AppRunner:
        app = web.Application()
        app[SLOT_KEY] = slot
        app.router.add_get("/healthz", self._health)
        app.router.add_get(MODELS_PATH, self._shown(self._handle_models))
        app.router.add_get("/relay/{path:.*}", self._shown(self._handle_relay))
        for name in FIELDS_BY_PATH:
            app.router.add_post(name, self._shown(self._handle_model_call))
        app.router.add_route("*", "/{path:.*}", self._shown(self._reject_path))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0, keepalive_timeout=75.0)
        await runner.setup()
        await web.SockSite(runner, bind_unix_socket(path), backlog=512).start()
        return runner

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    def _shown(self, act: Callable[[web.Request, int, str], Awaitable[web.StreamResponse]]) -> Any:
        """A handler that knows slot and call id, and answers whatever is refused in words that SDKs show."""

        async def handler(request: web.Request) -> web.StreamResponse:
            given = request.app[SLOT_KEY]
            slot = int(request.headers[SLOT_HEADER]) if given is None else given
            call_id = request.headers[CALL_ID_HEADER] if given is None else uuid.uuid4().hex
            try:
                return await act(request, slot, call_id)
            except CallRefused as refused:
                return build_error_response(refused.status, refused.code, refused.message)
            except ClientDisconnected:
                request.protocol.force_close()
                return web.Response(status=499)  # nobody reads it
            except SandboxError as failed:
                return build_error_response(403 if isinstance(failed, SigningKeyRevoked) else 503, failed.code, str(failed))
            except DatabaseError as failed:
                log.error("call not recorded", error=str(failed))
                return build_error_response(
                    503, "not_recorded", "This call could not be recorded, so it was not made. Try again."
                )

        return handler

    async def _reject_path(self, request: web.Request, slot: int, call_id: str) -> web.Response:
        return build_error_response(403, "path_forbidden", "Only model calls, and the relay, leave this sandbox.")

    async def _handle_models(self, request: web.Request, slot: int, call_id: str) -> web.Response:
        await self._run_in_thread(authorization.identify_caller, slot, now=self.now())
        names = [name for name in (settings.LLM_MODEL, *settings.LLM_MODELS) if "*" not in name]
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "leasehold"} for name in dict.fromkeys(names)]
        return web.json_response({"object": "list", "data": listed})

    async def _run_in_thread(self, act: Callable[..., T], *args: Any, **named: Any) -> T:
        """Something that asks the database. It is finished also if whoever waits for it goes away."""

        def run() -> T:
            if time.monotonic() - getattr(self.checked, "at", 0.0) > CONNECTION_CHECK_INTERVAL_SECONDS:
                close_old_connections()
                self.checked.at = time.monotonic()
            try:
                return act(*args, **named)
            except (OperationalError, InterfaceError):
                close_old_connections()
                if connection.connection is not None:  # it lives: something else is wrong
                    raise
                return act(*args, **named)  # it was lost; what was done before that is there once, by the call's id

        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self.threads, run))

    # --- a model call ---------------------------------------------------------------------------------------------------

    async def _handle_model_call(self, request: web.Request, slot: int, call_id: str) -> web.StreamResponse:
        path = request.path
        content = await self._content(request, slot)
        try:
            asked = sanitize_request(path, json.loads(content), default_model=settings.LLM_MODEL)
        except InvalidRequest as unfit:
            raise CallRefused(400, unfit.code, unfit.message) from None
        except (ValueError, RecursionError):
            raise CallRefused(400, "invalid_request", "The body is no JSON.") from None
        streamed = asked.get("stream") is True
        hidden = streamed and path in ("/v1/chat/completions", "/v1/completions") and not _wants_usage(asked)
        if hidden:
            asked["stream_options"] = {"include_usage": True}
        opening = asyncio.create_task(
            self._run_in_thread(
                authorization.open_model_call,
                slot,
                call_id,
                path,
                asked["model"],
                streamed=streamed,
                size=len(content),
                now=self.now(),
            )
        )
        try:
            row, caller = await asyncio.shield(opening)
        except asyncio.CancelledError:  # whoever called is gone while its row is being written: that is closed at once
            async with self._track_call(*await opening):
                raise
        async with self._track_call(row, caller) as end:
            if not settings.LLM_URL:
                return await self._answer_offline(request, asked, end)
            return await self._forward_to_upstream(request, asked, row, caller, end, hidden=hidden)

    async def _content(self, request: web.Request, slot: int) -> bytes:
        """A request's body; Refused if it is larger than the sandbox's policy lets it be."""
        most, content = UNCHECKED_BODY_BYTES, bytearray()
        if request.content_length is None or request.content_length > most:
            most = await self._run_in_thread(authorization.find_max_body_bytes, slot, now=self.now())
        if (request.content_length or 0) <= most:
            async for chunk in request.content.iter_chunked(1 << 16):
                content += chunk
                if len(content) > most:
                    break
            else:
                return bytes(content)
        raise CallRefused(413, "too_large", f"A request has at most {most >> 10} KiB.")

    @asynccontextmanager
    async def _track_call(self, row: LlmCall, caller: CallerIdentity) -> AsyncIterator[CallResult]:
        """While a call is under way. However that ends, its row is closed with what is known then."""
        end, entry = CallResult(OUTCOME.CUT), ActiveCall(row, caller, asyncio.current_task())
        self.served[row.pk] = entry
        try:
            yield end
        except (ClientDisconnected, asyncio.CancelledError):
            if end.outcome != OUTCOME.OK:
                end.outcome = OUTCOME.CUT
                end.code = "lease_ended" if entry.has_lease_ended else end.code or "not_read_to_its_end"
            raise
        except Exception as failed:
            end.outcome, end.code = OUTCOME.FAILED, end.code or type(failed).__name__[:64]
            raise
        finally:
            del self.served[row.pk]
            try:
                await self._run_in_thread(authorization.settle_call, row, end, now=self.now())
            except DatabaseError as failed:  # the row stays open: past its deadline a sweep closes it, by what the logs say
                log.error("end of a call not recorded", call=row.call_id, error=str(failed))

    async def _answer_offline(self, request: web.Request, asked: dict[str, Any], end: CallResult) -> web.StreamResponse:
        if request.path != "/v1/chat/completions":
            end.outcome, end.status, end.code = OUTCOME.FAILED, 501, "offline"
            return build_error_response(
                501, "offline", "The offline policy answers chat completions alone. LEASEHOLD_LLM_URL is not set."
            )
        answer = offline_model.complete_chat(asked)
        reader = UsageReader("application/json")
        reader.usage.take(answer)
        end.outcome, end.status, end.usage, end.cost = OUTCOME.OK, 200, reader.usage, Decimal(0)
        end.first_byte_at = self.now()
        if asked.get("stream"):
            return await _stream_events(request, offline_model.build_stream_events(answer))
        return web.json_response(answer)

    async def _forward_to_upstream(
        self,
        request: web.Request,
        asked: dict[str, Any],
        row: LlmCall,
        caller: CallerIdentity,
        end: CallResult,
        *,
        hidden: bool,
    ) -> web.StreamResponse:
        url = settings.LLM_URL.rstrip("/") + request.path.removeprefix("/v1")
        try:
            async with self.session.post(
                url, json=asked, headers=_build_upstream_headers(request, row, caller), allow_redirects=False
            ) as answer:
                end.status, end.first_byte_at = answer.status, self.now()
                end.cost = parse_usd(answer.headers.get("x-litellm-response-cost"))
                if answer.status >= 300:
                    return await self._failed(answer, end)
                entry = self.served[row.pk]
                return await self._stream_answer(request, answer, end, entry, UsageReader(answer.content_type, hidden=hidden))
        except TimeoutError:
            end.outcome, end.status, end.code = OUTCOME.FAILED, 504, "upstream_timeout"
            return self._report_upstream_failure(request, end, 504, "The model did not answer in time.")
        except (aiohttp.ClientError, OSError) as failed:
            log.warning("model did not answer", error=type(failed).__name__, call=row.call_id)
            end.outcome, end.status, end.code = OUTCOME.FAILED, 502, "upstream_failed"
            return self._report_upstream_failure(request, end, 502, "The model cannot be reached, or broke off.")

    def _report_upstream_failure(self, request: web.Request, end: CallResult, status: int, said: str) -> web.Response:
        """The answer, unless one has begun: that is broken off, so that nobody takes a part for the whole."""
        if end.received_bytes:
            request.protocol.force_close()
            raise ClientDisconnected
        return build_error_response(status, end.code, said)

    async def _failed(self, answer: aiohttp.ClientResponse, end: CallResult) -> web.Response:
        """What a sandbox is told of an upstream's error: nothing that is about our credentials, or from its inside."""
        end.outcome = OUTCOME.FAILED
        said = await _read_beginning(answer, MAX_ERROR_BYTES + len(settings.LLM_API_KEY))
        passed = {name: answer.headers[name] for name in ("Content-Type", "Retry-After") if name in answer.headers}
        quoted = _has_secret(said) or _has_secret(" ".join(passed.values()).encode())
        if answer.status in (400, 404, 413, 422, 429) and not quoted:
            end.code = f"upstream_{answer.status}"
            return web.Response(status=answer.status, body=said[:MAX_ERROR_BYTES], headers=passed)
        log.warning("upstream refused a call", status=answer.status, said=_redact(said)[:500])
        end.code = f"upstream_{answer.status}"
        if answer.status in (401, 403, 407):
            return build_error_response(502, end.code, "The model's provider does not accept the control plane's credentials.")
        return build_error_response(502, end.code, f"The model's provider answered {answer.status}.")

    async def _stream_answer(
        self, request: web.Request, answer: aiohttp.ClientResponse, end: CallResult, entry: ActiveCall, reader: UsageReader
    ) -> web.StreamResponse:
        """Pass an answer on as it comes, and read what it says of tokens. Where money is limited, an answer in one piece
        waits until its price is written down, and the end of a stream: so the next call finds it."""
        censor = SecretRedactor(settings.LLM_API_KEY)
        kind = answer.headers.get("Content-Type", "application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json" if _has_secret(kind.encode()) else kind})
        if not reader.streamed and answer.content_length is not None and "Content-Encoding" not in answer.headers:
            response.content_length = answer.content_length
        end.usage = reader.usage
        await _await_write(response.prepare(request))
        held = b""
        async for chunk in answer.content.iter_any():
            passed = reader.feed(censor.feed(chunk))
            end.received_bytes += len(passed)
            if reader.complete:
                end.outcome = OUTCOME.OK
            if not reader.streamed:
                held, passed = passed, held  # one behind
            if passed:
                await _await_write(response.write(passed))
        rest = reader.feed(censor.end()) + reader.end()
        end.received_bytes += len(rest)
        end.outcome = OUTCOME.OK  # all of it is here; what the sandbox makes of it is its own affair
        if entry.caller.sandbox.llm_limit is not None:
            await self._run_in_thread(authorization.settle_call, entry.row, end, now=self.now())
        await _await_write(response.write(held + rest))
        await _await_write(response.write_eof())
        return response

    # --- the relay ------------------------------------------------------------------------------------------------------

    async def _handle_relay(self, request: web.Request, slot: int, call_id: str) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise CallRefused(426, "websocket_expected", "The relay is a WebSocket.")
        path = request.match_info["path"]
        if not RELAY_PATH_PATTERN.fullmatch(path) or not {".", ".."}.isdisjoint(path.split("/")):
            raise CallRefused(403, "path_forbidden", "No such path leads to the relay.")
        if not web.WebSocketResponse().can_prepare(request):
            raise CallRefused(400, "malformed", "This is no WebSocket handshake that is understood here.")
        row, caller = await self._run_in_thread(authorization.open_relay_call, slot, call_id, request.path, now=self.now())
        async with self._track_call(row, caller) as end:
            try:
                headers = await self._run_in_thread(build_relay_headers, row, caller, now=self.now())
                url = f"{settings.RELAY_URL.rstrip('/')}/{path}"
                upstream = self.session.ws_connect(
                    url, params=request.query, headers=headers, heartbeat=30.0, max_msg_size=MAX_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=5.0),
                )  # fmt: skip
                async with upstream as theirs:
                    end.status, end.first_byte_at = 101, self.now()
                    ours = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, autoping=True, heartbeat=30.0)
                    await _await_write(ours.prepare(request))
                    await _relay_messages(ours, theirs, end)
                    end.outcome = OUTCOME.OK
                    return ours
            except (aiohttp.ClientError, OSError, TimeoutError) as failed:
                log.warning("relay did not answer", error=type(failed).__name__)
                end.outcome, end.status, end.code = OUTCOME.FAILED, 502, "relay_failed"
                return build_error_response(502, "relay_failed", "The relay cannot be reached.")

    # --- whose lease ends -----------------------------------------------------------------------------------------------

    async def _watch_leases(self) -> None:
        """Cut off those whose lease has ended, or whose sandbox was given to somebody else; keep the others' rows open."""
        kept_at = time.monotonic()
        while True:
            await asyncio.sleep(HOLDER_CHECK_INTERVAL_SECONDS)
            with suppress(DatabaseError):  # asked again in a second; what is under way goes on meanwhile
                await self._look()
                if time.monotonic() - kept_at > RELAY_HEARTBEAT_INTERVAL_SECONDS:
                    kept_at = time.monotonic()
                    relays = [pk for pk, each in self.served.items() if each.row.kind == LlmCall.Kind.RELAY]
                    await self._run_in_thread(authorization.extend_relay_deadlines, relays, now=self.now())

    async def _look(self) -> None:
        under_way = [*self.served.values()]
        if not under_way:
            return
        still = await self._run_in_thread(
            authorization.filter_held, {(each.caller.sandbox.pk, each.caller.holder) for each in under_way}
        )
        for each in under_way:
            if (each.caller.sandbox.pk, each.caller.holder) not in still and each.task:
                each.has_lease_ended = True
                each.task.cancel()


def bind_unix_socket(path: Path) -> socket.socket:
    """A unix socket that listens at this path, in the place of whatever was there, for every user that comes near it."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    path.chmod(0o666)
    return bound


async def _refuse_redirect(session: aiohttp.ClientSession, context: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    """Follow nobody: a sandbox says where on the relay it wants to go, and we go there for it."""
    redirect.response.close()
    raise aiohttp.ClientError("sent elsewhere")


async def _await_write(writing: Awaitable[Any]) -> None:
    try:
        await writing
    except ConnectionResetError:
        raise ClientDisconnected from None


def build_error_response(status: int, code: str, message: str) -> web.Response:
    headers = {CODE_HEADER: code} | ({"Retry-After": "1"} if status in (429, 503) else {})
    return web.json_response(build_error_body(code, message), status=status, headers=headers)


def build_relay_headers(row: LlmCall, caller: CallerIdentity, *, now: datetime) -> dict[str, str]:
    """What the relay is told of who connects: an agent that has a signing key speaks with a token of its own."""
    headers = {"x-leasehold-agent": row.agent_did, "x-leasehold-call-id": row.call_id}
    if settings.RELAY_AUD:
        with suppress(SigningKeyNotFound):  # then it connects as anybody might
            token = signing.create_service_token(
                row.agent_did, aud=settings.RELAY_AUD, lxm=settings.RELAY_LXM, now=now, holder=caller.holder, actor="relay",
                fence=partial(authorization.lock_holder, caller),
            )  # fmt: skip
            headers["Authorization"] = f"Bearer {token}"
    return headers


def _build_upstream_headers(request: web.Request, row: LlmCall, caller: CallerIdentity) -> dict[str, str]:
    """What the upstream is told: our key, and who it is for, in LiteLLM's headers. Of the sandbox's own, its dialect."""
    headers = {
        "x-litellm-call-id": row.call_id,
        "x-litellm-end-user-id": row.agent_did,
        "x-litellm-spend-logs-metadata": caller.metadata(row.call_id),
        "Accept-Encoding": "identity",
    }
    if settings.LLM_API_KEY:
        headers["Authorization"] = f"Bearer {settings.LLM_API_KEY}"
    if request.path.startswith("/v1/messages"):
        headers["anthropic-version"] = request.headers.get("anthropic-version", "2023-06-01")[:32]
        if settings.LLM_API_KEY:
            headers["x-api-key"] = settings.LLM_API_KEY
    return headers


async def _read_beginning(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The first bytes of an answer, in whatever pieces it comes."""
    said = b""
    while len(said) < most and (piece := await answer.content.read(most - len(said))):
        said += piece
    return said


def _wants_usage(asked: dict[str, Any]) -> bool:
    options = asked.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _has_secret(said: bytes) -> bool:
    return bool(settings.LLM_API_KEY) and settings.LLM_API_KEY.encode() in said


def _redact(said: bytes) -> str:
    text = said.decode("utf-8", "replace")
    return text.replace(settings.LLM_API_KEY, "********") if settings.LLM_API_KEY else text


async def _stream_events(request: web.Request, events: list[Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
    await response.write_eof()
    return response


async def _relay_messages(ours: web.WebSocketResponse, theirs: aiohttp.ClientWebSocketResponse, end: CallResult) -> None:
    """Pass messages on until one of the two is done; then both are closed."""

    async def pump(source: Any, sink: Any, count: Callable[[int], None]) -> None:
        async for message in source:
            if message.type == WSMsgType.TEXT:
                await sink.send_str(message.data)
            elif message.type == WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            else:
                break
            count(len(message.data))

    def received(size: int) -> None:
        end.received_bytes += size

    def sent(size: int) -> None:
        end.sent_bytes = (end.sent_bytes or 0) + size

    ways: list[Coroutine[Any, Any, None]] = [pump(theirs, ours, received), pump(ours, theirs, sent)]
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (failed := task.exception()) and not isinstance(failed, ConnectionResetError):
                raise failed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(ConnectionResetError, RuntimeError):
            await ours.close(code=theirs.close_code or 1000)
