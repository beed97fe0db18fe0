"""Sweeps and their schedule: one table, the function that the queue calls, and the queue's Schedule rows."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import product
from typing import Any

from django.conf import settings
from django_q.conf import Conf
from django_q.models import OrmQ, Schedule
from django_q.tasks import async_task

from billing import costs, derivation, token_records
from billing.models import CostRecord
from controlplane import dry_run
from leases import budget_enforcement
from leases import sweeps as leases
from leases.atproto.records import create_due_records
from leases.coding.pull_requests import poll_pull_requests
from leases.retention import sweep as retention
from leases.tasks import RESUME_FUNCTION, RESUME_INTERVAL
from sandboxes.db import database_time
from sandboxes.db.clock import clock_from
from sandboxes.egress.logs import collection
from sandboxes.hosts import registry
from sandboxes.models import Host
from sandboxes.pool import lifetimes
from sandboxes.queue_threads import DETACHED, MAX_THREADS_PER_NAME, StillRunning, run_in_work_thread
from sandboxes.state import pruning, run_outputs
from sandboxes.sweep_log import SweepResult, run_recorded
from sandboxes.sweeps import agent_restarts, end_watch, installation, measurements, passes, seal_checks
from sandboxes.sweeps.heartbeat import record_heartbeats
from sandboxes.webhooks import delivery

TASK_PREFIX = f"{__name__}."  # Schedule rows of other functions are left alone
SCHEDULED_FUNCTION = f"{TASK_PREFIX}run"
HEARTBEAT = "heartbeat"
END_WATCH_WAIT = timedelta(seconds=1)  # a pass of the watch occupies no worker of the queue
CLOCK_MARGIN = timedelta(minutes=1)  # later times are those of a clock that was ahead
MAX_LISTED_FAILURES = 20  # of one kind in one pass; the log has all


@dataclass(frozen=True)
class ScheduledSweep:
    """One line of the schedule. `sweep` takes the current time as the keyword argument `now`."""

    minutes: int
    purpose: str
    sweep: Callable[..., SweepResult]
    task_wait: timedelta | None = None  # for which a task of the queue waits for the pass; None: the queue's default

    @property
    def interval(self) -> timedelta:
        return timedelta(minutes=self.minutes)


def do_nothing(*, now: datetime) -> SweepResult:
    """Do nothing. The recorded run is the heartbeat: it proves that the queue executes scheduled tasks."""
    return SweepResult()


def reconcile(*, now: datetime) -> SweepResult:
    return leases.reconcile(now=now, grace=settings.ORPHAN_GRACE)


def meter(*, now: datetime) -> SweepResult:
    """Derive usage records and cost records, and count both.

    Calls whose stated amounts are out of range, and cost records that were limited, are failures of their own; the others
    are metered and priced."""
    result = SweepResult()
    for call in token_records.find_refused_calls()[:MAX_LISTED_FAILURES]:
        result.failures.append(f"call {call.call_id}: cost or tokens out of range, metered as unpriced")
    newest = CostRecord.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    usage, changes = derivation.derive_usage_and_costs(now=now)
    for item, records in usage.items():
        result.note(f"records of {item}", records)
    for change, records in changes.items():
        result.note(f"costs {change}", records)
    for record in costs.find_limited_records(after=newest)[:MAX_LISTED_FAILURES]:
        result.failures.append(f"cost record {record.pk} ({record}): limited to {record.usd.normalize():f} USD")
    return result


# In the order of a full round (`manage.py sweep`): each sweep finds the work left by the sweep before.
# fmt: off
SCHEDULE: dict[str, ScheduledSweep] = {
    HEARTBEAT:   ScheduledSweep(1,  "record that the queue executes scheduled tasks",       do_nothing),
    "hosts":     ScheduledSweep(1,  "record that this host's engine responds",              record_heartbeats),
    "seal":      ScheduledSweep(5,  "check daily that sandboxes are sealed",                seal_checks.check_seals),
    "mark":      ScheduledSweep(1,  "mark store and state directory as this installation's", installation.mark_places),
    "expire":    ScheduledSweep(1,  "end leases whose ttl or max_ttl has elapsed",          leases.expire_due_leases),
    "stalled":   ScheduledSweep(1,  "recover overdue sandboxes, runs, turns, model calls",  leases.recover_stalled),
    "reclaim":   ScheduledSweep(1,  "destroy the sandboxes of ended leases",                leases.reclaim),
    "persist":   ScheduledSweep(1,  "store /data changes that only a sandbox has",          pruning.persist_unsaved),
    "idle":      ScheduledSweep(1,  "put idle sandboxes to sleep",                          passes.evict_idle),
    "suspend":   ScheduledSweep(1,  "suspend waiting sandboxes",                            passes.suspend_waiting),
    "lifetime":  ScheduledSweep(1,  "put sandboxes to sleep before their vendor ends them", lifetimes.end_lifetimes),
    "watch":     ScheduledSweep(1,  "react at once if a cluster ends a sandbox",    end_watch.watch_ends, END_WATCH_WAIT),
    "intervals": ScheduledSweep(1,  "raise the vendors' intervals that leases outlive",     leases.raise_intervals),
    "restart":   ScheduledSweep(1,  "restart sandboxes whose agent does not respond",      agent_restarts.restart_unresponsive),
    "cold":      ScheduledSweep(5,  "destroy cold sandboxes past their TTL, old snapshots", leases.destroy_cold),
    "warm":      ScheduledSweep(1,  "start sandboxes up to each pool's warm target",        passes.warm_pools),
    "reconcile": ScheduledSweep(5,  "find orphaned and lost sandboxes at the providers",    reconcile),
    "recount":   ScheduledSweep(5,  "recompute pool and quota counters, report drift",      passes.recount),
    "measure":   ScheduledSweep(10, "measure workspaces, warn leases over their limit",     leases.measure_workspaces),
    "weigh":     ScheduledSweep(60, "measure the size of mounted /data",                    pruning.measure_mounted),
    "read":      ScheduledSweep(5,  "record CPU and memory readings of sandboxes",          measurements.record_readings),
    "prune":     ScheduledSweep(60, "delete unreferenced and expired objects in the store", leases.prune),
    "outputs":   ScheduledSweep(10, "move large outputs of ended runs to the store",        run_outputs.move_large_outputs),
    "retention": ScheduledSweep(5,  "delete rows past their retention",                     retention.delete_expired),
    "collect":   ScheduledSweep(1,  "ingest egress logs, price model calls",                collection.collect_call_logs),
    "meter":     ScheduledSweep(1,  "derive usage records and cost records",                meter),
    "budgets":   ScheduledSweep(1,  "total budget spending, end leases over budget",        budget_enforcement.enforce_budgets),
    "pull_requests": ScheduledSweep(1, "open and poll pull requests of coding tasks",       poll_pull_requests, DETACHED),
    "records":   ScheduledSweep(1,  "create due AT Protocol records",                       create_due_records, DETACHED),
    "webhooks":  ScheduledSweep(1,  "deliver due webhook events",                           delivery.deliver_due, DETACHED),
}
# fmt: on
# Sweeps that destroy, suspend, restart, delete, end leases or notify: counted in observe mode.
DESTRUCTIVE_SWEEPS = frozenset(
    [
        "expire",
        "stalled",
        "reclaim",
        "idle",
        "suspend",
        "lifetime",
        "watch",
        "restart",
        "cold",
        "warm",
        "reconcile",
        "prune",
        "outputs",
        "retention",
        "budgets",
        "pull_requests",
        "records",
        "webhooks",
    ]
)
# Refused while the installation does not match: these and the sweeps that change sandboxes, vendors' settings or the store
# otherwise. In observe mode the latter run.
REFUSED_SWEEPS = DESTRUCTIVE_SWEEPS | {"persist", "intervals", "measure"}
# Sweeps that concern an engine, its sandboxes or the directories of a machine: each host's worker runs them for its host. The
# others concern the whole installation and run once, on any host.
HOST_SWEEPS = frozenset(
    {
        HEARTBEAT, "hosts", "seal",
        "mark", "stalled", "reclaim", "persist", "idle", "suspend", "lifetime", "watch", "intervals",
        "restart",
        "cold", "warm", "reconcile", "measure", "read", "prune", "collect", "budgets",
    }
)  # fmt: skip
# Run by `manage.py sweep`. A pass of the watch lasts until the next one, and makes other sweeps faster only.
SWEEP_NAMES = [name for name in SCHEDULE if name not in (HEARTBEAT, "watch")]


def run(name: str) -> str:
    """Run one sweep now and return its summary. Every Schedule row names this function.

    A pass that takes longer than a task goes on in a thread of the worker. The next pass may begin meanwhile if the sweep is a
    host's own."""
    try:
        return run_in_work_thread(
            name, lambda: str(run_sweep(name, now=database_time.now())), wait=SCHEDULE[name].task_wait,
            max_threads=MAX_THREADS_PER_NAME if name in HOST_SWEEPS else 1,
        )  # fmt: skip
    except StillRunning as running:
        return str(running)


