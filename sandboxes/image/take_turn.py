"""One turn of an agent: the state of the game on stdin as JSON, its action on stdout as JSON. Standard library only.

The model is reached over the unix socket in LLM_SOCKET, or else at the base URL in OPENAI_BASE_URL; neither needs a
key, because whoever forwards the call adds it. MODEL names the model, ENVIRONMENT_TYPE the kind of game where the state
does not, LEASEHOLD_DATA the directory with the agent's skills. Exit code 1 and one line on stderr if it goes wrong."""

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

MODEL_TIMEOUT_SECONDS = 55.0  # seconds in which the model says something; a turn has sixty
DEFAULT_PROMPT = (
    "You are an agent taking one turn in an environment. The user's message is its state as JSON. Choose the action "
    "that serves your goal best; if the state lists legal actions, choose one of them. Answer with exactly one JSON "
    'object and nothing else. It has the key "action", and "reason" in at most twelve words.'
)


class TurnFailed(Exception):
    """Why there is no action, as one line."""


def take_turn(said: str, env: dict[str, str]) -> dict[str, Any]:
    """The action for this state, which is JSON text. NoTurn if there is none."""
    try:
        state = json.loads(said)
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
    """What the agent's skills say about this kind of environment; a general prompt if they say nothing."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", kind):
        try:
            return (data / "skills" / kind / "prompt.md").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
    return DEFAULT_PROMPT


def ask_model(request: dict[str, Any], env: dict[str, str]) -> str:
    """The model's text; who is told to come again later does. NoTurn with the reason if there is none."""
    until = time.monotonic() + MODEL_TIMEOUT_SECONDS
    while True:
        status, content, after = _post(request, env)
        if after is None or time.monotonic() + after > until:
            break
        time.sleep(after)
    if status != 200:
        raise TurnFailed(f"the model answered {status}: {_to_single_line(content.decode(errors='replace'))}")
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise TurnFailed(
            f"the model's answer is no chat completion: {_to_single_line(content.decode(errors='replace'))}"
        ) from error
    if not isinstance(text, str):
        raise TurnFailed("the model answered without text")
    return text


def _post(request: dict[str, Any], env: dict[str, str]) -> tuple[int, bytes, float | None]:
    """Status and body of an answer, and in how many seconds to ask again, if it says so."""
    connection, path = _open_connection(env)
    try:
        connection.request("POST", path, json.dumps(request).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise TurnFailed(f"the model cannot be reached: {error or type(error).__name__}") from error
    finally:
        connection.close()
    after = response.getheader("Retry-After", "") if response.status in (429, 503) else ""
    return response.status, content, max(0.1, float(after)) if re.fullmatch("[0-9]{1,3}", after) else None


def extract_first_object(text: str) -> dict[str, Any]:
    """The first JSON object in a text that may have prose and code fences around it. NoTurn if there is none."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            found, _ = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at = text.find("{", at + 1)
        else:
            return dict(found)
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
        raise TurnFailed(f"OPENAI_BASE_URL is no URL: {error}") from error
    if base.scheme not in ("http", "https") or not host:
        raise TurnFailed("neither LLM_SOCKET nor OPENAI_BASE_URL says where the model is")
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
