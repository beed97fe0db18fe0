"""An agent that lies, floods or stops: the control plane bounds what it reads, and ends the session."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from sandboxes.agent import client, gateway, runs
from sandboxes.agent.client import AgentConnection, ConnectionLost, NotConnected
from sandboxes.agent.protocol import HEADER
from sandboxes.agent.runs import NotStarted, OutcomeUnknown
from sandboxes.providers.agent import runs as agent_runs
from tests.support.sandbox_agent import Gateway, frame, make_run
from tests.support.waiting import wait_until

HELLO = frame(0, b'{"protocol":"leasehold-agent","version":2,"boot":"0123456789abcdef"}')
ENDED = {"run": "r1", "state": "ended", "exit_code": 0, "timed_out": False, "stdout": [0, 0], "stderr": [0, 0], "inline": True}


@pytest.fixture(autouse=True)
def timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CONNECT_SECONDS", 0.0)
    monkeypatch.setattr(runs, "RESPONSE_SECONDS", 20.0)
    monkeypatch.setattr(runs, "FIRST_RESPONSE_SECONDS", 20.0)
    monkeypatch.setattr(runs, "END_SECONDS", 0.0)
    monkeypatch.setattr(client, "GREETING_TIMEOUT_SECONDS", 20.0)
    monkeypatch.setattr(gateway, "HELLO_TIMEOUT_SECONDS", 1.0)


@pytest.fixture
def server() -> Iterator[Gateway]:
    server = Gateway()
    yield server
    server.close()


def dial(server: Gateway, greeting: bytes = HELLO) -> socket.socket:
    """Connect as an agent."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server.path)
    with contextlib.suppress(BrokenPipeError):  # rejected before
        connection.sendall(greeting)
    return connection


def is_disconnected(connection: socket.socket) -> bool:
    """Return once the gateway has closed the connection."""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def read_request(connection: socket.socket) -> tuple[int, dict]:
    request_id, head_size, body_size = HEADER.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
    content = connection.recv(head_size + body_size, socket.MSG_WAITALL)
    return request_id, json.loads(content[:head_size])


def run_against(server: Gateway, respond: Callable[[socket.socket, int], None]) -> socket.socket:
    """Run a command with an agent that greets correctly and then does `respond`. Return the agent's connection."""
    theirs = dial(server)
    server.boot()

    def lie() -> None:
        request_id, _ = read_request(theirs)
        with contextlib.suppress(OSError):  # the session was ended
            respond(theirs, request_id)

    threading.Thread(target=lie, daemon=True).start()
    with pytest.raises(OutcomeUnknown):
        server.client.run(make_run("r1", "true", timeout=0.1, cap=1000))
    return theirs


def with_fields(**fields: object) -> bytes:
    return json.dumps(ENDED | fields).encode()


@pytest.mark.parametrize(
    "head",
    [
        with_fields(run="r2"),
        with_fields(run=None),
        with_fields(state="finished"),
        with_fields(exit_code=None),
        with_fields(exit_code=True),
        with_fields(exit_code=256),
        with_fields(timed_out=0),
        with_fields(oom=1),
        with_fields(age=-1),
        with_fields(age=True),
        with_fields(age=float("nan")),
        with_fields(age=1 << 40),
        with_fields(stdout=[1, 0]),
        with_fields(stdout=[-1, 0]),
        with_fields(stdout=[10**9, 0], inline=False),
        with_fields(state="running"),
        b"[]",
        b"{",
        b"[" * 4000,
    ],
)
def test_invalid_response_ends_the_session_and_is_no_result(server, head):
    theirs = run_against(server, lambda connection, request_id: connection.sendall(frame(request_id, head)))
    assert is_disconnected(theirs)
    wait_until(lambda: server.gateway.counts["violations"] == 1, "the violation is counted")


@pytest.mark.parametrize(
    "content",
    [
        frame(99, with_fields()),
        HEADER.pack(1, 1 << 31, 0),
        HEADER.pack(1, 10, 1 << 31),
        frame(7, b"{}") * 1_000_000,
    ],
    ids=["response without a request", "endless head", "endless body", "million small frames"],
)
def test_unsolicited_and_endless_frames_end_the_session(server, content):
    run_against(server, lambda connection, _: connection.sendall(content))
    wait_until(lambda: server.gateway.counts["violations"] == 1, "the violation is counted")


