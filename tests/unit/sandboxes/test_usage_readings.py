"""Usage readings: every microsecond of the provider's counter is in exactly one reading, across crashes and races."""

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.utils import timezone

from leases import execution, leasing
from leases.models import Lease
from sandboxes import destruction, eviction
from sandboxes.models import Pool, Reading, Sandbox
from sandboxes.pool import starts
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.sweeps import measurements, passes
from sandboxes.usage import readings
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, run, update_pool

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: metering aggregates in the database")]
SECOND, MIB = 10**6, 1 << 20


@pytest.fixture
def box(grant: Callable[..., Lease], memory: MemoryProvider) -> Sandbox:
    lease = grant(ttl=timedelta(hours=9))
    run(lease)
    return get_sandbox(lease)


def read(box: Sandbox, memory: MemoryProvider, *, after: timedelta, **more: Any) -> Reading | None:
    box.refresh_from_db()
    return readings.record_reading(box, memory, now=NOW + after, **more)


def cpu(box: Sandbox) -> list[int]:
    return [*Reading.objects.filter(sandbox=box).order_by("pk").values_list("cpu_micros", flat=True)]


def test_a_reading_holds_the_use_since_the_previous_one(box: Sandbox, memory: MemoryProvider) -> None:
    memory.use(box.ref, cpu_micros=3 * SECOND, memory_bytes=40 * MIB + 1)
    first = read(box, memory, after=MINUTE)
    memory.use(box.ref, cpu_micros=2 * SECOND, memory_bytes=0)
    second = read(box, memory, after=3 * MINUTE)
    assert first and second
    ready = box.transitions.get(to="warm").at
    assert [(each.number, each.counted, each.cpu_micros, each.memory_mib, each.holder) for each in (first, second)] == [
        (1, 3 * SECOND, 3 * SECOND, 41, box.holder), (2, 5 * SECOND, 2 * SECOND, 0, box.holder),
    ]  # fmt: skip
    assert (first.since, second.since) == (ready, first.at)
    assert NOW + 3 * MINUTE <= second.at < NOW + 4 * MINUTE


def test_a_nearly_idle_sandbox_gets_no_reading(box: Sandbox, memory: MemoryProvider) -> None:
    assert read(box, memory, after=MINUTE), "where the counter began"
    memory.use(box.ref, cpu_micros=readings.MIN_CPU_MICROSECONDS - 1)
    assert read(box, memory, after=2 * MINUTE) is None
    memory.use(box.ref, cpu_micros=1)
    assert read(box, memory, after=3 * MINUTE)
    assert cpu(box) == [0, readings.MIN_CPU_MICROSECONDS]


@pytest.mark.parametrize("ends", ["sleeps", "is given up"])
def test_a_final_reading_is_stored_before_the_process_ends(ends: str, box: Sandbox, memory: MemoryProvider) -> None:
    read(box, memory, after=MINUTE)
    memory.use(box.ref, cpu_micros=7)
    if ends == "sleeps":
        assert eviction.evict(box.pk, now=NOW + 2 * MINUTE, reason="test")
    else:
        leasing.release(box.holder, now=NOW + 2 * MINUTE)
        assert destruction.destroy(box.pk, now=NOW + 2 * MINUTE)
    assert cpu(box) == [0, 7]


@pytest.mark.parametrize("ends", ["sleeps", "is given up"])
def test_a_failed_final_reading_is_stated_by_the_transition_and_prevents_nothing(
    ends: str, box: Sandbox, memory: MemoryProvider
) -> None:
    memory.fail("stats", Unavailable("no answer"))
    if ends == "sleeps":
        assert eviction.evict(box.pk, now=NOW + 2 * MINUTE, reason="test")
    else:
        leasing.release(box.holder, now=NOW + 2 * MINUTE)
        assert destruction.destroy(box.pk, now=NOW + 2 * MINUTE)
    assert "last reading is unknown" in box.transitions.latest("pk").reason


