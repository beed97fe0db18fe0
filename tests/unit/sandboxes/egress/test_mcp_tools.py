"""Tools of the control plane for programs in sandboxes: policy, identity by slot, effects and errors."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from billing.models.budgets import Budget
from controlplane import sandbox_tools
from leases import call_limits, execution
from leases.atproto import accounts
from leases.models import EnvironmentType, Lease, LeaseEvent
from sandboxes.egress.server import EgressServer
from sandboxes.identity import signing
from sandboxes.models import MintedToken, Policy, Sandbox
from sandboxes.models.policies import MCP_TOOLS
from sandboxes.runs.operations import Command
from sandboxes.stores.lease_stores import open_stores
from tests.conftest import MINUTE, NOW
from tests.emulators.pds import DidDocuments, Pds, serve
from tests.support.servers.egress import EventLoopThread, post, run_server

pytestmark = pytest.mark.django_db(transaction=True)
LIST_MESSAGE = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
ACCEPT = {"Accept": "application/json, text/event-stream"}


@pytest.fixture
def lease(transactional_db: None, grant: Callable[..., Lease]) -> Lease:
    found = grant(expiry_conditions=["task.complete"])
    execution.exec_command(found.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
    return found


@pytest.fixture
def socket_path(lease: Lease, loop: EventLoopThread) -> Iterator[Path]:
    slot = Sandbox.objects.get(holder=lease.pk).slot
    assert slot is not None
    with run_server(loop, slot=slot, server=EgressServer(now=lambda: NOW)) as path:
        yield path


def allow(lease: Lease, *names: str, **fields: Any) -> None:
    policy = Policy.objects.create(name="with-tools", mcp_tools=[*names], **fields)
    Sandbox.objects.filter(holder=lease.pk).update(policy=policy)


@asynccontextmanager
async def connect(path: Path, mode: str = "auto") -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(path))) as http,
        Client(streamable_http_client("http://sandbox/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def call(path: Path, name: str, /, **arguments: Any) -> tuple[bool, dict[str, Any]]:
    """Call a tool with the official client. Return whether it failed, and its structured content."""

    async def call_tool() -> Any:
        async with connect(path) as client:
            await client.list_tools()  # else the client does so after the call, when the lease may have ended
            return await client.call_tool(name, arguments)

    result = asyncio.run(call_tool())
    return result.is_error, result.structured_content


def succeed(path: Path, name: str, /, **arguments: Any) -> dict[str, Any]:
    failed, content = call(path, name, **arguments)
    assert not failed, content
    return content


def fail(path: Path, name: str, /, **arguments: Any) -> dict[str, Any]:
    failed, content = call(path, name, **arguments)
    assert failed, content
    return content


def test_the_policy_names_all_tools() -> None:
    assert tuple(tool.name for tool in sandbox_tools.TOOLS) == MCP_TOOLS


def test_without_a_policy_there_are_no_tools(socket_path: Path, lease: Lease) -> None:
    status, body = post(socket_path, LIST_MESSAGE, "/mcp", **ACCEPT)
    assert (status, body["error"]["code"]) == (403, "tools_not_allowed")
    allow(lease)  # a policy without tools
    assert post(socket_path, LIST_MESSAGE, "/mcp", **ACCEPT)[0] == 403


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_only_tools_of_the_policy_exist(socket_path: Path, lease: Lease, mode: str) -> None:
    allow(lease, "lease_status", "get_artifact")

    async def use() -> tuple[list[str], Any]:
        async with connect(socket_path, mode) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            with pytest.raises(MCPError, match="Unknown tool: post_condition"):
                await client.call_tool("post_condition", {"condition": "task.complete"})
            return names, (await client.call_tool("lease_status", {})).structured_content

    names, status = asyncio.run(use())
    assert names == ["lease_status", "get_artifact"]
    assert (status["lease_id"], status["expiry_conditions"]) == (str(lease.pk), ["task.complete"])
    assert Lease.objects.get(pk=lease.pk).status == "active"


def test_a_message_above_the_limit_of_the_policy_is_refused(socket_path: Path, lease: Lease) -> None:
    allow(lease, "put_artifact", largest_body_kib=8)
    status, body = post(socket_path, b" " * 9000, "/mcp", **ACCEPT)
    assert (status, body["error"]["code"]) == (413, "too_large")


def test_an_artifact_is_stored_for_the_client_of_the_lease(socket_path: Path, lease: Lease) -> None:
    allow(lease, "put_artifact", "get_artifact")
    content = bytes(range(256)) * 10
    text = base64.b64encode(content).decode()
    stored = succeed(socket_path, "put_artifact", name="a.bin", content=text, encoding="base64")
    assert (stored["size_bytes"], stored["media_type"], stored["replaced"]) == (2560, "application/octet-stream", False)
    artifact = open_stores(lease.agent_did, lease.pk).artifacts.read("a.bin")
    assert artifact
    assert (artifact.actor, artifact.sha256) == ("sandbox", stored["sha256"])
    read, offset = b"", 0
    while offset is not None:
        part = succeed(socket_path, "get_artifact", name="a.bin", offset=offset, length=1000, encoding="base64")
        read, offset = read + base64.b64decode(part["content"]), part["next_offset"]
    assert read == content
    assert succeed(socket_path, "put_artifact", name="a.bin", content="ü")["replaced"]
    assert succeed(socket_path, "get_artifact", name="a.bin")["content"] == "ü"
    assert fail(socket_path, "get_artifact", name="none")["code"] == "artifact_not_found"
    for arguments, field in (
        ({"name": "a/b", "content": ""}, "name"),
        ({"name": "a", "content": "?", "encoding": "base64"}, "content"),
        ({"name": "a", "content": "", "media_type": "x"}, "media_type"),
        ({"name": "a"}, "content"),
        ({"name": "a", "content": "", "lease_id": str(lease.pk)}, "lease_id"),
    ):
        problem = fail(socket_path, "put_artifact", **arguments)
        assert (problem["status"], problem["field"]) == (400, field)


def test_budgets_are_shown_as_to_a_key_of_the_agent(socket_path: Path, lease: Lease) -> None:
    allow(lease, "budget")
    common = {"unit": "usd", "period": "month", "hard": True, "created_at": NOW}
    Budget.objects.create(scope="agent", subject=lease.agent_did, amount=Decimal(5), **common)
    Budget.objects.create(scope="agent", subject="did:plc:other", amount=Decimal(7), **common)
    Budget.objects.create(scope="all", subject="", amount=Decimal(9), **common)
    call_limits.change_call_limits(lease.pk, {"usd": Decimal("0.5"), "tokens": 7}, now=NOW)
    shown = succeed(socket_path, "budget")
    assert shown["model_calls"] == {"spent_usd": "0", "limit_usd": "0.5", "spent_tokens": 0, "limit_tokens": 7}
    assert [(each["scope"], each["amount"], each["spent"]) for each in shown["budgets"]] == [
        ("agent", "5", "0"), ("all", None, None),
    ]  # fmt: skip


def test_a_condition_ends_the_leases_of_the_own_agent_only(
    socket_path: Path, lease: Lease, grant: Callable[..., Lease]
) -> None:
    other = grant(agent="did:plc:bob", environment=lease.environment_id, expiry_conditions=["task.complete"])
    allow(lease, "post_condition", "lease_status")
    assert succeed(socket_path, "post_condition", condition="other.condition") == {"ended": []}
    assert fail(socket_path, "post_condition", condition="a b")["field"] == "condition"
    assert succeed(socket_path, "post_condition", condition="task.complete") == {"ended": [str(lease.pk)]}
    lease.refresh_from_db()
    assert lease.end_reason == "condition:task.complete"
    assert LeaseEvent.objects.get(lease=lease, kind="ended").actor == "sandbox"
    assert Lease.objects.get(pk=other.pk).status == "active"
    status, body = post(socket_path, LIST_MESSAGE, "/mcp", **ACCEPT)
    assert (status, body["error"]["code"]) == (403, "no_lease")


def test_a_service_token_is_recorded(socket_path: Path, lease: Lease) -> None:
    allow(lease, "service_token")
    arguments = {"aud": "did:web:relay.example", "lxm": "com.atproto.sync.subscribeRepos"}
    assert fail(socket_path, "service_token", **arguments)["code"] == "no_signing_key"
    signing.create_key(lease.agent_did, now=NOW)
    token = succeed(socket_path, "service_token", **arguments)
    assert token["token"].count(".") == 2
    minted = MintedToken.objects.get()
    assert (minted.agent_did, minted.aud, minted.holder) == (lease.agent_did, "did:web:relay.example", lease.pk)
    assert fail(socket_path, "service_token", **arguments | {"aud": "relay"})["field"] == "aud"
    assert fail(socket_path, "service_token", **arguments | {"lifetime_seconds": 301})["field"] == "lifetime_seconds"


def test_a_record_is_created_in_the_agents_repository(socket_path: Path, lease: Lease) -> None:
    collection = "org.example.game.action"
    allow(lease, "create_record", record_collections=[collection])
    record = {"text": "gg"}
    assert fail(socket_path, "create_record", collection=collection, record=record)["field"] == "collection"
    EnvironmentType.objects.filter(name=lease.environment_type_id).update(policy=Policy.objects.get(name="with-tools"))
    assert fail(socket_path, "create_record", collection="gg", record=record)["field"] == "collection"
    assert fail(socket_path, "create_record", collection=collection, record=record, key="a/b")["field"] == "key"
    with serve(DidDocuments()) as documents, serve(Pds(documents, now=lambda: NOW)) as pds:
        pds.passwords[lease.agent_did] = "password-of-ada"
        accounts.set_account(lease.agent_did, service_url=pds.url, password="password-of-ada", now=NOW)
        created = succeed(socket_path, "create_record", collection=collection, record=record, key="end")
        assert created["uri"] == f"at://{lease.agent_did}/{collection}/end" and created["status"] == "created"
        assert [*pds.records.values()] == [{"$type": collection, "text": "gg"}]


def test_a_crash_of_a_tool_is_an_internal_problem(socket_path: Path, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(lease, "lease_status")

    def crash(*args: object, **options: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("leases.leasing.require_active", crash)
    problem = fail(socket_path, "lease_status")
    assert (problem["code"], "secret" in str(problem)) == ("internal", False)
