"""Leases whose sandboxes are destroyed by the web process that ended the lease."""

import re
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django_q.models import OrmQ

from leases import execution, leasing, reclaim_threads, tasks
from leases.models import Lease
from sandboxes.long_calls import get_shutdown_path
from sandboxes.models import Host, Sandbox, Snapshot
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
WAIT_SECONDS = 30.0


@pytest.fixture
def ended(grant: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lease]:
    """Return a function that ends a lease whose sandbox has unsaved state. One thread of the process may reclaim leases."""
    monkeypatch.setattr(reclaim_threads, "THREADS", reclaim_threads.ReclaimThreads(1))

    def end(agent: str = "did:plc:ada", environment: str = "game-1") -> Lease:
        now = timezone.now()
        lease = grant(agent, environment, now=now)
        execution.exec_command(lease.pk, Command(argv=["sh", "-c", "echo 1 >f"], timeout=MINUTE), now=now)
        return leasing.release(lease.pk, now=timezone.now())

    return end


@pytest.fixture
def finish() -> Iterator[Callable[[], None]]:
    """Return a function that waits for the end of all threads that reclaim leases."""

    def join() -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("reclaim-"):
                thread.join(WAIT_SECONDS)
                assert not thread.is_alive()

    yield join
    join()


def read_state(lease: Lease) -> tuple[str, str]:
    return Sandbox.objects.get(holder=lease.pk).state, Lease.objects.get(pk=lease.pk).status


def test_state_is_stored_and_the_sandbox_destroyed_without_the_queue(ended, finish) -> None:
    lease = ended()
    tasks.begin_reclaim([lease])
    finish()
    assert read_state(lease) == ("destroyed", "destroyed")
    assert Snapshot.objects.filter(holder=lease.pk, forgotten_at__isnull=True).exists()
    assert not OrmQ.objects.exists()


def test_more_leases_than_threads_are_left_to_the_queue(ended, finish, memory: MemoryProvider) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def block(ref: str) -> None:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)

    first = ended()
    with memory.before("destroy", block):
        tasks.begin_reclaim([first])
        assert begun.wait(WAIT_SECONDS)
        assert not OrmQ.objects.exists()
        second = ended()
        tasks.begin_reclaim([second])
        assert OrmQ.objects.get().group() == "reclaim"
        go_on.set()
        finish()
    assert (read_state(first)[0], read_state(second)[0]) == ("destroyed", "destroying")


def test_a_destroy_that_takes_long_delays_those_of_its_agent_alone(
    ended, finish, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim_threads, "THREADS", reclaim_threads.ReclaimThreads(2))
    begun, go_on = threading.Event(), threading.Event()
    slow, second, other = ended(), ended(environment="game-2"), ended(agent="did:plc:bob")
    ref = Sandbox.objects.get(holder=slow.pk).ref

    def block(destroyed: str) -> None:
        if destroyed == ref:
            begun.set()
            assert go_on.wait(WAIT_SECONDS)

    with memory.before("destroy", block):
        tasks.begin_reclaim([slow])
        assert begun.wait(WAIT_SECONDS)
        tasks.begin_reclaim([second])
        assert OrmQ.objects.get().group() == "reclaim"
        tasks.begin_reclaim([other])
        wait_until(lambda: read_state(other) == ("destroyed", "destroyed"), "the other agent's sandbox is destroyed")
        assert (read_state(slow)[0], read_state(second)[0]) == ("destroying", "destroying")
        go_on.set()
        finish()
    tasks.begin_reclaim([second])
    finish()
    assert read_state(slow)[0] == read_state(second)[0] == "destroyed"


def test_a_failed_destroy_is_left_to_the_sweep_at_its_next_try(ended, finish, memory: MemoryProvider) -> None:
    lease = ended()
    memory.fail("destroy", Unavailable("no engine"), times=1)
    tasks.begin_reclaim([lease])
    finish()
    assert read_state(lease) == ("destroying", "expired")
    assert Sandbox.objects.get().deadline_at > timezone.now()
    assert not OrmQ.objects.exists()


def test_a_sandbox_of_another_host_is_left_to_its_queue(ended, finish) -> None:
    lease = ended()
    other = Host.objects.create(
        id=uuid.uuid4(),
        provider="memory",
        engine_id="other",
        name="other",
        queue="host-other",
        heartbeat_at=timezone.now(),
        created_at=timezone.now(),
    )
    Sandbox.objects.update(host=other)
    tasks.begin_reclaim([lease])
    finish()
    assert read_state(lease) == ("destroying", "expired")
    assert OrmQ.objects.get().key == "host-other"


def test_a_process_that_shuts_down_leaves_all_to_the_queue(ended, finish) -> None:
    get_shutdown_path().parent.mkdir(parents=True, exist_ok=True)
    get_shutdown_path().touch()
    lease = ended()
    try:
        tasks.begin_reclaim([lease])
    finally:
        get_shutdown_path().unlink()
    assert OrmQ.objects.get().group() == "reclaim"
    finish()
    assert read_state(lease) == ("destroying", "expired")


def test_a_release_and_its_reclaim_take_few_statements(grant) -> None:
    """Each is a round trip before the answer, or before the sandbox is gone. On PostgreSQL without savepoints."""
    lease = grant(now=timezone.now())
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=timezone.now())
    with CaptureQueriesContext(connection) as release:
        leasing.release(lease.pk, now=timezone.now())
    with CaptureQueriesContext(connection) as reclaim:
        assert reclaim_threads.reclaim(lease.pk)
    assert read_state(lease) == ("destroyed", "destroyed")
    counts = count_statements(release), count_statements(reclaim)
    assert counts == ((15, 31) if connection.vendor == "postgresql" else (16, 32))


def count_statements(captured: CaptureQueriesContext) -> int:
    """Count the statements, without those that depend on time: reading the database's clock, and renewing a claim."""
    timed = re.compile(r'SELECT clock_timestamp\(\)|SET "deadline_at" = [^,]* WHERE')
    return sum(not timed.search(query["sql"]) for query in captured.captured_queries)
