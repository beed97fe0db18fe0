"""Clients, operators and sweeps of one history. Each operation is an actor in a web process or a queue worker."""

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import OperationalError
from django_q.models import OrmQ

from billing.errors import BudgetExhausted
from controlplane import schedules
from leases import conditions, execution, fork, leasing, snapshots, tasks
from leases.errors import LeaseEnded, LeaseError
from leases.models import Lease, LeaseEvent
from sandboxes.db import database_time
from sandboxes.errors import ClaimLost, SandboxError
from sandboxes.hosts.bound_provider import compute_host_id
from sandboxes.models import Pool, Snapshot
from sandboxes.pool import allocation
from sandboxes.providers.base import DATA, WORKSPACE
from sandboxes.providers.errors import ProviderError
from sandboxes.runs.operations import Command
from sandboxes.state import workspace
from sandboxes.storage.base import StoreError
from tests.simulation.agent_runs import AgentRuns
from tests.simulation.expectations import LeaseExpectation, read_snapshot
from tests.simulation.http_clients import HttpClients
from tests.simulation.options import ENVIRONMENT_TYPE
from tests.simulation.outages import Outages
from tests.simulation.ports import PROGRAM
from tests.simulation.queued_runs import QueuedRuns
from tests.simulation.scheduler import Actor
from tests.support.suites import TEST_PROVIDER

if TYPE_CHECKING:
    from tests.simulation.options import Options
    from tests.simulation.world import Host, Process, World

STALLED_SWEEP_SHARE = 0.15  # of the pauses of a slow transfer in which the sweep `stalled` starts
MAX_FILES = 4  # of one lease; older ones are removed
# What the product may answer while faults occur. Any other exception is a finding.
REFUSALS = (SandboxError, LeaseError, BudgetExhausted, OperationalError, StoreError, Lease.DoesNotExist)
# What a task or a sweep may raise as well: the queue records the error, and the next pass tries again.
TASK_FAILURES = (*REFUSALS, ProviderError)
OUTAGES = ("vanish", "outage", "host_loss", "clock")


class Seat:
    """One agent in one environment, as its client sees it: at most one lease, and the operations in progress."""

    def __init__(self, agent: str, environment: str) -> None:
        self.agent, self.environment = agent, environment
        self.lease: uuid.UUID | None = None
        self.host: Host | None = None  # where the last command was executed
        self.busy = 0  # commands in progress
        self.exclusive = False  # an operation that excludes others is in progress

    @property
    def free(self) -> bool:
        return not self.busy and not self.exclusive

    def hold(self, *, exclusive: bool = False) -> Callable[[], None]:
        """Begin an operation of this client. Return the function that ends it."""
        if exclusive:
            self.exclusive = True
        else:
            self.busy += 1

        def end() -> None:
            if exclusive:
                self.exclusive = False
            else:
                self.busy -= 1

        return end


