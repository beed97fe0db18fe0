"""Turn script: reads the environment's state from stdin as JSON, and prints the agent's action as JSON. Standard library only.

Environment variables:

    LLM_SOCKET         unix socket of the egress proxy, which adds the credentials
    OPENAI_BASE_URL    base URL of the model, if LLM_SOCKET is not set
    MODEL              model name
    ENVIRONMENT_TYPE   kind of environment, if the state does not contain it
    LEASEHOLD_DATA     directory of the agent's data, with its skills
    MODEL_TIMEOUT      seconds to wait for the model of a kind with a policy.py (default and maximum 55)

A skill with a policy.py (`choose_action`, `describe_state`) adds an analysis of the state to the prompt. The model's answer is
then repaired to a legal action. Without such an answer the action of the policy is played, with "by": "heuristic".
It may have `TOOLS`, which the model may call before it answers: a dictionary of names, each with `call`, a function of the
state and the model's arguments, and `schema`, its description and parameters.
Two further functions are optional: `prepare_state(state, data)` returns the state to play, `record_turn(state, action, data)`
the action to print. They keep what the agent remembers in its data. One that fails is reported on stderr and has no effect.

Exits with code 1 and one line on stderr if there is no action."""

import copy
import http.client
import importlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

MODEL_TIMEOUT_SECONDS = 55.0  # a turn has 60 s
MAX_TOOL_ROUNDS = 4  # answers of the model with tool calls, in one turn
MAX_CALLS_PER_ROUND = 8
SKILL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
OFFLINE_MODEL = "leasehold-offline-policy"  # its answers know no game: the skill's policy is preferred
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
    data = Path(env.get("LEASEHOLD_DATA") or "/data")
    policy = _load_policy(kind, data) if _has_legal_actions(state) else None
    prepared = _call_hook(policy, "prepare_state", state, data)
    if prepared is not None and _has_legal_actions(prepared):
        state = prepared
    action = _choose_action(policy, load_prompt(kind, data), state, env)
    recorded = _call_hook(policy, "record_turn", state, action, data)
    return action if recorded is None else recorded


def _has_legal_actions(state: dict[str, Any]) -> bool:
    return isinstance(state.get("legal_actions"), list) and bool(state["legal_actions"])


