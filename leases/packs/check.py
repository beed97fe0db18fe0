"""Check of an environment pack: its turn script plays the examples against a stand-in model.

The stand-in answers as the prompt teaches: a JSON object of the prompt's form, with the values of a legal action. The answer of
the turn script has to match the schema of actions, and one of the legal actions of the state."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from leases.models import default_turn_argv
from leases.packs.folder import PackFolder

IMAGE_DIRECTORY = Path(__file__).resolve().parents[2] / "sandboxes" / "image"  # /opt/leasehold in the Docker image
TURN_TIMEOUT_SECONDS = 60
MAX_LEGAL_ACTIONS_PLAYED = 3  # of each example: the first, the middle and the last
UNUSABLE_ANSWER = "I would rather talk about the weather."


@dataclass
class CheckResult:
    """Result of a check. The pack is usable if there are no problems."""

    turns: int = 0
    problems: list[str] = field(default_factory=list)


def check_pack(pack: PackFolder) -> CheckResult:
    """Check the taught answers and play every example. Executes the pack's turn script as the current user."""
    result = CheckResult()
    taught = list_taught_answers(pack.skill["prompt.md"].decode())
    if not taught:
        result.problems.append("skill/prompt.md teaches no answer: it has no JSON object")
    validator = Draft202012Validator(pack.schemas["action"])
    for answer in taught:
        if problem := _find_violation(validator, answer):
            text = json.dumps(answer)[:120]
            result.problems.append(f"skill/prompt.md teaches {text}, which is not a valid action: {problem}")
    if not pack.examples:
        result.problems.append("examples has no state to play")
    with _stand_in_model() as model:
        for name, state in pack.examples.items():
            if problem := _find_violation(Draft202012Validator(pack.schemas["state"]), state):
                result.problems.append(f"examples/{name} does not match the schema of states: {problem}")
            for given in _build_answers(taught, state):
                with tempfile.TemporaryDirectory() as data:  # of an agent without history: a skill may store what it remembers
                    _write_skill(Path(data) / "skills" / pack.name, pack.skill)
                    _play(pack, name, state, given, data, model, result)
    return result


def list_taught_answers(prompt: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a prompt that have a value of their own, in order."""
    decoder, position, found = json.JSONDecoder(), prompt.find("{"), list[dict[str, Any]]()
    while position >= 0:
        try:
            value, end = decoder.raw_decode(prompt, position)
        except ValueError:
            end = position + 1
        else:
            found.append(value)
        position = prompt.find("{", end)
    return found


def _build_answers(taught: list[dict[str, Any]], state: Mapping[str, Any]) -> Iterator[str]:
    """Yield answers of the stand-in: as taught for some legal actions, and one that is unusable."""
    legal = state.get("legal_actions")
    if isinstance(legal, list) and legal and taught:
        for index in sorted({0, len(legal) // 2, len(legal) - 1})[:MAX_LEGAL_ACTIONS_PLAYED]:
            yield json.dumps(fill_in(taught[0], legal[index]))
    else:
        yield from map(json.dumps, taught)
    yield UNUSABLE_ANSWER


def fill_in(taught: Mapping[str, Any], legal: Any) -> dict[str, Any]:
    """Return the taught answer for a legal action, which is an object, or the text of `action`."""
    return {**taught, **(legal if isinstance(legal, dict) else {"action": legal})}


def _play(
    pack: PackFolder, name: str, state: Mapping[str, Any], answer: str, data: str, model: "_Model", result: CheckResult
) -> None:
    model.answer = answer
    argv = pack.defaults.get("turn_argv") or default_turn_argv()
    replaced = {"python3": sys.executable, "/opt/leasehold/take_turn.py": str(IMAGE_DIRECTORY / "take_turn.py")}
    command = [replaced.get(word, word).replace("{skill}", f"{data}/skills/{pack.name}") for word in argv]
    env = {
        "PATH": os.environ.get("PATH", ""), "OPENAI_BASE_URL": model.url, "MODEL": "stand-in", "LEASEHOLD_DATA": data,
        "ENVIRONMENT_TYPE": pack.name, "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    result.turns += 1
    where = f"examples/{name}, model answer {answer[:80]!r}"
    try:
        done = subprocess.run(
            command, input=json.dumps(state).encode(), capture_output=True, env=env, cwd=data, timeout=TURN_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        result.problems.append(f"{where}: {error}")
        return
    if done.returncode and answer == UNUSABLE_ANSWER and "policy.py" not in pack.skill:
        return  # the turn is skipped: there is no policy that could play
    if problem := _find_problem(pack, state, answer, done):
        result.problems.append(f"{where}: {problem}")


def _find_problem(pack: PackFolder, state: Mapping[str, Any], answer: str, done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode:
        return f"the turn script failed with exit code {done.returncode}: {done.stderr.decode(errors='replace')[-300:].strip()}"
    try:
        action = json.loads(done.stdout)
    except ValueError:
        return f"the turn script printed no JSON object: {done.stdout[:120]!r}"
    if problem := _find_violation(Draft202012Validator(pack.schemas["action"]), action):
        return f"{json.dumps(action)[:120]} is not a valid action: {problem}"
    legal = state.get("legal_actions")
    if isinstance(legal, list) and legal and not any(matches_legal_action(action, each) for each in legal):
        return f"{json.dumps(action)[:120]} is not a legal action"
    if answer != UNUSABLE_ANSWER and not matches_legal_action(action, json.loads(answer)):
        return f"the turn script changed a legal answer to {json.dumps(action)[:120]}"
    return ""


def matches_legal_action(action: Mapping[str, Any], legal: Any) -> bool:
    """Return whether an action is a legal one: equal in each key of an object, or with a text as its `action`."""
    if isinstance(legal, dict):
        return all(key in action and action[key] == value for key, value in legal.items())
    return bool(action.get("action") == legal)


def _find_violation(validator: Draft202012Validator, value: Any) -> str:
    error = next(iter(validator.iter_errors(value)), None)
    return f"{error.json_path}: {error.message}"[:300] if error else ""


def _write_skill(folder: Path, skill: Mapping[str, bytes]) -> None:
    for name, content in skill.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@dataclass
class _Model:
    url: str
    answer: str = ""


@contextmanager
def _stand_in_model() -> Iterator[_Model]:
    """Serve chat completions with the content `answer` on the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": model.answer}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    model = _Model(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
