"""Agent runs that start without the queue: they take the places of queued runs, and are counted and interrupted with them."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from leases.agent_runs import lifecycle
from leases.agent_runs.clis.base import AgentOptions
from leases.agent_runs.lifecycle import AgentRequest
from leases.agent_runs.models import AgentRun
from leases.models import Lease
from leases.queue import queue, running, statistics
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from sandboxes.errors import TooManyRuns
from sandboxes.models import Pool
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from sandboxes.stores import lease_stores
from tests.conftest import NOW, run_in_threads

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("locks of the queue")]
REQUEST = AgentRequest("program", AgentOptions("prompt", argv=("cat",)), {}, "/workspace", timedelta(minutes=1))
LIMITS = ["QUEUE_MAX_RUNNING", "QUEUE_MAX_RUNNING_PER_AGENT", "QUEUE_MAX_RUNNING_PER_POOL"]


def start(lease: Lease, **options: Any) -> AgentRun:
    """Create the row of an agent run, which holds its place until the row is closed."""
    return lifecycle.create(lease.pk, REQUEST, run_id=uuid.uuid4(), now=NOW, **options)


def enqueue(pool: Pool, lease: Lease) -> QueuedRun:
    request = {"kind": "exec", "argv": ["true"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}
    return queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did, lease=lease, pool=pool, request=request, secrets={"env": {}},
        options=QueueOptions(), now=NOW,
    )  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_direct_and_queued_runs_take_the_same_places(lease: Lease, pool: Pool, settings: Any, name: str) -> None:
    setattr(settings, name, 2)
    enqueue(pool, lease)
    queued = queue.claim("r1", now=NOW)
    direct = start(lease)
    with pytest.raises(TooManyRuns, match=rf"has 2 agent runs .* limit is 2 \(LEASEHOLD_{name}\)") as refusal:
        start(lease)
    assert (refusal.value.extra, AgentRun.objects.count()) == ({"limit": 2}, 1)
    waiting = enqueue(pool, lease)
    assert queue.claim("r1", now=NOW) is None
    AgentRun.objects.filter(pk=direct.pk).update(state="completed", ended_at=NOW)
    claimed = queue.claim("r1", now=NOW)
    assert queued and claimed and claimed.pk == waiting.pk


def test_agent_run_of_a_queued_run_takes_one_place(lease: Lease, pool: Pool, settings: Any) -> None:
    settings.QUEUE_MAX_RUNNING = 2
    enqueue(pool, lease)
    assert queue.claim("r1", now=NOW)
    start(lease, queued=True)
    assert running.count_all() == 1
    start(lease)


def test_limit_of_an_agent_leaves_places_for_others(lease: Lease, grant: Callable[..., Lease], settings: Any) -> None:
    settings.QUEUE_MAX_RUNNING_PER_AGENT = 1
    start(lease)
    start(grant(agent="did:plc:bob"))
    with pytest.raises(TooManyRuns):
        start(grant(environment="game-2"))


def test_refused_run_leaves_no_prompt(lease: Lease, settings: Any) -> None:
    settings.QUEUE_MAX_RUNNING = 1
    start(lease)
    with pytest.raises(TooManyRuns):
        start(lease)
    chat = lease_stores.open_stores(lease.agent_did, lease.pk).chat
    assert len(chat.page(after=None, newest_first=False, limit=10)[0]) == 1


def test_run_whose_prompt_is_not_stored_frees_its_place(lease: Lease, memory_store: MemoryStore) -> None:
    with memory_store.fail("set", StoreError("memory", "set", "down")), pytest.raises(StoreError):
        start(lease)
    assert running.count_all() == 0


def test_direct_runs_are_counted_and_interrupted(lease: Lease, grant: Callable[..., Lease], pool: Pool) -> None:
    own, other = start(lease), start(grant(agent="did:plc:bob"))
    enqueue(pool, lease)
    queue.claim("r1", now=NOW)
    stats = statistics.get_stats(QueuedRun.objects.all(), AgentRun.objects.all(), now=NOW)
    assert (stats.counts["started"], stats.direct_agent_runs, stats.running) == (1, 2, 3)
    rows = AgentRun.objects.filter(lease=lease)
    assert [running.interrupt_direct(rows, now=NOW) for _ in range(2)] == [1, 0]
    own.refresh_from_db()
    other.refresh_from_db()
    assert (own.interrupted_at, other.interrupted_at) == (NOW, None)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", LIMITS)
def test_concurrent_starts_keep_the_limit(lease: Lease, pool: Pool, settings: Any, name: str) -> None:
    setattr(settings, name, 2)
    for _ in range(4):
        enqueue(pool, lease)

    def act(number: int) -> bool:
        if number % 2:
            return queue.claim(f"r{number}", now=NOW) is not None
        try:
            return start(lease) is not None
        except TooManyRuns:
            return False

    with run_in_threads(8) as run:
        started = run(act)
    assert started.count(True) == running.count_all() == 2
    assert set(started) == {True, False}
