"""Exec by the API server (pods/exec over a WebSocket): an aid for debugging a sandbox whose agent does not connect.

It has no kill, no user and no way to attach again: a command whose connection ends without a status has an unknown outcome, and
may still run."""

import json
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import websocket

from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import FailureCause, Unavailable
from sandboxes.providers.kubernetes.api_client import ApiClient
from sandboxes.providers.kubernetes.errors import build_error
from sandboxes.providers.kubernetes.pod_spec import CONTAINER
from sandboxes.providers.streams import BoundedBuffer

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
HANDSHAKE_TIMEOUT_SECONDS = 15.0
STDIN_PART_BYTES = 256 << 10  # larger messages are refused by some proxies
CHANGE_SCRIPT = 'cd "$1" && shift && exec env "$@"'  # the request has neither a directory nor an environment


def run_in_pod(
    api: ApiClient,
    path: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdin: bytes,
    timeout: float,
    cap: int,
) -> ExecResult:
    """Run a command in the Pod at a path of the API, and wait for its status. Raise Unavailable if the outcome is not known."""
    out, err = BoundedBuffer(cap), BoundedBuffer(cap)
    started = time.monotonic()
    command = ["sh", "-c", CHANGE_SCRIPT, "sh", cwd, *(f"{name}={value}" for name, value in env.items()), *argv]
    connection = _connect(api, path, command, has_stdin=bool(stdin))
    try:
        _send_stdin(connection, stdin)
        while True:
            connection.settimeout(max(started + timeout - time.monotonic(), 0.01))
            message = connection.recv()
            if not message:
                raise Unavailable(f"{path}: the exec ended without a status, and its command may still run.")
            content = message if isinstance(message, bytes) else message.encode()
            channel, rest = content[0], content[1:]
            if channel == STATUS:
                return ExecResult(
                    _read_exit_code(json.loads(rest), path), bytes(out), bytes(err), truncated=out.truncated or err.truncated
                )
            if channel in (STDOUT, STDERR):
                (out if channel == STDOUT else err).add(rest)
    except websocket.WebSocketTimeoutException as error:
        message = f"{path}: the command did not end in time, and may still run."
        raise Unavailable(message, cause=FailureCause.TIMEOUT) from error
    except (websocket.WebSocketException, OSError, ValueError) as error:
        raise Unavailable(f"{path}: the exec was interrupted, and its command may still run: {error}") from error
    finally:
        connection.shutdown()


def _connect(api: ApiClient, path: str, command: Sequence[str], *, has_stdin: bool) -> websocket.WebSocket:
    query = [("container", CONTAINER), ("stdout", "true"), ("stderr", "true"), ("stdin", str(has_stdin).lower())]
    url = api.build_url(f"{path}/exec?{urlencode([*query, *(('command', word) for word in command)])}")
    headers: dict[str, str] = {}
    api.authorize(headers)
    configuration = api.configuration
    options: dict[str, Any] = {"cert_reqs": ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE}
    files = {"ca_certs": configuration.ssl_ca_cert, "certfile": configuration.cert_file, "keyfile": configuration.key_file}
    options |= {key: value for key, value in files.items() if value}
    try:
        return websocket.create_connection(
            "ws" + url.removeprefix("http"),
            header=[f"{name}: {value}" for name, value in headers.items()],
            subprotocols=[*PROTOCOLS],
            sslopt=options,
            timeout=HANDSHAKE_TIMEOUT_SECONDS,
        )
    except websocket.WebSocketBadStatusException as error:
        raise build_error(error.status_code, error.resp_body or b"", path, error.resp_headers or {}) from error
    except (websocket.WebSocketException, OSError) as error:
        message = f"{path}: no exec by the API server: {error}"
        raise Unavailable(message, cause=FailureCause.ENGINE_UNREACHABLE) from error


def _send_stdin(connection: websocket.WebSocket, stdin: bytes) -> None:
    """Send the input and its end. The older protocol cannot state the end, so it is refused for commands with input."""
    if not stdin:
        return
    if connection.getsubprotocol() != PROTOCOLS[0]:
        raise Unavailable("The API server does not support input of an exec.", cause=FailureCause.NOT_SUPPORTED)
    for start in range(0, len(stdin), STDIN_PART_BYTES):
        connection.send_binary(bytes([STDIN]) + stdin[start : start + STDIN_PART_BYTES])
    connection.send_binary(bytes([CLOSE, STDIN]))


def _read_exit_code(status: Mapping[str, Any], path: str) -> int:
    """Return the exit code of a Status object. Raise Unavailable for a failure other than an exit code."""
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or []
    for cause in causes:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise Unavailable(f"{path}: the exec failed: {status.get('message')}", cause=FailureCause.ENGINE_ERROR)
