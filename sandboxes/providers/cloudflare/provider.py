"""Cloudflare provider: sandboxes of the bridge worker (`cloudflare-sandbox-bridge`) that an operator deploys, over HTTP.

The bridge starts a container for any request with a well-formed id, known or not, and a container that slept or was lost is
silently replaced by an empty one under the same id. Existence is therefore decided by the runner: a container without the files
that were uploaded at creation is not the sandbox, and is deleted again. The id is derived from the name. The bridge has no
list, labels or lifetimes; image and idle time are constants of the worker.

Output of an exec is text inside, files can be written below /workspace only, and a write is limited to 32 MiB as base64. The
runner and `max_upload_bytes` provide for all of that. No exec has a session, because the bridge drops timeouts in sessions."""

import base64
import hashlib
import json
import math
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import requests
from django.conf import settings

from sandboxes.answer_limits import limit_session
from sandboxes.providers.answer_guard import guard_answers, translate_answer
from sandboxes.providers.base import ProviderSandbox, SandboxSpec
from sandboxes.providers.errors import FailureCause, Missing, NoCapacity, Unavailable
from sandboxes.providers.remote.configuration import RemoteConfiguration
from sandboxes.providers.remote.errors import (
    ErrorForm,
    NotFound,
    raise_for_answer,
    raise_for_transport,
    read_retry_after,
)
from sandboxes.providers.remote.labels import require_owner
from sandboxes.providers.remote.lifecycle import Pause
from sandboxes.providers.remote.provider import TRANSIENT_CAUSES, RemoteProvider
from sandboxes.redaction.texts import quote_answer

CALL_TIMEOUT_SECONDS = 130.0  # a cold start may wait 30 s for an instance and 90 s for its port
UPLOAD_TIMEOUT_SECONDS = 300.0
CONNECT_TIMEOUT_SECONDS = 10.0
OWNER_FILE = "owner.json"  # in the tool directory: name, owner and time of creation
NO_OWNER = "leasehold: no owner"
MAX_ANSWER_BYTES = 64 << 20
CAPACITY_EXCEEDED = "(capacity_exceeded)"  # code of a pool without a free place
MAX_OUTPUT_BYTES = 8 << 20  # of one exec, of which a response of the runner is a part


@guard_answers
class CloudflareProvider(RemoteProvider):
    """Provider for one bridge: CLOUDFLARE_SANDBOX_URL, CLOUDFLARE_SANDBOX_API_KEY."""

    name = "cloudflare"
    no_builds_reason = "Its image is part of the deployment of the worker: change the worker's Dockerfile, and deploy it."
    can_list = stop_keeps_files = False
    can_set_size = False  # the instance type is a constant of the worker
    upload_directory = "/workspace"
    max_upload_bytes = 16 << 20

    @property
    def _session(self) -> requests.Session:
        return self._get_clients(lambda: _create_session(self.configuration))

    # Lifecycle

    def create(self, spec: SandboxSpec) -> str:
        deadline = time.monotonic() + settings.SANDBOX_START_TIMEOUT.total_seconds()
        self._wait_running(spec.name, deadline)
        try:
            owner = self._look_up(spec.name)
        except NotFound:
            self._set_up(spec.name, deadline)
            stated = {"name": spec.name, "owner": spec.owner, "created_at": datetime.now(UTC).isoformat()}  # noqa: TID251
            path = f"{self.tool_directory}/{OWNER_FILE}"
            # Concurrent creates state the same, unless their owners differ: the first one wins.
            script = f"set -C; printf %s {shlex.quote(json.dumps(stated))} >{path}"
            self._execute(spec.name, f"({script}) 2>/dev/null; true", timeout=timedelta(seconds=30))
            owner = self._look_up(spec.name)
        require_owner(spec, owner["owner"])
        return spec.name

    def _look_up(self, ref: str) -> dict[str, str]:
        """Return the statement that was written at creation. Another container has none, which the shell in it says."""
        path = f"{self.tool_directory}/{OWNER_FILE}"
        command = f"if [ -e {path} ]; then cat {path}; else echo {NO_OWNER}; fi"
        output = self._execute(ref, command, timeout=timedelta(seconds=30))
        if output.strip() == NO_OWNER:
            text = f"The bridge has no sandbox {ref}, or an empty one in its place."
            raise NotFound(text, cause=FailureCause.ENGINE_ERROR)
        stated = json.loads(output)
        return {key: str(stated[key]) for key in ("name", "owner", "created_at")}

    def _is_listed(self, ref: str) -> bool:
        """Return False, and raise Unavailable unless the bridge itself answers: it cannot list."""
        self.ping()
        return False

    def _wait_running(self, ref: str, deadline: float) -> None:
        """Wait until the container executes. A pool without a free place answers 502 or 503 for some time."""
        pause = Pause(deadline)
        while True:
            try:
                self._execute(ref, "true", timeout=timedelta(seconds=30))
                return
            except Unavailable as error:
                if error.cause not in TRANSIENT_CAUSES:
                    raise
                try:
                    pause.wait(f"{ref} is not ready in time: {error}")
                except Unavailable as late:
                    raise _build_full(error) if isinstance(error, NoCapacity) else late from error

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        self._get(ref)  # `create` has waited

    def _delete(self, ref: str) -> None:
        with _translate_errors(ref):
            response = self._session.delete(
                self._build_url(ref), timeout=(CONNECT_TIMEOUT_SECONDS, CALL_TIMEOUT_SECONDS), allow_redirects=False
            )  # fmt: skip
        _require_status(response, ref, 204)

    def destroy(self, ref: str) -> None:
        """Delete the container. A look at its files would start another one, so the proof is that the bridge answers."""
        self._delete(ref)
        self.ping()

    def inspect(self, ref: str) -> ProviderSandbox:
        try:
            owner = self._get(ref)
        except Missing:
            self.destroy(ref)  # the question has started a container
            raise
        return ProviderSandbox(ref=ref, name=ref, running=True, created_at=datetime.fromisoformat(owner["created_at"]))

    def _discard_empty(self, ref: str) -> None:
        self.destroy(ref)

    def ping(self) -> None:
        with _translate_errors("the bridge"):
            response = self._session.get(
                f"{self.configuration.api_url}/v1/pool/stats", timeout=CONNECT_TIMEOUT_SECONDS, allow_redirects=False
            )  # fmt: skip
            _require_status(response, "the bridge", 200)
            if not isinstance(response.json()["maxInstances"], int):
                raise ValueError("The answer does not describe a pool.")

    def list(self, owner: str) -> list[ProviderSandbox]:
        raise Unavailable("The bridge of Cloudflare cannot list sandboxes.", cause=FailureCause.NOT_SUPPORTED)

    # Commands and files

    def _execute(self, ref: str, command: str, *, timeout: timedelta) -> str:
        seconds = math.ceil(timeout.total_seconds())
        body = {"argv": ["sh", "-c", command], "timeout_ms": 1000 * seconds}
        with _translate_errors(ref):
            response = self._session.post(
                f"{self._build_url(ref)}/exec", json=body, stream=True, allow_redirects=False,
                timeout=(CONNECT_TIMEOUT_SECONDS, max(seconds + 10.0, CALL_TIMEOUT_SECONDS)),
            )  # fmt: skip
            with response:
                _require_status(response, ref, 200)
                return _collect_output(ref, response)

    def _upload(self, ref: str, path: str, content: bytes) -> None:
        url = f"{self._build_url(ref)}/file/{quote(path.lstrip('/'))}"
        with _translate_errors(ref):
            response = self._session.put(
                url, data=content, timeout=(CONNECT_TIMEOUT_SECONDS, UPLOAD_TIMEOUT_SECONDS), allow_redirects=False
            )  # fmt: skip
            _require_status(response, ref, 200)
            if response.json()["ok"] is not True:
                raise ValueError("The answer does not confirm the upload.")

    def _build_url(self, ref: str) -> str:
        return f"{self.configuration.api_url}/v1/sandbox/{derive_id(ref)}"


