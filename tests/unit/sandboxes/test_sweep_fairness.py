"""Progress of sweeps: no row and no engine delays the others in every pass."""

from collections.abc import Callable
from datetime import datetime, timedelta
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from django.db.models import Q

from leases import execution
from leases.models import Lease
from sandboxes import eviction, process_ends, process_restarts, processes
from sandboxes.db import clock
from sandboxes.engine_turns import MAX_FAILURES, EngineTurns, alternate
from sandboxes.hosts import registry
from sandboxes.models import Host, Process, Run, Sandbox, SandboxState
from sandboxes.pool import lifetimes
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import abandoned
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db
Grant = Callable[..., Lease]
A, B = ("a", UUID(int=1)), ("b", UUID(int=2))


def abandon_run(lease: Lease) -> Run:
    """Return an open Run of a lease whose process is dead."""
    execution.exec_command(lease.pk, Command(["true"], MINUTE), now=NOW)
    run = Run.objects.get(holder=lease.pk)
    Run.objects.filter(pk=run.pk).update(ended_at=None, outcome="open", exit_code=None, released=True)
    Sandbox.objects.filter(holder=lease.pk).update(state="running", open_runs=1, idle_at=None)
    return run


def test_rows_of_an_engine_that_is_slow_do_not_delay_those_of_another() -> None:
    elapsed = [timedelta(0)]
    rows = [(A, f"a{number}") for number in range(9)] + [(B, f"b{number}") for number in range(9)]
    taken = []
    for row in EngineTurns(rows, clock=lambda: NOW + elapsed[0], until=NOW + MINUTE):
        taken.append(row)
        elapsed[0] += timedelta(seconds=40 if row.startswith("a") else 1)
    assert [row for row in taken if row.startswith("b")] == [f"b{number}" for number in range(9)]
    assert taken.count("a0") + taken.count("a1") == 2


def test_engine_that_fails_repeatedly_is_left_to_the_next_pass() -> None:
    taken, turns = [], EngineTurns([(A, number) for number in range(9)], clock=lambda: NOW, until=NOW)
    for row in turns:
        taken.append(row)
        if row != 1:
            turns.note_failure()
    assert taken == [*range(2 + MAX_FAILURES)]


def test_rows_of_several_kinds_alternate() -> None:
    assert alternate([(A, 1), (A, 2), (A, 3)], [], [(B, 4)]) == [(A, 1), (B, 4), (A, 2), (A, 3)]


def test_runs_that_cannot_be_closed_are_tried_with_a_backoff_and_after_the_others(grant: Grant, memory: MemoryProvider) -> None:
    failing = [abandon_run(grant(f"did:plc:{number}")) for number in range(MAX_FAILURES)]
    Run.objects.update(deadline_at=NOW + timedelta(seconds=1))
    with memory.fail("find_exec", Unavailable("no answer")):
        now, tries = NOW + MINUTE, 0
        while now < NOW + timedelta(hours=10):
            tries += len(passes.recover_stalled(now=now).failures)
            now += MINUTE
    assert 3 * MAX_FAILURES < tries < 30 * MAX_FAILURES
    healthy = abandon_run(grant("did:plc:healthy"))

    def fail_others(ref: str) -> None:
        if ref != Sandbox.objects.get(holder=healthy.holder).ref:
            raise Unavailable("no answer")

    memory.before("find_exec", fail_others)
    Run.objects.filter(ended_at=None).exclude(pk=healthy.pk).update(retry_at=now - MINUTE)
    assert passes.recover_stalled(now=now).counts == {"runs closed": 1}
    assert not Run.objects.filter(pk__in=[run.pk for run in failing], ended_at__isnull=False).exists()


