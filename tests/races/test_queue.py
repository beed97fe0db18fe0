"""Queue of runs: order, limits, interruption, and runners that die at each step or act too late."""

import json
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

from leases import api_keys, execution, leasing, sweeps
from leases.agent_runs.models import AgentRun
from leases.errors import TooManyQueuedRuns
from leases.models import AgentKey, Lease
from leases.queue import attempts, queue, sealing, statistics
from leases.queue.models import MAX_RUN_ATTEMPT, QueuedRun
from leases.queue.queue import Attempt, QueueOptions
from leases.queue.runner import Runner
from leases.retention.sweep import delete_expired
from sandboxes import claims
from sandboxes.db.connection_errors import RetriesExhausted
from sandboxes.db.sql import ALWAYS
from sandboxes.models import Event, Host, Pool, Run, Sandbox
from sandboxes.providers.errors import FailureCause, Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.memory.programs import ProgramCall, ProgramResult
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.leases import update_pool
from tests.support.outages import Weather, any_outage, injected
from tests.support.suites import without_vendors

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("queue: SKIP LOCKED and hand-written SQL")]
DAY = timedelta(days=1)
LATER = NOW + timedelta(hours=1)  # deadlines of runners, runs and operations have passed, no lease has
COMMAND = {"kind": "exec", "argv": ["echo", "hi"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}
ONE_SHOT = COMMAND | {"memory_mib": None, "environment_type": "run", "key_id": ""}


def enqueue(
    pool: Pool, lease: Lease | None = None, agent: str = "did:plc:ada", now: datetime = NOW, argv: list[str] | None = None,
    secrets: dict[str, Any] | None = None, request: dict[str, Any] | None = None, **options: Any,
) -> QueuedRun:  # fmt: skip
    command = request or (COMMAND if lease else ONE_SHOT | {"pool": pool.name})
    return queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did if lease else agent, lease=lease, pool=pool,
        request=command | ({"argv": argv} if argv else {}), secrets={"env": {}} | (secrets or {}),
        options=QueueOptions(**{"pending_timeout": DAY} | options), now=now,
    )  # fmt: skip


def work(now: datetime = NOW, runner: str = "r1") -> int:
    """Let a runner of this name look at the queue once. Return the number of attempts, which have ended.

    The runner executes each attempt in the thread of the test, whose connection alone sees the rows of the test."""
    process = Runner(1, now=lambda: now, start_thread=lambda name, act: act())
    process.name = runner
    return process.run_pending()


def work_until(end: datetime, *, begin: datetime = NOW, sweep: bool = True) -> int:
    """Let one runner look at the queue every 5 seconds, and sweep every minute. Return the number of attempts."""
    count, seconds = 0, 0
    while (at := begin + timedelta(seconds=seconds)) < end:
        if sweep and seconds % 60 == 0:
            sweeps.recover_stalled(now=at)
        count += work(at)
        seconds += 5
    return count


def count_executions(memory: MemoryProvider) -> int:
    return sum(method == "exec" for method, _ in memory.calls)


def reload(row: QueuedRun) -> QueuedRun:
    return QueuedRun.objects.get(pk=row.pk)


# --- results ------------------------------------------------------------------------------------------------------


def test_run_of_a_lease_ends_by_its_exit_code(lease: Lease, pool: Pool) -> None:
    ok, failed = enqueue(pool, lease), enqueue(pool, lease, argv=["missing"])
    assert work() == 2
    assert (reload(ok).state, reload(ok).exit_code, reload(ok).error) == ("completed", 0, None)
    failed = reload(failed)
    assert (failed.state, failed.exit_code, failed.error["code"], failed.attempt) == ("failed", 127, "failed", 1)
    assert bytes(Run.objects.get(pk=reload(ok).run_id).stdout) == b"hi\n"


def test_run_without_a_lease_gets_a_sandbox_that_is_destroyed(pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool)
    assert work() == 1
    row = reload(row)
    assert (row.state, Lease.objects.get(pk=row.run_id).status) == ("completed", "destroyed")
    assert not memory.list(str(pool.owner))


@pytest.fixture
def key() -> AgentKey:
    return api_keys.issue_key(["did:plc:ada"], now=NOW)[0]


def test_rate_limit_of_new_leases_delays_the_start(pool: Pool, memory: MemoryProvider, key: AgentKey, settings: Any) -> None:
    settings.CREATES_PER_MINUTE = 1
    request = ONE_SHOT | {"pool": pool.name, "key_id": str(key.pk)}
    first, second = enqueue(pool, request=request), enqueue(pool, request=request)
    assert work() == 2
    refused, started = sorted((reload(first), reload(second)), key=lambda row: row.state, reverse=True)
    assert (started.state, refused.state, count_executions(memory)) == ("completed", "queued", 1)
    assert (refused.error["code"], refused.error["retryable"]) == ("rate_limited", True)
    assert refused.available_at > NOW
    assert Lease.objects.count() == 1
    assert work() == 0
    assert work(NOW + 2 * MINUTE) == 1
    assert reload(refused).state == "completed"


