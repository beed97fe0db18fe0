"""An agent that lies, floods or stops: the control plane bounds what it reads, and ends the session."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from sandboxes.agent import runs, session
from sandboxes.agent.protocol import HEADER, ProtocolError
from sandboxes.agent.runs import AgentClient, NotStarted, OutcomeUnknown
from sandboxes.agent.session import AgentSession, SessionLost, SessionRegistry
from tests.support.sandbox_agent import SANDBOX, frame, make_run

HELLO = frame(0, b'{"protocol":"leasehold-agent","version":1,"boot":"0123456789abcdef"}')
ENDED = {"run": "r1", "state": "ended", "exit_code": 0, "timed_out": False, "stdout": [0, 0], "stderr": [0, 0], "inline": True}


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RECONNECT_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(runs, "ANSWER_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(runs, "END_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(session, "HELLO_TIMEOUT_SECONDS", 0.5)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def read_request(connection: socket.socket) -> tuple[int, dict]:
    request_id, head_size, body_size = HEADER.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
    content = connection.recv(head_size + body_size, socket.MSG_WAITALL)
    return request_id, json.loads(content[:head_size])


def run_against(pair: tuple[socket.socket, socket.socket], respond: Callable[[socket.socket, int], None]) -> AgentSession:
    """Run a command with an agent that greets correctly and then does `respond`. Return the session afterwards."""
    ours, theirs = pair
    theirs.sendall(HELLO)
    registry = SessionRegistry()
    registry.add(SANDBOX, current := AgentSession(ours))

    def lie() -> None:
        request_id, _ = read_request(theirs)
        with contextlib.suppress(OSError):  # the session was ended
            respond(theirs, request_id)

    threading.Thread(target=lie, daemon=True).start()
    with pytest.raises(OutcomeUnknown):
        AgentClient(registry, SANDBOX).run(make_run("r1", "true", timeout=0.1, cap=1000))
    return current


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
        with_fields(stdout=[1, 0]),
        with_fields(stdout=[-1, 0]),
        with_fields(stdout=[10**9, 0], inline=False),
        with_fields(state="running"),
        b"[]",
        b"{",
        b"[" * 4000,
    ],
)
def test_invalid_response_ends_the_session_and_is_no_result(pair, head):
    current = run_against(pair, lambda connection, request_id: connection.sendall(frame(request_id, head)))
    assert not current.alive and current.violation


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
def test_unsolicited_and_endless_frames_end_the_session(pair, content):
    current = run_against(pair, lambda connection, _: connection.sendall(content))
    assert not current.alive and current.violation


@pytest.mark.parametrize("part", [b"", HEADER.pack(1, 20, 0)[:5], frame(1, with_fields())[:-1]], ids=["none", "5", "all but 1"])
@pytest.mark.parametrize("ends", [True, False])
def test_half_frame_or_silence_has_an_unknown_outcome(pair, part, ends):
    def respond(connection: socket.socket, _: int) -> None:
        connection.sendall(part)
        if ends:
            connection.shutdown(socket.SHUT_RDWR)

    assert not run_against(pair, respond).alive


def test_result_that_changes_between_two_reads_is_no_result(pair):
    def respond(connection: socket.socket, request_id: int) -> None:
        connection.sendall(frame(request_id, with_fields(stdout=[20, 0], inline=False)))
        request_id, _ = read_request(connection)
        connection.sendall(frame(request_id, with_fields(stdout=[20, 0], inline=False, exit_code=1), b"x" * 20))

    assert run_against(pair, respond).violation == "the result has changed"


@pytest.mark.parametrize(
    "greeting", [b"", b"\0" * 5, HELLO.replace(b":1", b":2"), frame(1, b"{}"), HELLO * 2, HELLO.replace(b'"0', b'7,"x":"')]
)
def test_session_begins_with_one_greeting(pair, greeting):
    ours, theirs = pair
    theirs.sendall(greeting)
    with pytest.raises((ProtocolError, SessionLost)):
        AgentSession(ours)
    assert ours.fileno() == -1


def test_run_without_an_agent_was_not_started():
    with pytest.raises(NotStarted):
        AgentClient(SessionRegistry(), SANDBOX).run(make_run("r1", "true"))


def test_agent_that_does_not_read_is_disconnected(pair, monkeypatch):
    monkeypatch.setattr(session, "SEND_TIMEOUT_SECONDS", 0.1)
    pair[1].sendall(HELLO)
    current = AgentSession(pair[0])
    with pytest.raises(SessionLost):
        current.request({"verb": "ping"}, os.urandom(3 << 20), timeout=30)
    assert not current.alive
