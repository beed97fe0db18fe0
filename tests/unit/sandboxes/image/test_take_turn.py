"""image/take_turn.py as a process, with a model behind a real socket."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.loopback import Responder, ScriptedServer, respond, run_scripted_server

SCRIPT = Path(__file__).resolve().parents[4] / "sandboxes" / "image" / "take_turn.py"
BUSY = respond(429, Retry_After="0")


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    """OpenAI-compatible model."""
    with run_scripted_server(say('{"action": "wait"}')) as server:
        yield server


def say(text: str) -> Responder:
    return respond(200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())


def turn(state: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    text = state if isinstance(state, str) else json.dumps(state)
    argv = [sys.executable, "-I", str(SCRIPT)]
    return subprocess.run(argv, input=text, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True)


def turn_with(model: ScriptedServer, state: object, **env: str) -> subprocess.CompletedProcess[str]:
    return turn(state, {"OPENAI_BASE_URL": f"{model.url}/v1", **env})


def prompts(model: ScriptedServer) -> list[dict[str, str]]:
    return [json.loads(request.body)["messages"][0] for request in model.seen]


def assert_failed(done: subprocess.CompletedProcess[str], reason: str) -> None:
    """Assert that the turn failed with one line on stderr."""
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("take_turn: ") and reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("address", ["unix socket", "base URL"])
def test_action_is_the_models_answer(address: str, tmp_path: Path) -> None:
    unix = tmp_path / "llm.sock" if address == "unix socket" else None
    with run_scripted_server(BUSY, say('{"action": "build_city", "position": 12}'), unix=unix) as model:
        env = {"LLM_SOCKET": str(unix)} if unix else {"OPENAI_BASE_URL": f"{model.url}/v1"}
        done = turn({"turn_number": 3}, env | {"MODEL": "m-1"})
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, {"action": "build_city", "position": 12}, "")
    for request in model.seen:  # the first is answered "try again at once"
        body = json.loads(request.body)
        assert (request.path, body["model"]) == ("/v1/chat/completions", "m-1")
        assert json.loads(body["messages"][1]["content"]) == {"turn_number": 3}
    assert len(model.seen) == 2


def test_prompt_is_the_agents_skill(model: ScriptedServer, tmp_path: Path) -> None:
    skill = tmp_path / "skills" / "catan" / "prompt.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("You like ore.")
    turn_with(model, {"environment_type": "catan"}, LEASEHOLD_DATA=str(tmp_path))
    turn_with(model, {}, LEASEHOLD_DATA=str(tmp_path), ENVIRONMENT_TYPE="catan")
    assert prompts(model) == [{"role": "system", "content": "You like ore."}] * 2


@pytest.mark.parametrize("kind", ["chess", "../../etc", "", None, 7])
def test_default_prompt_is_used_without_a_skill(model: ScriptedServer, tmp_path: Path, kind: object) -> None:
    assert turn_with(model, {"environment_type": kind}, LEASEHOLD_DATA=str(tmp_path)).returncode == 0
    assert "exactly one JSON object" in prompts(model)[0]["content"]


@pytest.mark.parametrize(
    "text",
    [
        '{"action": "move", "to": {"x": 1}}',
        'Let me think {carefully}.\n```json\n{"action": "move", "to": {"x": 1}}\n```\nDone. {"action": "no"}',
        'I choose {"action": "move", "to": {"x": 1}} because "}" is no argument.',
    ],
)
def test_first_object_is_found_in_prose_and_code_fences(model: ScriptedServer, text: str) -> None:
    model.script = [say(text)]
    assert json.loads(turn_with(model, {}).stdout) == {"action": "move", "to": {"x": 1}}


def test_text_without_an_object_is_one_line_on_stderr(model: ScriptedServer) -> None:
    model.script = [say("I would rather\nnot.")]
    assert_failed(turn_with(model, {}), "the model's text has no JSON object: I would rather not.\n")


@pytest.mark.parametrize("retry_after", ["999", "Fri, 31 Dec 1999 23:59:59 GMT", "-1", None])
def test_retry_after_beyond_the_turn_is_not_awaited(model: ScriptedServer, retry_after: str | None) -> None:
    model.script = [respond(429, **({"Retry_After": retry_after} if retry_after else {}))]
    assert_failed(turn_with(model, {}), "the model answered 429")
    assert len(model.seen) == 1


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
    assert_failed(turn(state, env), reason)


LEGAL = [
    {"type": "END_TURN", "value": None},
    {"type": "BUILD_ROAD", "value": [3, 4]},
    {"type": "BUILD_ROAD", "value": [5, 9]},
    {"type": "BUILD_CITY", "value": 12},
]
POLICY = """
from .reasons import REASON

