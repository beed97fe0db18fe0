"""Last state that cannot be read at once: retried after a restart, and given up only if the sandbox itself withholds it.

Each verb of the provider that a destroy or an eviction uses fails once, and nothing is lost. State is dropped with an event,
never with a log line alone."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import EnvironmentType, Lease
from sandboxes import destruction, process_restarts, processes
from sandboxes.models import Attachment, Pool, RestartPolicy, Sandbox, Snapshot
from sandboxes.models.state import DataEvent, DataFile
from sandboxes.processes import ProcessSpec
from sandboxes.providers.base import DATA
from sandboxes.providers.errors import Missing, ProviderError, Rejected, SandboxUnreadable, Unavailable
from sandboxes.providers.memory import File, MemoryProvider
from sandboxes.state import pruning
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, get_sandbox, update_pool, write
from tests.support.storage.slow_work import VirtualTime
from tests.support.storage.state import sh

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
LATE_FILE = f"{DATA}/late"
UNAVAILABLE, WITHHELD = Unavailable("no answer"), SandboxUnreadable("no progress of look")
VERBS = ("resume", "kill_all", "manifest", "get_files", "size", "stats", "destroy")
FAILURES = (UNAVAILABLE, WITHHELD, Rejected("HTTP 403"), Missing("It stopped."))
# Errors of these verbs have another effect than a failed try: a reading is optional, and what is missing is destroyed.
OPTIONAL = {("stats", failure) for failure in FAILURES} | {("destroy", FAILURES[3])}


@pytest.fixture
def used(grant: Callable[..., Lease], memory: MemoryProvider) -> Lease:
    """Lease whose sandbox is suspended, with unsaved files in /workspace, and in /data after the last command."""
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=1))
    lease: Lease = grant(max_ttl=24 * HOUR, ttl=24 * HOUR)
    write(lease)
    assert passes.suspend_waiting(now=NOW + MINUTE).counts == {"suspended": 1}
    memory.files(get_sandbox(lease).ref)[LATE_FILE] = File(b"late\n")
    memory.calls.clear()
    return lease


def find_tries(lease: Lease) -> tuple[str, int]:
    sandbox = Sandbox.objects.get(holder=lease.pk)
    return sandbox.state, sandbox.tries


def assert_stored(lease: Lease) -> None:
    assert DataFile.objects.filter(path="late", removed=False).exists()
    assert Snapshot.objects.filter(holder=lease.pk, forgotten_at__isnull=True).exists()
    assert not DataEvent.objects.exists()


def count_calls(memory: MemoryProvider, verb: str) -> int:
    return [name for name, _ in memory.calls].count(verb)


def test_a_destroy_uses_these_verbs(used: Lease, memory: MemoryProvider) -> None:
    leasing.release(used.pk, now=NOW + 2 * MINUTE)
    assert sweeps.reclaim(now=NOW + 2 * MINUTE).counts == {"destroyed": 1, "leases closed": 1}
    assert {name for name, _ in memory.calls} == {*VERBS}
    assert_stored(used)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_lost_if_a_verb_of_a_destroy_fails_once(
    used: Lease, memory: MemoryProvider, verb: str, failure: ProviderError
) -> None:
    leasing.release(used.pk, now=NOW + 2 * MINUTE)
    memory.fail(verb, failure, times=1)
    if (verb, failure) not in OPTIONAL:
        assert sweeps.reclaim(now=NOW + 2 * MINUTE).failures
        assert find_tries(used) == ("destroying", 1)
        assert memory.files(Sandbox.objects.get(holder=used.pk).ref)
    assert sweeps.reclaim(now=NOW + 3 * MINUTE).counts == {"destroyed": 1, "leases closed": 1}
    assert_stored(used)


@pytest.mark.parametrize("failure", FAILURES[:3], ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("verb", VERBS[:-2])
def test_nothing_is_lost_if_a_verb_of_an_eviction_fails_once(
    used: Lease, memory: MemoryProvider, verb: str, failure: ProviderError
) -> None:
    Sandbox.objects.update(idle_at=NOW + 2 * MINUTE)
    memory.fail(verb, failure, times=1)
    assert passes.evict_idle(now=NOW + 2 * MINUTE).failures
    assert (get_sandbox(used).state, get_sandbox(used).persist_failures) == ("waiting", 1)
    assert passes.evict_idle(now=NOW + 5 * MINUTE).counts == {"put to sleep": 1}
    assert_stored(used)


def test_changes_of_a_command_that_outlived_its_lease_are_stored_after_a_failed_scan(
    grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    lease = grant()
    with memory.after("exec", lambda ref: leasing.release(lease.pk, now=NOW)), pytest.raises(LeaseEnded):
        sh(lease, "echo late >/data/late; echo kept >f")
    with memory.fail("manifest", UNAVAILABLE, times=1):
        assert sweeps.reclaim(now=NOW).failures
    assert sweeps.reclaim(now=NOW + MINUTE).counts["destroyed"] == 1
    assert_stored(lease)


def test_processes_that_a_failed_eviction_has_ended_are_restarted_by_their_policy(
    grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    lease = grant()
    with execution.use_lease(lease.pk, now=NOW) as request:
        started = [
            processes.start_process(request, ProcessSpec(["sleep", "1000"], {}, restart=restart), now=NOW)
            for restart in (RestartPolicy.ALWAYS, RestartPolicy.NEVER)
        ]
    with memory.fail("size", UNAVAILABLE):
        assert passes.evict_idle(now=NOW + HOUR).failures
    for process in started:
        process.refresh_from_db()
        assert (process.state, "eviction" in process.note) == ("gone", True)
    assert process_restarts.restart_due(now=NOW + HOUR + MINUTE).counts == {"processes restarted": 1}


def test_state_that_an_engine_does_not_deliver_waits_in_quarantine_and_is_discarded_with_an_event(
    used: Lease, memory: MemoryProvider, settings
) -> None:
    settings.DESTROY_TRIES = 4
    leasing.release(used.pk, now=NOW + 2 * MINUTE)
    with memory.fail("manifest", UNAVAILABLE):
        for n in range(6):
            sweeps.reclaim(now=NOW + (n + 1) * HOUR)
    assert find_tries(used) == ("destroying", 4) and Sandbox.objects.get(holder=used.pk).quarantined_at
    assert count_calls(memory, "restart") == 0 and not DataEvent.objects.exists()
    assert leasing.discard(used.pk, now=NOW + 9 * HOUR, actor="root", detail="the engine is gone")
    assert sweeps.reclaim(now=NOW + 9 * HOUR).counts == {"destroyed": 1, "leases closed": 1}
    assert DataEvent.objects.get().kind == "dropped"


@pytest.mark.parametrize(("verb", "dropped"), [("manifest", [DATA]), ("size", ["/workspace"])], ids=["/data", "/workspace"])
def test_state_that_the_sandbox_withholds_is_given_up_in_the_last_try_and_the_rest_is_stored(
    used: Lease, memory: MemoryProvider, settings, verb: str, dropped: list[str]
) -> None:
    settings.DESTROY_TRIES = 4
    evict(used, now=NOW + 2 * MINUTE)
    write(used, "newer", now=NOW + 3 * MINUTE)
    ref = get_sandbox(used).ref
    memory.files(ref)[LATE_FILE] = File(b"newer\n")
    memory.calls.clear()
    leasing.release(used.pk, now=NOW + 4 * MINUTE)
    memory.fail(verb, WITHHELD)
    for n in range(3):
        assert sweeps.reclaim(now=NOW + (n + 1) * HOUR).failures
        assert not DataEvent.objects.exists() and memory.files(ref)
    assert sweeps.reclaim(now=NOW + 4 * HOUR).counts == {"destroyed": 1, "leases closed": 1}
    assert (count_calls(memory, "kill_all"), count_calls(memory, "restart")) == (4, 3)
    events = DataEvent.objects.filter(holder=used.pk, kind="dropped")
    assert [event.detail.split()[0] for event in events] == dropped
    assert "in 4 tries. Last copy: 2026-11-21 12:" in events[0].detail and "no progress of look" in events[0].detail
    assert not Sandbox.objects.get(holder=used.pk).quarantined_at
    if verb == "manifest":
        assert Snapshot.objects.filter(holder=used.pk, forgotten_at__isnull=True).latest("at").at > NOW + 4 * MINUTE
    else:
        assert DataFile.objects.get(path="late").at > NOW + 4 * MINUTE


def test_a_workspace_above_its_limit_does_not_keep_its_place_for_ever(
    used: Lease, pool: Pool, memory: MemoryProvider, settings
) -> None:
    settings.DESTROY_TRIES = 3
    update_pool(pool, workspace_limit_mib=1)
    memory.files(get_sandbox(used).ref)["/workspace/big"] = File(bytes(40 << 20))
    leasing.release(used.pk, now=NOW + 2 * MINUTE)
    for n in range(3):
        sweeps.reclaim(now=NOW + (n + 1) * HOUR)
    assert find_tries(used)[0] == "destroyed" and Pool.objects.get(pk=pool.pk).used == 0
    assert "/workspace could not be read in 3 tries. No copy. The workspace holds 40 MiB" in DataEvent.objects.get().detail
    assert DataFile.objects.filter(path="late").exists()


def test_state_that_was_given_up_is_not_read_again_if_the_destroy_fails(used: Lease, memory: MemoryProvider, settings) -> None:
    settings.DESTROY_TRIES = 3
    leasing.release(used.pk, now=NOW + 2 * MINUTE)
    memory.fail("manifest", WITHHELD)
    memory.fail("destroy", UNAVAILABLE, times=1)
    for n in range(3):
        assert sweeps.reclaim(now=NOW + (n + 1) * HOUR).failures
    scans = count_calls(memory, "manifest")
    sandbox = Sandbox.objects.get(holder=used.pk)
    assert sandbox.quarantined_at
    assert destruction.retry_destroy(sandbox.pk, now=NOW + 5 * HOUR)
    assert sweeps.reclaim(now=NOW + 5 * HOUR).counts == {"destroyed": 1, "leases closed": 1}
    assert (count_calls(memory, "manifest"), DataEvent.objects.count()) == (scans, 1)


def test_a_sandbox_that_withholds_its_files_does_not_keep_those_of_others_from_being_stored(
    grant: Callable[..., Lease], memory: MemoryProvider, memory_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass has time for one sandbox that stalls. The chance that all passes begin with the same one is a millionth."""
    slow, other = grant("did:plc:slow"), grant("did:plc:other")
    with memory_store.fail("upload", StoreError("memory", "upload", "store down")):
        for lease in (slow, other):
            sh(lease, f"echo late >{LATE_FILE}")
    Attachment.objects.filter(holder=slow.pk).update(unsaved_since=NOW - MINUTE)
    time, slow_ref = VirtualTime(monkeypatch), get_sandbox(slow).ref

    def stall(ref: str) -> None:
        if ref == slow_ref:
            time.elapsed += 2 * MINUTE
            raise WITHHELD

    with memory.before("manifest", stall):
        for n in range(20):
            pruning.persist_unsaved(now=NOW + (n + 1) * MINUTE)
    assert [*DataFile.objects.filter(path="late").values_list("data__agent_did", flat=True)] == ["did:plc:other"]
