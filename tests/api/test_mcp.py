"""MCP endpoint /mcp: authentication, browsers, arguments, and the errors of the HTTP API as results of tools."""

import base64
import json
import sys
import uuid
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from django.test import Client

from leases.api.mcp.api_tool import ApiTool
from leases.api.mcp.catalog import TOOLS
from leases.models import KeyScope, Lease
from sandboxes.models import Pool
from tests.api.conftest import ApiClient, expire_lease, load_openapi
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db
UNKNOWN_ID = str(uuid.UUID(int=1))
LEGACY, MODERN = "2025-06-18", "2026-07-28"
MODERN_META = {
    "io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}  # fmt: skip
READING = {"lease_list", "lease_status", "run_list", "run_get", "read_file", "list_files", "snapshot_list"}


class McpClient:
    """Sends single messages with one API key."""

    def __init__(self, key: str, version: str = LEGACY) -> None:
        self.key, self.version, self.client = key, version, Client(raise_request_exception=False)

    def post(self, message: Any, **headers: str) -> Any:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        defaults = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": self.version}
        if self.key:
            defaults["Authorization"] = f"Bearer {self.key}"
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        content_type = names.pop("content-type", "application/json")
        return self.client.post("/mcp", body, content_type=content_type, headers=defaults | names)

    def request(self, method: str, **params: Any) -> dict[str, Any]:
        headers = {}
        if self.version == MODERN:
            params |= {"_meta": MODERN_META}
            headers = {"mcp_method": method, "mcp_name": params.get("name", "")}
        response = self.post({"jsonrpc": "2.0", "id": 7, "method": method, "params": params}, **headers)
        answer: dict[str, Any] = response.json()
        assert response.status_code == 200, answer
        assert answer["id"] == 7
        return answer

    def call(self, name: str, **arguments: Any) -> tuple[bool, dict[str, Any]]:
        """Call a tool. Return whether it failed, and its structured content, which is also its text."""
        result = self.request("tools/call", name=name, arguments=arguments)["result"]
        (text,) = result["content"]
        assert json.loads(text["text"]) == result["structuredContent"]
        return result.get("isError", False), result["structuredContent"]

    def succeed(self, name: str, **arguments: Any) -> dict[str, Any]:
        failed, content = self.call(name, **arguments)
        assert not failed, content
        return content

    def fail(self, name: str, **arguments: Any) -> dict[str, Any]:
        failed, content = self.call(name, **arguments)
        assert failed, content
        assert content["type"].startswith("urn:leasehold:problem:")
        return content


@pytest.fixture
def ada_mcp(ada: ApiClient) -> McpClient:
    return McpClient(ada.key)


@pytest.fixture
def lease_id(ada_mcp: McpClient, pool: Pool) -> str:
    lease = ada_mcp.succeed("lease_acquire", environment_id="task-1", environment_type="coding", pool=pool.name)
    return str(lease["id"])


def test_a_key_is_required_as_by_the_http_api(db: None) -> None:
    for key, detail in ("", "Send Authorization: Bearer <key>."), ("lh_wrong", "The API key is unknown or revoked."):
        response = McpClient(key).post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, 'Bearer realm="leasehold"')
        assert response.json()["detail"] == detail


def test_only_post_is_answered(ada: ApiClient) -> None:
    for method in ("GET", "DELETE", "PUT"):
        response = Client().generic(method, "/mcp", headers={"Authorization": f"Bearer {ada.key}"})
        assert (response.status_code, response.headers["Allow"]) == (405, "POST")


def test_pages_of_other_sites_cannot_use_a_browser(ada_mcp: McpClient, settings: Any) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    settings.ALLOWED_HOSTS = ["leasehold.example", "testserver"]
    rebound = ada_mcp.post(message, host="attacker.example", origin="http://attacker.example")
    assert (rebound.status_code, rebound.json()["code"]) == (421, "host_not_allowed")
    for origin in ("http://attacker.example", "null", "https://testserver", "http://testserver.attacker.example"):
        refused = ada_mcp.post(message, origin=origin)
        assert (refused.status_code, refused.json()["code"]) == (403, "origin_not_allowed"), origin
    assert ada_mcp.post(message, origin="http://testserver").status_code == 200
    settings.CSRF_TRUSTED_ORIGINS = ["https://tools.example"]
    assert ada_mcp.post(message, origin="https://tools.example").status_code == 200
    assert ada_mcp.post(message, host="leasehold.example").status_code == 200