@pytest.mark.parametrize(
    ("restriction", "message"),
    [
        ({"allowed_environment_types": ["catan"]}, "This API key may not use that environment type."),
        ({"allowed_pools": ["other"]}, "This API key may not use that pool."),
        ({"revoked_at": NOW}, "The API key that queued the run was revoked or has expired."),
        ({"expires_at": NOW}, "The API key that queued the run was revoked or has expired."),
    ],
)
def test_key_is_checked_again_when_the_run_starts(
    pool: Pool, memory: MemoryProvider, key: AgentKey, restriction: dict[str, Any], message: str
) -> None:
    row = enqueue(pool, request=ONE_SHOT | {"pool": pool.name, "key_id": str(key.pk)})
    AgentKey.objects.filter(pk=key.pk).update(**restriction)
    assert work() == 1
    row = reload(row)
    assert (row.state, row.error["message"], row.error["retryable"]) == ("failed", message, False)
    assert (Lease.objects.count(), count_executions(memory)) == (0, 0)


WITHDRAWN: list[tuple[dict[str, Any], str]] = [
    ({"revoked_at": NOW}, "The API key that queued the run was revoked or has expired."),
    ({"expires_at": NOW}, "The API key that queued the run was revoked or has expired."),
    ({"scopes": ["read"]}, "The API key that queued the run may not act for this agent any more."),
    ({"dids": ["did:plc:bob"]}, "The API key that queued the run may not act for this agent any more."),
]


@pytest.mark.parametrize(("change", "message"), WITHDRAWN)
@pytest.mark.parametrize("kind", ["exec", "agent_run"])
def test_run_of_a_lease_does_not_start_after_its_key_was_withdrawn(
    lease: Lease, pool: Pool, memory: MemoryProvider, key: AgentKey, kind: str, change: dict[str, Any], message: str
) -> None:
    row = enqueue(pool, lease, request=COMMAND | {"kind": kind, "key_id": str(key.pk)})
    AgentKey.objects.filter(pk=key.pk).update(**change)
    assert work() == 1
    assert (reload(row).state, reload(row).error["message"]) == ("failed", message)
    assert (Run.objects.count(), count_executions(memory)) == (0, 0)


@pytest.mark.parametrize("has_lease", [True, False])
def test_run_whose_key_is_revoked_while_it_waits_for_its_sandbox_does_not_start(
    lease: Lease, pool: Pool, memory: MemoryProvider, key: AgentKey, has_lease: bool,
    at_checkpoint: Callable[[str, Callable[[], object]], None],
) -> None:  # fmt: skip
    request = (COMMAND if has_lease else ONE_SHOT | {"pool": pool.name}) | {"key_id": str(key.pk)}
    row = enqueue(pool, lease if has_lease else None, request=request)
    at_checkpoint("sandbox ready", lambda: AgentKey.objects.filter(pk=key.pk).update(revoked_at=NOW))
    assert work() == 1
    assert AgentKey.objects.get().revoked_at
    assert (reload(row).state, reload(row).error["code"]) == ("failed", "forbidden")
    assert (Run.objects.count(), count_executions(memory)) == (0, 0)


def test_secrets_are_encrypted_and_deleted_at_the_end(lease: Lease, pool: Pool) -> None:
    row = enqueue(pool, lease, argv=["printenv", "TOKEN"], secrets={"env": {"TOKEN": "s3cret"}})
    assert b"s3cret" not in bytes(row.sealed)
    work()
    assert bytes(reload(row).sealed) == b""
    assert bytes(Run.objects.get(pk=reload(row).run_id).stdout) == b"s3cret\n"


def test_secrets_survive_a_change_of_keys(lease: Lease, pool: Pool, settings: Any) -> None:
    settings.IDENTITY_KEYS = [b"1" * 32]
    row = enqueue(pool, lease, secrets={"env": {"A": "b"}})
    settings.IDENTITY_KEYS = [b"2" * 32, b"1" * 32]
    assert sealing.reencrypt().changed == 1
    settings.IDENTITY_KEYS = [b"2" * 32]
    assert sealing.open_secrets(reload(row)) == {"env": {"A": "b"}}
    assert sealing.reencrypt().current == 1
    settings.IDENTITY_KEYS = [b"3" * 32]
    assert [each.pk for each in sealing.reencrypt().undecryptable] == [row.pk]
    work()
    assert (reload(row).state, reload(row).error["retryable"]) == ("failed", False)
    assert reload(row).error["message"].startswith("No configured key decrypts")


@pytest.mark.django_db(transaction=True)
@without_vendors("an agent run at a vendor needs a gateway")
def test_queued_agent_run_is_recorded(lease: Lease, pool: Pool) -> None:
    options = {"model": "", "permission_mode": "default", "system_prompt": "", "session_id": ""}
    request = COMMAND | {"kind": "agent_run", "cli": "program", "argv": ["cat"], "options": options, "policy": {}}
    prompt = json.dumps({"type": "assistant", "turn_id": "1", "text": "Done."})
    row = enqueue(pool, lease, request=request, secrets={"prompt": prompt})
    assert work() == 1
    agent_run = AgentRun.objects.get()
    assert (reload(row).state, agent_run.pk, agent_run.state) == ("completed", reload(row).run_id, "completed")
    assert agent_run.result == "Done."