def test_run_whose_command_goes_on_is_looked_at_after_the_others(
    grant: Grant, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = abandon_run(grant("did:plc:a")), abandon_run(grant("did:plc:b"))
    Run.objects.filter(pk=first.pk).update(deadline_at=NOW + timedelta(hours=1))
    Run.objects.filter(pk=second.pk).update(deadline_at=NOW + timedelta(hours=2))
    seen: list[UUID] = []

    def look(run: Run, *, now: datetime) -> str:
        seen.append(run.pk)
        return "runs continued"

    monkeypatch.setattr(abandoned, "close_abandoned_run", look)
    for minutes in range(1, 5):
        passes.recover_stalled(now=NOW + minutes * MINUTE, limit=1)
    assert seen == [first.pk, second.pk, first.pk, second.pk]


def test_error_in_one_row_does_not_end_the_pass(grant: Grant, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = abandon_run(grant("did:plc:a")), abandon_run(grant("did:plc:b"))
    close = abandoned.close_abandoned_run

    def fail_first(run: Run, *, now: datetime) -> str:
        if run.pk == first.pk:
            raise ValueError("a bug")
        return close(run, now=now)

    monkeypatch.setattr(abandoned, "close_abandoned_run", fail_first)
    result = passes.recover_stalled(now=NOW + MINUTE)
    assert (result.counts, result.failures) == ({"runs closed": 1}, [f"run {first.pk}: a bug"])
    second.refresh_from_db()
    assert second.ended_at


def test_stalled_runs_do_not_delay_stalled_evictions(grant: Grant, memory: MemoryProvider) -> None:
    """Of one engine, whose commands are not found and whose sandboxes can be destroyed."""
    for number in range(MAX_FAILURES):
        abandon_run(grant(f"did:plc:{number}"))
    sandbox = execution.ensure_sandbox_ready(grant("did:plc:evicted").pk, now=NOW)
    Sandbox.objects.filter(pk=sandbox.pk).update(
        state=SandboxState.EVICTING, claim=uuid4(), deadline_at=NOW, tries=1, idle_at=None
    )
    with memory.fail("find_exec", Unavailable("no answer")):
        assert passes.recover_stalled(now=NOW + MINUTE).counts == {"evictions finished": 1}


def test_processes_beyond_the_limit_of_a_pass_are_listed_by_the_next_one(grant: Grant, memory: MemoryProvider) -> None:
    for number in range(3):
        with execution.use_lease(grant(f"did:plc:{number}").pk, now=NOW) as request:
            processes.start_process(request, ProcessSpec(["sleep", "30"]), now=NOW)
    for row in Process.objects.select_related("sandbox"):
        memory.kill(row.sandbox.ref, row.current_mark)
    Process.objects.update(ended_at=None)
    unanswered = Process.objects.order_by("sandbox")[0].sandbox.ref

    def fail_one(ref: str) -> None:
        if ref == unanswered:
            raise Unavailable("no answer")

    memory.before("processes", fail_one)
    ended = sum(process_ends.close_ended(now=NOW + n * MINUTE, limit=1).counts.get("processes ended", 0) for n in range(1, 5))
    assert ended == 2


def test_evictions_at_a_slow_engine_do_not_delay_those_at_another(
    grant: Grant, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    elapsed, seen = [0.0], list[str]()
    for name in ("slow-1", "slow-2", "slow-3", "fast"):
        execution.exec_command(grant(name).pk, Command(["true"], MINUTE), now=NOW)
    Sandbox.objects.exclude(agent_did="fast").update(idle_at=NOW)
    host = Host.objects.create(id=uuid4(), provider="memory", name="b", engine_id="b", queue="b", created_at=NOW)
    Sandbox.objects.filter(agent_did="fast").update(idle_at=NOW + MINUTE, host=host)

    def evict(pk: UUID, token: UUID, **options: object) -> bool:
        seen.append(Sandbox.objects.get(pk=pk).agent_did)
        elapsed[0] += 40.0 if seen[-1].startswith("slow") else 1.0
        return True

    monkeypatch.setattr(registry, "filter_local", lambda prefix="": Q())
    monkeypatch.setattr(eviction, "finish_eviction", evict)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: elapsed[0]))
    assert passes.evict_idle(now=NOW + 2 * MINUTE, batch_size=1).counts == {"put to sleep": len(seen)}
    assert "fast" in seen and len(seen) == 3


@pytest.fixture
def slow_and_fast(grant: Grant, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> Callable[[UUID], None]:
    """Three sandboxes of an engine that fails after 40 s, and one of another engine. Return the call of their engines."""
    elapsed = [0.0]
    for name in ("slow-1", "slow-2", "slow-3", "fast"):
        execution.exec_command(grant(name).pk, Command(["true"], MINUTE), now=NOW)
    host = Host.objects.create(id=uuid4(), provider="memory", name="b", engine_id="b", queue="b", created_at=NOW)
    Sandbox.objects.filter(agent_did="fast").update(host=host)
    monkeypatch.setattr(registry, "filter_local", lambda prefix="": Q())
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: elapsed[0]))

    def call(pk: UUID) -> None:
        if Sandbox.objects.get(pk=pk).agent_did != "fast":
            elapsed[0] += 40
            raise Unavailable("no answer")

    return call


def test_restarts_of_processes_at_a_slow_engine_do_not_delay_those_at_another(
    slow_and_fast: Callable[[UUID], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, sandbox in enumerate(Sandbox.objects.order_by("-agent_did")):
        Process.objects.create(
            sandbox=sandbox, holder=sandbox.holder, incarnation=sandbox.incarnation, argv=["sh"], cwd="/", started_at=NOW,
            starts_by=NOW, state="exited", ended_at=NOW, agent_did=sandbox.agent_did, restart_at=NOW + number * MINUTE / 60,
        )  # fmt: skip

    def restart(process: Process, *, now: datetime) -> bool:
        slow_and_fast(process.sandbox_id)
        return True

    monkeypatch.setattr(process_restarts, "restart", restart)
    assert process_restarts.restart_due(now=NOW + MINUTE).counts == {"processes restarted": 1}


def test_ends_of_lifetimes_at_a_slow_vendor_do_not_delay_those_at_another(
    slow_and_fast: Callable[[UUID], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, sandbox in enumerate(Sandbox.objects.order_by("-agent_did")):
        Sandbox.objects.filter(pk=sandbox.pk).update(lifetime_ends_at=NOW + number * MINUTE / 60)

    def put_to_sleep(sandbox: Sandbox, *, now: datetime, actor: str) -> bool:
        slow_and_fast(sandbox.pk)
        return True

    monkeypatch.setattr(lifetimes, "put_to_sleep", put_to_sleep)
    assert lifetimes.end_lifetimes(now=NOW + MINUTE).counts == {"put to sleep": 1}
