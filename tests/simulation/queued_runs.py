"""Queued runs of one history: clients that queue and interrupt them through the HTTP API, and the processes that execute them.

A runner process has a Runner of the product. Its threads are actors of the process, and its main thread is an actor that looks
at the queue while attempts are in progress. An idle runner looks when the workload wakes it, not every ten virtual seconds."""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import Error as DatabaseError

from leases.queue import queue
from leases.queue.models import QueuedRun, QueuedRunState, derive_run_id
from leases.queue.runner import Runner
from sandboxes.models import Event
from sandboxes.models.webhooks import EventType
from tests.simulation import agent_runs
from tests.simulation.http_clients import ClientRequest, read_json
from tests.simulation.ports import PROGRAM
from tests.simulation.scheduler import Actor

if TYPE_CHECKING:
    from tests.simulation.workload import Seat, Workload
    from tests.simulation.world import Process

LOOK_INTERVAL_SECONDS = 10.0  # between two looks of a runner with attempts in progress; longer than POLL_SECONDS, to save CPU
MAX_ATTEMPTS = 3
MAX_RECOVERY_ROUNDS = 40  # of the runners after the last fault, ten virtual minutes each
OPEN_STATES = (QueuedRunState.QUEUED, QueuedRunState.STARTED)


@dataclass(frozen=True)
class Expectation:
    """Expected outcome of a queued run, as its client requested it."""

    operation: str  # name of the request, and of the executions of its command
    kind: str
    max_executions: int


