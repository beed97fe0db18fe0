"""Vendors that end every sandbox at a fixed age: its state is stored before, and the lease goes on in a new sandbox."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from leases.models import Lease
from sandboxes.models import Pool, Run, Sandbox, Transition
from sandboxes.pool import allocation, lifetimes
from sandboxes.pool.lifetimes import LAST_MARGIN, LIFETIME_MARGIN, end_lifetimes
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, read, run, write

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stopped_clock")]
LIFETIME = timedelta(hours=3)
END = NOW + LIFETIME
DUE = END - LIFETIME_MARGIN


@pytest.fixture(autouse=True)
def short_lived(memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryProvider, "max_lifetime", LIFETIME)


@pytest.fixture
def sandbox(lease: Lease) -> Sandbox:
    return write(lease)


def find_last_code(sandbox: Sandbox) -> str:
    return Transition.objects.filter(sandbox=sandbox, to="evicting").values_list("code", flat=True)[0]


def test_idle_sandbox_is_put_to_sleep_before_its_end_and_wakes_in_a_new_one(lease, sandbox, memory) -> None:
    assert sandbox.lifetime_ends_at == END
    assert end_lifetimes(now=DUE - MINUTE).counts == {}
    assert end_lifetimes(now=DUE).counts == {"put to sleep": 1}
    assert (find_last_code(sandbox), memory.list(str(sandbox.pool.owner))) == ("lifetime", [])
    assert read(lease, now=DUE + MINUTE) == "kept"
    sandbox.refresh_from_db()
    assert (sandbox.incarnation, sandbox.lifetime_ends_at) == (2, DUE + MINUTE + LIFETIME)


def test_use_within_the_margin_continues_in_a_new_sandbox(lease, sandbox) -> None:
    assert read(lease, now=DUE) == "kept"
    sandbox.refresh_from_db()
    assert (sandbox.incarnation, find_last_code(sandbox)) == (2, "lifetime")


def test_use_within_the_margin_goes_on_if_the_state_cannot_be_stored(lease, sandbox, memory) -> None:
    with memory.fail("get_files", Unavailable("engine down")):
        assert run(lease, "true", now=DUE).exit_code == 0
    sandbox.refresh_from_db()
    assert (sandbox.incarnation, sandbox.state) == (1, "waiting")


def test_open_run_is_left_alone_until_the_last_margin_and_stopped_then(lease, sandbox, memory) -> None:
    outcomes: list[dict[str, int]] = []

    def sweep(ref: str) -> None:
        for now in (DUE, END - LAST_MARGIN - MINUTE, END - LAST_MARGIN):
            outcomes.append(end_lifetimes(now=now).counts)

    with memory.before("exec", sweep):
        run(lease, now=DUE - MINUTE)
    assert outcomes == [{"in use": 1}, {"in use": 1}, {"runs stopped": 1}]
    stopped = Run.objects.order_by("-started_at")[0]
    assert ("kill", sandbox.ref) in memory.calls and stopped.ended_at
    assert end_lifetimes(now=END - LAST_MARGIN + MINUTE).counts == {"put to sleep": 1}
    assert read(lease, now=END) == "kept"


def test_prewarmed_sandbox_is_replaced(pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    warm = allocation.start_warm(pool, now=NOW)
    assert warm and end_lifetimes(now=DUE).counts == {"unheld destroyed": 1}
    assert Sandbox.objects.get(pk=warm.pk).state == "destroying"


def test_failed_attempt_is_repeated_by_the_next_sweep(lease, sandbox, memory) -> None:
    with memory.fail("get_files", Unavailable("engine down")):
        assert end_lifetimes(now=DUE).counts == {"not put to sleep": 1}
    assert end_lifetimes(now=DUE + MINUTE).counts == {"put to sleep": 1}
    assert read(lease, now=DUE + 2 * MINUTE) == "kept"


def test_sandbox_of_a_provider_without_a_lifetime_has_no_end(grant, memory, monkeypatch) -> None:
    monkeypatch.setattr(MemoryProvider, "max_lifetime", None)
    write(lease := grant())
    assert get_sandbox(lease).lifetime_ends_at is None
    assert end_lifetimes(now=NOW + timedelta(days=30)).counts == {}


def announce_end(monkeypatch: pytest.MonkeyPatch, memory: MemoryProvider, ends_at: datetime) -> None:
    """Let the engine announce that it ends its sandboxes."""
    listed = memory.list_all()
    monkeypatch.setattr(MemoryProvider, "announces_end", True)
    monkeypatch.setattr(memory, "list_all", lambda: [replace(each, ends_at=ends_at, end_reason="drain") for each in listed])


def test_sandbox_whose_node_is_drained_is_put_to_sleep_and_wakes_elsewhere(lease, sandbox, memory, monkeypatch) -> None:
    announce_end(monkeypatch, memory, NOW + 2 * MINUTE)
    assert end_lifetimes(now=NOW).counts == {"ends announced": 1, "put to sleep": 1}
    monkeypatch.undo()
    assert read(lease, now=NOW + MINUTE) == "kept"


def test_open_run_of_a_drained_sandbox_is_stopped(lease, sandbox, memory, monkeypatch) -> None:
    def drain(ref: str) -> None:
        announce_end(monkeypatch, memory, NOW + 2 * MINUTE)
        counts.append(end_lifetimes(now=NOW).counts)

    counts: list[dict[str, int]] = []
    monkeypatch.setattr(lifetimes, "SETTLE_SECONDS", 0.0)  # the run ends after this pass
    with memory.before("exec", drain):
        run(lease, "true")
    assert counts == [{"ends announced": 1, "runs stopped": 1}]
    assert end_lifetimes(now=NOW + MINUTE).counts == {"put to sleep": 1}
