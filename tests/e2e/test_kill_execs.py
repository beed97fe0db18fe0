"""SIGKILL of web, queue, egress and agents during concurrent execs: each exec has its true result or an unknown outcome.

Every command sends a datagram to a socket of this test at its start and at its end, so executions are counted outside of what
is being killed. A client repeats a request without a response with the same Idempotency-Key. The variable KILL_EXECS has the
number of execs, KILL_SEED the seed of the order in which processes are killed."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from sandboxes.providers.base import AGENT_DIRECTORY
from tests.commands.manage import get_runtime_dir, run_manage
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
EXEC_COUNT, SEED = int(os.environ.get("KILL_EXECS", "24")), int(os.environ.get("KILL_SEED", "1"))
AGENT_COUNT, CLIENT_COUNT, SLOT_COUNT = 3, 6, 8
EXECS_PER_KILL = max(4, EXEC_COUNT // 24)  # at most 24 kills: a child that is killed often is started again later and later
TARGETS = ("web", "queue", "egress", "agent")
SWEEP_INTERVAL_SECONDS, REPEAT_INTERVAL_SECONDS = 3.0, 0.3
PATIENCE_SECONDS = 240.0
SOCKET_NAME = "marks.sock"
SCRIPT = f"""
import socket, sys, time
number, seconds = sys.argv[1], float(sys.argv[2])
marks = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
marks.connect("{AGENT_DIRECTORY}/{SOCKET_NAME}")
marks.send(f"{{number}} start".encode())
time.sleep(seconds)
print("output of", number, flush=True)
marks.send(f"{{number}} end".encode())
sys.exit(int(number) % 5)
"""


@dataclass(frozen=True)
class Answer:
    """Last response to one exec, and the lease for which it was requested."""

    status: int
    body: dict[str, Any]
    lease: str


class Marks:
    """Starts and ends of the commands, by number of the exec."""

    def __init__(self, fleet: Fleet) -> None:  # noqa: F811
        self.starts, self.ends, self._lock = Counter[int](), Counter[int](), threading.Lock()
        self._sockets = [self._bind(fleet, slot) for slot in range(SLOT_COUNT)]
        for bound in self._sockets:
            threading.Thread(target=self._receive, args=(bound,), daemon=True).start()

    def _bind(self, fleet: Fleet, slot: int) -> socket.socket:  # noqa: F811
        path = get_runtime_dir(fleet.path) / "egress" / "a" / str(slot) / SOCKET_NAME
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bound.bind(str(path))
        path.chmod(0o666)
        return bound

    def _receive(self, bound: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while mark := bound.recv(100).decode():
                number, _, what = mark.partition(" ")
                with self._lock:
                    (self.starts if what == "start" else self.ends)[int(number)] += 1

    def close(self) -> None:
        for bound in self._sockets:
            with contextlib.suppress(OSError):
                bound.shutdown(socket.SHUT_RDWR)
            bound.close()


class Clients:
    """Clients of several agents, which repeat each request until it is answered."""

    def __init__(self, fleet: Fleet) -> None:  # noqa: F811
        self.fleet, self.run = fleet, uuid.uuid4().hex
        self.leases: dict[int, str] = {}
        self._locks = [threading.Lock() for _ in range(AGENT_COUNT)]

    def execute(self, number: int) -> Answer:
        """Request one exec until its outcome is known or stated to be unknown."""
        lease = self.find_lease(number % AGENT_COUNT)
        body = {"argv": ["python3", "-c", SCRIPT, str(number), str(0.2 + number % 7 / 5)], "timeout_seconds": 60}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                status, answer = self.post(f"/leases/{lease}/exec", body, key=f"{self.run}-{number}")
                if status == 200 or answer.get("code") == "outcome_unknown" or status in (404, 410):
                    if status in (404, 410):
                        self.forget_lease(number % AGENT_COUNT, lease)
                    return Answer(status, answer, lease)
                assert status in (409, 502, 503), (status, answer)
            assert time.monotonic() < deadline, f"exec {number} has no outcome"
            time.sleep(REPEAT_INTERVAL_SECONDS)

    def post(self, path: str, body: dict[str, Any], *, key: str) -> tuple[int, dict[str, Any]]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.fleet.port, timeout=90)) as connection:
            headers = {"Authorization": f"Bearer {self.fleet.key}", "Content-Type": "application/json", "Idempotency-Key": key}
            connection.request("POST", f"/api/v1{path}", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def find_lease(self, agent: int) -> str:
        with self._locks[agent]:
            if agent not in self.leases:
                self.leases[agent] = wait_until(lambda: self._join(agent), "the agent joins", within=PATIENCE_SECONDS)
            return self.leases[agent]

    def _join(self, agent: int) -> str | None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            body = {"agent_did": f"did:plc:k{agent}", "environment_type": "coding"}
            status, answer = self.post(f"/environments/k{agent}/join", body, key=uuid.uuid4().hex)
            return str(answer["id"]) if status in (200, 201) else None
        return None

    def forget_lease(self, agent: int, lease: str) -> None:
        with self._locks[agent]:
            if self.leases.get(agent) == lease:
                del self.leases[agent]


class Killer:
    """Kills one process after every few starts of a command, in a seeded order."""

    def __init__(self, fleet: Fleet, marks: Marks) -> None:  # noqa: F811
        self.fleet, self.marks, self.random = fleet, marks, random.Random(SEED)
        self.kills = Counter[str]()
        # Execs whose run was open when the agent of their sandbox was killed: the result may have been with the agent only.
        self.killed_with_agent: set[int] = set()
        self._order: list[str] = []

    def run(self, stop: threading.Event) -> None:
        threshold = EXECS_PER_KILL
        while not stop.wait(0.02):
            if len(self.marks.starts) >= threshold:
                threshold += EXECS_PER_KILL
                self.kill()

    def kill(self) -> None:
        if not self._order:
            self._order = self.random.sample(TARGETS, len(TARGETS))
        target = self._order.pop()
        agents = self.find_agents() if target == "agent" else {}
        pids = sorted(agents or self.fleet.find_processes(target))
        if not pids:  # being started again
            return
        pid = self.random.choice(pids)
        if pid in agents:
            self.killed_with_agent |= {number for number in find_open(self.fleet) if number % AGENT_COUNT == agents[pid]}
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills[target] += 1

    def find_agents(self) -> dict[int, int]:
        """Return the numbers of the clients by the pid of process 1 of their sandbox."""
        found = {}
        for name, did in self.fleet.select("SELECT ref, agent_did FROM sandboxes_sandbox"):
            shown = subprocess.run(["docker", "inspect", "-f", "{{.State.Pid}}", name], capture_output=True, text=True).stdout
            if pid := int(shown.strip() or 0):
                found[pid] = int(did[-1])
        return found


@pytest.fixture
def marks(fleet: Fleet) -> Iterator[Marks]:  # noqa: F811
    fleet.env |= {"LEASEHOLD_EGRESS_SLOTS": str(SLOT_COUNT), "LEASEHOLD_WEB_THREADS": "8"}
    fleet.up()
    marks = Marks(fleet)
    yield marks
    marks.close()


def test_no_exec_runs_twice_and_none_that_finished_is_reported_lost(fleet: Fleet, marks: Marks) -> None:  # noqa: F811
    clients, killer, stop = Clients(fleet), Killer(fleet, marks), threading.Event()
    with ThreadPoolExecutor(CLIENT_COUNT + 2) as executor:
        background = [executor.submit(killer.run, stop), executor.submit(sweep_until, fleet, stop)]
        try:
            answers = dict(enumerate(executor.map(clients.execute, range(EXEC_COUNT))))
        finally:
            stop.set()
        for thread in background:
            thread.result()
    wait_until(lambda: fleet.sweep() or not find_open(fleet), "every run is closed", within=PATIENCE_SECONDS, every=1.0)
    excused = killer.killed_with_agent | find_executed_by_engine(fleet)
    outcomes = Counter("result" if answer.status == 200 else answer.body["code"] for answer in answers.values())
    print(f"\nseed {SEED}: {EXEC_COUNT} execs, {dict(killer.kills)} killed, answers {dict(outcomes)}, {len(excused)} excused")
    assert sum(killer.kills.values()) >= min(EXEC_COUNT // EXECS_PER_KILL, len(TARGETS)) - 1
    assert [number for number, count in marks.starts.items() if count > 1] == [], "executed twice"
    for number, answer in answers.items():
        check_answer(number, answer, marks, excused)
    check_runs(fleet, marks, excused)


def check_answer(number: int, answer: Answer, marks: Marks, excused: set[int]) -> None:
    if answer.status == 200:
        result = answer.body["exit_code"], answer.body["stdout"], marks.starts[number], marks.ends[number]
        assert result == (number % 5, f"output of {number}\n", 1, 1), answer
    else:
        assert not marks.ends[number] or number in excused, f"{number} has finished: {answer}"


def check_runs(fleet: Fleet, marks: Marks, excused: set[int]) -> None:  # noqa: F811
    """Each recorded run of these commands is true: a result is that of its command, and a lost one did not finish."""
    for argv, outcome, exit_code, stdout in fleet.select("SELECT argv, outcome, exit_code, stdout FROM sandboxes_run"):
        number = parse_number(argv)
        if number is None:
            continue
        if outcome in ("ok", "failed") and exit_code is not None:
            assert (exit_code, bytes(stdout), marks.ends[number]) == (number % 5, f"output of {number}\n".encode(), 1), number
        else:
            assert not marks.ends[number] or number in excused, f"{number} has finished: {outcome}"


def find_executed_by_engine(fleet: Fleet) -> set[int]:  # noqa: F811
    """Return the numbers of the execs that began while no gateway was there for seconds: the engine retains no result."""
    runs = re.findall(r"exec by the engine .*\brun=([0-9a-f-]{36})", fleet.read_log())
    rows = fleet.select("SELECT id, argv FROM sandboxes_run")
    numbers = (parse_number(argv) for pk, argv in rows if str(uuid.UUID(str(pk))) in runs)
    return {number for number in numbers if number is not None}


def find_open(fleet: Fleet) -> set[int]:  # noqa: F811
    """Return the numbers of the execs whose run is open."""
    numbers = (parse_number(argv) for (argv,) in fleet.select("SELECT argv FROM sandboxes_run WHERE outcome = 'open'"))
    return {number for number in numbers if number is not None}


def parse_number(argv: Any) -> int | None:
    """Return the number of the exec with these arguments, None for another command."""
    words = argv if isinstance(argv, list) else json.loads(argv)
    return int(words[3]) if words[:3] == ["python3", "-c", SCRIPT] else None


def sweep_until(fleet: Fleet, stop: threading.Event) -> None:  # noqa: F811
    while not stop.wait(SWEEP_INTERVAL_SECONDS):
        run_manage(fleet.path, "sweep", **fleet.env)  # may fail while the gateway is being started again