# --- order and limits ---------------------------------------------------------------------------------------------


def claim_agents(count: int, now: datetime = NOW) -> list[str]:
    """Claim runs one after the other, each ended before the next claim. Return their agents."""
    agents = []
    for number in range(count):
        at = now + timedelta(seconds=number)
        row = queue.claim("r1", now=at)
        assert row is not None
        queue.finish(row, attempts.STATE.COMPLETED, now=at)
        agents.append(row.agent_did[-3:])
    return agents


def test_flooding_agent_delays_the_others_by_one_run(pool: Pool) -> None:
    for _ in range(20):
        enqueue(pool)
    assert claim_agents(2) == ["ada", "ada"]
    for name in ("bob", "eve"):
        enqueue(pool, agent=f"did:plc:{name}", now=NOW + MINUTE)
    enqueue(pool, agent="did:plc:bob", now=NOW + MINUTE)
    assert claim_agents(6, NOW + MINUTE) == ["bob", "eve", "ada", "bob", "ada", "ada"]


def test_priority_orders_the_runs_of_one_agent_only(pool: Pool) -> None:
    low, high = enqueue(pool, priority=-1), enqueue(pool, priority=5, now=NOW + MINUTE)
    other = enqueue(pool, agent="did:plc:bob", now=NOW + MINUTE)
    order = [queue.claim("r1", now=NOW + 2 * MINUTE) for _ in range(3)]
    assert [row.pk for row in order if row] == [high.pk, other.pk, low.pk]


@pytest.mark.parametrize("name", ["QUEUE_MAX_RUNNING", "QUEUE_MAX_RUNNING_PER_AGENT", "QUEUE_MAX_RUNNING_PER_POOL"])
def test_limit_of_started_runs_frees_a_place_at_the_end(pool: Pool, settings: Any, name: str) -> None:
    setattr(settings, name, 2)
    for _ in range(3):
        enqueue(pool)
    first, second = queue.claim("r1", now=NOW), queue.claim("r2", now=NOW)
    assert first and second
    assert queue.claim("r1", now=NOW) is None
    queue.finish(first, attempts.STATE.COMPLETED, now=NOW)
    assert queue.claim("r1", now=NOW)


def test_pending_limits(pool: Pool, settings: Any) -> None:
    settings.QUEUE_MAX_PENDING_PER_AGENT, settings.QUEUE_MAX_PENDING = 2, 3
    enqueue(pool)
    enqueue(pool)
    with pytest.raises(TooManyQueuedRuns, match="The agent has 2"):
        enqueue(pool)
    enqueue(pool, agent="did:plc:bob")
    with pytest.raises(TooManyQueuedRuns, match="The queue has 3"):
        enqueue(pool, agent="did:plc:bob")


def test_run_that_does_not_start_in_time_expires(pool: Pool) -> None:
    row = enqueue(pool, pending_timeout=MINUTE)
    assert [queue.expire(now=NOW + each) for each in (MINUTE / 2, MINUTE)] == [0, 1]
    assert (reload(row).state, reload(row).error["retryable"], bytes(reload(row).sealed)) == ("expired", True, b"")
    assert queue.claim("r1", now=NOW + MINUTE) is None


# --- retries ------------------------------------------------------------------------------------------------------


def test_full_pool_is_tried_again_after_a_backoff(lease: Lease, pool: Pool, grant: Callable[..., Lease]) -> None:
    other = grant("did:plc:bob")
    update_pool(pool, capacity=1)
    enqueue(pool, other)
    work()
    Sandbox.objects.update(state="running", open_runs=1)
    row = enqueue(pool, lease)
    assert work() == 1
    row = reload(row)
    assert (row.state, row.attempt, row.error["retryable"]) == ("queued", 1, True)
    assert row.available_at > NOW
    Sandbox.objects.update(state="waiting", open_runs=0, idle_at=NOW)
    assert work(NOW + MINUTE) == 1
    assert (reload(row).state, reload(row).attempt) == ("completed", 2)


@pytest.fixture
def elsewhere(lease: Lease) -> Host:
    """Host that this process does not reach, with the sandbox of the lease."""
    execution.exec_command(lease.pk, Command(["true"], MINUTE), now=NOW)
    host = Host.objects.create(
        id=uuid.uuid4(), provider="memory", name="other", engine_id="other", queue="other", created_at=NOW, heartbeat_at=NOW
    )
    assert Sandbox.objects.filter(holder=lease.pk).update(host=host) == 1
    return host


