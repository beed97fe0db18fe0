"""Hypothesis state machine over a pool's operations. Rules include the passage of time, provider failures and crashes.

The promises of the pool are its invariants. Each example creates its own pool and reads only that pool."""

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial

import hypothesis
import hypothesis.strategies as st
import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pytest_django import Settings

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes import lifecycle, processes, providers
from sandboxes.errors import SandboxError
from sandboxes.models import ALIVE_STATES, GONE_STATES, NEVER_STARTED, Pool, Process, Quota, Run, Sandbox, Snapshot, Transition
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import NOW, SimulatedCrash
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("guarded UPDATEs of the state machine")]
CAPACITY = 4
# Index into existing rows. Drawn before the rows are read, so that timing does not change the drawn examples.
ROW_INDEX = st.integers(0, 99)
AGENTS = [f"did:plc:{name}" for name in "abc"]
STEPS = [
    "reserved", "created", "prepared", "run opened", "run answered", "wake claimed", "eviction claimed", "objects stored",
    "persisted", "use asked", "process gone", "destroy claimed", "destroy answered", "process inserted", "process started",
]  # fmt: skip
VERBS = ["create", "wait_ready", "exec", "destroy", "get_files", "put_files", "list", "start", "processes", "kill"]

RECONCILE = partial(sweeps.reconcile, grace=timedelta(0))
SWEEPS = {
    "idle": [passes.evict_idle],
    "cold": [passes.expire_cold],
    "reconcile": [RECONCILE],
    "rest": [sweeps.expire_due_leases, sweeps.recover_stalled, sweeps.reclaim, passes.warm_pools],
}


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rollback = transaction.atomic()
        self.rollback._from_testcase = True  # permits durable transactions inside, as in a TestCase
        self.rollback.__enter__()
        self.memory = providers.get_provider("memory")
        self.memory.reset()
        self.now: datetime = NOW
        self.pool = Pool.objects.create(name=f"machine-{uuid.uuid4().hex[:10]}", provider="memory", capacity=CAPACITY)
        Quota.objects.create(pool=self.pool, agent_did=AGENTS[0], guaranteed=2)
        Quota.objects.create(pool=self.pool, agent_did=AGENTS[1], most=1)
        EnvironmentType.objects.get_or_create(name="catan", defaults={"expiry_conditions": ["game.finished"]})
        self.written: dict[uuid.UUID, bytes] = {}  # content of `f` after each lease's last successful exec
        self.armed = ExitStack()

    def teardown(self) -> None:
        self.armed.close()
        lifecycle.CHECKPOINT_HOOKS.clear()
        try:
            self.settle()
        finally:
            transaction.set_rollback(True)
            self.rollback.__exit__(None, None, None)
            self.memory.reset()

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(agent=st.sampled_from(AGENTS), environment=st.sampled_from(["e1", "e2"]), number=st.integers(0, 99))
    def exec(self, agent: str, environment: str, number: int) -> None:
        request = leasing.LeaseRequest(agent, environment, "catan", pool=self.pool.name, ttl=timedelta(hours=6))
        lease = leasing.acquire(request, now=self.now)[0]
        command = Command(argv=["sh", "-c", f"cat f; echo {number} >f"], timeout=timedelta(minutes=1))
        before = self.written.get(lease.pk)
        result = self.attempt(lambda: execution.exec_command(lease.pk, command, now=self.now))
        if result is None:
            self.written.pop(lease.pk, None)  # the outcome is unknown
            return
        if before is not None:
            assert result[1].stdout == before, "state was lost silently"
        self.written[lease.pk] = f"{number}\n".encode()

    @rule(agent=st.sampled_from(AGENTS))
    def start_process(self, agent: str) -> None:
        request = leasing.LeaseRequest(agent, "e1", "catan", pool=self.pool.name, ttl=timedelta(hours=6))
        lease, spec = leasing.acquire(request, now=self.now)[0], ProcessSpec(["sleep", "100000"])

        def start() -> Process:
            with execution.use_lease(lease.pk, now=self.now) as request:
                return processes.start_process(request, spec, now=self.now)

        self.attempt(start)

    @rule(index=ROW_INDEX)
    def kill_process(self, index: int) -> None:
        if rows := list(Process.objects.filter(sandbox__pool=self.pool).order_by("started_at", "agent_did", "pk")):
            killed = self.attempt(lambda: processes.kill_process(rows[index % len(rows)], now=self.now))
            assert killed is None or killed.ended_at

    @rule(minutes=st.sampled_from([1, 6, 31, 125, 400]))
    def pass_time(self, minutes: int) -> None:
        self.now += timedelta(minutes=minutes)

    @rule(index=ROW_INDEX)
    def release(self, index: int) -> None:
        if leases := list(Lease.objects.filter(pool=self.pool, status="active").order_by("leased_at", "environment_id")):
            self.attempt(lambda: leasing.release(leases[index % len(leases)].pk, now=self.now))

    @rule(name=st.sampled_from(list(SWEEPS)))
    def sweep(self, name: str) -> None:
        for sweep in SWEEPS[name]:
            self.attempt(lambda sweep=sweep: sweep(now=self.now))

    @rule(warm_target=st.sampled_from([0, 2]))
    def set_warm_target(self, warm_target: int) -> None:
        Pool.objects.filter(pk=self.pool.pk).update(warm_target=warm_target)
        self.pool.refresh_from_db()

    @rule(verb=st.sampled_from(VERBS), times=st.integers(1, 3))
    def fail_provider(self, verb: str, times: int) -> None:
        self.armed.push(self.memory.fail(verb, Unavailable(f"{verb} failed"), times=times))

    @rule(step=st.sampled_from(STEPS))
    def crash_at(self, step: str) -> None:
        def die(reached: str, subject: object) -> None:
            if reached == step:
                lifecycle.CHECKPOINT_HOOKS.remove(die)
                raise SimulatedCrash

        lifecycle.CHECKPOINT_HOOKS.append(die)

    @rule(verb=st.sampled_from(VERBS), when=st.sampled_from(["before", "after"]))
    def crash_around(self, verb: str, when: str) -> None:
        def die(ref: str) -> None:
            hook.close()
            raise SimulatedCrash

        hook = getattr(self.memory, when)(verb, die)
        self.armed.push(hook)

    @rule(index=ROW_INDEX)
    def vanish_sandbox(self, index: int) -> None:
        alive = list(Sandbox.objects.filter(pool=self.pool, state__in=ALIVE_STATES).order_by("created_at", "environment_id"))
        if alive:
            sandbox = alive[index % len(alive)]
            if any(listed.spec.name == sandbox.ref for listed in self.peek()):
                self.memory.vanish(sandbox.ref)
                self.written.pop(sandbox.holder, None)  # type: ignore[arg-type]

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def promises_are_kept(self) -> None:
        """Check every promise on one reading of the rows: per-row queries would take most of the test's time."""
        self.pool.refresh_from_db()
        sandboxes = {sandbox.pk: sandbox for sandbox in Sandbox.objects.filter(pool=self.pool)}
        self.check_capacity(sandboxes.values())
        self.check_transitions(sandboxes)
        self.check_runs_and_processes(sandboxes)
        self.check_holders(sandboxes.values())

    def check_capacity(self, sandboxes: Collection[Sandbox]) -> None:
        owners = Counter(sandbox.agent_did for sandbox in sandboxes if sandbox.state != "destroyed")
        assert owners.total() == self.pool.used <= CAPACITY
        for quota in Quota.objects.filter(pool=self.pool):
            assert owners[quota.agent_did] == quota.used <= (quota.most or CAPACITY)
        assert len(self.peek()) <= CAPACITY

    def check_transitions(self, sandboxes: Mapping[uuid.UUID, Sandbox]) -> None:
        """Each sandbox's transitions are a chain that ends with its state."""
        reached = dict.fromkeys(sandboxes, "")
        steps = Transition.objects.filter(sandbox__pool=self.pool).order_by("pk").values_list("sandbox", "was", "to")
        for sandbox, was, to in steps:
            assert was == reached[sandbox]
            reached[sandbox] = to
        assert reached == {pk: sandbox.state for pk, sandbox in sandboxes.items()}

    def check_runs_and_processes(self, sandboxes: Mapping[uuid.UUID, Sandbox]) -> None:
        """`running` means open runs, and processes end with the sandbox they were started in."""
        open_runs = Counter(Run.objects.filter(sandbox__pool=self.pool, ended_at=None).values_list("sandbox", flat=True))
        for pk, sandbox in sandboxes.items():
            assert sandbox.open_runs == open_runs[pk] and (sandbox.state == "running") == bool(open_runs[pk])
        for process in self.open_processes():
            sandbox = sandboxes[process.sandbox_id]
            assert sandbox.state in (*ALIVE_STATES, "evicting") and sandbox.lost_at is None
            assert (sandbox.incarnation, sandbox.holder) == (process.incarnation, process.holder)

    def check_holders(self, sandboxes: Collection[Sandbox]) -> None:
        """No ended lease holds a live sandbox, and a cold sandbox is stored or was not used."""
        held = {sandbox.holder for sandbox in sandboxes if sandbox.holder and sandbox.state not in GONE_STATES}
        assert held <= set(Lease.objects.filter(pool=self.pool, status="active").values_list("pk", flat=True))
        if cold := {sandbox.pk: sandbox.holder for sandbox in sandboxes if sandbox.state == "cold"}:
            used = Run.objects.filter(sandbox__in=cold, kind="exec").exclude(NEVER_STARTED).values_list("sandbox", flat=True)
            stored = Snapshot.objects.filter(holder__in=cold.values(), forgotten_at=None).values_list("holder", flat=True)
            assert {cold[pk] for pk in used} <= set(stored)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def attempt(self, act: Callable[[], object]):  # type: ignore[no-untyped-def]
        """Call a function. Returns None if it was refused or crashed."""
        try:
            return act()
        except (SandboxError, SimulatedCrash):
            return None

    def peek(self) -> list:  # type: ignore[type-arg]
        """Sandboxes that exist at the provider, read without running hooks."""
        owner = str(self.pool.owner)
        return [sandbox for sandbox in self.memory._sandboxes.values() if sandbox.spec.owner == owner]

    def settle(self) -> None:
        """Run the sweeps without failures, and check that rows and sandboxes agree."""
        self.memory.clear_hooks()
        Pool.objects.filter(pk=self.pool.pk).update(warm_target=0)
        for hours in (1, 1, 10):
            self.now += timedelta(hours=hours)
            for sweep in (sweeps.expire_due_leases, sweeps.recover_stalled, sweeps.reclaim, RECONCILE, sweeps.reclaim):
                sweep(now=self.now)
        rows = {s.name for s in Sandbox.objects.filter(pool=self.pool).exclude(state__in=("cold", "destroyed"))}
        listed = {sandbox.spec.name for sandbox in self.peek()}
        assert listed == rows or not listed  # an empty listing proves nothing about the rows
        assert passes.recount(now=self.now).failures == []
        assert not Run.objects.filter(sandbox__pool=self.pool, ended_at__isnull=True).exists()
        if listed == rows:
            running_marks = {
                mark for sandbox in self.peek() for mark, program in sandbox.background.items() if program.state().running
            }
            assert running_marks == {str(pk) for pk in self.open_processes().values_list("pk", flat=True)}

    def open_processes(self):  # type: ignore[no-untyped-def]
        return Process.objects.filter(sandbox__pool=self.pool, ended_at=None)


def test_pool_invariants_hold_under_failures_and_crashes(settings: Settings, memory: MemoryProvider) -> None:
    # Real time that a request waits for a sandbox whose worker has crashed, before it is refused.
    settings.SANDBOX_START_TIMEOUT = timedelta(milliseconds=20)
    run_state_machine_as_test(
        PoolMachine,
        settings=hypothesis.settings(
            max_examples=budget(fast=7, full=25),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking thirty such steps takes longer than reading them
        ),
    )
