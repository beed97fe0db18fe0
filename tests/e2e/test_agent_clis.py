"""Claude Code and Codex in sealed sandboxes, against a scripted model behind the egress proxy."""

import json
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from leases.agent_runs.clis.registry import CLIS
from tests.commands.manage import run_manage
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.event_stream import Event, open_stream, parse_events
from tests.support.servers import services
from tests.support.servers.scripted_models import INPUT_TOKENS, OUTPUT_TOKENS, ScriptedModelServer
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.docker,
    pytest.mark.matrix("image with agent CLIs; agent runs have their own tests below tests/api"),
]
IMAGE = "leasehold-sandbox-agents:latest"  # built by .ci/services
PRICED_MODELS = (
    "claude-sonnet-4-5",
    "claude-opus-4-5",
    "claude-haiku-4-5",
    "claude-opus-4-6",
    "claude-sonnet-5",
    "claude-opus-5",
)
MODELS = ",".join(("claude-x", "gpt-x", *PRICED_MODELS))
MEMORY_MIB = 1024


@pytest.fixture
def model() -> Iterator[ScriptedModelServer]:
    with closing(ScriptedModelServer().start()) as server:
        yield server


@pytest.fixture
def lease(fleet: Fleet, model: ScriptedModelServer) -> str:  # noqa: F811
    services.start("agent-clis")
    fleet.env |= {
        "LEASEHOLD_SANDBOX_IMAGE": IMAGE,
        "LEASEHOLD_LLM_URL": f"{model.url}/v1",
        "LEASEHOLD_LLM_API_KEY": "sk-upstream-secret",
        "LEASEHOLD_LLM_MODELS": MODELS,
    }
    fleet.update(f"UPDATE sandboxes_pool SET memory_mib = {MEMORY_MIB}")  # with less, the program is read again and again
    fleet.up()
    lease = fleet.join(0)
    assert lease
    return lease


def call(tool: str, **arguments: Any) -> str:
    """Return the line of a prompt that makes the scripted model call a tool."""
    return f"CALL {tool} {json.dumps(arguments)}"


def run_agent(fleet: Fleet, lease: str, *lines: str, **fields: Any) -> tuple[dict[str, Any], list[Event]]:  # noqa: F811
    """Run an agent to its end. Return the agent run and the events of its stream."""
    status, started = fleet.post(f"/leases/{lease}/agent-runs", {"prompt": "\n".join(lines), "timeout_seconds": 120} | fields)
    assert status == 201, started
    path = f"/leases/{lease}/agent-runs/{started['run_id']}/stream"
    with closing(open_stream(fleet.port, fleet.key, "GET", path)) as response:
        events = list(parse_events(response))
    assert (events[0].name, events[-1].name) == ("start", "end")
    return events[-1].data, events


def read(fleet: Fleet, lease: str, path: str) -> str:  # noqa: F811
    answer = fleet.post(f"/leases/{lease}/exec", {"argv": ["cat", path]})[1]
    return str(answer["stdout"])


def put_to_sleep(fleet: Fleet) -> None:  # noqa: F811
    fleet.update("UPDATE sandboxes_sandbox SET idle_at = '2020-01-01 00:00:00+00:00' WHERE state = 'waiting'")

    def sleeps() -> bool:
        fleet.sweep()
        return fleet.select("SELECT state FROM sandboxes_sandbox") == [("cold",)]

    wait_until(sleeps, "the sandbox is cold", within=60.0, every=1.0)


