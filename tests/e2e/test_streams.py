"""Streams of output through the web server, from commands in real containers."""

import http.client
from contextlib import closing
from typing import Any

import pytest

from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.event_stream import join_output, open_stream, parse_events

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
TICKS = "for i in 1 2 3; do echo tick $i; read line < /tmp/go; done; echo end >&2; exit 3"


@pytest.fixture
def lease(fleet: Fleet) -> str:  # noqa: F811
    fleet.up()
    lease = fleet.join(0)
    assert lease
    return lease


def start(fleet: Fleet, lease: str, script: str, **options: Any) -> http.client.HTTPResponse:  # noqa: F811
    body = {"argv": ["sh", "-c", script], "timeout_seconds": 600}
    return open_stream(fleet.port, fleet.key, "POST", f"/leases/{lease}/exec/stream", body, **options)


def test_output_arrives_while_the_command_runs_and_the_exit_is_recorded(fleet: Fleet, lease: str) -> None:  # noqa: F811
    with closing(start(fleet, lease, f"mkfifo /tmp/go; {TICKS}")) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        events = parse_events(response)
        begin = next(events)
        assert (begin.name, begin.id, begin.data["live"]) == ("start", "0-0", True)
        for number in range(3):
            tick = next(events)
            assert (tick.name, tick.data["data"]) == ("stdout", f"tick {number + 1}\n")
            fleet.post(f"/leases/{lease}/exec", {"argv": ["sh", "-c", "echo > /tmp/go"]})
        *output, end = list(events)
    assert join_output(output, "stderr") == "end\n"
    assert (end.name, end.id, end.data["exit_code"], end.data["outcome"]) == ("exit", "21-4-end", 3, "failed")
    assert fleet.request("GET", f"/leases/{lease}/runs/{begin.data['run_id']}")[1]["exit_code"] == 3
