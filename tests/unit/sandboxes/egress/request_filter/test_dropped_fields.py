"""Refusals and dropped fields of requests to the egress server."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sandboxes.egress.request_filter import DroppedFields, SanitizedRequest
from sandboxes.egress.request_filter.dropped_fields import MAX_LOGGED_NAMES
from sandboxes.egress.server import EgressServer
from sandboxes.models import Sandbox
from tests.conftest import NOW
from tests.support.servers.egress import COMPLETION_REQUEST, EventLoopThread, FakeUpstream, run_server
from tests.unit.sandboxes.egress.test_egress_server import post


@pytest.mark.django_db(transaction=True)
def test_tool_of_the_provider_without_a_type_is_refused_and_not_forwarded(upstream: FakeUpstream, socket_path: Path) -> None:
    for tool in ({"googleSearch": {}}, {"type": "function", "function": {"name": "x"}, "googleSearch": {}}):
        status, reply = post(socket_path, {**COMPLETION_REQUEST, "tools": [tool]})
        assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "tool_not_allowed")
        assert reply["error"]["message"].startswith("tools[0]")
    assert not upstream.requests


@pytest.mark.django_db(transaction=True)
def test_unknown_scalar_field_is_dropped_and_counted(upstream: FakeUpstream, sandbox: Sandbox, loop: EventLoopThread) -> None:
    assert sandbox.slot is not None
    server = EgressServer(now=lambda: NOW)
    message = {"role": "user", "content": "{}", "new_in_this_release": True}
    with run_server(loop, slot=sandbox.slot, server=server) as path:
        for _ in range(2):
            assert post(path, {"model": "default", "messages": [message]})[0] == 200
    assert upstream.requests[0][2]["messages"] == [{"role": "user", "content": "{}"}]
    assert server.dropped_fields.read_counts() == {"request fields dropped": 2}


@pytest.mark.django_db(transaction=True)
def test_large_request_is_checked_as_well(upstream: FakeUpstream, socket_path: Path) -> None:
    padding = {"role": "user", "content": "x" * (1 << 20)}
    assert post(socket_path, {"messages": [padding]})[0] == 200
    status, reply = post(socket_path, {"messages": [padding], "tools": [{"googleSearch": {}}]})
    assert (status, reply["error"]["code"], len(upstream.requests)) == (400, "tool_not_allowed", 1)


def test_name_of_a_dropped_field_is_logged_once_for_each_path() -> None:
    dropped = DroppedFields()
    with capture_logs() as logs:
        for path in ("/v1/messages", "/v1/responses", "/v1/messages"):
            dropped.add(path, SanitizedRequest({}, 3, frozenset({"tools.new"})))
    assert [(entry["path"], entry["fields"]) for entry in logs] == [
        ("/v1/messages", ["tools.new"]), ("/v1/responses", ["tools.new"]),
    ]  # fmt: skip
    assert dropped.read_counts() == {"request fields dropped": 9}


def test_number_of_logged_names_is_limited() -> None:
    dropped = DroppedFields()
    with capture_logs() as logs:
        for number in range(MAX_LOGGED_NAMES + 50):
            dropped.add("/v1/messages", SanitizedRequest({}, 1, frozenset({f"x{number}"})))
    assert len(logs) == MAX_LOGGED_NAMES and dropped.count == MAX_LOGGED_NAMES + 50