def test_claude_code_resumes_its_session_after_a_sleep(fleet: Fleet, lease: str, model: ScriptedModelServer) -> None:  # noqa: F811
    options = {"model": "claude-x", "permission_mode": "acceptEdits", "allowed_tools": ["Write", "Edit", "Bash"]}
    first, events = run_agent(
        fleet, lease, "Write a file.", call("Write", file_path="/workspace/a.txt", content="one\n"), **options
    )
    assert (first["state"], first["result"], first["is_error"]) == ("completed", "Done after 1 calls.", False), events
    assert (first["turn_count"], first["malformed_count"], first["lost_bytes"]) == (2, 0, 0)
    assert read(fleet, lease, "/workspace/a.txt") == "one\n"
    kinds = [event.data["message"]["type"] for event in events if event.name == "message"]
    assert kinds == ["system", "assistant", "user", "assistant", "result"]
    put_to_sleep(fleet)
    second, events = run_agent(
        fleet, lease, "Change it.",
        call("Edit", file_path="/workspace/a.txt", old_string="one", new_string="two"),
        call("Bash", command="echo three >> a.txt", description="append"),
        resume=True, **options,
    )  # fmt: skip
    assert (second["state"], second["session_id"], second["resumed"]) == ("completed", first["session_id"], True), events
    assert read(fleet, lease, "/workspace/a.txt") == "two\nthree\n"
    last = json.dumps(model.requests[-1][2]["messages"])
    assert "Write a file." in last and "Change it." in last  # the session was continued
    path, headers, body = model.requests[-1]
    assert (path, headers["x-api-key"], body["stream"]) == ("/v1/messages?beta=true", "sk-upstream-secret", True)
    assert "claude-code-20250219" in headers["anthropic-beta"].split(",")
    calls = fleet.select(
        "SELECT outcome, input_tokens, output_tokens, run_id FROM sandboxes_llmcall WHERE outcome <> 'refused'"
    )
    assert len(calls) == len(model.requests) == 5
    assert {(outcome, tokens, output) for outcome, tokens, output, _ in calls} == {("ok", INPUT_TOKENS, OUTPUT_TOKENS)}
    chat = fleet.request("GET", f"/leases/{lease}/chat?order=oldest&limit=100")[1]["results"]
    assert [row["message"]["role"] for row in chat][:6] == ["user", "system", "assistant", "tool", "assistant", "result"]


def test_claude_code_without_its_session_and_with_a_denied_command(fleet: Fleet, lease: str) -> None:  # noqa: F811
    gone = "7f7ec0b5-5a0c-4b43-a6a4-6b4d2c0b8a10"
    row, _ = run_agent(fleet, lease, "Hello.", model="claude-x", session_id=gone)
    assert (row["state"], row["resumed"]) == ("completed", False)
    assert row["session_id"] not in ("", gone)
    # Its own settings deny the command, and the message is a violation that interrupts the run.
    lines = "Remove it.", call("Bash", command="touch /workspace/bad", description="x"), call("Bash", command="ls")
    limits = {"allowed_tools": ["Bash"], "denied_commands": ["touch *"]}
    row, _ = run_agent(fleet, lease, *lines, model="claude-x", permission_mode="acceptEdits", **limits)
    assert (row["state"], row["violation"]) == ("interrupted", "Command denied by 'touch *': touch /workspace/bad")
    assert fleet.post(f"/leases/{lease}/exec", {"argv": ["test", "-e", "/workspace/bad"]})[1]["exit_code"] == 1


CACHE = {"input_tokens": 1000, "cache_read_input_tokens": 20_000, "output_tokens": 500}
USAGES: dict[str, dict[str, Any]] = {
    "plain": {"input_tokens": 1234, "output_tokens": 77},
    "cache for 5 minutes": CACHE
    | {
        "cache_creation_input_tokens": 8001,
        "cache_creation": {"ephemeral_5m_input_tokens": 8001, "ephemeral_1h_input_tokens": 0},
    },
    "cache for an hour": CACHE
    | {
        "cache_creation_input_tokens": 60_000,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 60_000},
    },
    "searches": CACHE | {"server_tool_use": {"web_search_requests": 3, "web_fetch_requests": 1}},
}


# USD that Claude Code states above the metered cost. The public prices have none for searches of this model: an estimate.
DIFFERENCES = {("claude-haiku-4-5", "searches"): 3 * Decimal("0.01")}