def test_without_the_extra_the_answer_names_it(ada_mcp: McpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("leases.api.mcp.server", "leases.api.mcp.bridge"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "sandboxes.mcp.endpoint", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "mcp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delattr("leases.api.mcp.server", raising=False)
    response = ada_mcp.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    assert (response.status_code, response.json()["code"]) == (501, "mcp_not_installed")
    assert "leasehold[mcp]" in response.json()["detail"]


def test_a_body_above_the_limit_is_refused(ada_mcp: McpClient) -> None:
    response = ada_mcp.post(b" " * ((16 << 20) + 1))
    assert (response.status_code, response.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000, b'{"jsonrpc": "2.0"}'])
def test_a_body_that_is_no_message_is_a_json_rpc_error(ada_mcp: McpClient, body: bytes) -> None:
    for version in (LEGACY, MODERN):
        ada_mcp.version = version
        response = ada_mcp.post(body)
        assert 400 <= response.status_code < 500 or response.status_code == 202, response.content
        assert response.status_code == 202 or response.json()["error"]["code"] < 0


def test_unknown_tools_and_methods_are_protocol_errors(ada_mcp: McpClient) -> None:
    answer = ada_mcp.request("tools/call", name="format_disk", arguments={})
    assert answer["error"] == {"code": -32602, "message": "Unknown tool: format_disk"}
    assert ada_mcp.request("resources/list")["error"]["code"] == -32601


def test_initialize_and_the_list_of_tools(ada_mcp: McpClient) -> None:
    client = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    result = ada_mcp.request("initialize", **client)["result"]
    assert (result["protocolVersion"], result["serverInfo"]["name"]) == (LEGACY, "leasehold")
    assert ada_mcp.post({"jsonrpc": "2.0", "method": "notifications/initialized"}).status_code == 202
    tools = {tool["name"]: tool for tool in ada_mcp.request("tools/list")["result"]["tools"]}
    assert tools.keys() == {tool.name for tool in TOOLS}
    assert {name for name, tool in tools.items() if tool["annotations"]["readOnlyHint"]} == READING
    assert tools["lease_release"]["annotations"]["destructiveHint"] is True
    for tool in tools.values():
        jsonschema.Draft202012Validator.check_schema(tool["inputSchema"])
        assert tool["inputSchema"]["additionalProperties"] is False


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_arguments_are_fields_and_parameters_of_the_operation(tool: ApiTool) -> None:
    names = {"lease_id": "id"}
    path = "/api/v1/" + tool.path.format(**{name: "{" + names.get(name, name) + "}" for name in tool.path_arguments})
    operation = load_openapi()["paths"][path][tool.method.lower()]
    parameters = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"}
    assert set(tool.query) <= parameters
    if tool.method == "POST":
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        reference = content["schema"]["$ref"].rpartition("/")[2] if content else None
        schema = load_openapi()["components"]["schemas"][reference] if reference else {"properties": {}}
        assert tool.body_arguments - {"command"} <= schema["properties"].keys()
        mandatory = set(schema.get("required", ())) - {"argv", "agent_did"}  # filled in by the tool
        assert mandatory <= set(tool.required)
        assert "idempotency_key" in tool.arguments


def test_a_lease_from_acquire_to_release(ada_mcp: McpClient, lease_id: str, pool: Pool) -> None:
    again = ada_mcp.succeed("lease_acquire", environment_id="task-1", environment_type="coding", agent_did=ADA)
    assert (again["id"], again["is_new"], again["agent_did"]) == (lease_id, False, ADA)
    assert ada_mcp.succeed("lease_status", lease_id=lease_id)["status"] == "active"
    assert "expires_at" in ada_mcp.succeed("lease_renew", lease_id=lease_id)
    assert [row["id"] for row in ada_mcp.succeed("lease_list", status="active")["results"]] == [lease_id]
    for mistake in ({}, {"command": "true", "argv": ["true"]}):
        assert ada_mcp.fail("exec", lease_id=lease_id, **mistake)["field"] == "command"
    run = ada_mcp.succeed("exec", lease_id=lease_id, command="echo hi")
    shown = ada_mcp.succeed("run_get", lease_id=lease_id, run_id=run["run_id"])
    assert (shown["argv"], shown["exit_code"]) == (["sh", "-c", "echo hi"], run["exit_code"])
    fork = ada_mcp.succeed("fork", lease_id=lease_id, environment_id="task-2", pool=pool.name)
    assert (fork["environment_id"], fork["is_new"]) == ("task-2", True)
    assert ada_mcp.succeed("lease_release", lease_id=lease_id)["end_reason"] == "released"
    ended = ada_mcp.fail("exec", lease_id=lease_id, argv=["true"])
    assert (ended["code"], ended["end_reason"]) == ("lease_ended", "released")


def test_a_repeated_call_with_an_idempotency_key_executes_once(ada: ApiClient, ada_mcp: McpClient, lease_id: str) -> None:
    call = {"lease_id": lease_id, "argv": ["true"], "idempotency_key": "k-1"}
    first, second = ada_mcp.succeed("exec", **call), ada_mcp.succeed("exec", **call)
    assert first == second
    assert len(ada.get(f"leases/{lease_id}/runs").json()["results"]) == 1
    assert ada_mcp.fail("exec", **call | {"argv": ["false"]})["code"] == "idempotency_key_reused"
    same_key_over_http = ada.post(f"leases/{lease_id}/exec", {"argv": ["true"]}, idempotency_key="k-1")
    assert (same_key_over_http.status_code, same_key_over_http.json()["run_id"]) == (200, first["run_id"])


def test_files_are_read_in_parts(ada_mcp: McpClient, lease_id: str) -> None:
    content = bytes(range(256)) * 4
    text = base64.b64encode(content).decode()
    path = "a dir/ü?#%2F&.bin"
    written = ada_mcp.succeed("write_file", lease_id=lease_id, path=path, content=text, encoding="base64")
    assert written == {"path": path, "size_bytes": 1024}
    read, offset = b"", 0
    while offset is not None:
        part = ada_mcp.succeed("read_file", lease_id=lease_id, path=path, offset=offset, length=400, encoding="base64")
        read, offset = read + base64.b64decode(part["content"]), part["next_offset"]
        assert part["size_bytes"] == 1024
    assert read == content
    names = [entry["name"] for entry in ada_mcp.succeed("list_files", lease_id=lease_id, deep=True)["entries"]]
    assert path in names
    ada_mcp.succeed("write_file", lease_id=lease_id, path="empty", content="")
    empty = {"content": "", "encoding": "utf-8", "offset": 0, "size_bytes": 0, "next_offset": None}
    assert ada_mcp.succeed("read_file", lease_id=lease_id, path="empty") == empty
    assert ada_mcp.fail("read_file", lease_id=lease_id, path="empty", offset=1)["code"] == "range_not_satisfiable"
    assert ada_mcp.fail("read_file", lease_id=lease_id, path="none")["code"] == "file_not_found"
    assert ada_mcp.fail("read_file", lease_id=lease_id, path="../etc/passwd")["code"] == "bad_path"
    assert ada_mcp.fail("write_file", lease_id=lease_id, path="x", content="?", encoding="base64")["field"] == "content"
    assert ada_mcp.fail("write_file", lease_id=lease_id, path="x", content="x" * ((8 << 20) + 1))["field"] == "content"


def test_files_have_absolute_paths_as_well(ada_mcp: McpClient, lease_id: str) -> None:
    ada_mcp.succeed("write_file", lease_id=lease_id, path="/workspace/a dir/x", content="one")
    assert ada_mcp.succeed("read_file", lease_id=lease_id, path="a dir/x")["content"] == "one"
    ada_mcp.succeed("write_file", lease_id=lease_id, path="/data/x", content="two")
    assert ada_mcp.succeed("read_file", lease_id=lease_id, path="x", root="data")["content"] == "two"
    for path in ("/data", "/data/"):
        assert "x" in [entry["name"] for entry in ada_mcp.succeed("list_files", lease_id=lease_id, path=path)["entries"]]


def test_a_null_for_an_optional_argument_is_its_default(ada_mcp: McpClient, lease_id: str) -> None:
    nulls = dict.fromkeys(("argv", "cwd", "env", "stdin", "timeout_seconds", "shell", "encoding", "idempotency_key"))
    result = ada_mcp.succeed("exec", lease_id=lease_id, command="pwd", **nulls)
    assert (result["exit_code"], result["stdout"]) == (0, "/workspace\n")
    assert ada_mcp.succeed("list_files", lease_id=lease_id, path=None, root=None, deep=None)["path"] == ""


def test_lists_have_a_cursor(ada_mcp: McpClient, lease_id: str, pool: Pool) -> None:
    other = ada_mcp.succeed("lease_acquire", environment_id="task-2", environment_type="coding", pool=pool.name)["id"]
    first = ada_mcp.succeed("lease_list", limit=1)
    second = ada_mcp.succeed("lease_list", limit=1, cursor=first["next_cursor"])
    assert [first["results"][0]["id"], second["results"][0]["id"]] == [other, lease_id]
    assert second["next_cursor"] is None


BAD_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("lease_acquire", {"environment_id": "e"}, "environment_type"),
    ("lease_acquire", {"environment_id": "a/b", "environment_type": "coding"}, "environment_id"),
    ("lease_acquire", {"environment_id": "", "environment_type": "coding"}, "environment_id"),
    ("lease_acquire", {"environment_id": "e", "environment_type": "chess"}, "environment_type"),
    ("lease_acquire", {"environment_id": "e", "environment_type": "coding", "ttl_seconds": "60"}, "ttl_seconds"),
    ("lease_acquire", {"environment_id": "e", "environment_type": "coding", "idempotency_key": "a b"}, "Idempotency-Key"),
    ("lease_status", {}, "lease_id"),
    ("lease_status", {"lease_id": 5}, "lease_id"),
    ("lease_status", {"lease_id": f"{UNKNOWN_ID}/runs"}, "lease_id"),
    ("lease_status", {"lease_id": UNKNOWN_ID, "verbose": True}, "verbose"),
    ("lease_list", {"limit": 0}, "limit"),
    ("lease_list", {"limit": 1.5}, "limit"),
    ("lease_list", {"cursor": "?"}, "cursor"),
    ("lease_list", {"agent_did": "ada"}, "agent_did"),
    ("exec", {"lease_id": UNKNOWN_ID, "argv": "ls"}, "argv"),
    ("read_file", {"lease_id": UNKNOWN_ID, "path": ""}, "path"),
    ("read_file", {"lease_id": UNKNOWN_ID, "path": "a", "length": 0}, "length"),
    ("read_file", {"lease_id": UNKNOWN_ID, "path": "a", "offset": 10**400}, "offset"),
    ("read_file", {"lease_id": UNKNOWN_ID, "path": "/etc/passwd"}, "path"),
    ("read_file", {"lease_id": UNKNOWN_ID, "path": "/workspace"}, "path"),
    ("list_files", {"lease_id": UNKNOWN_ID, "path": "/"}, "path"),
    ("read_file", {"lease_id": UNKNOWN_ID, "path": "/workspace/x", "root": "data"}, "path"),
    ("write_file", {"lease_id": UNKNOWN_ID, "path": "a", "content": 5}, "content"),
    ("write_file", {"lease_id": UNKNOWN_ID, "path": "a", "content": None}, "content"),
]


