"""The way out of a sandbox: its only contact with a model is a unix socket, open while one of its turns is played.

Whoever connects is known by the socket, so nothing it says about itself counts: one path is served, its headers are
dropped, the model and the credentials are ours, and no key ever enters the sandbox."""

import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import requests
import structlog
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections

from sandboxes.egress import offline
from sandboxes.egress.usage import Usage
from sandboxes.models import LlmCall, Sandbox
from sandboxes.moments import Later

log = structlog.get_logger(__name__)
PATH = "/v1/chat/completions"
LARGEST_BODY = 4 << 20  # bytes
MOST_CALLS = 64  # in one turn
AT_ONCE = 4
GRACE = timedelta(seconds=30)  # past its patience, the time to write down how a call ended
NANO, MOST_COST = Decimal("1e-9"), Decimal(10**9)  # USD
FIELDS = ("messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "tools", "tool_choice",
          "response_format", "seed")  # fmt: skip  # what of a request is passed on


@dataclass(frozen=True)
class Caller:
    """On whose behalf whatever comes through a door is sent, and what its calls are recorded under."""

    sandbox: Sandbox
    run: uuid.UUID
    later: Later


@dataclass(frozen=True)
class Answer:
    """What the sandbox is answered, and what the upstream said that it cost in USD."""

    status: int
    body: dict[str, Any]
    cost: Decimal | None = None


@contextmanager
def door(path: Path, caller: Caller, *, patience: timedelta) -> Iterator[None]:
    """Serve chat completions on a unix socket at `path` while the block runs. A model gets `patience` to answer."""
    path.unlink(missing_ok=True)
    server = _Door(str(path), _Handler)
    server.patience, server.caller = patience.total_seconds(), caller
    os.chmod(path, 0o666)  # noqa: S103 - its directory is mounted into one sandbox, whose user is not ours
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        path.unlink(missing_ok=True)


def call(caller: Caller, body: dict[str, Any], *, patience: float) -> Answer:
    """One chat completion for a sandbox, recorded: its row is there before anything is sent, and is closed with what came
    back. If this process dies in between, the row stays open past its deadline, and a sweep closes it as lost."""
    began, box = caller.later(), caller.sandbox
    row = LlmCall.objects.create(
        call_id=uuid.uuid4().hex,
        sandbox=box,
        holder=box.holder,
        agent_did=box.agent_did,
        environment_id=box.environment_id,
        run_id=caller.run,
        model=settings.LLM_MODEL[:200],
        started_at=began,
        deadline_at=began + timedelta(seconds=patience) + GRACE,
    )
    answer = complete(body, patience=patience, headers=_identity(row))
    usage = Usage(model=row.model)
    usage.take(answer.body)
    done = answer.status < HTTPStatus.BAD_REQUEST
    LlmCall.objects.filter(pk=row.pk, ended_at__isnull=True).update(
        ended_at=caller.later(),
        outcome=LlmCall.Outcome.OK if done else LlmCall.Outcome.FAILED,
        status=answer.status,
        model=usage.model,
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        cost=answer.cost,
        priced=LlmCall.Priced.NO if answer.cost is None else LlmCall.Priced.UPSTREAM,
    )
    return answer


def _identity(row: LlmCall) -> dict[str, str]:
    """What the upstream is told about a call, in LiteLLM's headers: its own log can then be joined with our rows."""
    metadata = {
        "call": row.call_id, "lease": str(row.holder), "agent": row.agent_did, "environment": row.environment_id,
        "run": str(row.run_id),
    }  # fmt: skip
    return {
        "x-litellm-call-id": row.call_id,
        "x-litellm-end-user-id": row.agent_did,
        "x-litellm-spend-logs-metadata": json.dumps(metadata),
    }


def complete(body: dict[str, Any], *, patience: float, headers: dict[str, str]) -> Answer:
    """One chat completion from the configured model, or from the offline policy, which costs nothing."""
    asked = {key: body[key] for key in FIELDS if key in body} | {"model": settings.LLM_MODEL}
    if not settings.LLM_URL:
        return Answer(HTTPStatus.OK, offline.complete(asked), Decimal(0))
    key = {"Authorization": f"Bearer {settings.LLM_API_KEY}"} if settings.LLM_API_KEY else {}
    try:
        answer = requests.post(
            f"{settings.LLM_URL.rstrip('/')}/chat/completions",
            json=asked,
            headers=headers | key,
            timeout=patience,
            allow_redirects=False,
        )
        return Answer(answer.status_code, answer.json(), _cost(answer.headers.get("x-litellm-response-cost")))
    except (requests.RequestException, ValueError) as failed:
        log.warning("model did not answer", error=type(failed).__name__)
        said = f"The model did not answer: {type(failed).__name__}"
        return Answer(HTTPStatus.BAD_GATEWAY, {"error": {"message": said}})


def _cost(said: str | None) -> Decimal | None:
    """What the upstream says that a call cost; None if it says nothing that is an amount."""
    try:
        cost = Decimal(said or "").quantize(NANO)
    except InvalidOperation:
        return None
    return cost if cost.is_finite() and 0 <= cost < MOST_COST else None


class _Door(ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # a sandbox that keeps its connection open must not keep us
    patience = 60.0
    caller: Caller

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls = 0
        self.slots = threading.BoundedSemaphore(AT_ONCE)


class _Handler(BaseHTTPRequestHandler):
    server: _Door
    timeout = 30  # seconds without a byte from the sandbox

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != PATH:
            return self._answer(HTTPStatus.FORBIDDEN, _error("Only chat completions leave this sandbox."))
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            return self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _error(f"At most {LARGEST_BODY} bytes, announced."))
        self.server.calls += 1
        if self.server.calls > MOST_CALLS:
            return self._answer(HTTPStatus.TOO_MANY_REQUESTS, _error(f"At most {MOST_CALLS} calls a turn."))
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return self._answer(HTTPStatus.BAD_REQUEST, _error("A JSON object with messages is expected."))
        try:
            with self.server.slots:
                answer = call(self.server.caller, body, patience=self.server.patience)
        except DatabaseError as failed:
            log.error("model call not recorded", error=str(failed))
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, _error("This call could not be recorded. Try again."))
        return self._answer(answer.status, answer.body)

    def finish(self) -> None:
        super().finish()
        connections.close_all()  # of this thread, which ends with the connection

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self) -> str:
        return "sandbox"

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}