def test_run_of_an_unreachable_host_is_tried_with_a_backoff_and_no_event(
    lease: Lease, pool: Pool, elsewhere: Host, memory: MemoryProvider
) -> None:
    row = enqueue(pool, lease)
    executions = count_executions(memory)
    attempted = work_until(NOW + 10 * MINUTE, sweep=False)
    row = reload(row)
    assert (row.state, row.attempt, row.error["code"]) == ("queued", attempted, "wrong_host")
    assert 5 < attempted < 15
    assert count_executions(memory) == executions
    assert [event.payload["state"] for event in Event.objects.filter(kind__startswith="queued_run.")] == ["queued"]


def test_runner_of_the_host_claims_first(lease: Lease, pool: Pool, elsewhere: Host) -> None:
    row = enqueue(pool, lease)
    assert queue.claim("r1", now=NOW) is None
    Sandbox.objects.filter(holder=lease.pk).update(state="cold")  # not in a process of that host
    assert queue.claim("r1", now=NOW) == row


def test_interrupted_run_of_an_unreachable_host_ends(
    lease: Lease, pool: Pool, elsewhere: Host, at_checkpoint: Callable[..., None]
) -> None:
    row = enqueue(pool, lease)
    at_checkpoint("queued run claimed", lambda: interrupt(row))
    assert work(NOW + MINUTE) == 1
    assert reload(row).state == "interrupted"


def test_many_attempts_do_not_stop_the_queue(pool: Pool, lease: Lease) -> None:
    row, other = enqueue(pool, lease), enqueue(pool, agent="did:plc:bob")
    QueuedRun.objects.filter(pk=row.pk).update(attempt=MAX_RUN_ATTEMPT)
    assert work() == 2
    assert (reload(row).state, reload(row).attempt, reload(other).state) == ("completed", MAX_RUN_ATTEMPT + 1, "completed")
    assert Run.objects.get(pk=reload(row).run_id).attempt == MAX_RUN_ATTEMPT


def test_run_whose_row_cannot_be_claimed_does_not_stop_the_queue(pool: Pool, lease: Lease) -> None:
    """PostgreSQL refuses a number of attempts beyond the range of the column; SQLite does not."""
    row, other = enqueue(pool, lease), enqueue(pool, agent="did:plc:bob")
    QueuedRun.objects.filter(pk=row.pk).update(attempt=(1 << 31) - 1)
    assert queue.claim("r1", now=NOW) == (None if connection.vendor == "postgresql" else row)
    assert queue.claim("r1", now=NOW) == other


def test_error_of_an_attempt_names_provider_and_cause(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease)
    memory.fail("create", Unavailable("no engine", cause=FailureCause.ENGINE_UNREACHABLE), times=1)
    work()
    error = reload(row).error
    assert error is not None
    expected = ("sandbox_not_ready", "start", pool.provider, "engine_unreachable")
    assert (error["code"], error["operation"], error["provider"], error["cause"]) == expected


@pytest.mark.parametrize("step", ["sandbox ready", "created"])
def test_lost_connection_before_the_command_is_tried_again(
    step: str, lease: Lease, pool: Pool, memory: MemoryProvider, at_checkpoint: Callable[..., None]
) -> None:
    def lose_connection() -> None:
        reached.append(step)
        raise OperationalError("the connection was lost")

    reached: list[str] = []
    row = enqueue(pool, lease)
    at_checkpoint(step, lose_connection)
    work()
    row = reload(row)
    assert (reached, row.state, row.error["code"], row.error["retryable"]) == ([step], "queued", "database_unavailable", True)
    sweeps.recover_stalled(now=LATER)
    assert work(LATER) == 1
    assert (reload(row).state, count_executions(memory)) == ("completed", 1)


def test_permanent_error_ends_the_run(lease: Lease, pool: Pool) -> None:
    row = enqueue(pool, lease)
    leasing.release(lease.pk, now=NOW)
    work()
    assert (reload(row).state, reload(row).error["code"], reload(row).error["retryable"]) == ("failed", "lease_ended", False)


@pytest.mark.parametrize("repeatable", [False, True])
def test_unknown_outcome_is_repeated_only_if_that_was_declared(
    lease: Lease, pool: Pool, memory: MemoryProvider, repeatable: bool
) -> None:
    row = enqueue(pool, lease, repeatable=repeatable, max_attempts=2)
    memory.fail("exec", Unavailable("gone"), times=1)
    work()
    sweeps.recover_stalled(now=LATER)
    work(LATER)
    row = reload(row)
    expected = ("completed", 2) if repeatable else ("failed", 1)
    assert (row.state, row.attempt) == expected
    assert row.error is None or (row.error["code"], row.error["retryable"]) == ("outcome_unknown", False)


