"""manage.py sweep: order, output, exit code, dry run and loop."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane import schedules
from controlplane.management.commands import sweep as command
from leases import execution, leasing
from leases.models import Lease
from sandboxes.models import Pool, Run, Sandbox, Sweep
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from tests.commands.manage import call
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db
NAMES = [
    "hosts", "seal", "mark", "expire", "stalled", "reclaim", "persist", "idle", "suspend", "lifetime", "intervals", "restart",
    "cold", "warm", "reconcile",
    "recount", "measure", "weigh", "read", "prune", "outputs", "retention", "collect", "meter", "budgets", "pull_requests",
    "records", "webhooks",
]  # fmt: skip


def list_results(**results: str) -> list[str]:
    """Return the printed lines of all sweeps. Those without a result have nothing to do."""
    results = {"hosts": "1 hosts seen", "mark": "1 marked"} | results
    return [f"{name}: {results.get(name, 'nothing to do')}" for name in NAMES]


@pytest.fixture(autouse=True)
def only_memory(pool: Pool) -> None:
    """Make every pool use the memory provider, so that no sweep queries a real one."""
    Pool.objects.exclude(pk=pool.pk).update(provider="memory")


@pytest.fixture
def used(grant: Callable[..., Lease]) -> Lease:
    """A new lease whose sandbox has run a command."""
    lease = grant(now=timezone.now())
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=timezone.now())
    return lease


METERED = "some records of time, some costs written"  # the numbers depend on the time of day


def sweep(*args: str) -> list[str]:
    pattern = r"[0-9]+ records of time(, [0-9]+ records of [a-z]+)*, [0-9]+ costs written"
    return re.sub(pattern, METERED, call("sweep", *args)).splitlines()


def expire(lease: Lease) -> None:
    """Set the end of a lease into the past."""
    past = timezone.now() - MINUTE
    Lease.objects.filter(pk=lease.pk).update(expires_at=past, expires_minute=leasing.to_epoch_minute(past))


def test_every_sweep_runs_once_in_order_and_prints_one_line(used: Lease) -> None:
    expire(used)
    assert sweep() == list_results(
        expire="1 expired", reclaim="1 destroyed, 1 leases closed", cold="1 local copies removed", meter=METERED
    )
    assert sweep() == list_results()
    assert set(Sweep.objects.values_list("name", flat=True)) == set(NAMES)


def test_selected_sweeps_run_in_the_order_of_the_table_and_an_unknown_one_is_refused() -> None:
    assert sweep("reclaim", "expire") == ["expire: nothing to do", "reclaim: nothing to do"]
    with pytest.raises(
        CommandError, match=r"Unknown sweep: nap\. Known: hosts, seal, mark, expire, stalled, reclaim, persist, idle"
    ):
        sweep("nap")


def test_failed_sweeps_fail_the_command_after_the_others_have_run(used: Lease, memory: MemoryProvider) -> None:
    leasing.release(used.pk, now=timezone.now())
    memory.fail("destroy", Unavailable("engine down"))
    memory.fail("list", Unavailable("engine down"))
    out = StringIO()
    with pytest.raises(CommandError, match="failed: reclaim, reconcile"):
        call_command("sweep", stdout=out, stderr=StringIO())
    assert out.getvalue().splitlines()[5:7] == ["reclaim: 1 failed", "persist: nothing to do"]


def test_dry_run_lists_the_work_of_the_sweeps_and_changes_nothing(
    grant: Callable[..., Lease], used: Lease, pool: Pool, memory: MemoryProvider
) -> None:
    ended = grant(environment="game-2", now=timezone.now())
    execution.exec_command(ended.pk, Command(argv=["true"], timeout=MINUTE), now=timezone.now())
    leasing.release(ended.pk, now=timezone.now())
    expire(used)
    run = Run.objects.latest("started_at")
    Run.objects.filter(pk=run.pk).update(
        outcome="open", ended_at=None, started_at=timezone.now() - MINUTE, deadline_at=timezone.now() - MINUTE / 2
    )
    memory.create(SandboxSpec(name="leasehold-orphan-1", owner=str(pool.owner)))
    memory._sandboxes["leasehold-orphan-1"].created_at = timezone.now() - timedelta(hours=1)
    destroying = Sandbox.objects.get(holder=ended.pk)
    expected = [
        *(f"{name}: nothing to do" for name in ("hosts", "seal", "mark")),
        f"expire: would end lease {used.pk}",
        f"stalled: would close run {run.pk}",
        f"reclaim: would destroy sandbox {destroying.pk}",
        *(f"{name}: nothing to do" for name in ("persist", "idle", "suspend", "lifetime")),
        *(f"{name}: nothing to do" for name in ("intervals", "restart", "cold", "warm")),
        "reconcile: would destroy orphan leasehold-orphan-1",
        *[f"recount: would recount pool {pk}" for pk in Pool.objects.order_by("pk").values_list("pk", flat=True)],
        f"measure: would measure workspace of sandbox {Sandbox.objects.get(holder=used.pk).pk}",
        "weigh: nothing to do",
        f"read: would read sandbox {Sandbox.objects.get(holder=used.pk).pk}",
        *(f"{name}: nothing to do" for name in ("prune", "outputs", "retention", "collect")),
        *[f"meter: would meter sandbox {pk}" for pk in Sandbox.objects.order_by("pk").values_list("pk", flat=True)],
        *(f"{name}: nothing to do" for name in ("budgets", "pull_requests", "records", "webhooks")),
    ]
    assert sweep("--dry-run") == expected
    assert sweep("--dry-run") == expected
    assert sweep() == list_results(
        expire="1 expired", stalled="1 runs closed", reclaim="2 destroyed, 2 leases closed",
        cold="2 local copies removed", reconcile="1 orphans destroyed", meter=METERED,
    )  # fmt: skip


@pytest.fixture
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_loop_continues_after_a_failure_and_ends_on_a_signal(
    number: signal.Signals, signals_restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[str] = []

    def failing(name: str, **options: object) -> None:
        rounds.append(name)
        if len(rounds) == 2:
            os.kill(os.getpid(), number)
        raise RuntimeError("the database is down")

    monkeypatch.setattr(schedules, "run_sweep", failing)
    monkeypatch.setattr(command.connections, "close_all", lambda: None)
    monkeypatch.setattr(command, "TICK_SECONDS", 0.01)
    call_command("sweep", "expire", "--loop", "--every", "1", stdout=StringIO(), stderr=StringIO())
    assert rounds == ["expire"] * 2
