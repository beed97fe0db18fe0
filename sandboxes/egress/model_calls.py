"""Forwarding of model calls to the upstream: sanitized request, control plane's credentials, redacted and metered response."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from django.conf import settings

from sandboxes.egress import authorization, offline_model, settlement
from sandboxes.egress.amounts import parse_usd
from sandboxes.egress.authorization import CallerIdentity
from sandboxes.egress.call_tracking import ANSWER_ERROR_CODE, STREAM_ERROR_CODE, STREAM_INCOMPLETE_CODE, CallTracker
from sandboxes.egress.estimates import FREE_PATHS, TokenEstimate, estimate_request
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.request_filter import DroppedFields, InvalidRequest, SanitizedRequest, filter_betas, sanitize_request
from sandboxes.egress.responses import (
    REMAINING_TOKENS_HEADER,
    REMAINING_USD_HEADER,
    ClientDisconnected,
    await_write,
    build_error_response,
)
from sandboxes.egress.settlement import CallResult
from sandboxes.egress.spending import Funds, format_amount
from sandboxes.egress.token_usage import UsageReader
from sandboxes.egress.upstream_answers import (
    DECODED_ENCODINGS,
    get_encoding,
    has_secret,
    is_decoding_error,
    select_headers,
    translate_error,
)
from sandboxes.models import LlmCall
from sandboxes.redaction.streams import SecretRedactor

log = structlog.get_logger(__name__)
OUTCOME = LlmCall.Outcome
UNCHECKED_BODY_BYTES = 4 << 20  # read before the policy's limit is known, which saves a query; the limit is checked afterwards
LARGE_BODY_BYTES = 256 << 10  # larger bodies are checked in a thread: megabytes of small objects take a second
STREAM_USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")  # their streams report usage only if the request asks for it
READ_ON_SECONDS = 5.0  # for which a response without a reader is read on, because its usage comes at its end


@dataclass
class ModelCallProxy:
    """Handler of the model paths in FIELDS_BY_PATH."""

    calls: CallTracker
    session: aiohttp.ClientSession
    dropped: DroppedFields = field(default_factory=DroppedFields)

    async def handle(self, request: web.Request, slot: int, call_id: str) -> web.StreamResponse:
        """Answer one model call. Raise CallRefused.

        1. Read and sanitize the body.
        2. Write the call's row, which checks lease, policy and limits.
        3. Forward to the upstream, or answer with the offline policy when no upstream is configured.
        4. Settle the row, also after an error or a disconnect."""
        path = request.path
        content = await self._read_body(request, slot)
        if len(content) > LARGE_BODY_BYTES:
            sanitized, estimate = await asyncio.to_thread(_parse_body, path, content)
        else:
            sanitized, estimate = _parse_body(path, content)
        self.dropped.add(path, sanitized)
        body = sanitized.body
        streamed = body.get("stream") is True
        hide_usage = streamed and path in STREAM_USAGE_PATHS and not _requests_usage(body)
        if hide_usage:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        opening = asyncio.create_task(
            self.calls.database.run(
                authorization.open_model_call,
                slot,
                call_id,
                path,
                body["model"],
                streamed=streamed,
                size=len(content),
                estimate=estimate,
                now=self.calls.now(),
            )
        )
        try:
            row, caller = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the client disconnected while the row was being written: settle the row
            async with self.calls.track(*await opening) as result:
                result.estimate, result.is_free = estimate, True  # nothing was sent
                raise
        async with self.calls.track(row, caller) as result:
            result.estimate, result.is_free = estimate, path in FREE_PATHS
            if not settings.LLM_URL:
                return await self._answer_offline(request, body, result)
            return await self._forward(request, body, row, caller, result, hide_usage=hide_usage)

    async def _read_body(self, request: web.Request, slot: int) -> bytes:
        """Read the request body. Raise CallRefused if the body exceeds the policy's limit."""
        limit, content = UNCHECKED_BODY_BYTES, bytearray()
        if request.content_length is None or request.content_length > limit:
            limit = await self.calls.database.run(authorization.find_max_body_bytes, slot, now=self.calls.now())
        if (request.content_length or 0) <= limit:
            async for chunk in request.content.iter_chunked(1 << 16):
                content += chunk
                if len(content) > limit:
                    break
            else:
                return bytes(content)
        raise authorization.build_too_large_refusal(limit >> 10)

    async def _answer_offline(self, request: web.Request, body: dict[str, Any], result: CallResult) -> web.StreamResponse:
        if request.path != "/v1/chat/completions":
            result.outcome, result.status, result.code, result.is_free = OUTCOME.FAILED, 501, "offline", True
            return build_error_response(
                501, "offline", "The offline policy answers chat completions only. Set LEASEHOLD_LLM_URL to call a model."
            )
        completion = offline_model.complete_chat(body)
        reader = UsageReader("application/json")
        reader.usage.add(completion)
        result.outcome, result.status, result.usage, result.cost = OUTCOME.OK, 200, reader.usage, Decimal(0)
        result.first_byte_at = self.calls.now()
        if body.get("stream"):
            return await _stream_events(request, offline_model.build_stream_events(completion))
        return web.json_response(completion)

    async def _forward(
        self,
        request: web.Request,
        body: dict[str, Any],
        row: LlmCall,
        caller: CallerIdentity,
        result: CallResult,
        *,
        hide_usage: bool,
    ) -> web.StreamResponse:
        url = settings.LLM_URL.rstrip("/") + request.path.removeprefix("/v1")
        if request.path.startswith("/v1/messages") and request.query.get("beta") == "true":
            url += "?beta=true"
        encoding = ""
        try:
            async with self.session.post(
                url, json=body, headers=_build_upstream_headers(request, row, caller), allow_redirects=False
            ) as response:
                result.status, result.first_byte_at = response.status, self.calls.now()
                stated = response.headers.get("x-litellm-response-cost")
                result.cost = parse_usd(stated)
                # LiteLLM writes the word None where its cost is unknown.
                result.has_refused_cost = stated not in (None, "", "None") and result.cost is None
                if response.status >= 300:
                    result.is_free = True
                    return await translate_error(response, result)
                encoding = get_encoding(response)
                if encoding not in DECODED_ENCODINGS:
                    return _report_undecoded(request, result, encoding)
                reader = UsageReader(response.content_type, hide_usage=hide_usage)
                return await self._stream_response(request, response, row, caller, result, reader)
        except TimeoutError:
            result.outcome, result.status, result.code = OUTCOME.FAILED, 504, "upstream_timeout"
            return _report_upstream_failure(request, result, 504, "The model did not answer in time.")
        except (aiohttp.ClientError, OSError) as error:
            log.warning("upstream call failed", error=type(error).__name__, call=row.call_id)
            result.is_free |= isinstance(error, aiohttp.ClientConnectorError)  # nothing was sent
            if is_decoding_error(error) and (result.status or 200) < 300:
                return _report_undecoded(request, result, encoding)
            result.outcome, result.status, result.code = OUTCOME.FAILED, 502, "upstream_failed"
            message = "The model is unreachable, or the connection broke."
            return _report_upstream_failure(request, result, 502, message)

    async def _stream_response(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        row: LlmCall,
        caller: CallerIdentity,
        result: CallResult,
        reader: UsageReader,
    ) -> web.StreamResponse:
        """Pass a response on as it arrives, redacted and metered.

        If a limit applies, the end of the response is written after the row is settled, so that the sandbox's next call
        is checked against the new total. A response that is not a stream is passed on one chunk late for this reason: its last
        chunk completes it for the sandbox. The usage at the start of a stream is written to the row when it arrives. If the
        sandbox leaves, the response is read on for READ_ON_SECONDS."""
        redactor = SecretRedactor(settings.LLM_API_KEY)
        content_type = upstream.headers.get("Content-Type", "application/json")
        if has_secret(content_type.encode()):
            content_type = "application/json"
        response = web.StreamResponse(headers=select_headers(upstream) | {"Content-Type": content_type})
        response.headers.update(_describe_funds(caller.funds))
        if not reader.streamed and upstream.content_length is not None and "Content-Encoding" not in upstream.headers:
            response.content_length = upstream.content_length
        result.usage = reader.usage
        withheld, is_usage_noted = b"", False
        try:
            async for chunk in upstream.content.iter_any():
                passed = reader.feed(redactor.feed(chunk))
                result.received_bytes += len(passed)
                _set_outcome(result, reader)
                is_usage_new = reader.streamed and not is_usage_noted and reader.usage.input_tokens is not None
                if is_usage_new and result.estimate and not reader.complete:
                    is_usage_noted = True
                    await self.calls.note_usage(row, reader.usage, result.estimate)
                if not reader.streamed:
                    withheld, passed = passed, withheld
                if passed:
                    await _write(request, response, passed)
        except ClientDisconnected:
            await _read_on(upstream, redactor, reader, is_cancellation_pending=True)
            raise
        except asyncio.CancelledError:
            if request.transport is None:  # the sandbox has left; otherwise its lease has ended, or the server stops
                await _read_on(upstream, redactor, reader, is_cancellation_pending=False)
            raise
        rest = reader.feed(redactor.end()) + reader.end()
        result.received_bytes += len(rest)
        _set_outcome(result, reader, is_end=True)  # a later disconnect of the sandbox does not change the outcome
        if caller.funds.has_limit:
            await self.calls.database.run(settlement.settle_call, row, result, now=self.calls.now())
        await _write(request, response, withheld + rest)
        await await_write(response.write_eof())
        return response