def test_attempts_that_found_no_place_are_not_executions(
    lease: Lease, pool: Pool, memory: MemoryProvider, grant: Callable[..., Lease]
) -> None:
    other = grant("did:plc:bob")
    update_pool(pool, capacity=1)
    enqueue(pool, other)
    work()
    Sandbox.objects.update(state="running", open_runs=1)
    row = enqueue(pool, lease, repeatable=True, max_attempts=2)
    for minutes in (0, 5, 10):
        work(NOW + minutes * MINUTE)
    assert (reload(row).state, reload(row).attempt) == ("queued", 3)
    Sandbox.objects.update(state="waiting", open_runs=0, idle_at=NOW)
    memory.fail("exec", Unavailable("gone"), times=1)
    work(NOW + 15 * MINUTE)
    sweeps.recover_stalled(now=LATER)
    work(LATER)
    work(LATER + 10 * MINUTE)
    assert (reload(row).state, reload(row).attempt) == ("completed", 5)


@pytest.mark.django_db(transaction=True)
def test_concurrent_claims_take_each_run_once_and_keep_the_limits(pool: Pool, settings: Any) -> None:
    settings.QUEUE_MAX_RUNNING_PER_AGENT, settings.QUEUE_MAX_RUNNING = 2, 5
    for number in range(12):
        enqueue(pool, agent=f"did:plc:a{number % 3}")
    with run_in_threads(8) as run:
        claimed = run(lambda number: queue.claim(f"r{number}", now=NOW))
    assert all(row is None or isinstance(row, QueuedRun) for row in claimed)
    rows = [row for row in claimed if row]
    assert len({row.pk for row in rows}) == len(rows) == 5
    assert max(Counter(row.agent_did for row in rows).values()) == 2
    assert QueuedRun.objects.filter(state="started").count() == 5


def test_attempts_are_limited(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease, repeatable=True, max_attempts=2)
    memory.fail("exec", Unavailable("gone"))
    for number in range(4):
        sweeps.recover_stalled(now=LATER + number * 10 * MINUTE)
        work(LATER + number * 10 * MINUTE)
    assert (reload(row).state, reload(row).attempt) == ("failed", 2)


def enqueue_with_unknown_outcome(
    pool: Pool, lease: Lease, crash_at: Callable[[str], AbstractContextManager[None]]
) -> QueuedRun:
    """Return a repeatable run, queued again at LATER because the outcome of its first attempt is unknown."""
    row = enqueue(pool, lease, repeatable=True, max_attempts=2, pending_timeout=10 * MINUTE)
    with crash_at("run opened"):
        work()
    sweeps.recover_stalled(now=LATER)
    assert (attempts.recover(runner="r2", now=LATER), reload(row).state) == (1, "queued")
    return row


