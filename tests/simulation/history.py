"""One history: set-up from a seed, operations under faults, the end of all faults, and the checks."""

import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random

from django.conf import settings
from django.utils.module_loading import import_string
from django_q.models import OrmQ

import controlplane.urls
import controlplane.worker.broker  # noqa: F401 - django-q2 imports it by its name in the settings, with the first task
from billing.models import Budget, Rate
from controlplane import schedules
from leases import sweeps
from leases.models import EnvironmentType, Lease, LeaseStatus
from sandboxes import destruction
from sandboxes.db import database_time
from sandboxes.models import Pool, Quota, Sandbox, Transition
from tests.simulation import final_checks
from tests.simulation.faults import draw_faults
from tests.simulation.options import ENVIRONMENT_TYPE, Options
from tests.simulation.ports import PROGRAM
from tests.simulation.scheduler import EPOCH
from tests.simulation.workload import Workload
from tests.simulation.world import Process, World
from tests.support.suites import TEST_PROVIDER

for _middleware in settings.MIDDLEWARE:
    import_string(_middleware)  # as above: the first request would import it

MAX_SECONDS_TO_FINISH = 6 * 3600.0  # virtual time for the operations in progress after the last fault
SWEEP_ROUNDS = 14
RECOVERY_INTERVAL_MINUTES = 10
RECOVERY_SWEEPS = ("hosts", "expire", "stalled", "reclaim", "persist", "idle", "cold", "reconcile")


@dataclass(frozen=True)
class Report:
    """Outcome of one history. `trace` is the SHA-256 of all its events."""

    seed: int
    violations: tuple[str, ...]
    trace: str
    events: int
    operations: int
    virtual_hours: float
    cpu_seconds: float
    sleeps: int
    max_sleeps: int  # of one lease
    length: int
    kills: int
    recent: tuple[str, ...]


def run_history(seed: int, *, length: int = 0, print_events: bool = False) -> Report:
    """Run the history of one seed. The same seed and length always give the same trace."""
    began = time.process_time()
    gc.collect()
    gc.disable()  # a third of the time otherwise
    random = Random(seed)
    options, faults = Options(random, length), draw_faults(random)
    world = World(random.getrandbits(60), faults, hosts=options.hosts, drifts=options.drifts)
    world.scheduler.print_events = print_events
    workload, imported = None, find_product_modules()
    with (
        world.installed(),
        override_settings(EGRESS_SLOTS=options.slots, SANDBOX_PROVIDER=TEST_PROVIDER, DESTROY_TRIES=options.destroy_tries),
    ):
        try:
            set_up(world, options)
            workload = Workload(world, options)
            run_operations(world, workload, options)
            if not world.promises.violations:
                quiesce(world, workload)
            if not world.promises.violations:
                final_checks.check_all(world)
                workload.queued_runs.check()
                workload.agent_runs.check()
        except Exception as error:
            world.promises.violate(0, f"{type(error).__name__}: {error}")
            if print_events:
                raise
        if TEST_PROVIDER == "memory" and (late := find_product_modules() - imported):
            world.promises.violate(0, f"imported within a history, so that the next one differs: {sorted(late)}")
        scheduler, sleeps = world.scheduler, Counter(Transition.objects.filter(to="cold").values_list("holder", flat=True))
        return Report(
            seed, tuple(world.promises.violations), scheduler.digest.hexdigest(), scheduler.events,
            workload.count if workload else 0, scheduler.seconds / 3600, time.process_time() - began,
            sleeps.total(), max(sleeps.values(), default=0), length, world.kills, tuple(scheduler.recent),
        )  # fmt: skip


def find_product_modules() -> set[str]:
    """Return the names of the imported modules of the product."""
    return {name for name in sys.modules if name.startswith(("billing.", "controlplane.", "leases.", "sandboxes."))}