@pytest.mark.parametrize(("name", "arguments", "field"), BAD_ARGUMENTS)
def test_bad_arguments_are_problems_that_name_them(ada_mcp: McpClient, name: str, arguments: Any, field: str) -> None:
    problem = ada_mcp.fail(name, **arguments)
    assert (problem["status"], problem["field"]) == (400, field), problem
    assert not Lease.objects.exists()


def test_leases_of_other_agents_do_not_exist(lease_id: str, bob: ApiClient, pool: Pool) -> None:
    stranger = McpClient(bob.key)
    for lease in (lease_id, UNKNOWN_ID, "no-uuid"):
        for tool in ("lease_status", "lease_release", "list_files", "snapshot_list"):
            assert stranger.fail(tool, lease_id=lease)["code"] == "not_found"
        assert stranger.fail("exec", lease_id=lease, command="true")["code"] == "not_found"
    arguments = {"environment_type": "coding", "pool": pool.name}
    assert stranger.fail("lease_acquire", agent_did=ADA, environment_id="task-1", **arguments)["code"] == "forbidden"
    assert stranger.fail("lease_acquire", environment_id="task-1", **arguments)["code"] == "environment_not_found"
    assert stranger.succeed("lease_list")["results"] == []
    assert stranger.succeed("lease_acquire", environment_id="task-2", **arguments)["agent_did"] == BOB


