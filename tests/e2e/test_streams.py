"""Streams of output through the web server, from commands in real containers."""

import http.client
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.event_stream import Event, join_output, open_stream, parse_events
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
TICKS = "for i in 1 2 3; do echo tick $i; until [ -e /tmp/go$i ]; do sleep 0.05; done; done; echo end >&2; exit 3"
READER_COUNT = 24  # six times the threads of the web server
OUTPUT_BYTES = 1 << 20  # limit of each stream; the row has 64 KiB
QUEUED_RUN_EVENTS = ["queued_run.queued", "queued_run.started", "queued_run.ended"]
SHORT_SECONDS = 10.0  # a short call takes milliseconds


class Streams:
    """Streams of one lease, which are closed at the end of the test."""

    def __init__(self, fleet: Fleet) -> None:  # noqa: F811
        self.fleet, self.lease = fleet, fleet.join(0)
        self._responses: list[http.client.HTTPResponse] = []

    def _open(self, method: str, path: str, body: Any = None, **headers: str) -> Iterator[Event]:
        response = open_stream(self.fleet.port, self.fleet.key, method, path, body, **headers)
        self._responses.append(response)
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        return parse_events(response)

    def execute(self, script: str) -> tuple[str, Iterator[Event]]:
        """Start a command. Return the id of its run, and its further events."""
        events = self._open("POST", f"/leases/{self.lease}/exec/stream", {"argv": ["sh", "-c", script], "timeout_seconds": 600})
        start = next(events)
        assert (start.name, start.id, start.data["live"]) == ("start", "0-0", True)
        return start.data["run_id"], events

    def join(self, run_id: str, last_event_id: str = "") -> Iterator[Event]:
        headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        return self._open("GET", f"/leases/{self.lease}/runs/{run_id}/stream", **headers)

    def read_events(self, last_event_id: str = "") -> Iterator[Event]:
        """Open a stream of the events of queued runs."""
        headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        types = ",".join(QUEUED_RUN_EVENTS)
        return self._open("GET", f"/events/stream?type={types}", **headers)

    def enqueue(self) -> str:
        body = {"agent_did": "did:plc:a0", "lease_id": self.lease, "argv": ["true"], "queued": True}
        status, answer = self.fleet.post("/runs", body)
        assert status == 202, answer
        return str(answer["queued_run_id"])

    def kill_web_server(self) -> None:
        """Kill the web server, and wait until it is started again."""
        for pid in self.fleet.find_processes("web") | self.fleet.find_processes("web1"):
            os.kill(pid, signal.SIGKILL)

        def is_answered() -> bool:
            with suppress(OSError, http.client.HTTPException):
                return self.fleet.request("GET", f"/leases/{self.lease}")[0] == 200
            return False

        wait_until(is_answered, "the web server is restarted")

    def tick(self, number: int) -> None:
        """Let TICKS continue after a line."""
        status, answer = self.fleet.post(f"/leases/{self.lease}/exec", {"argv": ["touch", f"/tmp/go{number}"]})
        assert (status, answer["exit_code"]) == (200, 0)

    def is_recorded(self, run_id: str) -> bool:
        return bool(self.fleet.request("GET", f"/leases/{self.lease}/runs/{run_id}")[1]["ended_at"])

    def close(self) -> None:
        for response in self._responses:
            response.close()


@pytest.fixture
def streams(fleet: Fleet) -> Iterator[Streams]:  # noqa: F811
    fleet.up("--no-worker")
    with closing(Streams(fleet)) as streams:
        yield streams


def assert_end(events: list[Event]) -> None:
    """Assert that these are the last events of TICKS."""
    assert join_output(events, "stderr") == "end\n"
    end = events[-1]
    assert (end.name, end.id, end.data["exit_code"], end.data["outcome"]) == ("exit", "21-4-end", 3, "failed")


def test_output_arrives_while_the_command_runs_and_many_idle_readers_occupy_no_thread(streams: Streams) -> None:
    fleet = streams.fleet  # noqa: F811
    run_id, events = streams.execute(TICKS)
    assert next(events) == Event("7-0", "stdout", {"offset": 0, "data": "tick 1\n"})
    readers = [streams.join(run_id) for _ in range(READER_COUNT)]
    for reader in readers:
        assert [next(reader).name, next(reader).id] == ["start", "7-0"]
    for _ in range(2 * READER_COUNT):
        with closing(http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=SHORT_SECONDS)) as connection:
            connection.request("GET", f"/api/v1/leases/{streams.lease}", headers={"Authorization": f"Bearer {fleet.key}"})
            assert connection.getresponse().status == 200
    streams.tick(1)
    assert [next(reader).data["data"] for reader in [events, *readers]] == ["tick 2\n"] * (READER_COUNT + 1)
    late = streams.join(run_id, "7-0")  # misses nothing after its last event
    assert next(late).id == "14-0"
    streams.tick(2)
    assert next(late).id == "21-0"
    assert not streams.is_recorded(run_id)
    streams.tick(3)
    for reader in [events, late, *readers]:
        assert_end([*reader])
    assert streams.is_recorded(run_id)