def test_time_of_an_attempt_does_not_count_as_pending(
    lease: Lease, pool: Pool, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    row = enqueue_with_unknown_outcome(pool, lease, crash_at)
    assert (queue.expire(now=LATER), reload(row).state) == (0, "queued")
    assert work(LATER + MINUTE, "r2") == 1
    assert (reload(row).state, reload(row).attempt) == ("completed", 2)


def test_run_whose_outcome_is_unknown_fails_if_it_is_not_repeated_in_time(
    lease: Lease, pool: Pool, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    row = enqueue_with_unknown_outcome(pool, lease, crash_at)
    assert work(LATER + 30 * MINUTE, "r2") == 0
    ended = Event.objects.get(kind="queued_run.ended")
    assert (reload(row).state, reload(row).error["code"], ended.payload["state"]) == ("failed", "outcome_unknown", "failed")


# --- runners that die ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "state", "attempt", "executions"),
    [
        ("queued run claimed", "completed", 2, 1),
        ("reserved", "completed", 2, 1),
        ("created", "completed", 2, 1),
        ("run opened", "failed", 1, 0),  # whether the command began is not known to the control plane
        ("run answered", "completed", 1, 1),  # its result is retained in the sandbox
        ("attempt executed", "completed", 1, 1),
    ],
)
def test_runner_killed_at_any_step_executes_nothing_twice(
    step: str, state: str, attempt: int, executions: int, lease: Lease, pool: Pool, memory: MemoryProvider,
    crash_at: Callable[[str], AbstractContextManager[None]],
) -> None:  # fmt: skip
    row = enqueue(pool, lease)
    with crash_at(step):
        work()
    assert attempts.recover(runner="r2", now=NOW) == 0  # its lease on the row has not expired
    sweeps.recover_stalled(now=LATER)
    work(LATER, "r2")
    work(LATER + 10 * MINUTE, "r2")
    row = reload(row)
    assert (row.state, row.attempt, count_executions(memory)) == (state, attempt, executions)
    assert not Run.objects.filter(ended_at=None).exists()


@pytest.mark.parametrize(
    ("step", "state", "executions"),
    [
        ("queued run claimed", "completed", 1),
        ("run granted", "completed", 1),
        ("command ended", "failed", 1),
        ("run released", "completed", 1),
    ],
)
def test_runner_of_a_new_sandbox_killed_at_any_step_leaves_none(
    step: str, state: str, executions: int, pool: Pool, memory: MemoryProvider,
    crash_at: Callable[[str], AbstractContextManager[None]],
) -> None:  # fmt: skip
    row = enqueue(pool)
    with crash_at(step):
        work()
    for minutes in (0, 10, 20):
        now = LATER + minutes * MINUTE
        sweeps.expire_due_leases(now=now)
        sweeps.recover_stalled(now=now)
        work(now, "r2")
        sweeps.reclaim(now=now)
    assert (reload(row).state, count_executions(memory)) == (state, executions)
    assert not memory.list(str(pool.owner))
    assert not Lease.objects.filter(status="active").exists()


def test_runner_that_lost_its_row_executes_nothing(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease)
    slow = queue.claim("slow", now=NOW)
    assert slow is not None
    assert work(NOW + 2 * MINUTE, "r2") == 0  # taken over, with a backoff
    attempts.execute(slow, now=NOW + 2 * MINUTE)
    assert count_executions(memory) == 0
    assert work(NOW + 5 * MINUTE, "r2") == 1
    attempts.execute(slow, now=NOW + 5 * MINUTE)
    assert (reload(row).state, reload(row).attempt, count_executions(memory)) == ("completed", 2, 1)


def test_late_end_of_an_attempt_does_not_end_the_next_one(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease, repeatable=True, max_attempts=2)
    slow = queue.claim("slow", now=NOW)
    assert slow is not None

    def take_over(ref: str) -> None:
        sweeps.recover_stalled(now=LATER)
        assert attempts.recover(runner="r2", now=LATER) == 1
        assert queue.claim("r2", now=LATER + 10 * MINUTE)

    with memory.before("exec", take_over):
        attempts.execute(slow, now=NOW)
    assert (reload(row).state, reload(row).attempt, reload(row).runner) == ("started", 2, "r2")


def test_runner_whose_row_is_being_taken_over_executes_nothing(
    lease: Lease, pool: Pool, memory: MemoryProvider, at_checkpoint: Callable[..., None]
) -> None:
    row = enqueue(pool, lease)
    slow = queue.claim("slow", now=NOW)
    assert slow is not None
    at_checkpoint("queued run taken over", lambda: attempts.execute(slow, now=LATER))
    assert attempts.recover(runner="r2", now=LATER) == 1
    assert (reload(row).state, reload(row).attempt, count_executions(memory)) == ("queued", 1, 0)


def test_run_whose_command_may_still_run_is_left_alone(
    lease: Lease, pool: Pool, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    row = enqueue(pool, lease, repeatable=True, max_attempts=3)
    with crash_at("run opened"):
        work()
    for minutes in (1, 2):
        assert work(NOW + minutes * MINUTE, "r2") == 0
    assert (reload(row).state, reload(row).attempt) == ("started", 1)


def test_renewed_lease_of_a_runner_is_not_taken_over(lease: Lease, pool: Pool) -> None:
    enqueue(pool, lease)
    row = queue.claim("r1", now=NOW)
    assert row
    assert queue.renew("r1", [Attempt(row.pk, row.attempt)], now=NOW + MINUTE) == 1
    assert attempts.recover(runner="r2", now=NOW + MINUTE) == 0


def test_runner_that_renews_its_lease_while_another_takes_over_keeps_its_other_rows(
    lease: Lease, pool: Pool, at_checkpoint: Callable[..., None]
) -> None:
    executing = []
    for _ in range(2):
        enqueue(pool, lease)
        row = queue.claim("r1", now=NOW)
        assert row
        executing.append(Attempt(row.pk, row.attempt))
    at_checkpoint("queued run taken over", lambda: queue.renew("r1", executing, now=LATER))
    assert attempts.recover(runner="r2", now=LATER) == 1
    kept = QueuedRun.objects.get(state="started")
    assert (kept.runner, kept.runner_deadline) == ("r1", LATER + queue.RUNNER_TTL)


def test_only_the_attempts_in_progress_are_renewed(lease: Lease, pool: Pool) -> None:
    enqueue(pool, lease)
    row = queue.claim("r1", now=NOW)
    assert row
    later = NOW + MINUTE / 4
    earlier, other = Attempt(row.pk, row.attempt - 1), Attempt(uuid.uuid4(), row.attempt)
    assert [queue.renew("r1", each, now=later) for each in ([], [earlier], [other])] == [0, 0, 0]
    assert queue.renew("r2", [Attempt(row.pk, row.attempt)], now=later) == 0
    assert reload(row).runner_deadline == NOW + queue.RUNNER_TTL


# --- attempts that end without being recorded, while their runner lives --------------------------------------------


@pytest.mark.parametrize("repeatable", [False, True])
def test_attempt_whose_command_may_still_run_is_settled_by_its_own_runner(
    lease: Lease, pool: Pool, memory: MemoryProvider, repeatable: bool
) -> None:
    row = enqueue(pool, lease, repeatable=repeatable, max_attempts=2)
    memory.fail("exec", Unavailable("gone"), times=1)
    memory.fail("kill", Unavailable("gone"), times=1)
    assert work() == 1
    assert (reload(row).state, Run.objects.get(pk=reload(row).run_id).ended_at) == ("started", None)
    work_until(NOW + 10 * MINUTE)
    row = reload(row)
    expected = ("completed", 2) if repeatable else ("failed", 1)
    assert (row.state, row.attempt) == expected


def test_end_that_could_not_be_recorded_is_recorded_later(
    lease: Lease, pool: Pool, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, failures = enqueue(pool, lease), iter([OperationalError("the connection was lost")])

    def finish(*arguments: Any, **values: Any) -> bool:
        for failure in failures:
            raise failure
        return original(*arguments, **values)

    original = queue.finish
    monkeypatch.setattr(queue, "finish", finish)
    assert work() == 1
    assert (reload(row).state, next(failures, None)) == ("started", None)
    work_until(NOW + MINUTE)
    assert (reload(row).state, reload(row).exit_code, count_executions(memory)) == ("completed", 0, 1)


def test_takeover_that_fails_is_repeated_and_delays_no_other(
    lease: Lease, pool: Pool, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [enqueue(pool, lease) for _ in range(2)]
    for _ in rows:
        assert queue.claim("r2", now=NOW)
    failures, original = iter([ValueError("unexpected")]), queue.requeue

    def requeue(*arguments: Any, **values: Any) -> bool:
        for failure in failures:
            raise failure
        return original(*arguments, **values)

    monkeypatch.setattr(queue, "requeue", requeue)
    work(NOW + MINUTE)
    assert next(failures, None) is None
    assert sorted(reload(row).state for row in rows) == ["queued", "started"]
    work_until(NOW + 3 * MINUTE, begin=NOW + MINUTE)
    assert ({reload(row).state for row in rows}, count_executions(memory)) == ({"completed"}, 2)


def test_interruption_of_an_unrecorded_attempt_ends_the_run(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease, repeatable=True, max_attempts=2)
    memory.fail("exec", Unavailable("gone"), times=1)
    memory.fail("kill", Unavailable("gone"), times=1)
    work()
    interrupt(row)
    work_until(NOW + 10 * MINUTE)
    assert (reload(row).state, reload(row).attempt) == ("interrupted", 1)


# --- interruption -------------------------------------------------------------------------------------------------


def interrupt(row: QueuedRun) -> int:
    return queue.interrupt(QueuedRun.objects.filter(pk=row.pk), now=NOW)


def test_pending_run_is_interrupted_at_once(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease)
    assert [interrupt(row) for _ in range(2)] == [1, 0]
    assert work() == 0
    assert (reload(row).state, reload(row).interrupted_at, bytes(reload(row).sealed)) == ("interrupted", NOW, b"")


def test_run_that_is_interrupted_while_it_is_claimed_does_not_start(lease: Lease, pool: Pool) -> None:
    row, interrupted = enqueue(pool, lease), list[int]()

    def interrupt_before_update(execute: Any, sql: str, *statement: Any) -> Any:
        if sql.startswith('UPDATE "leases_queuedrun"') and not interrupted:
            interrupted.append(0)
            interrupted.append(interrupt(row))
        return execute(sql, *statement)

    with connection.execute_wrapper(interrupt_before_update):
        assert queue.claim("r1", now=NOW) is None
    assert (interrupted, reload(row).state, reload(row).attempt) == ([0, 1], "interrupted", 0)


def test_claimed_run_that_is_interrupted_executes_nothing(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease)
    claimed = queue.claim("r1", now=NOW)
    assert claimed is not None
    assert [interrupt(row) for _ in range(2)] == [1, 0]
    attempts.execute(claimed, now=NOW)
    assert (reload(row).state, count_executions(memory)) == ("interrupted", 0)


def test_command_of_an_interrupted_run_is_killed(lease: Lease, pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease)
    memory.before("exec", lambda _: interrupt(row))
    work()
    assert any(method == "kill" for method, _ in memory.calls)
    assert reload(row).state == "interrupted"
    assert interrupt(row) == 0


def test_run_that_is_interrupted_while_its_run_opens_executes_nothing(
    lease: Lease,
    pool: Pool,
    memory: MemoryProvider,
    at_checkpoint: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = enqueue(pool, lease)
    # The condition is evaluated before the interruption: the check under the lock of the row has to find it.
    monkeypatch.setattr(attempts.AttemptGuard, "build_condition", lambda guard: ALWAYS)
    at_checkpoint("sandbox ready", lambda: QueuedRun.objects.filter(pk=row.pk).update(interrupted_at=NOW))
    work()
    assert (reload(row).state, count_executions(memory)) == ("interrupted", 0)
    assert not Run.objects.filter(pk=reload(row).run_id).exists()


def test_run_that_was_interrupted_when_its_runner_died_is_not_repeated(
    lease: Lease, pool: Pool, memory: MemoryProvider, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    row = enqueue(pool, lease, repeatable=True, max_attempts=3)
    with crash_at("queued run claimed"):
        work()
    interrupt(row)
    work(LATER, "r2")
    assert (reload(row).state, count_executions(memory)) == ("interrupted", 0)


def test_end_of_each_run_is_one_event(lease: Lease, pool: Pool) -> None:
    rows = {
        "completed": enqueue(pool, lease),
        "failed": enqueue(pool, lease, argv=["missing"]),
        "expired": enqueue(pool, lease, pending_timeout=MINUTE),
        "interrupted": enqueue(pool, lease),
    }
    QueuedRun.objects.filter(pk=rows["expired"].pk).update(available_at=LATER)
    interrupt(rows["interrupted"])
    work()
    queue.expire(now=LATER)
    queue.interrupt(QueuedRun.objects.all(), now=LATER)
    events = {event.payload["state"]: event.payload for event in Event.objects.filter(kind="queued_run.ended")}
    assert {state: payload["queued_run_id"] for state, payload in events.items()} == {
        state: str(row.pk) for state, row in rows.items()
    }
    assert (events["completed"]["exit_code"], events["completed"]["run_id"]) == (0, str(reload(rows["completed"]).run_id))
    assert (events["failed"]["error"]["code"], events["interrupted"]["run_id"]) == ("failed", None)


def test_attempt_is_announced_when_its_command_begins(pool: Pool, lease: Lease, memory: MemoryProvider) -> None:
    row = enqueue(pool, lease, repeatable=True, max_attempts=2)
    memory.fail("create", Unavailable("no engine"), times=1)  # the first attempt: its command does not begin
    memory.fail("exec", Unavailable("gone"), times=1)  # the second: the outcome is unknown
    assert [work(), work(NOW + MINUTE), work(NOW + 2 * MINUTE)] == [1, 1, 1]
    events = [*Event.objects.filter(kind__startswith="queued_run.").order_by("at")]
    payloads = [(event.kind, event.payload["state"], event.payload["attempt"]) for event in events]
    assert sorted(payloads) == [
        ("queued_run.ended", "completed", 3),
        ("queued_run.queued", "queued", 0),
        ("queued_run.queued", "queued", 2),
        ("queued_run.started", "started", 2),
        ("queued_run.started", "started", 3),
    ]
    started = [event.payload for event in events if event.kind == "queued_run.started"]
    assert (started[1]["queued_run_id"], started[1]["run_id"]) == (str(row.pk), str(reload(row).run_id))


def test_totals_and_the_age_of_the_oldest_pending_run(pool: Pool, lease: Lease) -> None:
    enqueue(pool, lease)
    work()
    enqueue(pool, agent="did:plc:bob")
    rows = QueuedRun.objects.all()
    none = AgentRun.objects.none()
    stats = statistics.get_stats(rows, none, now=NOW + MINUTE)
    assert (stats.counts["completed"], stats.counts["queued"], stats.counts["failed"]) == (1, 1, 0)
    assert stats.oldest_pending_seconds == 60.0
    assert statistics.get_stats(queue.filter_agents(rows, ["did:plc:ada"]), none, now=NOW).oldest_pending_seconds == 0.0


def test_rows_are_deleted_after_their_retention(pool: Pool, lease: Lease, settings: Any) -> None:
    enqueue(pool, lease)
    enqueue(pool, agent="did:plc:bob")
    queue.claim("r1", now=NOW)
    QueuedRun.objects.filter(state="started").update(state="failed", ended_at=NOW, runner_deadline=None)
    assert delete_expired(now=NOW + settings.KEEP_STATE - MINUTE).counts == {}
    assert delete_expired(now=NOW + settings.KEEP_STATE + MINUTE).counts == {
        "queued runs deleted": 1,
        "agents of the queue deleted": 1,
    }


def test_rejected_start_of_a_new_sandbox_is_tried_again(pool: Pool, memory: MemoryProvider) -> None:
    row = enqueue(pool)
    memory.fail("create", Rejected("no"), times=1)
    work()
    assert (reload(row).state, reload(row).error["message"] != "") == ("queued", True)
    work(NOW + 5 * MINUTE)
    assert reload(row).state == "completed"


# --- outages of the database --------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@any_outage
def test_outage_at_any_step_of_a_run(
    lease: Lease, pool: Pool, memory: MemoryProvider, failover: Callable[..., Any], weather: Weather
) -> None:
    executions = Counter[str]()

    def execute(call: ProgramCall) -> ProgramResult:
        executions[call.argv[1]] += 1
        return ProgramResult(3, b"")

    memory.programs["count"] = execute
    for step in weather.list_steps():
        row = enqueue(pool, lease, argv=["count", str(step)])
        with injected(weather.begin(step)) as outage:
            with suppress(OperationalError, RetriesExhausted):
                work()
            if not outage.has_begun:
                break
            outage.end()
        claims.HEARTBEAT.beat()
        for minutes in (1, 5, 10):
            sweeps.recover_stalled(now=NOW + minutes * MINUTE)
            work(NOW + minutes * MINUTE)
        ended = reload(row)
        assert (step, ended.state, ended.exit_code, executions[str(step)]) == (step, "failed", 3, 1), ended.error
        assert not Run.objects.filter(ended_at__isnull=True).exists()
    assert step > 10