def test_the_next_incarnation_starts_from_zero(box: Sandbox, memory: MemoryProvider) -> None:
    memory.use(box.ref, cpu_micros=5)
    eviction.evict(box.pk, now=NOW + MINUTE, reason="test")
    execution.exec_command(box.holder, Command(argv=["true"], timeout=MINUTE), now=NOW + 2 * MINUTE)
    box.refresh_from_db()
    memory.use(box.ref, cpu_micros=3)
    read(box, memory, after=3 * MINUTE)
    found = Reading.objects.filter(sandbox=box).order_by("pk").values_list("incarnation", "number", "cpu_micros")
    assert [*found] == [(1, 1, 5), (2, 1, 3)]


def test_a_restarted_counter_is_counted_from_zero(box: Sandbox, memory: MemoryProvider) -> None:
    """As after a restart of the engine, when the next exec starts the container again."""
    memory.use(box.ref, cpu_micros=5 * SECOND)
    read(box, memory, after=MINUTE)
    memory.stop(box.ref)
    assert read(box, memory, after=2 * MINUTE) is None, "it does not run"
    memory.create(starts.build_spec(Sandbox.objects.select_related("pool").get(pk=box.pk)))
    memory.use(box.ref, cpu_micros=2 * SECOND)
    read(box, memory, after=3 * MINUTE)
    assert cpu(box) == [5 * SECOND, 2 * SECOND]


@pytest.mark.parametrize("is_read", [True, False])
def test_use_before_the_claim_belongs_to_no_lease(is_read: bool, pool: Pool, grant, memory: MemoryProvider) -> None:
    update_pool(pool, warm_target=1)
    passes.warm_pools(now=NOW)
    box, hour = Sandbox.objects.get(), timedelta(hours=1)
    memory.use(box.ref, cpu_micros=SECOND, memory_bytes=10 * MIB)
    if is_read:
        read(box, memory, after=MINUTE)
    lease = grant(now=NOW + 5 * hour)
    execution.ensure_sandbox_ready(lease.pk, now=NOW + 5 * hour)
    memory.use(box.ref, cpu_micros=2 * SECOND, memory_bytes=20 * MIB)
    read(box, memory, after=5 * hour + MINUTE)
    claimed = box.transitions.get(reason="claimed").at
    found = [*Reading.objects.order_by("number")]
    assert [each.number for each in found] == [*range(1, len(found) + 1)]
    assert [(each.since == claimed, each.holder, each.memory_mib) for each in found[-1:]] == [(True, lease.pk, 20)]
    assert [(each.holder, each.memory_mib) for each in found[:-1]] == ([(None, 10)] * 2 if is_read else [(None, 0)])
    assert all(before.at == after.since for before, after in pairwise(found))
    assert sum(cpu(box)) == 3 * SECOND
    memory.use(box.ref, cpu_micros=SECOND)
    later = read(box, memory, after=6 * hour)
    assert later and (later.since, later.cpu_micros) == (found[-1].at, SECOND)


def test_a_failed_start_is_not_read(grant: Callable[..., Lease], memory: MemoryProvider) -> None:
    lease = grant()
    memory.fail("wait_ready", Unavailable("not ready"))
    memory.after("create", lambda ref: memory.use(ref, cpu_micros=SECOND))
    with pytest.raises(Exception, match="could not be started"):
        run(lease)
    box = Sandbox.objects.get(holder=lease.pk)
    assert destruction.destroy(box.pk, now=NOW + MINUTE)
    assert not Reading.objects.exists() and ("stats", box.ref) in memory.calls


def test_a_provider_without_usage_is_not_called(box: Sandbox, memory: MemoryProvider) -> None:
    Sandbox.objects.filter(pk=box.pk).update(measured=False)
    assert read(box, memory, after=MINUTE) is None
    assert "stats" not in {verb for verb, _ in memory.calls} and not readings.find_readable().exists()


