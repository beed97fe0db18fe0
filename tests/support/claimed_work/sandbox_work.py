"""Work on sandboxes, their engines and their processes."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType
from sandboxes import eviction, process_ends, process_restarts, processes, restarts
from sandboxes.hosts import registry
from sandboxes.models import (
    Attachment,
    Host,
    Process,
    RestartPolicy,
    Sandbox,
)
from sandboxes.pool import allocation, intervals
from sandboxes.processes import ProcessSpec
from sandboxes.providers.base import VendorIntervals
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import end_watch, passes
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.claimed_work import IDLE, Context, Work, crash
from tests.support.leases import get_sandbox, read, run, update_pool

HOUR = timedelta(hours=1)


def begin_start(context: Context) -> Work:
    return Work(partial(run, context.grant(environment="e")), Sandbox, "deadline_at")


def begin_probe(context: Context) -> Work:
    """The start that a circuit breaker lets through after its pause."""
    lease = context.grant(environment="e")
    registry.get_local_host("memory", now=NOW)
    Host.objects.update(start_failures=3, start_pauses=1, starts_paused_until=IDLE - MINUTE)
    return Work(partial(run, lease), Host, "starts_paused_until", lambda: Host.objects.get().start_failures == 0)


def begin_prewarmed_start(context: Context) -> Work:
    update_pool(context.pool, warm_target=1)
    return Work(
        partial(allocation.start_warm, context.pool), Sandbox, "deadline_at", Sandbox.objects.filter(state="warm").exists
    )


def begin_wake(context: Context) -> Work:
    return Work(partial(read, context.sleep()), Sandbox, "deadline_at")


def begin_sleep(context: Context) -> Work:
    return Work(partial(eviction.evict, get_sandbox(context.write()).pk), Sandbox, "deadline_at")


def begin_idle_sweep(context: Context) -> Work:
    context.write()
    return Work(passes.evict_idle, Sandbox, "deadline_at", Sandbox.objects.filter(state="cold").exists)


def begin_overdue_eviction(context: Context) -> Work:
    sandbox = get_sandbox(context.write())
    with suppress(SimulatedCrash), context.memory.before("destroy", crash):
        eviction.evict(sandbox.pk, now=NOW)
    Sandbox.objects.update(deadline_at=IDLE - MINUTE)
    return Work(passes.recover_stalled, Sandbox, "deadline_at", Sandbox.objects.filter(state="cold").exists)


def begin_suspension(context: Context) -> Work:
    EnvironmentType.objects.update(suspend_after=MINUTE)
    context.write()
    return Work(passes.suspend_waiting, Sandbox, "deadline_at", Sandbox.objects.filter(state="suspended").exists)


def begin_restart(context: Context) -> Work:
    lease = context.write()
    # The sweep that finds the interrupted restart puts the sandbox to sleep, which ends the processes, too.
    return Work(partial(restarts.restart_held, lease.pk), Sandbox, "deadline_at", Sandbox.objects.filter(state="cold").exists)


def begin_destroy(context: Context) -> Work:
    leasing.release(context.write().pk, now=NOW)
    return Work(sweeps.reclaim, Sandbox, "deadline_at", Sandbox.objects.filter(state="destroyed").exists)


def begin_pull(context: Context) -> Work:
    run(context.grant(environment="first"), "sh", "-c", "echo shared >/data/f")
    return Work(partial(run, context.grant(environment="second"), "cat", "/data/f"), Attachment, "pull_until")


def begin_intervals(context: Context) -> Work:
    sandbox = get_sandbox(context.write())
    for name in ("has_auto_stop", "has_auto_delete", "can_set_intervals"):
        context.patch.setattr(MemoryProvider, name, True)
    context.patch.setattr(MemoryProvider, "default_intervals", lambda self: VendorIntervals(auto_stop=HOUR, auto_delete=HOUR))
    row = Sandbox.objects.filter(pk=sandbox.pk)
    return Work(
        lambda now: intervals.raise_short(row.get(), now=now), Sandbox, "intervals_claimed_until",
        row.filter(vendor_auto_delete__isnull=False).exists,
    )  # fmt: skip


def begin_process_restart(context: Context) -> Work:
    """A process that has exited, and is due for a restart."""
    with execution.use_lease(context.write().pk, now=NOW) as request:
        process = processes.start_process(request, ProcessSpec(["sleep", "300000"], {}, restart=RestartPolicy.ALWAYS), now=NOW)
    context.memory.kill(process.sandbox.ref, process.current_mark)

    def look(*, now: datetime) -> None:
        process_ends.close_ended(now=now)
        process_restarts.restart_due(now=now)

    look(now=NOW)
    return Work(look, Process, "starts_by", Process.objects.filter(ended_at__isnull=True, restarts=2).exists)


def begin_watch(context: Context) -> Work:
    registry.get_local_host("memory", now=NOW)
    context.patch.setattr(MemoryProvider, "watches_ends", True)
    context.patch.setattr(MemoryProvider, "watch_ends", lambda self, timeout: (hint for hint in ()), raising=False)
    return Work(end_watch.watch_ends, Host, "watched_until")


WORK: dict[str, Callable[[Context], Work]] = {
    "start": begin_start,
    "probe": begin_probe,
    "prewarmed start": begin_prewarmed_start,
    "wake": begin_wake,
    "sleep": begin_sleep,
    "idle sweep": begin_idle_sweep,
    "overdue eviction": begin_overdue_eviction,
    "suspension": begin_suspension,
    "restart": begin_restart,
    "destroy": begin_destroy,
    "pull": begin_pull,
    "intervals": begin_intervals,
    "process restart": begin_process_restart,
    "watch": begin_watch,
}