def _choose_action(policy: ModuleType | None, prompt: str, state: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Return the model's action, or else the action of the skill's policy. Raise TurnFailed."""
    heuristic, analysis = _consult_policy(policy, state)
    messages = [
        {"role": "system", "content": f"{prompt}\n\n{analysis}" if analysis else prompt},
        {"role": "user", "content": json.dumps(state, ensure_ascii=False)},
    ]
    request = {"model": env.get("MODEL") or "default", "messages": messages}
    if heuristic is None:
        return extract_first_object(_get_text(ask_model(request, env)))
    try:
        answer = extract_first_object(_converse(policy, request, state, env))
    except TurnFailed as error:
        print(_to_single_line(f"take_turn: {error}; the heuristic plays"), file=sys.stderr)
        return heuristic
    repaired = None if answer.get("by") == OFFLINE_MODEL else repair_action(answer, state["legal_actions"])
    return heuristic if repaired is None else repaired


def _converse(policy: ModuleType | None, request: dict[str, Any], state: dict[str, Any], env: dict[str, str]) -> str:
    """Return the model's text, after the tools of the policy that it calls. Raise TurnFailed, also after the timeout."""
    deadline = time.monotonic() + _read_timeout(env)
    tools = getattr(policy, "TOOLS", None) or {}
    offered = [{"type": "function", "function": {"name": name, **tool["schema"]}} for name, tool in tools.items()]
    for rounds_left in range(MAX_TOOL_ROUNDS, -1, -1):
        options = {"tools": offered, **({} if rounds_left else {"tool_choice": "none"})} if offered else {}
        message = _ask_within_timeout({**request, **options}, env, deadline - time.monotonic())
        calls = message.get("tool_calls")
        if not offered or not rounds_left or not isinstance(calls, list) or not calls:
            break
        results = [_call_tool(tools, call, state) for call in calls[:MAX_CALLS_PER_ROUND]]
        answered = {"role": "assistant", "content": message.get("content"), "tool_calls": calls[:MAX_CALLS_PER_ROUND]}
        request = {**request, "messages": [*request["messages"], answered, *results]}
    return _get_text(message)


def _call_tool(tools: dict[str, Any], call: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the result of a tool call. A failure is a result, which the model may correct."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        result = tools[function["name"]]["call"](copy.deepcopy(state), **arguments)
    except Exception as error:
        result = {"error": _to_single_line(f"{type(error).__name__}: {error}")}
    call_id = call.get("id") if isinstance(call, dict) else None
    return {"role": "tool", "tool_call_id": call_id, "content": json.dumps(result, ensure_ascii=False, default=str)}


def repair_action(answer: dict[str, Any], legal: list[Any]) -> dict[str, Any] | None:
    """Return the answer with the legal value that is closest among the actions of its type, None if no value is.

    Legal actions are objects with a type and a value, or texts, one of which has to be the answer's `action`."""
    texts = {_normalize(action): action for action in legal if isinstance(action, str)}
    if (text := _normalize(str(answer.get("action", "")))) in texts:
        return {**answer, "action": texts[text]}
    named = str(answer.get("type", "")).strip().upper()
    same_type = [action for action in legal if isinstance(action, dict) and action.get("type") == named]
    value = answer.get("value")
    exact = [action for action in same_type if action.get("value") == value]
    if not exact and len(same_type) > 1:
        scores = [_compare_values(value, action.get("value")) for action in same_type]
        best = max(scores)
        same_type = [action for action, score in zip(same_type, scores, strict=True) if score == best and best > (0, 0)]
    chosen = exact or same_type
    return {**answer, **chosen[0]} if len(chosen) == 1 else None


def _normalize(text: str) -> str:
    return " ".join(word for word in text.casefold().split() if word not in ("a", "an", "the"))


def _compare_values(value: Any, legal: Any) -> tuple[int, int]:
    """Return the number of common items, and of those at the same position."""
    left, right = _flatten(value), _flatten(legal)
    return (Counter(left) & Counter(right)).total(), sum(a == b for a, b in zip(left, right, strict=False))


def _flatten(value: Any) -> list[str]:
    if isinstance(value, list):
        return [item for part in value for item in _flatten(part)]
    return [] if value is None else [str(value).strip().upper()]


def _consult_policy(policy: ModuleType | None, state: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the action of the skill's policy and its analysis, (None, "") without a policy or if it fails."""
    if policy is None:
        return None, ""
    try:
        return {**policy.choose_action(state), "by": "heuristic"}, str(policy.describe_state(state))
    except Exception as error:  # the agent may have changed its skill
        _report_failure("the policy failed", error)
        return None, ""


def _call_hook(policy: ModuleType | None, name: str, *args: Any) -> dict[str, Any] | None:
    """Return the object that an optional function of the policy returns. None without the function, or if it fails."""
    hook = getattr(policy, name, None)
    if hook is None:
        return None
    try:
        result = hook(*copy.deepcopy(args))  # a hook that fails has changed nothing
        return result if isinstance(result, dict) else None
    except Exception as error:
        _report_failure(f"{name} failed", error)
        return None


def _report_failure(what: str, error: Exception) -> None:
    print(_to_single_line(f"take_turn: {what}: {type(error).__name__}: {error}"), file=sys.stderr)


def _load_policy(kind: str, data: Path) -> ModuleType | None:
    """Import policy.py of the agent's skill. None if there is none or it cannot be imported."""
    folder = data / "skills" / kind
    if not re.fullmatch(SKILL_PATTERN, kind) or not (folder / "policy.py").is_file():
        return None
    sys.dont_write_bytecode = True  # /data is stored
    package = ModuleType("skill")
    package.__path__ = [str(folder)]
    sys.modules["skill"] = package
    try:
        return importlib.import_module("skill.policy")
    except Exception as error:  # the agent may have changed its skill
        _report_failure("the policy failed", error)
        return None


def _ask_within_timeout(request: dict[str, Any], env: dict[str, str], seconds: float) -> dict[str, Any]:
    """Return the model's message. Raise TurnFailed, also if the whole answer takes longer than the timeout."""
    results: list[dict[str, Any] | TurnFailed] = []

    def ask() -> None:
        try:
            results.append(ask_model(request, env))
        except TurnFailed as error:
            results.append(error)

    thread = threading.Thread(target=ask, daemon=True)  # does not delay the exit
    thread.start()
    thread.join(max(0.0, seconds))
    result = results[0] if results else TurnFailed("the model did not answer in time")
    if isinstance(result, TurnFailed):
        raise result
    return result


def _read_timeout(env: dict[str, str]) -> float:
    text = env.get("MODEL_TIMEOUT", "")
    return min(float(text), MODEL_TIMEOUT_SECONDS) if re.fullmatch(r"\d{1,3}(\.\d+)?", text) else MODEL_TIMEOUT_SECONDS


def load_prompt(kind: str, data: Path) -> str:
    """Return the prompt of the agent's skill for this kind of environment, or the default prompt."""
    if re.fullmatch(SKILL_PATTERN, kind):
        try:
            return (data / "skills" / kind / "prompt.md").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
    return DEFAULT_PROMPT


def ask_model(request: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Return the model's message. Retries as requested by Retry-After, within the timeout. Raise TurnFailed."""
    deadline = time.monotonic() + MODEL_TIMEOUT_SECONDS
    while True:
        status, content, retry_after = _post(request, env)
        if retry_after is None or time.monotonic() + retry_after > deadline:
            break
        time.sleep(retry_after)
    if status != 200:
        raise TurnFailed(f"the model answered {status}: {_to_single_line(content.decode(errors='replace'))}")
    try:
        message = json.loads(content)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise TurnFailed(
            f"the model's answer is not a chat completion: {_to_single_line(content.decode(errors='replace'))}"
        ) from error
    if not isinstance(message, dict):
        raise TurnFailed("the model's answer is not a chat completion")
    return message


def _get_text(message: dict[str, Any]) -> str:
    text = message.get("content")
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