class QueuedRuns:
    """Clients and runners of the queue in one history."""

    def __init__(self, workload: "Workload") -> None:
        self.workload, self.world, self.random = workload, workload.world, workload.random
        self.expected: dict[uuid.UUID, Expectation] = {}
        self.runners: dict[Process, Runner] = {}
        self.main_threads: dict[Process, Actor] = {}

    # --- clients ----------------------------------------------------------------------------------------------------

    def start(self, seat: "Seat", name: str) -> None:
        """Queue a command for a lease or for a new sandbox, or a turn. The client does not wait for its end."""
        kinds = ["exec", "exec", "one_shot", "turn"] + ["agent_run"] * self.workload.options.has_agent_runs
        kind = self.random.choice(kinds)
        if seat.lease is None and kind != "one_shot":
            return
        repeatable = kind != "turn" and self.random.random() < 0.5
        expected = Expectation(name, kind, MAX_ATTEMPTS if repeatable else 1)
        order = self.build_order(seat, name, kind, expected.max_executions)
        queued = {
            "queued": True, "repeatable": repeatable, "priority": self.random.choice((0, 0, 5)),
            "pending_timeout_seconds": self.random.choice((60, 900, 3600)), "max_attempts": expected.max_executions,
        }  # fmt: skip
        if kind == "turn":
            body: dict[str, Any] = {
                "type": "turn", "agent_did": seat.agent, "turn_number": self.workload.count, "state": order,
            }  # fmt: skip
            path = f"/environments/{seat.environment}/events"
        elif kind == "agent_run":
            body, path = agent_runs.build_body(order) | queued, f"/leases/{seat.lease}/agent-runs"
        else:
            body = {
                "agent_did": seat.agent, "argv": [PROGRAM, json.dumps(order)],
                "limits": {"timeout_seconds": int(order["timeout"])},
            }  # fmt: skip
            target = {"pool": self.workload.options.pool} if kind == "one_shot" else {"lease_id": str(seat.lease)}
            body |= queued | target
            path = "/runs"

        def answered(response: Any) -> None:
            if response.status_code < 300:
                self.expected[uuid.UUID(read_json(response)["queued_run_id"])] = expected
                self.wake()

        missing = lambda: kind == "turn"  # noqa: E731 - no active lease any more
        request = ClientRequest(name, "POST", path, json.dumps(body).encode(), answered, lambda: None, missing)
        self.workload.http.send(request)

    def build_order(self, seat: "Seat", name: str, kind: str, max_executions: int = 1) -> dict[str, Any]:
        """Return an order that changes no files, and that may be executed at any later time, also during a restore."""
        seconds = self.random.choice((*self.workload.options.seconds, 20.0))
        lease = None if kind == "one_shot" else str(seat.lease)
        return {
            "op": name, "lease": lease, "write": {}, "remove": [], "seconds": seconds, "early": False,
            "timeout": seconds + 60, "checks_files": False, "max_executions": max_executions,
            "is_event": kind == "turn",
            "messages": self.random.randint(1, 8) if kind == "agent_run" else 0,
        }  # fmt: skip

    def interrupt(self, name: str) -> None:
        """A client interrupts a run in any state."""
        if not self.expected:
            return
        pk = self.random.choice([*self.expected])
        self.world.promises.interrupted.add(self.expected[pk].operation)
        request = ClientRequest(name, "POST", f"/runs/queued/{pk}/interrupt", b"{}", lambda response: None, lambda: None)
        self.workload.http.send(request)

    # --- runners ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let a runner look at the queue."""
        if processes := [process for process in self.world.processes if ".runner" in process.name]:
            self._wake(self.random.choice(processes))

    def _wake(self, process: "Process") -> None:
        if process not in self.main_threads:
            self.main_threads[process] = self.world.spawn(process, "runner", lambda: self._look(process))

    def _look(self, process: "Process") -> None:
        """Look at the queue, repeatedly while attempts are in progress, as the main thread of a runner does."""
        if process not in self.runners:
            self.runners[process] = Runner(self.workload.options.runner_threads, start_thread=self._start_thread(process))
        runner = self.runners[process]
        try:
            while True:
                try:
                    runner.run_pending()
                except DatabaseError:  # the next look tries again
                    self.world.scheduler.record("outcome", "the look failed")
                if runner.is_idle:
                    return
                self.world.scheduler.sleep(LOOK_INTERVAL_SECONDS)
        finally:
            del self.main_threads[process]

    def _start_thread(self, process: "Process") -> Callable[[str, Callable[[], object]], object]:
        def start(name: str, act: Callable[[], object]) -> None:
            if self.world.occurs("runner kill"):
                scheduler = self.world.scheduler
                scheduler.call_at(scheduler.seconds + self.random.uniform(0, 30), lambda: self._kill(process))
            self.world.spawn(process, name, act)

        return start

    def _kill(self, process: "Process") -> None:
        if process.alive and self.world.faults.enabled:
            self.world.kill(process)

    def is_background(self, actor: Actor) -> bool:
        """Return whether an actor is the main thread of a runner, which is no operation of the workload."""
        return actor in self.main_threads.values()

    # --- after the last fault ---------------------------------------------------------------------------------------

    def recover(self, finish: Callable[[], None], sweep: Callable[[], None]) -> None:
        """Let all runners and the sweeps go on until no run is open."""
        for _ in range(MAX_RECOVERY_ROUNDS):
            if not queue.has_open():
                return
            for process in [process for process in self.world.processes if ".runner" in process.name]:
                self._wake(process)
            finish()
            sweep()

    def check(self) -> None:
        """Promise 11: each run has ended, was not executed too often, and its end was recorded once."""
        for pk, expected in self.expected.items():
            row = QueuedRun.objects.filter(pk=pk).first()
            if row is None or row.queued_at < self.world.scheduler.time - settings.KEEP_STATE:
                continue
            if problem := self._find_problem(row, expected):
                self.world.promises.violate(11, f"the queued {expected.kind} {expected.operation} ({pk}): {problem}")

    def _find_problem(self, row: QueuedRun, expected: Expectation) -> str:
        if row.state in OPEN_STATES:
            return f"{row.state} for ever, attempt {row.attempt}, runner {row.runner!r}, error {row.error}"
        if row.state == QueuedRunState.FAILED and row.error["code"] == "internal":
            return f"failed by an unexpected exception in attempt {row.attempt}"
        executed = [
            number for number in range(1, row.attempt + 1) if self.world.promises.executions[str(derive_run_id(row.pk, number))]
        ]
        if len(executed) > expected.max_executions:
            return f"executed by the attempts {executed}"
        if row.state == QueuedRunState.COMPLETED and expected.kind != "turn" and executed[-1:] != [row.attempt]:
            return f"completed by attempt {row.attempt}, and executed by {executed}"
        if row.state == QueuedRunState.EXPIRED and executed:
            return f"expired, and executed by {executed}"
        ends = [*Event.objects.filter(kind=EventType.QUEUED_RUN_ENDED, payload__queued_run_id=str(row.pk))]
        if [(event.payload["state"], event.payload["attempt"]) for event in ends] != [(row.state, row.attempt)]:
            return f"{row.state} in attempt {row.attempt}, and announced as {[event.payload for event in ends]}"
        started = Event.objects.filter(kind=EventType.QUEUED_RUN_STARTED, payload__queued_run_id=str(row.pk))
        if missing := {*executed} - {event.payload["attempt"] for event in started}:
            return f"the attempts {missing} were executed and not announced"
        return ""
