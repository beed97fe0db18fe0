"""Limits on open runs of a lease and an agent, and on the long calls of a process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from leases import execution
from leases.models import Lease
from sandboxes import files, long_calls
from sandboxes.errors import TooManyLongCalls, TooManyRuns
from sandboxes.long_calls import LONG_CALLS, LongCallLimit
from sandboxes.models import Run, RunOutcome, Sandbox
from sandboxes.providers.base import WORKSPACE
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.billing import start_run
from tests.support.leases import evict, get_sandbox, run, write

pytestmark = pytest.mark.django_db


@pytest.fixture
def process_at_its_limit() -> Iterator[None]:
    """Another thread has the only long call of this process."""
    LONG_CALLS.set_maximum(1)
    call = LONG_CALLS.admit()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call.__enter__).result()
        yield
        thread.submit(call.__exit__, None, None, None).result()
    with LONG_CALLS.admit(), LONG_CALLS.admit():  # free again, and a nested call is part of the outer one
        pass
    LONG_CALLS.set_maximum(None)


def test_run_above_the_limit_of_its_lease_is_refused_until_one_ends(grant, settings) -> None:
    settings.MAX_RUNS_PER_LEASE = 2
    lease, other = grant(), grant(environment="game-2")
    opened = [start_run(lease), start_run(lease)]
    with pytest.raises(TooManyRuns, match="This lease has 2 open runs, and the limit is 2 "):
        run(lease)
    assert (Run.objects.count(), get_sandbox(lease).open_runs) == (2, 2)
    assert run(other).exit_code == 0
    operations.close_run(opened[0], now=NOW, outcome=RunOutcome.OK)
    assert run(lease).exit_code == 0


def test_run_above_the_limit_of_its_agent_is_refused_in_all_its_leases(grant, settings) -> None:
    settings.MAX_RUNS_PER_AGENT = 2
    leases = [grant(environment=f"game-{number}") for number in range(3)]
    start_run(leases[0])
    start_run(leases[1])
    for lease in leases:
        with pytest.raises(TooManyRuns, match="did:plc:ada has 2 open runs in its leases, and the limit is 2 "):
            run(lease)
    assert Run.objects.count() == 2
    assert run(grant("did:plc:bob")).exit_code == 0


def test_open_runs_of_an_agent_are_counted_with_an_index(grant) -> None:
    if connection.vendor != "sqlite":
        pytest.skip("the planner of PostgreSQL reads a small table without an index")
    start_run(grant())
    with connection.cursor() as cursor:
        cursor.execute(
            "EXPLAIN QUERY PLAN SELECT SUM(other.open_runs) FROM sandboxes_sandbox other "
            "WHERE other.agent_did = %s AND other.open_runs > 0", ["did:plc:ada"],
        )  # fmt: skip
        assert "sandbox_agent_running" in str(cursor.fetchall())


def test_long_call_above_the_limit_of_the_process_does_nothing(grant, process_at_its_limit: None) -> None:
    lease = grant()
    for act in (lambda: run(lease), lambda: execution.ensure_sandbox_ready(lease.pk, now=NOW)):
        with pytest.raises(TooManyLongCalls):
            act()
    assert not Sandbox.objects.exists()


def test_files_of_a_cold_sandbox_are_read_while_the_process_is_at_its_limit(grant, request: pytest.FixtureRequest) -> None:
    lease: Lease = grant()
    write(lease)
    evict(lease)
    request.getfixturevalue("process_at_its_limit")
    command = Command(argv=["read"], timeout=MINUTE, kind="file")
    with execution.use_lease(lease.pk, now=NOW) as sandbox_request:
        content, source = files.read_files(
            sandbox_request, WORKSPACE, command, lambda tree: tree.read_range("f", start=0, length=9)[0], now=NOW
        )
    assert (content, source) == (b"kept\n", "snapshot")


@pytest.mark.parametrize(("threads", "maximum", "waiting"), [(2, 1, 1), (3, 2, 1), (4, 3, 1), (16, 12, 6), (32, 24, 12)])
def test_a_quarter_of_the_threads_is_left_for_short_calls_and_half_of_the_others_may_wait_for_places(
    threads: int, maximum: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONG_CALLS", "WAITING_CALLS"):
        monkeypatch.setattr(long_calls, name, LongCallLimit())
    long_calls.set_limits(threads)
    assert (long_calls.LONG_CALLS.maximum, long_calls.WAITING_CALLS.maximum) == (maximum, waiting)