def test_complete_output_is_replayed_to_a_client_that_was_away_at_the_end(streams: Streams) -> None:
    run_id, _ = streams.execute(f"head -c {2 * OUTPUT_BYTES} /dev/zero | tr '\\0' x; echo warning >&2")
    streams.close()  # the command goes on
    wait_until(lambda: streams.is_recorded(run_id), "the command has ended")
    events = [*streams.join(run_id, "1000-0")]
    assert join_output(events, "stdout") == "x" * (OUTPUT_BYTES - 1000)
    assert "gap" not in {event.name for event in events}
    assert (events[-1].data["exit_code"], events[-1].data["truncated"]) == (0, True)


def test_streams_continue_after_kills_of_the_web_server_and_the_gateway(streams: Streams) -> None:
    fleet = streams.fleet  # noqa: F811
    run_id, events = streams.execute(TICKS)
    assert next(events).id == "7-0"
    reader = streams.join(run_id, "7-0")
    egress = fleet.wait_for_child("egress")
    os.kill(egress, signal.SIGKILL)
    fleet.wait_for_child("egress", [egress])
    streams.tick(1)
    assert [next(events).id, next(reader).id] == ["14-0", "14-0"]
    streams.kill_web_server()
    with suppress(http.client.HTTPException, OSError):
        assert [*reader] == []  # no end of the stream without its last event
    reader = streams.join(run_id, "14-0")
    streams.tick(2)
    assert next(reader).id == "21-0"
    streams.tick(3)
    assert next(reader).id == "21-4"
    fleet.sweep()  # closes the run whose web process was killed
    assert_end([Event("21-4", "stderr", {"data": "end\n"}), *reader])


@pytest.mark.matrix("test_up.py has the drain of a command")
def test_shutdown_ends_readers_and_lets_commands_end(streams: Streams) -> None:
    run_id, events = streams.execute(TICKS)
    reader = streams.join(run_id)
    assert [next(events).id, next(reader).id, next(reader).id] == ["7-0", "0-0", "7-0"]
    streams.tick(1)
    assert next(reader).id == "14-0"
    assert streams.fleet.process
    streams.fleet.process.send_signal(signal.SIGTERM)
    assert [*reader] == []
    sandbox = next(iter(streams.fleet.list_containers()))
    assert next(events).id == "14-0"
    subprocess.run(["docker", "exec", "-u", "10001", sandbox, "touch", "/tmp/go2", "/tmp/go3"], check=True)
    assert next(events).id == "21-0"
    assert_end([*events])
    assert streams.fleet.process.wait(60) == 0


@pytest.mark.matrix("tests/api/sandbox/test_file_watch.py has the watch")
def test_watch_shows_changes_by_commands_and_ends_with_the_lease(streams: Streams) -> None:
    fleet = streams.fleet  # noqa: F811
    watches = [streams._open("GET", f"/leases/{streams.lease}/watch?path=") for _ in range(READER_COUNT)]
    assert {next(events).name for events in watches} == {"start"}
    script = "mkdir src && echo 1 > src/a"
    status, answer = fleet.post(f"/leases/{streams.lease}/exec", {"argv": ["sh", "-c", script]})
    assert (status, answer["exit_code"]) == (200, 0)
    for events in watches:
        names = []
        while "src/a" not in names:
            event = next(events)
            assert event.name == "created"
            names.append(event.data["name"])
    fleet.post(f"/leases/{streams.lease}/release", {})
    for events in watches:
        assert [(event.name, event.data) for event in events][-1] == ("end", {"end_reason": "released"})


def test_events_reach_idle_readers_and_continue_after_a_kill_of_the_web_server(streams: Streams) -> None:
    readers = [streams.read_events() for _ in range(READER_COUNT)]
    assert {next(reader).name for reader in readers} == {"start"}
    queued_run_id = streams.enqueue()
    received = [[next(reader) for _ in QUEUED_RUN_EVENTS] for reader in readers]
    assert all(events == received[0] for events in received)
    assert [event.name for event in received[0]] == QUEUED_RUN_EVENTS
    assert {event.data["data"]["queued_run_id"] for event in received[0]} == {queued_run_id}
    streams.kill_web_server()
    missed = streams.enqueue()
    reader = streams.read_events(received[0][1].id)
    assert next(reader) == received[0][2]
    assert [next(reader).data["data"]["queued_run_id"] for _ in QUEUED_RUN_EVENTS] == [missed] * 3
    streams.fleet.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    assert [*reader] == []
    assert streams.fleet.process.wait(60) == 0  # type: ignore[union-attr]