def choose_action(state):
    return {**state["legal_actions"][-1], "reason": REASON}

def describe_state(state):
    return "Analysis: a city is affordable."
"""
HEURISTIC = {"type": "BUILD_CITY", "value": 12, "reason": "policy", "by": "heuristic"}


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Agent's data with a skill that has a policy."""
    skill = tmp_path / "skills" / "maze"
    skill.mkdir(parents=True)
    (skill / "prompt.md").write_text("Play.")
    (skill / "policy.py").write_text(POLICY)
    (skill / "reasons.py").write_text('REASON = "policy"\n')
    return str(tmp_path)


@pytest.mark.parametrize(
    ("answer", "played"),
    [
        ({"type": "BUILD_ROAD", "value": [5, 9]}, {"type": "BUILD_ROAD", "value": [5, 9]}),
        ({"type": "BUILD_ROAD", "value": [9, 5]}, {"type": "BUILD_ROAD", "value": [5, 9]}),
        ({"type": "build_road", "value": ["3"]}, {"type": "BUILD_ROAD", "value": [3, 4]}),
        ({"type": "BUILD_CITY", "value": 44}, {"type": "BUILD_CITY", "value": 12}),
        ({"type": "END_TURN"}, {"type": "END_TURN", "value": None}),
        ({"type": "BUILD_ROAD", "value": [1, 2]}, HEURISTIC),
        ({"type": "BUILD_CASTLE", "value": 12}, HEURISTIC),
        ({**LEGAL[0], "by": "leasehold-offline-policy"}, HEURISTIC),
    ],
)
def test_answer_is_repaired_or_the_policy_plays(data: str, answer: dict[str, object], played: dict[str, object]) -> None:
    with run_scripted_server(say(json.dumps(answer))) as model:
        done = turn_with(model, {"environment_type": "maze", "legal_actions": LEGAL}, LEASEHOLD_DATA=data)
        assert (done.returncode, json.loads(done.stdout)) == (0, played)
        assert prompts(model)[0]["content"] == "Play.\n\nAnalysis: a city is affordable."
    assert not list(Path(data).rglob("*.pyc"))


def test_policy_plays_without_a_model(data: str) -> None:
    state = {"environment_type": "maze", "legal_actions": LEGAL}
    done = turn(state, {"OPENAI_BASE_URL": "http://127.0.0.1:9", "LEASEHOLD_DATA": data})
    assert (done.returncode, json.loads(done.stdout)) == (0, HEURISTIC)
    assert "unreachable" in done.stderr


def test_policy_plays_when_the_model_takes_too_long(data: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {"OPENAI_BASE_URL": url, "LEASEHOLD_DATA": data, "MODEL_TIMEOUT": "0.2"}
        done = turn({"environment_type": "maze", "legal_actions": LEGAL}, env)
    assert (done.returncode, json.loads(done.stdout)) == (0, HEURISTIC)
    assert "in time" in done.stderr


TOOLS = """
def measure(state, way):
    return {"steps": {"left": 3}[way], "turn": state["turn"]}

TOOLS = {"measure": {"call": measure, "schema": {"description": "Steps of a way.", "parameters": {"type": "object"}}}}
"""


def call_tools(*calls: tuple[str, str]) -> Responder:
    tool_calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return respond(200, json.dumps({"choices": [{"message": {"content": None, "tool_calls": tool_calls}}]}).encode())


def test_model_calls_tools_of_the_policy_before_it_answers(data: str) -> None:
    policy = Path(data) / "skills" / "maze" / "policy.py"
    policy.write_text(POLICY + TOOLS)
    wrong = [("measure", '{"way": "up"}'), ("measure", "no json"), ("unknown", "{}")]
    script = (call_tools(("measure", '{"way": "left"}')), call_tools(*wrong), say('{"type": "END_TURN"}'))
    with run_scripted_server(*script) as model:
        done = turn_with(model, {"environment_type": "maze", "turn": 7, "legal_actions": LEGAL}, LEASEHOLD_DATA=data)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"type": "END_TURN", "value": None})
    first, _, last = (json.loads(request.body) for request in model.seen)
    assert first["tools"][0]["function"]["name"] == "measure"
    results = [message for message in last["messages"] if message["role"] == "tool"]
    assert json.loads(results[0]["content"]) == {"steps": 3, "turn": 7}
    assert [sorted(json.loads(result["content"])) for result in results[1:]] == [["error"]] * 3
    assert [result["tool_call_id"] for result in results] == ["c0", "c0", "c1", "c2"]


