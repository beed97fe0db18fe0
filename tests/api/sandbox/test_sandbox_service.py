"""Client of a sandbox and its agents, against a server in a thread."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from django.db import connections

from leases.adapters import sandbox_service
from leases.adapters.sandbox_service import ApiClient, QueryHandle, SandboxService, SandboxServiceError
from leases.api import command_threads
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ApiClient as KeyClient

pytestmark = pytest.mark.django_db(transaction=True)
MESSAGES = [{"type": "assistant", "turn_id": "1", "text": "Secret: hunter2"}, {"type": "result", "text": "Done."}]
PROMPT = "".join(f"{json.dumps(message)}\n" for message in MESSAGES)
PROGRAM = {"cli": "program", "argv": ["cat"]}


@pytest.fixture
def sandbox(ada: KeyClient, lease: dict[str, Any], live_server: Any) -> Iterator[SandboxService]:
    client = ApiClient(live_server.url, ada.key, pause=lambda seconds: None)
    yield SandboxService(client, lease["id"])
    command_threads.join_all()
    client.close()
    connections.close_all()


def test_files_and_commands(sandbox: SandboxService) -> None:
    sandbox.write_file("/workspace/a b.txt", "ü")
    assert sandbox.read_file("/workspace/a b.txt") == "ü".encode()
    for result in (
        sandbox.exec("echo out; echo err >&2; exit 3"),
        sandbox.exec("sh", ["-c", "echo out; echo err >&2; exit 3"]),
    ):
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert sandbox.exec("echo out", []).exit_code == 127  # the name of a program
    sandbox.destroy()
    with pytest.raises(SandboxServiceError) as failed:
        sandbox.exec("true")
    error = failed.value
    assert (error.operation, error.provider, error.retryable, error.cause) == ("exec", "leasehold", False, "lease_ended")


@pytest.mark.parametrize("isolated", [True, False])
def test_provider_and_isolation_are_those_of_the_sandbox(
    sandbox: SandboxService, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch, isolated: bool
) -> None:
    monkeypatch.setattr(MemoryProvider, "isolated", isolated)
    with pytest.raises(SandboxServiceError, match="no sandbox") as failed:
        str(sandbox.provider)
    assert failed.value.retryable
    monkeypatch.setattr(sandbox_service, "RETRY_PERIOD_SECONDS", 0.0)
    with memory.fail("exec", Unavailable("timed out")), pytest.raises(SandboxServiceError) as failed:
        sandbox.exec("true")
    assert failed.value.provider == "memory"
    assert (sandbox.provider, sandbox.isolated) == ("memory", isolated)


def test_messages_are_streamed_to_any_number_of_readers(sandbox: SandboxService) -> None:
    query = sandbox.run_agent(PROMPT, PROGRAM)
    assert [*query.stream()] == MESSAGES
    assert [[*each] for each in (*query.broadcast(2), query.share())] == [MESSAGES] * 3
    result = query.result()
    assert (result["state"], result["result"]) == ("completed", "Done.")
    query.interrupt()


def test_observers_redact_and_drop_messages(sandbox: SandboxService) -> None:
    seen: list[Any] = []

    def redact(message: dict[str, Any]) -> dict[str, Any]:
        return message | {"text": message["text"].replace("hunter2", "***")}

    def drop_results(message: dict[str, Any]) -> dict[str, Any] | None:
        seen.append(message["type"])
        return None if message["type"] == "result" else message

    query = sandbox.run_agent(PROMPT, PROGRAM, observers=[redact, drop_results])
    assert [message["text"] for message in query.stream()] == ["Secret: ***"]
    assert seen == ["assistant", "result"]


def test_interrupted_stream_is_continued_after_its_last_event(sandbox: SandboxService, monkeypatch: pytest.MonkeyPatch) -> None:
    query = sandbox.run_agent(PROMPT, PROGRAM)
    original, requested = ApiClient._read_stream, list[str]()

    def cut(self: ApiClient, path: str, last_id: str) -> Iterator[Any]:
        requested.append(last_id)
        yield next(original(self, path, last_id))  # one event of each response
        raise requests.ConnectionError("cut")

    monkeypatch.setattr(ApiClient, "_read_stream", cut)
    assert [*query.stream()] == MESSAGES
    assert len(requested) == len(set(requested)) == 4  # start, two messages, end


def test_options_of_agent_sdks_are_translated_or_refused_by_name(sandbox: SandboxService) -> None:
    limits = {"maxTurns": 3, "allowedTools": ["Bash"], "deniedCommands": ["rm *"], "permissionMode": "plan"}
    result = sandbox.run_agent(PROMPT, PROGRAM | limits).result()
    assert (result["policy"]["max_turns"], result["policy"]["allowed_tools"]) == (3, ["Bash"])
    for name in ("hooks", "canUseTool", "mcpServers", "abortController", "spawnClaudeCodeProcess"):
        with pytest.raises(SandboxServiceError, match=sandbox_service._to_snake_case(name)) as failed:
            sandbox.run_agent("x", {name: {}})
        assert failed.value.operation == "runAgent"
    with pytest.raises(SandboxServiceError, match="cannot be sent"):
        sandbox.run_agent("x", {"stderr": print})
    with pytest.raises(SandboxServiceError, match="must be a string"):
        sandbox.run_agent(iter(["x"]))  # type: ignore[arg-type]


def test_verbs_without_meaning_in_a_sandbox_fail_by_name_or_have_defaults(sandbox: SandboxService) -> None:
    query = QueryHandle(sandbox._client, "", ())
    for name, call in {
        "send": lambda: query.send("x"),
        "sendAll": lambda: query.send_all(["x"]),
        "sendForked": lambda: query.send_forked("x"),
        "setMcpServers": lambda: query.set_mcp_servers({}),
        "accountInfo": query.account_info,
    }.items():
        with pytest.raises(SandboxServiceError) as failed:
            call()
        assert (failed.value.operation, failed.value.retryable) == (name, False)
    assert query.rewind_files() == {"can_rewind": False}
    assert (query.supported_commands(), query.supported_models(), query.mcp_server_status()) == ([], [], [])
    for change in (query.close_input, query.set_model, lambda: query.set_permission_mode("plan")):
        change()


def test_unavailable_server_is_retried_with_the_same_key(sandbox: SandboxService, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, original = list[str](), requests.Session.request

    def fail_twice(self: Any, method: str, url: str, **options: Any) -> Any:
        keys.append(options["headers"]["Idempotency-Key"])
        if len(keys) < 3:
            raise requests.ConnectionError("no")
        return original(self, method, url, **options)

    monkeypatch.setattr(requests.Session, "request", fail_twice)
    assert sandbox.exec("echo", ["x"]).stdout == "x\n"
    assert len(keys) == 3
    assert len(set(keys)) == 1