@pytest.mark.parametrize(("where", "more"), [("use asked", 2), ("reading made", 2), ("reading made", 0)])
def test_concurrent_readings_do_not_overlap(where: str, more: int, box: Sandbox, memory, at_checkpoint) -> None:
    """The slower worker's counter value is included in the reading that the faster worker stores first."""
    read(box, memory, after=MINUTE)
    memory.use(box.ref, cpu_micros=5)

    def rival() -> None:
        memory.use(box.ref, cpu_micros=more)
        assert read(box, memory, after=3 * MINUTE, min_cpu_micros=1)

    at_checkpoint(where, rival)
    assert read(box, memory, after=2 * MINUTE, min_cpu_micros=1) is None
    assert cpu(box) == [0, 5 + more]


def test_a_crash_after_the_usage_call_loses_nothing(box: Sandbox, memory: MemoryProvider, crash_at) -> None:
    memory.use(box.ref, cpu_micros=5)
    leasing.release(box.holder, now=NOW + MINUTE)
    with crash_at("use asked"):
        destruction.destroy(box.pk, now=NOW + MINUTE)
    passes.destroy_due(now=NOW + timedelta(hours=1))
    assert (Sandbox.objects.get(pk=box.pk).state, cpu(box)) == ("destroyed", [5])


def test_an_unreadable_sandbox_is_destroyed_nevertheless(box: Sandbox, memory: MemoryProvider) -> None:
    memory.fail("stats", Unavailable("no answer"))
    leasing.release(box.holder, now=NOW + MINUTE)
    assert destruction.destroy(box.pk, now=NOW + MINUTE) and not Reading.objects.exists()


def test_the_sweep_reads_live_sandboxes_and_continues_after_a_failure(grant, box: Sandbox, memory: MemoryProvider) -> None:
    other = grant(environment="other", ttl=timedelta(hours=9))
    run(other, now=NOW + MINUTE)
    with memory.fail("stats", Unavailable("no answer"), times=1):  # the most recently used sandbox is read first
        result = measurements.record_readings(now=NOW + 5 * MINUTE)
    assert (result.counts, len(result.failures)) == ({"read": 1}, 1)
    assert measurements.record_readings(now=NOW + 10 * MINUTE).counts == {"read": 1}
    memory.vanish(box.ref)
    assert measurements.record_readings(now=NOW + 15 * MINUTE).counts == {"gone": 1}


# --- with Docker ------------------------------------------------------------------------------------------------------


@pytest.mark.docker
@pytest.mark.django_db(transaction=True)
def test_the_cpu_of_a_container_is_read_over_its_whole_life(docker_pool: Pool) -> None:
    """A loop uses two seconds of CPU by its own clock, partly before the first reading and partly before the eviction."""
    burn = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"
    lease = leasing.acquire(leasing.LeaseRequest("did:plc:ada", "cpu", "coding", pool=docker_pool.name), now=timezone.now())[0]

    def use(seconds: float) -> None:
        argv = ["python3", "-c", burn.format(seconds)]
        assert execution.exec_command(lease.pk, Command(argv=argv, timeout=MINUTE), now=timezone.now())[1].exit_code == 0

    use(0.7)
    assert measurements.record_readings(now=timezone.now()).counts["read"] >= 1
    use(1.3)
    box = Sandbox.objects.get(holder=lease.pk)
    assert eviction.evict(box.pk, now=timezone.now(), reason="test")
    found = [*Reading.objects.filter(sandbox=box).order_by("number")]
    assert all(later.since == earlier.at for earlier, later in pairwise(found))
    first, rest = found[0].cpu_micros / SECOND, sum(each.cpu_micros for each in found[1:]) / SECOND
    # The loop's clock and the kernel's counter tick apart; starting commands and storing files use CPU as well.
    assert 0.65 <= first <= 0.7 + 1 and 1.25 <= rest <= 1.3 + 1
    assert 1 <= found[0].memory_mib <= box.memory_mib
