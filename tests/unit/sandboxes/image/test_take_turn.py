"""image/take_turn.py as a process, with a model behind a real socket."""

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[4] / "sandboxes" / "image" / "take_turn.py"


@dataclass
class Model:
    """OpenAI-compatible model that answers `text` and records requests."""

    env: dict[str, str]
    text: str = '{"action": "wait"}'
    status: int = 200
    retry_after: list[str] = field(default_factory=list)  # Retry-After values of 429 responses sent before the answer
    requests: list[tuple[str, Any]] = field(default_factory=list)


def serve(model: Model, server: socketserver.BaseServer) -> Callable[[], None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            model.requests.append((self.path, request))
            body = json.dumps({"choices": [{"message": {"content": model.text}}]}).encode()
            retry_after = model.retry_after.pop(0) if model.retry_after else None
            self.send_response(model.status if retry_after is None else 429)
            if retry_after is not None:
                self.send_header("Retry-After", retry_after)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "a unix socket has none"

        def log_message(self, *args: object) -> None:
            pass

    server.RequestHandlerClass = Handler
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return lambda: (server.shutdown(), server.server_close())[0]


@pytest.fixture(params=["unix socket", "base URL"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    server: socketserver.BaseServer
    if request.param == "unix socket":
        server = socketserver.UnixStreamServer(str(tmp_path / "llm.sock"), BaseHTTPRequestHandler)
        made = Model({"LLM_SOCKET": str(tmp_path / "llm.sock")})
    else:
        server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        made = Model({"OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}/v1"})
    stop = serve(made, server)
    yield made
    stop()


def turn(state: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    text = state if isinstance(state, str) else json.dumps(state)
    argv = [sys.executable, "-I", str(SCRIPT)]
    return subprocess.run(argv, input=text, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True)


def test_action_is_the_models_answer(model: Model, tmp_path: Path) -> None:
    model.text = '{"action": "build_city", "position": 12}'
    done = turn({"turn_number": 3}, model.env | {"MODEL": "m-1"})
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, {"action": "build_city", "position": 12}, "")
    path, requests = model.requests[0]
    assert path == "/v1/chat/completions"
    assert requests["model"] == "m-1"
    assert json.loads(requests["messages"][1]["content"]) == {"turn_number": 3}


def test_prompt_is_the_agents_skill(model: Model, tmp_path: Path) -> None:
    skill = tmp_path / "skills" / "catan" / "prompt.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("You like ore.")
    turn({"environment_type": "catan"}, model.env | {"LEASEHOLD_DATA": str(tmp_path)})
    turn({}, model.env | {"LEASEHOLD_DATA": str(tmp_path), "ENVIRONMENT_TYPE": "catan"})
    assert [requests["messages"][0] for _, requests in model.requests] == [{"role": "system", "content": "You like ore."}] * 2


@pytest.mark.parametrize("kind", ["chess", "../../etc", "", None, 7])
def test_default_prompt_is_used_without_a_skill(model: Model, tmp_path: Path, kind: object) -> None:
    done = turn({"environment_type": kind}, model.env | {"LEASEHOLD_DATA": str(tmp_path)})
    assert done.returncode == 0
    assert "exactly one JSON object" in model.requests[0][1]["messages"][0]["content"]


@pytest.mark.parametrize(
    "text",
    [
        '{"action": "move", "to": {"x": 1}}',
        'Let me think {carefully}.\n```json\n{"action": "move", "to": {"x": 1}}\n```\nDone. {"action": "no"}',
        'I choose {"action": "move", "to": {"x": 1}} because "}" is no argument.',
    ],
)
def test_first_object_is_found_in_prose_and_code_fences(model: Model, text: str) -> None:
    model.text = text
    assert json.loads(turn({}, model.env).stdout) == {"action": "move", "to": {"x": 1}}


def test_text_without_an_object_is_one_line_on_stderr(model: Model) -> None:
    model.text = "I would rather\nnot."
    done = turn({}, model.env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "take_turn: the model's text has no JSON object: I would rather not.\n"


def test_model_error_is_one_line_on_stderr(model: Model) -> None:
    model.status = 429
    done = turn({}, model.env)
    assert done.returncode == 1
    assert done.stderr.startswith("take_turn: the model answered 429")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("state", "env", "reason"),
    [
        ("not json", {}, "not JSON"),
        ("[1]", {}, "not a JSON object"),
        ("{}", {}, "neither LLM_SOCKET nor OPENAI_BASE_URL is set"),
        ("{}", {"LLM_SOCKET": "/nowhere.sock"}, "is unreachable"),
        ("{}", {"OPENAI_BASE_URL": "http://[half"}, "not a URL"),
    ],
)
def test_invalid_input_is_one_line_on_stderr(state: str, env: dict[str, str], reason: str) -> None:
    done = turn(state, env)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_retry_after_is_honored(model: Model) -> None:
    model.retry_after = ["0", "0"]
    assert json.loads(turn({}, model.env).stdout) == {"action": "wait"}
    assert len(model.requests) == 3


@pytest.mark.parametrize("retry_after", ["999", "Fri, 31 Dec 1999 23:59:59 GMT", "-1"])
def test_retry_after_beyond_the_turn_is_not_awaited(model: Model, retry_after: str) -> None:
    model.retry_after = [retry_after]
    done = turn({}, model.env)
    assert (done.returncode, len(model.requests)) == (1, 1) and "the model answered 429" in done.stderr
