"""The way out of a sandbox: its only contact with a model is a unix socket, open while one of its turns is played.

Whoever connects is known by the socket, so nothing it says about itself counts: one path is served, its headers are
dropped, the model and the credentials are ours, and no key ever enters the sandbox."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import requests
import structlog
from django.conf import settings

from sandboxes import offline

log = structlog.get_logger(__name__)
PATH = "/v1/chat/completions"
LARGEST_BODY = 4 << 20  # bytes
MOST_CALLS = 64  # in one turn
AT_ONCE = 4
FIELDS = ("messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "tools", "tool_choice",
          "response_format", "seed")  # fmt: skip  # what of a request is passed on


@contextmanager
def door(path: Path, *, patience: timedelta) -> Iterator[None]:
    """Serve chat completions on a unix socket at `path` while the block runs. A model gets `patience` to answer."""
    path.unlink(missing_ok=True)
    server = _Door(str(path), _Handler)
    server.patience = patience.total_seconds()
    os.chmod(path, 0o666)  # noqa: S103 - its directory is mounted into one sandbox, whose user is not ours
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        path.unlink(missing_ok=True)


def complete(body: dict[str, Any], *, patience: float) -> tuple[int, dict[str, Any]]:
    """One chat completion: status and body, from the configured model or from the offline policy."""
    asked = {key: body[key] for key in FIELDS if key in body} | {"model": settings.LLM_MODEL}
    if not settings.LLM_URL:
        return HTTPStatus.OK, offline.complete(asked)
    try:
        answer = requests.post(
            f"{settings.LLM_URL.rstrip('/')}/chat/completions",
            json=asked,
            headers={"Authorization": f"Bearer {settings.LLM_API_KEY}"} if settings.LLM_API_KEY else {},
            timeout=patience,
            allow_redirects=False,
        )
        return answer.status_code, answer.json()
    except (requests.RequestException, ValueError) as failed:
        log.warning("model did not answer", error=type(failed).__name__)
        return HTTPStatus.BAD_GATEWAY, {"error": {"message": f"The model did not answer: {type(failed).__name__}"}}


class _Door(ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # a sandbox that keeps its connection open must not keep us
    patience = 60.0

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
        with self.server.slots:
            status, answer = complete(body, patience=self.server.patience)
        return self._answer(status, answer)

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