class override_settings:
    """Replace settings during a block, without Django's signals."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.saved = {name: getattr(settings, name) for name in (*self.values, "INSTANCE", "STATE_DIR")}
        settings.__dict__.update(self.values)

    def __exit__(self, *error: object) -> None:
        settings.__dict__.update(self.saved)


def set_up(world: World, options: Options) -> None:
    world.capacity = options.capacity
    world.enter_host(world.hosts[0])
    Pool.objects.all().delete()
    pool = Pool.objects.create(
        name=options.pool, provider=TEST_PROVIDER, capacity=options.capacity, warm_target=options.warm_target, created_at=EPOCH
    )
    if options.guaranteed:
        Quota.objects.create(pool=pool, agent_did=options.agents[0], guaranteed=options.guaranteed)
    EnvironmentType.objects.update_or_create(
        name=ENVIRONMENT_TYPE,
        defaults={
            "expiry_conditions": ["game.finished"], "max_ttl": timedelta(days=30), "turn_argv": [PROGRAM],
            "suspend_after": options.suspend_after,
        },
    )  # fmt: skip
    Rate.objects.create(provider=TEST_PROVIDER, item="time", usd="0.37", valid_from=EPOCH + timedelta(hours=30))
    Rate.objects.create(provider=TEST_PROVIDER, item="suspend", usd="0.11", valid_from=EPOCH + timedelta(hours=20))
    world.promises.budgets = options.budget_hours is not None
    if options.budget_hours:
        Budget.objects.create(
            scope="agent", subject=options.agents[0], unit="hours", amount=str(options.budget_hours), period="day",
            created_at=EPOCH,
        )  # fmt: skip
    for host in world.hosts:
        for kind in ("web", "web", "worker", "worker", *(["runner"] if "queued_run" in options.weights else [])):
            world.start_process(host, kind)
        world.enter_host(host)
        schedules.run_sweep("hosts", now=world.scheduler.time)


def run_operations(world: World, workload: Workload, options: Options) -> None:
    scheduler = world.scheduler
    original = world.on_kill

    def on_kill(process: Process) -> None:
        original(process)
        scheduler.call_at(scheduler.seconds + world.random.uniform(1, 60), lambda: restart(world, process, options))

    world.on_kill = on_kill
    while workload.count < options.operations and not world.promises.violations:
        in_progress = [
            actor for actor in scheduler.actors if not actor.killed and not workload.queued_runs.is_background(actor)
        ]
        if (len(in_progress) < options.concurrency and world.random.random() < 0.5) or not scheduler.step():
            workload.step()
        report_errors(world)


def report_errors(world: World) -> None:
    for process in world.processes:
        for actor in process.actors:
            if actor.error is not None:
                error = actor.error
                world.promises.violate(0, f"{actor.name} raised {type(error).__name__}: {error}")
                actor.error = None
        process.actors = [actor for actor in process.actors if not actor.done]


def restart(world: World, killed: Process, options: Options) -> None:
    """Start a process in place of a killed one, as the supervisor does, and take over the claims of the killed one."""
    if killed.host.gone:
        return
    process = world.start_process(killed.host, killed.name.split(".")[1].rstrip("0123456789"))
    world.scheduler.record("restarted", killed.name, process.name)
    if options.takeover:
        world.enter_host(killed.host)
        sweeps.release_instance(killed.name, now=database_time.now())


def quiesce(world: World, workload: Workload) -> None:
    """End all faults, let every operation end, and run the sweeps until they change nothing more."""
    scheduler = world.scheduler
    scheduler.record("quiesce")
    world.faults.enabled = False
    workload.outages.end()
    Pool.objects.update(draining=False)
    finish_actors(world)
    drain_queue(world, workload)
    workload.queued_runs.recover(
        lambda: finish_actors(world), lambda: sweep_all(world, RECOVERY_SWEEPS, minutes=RECOVERY_INTERVAL_MINUTES)
    )
    use_leases(world, workload)
    sweep_until_unchanged(world)


def is_busy(world: World) -> bool:
    """Return whether an operation is in progress."""
    return any(not actor.killed for actor in world.scheduler.actors)


def finish_actors(world: World) -> None:
    """Let the operations in progress end. The sweep `stalled` goes on."""
    scheduler = world.scheduler
    limit = scheduler.seconds + MAX_SECONDS_TO_FINISH
    while is_busy(world) and scheduler.seconds < limit:
        until = scheduler.seconds + RECOVERY_INTERVAL_MINUTES * 60
        while is_busy(world) and scheduler.step(until):
            report_errors(world)
        if is_busy(world):  # some wait for what a sweep does, such as the recorder of a command whose end is not recorded
            sweep_all(world, ("stalled",), minutes=1)
    for actor in scheduler.actors:
        if not actor.killed:
            world.promises.violate(11, f"{actor.name} does not end")


def drain_queue(world: World, workload: Workload) -> None:
    for _ in range(20):
        scheduler = world.scheduler
        scheduler.run_until(scheduler.seconds + 601)
        if not OrmQ.objects.exists():
            return
        for _ in range(OrmQ.objects.count()):
            workload.start_task()
        scheduler.run_until(scheduler.seconds + 60)
        report_errors(world)


def use_leases(world: World, workload: Workload) -> None:
    """Use every active lease once more: its files must be there. Then sweep, and use it again after a sleep."""
    for _ in range(2):
        sweep_all(world, RECOVERY_SWEEPS, minutes=16)
        workload.read_answers()
        for seat in workload.seats:
            if seat.lease and Lease.objects.filter(pk=seat.lease, status=LeaseStatus.ACTIVE).exists():
                for host in world.hosts_in_service:  # only one of them reaches the sandbox
                    workload.exec_in(seat, host)
                    finish_actors(world)
    workload.http.check_answered()


def sweep_all(world: World, names: Sequence[str], *, minutes: float) -> None:
    world.scheduler.run_until(world.scheduler.seconds + minutes * 60)
    for host in world.hosts_in_service:
        world.enter_host(host)
        for name in names:
            result = schedules.run_sweep(name, now=world.scheduler.time)
            if "still running" in result.counts:  # no actor is left that could run it
                world.promises.violate(11, f"{host.name} does not begin the sweep {name}: it counts as still running")


def sweep_until_unchanged(world: World) -> None:
    """Run the sweeps for some hours. An operator retries the sandboxes in quarantine."""
    before: object = None
    sweep_all(world, ("meter", "budgets"), minutes=1)
    for number in range(SWEEP_ROUNDS):
        for pk in Sandbox.objects.filter(quarantined_at__isnull=False, state="destroying").values_list("pk", flat=True):
            destruction.retry_destroy(pk, now=world.scheduler.time)
        sweep_all(world, RECOVERY_SWEEPS, minutes=11 + 30 * number)
        after = sorted(Sandbox.objects.values_list("pk", "state", "incarnation"))
        if before == after and number > 1:
            break
        before = after
    sweep_all(world, ("prune", "meter"), minutes=120)
