"""File operations, background processes and streamed runs of the agent, with the control plane's client."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxes.agent.client import AgentConnection, ConnectionLost
from sandboxes.agent.operations import AgentProcesses, FileOperation, OperationFailed, RepeatingConnection
from sandboxes.agent.protocol import Frame, ProtocolError, RunState
from sandboxes.agent.runs import NotStarted
from tests.support.sandbox_agent import AGENT, Gateway, build_shim, start_agent
from tests.support.waiting import wait_until

WINDOW_BYTES = (1 << 20) + (256 << 10)  # unread output of a streamed run that the agent keeps at most


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.fixture
def agent(gateway: Gateway) -> Iterator["subprocess.Popen[bytes]"]:
    process = start_agent(gateway.path)
    gateway.boot()
    yield process
    process.kill()
    process.wait()


def operate(gateway: Gateway, *words: str, stdin: bytes = b"", idle_timeout: float = 20.0) -> Iterator[bytes]:
    return FileOperation(gateway.client, words, idle_timeout=idle_timeout, check=lambda: None).run(io.BytesIO(stdin))


def request(connection: AgentConnection, verb: str, run_id: str = "", body: bytes = b"", **fields: Any) -> Frame:
    return connection.request({"verb": verb, "run": run_id, **fields}, body, timeout=20)


def start(connection: AgentConnection, run_id: str, *argv: str, more: dict[str, Any] | None = None, **fields: Any) -> Frame:
    """Start a run that keeps what the client has not read."""
    command = json.dumps({"argv": argv, "env": {}, "cwd": "/", **(more or {})}).encode()
    defaults = {"boot": connection.boot, "timeout": 60, "cap": 1 << 20, "keep": "stream", "wait": 0}
    return request(connection, "exec", run_id, command, **{**defaults, **fields, "command_bytes": len(command)})


def read_all(connection: AgentConnection, run_id: str, stream: str = "stdout") -> bytes:
    content = b""
    while True:
        frame = request(connection, "read", run_id, stream=stream, offset=len(content), wait=20)
        content += frame.body
        if frame.head["state"] == "ended" and not frame.head["more"]:
            return content


def find_helper(agent: "subprocess.Popen[bytes]") -> int:
    """Return the process id of the agent's helper, or 0."""
    done = subprocess.run(["pgrep", "-P", str(agent.pid), "-f", "main.py"], capture_output=True, text=True, check=False)
    return int(done.stdout or 0)


def list_runs(gateway: Gateway) -> dict[str, int | None]:
    with gateway.connect() as connection:
        found: dict[str, int | None] = json.loads(request(connection, "list").body)
        return found


@pytest.mark.usefixtures("agent")
def test_large_file_is_written_and_read(gateway, tmp_path):
    content = os.urandom(5 << 20)
    assert b"".join(operate(gateway, "write", str(tmp_path), stdin=b"a/b\0" + content)) == b""
    assert (tmp_path / "a" / "b").read_bytes() == content
    assert b"".join(operate(gateway, "read", str(tmp_path), str(6 << 20), stdin=b"a/b")) == content
    wait_until(lambda: list_runs(gateway) == {}, "the operations are forgotten")


@pytest.mark.usefixtures("agent")
def test_failed_operation_has_the_exit_code_and_message(gateway, tmp_path):
    with pytest.raises(OperationFailed, match="no such file: a") as failed:
        list(operate(gateway, "read", str(tmp_path), "10", stdin=b"a"))
    assert failed.value.exit_code == 3


def test_operation_continues_after_a_restart_of_the_gateway(gateway, agent, tmp_path):
    content = os.urandom(8 << 20)
    (tmp_path / "f").write_bytes(content)
    chunks = operate(gateway, "read", str(tmp_path), str(9 << 20), stdin=b"f")
    got = next(chunks)
    gateway.stop()
    started = threading.Timer(0.2, gateway.start)
    started.start()
    assert got + b"".join(chunks) == content
    started.join()