def test_tool_calls_without_end_are_cut_off(data: str) -> None:
    (Path(data) / "skills" / "maze" / "policy.py").write_text(POLICY + TOOLS)
    script = [call_tools(("measure", '{"way": "left"}'))] * 10
    with run_scripted_server(*script) as model:
        done = turn_with(model, {"environment_type": "maze", "turn": 7, "legal_actions": LEGAL}, LEASEHOLD_DATA=data)
    assert (done.returncode, json.loads(done.stdout)) == (0, HEURISTIC)
    assert len(model.seen) == 5
    assert json.loads(model.seen[-1].body)["tool_choice"] == "none"


def test_failing_policy_leaves_the_turn_to_the_model(data: str) -> None:
    (Path(data) / "skills" / "maze" / "reasons.py").write_text("broken(")
    with run_scripted_server(say('{"type": "END_TURN"}')) as model:
        done = turn_with(model, {"environment_type": "maze", "legal_actions": LEGAL}, LEASEHOLD_DATA=data)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"type": "END_TURN"})


COMMANDS = ["wait", "go north", "take key from chest"]
HOOKS = """
from pathlib import Path

def prepare_state(state, data):
    counter = Path(data) / "turns"
    return {**state, "turns_before": int(counter.read_text()) if counter.exists() else 0}

def record_turn(state, action, data):
    (Path(data) / "turns").write_text(str(state["turns_before"] + 1))
    return {**action, "turns_before": state["turns_before"]}

def choose_action(state):
    return {"action": state["legal_actions"][-1]}

def describe_state(state):
    return ""
"""
HOOKED_HEURISTIC = {"action": "take key from chest", "by": "heuristic"}


@pytest.fixture
def hooked(data: str) -> Path:
    """Agent's data with a skill whose policy keeps the number of turns."""
    (Path(data) / "skills" / "maze" / "policy.py").write_text(HOOKS)
    return Path(data)


@pytest.mark.parametrize(
    ("answer", "played"),
    [
        ("Go  North", {"action": "go north"}),
        ("take the key from the chest", {"action": "take key from chest"}),
        ("take the sword", HOOKED_HEURISTIC),
    ],
)
def test_action_in_words_is_repaired_if_it_is_the_same_but_for_case_and_articles(
    hooked: Path, answer: str, played: dict[str, object]
) -> None:
    with run_scripted_server(say(json.dumps({"action": answer}))) as model:
        done = turn_with(model, {"environment_type": "maze", "legal_actions": COMMANDS}, LEASEHOLD_DATA=str(hooked))
    assert json.loads(done.stdout) == {**played, "turns_before": 0}


def test_hooks_prepare_the_state_and_record_the_turn(hooked: Path) -> None:
    with run_scripted_server(say('{"action": "wait"}')) as model:
        for turns_before in range(2):
            done = turn_with(model, {"environment_type": "maze", "legal_actions": COMMANDS}, LEASEHOLD_DATA=str(hooked))
            assert json.loads(done.stdout) == {"action": "wait", "turns_before": turns_before}
        states = [json.loads(json.loads(request.body)["messages"][1]["content"]) for request in model.seen]
    assert [state["turns_before"] for state in states] == [0, 1]
    assert (hooked / "turns").read_text() == "2"


@pytest.mark.parametrize("hook", ["prepare_state", "record_turn"])
@pytest.mark.parametrize("body", ["args[0].clear(); raise RuntimeError('out of ink')", "return 'no object'"])
def test_failing_hook_has_no_effect(hooked: Path, hook: str, body: str) -> None:
    (hooked / "skills" / "maze" / "policy.py").write_text(f"{POLICY}\ndef {hook}(*args):\n    {body}\n")
    with run_scripted_server(say('{"action": "wait"}')) as model:
        done = turn_with(model, {"environment_type": "maze", "legal_actions": [{"type": "X"}]}, LEASEHOLD_DATA=str(hooked))
    assert (done.returncode, json.loads(done.stdout)) == (0, {"type": "X", "reason": "policy", "by": "heuristic"})
    assert ("out of ink" in done.stderr) == ("raise" in body)