class Workload:
    """Operations of one history, chosen by its generator."""

    def __init__(self, world: "World", options: "Options") -> None:
        self.world, self.options, self.random = world, options, world.random
        self.seats = [Seat(agent, f"e{number}") for agent in options.agents for number in range(options.environments)]
        self.count = 0
        self.pending: dict[Actor, Callable[[], object]] = {}  # settlement of operations whose client got no answer
        self.unanswered: list[Callable[[], bool]] = []  # return whether a queued request has its outcome
        self.http, self.outages = HttpClients(self), Outages(self)
        self.queued_runs, self.agent_runs = QueuedRuns(self), AgentRuns(self)
        world.on_kill = self._settle_killed
        world.on_transfer_pause = self.start_stalled_sweep

    # --- choice -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Start one operation, if fewer than the maximum are in progress."""
        self.read_answers()
        names = [*self.options.weights]
        name = self.random.choices(names, [*self.options.weights.values()])[0]
        getattr(self.outages if name in OUTAGES else self, f"start_{name}")()

    def read_answers(self) -> None:
        """Have the clients of queued requests read the outcomes that are known by now."""
        self.unanswered = [check for check in self.unanswered if not check()]

    def spawn(
        self, kind: str, name: str, act: Callable[[], object], settle: Callable[[], object], host: "Host | None" = None
    ) -> None:
        """Run an operation in a process. `settle` is called once: after the operation, or when its process is killed."""
        self.count += 1  # also without a process: a client repeats its request, and no other request has its name
        processes = [process for process in self.world.processes if f".{kind}" in process.name and host in (None, process.host)]
        if not processes:
            settle()
            return
        process = self.random.choice(processes)
        expected_errors = TASK_FAILURES if kind == "worker" else REFUSALS

        def run() -> None:
            try:
                outcome = "done"
                act()
            except expected_errors as refused:
                outcome = f"{type(refused).__name__}: {refused}"
            self.world.scheduler.record("outcome", outcome[:100])
            del self.pending[actor]
            with self.world.uninterrupted():
                settle()

        actor = self.world.spawn(process, name, run)
        self.pending[actor] = settle

    def _settle_killed(self, process: "Process") -> None:
        for actor in process.actors:
            if settle := self.pending.pop(actor, None):
                with self.world.uninterrupted():
                    settle()

    def _choose_seat(self, *, free: bool) -> Seat | None:
        seats = [seat for seat in self.seats if (seat.free if free else not seat.exclusive and seat.busy < 2)]
        return self.random.choice(seats) if seats else None

    @contextmanager
    def _exclusively(self, *seats: Seat) -> Iterator[Callable[[], object]]:
        for seat in seats:
            seat.exclusive = True

        def release() -> None:
            for seat in seats:
                seat.exclusive = False

        yield release

    # --- clients ----------------------------------------------------------------------------------------------------

    def _acquire(self, seat: Seat) -> uuid.UUID:
        request = leasing.LeaseRequest(
            seat.agent, seat.environment, ENVIRONMENT_TYPE, pool=self.options.pool, ttl=self.options.ttl,
            sleep_after=self.options.sleep_after,
        )  # fmt: skip
        seat.lease = leasing.acquire(request, now=database_time.now())[0].pk
        self.world.promises.expectations.get(seat.lease, seat.agent)
        return seat.lease

    def start_exec(self) -> None:
        if seat := self._choose_seat(free=False):
            self.exec_in(seat, seat.host if self.random.random() < 0.8 else None)

    def exec_in(self, seat: Seat, host: "Host | None" = None) -> None:
        """Run a command for this client, on any host or on this one."""
        seat.busy += 1
        name = f"exec{self.count}"

        def settle() -> None:
            seat.busy -= 1

        self.spawn("web", name, lambda: self.exec(seat, name), settle, host)

    def exec(self, seat: Seat, name: str) -> None:
        lease = self._acquire(seat)
        expected = self.world.promises.expectations.get(lease, seat.agent)
        order, losses = self.build_order(expected, lease, name), expected.losses
        command = Command([PROGRAM, json.dumps(order)], timedelta(seconds=order["timeout"]), run_id=uuid.uuid4())
        try:
            run, result = execution.exec_command(lease, command, now=database_time.now())
        except LeaseEnded:
            self.world.promises.check_refusal(lease)
            raise
        except ClaimLost:
            self.world.promises.check_claim_lost(command.run_id)
            raise
        if result.exit_code == 0 and not result.timed_out:
            seat.host = self.world.host
            if expected.losses == losses:
                expected.vanished = False  # the lease went on: the promises of its files hold again
            for path, text in order["write"].items():
                expected.add(path, text, stored=not run.note)

    def build_order(self, expected: LeaseExpectation, lease: uuid.UUID, name: str) -> dict[str, Any]:
        random = self.random
        write = {f"{WORKSPACE}/f{name}": name}
        if random.random() < self.options.data_share:
            write[f"{DATA}/d{name}"] = name
        known = [*expected.workspace, *expected.data]
        remove = random.sample(known, max(0, len(known) - MAX_FILES))
        for path in remove:
            expected.remove(path)  # from now on the client expects either
        seconds = random.choice(self.options.seconds)
        timeout = 30 if random.random() < 0.05 else seconds + 60
        return {
            "op": name, "lease": str(lease), "write": write, "remove": remove, "seconds": seconds, "timeout": timeout,
            "early": random.random() < 0.5,
        }  # fmt: skip

    def start_http(self) -> None:
        """A client sends one request to the HTTP API."""
        weights = self.options.http_weights
        name = self.random.choices([*weights], [*weights.values()])[0]
        exclusive = name in ("join", "release", "fork")
        seat = self._choose_seat(free=exclusive)
        if seat is None or (seat.lease is None and name != "join"):
            return
        request = f"{name}{self.count}"
        if name != "fork":
            getattr(self.http, name)(seat, request)
        elif (target := self._choose_seat(free=True)) and target is not seat:
            self.http.fork(seat, target, request)

    def start_queued_run(self) -> None:
        self.queued_runs.start(self.random.choice(self.seats), f"queued{self.count}")

    def start_agent_run(self) -> None:
        if (seat := self._choose_seat(free=False)) and seat.lease:
            name = f"agent{self.count}"
            self.agent_runs.start(seat, name, self.queued_runs.build_order(seat, name, "agent_run"))

    def start_interrupt(self) -> None:
        runs = self.random.choice((self.queued_runs, self.agent_runs))
        runs.interrupt(f"interrupt{self.count}")

    def start_runner(self) -> None:
        self.count += 1
        self.queued_runs.wake()

    def start_release(self) -> None:
        if (seat := self._choose_seat(free=True)) and seat.lease:
            lease = seat.lease
            with self._exclusively(seat) as settle:
                self.spawn("web", f"release{self.count}", lambda: leasing.release(lease, now=database_time.now()), settle)

    def start_condition(self) -> None:
        seat = self.random.choice(self.seats)
        agents = self.random.choice(([seat.agent], None))
        self.spawn(
            "web", f"condition{self.count}",
            lambda: conditions.post_condition(seat.environment, "game.finished", now=database_time.now(), agents=agents),
            lambda: None,
        )  # fmt: skip

    def start_snapshot(self) -> None:
        if (seat := self._choose_seat(free=True)) and seat.lease:
            lease, name = seat.lease, f"snapshot{self.count}"
            expected = {**self.world.promises.expectations.get(lease).workspace}

            def act() -> None:
                taken = snapshots.take_snapshot(lease, name=name, now=database_time.now(), actor=name)
                files = read_snapshot(self.world.store, taken.key) or {}
                if missing := {
                    path for path in expected if path not in files and not Snapshot.objects.get(pk=taken.pk).forgotten_at
                }:
                    self.world.promises.violate(8, f"the requested snapshot {name} lacks {missing}")

            with self._exclusively(seat) as settle:
                self.spawn("web", name, act, settle)

    def start_restore(self) -> None:
        if (seat := self._choose_seat(free=True)) and seat.lease:
            lease, name = seat.lease, f"restore{self.count}"
            chosen = self._choose_snapshot(lease)
            if chosen is None:
                return
            queued = self.random.random() < 0.5
            with self._exclusively(seat) as release:
                if queued:
                    self._request_restore(lease, chosen, name, release)
                    return

                def settle() -> None:
                    if LeaseEvent.objects.filter(lease=lease, kind="restored", actor=name).exists():
                        self._expect_restored(lease, chosen)
                    release()

                act = lambda: snapshots.restore_snapshot(lease, chosen.pk, now=database_time.now(), actor=name)  # noqa: E731
                self.spawn("web", name, act, settle)

    def _choose_snapshot(self, lease: uuid.UUID) -> Snapshot | None:
        rows = [*workspace.find_by_holder(lease)]
        return self.random.choice(rows) if rows else None

    def _expect_restored(self, lease: uuid.UUID, snapshot: Snapshot) -> None:
        files = read_snapshot(self.world.store, snapshot.key)
        if files is None:
            self.world.promises.violate(8, f"the object of the restored snapshot {snapshot.key} is missing")
            return
        self.world.promises.expectations.get(lease).workspace = files

    def _request_restore(self, lease: uuid.UUID, snapshot: Snapshot, name: str, release: Callable[[], object]) -> None:
        """Queue a restore, as the console does. The client waits until the timeline has the outcome."""

        def check() -> bool:
            event = LeaseEvent.objects.filter(lease=lease, actor=name, kind__in=("restored", "restore_failed")).first()
            ended = Lease.objects.exclude(status="active").filter(pk=lease).exists()
            if event is None and not ended:
                return False
            if event and event.kind == "restored":
                self._expect_restored(lease, snapshot)
            release()
            return True

        def settle() -> None:
            if LeaseEvent.objects.filter(lease=lease, actor=name, kind="restore_asked_for").exists():
                self.unanswered.append(check)
            else:
                release()

        act = lambda: tasks.request_restore(snapshot, now=database_time.now(), actor=name, reason="simulated")  # noqa: E731
        self.spawn("web", name, act, settle)

    def start_fork(self) -> None:
        source, target = self._choose_seat(free=True), self._choose_seat(free=True)
        if source is None or target is None or source is target or source.lease is None:
            return
        lease, name = source.lease, f"fork{self.count}"
        copied = self.world.promises.expectations.get(lease)
        expected = {**copied.workspace}
        request = leasing.LeaseRequest(
            target.agent, target.environment, ENVIRONMENT_TYPE, pool=self.options.pool, ttl=self.options.ttl,
            sleep_after=self.options.sleep_after,
        )  # fmt: skip
        with self._exclusively(source, target) as release:

            def settle() -> None:
                for event in LeaseEvent.objects.filter(kind="forked", actor=name).exclude(lease=lease):
                    found = self.world.promises.expectations.get(event.lease_id, target.agent)
                    if not copied.discarded:  # a fork of discarded state copies the snapshot before it
                        found.workspace |= expected
                release()

            act = lambda: fork.fork(Lease.objects.get(pk=lease), request, now=database_time.now(), actor=name)  # noqa: E731
            self.spawn("web", name, act, settle)

    def start_operator(self) -> None:
        """An operator ends a lease, discards its state, or drains or resumes the pool."""
        seat = self.random.choice(self.seats)
        lease, name = seat.lease, f"operator{self.count}"
        choice = self.random.choice(("end", "discard", "drain", "resume", "resume"))
        if choice in ("drain", "resume"):
            pool = Pool.objects.get(name=self.options.pool)
            self.spawn("web", name, lambda: allocation.set_draining(pool, draining=choice == "drain"), lambda: None)
        elif lease and choice == "end":
            self.spawn("web", name, lambda: leasing.end(lease, reason="operator", now=database_time.now()), lambda: None)
        elif lease:
            self.world.promises.expectations.get(lease).discarded = True
            self.spawn("web", name, lambda: leasing.discard(lease, now=database_time.now()), lambda: None)

    # --- sweeps and tasks -------------------------------------------------------------------------------------------

    def start_sweep(self) -> None:
        names = schedules.SWEEP_NAMES
        name = self.random.choices(names, [self.options.sweep_weights.get(name, 1) for name in names])[0]
        self.spawn("worker", f"sweep-{name}{self.count}", lambda: schedules.run(name), lambda: None)

    def start_stalled_sweep(self) -> None:
        """Take over the work of processes past their deadlines, as the schedule does each minute."""
        if self.random.random() < STALLED_SWEEP_SHARE:
            self.spawn("worker", f"sweep-stalled{self.count}", lambda: schedules.run("stalled"), lambda: None)

    def start_task(self) -> None:
        """A worker takes a task from the queue, also one that another worker has not finished after the retry time."""
        now = self.world.scheduler.time
        if rows := [*OrmQ.objects.filter(lock__lte=now).order_by("pk")]:
            row = self.random.choice(rows)
            OrmQ.objects.filter(pk=row.pk).update(lock=now + timedelta(seconds=600))
            task = row.task

            def act() -> None:
                function = getattr(tasks, task["func"].rsplit(".", 1)[1])
                function(*task["args"])
                if not self.world.occurs("task repeated"):
                    OrmQ.objects.filter(pk=row.pk).delete()

            queues = {registry_name(host): host for host in self.world.hosts}
            self.spawn("worker", f"task{self.count}", act, lambda: None, queues.get(row.key))

    def start_pass_time(self) -> None:
        self.world.scheduler.run_until(self.world.scheduler.seconds + self.random.choice(self.options.intervals))

    def start_nap(self) -> None:
        """No client uses its sandbox until the idle sweeps have put them to sleep."""
        self.world.scheduler.run_until(self.world.scheduler.seconds + self.options.sleep_after.total_seconds() + 1)
        for host in self.world.hosts_in_service:
            self.spawn("worker", f"sweep-idle{self.count}", lambda: schedules.run("idle"), lambda: None, host)


def registry_name(host: "Host") -> str:
    """Return the name of the task queue of a host's worker."""
    return f"host-{compute_host_id(TEST_PROVIDER, host.name).hex}"
