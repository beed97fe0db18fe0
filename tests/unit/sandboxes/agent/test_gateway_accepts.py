"""Connections to the socket of a slot, of which the gateway accepts those of the agent alone."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sandboxes.agent import gateway as gateways
from sandboxes.agent.gateway import AgentGateway
from sandboxes.agent.identity import UnknownPeer
from tests.support.sandbox_agent import SANDBOX, Gateway, start_agent
from tests.support.waiting import wait_until

COMMANDS = 50  # connections that wait before the agent's


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """Gateway that rejects the first COMMANDS connections, and once it has stopped to accept does not go on."""
    gateway, seen = Gateway(), list[socket.socket]()

    def identify(connection: socket.socket, directory: Path) -> str:
        seen.append(connection)
        if len(seen) <= COMMANDS:
            raise UnknownPeer("a command")
        return SANDBOX

    gateway.gateway._identify = identify
    monkeypatch.setattr(gateway.gateway, "_pause", lambda listener, path: gateway.loop.remove_reader(listener))
    yield gateway
    gateway.close()


def test_rejected_connections_do_not_delay_the_agent_behind_them(gateway: Gateway) -> None:
    is_busy, go_on = threading.Event(), threading.Event()
    gateway.loop.call_soon_threadsafe(lambda: (is_busy.set(), go_on.wait(30)))
    assert is_busy.wait(30)
    commands = [socket.socket(socket.AF_UNIX) for _ in range(COMMANDS)]
    for command in commands:
        command.connect(gateway.path)
    agent = start_agent(gateway.path)
    try:
        wait_until(lambda: Path(f"/proc/{agent.pid}/net/unix").read_text().count(gateway.path) > COMMANDS + 1, "it waits, too")
        go_on.set()
        wait_until(lambda: gateway.gateway.counts["sessions"], "the agent is accepted")
        assert gateway.gateway.counts["rejections"] == COMMANDS
    finally:
        agent.kill()
        agent.wait()
        for command in commands:
            command.close()


def test_log_has_one_line_a_minute_about_the_rejections_of_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, clock = AgentGateway(), [1000.0]
    monkeypatch.setattr(gateways.asyncio, "get_running_loop", lambda: type("Loop", (), {"time": lambda self: clock[0]})())
    with capture_logs() as lines:
        for second in range(130):
            clock[0] = 1000.0 + second
            gateway._note_rejection(Path("/slots/3/agent.sock"), "a command")
        gateway._note_rejection(Path("/slots/4/agent.sock"), "a command")
    assert [(line["slot"], line["further"]) for line in lines] == [("3", 0), ("3", 59), ("3", 59), ("4", 0)]
    assert gateway.counts["rejections"] == 131