def test_an_agent_is_required_for_a_key_of_several(issue: Callable[..., ApiClient], pool: Pool) -> None:
    for key in (issue(ADA, BOB), issue(operator=True)):
        problem = McpClient(key.key).fail("lease_acquire", environment_id="e", environment_type="coding", pool=pool.name)
        assert problem["field"] == "agent_did"


def test_a_reading_key_may_only_use_reading_tools(issue: Callable[..., ApiClient], lease_id: str) -> None:
    reader = McpClient(issue(ADA, scopes=[KeyScope.READ]).key)
    assert reader.succeed("lease_status", lease_id=lease_id)["id"] == lease_id
    assert reader.succeed("list_files", lease_id=lease_id)["path"] == ""
    assert reader.fail("exec", lease_id=lease_id, command="true")["code"] == "insufficient_scope"
    assert reader.fail("lease_release", lease_id=lease_id)["code"] == "insufficient_scope"
    counter = McpClient(issue(ADA, scopes=[KeyScope.COSTS]).key)
    assert counter.fail("lease_status", lease_id=lease_id)["code"] == "insufficient_scope"


def test_new_leases_count_against_the_rate_of_the_key(ada_mcp: McpClient, lease_id: str, pool: Pool, settings: Any) -> None:
    settings.CREATES_PER_MINUTE = 1
    arguments = {"environment_type": "coding", "pool": pool.name}
    outcomes = [ada_mcp.call("lease_acquire", environment_id=f"more-{n}", **arguments)[1].get("code") for n in range(3)]
    assert outcomes[-1] == "rate_limited"