def run_sweep(name: str, *, now: datetime) -> SweepResult:
    """Run one pass of a sweep and record its outcome in its Sweep row, which health and metrics read."""
    scheduled = SCHEDULE[name]
    clock = clock_from(now)  # the sweep begins after checks that may wait for the database or the store

    def run_pass() -> SweepResult:
        if name not in REFUSED_SWEEPS:
            return scheduled.sweep(now=clock())
        if settings.OBSERVE and name in DESTRUCTIVE_SWEEPS:
            return dry_run.count_actions(name, now=clock())
        return installation.run_if_matching(lambda: scheduled.sweep(now=clock()))

    host = registry.find_worker_host(now=now)
    return run_recorded(
        name, run_pass, now=now, every=scheduled.interval, host=host if name in HOST_SWEEPS else None, started_by=host
    )


def get_interval(name: str) -> timedelta:
    return SCHEDULE[name].interval


def sync_schedules(*, now: datetime) -> dict[str, int]:
    """Make the queue's Schedule rows equal to SCHEDULE, a set for each host. Return how many were created, changed and removed.

    A row is identified by its function, its name, which is the name of its sweep, and its cluster, which is the queue of a
    host's worker: only this worker executes it. Other rows of functions in this module are removed, including those of earlier
    versions and of lost hosts. Rows of functions outside this module are left alone. Tasks that an earlier version queued for
    any worker are moved to this host's. Idempotent.
    Rows come from code only: one row whose arguments cannot be parsed stops every schedule of the queue.
    Each statement changes one row: workers lock their rows in an order of their own, and hosts start at the same time."""
    counts = {"created": 0, "changed": 0, "removed": 0}
    own_queue = registry.get_queue_name()
    lost = set(Host.objects.filter(lost_at__isnull=False).values_list("queue", flat=True)) - {own_queue}
    queues = {own_queue, *Host.objects.exclude(queue="").values_list("queue", flat=True)} - lost
    OrmQ.objects.filter(key=settings.Q_CLUSTER["name"]).update(key=own_queue)
    expected = {(queue, name): _build_schedule(queue, name) for queue, name in product(sorted(queues), SCHEDULE)}
    found: dict[tuple[str, str], Schedule] = {}
    for row in Schedule.objects.filter(func__startswith=TASK_PREFIX).order_by("pk"):
        key = str(row.cluster), str(row.name)
        if row.func != SCHEDULED_FUNCTION or key not in expected or key in found:
            counts["removed"] += Schedule.objects.filter(pk=row.pk).delete()[0]
        else:
            found[key] = row
    for key, values in expected.items():
        existing = found.get(key)
        if existing is None:
            Schedule.objects.create(next_run=now, **values)
            counts["created"] += 1
        elif existing.next_run > now + get_interval(key[1]) or any(getattr(existing, each) != values[each] for each in values):
            counts["changed"] += Schedule.objects.filter(pk=existing.pk).update(next_run=now, **values)
    return counts


