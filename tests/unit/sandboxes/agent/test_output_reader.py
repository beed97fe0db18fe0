"""Output of running commands by byte offset, from the agent as a process."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from sandboxes.agent.protocol import MAX_BODY_BYTES
from sandboxes.agent.runs import OutcomeUnknown
from sandboxes.providers.agent.output_reader import MAX_PART_BYTES, AgentOutputReader
from tests.support.sandbox_agent import Gateway, make_run, start_agent
from tests.support.waiting import wait_until

WAIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    agent = start_agent(gateway.path)
    gateway.boot()
    yield gateway
    agent.kill()
    agent.wait()
    gateway.close()


def start(gateway: Gateway, run_id: str, script: str) -> threading.Thread:
    """Start a command, and return the thread that waits for its result once the agent knows the command."""

    def run() -> None:
        with suppress(OutcomeUnknown):  # the agent is killed at the end of this module
            gateway.client.run(make_run(run_id, "sh", "-c", script))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: gateway.client.read(run_id, "stdout", 0)[1].state in ("running", "ended"), "the command has started")
    return thread


def open_reader(gateway: Gateway, run_id: str, stdout: int = 0, stderr: int = 0) -> AgentOutputReader:
    return AgentOutputReader(gateway.client, run_id, stdout, stderr)


def read_all(reader: AgentOutputReader) -> dict[str, bytes]:
    """Read both streams to their ends."""
    outputs = {"stdout": b"", "stderr": b""}
    with closing(reader):
        while True:
            part = reader.read(wait=WAIT_SECONDS)
            assert part is not None
            assert len(part.content) <= MAX_PART_BYTES
            assert part.content or part.ended  # the end of one stream is not reported
            outputs[part.stream or "stdout"] += part.content
            if part.ended:
                return outputs


def test_output_of_both_streams_arrives_while_the_command_runs(gateway, tmp_path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"  # not one pipe twice: its second reader may meet the first writer
    for pipe in (first, second):
        os.mkfifo(pipe)
    thread = start(gateway, "both", f"echo one; read l < {first}; echo two >&2; read l < {second}; echo three")
    with closing(open_reader(gateway, "both")) as reader:
        received = []
        for pipe in (first, second, None):
            while not (part := reader.read(wait=WAIT_SECONDS)).content:
                assert not part.ended
            received.append((part.stream, part.content))
            if pipe:
                pipe.write_text("\n")
        assert received == [("stdout", b"one\n"), ("stderr", b"two\n"), ("stdout", b"three\n")]
        while not reader.read(wait=WAIT_SECONDS).ended:
            pass
    thread.join(WAIT_SECONDS)


def test_readers_at_any_offset_receive_the_rest(gateway) -> None:
    """Also one that begins after the end: the result is retained."""
    size = 3 * MAX_BODY_BYTES + 5
    start(gateway, "offsets", f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2").join(WAIT_SECONDS)
    for stdout, stderr in [(0, 0), (1, size), (size, 7), (size - 1, MAX_PART_BYTES), (size, size)]:
        outputs = read_all(open_reader(gateway, "offsets", stdout, stderr))
        assert (len(outputs["stdout"]), len(outputs["stderr"])) == (size - stdout, size - stderr)


def test_offset_beyond_the_output_and_an_acknowledged_run_are_not_available(gateway) -> None:
    start(gateway, "short", "echo abc").join(WAIT_SECONDS)
    with closing(open_reader(gateway, "short", stdout=5)) as reader:
        assert reader.read(wait=WAIT_SECONDS) is None
    gateway.client.acknowledge("short")
    with closing(open_reader(gateway, "short")) as reader:
        assert reader.read(wait=WAIT_SECONDS) is None
    with closing(open_reader(gateway, "never")) as reader:
        assert reader.read(wait=WAIT_SECONDS) is None


def test_without_output_a_read_returns_after_its_wait(gateway) -> None:
    start(gateway, "idle", "sleep 1000")
    with closing(open_reader(gateway, "idle")) as reader:
        part = reader.read(wait=0.0)
        assert (part.stream, part.content, part.ended) == ("", b"", False)
    gateway.client.kill("idle")


def test_interrupt_ends_a_read_in_progress_and_further_ones(gateway) -> None:
    start(gateway, "interrupted", "sleep 1000")
    with closing(open_reader(gateway, "interrupted")) as reader:
        began = time.monotonic()
        threading.Timer(0.1, reader.interrupt).start()
        assert reader.read(wait=WAIT_SECONDS) is None
        assert reader.read(wait=WAIT_SECONDS) is None
        assert time.monotonic() - began < WAIT_SECONDS / 2
    gateway.client.kill("interrupted")


def test_reader_continues_at_its_offset_after_a_restart_of_the_gateway(gateway, tmp_path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    start(gateway, "restart", f"echo one; read l < {go}; echo two")
    with closing(open_reader(gateway, "restart")) as reader:
        while not reader.read(wait=WAIT_SECONDS).content:
            pass
        gateway.stop()
        assert reader.read(wait=WAIT_SECONDS) is None
        gateway.start()
        gateway.boot()
        go.write_text("\n")
        assert read_all(reader) == {"stdout": b"two\n", "stderr": b""}