@pytest.mark.parametrize("part", [b"", HEADER.pack(1, 20, 0)[:5], frame(1, with_fields())[:-1]], ids=["none", "5", "all but 1"])
@pytest.mark.parametrize("ends", [True, False])
def test_half_frame_or_silence_has_an_unknown_outcome(server, part, ends, monkeypatch):
    monkeypatch.setattr(runs, "RESPONSE_SECONDS", 0.2)
    monkeypatch.setattr(runs, "FIRST_RESPONSE_SECONDS", 0.2)

    def respond(connection: socket.socket, _: int) -> None:
        connection.sendall(part)
        if ends:
            connection.shutdown(socket.SHUT_RDWR)

    run_against(server, respond)


def test_result_that_changes_between_two_reads_is_no_result(server):
    def respond(connection: socket.socket, request_id: int) -> None:
        connection.sendall(frame(request_id, with_fields(stdout=[20, 0], inline=False)))
        request_id, _ = read_request(connection)
        connection.sendall(frame(request_id, with_fields(stdout=[20, 0], inline=False, exit_code=1), b"x" * 20))

    assert is_disconnected(run_against(server, respond))


@pytest.mark.parametrize(
    "greeting", [b"", b"\0" * 5, HELLO.replace(b":2", b":1"), frame(1, b"{}"), HELLO * 2, HELLO.replace(b'"0', b'7,"x":"')]
)
def test_session_begins_with_one_greeting(server, greeting):
    assert is_disconnected(dial(server, greeting))
    with pytest.raises(NotConnected):
        server.connect(wait=0.0)


def test_newer_session_replaces_the_previous_one(server):
    first = dial(server)
    server.boot()
    second = dial(server)
    assert is_disconnected(first)
    assert server.boot()
    second.close()


def test_responses_reach_only_the_client_that_asked(server):
    theirs = dial(server)
    with server.connect() as first, server.connect() as second:
        outcomes: dict[str, bytes] = {}

        def ask(name: str, connection: AgentConnection) -> None:
            outcomes[name] = connection.request({"verb": "ping", "name": name}, timeout=20).body

        threads = [threading.Thread(target=ask, args=pair) for pair in (("first", first), ("second", second))]
        for thread in threads:
            thread.start()
        requests = [read_request(theirs) for _ in threads]
        for request_id, head in reversed(requests):
            theirs.sendall(frame(request_id, b"{}", head["name"].encode()))
        for thread in threads:
            thread.join(20)
    assert outcomes == {"first": b"first", "second": b"second"}


def test_run_without_an_agent_was_not_started(server):
    with pytest.raises(NotStarted):
        server.client.run(make_run("r1", "true"))


def test_agent_that_does_not_read_is_disconnected(server, monkeypatch):
    monkeypatch.setattr(gateway, "MAX_UNSENT_BYTES", 1 << 20)
    theirs = dial(server)
    server.boot()
    with contextlib.ExitStack() as stack:
        while not server.gateway.counts["violations"]:
            try:
                connection = stack.enter_context(server.connect(wait=0.0))
                connection.request({"verb": "ping"}, os.urandom(3 << 20), timeout=0.2)
            except (ConnectionLost, NotConnected):
                continue
    theirs.close()


def test_process_that_is_no_agent_is_rejected(monkeypatch):
    """This process is process 1 of no container."""
    server = Gateway(container="")
    try:
        assert is_disconnected(dial(server))
        assert server.gateway.counts["rejections"] == 1
        assert is_disconnected(dial(server))  # the socket accepts connections again
    finally:
        server.close()


def test_silent_agent_is_asked_for_output_once(server, monkeypatch):
    """The heartbeat of all claims reads output, and must not wait again and again."""
    monkeypatch.setattr(agent_runs, "READ_TIMEOUT_SECONDS", 0.2)
    theirs = dial(server)
    server.boot()
    output = agent_runs.AgentOutput(server.client, "r1", "stdout")
    assert (bytes(output), bytes(output)) == (b"", b"")
    assert read_request(theirs)[1]["verb"] == "read"
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
