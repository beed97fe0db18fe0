"""Requests of sweeps to servers outside: parallel, fair, and limited for those that do not answer."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from sandboxes import server_calls
from sandboxes.server_calls import MAX_PARALLEL_REQUESTS, MAX_PROBES, SLOW_FAILURE, Attempt, Server, ServerCalls
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult
from tests.conftest import NOW

WAIT_SECONDS = 20.0  # for another request, if the code under test is wrong


class Servers:
    """Servers whose rows are requests: each calls `answer` with its server, in a thread of the pass."""

    def __init__(self, answer: Callable[[Server], str]) -> None:
        self.answer, self.now = answer, NOW
        self.open, self.most = Counter[Server](), Counter[Server]()
        self.most_open, self.asked, self.postponed = 0, list[Server](), list[Server]()
        self.rows: list[tuple[Server, UUID]] = []
        self._by_row: dict[UUID, Server] = {}
        self._lock = threading.Lock()
        self.calls = ServerCalls(self.begin, failure="failed", postpone=self.postpone)

    def add(self, server: Server, count: int = 1) -> None:
        for _ in range(count):
            row = uuid4()
            self.rows.append((server, row))
            self._by_row[row] = server

    def run(self) -> SweepResult:
        result = SweepResult()
        self.calls.run(self.rows, clock=lambda: self.now, result=result)
        return result

    def begin(self, row: UUID, *, now: datetime) -> Attempt[str]:
        server = self._by_row[row]
        self.asked.append(server)
        return (yield lambda: self.request(server))

    def request(self, server: Server) -> str:
        with self.counting(server):
            return self.answer(server)

    @contextmanager
    def counting(self, server: Server) -> Iterator[None]:
        with self._lock:
            self.open[server] += 1
            self.most[server] = max(self.most[server], self.open[server])
            self.most_open = max(self.most_open, self.open.total())
        try:
            yield
        finally:
            with self._lock:
                self.open[server] -= 1

    def postpone(self, server: Server, *, now: datetime) -> int:
        self.postponed.append(server)
        return 7

    def wait(self, seconds: timedelta) -> None:
        with self._lock:
            self.now += seconds


def test_servers_that_do_not_answer_delay_no_other_server() -> None:
    healthy_answers, is_served = threading.Semaphore(0), threading.Event()

    def answer(server: Server) -> str:
        if server != "healthy":
            return "failed" if is_served.wait(WAIT_SECONDS) else "waited in vain"
        healthy_answers.release()
        if servers.asked.count("healthy") == 5:
            is_served.set()
        return "created"

    servers = Servers(answer)
    for number in range(40):
        servers.add(f"silent-{number}", 3)
    servers.add("healthy", 5)
    result = servers.run()
    assert result.counts == {"created": 5, "failed": 120}
    assert max(servers.most.values()) == 1  # a server has one request at a time
    assert len({*servers.asked[:41]}) == 41  # all of them are asked before the first one has failed


def test_servers_that_have_failed_slowly_leave_requests_to_others() -> None:
    is_served = threading.Event()

    def answer(server: Server) -> str:
        if server == "healthy":
            is_served.set()
            return "created"
        return "failed" if is_served.wait(WAIT_SECONDS) else "waited in vain"

    servers = Servers(answer)
    for number in range(MAX_PARALLEL_REQUESTS + 1):
        servers.add(f"silent-{number}")
        servers.calls.slow.note(f"silent-{number}", is_slow=True, now=NOW)
    servers.add("healthy")
    assert servers.run().counts == {"created": 1, "failed": MAX_PARALLEL_REQUESTS + 1}
    assert servers.asked[0] == "healthy" and servers.most_open <= MAX_PROBES + 1


def test_a_slow_failure_ends_the_requests_to_its_server_and_postpones_its_rows() -> None:
    def answer(server: Server) -> str:
        if server != "silent":
            return "created"
        servers.wait(SLOW_FAILURE)
        return "failed"

    servers = Servers(answer)
    servers.add("silent", 3)
    servers.add("healthy", 2)
    assert servers.run().counts == {"created": 2, "failed": 1, "postponed": 7}
    assert servers.postponed == ["silent"] and "silent" in servers.calls.slow and "healthy" not in servers.calls.slow


def test_a_server_that_answers_again_is_slow_no_longer() -> None:
    servers = Servers(lambda server: "created")
    servers.calls.slow.note("slow", is_slow=True, now=NOW)
    servers.calls.slow.note("forgotten", is_slow=True, now=NOW - server_calls.MEMORY)
    servers.add("slow", 2)
    assert servers.run().counts == {"created": 2}
    assert "slow" not in servers.calls.slow and "forgotten" not in servers.calls.slow


def test_a_fast_failure_delays_no_other_row_of_its_server() -> None:
    servers = Servers(lambda server: "failed")
    servers.add("refusing", 3)
    assert servers.run().counts == {"failed": 3} and servers.postponed == []


def test_no_attempt_begins_after_the_time_limit_of_the_pass() -> None:
    def answer(server: Server) -> str:
        servers.wait(PASS_TIME_LIMIT)
        return "created"

    servers = Servers(answer)
    servers.add("slow", 2)
    assert servers.run().counts == {"created": 1}


def test_an_error_of_an_attempt_is_recorded_and_the_others_go_on() -> None:
    def answer(server: Server) -> str:
        if server == "broken":
            raise ValueError("unexpected")
        return "created"

    servers = Servers(answer)
    servers.add("broken", 2)
    servers.add("healthy")
    result = servers.run()
    assert result.counts == {"created": 1}
    assert len(result.failures) == 2 and result.failures[0].endswith(": unexpected")