def _describe_funds(funds: Funds) -> dict[str, str]:
    amounts = {REMAINING_USD_HEADER: funds.remaining_usd, REMAINING_TOKENS_HEADER: funds.remaining_tokens}
    return {name: format_amount(amount) for name, amount in amounts.items() if amount is not None}


async def _write(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    """Write a part of a response, with its headers before the first part.

    Before, an upstream that fails can still be reported by a status. Raise ClientDisconnected."""
    if not response.prepared:
        await await_write(response.prepare(request))
    await await_write(response.write(content))


def _set_outcome(result: CallResult, reader: UsageReader, *, is_end: bool = False) -> None:
    """Derive the outcome from the part of a response that was read."""
    if reader.has_failed:
        result.outcome, result.code = OUTCOME.FAILED, STREAM_ERROR_CODE if reader.streamed else ANSWER_ERROR_CODE
    elif reader.complete or (is_end and not reader.is_incomplete):
        result.outcome = OUTCOME.OK
    elif is_end:
        result.outcome, result.code = OUTCOME.FAILED, STREAM_INCOMPLETE_CODE


async def _read_on(
    upstream: aiohttp.ClientResponse, redactor: SecretRedactor, reader: UsageReader, *, is_cancellation_pending: bool
) -> None:
    """Read a response without a reader until its usage is known, for at most READ_ON_SECONDS. Errors end the reading.

    The handler of a connection that breaks is cancelled once; `is_cancellation_pending` if that is still to come. Any other
    cancellation, by the end of the lease or of the server, ends the reading at once."""
    deadline = asyncio.get_running_loop().time() + READ_ON_SECONDS
    while True:
        try:
            with suppress(TimeoutError, aiohttp.ClientError, OSError):  # the call is closed with the usage so far
                async with asyncio.timeout_at(deadline):
                    await _read_until_usage(upstream, redactor, reader)
            return
        except asyncio.CancelledError:
            if not is_cancellation_pending:
                raise
            is_cancellation_pending = False


async def _read_until_usage(upstream: aiohttp.ClientResponse, redactor: SecretRedactor, reader: UsageReader) -> None:
    while not (reader.usage.is_final or reader.complete or reader.has_failed):
        if not (chunk := await upstream.content.readany()):
            reader.feed(redactor.end())
            reader.end()
            return
        reader.feed(redactor.feed(chunk))


def _parse_body(path: str, content: bytes) -> tuple[SanitizedRequest, TokenEstimate]:
    try:
        sanitized = sanitize_request(path, json.loads(content), default_model=settings.LLM_MODEL)
        return sanitized, estimate_request(path, sanitized.body, len(content))
    except InvalidRequest as error:
        raise CallRefused(400, error.code, error.message) from None
    except (ValueError, RecursionError):
        raise CallRefused(400, "invalid_request", "The body is not valid JSON.") from None


def _requests_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _build_upstream_headers(request: web.Request, row: LlmCall, caller: CallerIdentity) -> dict[str, str]:
    """Build the headers with credentials and LiteLLM's identity.

    Only `anthropic-version` and allowed features of `anthropic-beta` come from the sandbox's request."""
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
        if betas := filter_betas(request.headers.get("anthropic-beta", "")):
            headers["anthropic-beta"] = betas
        if settings.LLM_API_KEY:
            headers["x-api-key"] = settings.LLM_API_KEY
    return headers


def _report_upstream_failure(request: web.Request, result: CallResult, status: int, message: str) -> web.Response:
    """Build an error response. If a response has begun, close the connection, so that its beginning does not seem complete."""
    if result.received_bytes:
        request.protocol.force_close()
        raise ClientDisconnected
    return build_error_response(status, result.code, message)


def _report_undecoded(request: web.Request, result: CallResult, encoding: str) -> web.Response:
    """Build the response to an answer that cannot be decoded. The upstream has charged for it, so SDKs must not repeat it."""
    result.outcome, result.status, result.code = OUTCOME.CUT, 502, "answer_not_decoded"
    kind = f"the content encoding {encoding[:40]!r}" if encoding else "a content encoding"
    message = (
        f"The upstream answered in {kind}, which could not be decoded. Do not repeat the call: it was answered and charged."
    )
    answer = _report_upstream_failure(request, result, 502, message)
    answer.headers["x-should-retry"] = "false"
    return answer


async def _stream_events(request: web.Request, events: list[Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
    await response.write_eof()
    return response