def _build_schedule(queue: str, name: str) -> dict[str, Any]:
    """Return the values of the row that schedules a sweep for a queue."""
    return {
        "func": SCHEDULED_FUNCTION, "name": name, "args": repr(name), "schedule_type": Schedule.MINUTES,
        "minutes": SCHEDULE[name].minutes, "repeats": -1, "kwargs": None, "hook": None, "cron": None, "cluster": queue,
        "intended_date_kwarg": None,
    }  # fmt: skip


def forget_future(queue: str, *, now: datetime) -> int:
    """Make sweeps and tasks of this queue due that wait for a time which only a clock that was ahead can have set.

    That is the database's clock, or a host's in an earlier version. Without this, all sweeps would pause for an hour after the
    correction of a clock that was an hour ahead. Return the number of rows."""
    changed = 0
    waiting = Schedule.objects.filter(func__in=[SCHEDULED_FUNCTION, RESUME_FUNCTION], cluster=queue, next_run__gt=now)
    for row in waiting.only("func", "name", "next_run"):
        longest = RESUME_INTERVAL if row.func == RESUME_FUNCTION else get_interval(row.name) if row.name in SCHEDULE else None
        if longest is not None and row.next_run > now + longest + CLOCK_MARGIN:
            changed += Schedule.objects.filter(pk=row.pk, next_run=row.next_run).update(next_run=now)
    longest_lock = now + timedelta(seconds=Conf.RETRY) + CLOCK_MARGIN
    return changed + OrmQ.objects.filter(key=queue, lock__gt=longest_lock).update(lock=now)


def postpone_queued_sweeps(queue: str, *, now: datetime) -> int:
    """Postpone the next pass of each due sweep of which a pass still waits in this queue. Return how many.

    The queue of a worker that is slower than its schedule therefore never has more than one pass of each sweep. Other tasks do
    not count. Each statement changes one row, as in sync_schedules."""
    waiting = OrmQ.objects.filter(key=queue, lock__lte=now)  # those that a worker has fetched are locked until later
    names = {task["args"][0] for task in (row.task for row in waiting.iterator()) if task.get("func") == SCHEDULED_FUNCTION}
    due = Schedule.objects.filter(func=SCHEDULED_FUNCTION, cluster=queue, next_run__lte=now)
    return sum(due.filter(name=name).update(next_run=now + get_interval(name)) for name in sorted(names & SCHEDULE.keys()))


def enqueue_all_sweeps() -> None:
    """Queue one pass of every sweep. Without this the first scheduled pass starts up to 30 seconds after the queue."""
    for name in SCHEDULE:
        async_task(SCHEDULED_FUNCTION, name, group=name, cluster=registry.get_queue_name())