def derive_id(name: str) -> str:
    """Return the bridge's id of a sandbox: 52 characters of a-z and 2-7 derived from its name."""
    return base64.b32encode(hashlib.sha256(name.encode()).digest()).decode().rstrip("=").lower()


def _collect_output(ref: str, response: requests.Response) -> str:
    """Return the stdout of an exec from its stream of events. Raise Unavailable unless the stream states the end."""
    stdout, event = bytearray(), ""
    for line in response.iter_lines(chunk_size=65536):
        key, _, value = line.partition(b": ")
        if key == b"event":
            event = value.decode()
        elif key == b"data" and event == "stdout":
            stdout += base64.b64decode(value)
            if len(stdout) > MAX_OUTPUT_BYTES:
                raise Unavailable(f"{ref}: too much output", cause=FailureCause.AGENT_FAILED)
        elif key == b"data" and event == "exit":
            return stdout.decode(errors="replace")
        elif key == b"data" and event == "error":
            raise Unavailable(f"{ref}: {quote_answer(value.decode(errors='replace'))}", cause=FailureCause.ENGINE_ERROR)
    raise Unavailable(f"{ref}: the stream ended without a result", cause=FailureCause.ENGINE_UNREACHABLE)


def _build_full(last: NoCapacity) -> NoCapacity:
    error = NoCapacity(f"no free place until the deadline: {last}", cause=FailureCause.NO_CAPACITY)
    error.retry_after = last.retry_after
    return error


def _require_status(response: requests.Response, subject: str, expected: int) -> None:
    """Raise the error of an answer that has another status than a success has."""
    if response.status_code == 503 and (ERRORS.read(response.text) or "").endswith(CAPACITY_EXCEEDED):
        error = NoCapacity(f"{subject}: {quote_answer(response.text)}", cause=FailureCause.RATE_LIMITED)
        error.retry_after = read_retry_after(response.headers.get("Retry-After", ""))
        raise error  # for a moment, unless it stays so until the deadline of a start
    if response.status_code != expected:
        raise_for_answer(ERRORS, subject, response.status_code, response.text, response.headers)


def _read_message(document: Mapping[str, Any]) -> str | None:
    error, code = document.get("error"), document.get("code")
    return f"{error} ({code})" if isinstance(error, str) and isinstance(code, str) else None


ERRORS = ErrorForm(re.compile("(?!)"), _read_message)  # the bridge has no document of absence: it starts a container


def _create_session(configuration: RemoteConfiguration) -> requests.Session:
    session = limit_session(requests.Session(), max_bytes=MAX_ANSWER_BYTES)
    session.headers["Authorization"] = f"Bearer {configuration.api_key}"  # this spelling: /v1/pool refuses "bearer"
    return session


@contextmanager
def _translate_errors(subject: str) -> Iterator[None]:
    with translate_answer(subject):
        try:
            yield
        except requests.RequestException as error:
            raise_for_transport(subject, error, is_timeout=isinstance(error, requests.Timeout))