@pytest.mark.usefixtures("agent")
def test_operation_whose_response_was_lost_has_its_result(gateway, tmp_path, monkeypatch):
    respond, lost = AgentConnection.request, list[Frame]()

    def lose_first(connection: AgentConnection, *words: Any, **fields: Any) -> Frame:
        frame = respond(connection, *words, **fields)
        if not lost:
            lost.append(frame)
            raise ConnectionLost("the response was lost")
        return frame

    monkeypatch.setattr(AgentConnection, "request", lose_first)
    (tmp_path / "f").write_bytes(b"content")
    assert b"".join(operate(gateway, "read", str(tmp_path), "10", stdin=b"f")) == b"content"
    assert lost
    monkeypatch.undo()
    wait_until(lambda: list_runs(gateway) == {}, "the operation is forgotten")


def test_operation_that_nobody_reads_ends_and_is_forgotten(gateway, agent, tmp_path):
    (tmp_path / "f").write_bytes(bytes(8 << 20))
    chunks = operate(gateway, "read", str(tmp_path), str(9 << 20), stdin=b"f")
    next(chunks)
    chunks.close()
    wait_until(lambda: list_runs(gateway) == {}, "the operation is forgotten")
    helper = find_helper(agent)
    assert helper
    assert Path(f"/proc/{helper}/task/{helper}/children").read_text() == ""


