"""Turn script: reads the environment's state from stdin as JSON, and prints the agent's action as JSON. Standard library only.

Environment variables:

    LLM_SOCKET         unix socket of the egress proxy, which adds the credentials
    OPENAI_BASE_URL    base URL of the model, if LLM_SOCKET is not set
    MODEL              model name
    ENVIRONMENT_TYPE   kind of environment, if the state does not contain it
    LEASEHOLD_DATA     directory of the agent's data, with its skills

Exits with code 1 and one line on stderr if there is no action."""

import http.client
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MODEL_TIMEOUT_SECONDS = 55.0  # a turn has 60 s
DEFAULT_PROMPT = (
    "You are an agent taking one turn in an environment. The user's message is its state as JSON. Choose the action "
    "that serves your goal best; if the state lists legal actions, choose one of them. Answer with exactly one JSON "
    'object and nothing else. It has the key "action", and "reason" in at most twelve words.'
)


class TurnFailed(Exception):
    """The turn has no action. The message is one line."""


def take_turn(text: str, env: dict[str, str]) -> dict[str, Any]:
    """Return the action for a state, given as JSON text. Raise TurnFailed."""
    try:
        state = json.loads(text)
    except ValueError as error:
        raise TurnFailed(f"the state on stdin is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise TurnFailed("the state on stdin is not a JSON object")
    kind = str(state.get("environment_type") or env.get("ENVIRONMENT_TYPE", ""))
    messages = [
        {"role": "system", "content": load_prompt(kind, Path(env.get("LEASEHOLD_DATA") or "/data"))},
        {"role": "user", "content": json.dumps(state, ensure_ascii=False)},
    ]
    return extract_first_object(ask_model({"model": env.get("MODEL") or "default", "messages": messages}, env))


def load_prompt(kind: str, data: Path) -> str:
    """Return the prompt of the agent's skill for this kind of environment, or the default prompt."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", kind):
        try:
            return (data / "skills" / kind / "prompt.md").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
    return DEFAULT_PROMPT


def ask_model(request: dict[str, Any], env: dict[str, str]) -> str:
    """Return the model's text. Retries as requested by Retry-After, within the timeout. Raise TurnFailed."""
    deadline = time.monotonic() + MODEL_TIMEOUT_SECONDS
    while True:
        status, content, retry_after = _post(request, env)
        if retry_after is None or time.monotonic() + retry_after > deadline:
            break
        time.sleep(retry_after)
    if status != 200:
        raise TurnFailed(f"the model answered {status}: {_to_single_line(content.decode(errors='replace'))}")
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise TurnFailed(
            f"the model's answer is not a chat completion: {_to_single_line(content.decode(errors='replace'))}"
        ) from error
    if not isinstance(text, str):
        raise TurnFailed("the model answered without text")
    return text


def _post(request: dict[str, Any], env: dict[str, str]) -> tuple[int, bytes, float | None]:
    """Return (status, body, seconds until a retry or None)."""
    connection, path = _open_connection(env)
    try:
        connection.request("POST", path, json.dumps(request).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise TurnFailed(f"the model is unreachable: {error or type(error).__name__}") from error
    finally:
        connection.close()
    retry_after = response.getheader("Retry-After", "") if response.status in (429, 503) else ""
    return response.status, content, max(0.1, float(retry_after)) if re.fullmatch("[0-9]{1,3}", retry_after) else None


def extract_first_object(text: str) -> dict[str, Any]:
    """Return the first JSON object in a text, which may contain prose and code fences. Raise TurnFailed."""
    decoder, position = json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            action, _ = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position = text.find("{", position + 1)
        else:
            return dict(action)
    raise TurnFailed(f"the model's text has no JSON object: {_to_single_line(text)}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=MODEL_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(MODEL_TIMEOUT_SECONDS)
        self.sock.connect(self._path)


def _open_connection(env: dict[str, str]) -> tuple[http.client.HTTPConnection, str]:
    if env.get("LLM_SOCKET"):
        return _UnixConnection(env["LLM_SOCKET"]), "/v1/chat/completions"
    try:
        base = urlsplit(env.get("OPENAI_BASE_URL", ""))
        host, port = base.hostname, base.port
    except ValueError as error:
        raise TurnFailed(f"OPENAI_BASE_URL is not a URL: {error}") from error
    if base.scheme not in ("http", "https") or not host:
        raise TurnFailed("neither LLM_SOCKET nor OPENAI_BASE_URL is set")
    kind = http.client.HTTPSConnection if base.scheme == "https" else http.client.HTTPConnection
    path = base.path.rstrip("/")
    return kind(host, port, timeout=MODEL_TIMEOUT_SECONDS), f"{path if path.endswith('/v1') else path + '/v1'}/chat/completions"


def _to_single_line(text: str) -> str:
    return " ".join(text.split())[:300]


def main() -> int:
    try:
        print(json.dumps(take_turn(sys.stdin.read(), dict(os.environ))))
    except TurnFailed as error:
        print(_to_single_line(f"take_turn: {error}"), file=sys.stderr)
        return 1
    except UnicodeDecodeError:
        print("take_turn: the state on stdin is not UTF-8", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