def test_an_elapsed_lease_is_a_problem_with_its_reason(ada_mcp: McpClient, lease_id: str) -> None:
    expire_lease(lease_id)
    problem = ada_mcp.fail("lease_renew", lease_id=lease_id)
    assert (problem["code"], problem["end_reason"], problem["retryable"]) == ("lease_ended", "ttl", False)


def test_a_crash_of_a_tool_is_an_internal_problem(ada_mcp: McpClient, lease_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("leases.leasing.release", fail)
    problem = ada_mcp.fail("lease_release", lease_id=lease_id)
    assert (problem["status"], problem["code"]) == (500, "internal")
    assert "secret" not in json.dumps(problem)


def test_the_present_version_of_the_protocol_needs_no_handshake(ada_mcp: McpClient, lease_id: str) -> None:
    ada_mcp.version = MODERN
    assert ada_mcp.succeed("lease_status", lease_id=lease_id)["id"] == lease_id
    assert ada_mcp.fail("lease_status", lease_id=UNKNOWN_ID)["code"] == "not_found"


@pytest.mark.parametrize(
    ("arguments", "field"), [({"command": "\ud800"}, "command"), ({"env": {"\udfff": "1"}}, "env"), ({"\ud800": 1}, "?")]
)
def test_text_without_an_encoding_is_refused(ada_mcp: McpClient, arguments: Any, field: str) -> None:
    """Before 2026-07-28 the message is a parse error."""
    assert ada_mcp.post(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "\ud800"}).encode()).json()["error"]["code"] == -32700
    ada_mcp.version = MODERN
    problem = ada_mcp.fail("exec", **{"lease_id": UNKNOWN_ID, "argv": ["true"]} | arguments)
    assert (problem["status"], problem["field"]) == (400, field)