def test_killed_helper_is_replaced(gateway, agent, tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    for _ in range(2):
        assert b"".join(operate(gateway, "read", str(tmp_path), "9", stdin=b"f")) == b"x"
        os.kill(find_helper(agent), signal.SIGKILL)
        wait_until(lambda: not find_helper(agent), "the helper has ended")


def test_operation_whose_helper_is_killed_before_it_began_is_done_by_the_next_helper(gateway, agent, tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"x")
    list(operate(gateway, "size", str(tmp_path)))
    helper, done, states, request = find_helper(agent), list[bytes](), list[str](), RepeatingConnection.request

    def note_state(connection: RepeatingConnection, *words: Any, **fields: Any) -> tuple[Frame, RunState]:
        frame, state = request(connection, *words, **fields)
        states.append(state.state)
        return frame, state

    def count_descriptors() -> int:
        return len(os.listdir(f"/proc/{agent.pid}/fd"))

    monkeypatch.setattr(RepeatingConnection, "request", note_state)
    os.kill(helper, signal.SIGSTOP)
    before = count_descriptors()
    caller = threading.Thread(target=lambda: done.extend(operate(gateway, "read", str(tmp_path), "9", stdin=b"f")))
    caller.start()
    wait_until(lambda: count_descriptors() >= before + 3, "the agent has sent the operation to its helper")
    os.kill(helper, signal.SIGKILL)
    caller.join(20)
    assert (done, states) == ([b"x"], ["busy", "ended"])
    assert find_helper(agent) not in (0, helper)


DYING_HELPER_PROGRAM = """
import os, socket, struct, sys
sys.path.insert(0, sys.argv[1])
import main
run_helper = main.run_helper
def drop_operations(channel, load_all):
    if os.path.exists(sys.argv[2]):
        run_helper(channel, load_all)
    open(sys.argv[2], "w").close()
    channel = socket.socket(fileno=channel)
    while (message := channel.recvmsg(65536, 256))[0]:
        for fd in struct.unpack("4i", message[1][0][2]):
            os.close(fd)
main.run_helper = drop_operations
main.main(*sys.argv[3:])
"""


def test_operation_after_that_of_a_dying_helper_is_done_by_the_next_helper(gateway: Gateway, tmp_path: Path) -> None:
    """The kernel closes the descriptors of a killed process in any order: here those of its operation before its socket."""
    (tmp_path / "f").write_bytes(b"x")
    died = tmp_path / "died"
    words = ["-I", "-S", "-c", DYING_HELPER_PROGRAM, str(Path(AGENT).parent), str(died), gateway.path, build_shim()]
    process = subprocess.Popen([sys.executable, *words], start_new_session=True)
    try:
        gateway.boot()
        assert list(operate(gateway, "read", str(tmp_path), "9", stdin=b"f")) == [b"x"]
        assert died.exists()
    finally:
        process.kill()
        process.wait()


def test_prepared_helper_executes_the_first_operation(gateway, agent, tmp_path):
    assert gateway.client.responds(timeout=20, prepare=True)
    wait_until(lambda: find_helper(agent), "the helper has started")
    helper = find_helper(agent)
    assert gateway.client.responds(timeout=20, prepare=True)
    (tmp_path / "f").write_bytes(b"x")
    assert b"".join(operate(gateway, "read", str(tmp_path), "9", stdin=b"f")) == b"x"
    assert find_helper(agent) == helper


def test_operation_of_a_stopped_helper_times_out_and_the_next_one_has_another_helper(gateway, agent, tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"x")
    monkeypatch.setattr("sandboxes.agent.operations.WAIT_SECONDS", 0.1)
    list(operate(gateway, "size", str(tmp_path)))
    os.kill(find_helper(agent), signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        list(operate(gateway, "read", str(tmp_path), "9", stdin=b"f", idle_timeout=0.2))
    wait_until(lambda: not find_helper(agent), "the stopped helper is killed")
    assert list(operate(gateway, "read", str(tmp_path), "9", stdin=b"f")) == [b"x"]


@pytest.mark.usefixtures("agent")
def test_operation_without_an_agent_is_not_started(gateway, monkeypatch):
    monkeypatch.setattr("sandboxes.agent.operations.CONNECT_SECONDS", 0.0)
    other = Gateway("other")
    try:
        with pytest.raises(NotStarted):
            list(operate(other, "size", "/tmp"))
    finally:
        other.close()


@pytest.mark.usefixtures("agent")
def test_streamed_output_is_complete_and_the_command_waits_for_its_reader(gateway):
    with gateway.connect() as connection:
        start(connection, "r1", "sh", "-c", "yes | head -c 6000000; echo end >&2; exit 3")
        wait_until(lambda: request(connection, "wait", "r1", wait=0).head["stdout"][0] >= 1 << 20, "the window is full")
        assert request(connection, "wait", "r1", wait=0.2).head["stdout"][0] <= WINDOW_BYTES
        assert read_all(connection, "r1") == b"y\n" * 3_000_000
        assert read_all(connection, "r1", "stderr") == b"end\n"
        assert request(connection, "wait", "r1", wait=20).head["exit_code"] == 3


@pytest.mark.usefixtures("agent")
def test_streamed_run_without_requests_ends_and_is_forgotten(gateway):
    with gateway.connect() as connection:
        start(connection, "r1", "sleep", "300", idle=0.2)
    wait_until(lambda: list_runs(gateway) == {}, "the run is forgotten")


@pytest.mark.usefixtures("agent")
def test_repeated_stdin_is_written_once(gateway):
    with gateway.connect() as connection:
        start(connection, "r1", "cat", open=True)
        for offset, content in [(0, b"abc"), (0, b"abc"), (2, b"cde"), (5, b"")]:
            written = request(connection, "write", "r1", content, offset=offset, last=not content, wait=20).head["written"]
        assert written == 5
        assert read_all(connection, "r1") == b"abcde"


@pytest.mark.usefixtures("agent")
def test_stdin_with_a_gap_is_refused(gateway):
    with gateway.connect() as connection:
        start(connection, "r1", "cat", open=True)
        with pytest.raises(ConnectionLost):
            request(connection, "write", "r1", b"x", offset=1, last=True, wait=0)


@pytest.mark.usefixtures("agent")
def test_terminal_has_a_size_and_control_characters(gateway):
    with gateway.connect() as connection:
        script = "stty size; trap 'stty size; exit 5' INT; echo ready; while :; do sleep 0.05; done"
        start(connection, "r1", "sh", "-c", script, more={"terminal": [24, 80]}, open=True)
        wait_until(lambda: request(connection, "wait", "r1", wait=0).head["stdout"][0] > len("24 80\r\n"), "it is ready")
        request(connection, "resize", "r1", rows=30, columns=100)
        request(connection, "write", "r1", b"\x03", offset=0, last=False, wait=20)
        assert read_all(connection, "r1") == b"24 80\r\nready\r\n^C30 100\r\n"
        assert request(connection, "wait", "r1", wait=20).head["exit_code"] == 5


@pytest.mark.usefixtures("agent")
def test_signal_reaches_the_process_group_of_the_command(gateway):
    with gateway.connect() as connection:
        start(connection, "r1", "sh", "-c", "trap 'exit 9' TERM; echo ready; sleep 300 & wait")
        request(connection, "read", "r1", stream="stdout", offset=0, wait=20)
        request(connection, "signal", "r1", signal=signal.SIGTERM)
        assert request(connection, "wait", "r1", wait=20).head["exit_code"] == 9


def test_signal_before_the_report_of_the_start_is_sent_after_it(gateway, tmp_path):
    shim = tmp_path / "shim"
    shim.write_text(
        "#!/bin/sh\nsetsid sh -c 'echo ready; exec sleep 300' & command=$!\n"
        'read line; echo "S $command" >&3; wait $command; echo $? >&3\n'
    )
    shim.chmod(0o755)
    process = start_agent(gateway.path, str(shim))
    try:
        with gateway.connect() as connection:
            start(connection, "r1", open=True)
            request(connection, "read", "r1", stream="stdout", offset=0, wait=20)
            request(connection, "signal", "r1", signal=signal.SIGALRM)
            request(connection, "write", "r1", b"\n", offset=0, last=True, wait=20)
            assert request(connection, "wait", "r1", wait=10).head["exit_code"] == 128 + signal.SIGALRM
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("agent")
def test_process_keeps_its_last_output_and_its_exit_code(gateway):
    processes = AgentProcesses(gateway.client, check=lambda: None)
    script = "head -c 3000000 /dev/zero; echo last >&2; exit 4"
    processes.start("p1", ["sh", "-c", script], {}, "/")
    wait_until(lambda: processes.list_exit_codes(["p1", "unknown"]) == {"p1": 4}, "it has ended")
    content, offset = processes.read_log("p1", start=0, length=1 << 20) or (b"", 0)
    assert (content[-5:], offset) == (b"last\n", 3_000_005)
    assert 1 << 18 <= len(content) <= (1 << 18) * 5 // 4
    assert processes.start("p1", ["sh", "-c", script], {}, "/") == 4  # not started again


@pytest.mark.usefixtures("agent")
def test_output_of_old_processes_is_dropped_but_not_their_exit_codes(gateway):
    processes, names = AgentProcesses(gateway.client, check=lambda: None), [f"p{number}" for number in range(20)]
    for name in names:
        processes.start(name, ["echo", name], {}, "/")
        wait_until(lambda name=name: processes.list_exit_codes([name]) == {name: 0}, f"{name} has ended")
    assert processes.list_exit_codes(names) == dict.fromkeys(names, 0)
    assert processes.start("p0", ["echo"], {}, "/") == 0
    wait_until(lambda: processes.read_log("p0", start=0, length=9) is None, "the output of the first is dropped")
    assert processes.read_log("p19", start=0, length=9) == (b"p19\n", 4)


@pytest.mark.parametrize("listed", [b"[]", b'{"other":1}', b'{"p1":true}', b'{"p1":256}', b"{", b"[" * 20000])
def test_invalid_list_of_processes_is_a_violation(listed):
    class Connection:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def request(self, *args, **more):
            return Frame(1, {}, listed)

    class Client:
        def open(self, wait):
            return Connection()

    with pytest.raises(ProtocolError):
        AgentProcesses(Client(), check=lambda: None).list_exit_codes(["p1"])
