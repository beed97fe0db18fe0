"""A hypothesis state machine over the verbs, with "time passes", "the provider fails here" and "the process dies here"
as rules and the promises as invariants. Each example has a pool of its own and looks only inside it."""

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import pairwise

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
from sandboxes import sweeps as below
from sandboxes.errors import SandboxError
from sandboxes.models import ALIVE_STATES, GONE_STATES, Pool, Process, Quota, Run, Sandbox, Snapshot, Transition
from sandboxes.processes import ProcessSpec
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from tests.conftest import NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
CAPACITY = 4
# Of whatever there is. Drawn before anybody looks: how long real time takes must not change what is drawn.
WHICH = st.integers(0, 99)
AGENTS = [f"did:plc:{name}" for name in "abc"]
STEPS = [
    "reserved", "created", "prepared", "run opened", "run answered", "wake claimed", "eviction claimed", "objects stored",
    "persisted", "use asked", "process gone", "destroy claimed", "destroy answered", "process noted", "process started",
]  # fmt: skip
VERBS = ["create", "wait_ready", "exec", "destroy", "get_files", "put_files", "list", "start", "processes", "kill"]


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rollback = transaction.atomic()
        self.rollback._from_testcase = True  # as the one of a test: the verbs may ask for a durable one inside
        self.rollback.__enter__()
        provider = providers.get_provider("memory")
        assert isinstance(provider, MemoryProvider)
        self.memory = provider
        self.memory.reset()
        self.now: datetime = NOW
        self.pool = Pool.objects.create(name=f"machine-{uuid.uuid4().hex[:10]}", provider="memory", capacity=CAPACITY)
        Quota.objects.create(pool=self.pool, agent_did=AGENTS[0], most=3, guaranteed=2)
        EnvironmentType.objects.get_or_create(name="catan", defaults={"expiry_conditions": ["game.finished"]})
        self.written: dict[uuid.UUID, bytes] = {}  # what each lease's last successful exec left in its workspace
        self.armed = ExitStack()

    def teardown(self) -> None:
        if hasattr(self, "rollback"):
            self.armed.close()
            lifecycle.CHECKPOINT_HOOKS.clear()
            try:
                self.settle()
            finally:
                transaction.set_rollback(True)
                self.rollback.__exit__(None, None, None)
                self.memory.reset()

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(agent=st.sampled_from(AGENTS), environment=st.sampled_from(["e1", "e2"]), number=st.integers(0, 99))
    def exec(self, agent: str, environment: str, number: int) -> None:
        ask = leasing.LeaseRequest(agent, environment, "catan", pool=self.pool.name, ttl=timedelta(hours=6))
        lease = leasing.acquire(ask, now=self.now)[0]
        command = Command(argv=["sh", "-c", f"cat f; echo {number} >f"], timeout=timedelta(minutes=1))
        before = self.written.get(lease.pk)
        answer = self.attempt(lambda: execution.exec_command(lease.pk, command, now=self.now))
        if answer is None:
            self.written.pop(lease.pk, None)  # it may or may not have run
            return
        if before is not None:
            assert answer[1].stdout == before, "state was lost without a word"
        self.written[lease.pk] = f"{number}\n".encode()

    @rule(agent=st.sampled_from(AGENTS))
    def start_process(self, agent: str) -> None:
        ask = leasing.LeaseRequest(agent, "e1", "catan", pool=self.pool.name, ttl=timedelta(hours=6))
        lease, launch = leasing.acquire(ask, now=self.now)[0], ProcessSpec(["sleep", "100000"])

        def start() -> Process:
            with execution.use_lease(lease.pk, now=self.now) as request:
                return processes.start_process(request, launch, now=self.now)

        self.attempt(start)

    @rule(which=WHICH)
    def kill_process(self, which: int) -> None:
        if some := list(Process.objects.filter(sandbox__pool=self.pool).order_by("started_at", "agent_did", "pk")):
            killed = self.attempt(lambda: processes.kill_process(some[which % len(some)], now=self.now))
            assert killed is None or killed.ended_at

    @rule(minutes=st.sampled_from([1, 6, 31, 125, 400]))
    def time_passes(self, minutes: int) -> None:
        self.now += timedelta(minutes=minutes)

    @rule(which=WHICH)
    def release(self, which: int) -> None:
        if leases := list(Lease.objects.filter(pool=self.pool, status="active").order_by("leased_at", "environment_id")):
            self.attempt(lambda: leasing.release(leases[which % len(leases)].pk, now=self.now))

    @rule()
    def sweep_idle(self) -> None:
        self.attempt(lambda: below.evict_idle(now=self.now))

    @rule()
    def sweep_cold(self) -> None:
        self.attempt(lambda: below.expire_cold(now=self.now))

    @rule()
    def sweep_rest(self) -> None:
        for sweep in (sweeps.expire_due_leases, sweeps.recover_stalled, sweeps.reclaim, below.warm_pools):
            self.attempt(lambda sweep=sweep: sweep(now=self.now))

    @rule()
    def reconcile(self) -> None:
        self.attempt(lambda: sweeps.reconcile(now=self.now, grace=timedelta(0)))

    @rule(wanted=st.sampled_from([0, 2]))
    def set_warm_target(self, wanted: int) -> None:
        Pool.objects.filter(pk=self.pool.pk).update(warm_target=wanted)
        self.pool.refresh_from_db()

    @rule(verb=st.sampled_from(VERBS), times=st.integers(1, 3))
    def the_provider_fails(self, verb: str, times: int) -> None:
        self.armed.push(self.memory.fail(verb, Unavailable(f"{verb} failed"), times=times))

    @rule(step=st.sampled_from(STEPS))
    def the_process_dies_at(self, step: str) -> None:
        def die(reached: str, subject: object) -> None:
            if reached == step:
                lifecycle.CHECKPOINT_HOOKS.remove(die)
                raise SimulatedCrash

        lifecycle.CHECKPOINT_HOOKS.append(die)

    @rule(verb=st.sampled_from(VERBS), when=st.sampled_from(["before", "after"]))
    def the_process_dies_around(self, verb: str, when: str) -> None:
        def die(ref: str) -> None:
            hook.close()
            raise SimulatedCrash

        hook = getattr(self.memory, when)(verb, die)
        self.armed.push(hook)

    @rule(which=WHICH)
    def a_sandbox_vanishes(self, which: int) -> None:
        alive = list(Sandbox.objects.filter(pool=self.pool, state__in=ALIVE_STATES).order_by("created_at", "environment_id"))
        if alive:
            sandbox = alive[which % len(alive)]
            if any(box.spec.name == sandbox.ref for box in self.peek()):
                self.memory.vanish(sandbox.ref)
                self.written.pop(sandbox.holder, None)  # type: ignore[arg-type]

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        if hasattr(self, "pool"):
            live = Sandbox.objects.filter(pool=self.pool).exclude(state="destroyed").count()
            assert live == Pool.objects.get(pk=self.pool.pk).used <= CAPACITY
            for quota in Quota.objects.filter(pool=self.pool):
                mine = Sandbox.objects.filter(pool=self.pool, agent_did=quota.agent_did).exclude(state="destroyed")
                assert mine.count() == quota.used <= (quota.most or CAPACITY)

    @invariant()
    def no_more_processes_than_places(self) -> None:
        if hasattr(self, "pool"):
            assert len(self.peek()) <= CAPACITY

    @invariant()
    def running_is_having_open_runs(self) -> None:
        if hasattr(self, "pool"):
            for sandbox in Sandbox.objects.filter(pool=self.pool):
                open_runs = Run.objects.filter(sandbox=sandbox, ended_at__isnull=True).count()
                assert sandbox.open_runs == open_runs and (sandbox.state == "running") == bool(open_runs)

    @invariant()
    def what_runs_in_the_background_ends_with_its_sandbox(self) -> None:
        if hasattr(self, "pool"):
            for process in self.open_processes().select_related("sandbox"):
                box = process.sandbox
                assert box.state in (*ALIVE_STATES, "evicting") and box.lost_at is None
                assert (box.incarnation, box.holder) == (process.incarnation, process.holder)

    @invariant()
    def state_is_what_the_last_transition_says(self) -> None:
        if hasattr(self, "pool"):
            for sandbox in Sandbox.objects.filter(pool=self.pool):
                chain = list(Transition.objects.filter(sandbox=sandbox).order_by("pk"))
                assert chain[-1].to == sandbox.state
                assert all(a.to == b.was for a, b in pairwise(chain))

    @invariant()
    def an_ended_lease_holds_nothing_alive(self) -> None:
        if hasattr(self, "pool"):
            active = set(Lease.objects.filter(pool=self.pool, status="active").values_list("pk", flat=True))
            held = Sandbox.objects.filter(pool=self.pool, holder__isnull=False).exclude(state__in=GONE_STATES)
            assert {sandbox.holder for sandbox in held} <= active

    @invariant()
    def what_sleeps_is_stored_or_was_never_used(self) -> None:
        if hasattr(self, "pool"):
            for sandbox in Sandbox.objects.filter(pool=self.pool, state="cold"):
                used = Run.objects.filter(sandbox=sandbox, kind="exec").exists()
                assert not used or Snapshot.objects.filter(holder=sandbox.holder, forgotten_at=None).exists()

    # --- how ----------------------------------------------------------------------------------------------------------

    def attempt(self, act: Callable[[], object]):  # type: ignore[no-untyped-def]
        """Do it; None if it was refused or the process died in it."""
        try:
            return act()
        except (SandboxError, SimulatedCrash):
            return None

    def peek(self) -> list:  # type: ignore[type-arg]
        """What exists, asked for without going through hooks."""
        owner = str(self.pool.owner)
        return [box for box in self.memory._boxes.values() if box.spec.owner == owner]

    def settle(self) -> None:
        """Whatever happened: nothing fails any more, the sweeps run, and rows and sandboxes agree."""
        self.memory._hooks.clear()
        Pool.objects.filter(pk=self.pool.pk).update(warm_target=0)
        for hours in (1, 1, 10):
            self.now += timedelta(hours=hours)
            for sweep in (sweeps.expire_due_leases, sweeps.recover_stalled, sweeps.reclaim):
                sweep(now=self.now)
            sweeps.reconcile(now=self.now, grace=timedelta(0))
            sweeps.reclaim(now=self.now)
        rows = {s.name for s in Sandbox.objects.filter(pool=self.pool).exclude(state__in=("cold", "destroyed"))}
        listed = {box.spec.name for box in self.peek()}
        assert listed == rows or not listed  # an empty listing proves nothing about the rows
        assert below.recount(now=self.now).failures == []
        assert not Run.objects.filter(sandbox__pool=self.pool, ended_at__isnull=True).exists()
        if listed == rows:
            on = {mark for box in self.peek() for mark, program in box.background.items() if program.state().running}
            assert on == {str(pk) for pk in self.open_processes().values_list("pk", flat=True)}

    def open_processes(self):  # type: ignore[no-untyped-def]
        return Process.objects.filter(sandbox__pool=self.pool, ended_at=None)


def test_the_pool_keeps_its_promises_whatever_happens(settings: Settings) -> None:
    # Who finds a sandbox in the hands of somebody dead waits this long in real time, and is refused.
    settings.SANDBOX_START_TIMEOUT = timedelta(milliseconds=20)
    run_state_machine_as_test(
        PoolMachine,
        settings=hypothesis.settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking thirty such steps takes longer than reading them
        ),
    )