def test_claude_code_states_the_metered_cost_at_public_prices(fleet: Fleet, lease: str) -> None:  # noqa: F811
    imported = run_manage(fleet.path, "rate", "import", "public", "--apply", "--from", "2026-01-01T00:00Z", **fleet.env)
    assert imported.returncode == 0, imported.stderr
    differences = {}
    for model in PRICED_MODELS:
        for name, usage in USAGES.items():
            row, events = run_agent(fleet, lease, "Hello.", f"USAGE {json.dumps(usage)}", model=model)
            assert row["state"] == "completed" and Decimal(row["cost_usd"]) > 0, events
            if difference := Decimal(row["reported_cost_usd"]) - Decimal(row["cost_usd"]):
                differences[model, name] = difference
    assert differences == DIFFERENCES
    estimates = fleet.select("SELECT DISTINCT model FROM sandboxes_llmcall WHERE priced <> 'rate'")
    assert estimates == [("claude-haiku-4-5",)]


ALLOW_TOOLS = """
from leases.models import EnvironmentType
from sandboxes.models import Policy
policy = Policy.objects.create(name="tools", mcp_tools=["lease_status", "put_artifact"])
EnvironmentType.objects.filter(name="coding").update(policy=policy)
"""


def test_claude_code_calls_tools_of_the_control_plane(fleet: Fleet, lease: str, model: ScriptedModelServer) -> None:  # noqa: F811
    assert run_manage(fleet.path, "shell", "-c", ALLOW_TOOLS, **fleet.env).returncode == 0
    lease = fleet.join(1) or ""  # a sandbox keeps the policy with which it was claimed
    row, events = run_agent(
        fleet, lease, "Report.", call("mcp__leasehold__put_artifact", name="report.md", content="done"), model="claude-x"
    )
    assert (row["state"], row["result"], row["violation"]) == ("completed", "Done after 1 calls.", ""), events
    assert [each["name"] for each in fleet.request("GET", f"/leases/{lease}/artifacts")[1]["results"]] == ["report.md"]
    assert "size_bytes" in json.dumps(model.requests[-1][2]["messages"])  # the model has the result of the tool


def test_codex_executes_a_command_and_resumes_its_session(fleet: Fleet, lease: str, model: ScriptedModelServer) -> None:  # noqa: F811
    options = {"cli": "codex", "model": "gpt-x"}
    first, events = run_agent(fleet, lease, "Write a file.", call("exec_command", cmd="echo one > a.txt"), **options)
    assert (first["state"], first["result"]) == ("completed", "Done after 1 calls."), events
    assert read(fleet, lease, "/workspace/a.txt") == "one\n"
    second, events = run_agent(fleet, lease, "Go on.", call("exec_command", cmd="echo two >> a.txt"), resume=True, **options)
    assert (second["state"], second["session_id"], second["resumed"]) == ("completed", first["session_id"], True), events
    assert read(fleet, lease, "/workspace/a.txt") == "one\ntwo\n"
    assert "Write a file." in json.dumps(model.requests[-1][2]["input"])


@pytest.mark.parametrize("mode", ["read-only", "workspace-write"])
def test_codex_cannot_restrict_commands_in_the_container(fleet: Fleet, lease: str, mode: str) -> None:  # noqa: F811
    """The reason for its `permission_modes`: if a version can, the modes `plan` and `acceptEdits` become possible."""
    argv = ["codex", "sandbox", "-c", f"sandbox_mode={mode}", "--", "true"]
    answer = fleet.post(f"/leases/{lease}/exec", {"argv": argv})[1]
    assert answer["exit_code"] != 0 and "namespace" in answer["stderr"], answer


def test_packages_of_the_image_are_those_of_the_adapters() -> None:
    """`.ci/services` installs them by name."""
    script = (Path(__file__).resolve().parents[2] / ".ci/services").read_text()
    assert all(f"--npm {cli.npm_package}" in script for cli in CLIS.values() if cli.npm_package)
