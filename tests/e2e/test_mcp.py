"""Official MCP clients, unmodified, against a running control plane with sandboxes in containers."""

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from leases.api.mcp.catalog import TOOLS
from tests.commands.manage import run_manage
from tests.e2e.conftest import FleetTemplate
from tests.e2e.test_kill import Fleet, create_fleet, fleet  # noqa: F401 - fixture
from tests.support.servers.services import require_environment

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
AGENT = "did:web:mcp.invalid"
UNKNOWN_ID = "00000000-0000-0000-0000-000000000001"
CALL_COUNT = 24  # at once, six times the threads of the web server
TIMEOUT_SECONDS = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, docker_ready: None, fleet_template: FleetTemplate) -> Iterator[Fleet]:
    """Control plane of the tests that only lease sandboxes, each of them for its own environments."""
    with create_fleet(tmp_path_factory.mktemp("mcp"), fleet_template) as server:
        server.up()
        yield server


@pytest.fixture(scope="module")
def key(server: Fleet) -> str:
    created = run_manage(server.path, "create_key", "--agent", AGENT, "--json", **server.env)
    return str(json.loads(created.stdout)["key"])


class Session:
    """Connected client of the official package."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        result = await self.client.call_tool(name, arguments)
        assert not result.is_error, result
        content: dict[str, Any] = result.structured_content
        return content

    async def fail(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        result = await self.client.call_tool(name, arguments)
        assert result.is_error, result
        problem: dict[str, Any] = result.structured_content
        return problem


@asynccontextmanager
async def connect(server: Fleet, key: str, mode: str = "auto") -> AsyncIterator[Session]:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT_SECONDS) as http:
        transport = streamable_http_client(f"http://127.0.0.1:{server.port}/mcp", http_client=http)
        async with Client(transport, mode=mode) as client:
            yield Session(client)


async def use_a_sandbox(session: Session, environment: str) -> None:
    """Lease, execute, write, read, list, snapshot, restore, fork, release."""
    listed = await session.client.list_tools()
    assert [tool.name for tool in listed.tools] == [tool.name for tool in TOOLS]
    lease = await session.call("lease_acquire", environment_id=environment, environment_type="coding")
    at = {"lease_id": lease["id"]}
    assert (lease["agent_did"], lease["sandbox"]["state"]) == (AGENT, "warm")
    result = await session.call("exec", **at, command="echo $NAME > who; cat; exit 3", env={"NAME": "ada"}, stdin="in")
    assert (result["exit_code"], result["stdout"], result["timed_out"]) == (3, "in", False)
    assert (await session.call("read_file", **at, path="who"))["content"] == "ada\n"
    content = base64.b64encode(bytes(range(256))).decode()
    await session.call("write_file", **at, path="src/a.bin", content=content, encoding="base64")
    counted = await session.call("exec", **at, argv=["wc", "-c", "src/a.bin"])
    assert counted["stdout"] == "256 src/a.bin\n"
    files = await session.call("list_files", **at, deep=True)
    assert {"who", "src", "src/a.bin"} <= {entry["name"] for entry in files["entries"]}
    snapshot = await session.call("snapshot_create", **at, name="before")
    await session.call("exec", **at, command="echo bob > who")
    fork = await session.call("fork", **at, environment_id=f"{environment}-fork", snapshot_id=snapshot["id"])
    assert (await session.call("exec", lease_id=fork["id"], command="cat who"))["stdout"] == "ada\n"
    await session.call("snapshot_restore", **at, snapshot_id=snapshot["id"])
    assert (await session.call("exec", **at, command="cat who"))["stdout"] == "ada\n"
    assert "before" in [each["name"] for each in (await session.call("snapshot_list", **at))["results"]]
    for lease_id in lease["id"], fork["id"]:
        assert (await session.call("lease_release", lease_id=lease_id))["end_reason"] == "released"
    assert (await session.fail("exec", **at, command="true"))["code"] == "lease_ended"


def test_the_official_client_uses_a_sandbox(server: Fleet, key: str) -> None:
    """With the present version of the protocol, and with the handshake of the versions before."""

    async def use(mode: str) -> None:
        async with connect(server, key, mode) as session:
            await use_a_sandbox(session, f"task-{mode}")
            assert (await session.fail("lease_status", lease_id=UNKNOWN_ID))["code"] == "not_found"

    async def use_wrong_key(mode: str) -> None:
        async with connect(server, f"{key}x", mode) as session:
            await session.client.list_tools()

    for mode in "auto", "legacy":
        asyncio.run(use(mode))
        with pytest.raises(ExceptionGroup) as raised:
            asyncio.run(use_wrong_key(mode))
        assert raised.group_contains(MCPError, match="error response")
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    response = httpx2.post(f"http://127.0.0.1:{server.port}/mcp", json=message, headers={"Authorization": f"Bearer {key}x"})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, 'Bearer realm="leasehold"')
    assert "Traceback" not in server.read_log()


def test_commands_of_many_calls_at_once_have_their_own_results(server: Fleet, key: str) -> None:
    """More calls than the web server has threads. A lease runs eight at once; a refused one can be repeated."""

    async def use() -> None:
        async with connect(server, key) as session:
            lease = await session.call("lease_acquire", environment_id="many", environment_type="coding")

            async def execute(number: int) -> tuple[int, dict[str, Any]]:
                result = await session.client.call_tool(
                    "exec", {"lease_id": lease["id"], "argv": ["sh", "-c", f"sleep 0.2; echo {number}"]}
                )
                return number, result.structured_content

            done = await asyncio.gather(*map(execute, range(CALL_COUNT)))
            for number, content in done:
                assert content.get("stdout") == f"{number}\n" or content["code"] in ("server_busy", "too_many_runs"), content
            assert any("stdout" in content for _, content in done)
            await session.call("lease_release", lease_id=lease["id"])

    asyncio.run(use())


def inspect(server: Fleet, key: str, home: Path, *options: str) -> Any:
    """Run the inspector's command line and return the JSON object that it prints."""
    node, inspector = require_environment("inspector", "TEST_NODE", "TEST_MCP_INSPECTOR")
    url, header = f"http://127.0.0.1:{server.port}/mcp", f"Authorization: Bearer {key}"
    done = subprocess.run(
        [node, inspector, "--cli", url, "--transport", "http", "--header", header, *options],
        env={"PATH": os.environ["PATH"], "HOME": str(home)}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0 or "isError" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.matrix("second client; the official one runs at each change")
def test_the_inspector_lists_and_calls_tools(server: Fleet, key: str, tmp_path: Path) -> None:
    listed = inspect(server, key, tmp_path, "--method", "tools/list", "--strict")
    assert {tool["name"] for tool in listed["tools"]} == {tool.name for tool in TOOLS}
    call = "--method", "tools/call", "--tool-name"
    arguments = "--tool-arg", "environment_id=inspected", "environment_type=coding"
    lease = inspect(server, key, tmp_path, *call, "lease_acquire", *arguments)["structuredContent"]
    run = inspect(server, key, tmp_path, *call, "exec", "--tool-arg", f"lease_id={lease['id']}", "command=echo $((6 * 7))")
    assert run["structuredContent"]["stdout"] == "42\n"
    failed = inspect(server, key, tmp_path, *call, "lease_status", "--tool-arg", f"lease_id={UNKNOWN_ID}")
    assert (failed["isError"], failed["structuredContent"]["code"]) == (True, "not_found")


ALLOW_TOOLS = """
from leases.models import EnvironmentType
from sandboxes.models import Policy
policy = Policy.objects.create(name="tools", mcp_tools=["lease_status", "put_artifact", "post_condition"])
EnvironmentType.objects.filter(name="coding").update(policy=policy)
"""
SEND_MESSAGES = """
import json, os, sys, urllib.request
results = []
for method, params in json.load(sys.stdin):
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "X-Leasehold-Slot": "999"}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/mcp"
    request = urllib.request.Request(url, json.dumps(message).encode(), headers)
    try:
        results.append(json.load(urllib.request.urlopen(request))["result"])
    except urllib.error.HTTPError as error:
        results.append([error.code, json.load(error)["error"]["code"]])
try:
    urllib.request.urlopen(url)
except urllib.error.HTTPError as error:
    results.append(error.code)
print(json.dumps(results))
"""


@pytest.mark.matrix("policies have their own tests in tests/unit/sandboxes/egress")
def test_a_program_in_a_sandbox_uses_the_tools_of_its_policy(fleet: Fleet) -> None:  # noqa: F811
    """Through the relay in the sandbox, nginx and the egress server. A sandbox without the policy has no tools."""

    def send(lease: str, *messages: tuple[str, dict[str, Any]]) -> list[Any]:
        body = {"argv": ["python3", "-c", SEND_MESSAGES], "stdin": json.dumps(messages)}
        status, answer = fleet.post(f"/leases/{lease}/exec", body)
        assert (status, answer.get("exit_code")) == (200, 0), answer
        results: list[Any] = json.loads(answer["stdout"])
        return results

    fleet.up()
    sealed = fleet.join(0)
    assert sealed
    assert send(sealed, ("tools/list", {})) == [[403, "tools_not_allowed"], 403]
    assert run_manage(fleet.path, "shell", "-c", ALLOW_TOOLS, **fleet.env).returncode == 0
    lease = fleet.join(1)
    assert lease
    store = {"name": "put_artifact", "arguments": {"name": "report.md", "content": "done\n"}}
    tools, status, stored, refused = send(
        lease, ("tools/list", {}), ("tools/call", {"name": "lease_status", "arguments": {}}), ("tools/call", store)
    )
    assert [tool["name"] for tool in tools["tools"]] == ["lease_status", "put_artifact", "post_condition"]
    assert status["structuredContent"]["lease_id"] == lease
    assert (stored["structuredContent"]["size_bytes"], refused) == (5, 405)
    listed = fleet.request("GET", f"/leases/{lease}/artifacts")[1]["results"]
    assert [(each["name"], each["actor"]) for each in listed] == [("report.md", "sandbox")]
    fleet.sweep()
    refusals = fleet.select("SELECT path, code FROM sandboxes_llmcall")
    assert refusals == [("/mcp", "tools_not_allowed")] * 2
