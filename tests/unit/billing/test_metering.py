"""Metering: intervals, time, storage and model calls, and passes that are repeated, concurrent or interrupted."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from time import monotonic
from typing import Any

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from billing import alive_time, metering
from billing.intervals import StateInterval, build_intervals, split_by_day
from billing.metering import meter_usage
from billing.models import CostRecord, UsageKind, UsageRecord
from billing.totals import BILLABLE_STATES
from controlplane import schedules
from leases import execution, fork, leasing, snapshots, sweeps
from leases.leasing import LeaseRequest
from leases.models import Lease
from sandboxes import lifecycle
from sandboxes.admin.sandboxes import compute_time_alive
from sandboxes.egress import model_pricing
from sandboxes.egress.logs import upstream_records
from sandboxes.models import AgentData, DataSize, LlmCall, Sandbox, Snapshot, Transition
from sandboxes.providers.errors import Unavailable
from sandboxes.runs.operations import Command
from sandboxes.state import workspace
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.billing import HOUR, create_llm_call
from tests.support.model_rates import create_rates

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: metering aggregates in the database")]
NOON, MIDNIGHT = NOW, datetime(2026, 11, 22, tzinfo=UTC)
AnyCallable = Callable[..., Any]


def run_true(lease: Lease, *, now: datetime) -> None:
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=now)


def sum_seconds(**which: Any) -> dict[str, float]:
    """Return seconds by state, rounded to minutes because the verbs take some time."""
    return {state: 60 * round(total / 60) for state, total in sum_exact_seconds(**which).items() if round(total / 60)}


def list_usage_records() -> list[tuple[Any, ...]]:
    """Return all usage records without their ids."""
    names = [field.attname for field in UsageRecord._meta.concrete_fields if field.name != "id"]
    return sorted(UsageRecord.objects.values_list(*names), key=str)


def assert_derivation_is_repeatable(now: datetime) -> None:
    before = list_usage_records()
    metering.reset_usage()
    meter_usage(now=now)
    assert list_usage_records() == before


@pytest.fixture
def cold_lease(grant: AnyCallable) -> Lease:
    """A lease whose sandbox ran from NOON on and is stored in a snapshot an hour later."""
    lease: Lease = grant(sleep_after=30 * MINUTE, ttl=20 * HOUR)
    run_true(lease, now=NOON)
    passes.evict_idle(now=NOON + HOUR)
    return lease


def sum_exact_seconds(**which: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in UsageRecord.objects.filter(item=UsageKind.TIME, **which):
        total[row.state] += (row.ended_at - row.began_at) / timedelta(seconds=1)  # type: ignore[assignment]
    return total


# --- intervals --------------------------------------------------------------------------------------------------------


def test_each_transition_begins_an_interval_and_the_last_is_open_unless_destroyed() -> None:
    life = [(3, "warming", None, NOW), (7, "warm", None, NOW + MINUTE)]
    closed, opened = (3, "warming", None, NOW, NOW + MINUTE), (7, "warm", None, NOW + MINUTE, NOW + HOUR)
    assert [*build_intervals(life, until=NOW + HOUR)] == [StateInterval(*closed), StateInterval(*opened, open=True)]
    destroyed = [*life, (9, "destroyed", None, NOW + HOUR)]
    assert [*build_intervals(destroyed, until=NOW + 2 * HOUR)] == [StateInterval(*closed), StateInterval(*opened)]
    assert [*build_intervals([], until=NOW)] == []


def test_clock_jump_back_neither_adds_nor_removes_time() -> None:
    minutes = [0, 10, 4, 6, 12, 11]
    life = [(pk, "warm", None, NOW + at * MINUTE) for pk, at in enumerate(minutes)]
    intervals = [*build_intervals(life, until=NOW)]
    assert [(each.began_at - NOW) / MINUTE for each in intervals] == [0, 10, 10, 10, 12, 12]
    assert sum((each.ended_at - each.began_at for each in intervals), timedelta(0)) == 12 * MINUTE


@pytest.mark.parametrize(
    ("began", "ended", "days"),
    [
        (NOON, NOON, []),
        (NOON, MIDNIGHT, [(date(2026, 11, 21), 12)]),
        (NOON, MIDNIGHT + HOUR, [(date(2026, 11, 21), 12), (date(2026, 11, 22), 1)]),
        (datetime(2028, 2, 28, 23, tzinfo=UTC), datetime(2028, 3, 1, 1, tzinfo=UTC),
         [(date(2028, 2, 28), 1), (date(2028, 2, 29), 24), (date(2028, 3, 1), 1)]),
        (datetime(2026, 12, 31, 23, tzinfo=UTC), datetime(2027, 1, 1, 2, tzinfo=UTC),
         [(date(2026, 12, 31), 1), (date(2027, 1, 1), 2)]),
    ],
)  # fmt: skip
def test_intervals_are_split_at_utc_midnight(began: datetime, ended: datetime, days: list[tuple[date, float]]) -> None:
    assert [(day, (end - start) / HOUR) for day, start, end in split_by_day(began, ended)] == days


# --- time -------------------------------------------------------------------------------------------------------------


def test_lease_time_is_recorded_by_state_and_day(grant: AnyCallable, memory: Any) -> None:
    lease = grant(sleep_after=30 * MINUTE, ttl=20 * HOUR)
    run_true(lease, now=NOON)
    passes.evict_idle(now=NOON + HOUR)
    meter_usage(now=NOON + 2 * HOUR)
    assert sum_seconds(holder=lease.pk) == {"waiting": 3600, "cold": 3600}
    run_true(lease, now=NOON + 3 * HOUR)
    leasing.release(lease.pk, now=MIDNIGHT + HOUR)
    meter_usage(now=MIDNIGHT + 2 * HOUR)
    assert sum_seconds(holder=lease.pk) == {"waiting": 3600 + 10 * 3600, "cold": 2 * 3600, "destroying": 3600}
    assert sum_seconds(holder=lease.pk, day=date(2026, 11, 22)) == {"waiting": 3600, "destroying": 3600}
    sweeps.reclaim(now=MIDNIGHT + 3 * HOUR)
    meter_usage(now=MIDNIGHT + 4 * HOUR)
    assert sum_seconds(holder=lease.pk, state="destroying") == {"destroying": 2 * 3600}
    row = UsageRecord.objects.filter(state="waiting").first()
    assert row is not None
    assert (row.agent_did, row.environment_id, row.provider, row.memory_mib) == ("did:plc:ada", "game-1", "memory", 512)
    assert Sandbox.objects.get().metered
    assert "time" not in meter_usage(now=MIDNIGHT + 9 * HOUR)


def test_cold_time_is_recorded_by_the_hour_until_its_exact_end(grant: AnyCallable, memory: Any) -> None:
    """A pass does not write the records of all cold sandboxes again."""
    lease = grant(sleep_after=30 * MINUTE, ttl=20 * HOUR)
    run_true(lease, now=NOON)
    passes.evict_idle(now=NOON + 45 * MINUTE)
    for after, is_written, minutes in (
        (46 * MINUTE, True, 0), (50 * MINUTE, False, 0), (HOUR, True, 15), (HOUR + 59 * MINUTE, False, 15),
        (2 * HOUR + MINUTE, True, 75), (2 * HOUR + 59 * MINUTE, False, 75),
    ):  # fmt: skip
        assert bool(meter_usage(now=NOON + after)["time"]) == is_written
        assert sum_seconds(holder=lease.pk).get("cold", 0) == minutes * 60
    run_true(lease, now=NOON + 3 * HOUR + 10 * MINUTE)
    meter_usage(now=NOON + 3 * HOUR + 20 * MINUTE)
    assert sum_seconds(holder=lease.pk, state="cold") == {"cold": (2 * 60 + 25) * 60}


def test_time_without_a_lease_has_no_agent(grant: AnyCallable, pool: Any, memory: Any) -> None:
    type(pool).objects.filter(pk=pool.pk).update(warm_target=1)
    passes.warm_pools(now=NOON)
    lease = grant(now=NOON + HOUR, ttl=9 * HOUR)
    execution.ensure_sandbox_ready(lease.pk, now=NOON + HOUR)
    meter_usage(now=NOON + 2 * HOUR)
    assert sum_seconds(holder=None, agent_did="") == {"warm": 3600}
    assert sum_seconds(holder=lease.pk, agent_did="did:plc:ada") == {"warm": 3600}


def test_failed_start_has_no_ready_time(grant: AnyCallable, memory: Any) -> None:
    lease = grant()
    with memory.fail("create", Unavailable("no"), times=99), pytest.raises(Exception, match="no"):
        run_true(lease, now=NOON)
    sweeps.reclaim(now=NOON + HOUR)
    meter_usage(now=NOON + 2 * HOUR)
    assert set(sum_exact_seconds()) <= {"warming", "destroying"}
    assert Transition.objects.filter(to="destroying").exists()


def test_usage_metered_ahead_of_time_is_corrected_by_the_next_transition(grant: AnyCallable, memory: Any) -> None:
    lease = grant(ttl=9 * HOUR)
    run_true(lease, now=NOON)
    meter_usage(now=NOON + timedelta(days=3))  # by a wrong clock
    assert UsageRecord.objects.filter(state="waiting").count() == 4
    leasing.release(lease.pk, now=NOON + HOUR)
    sweeps.reclaim(now=NOON + HOUR)
    meter_usage(now=NOON + 2 * HOUR)
    assert sum_seconds() == {"waiting": 3600}


def test_sandbox_destroyed_after_a_clock_jump_is_not_alive(grant: AnyCallable, memory: Any) -> None:
    lease = grant(ttl=9 * HOUR)
    run_true(lease, now=NOON + HOUR)
    leasing.release(lease.pk, now=NOON)
    sweeps.reclaim(now=NOON)
    assert alive_time.get_alive_time(lease.pk, now=NOON + 9 * HOUR) < MINUTE
    assert compute_time_alive(Sandbox.objects.get(), NOON + 9 * HOUR) < MINUTE


SUBJECTS: dict[str, dict[str, Any]] = {
    "time": {"item": UsageKind.TIME},
    "use": {"item": UsageKind.USE},
    "runs": {"item": UsageKind.RUNS},
    "snapshots": {"item": UsageKind.STORAGE, "source__startswith": "snapshot"},
    "data": {"item": UsageKind.STORAGE, "source__startswith": "data"},
    "tokens": {"item": UsageKind.TOKENS},
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_crash_in_a_batch_writes_nothing_and_the_next_pass_completes(subject: str, cold_lease: Lease) -> None:
    create_llm_call(cold_lease)
    DataSize.note("did:plc:ada", 1000, now=NOON)

    def die(reached: str, at: object) -> None:
        if (reached, at) == ("metered", subject):
            raise SimulatedCrash

    lifecycle.CHECKPOINT_HOOKS.append(die)
    try:
        with pytest.raises(SimulatedCrash):
            meter_usage(now=NOON + 2 * HOUR)
    finally:
        lifecycle.CHECKPOINT_HOOKS.remove(die)
    assert not UsageRecord.objects.filter(**SUBJECTS[subject]).exists()
    meter_usage(now=NOON + 2 * HOUR)
    assert all(UsageRecord.objects.filter(**fields).exists() for fields in SUBJECTS.values())
    assert_derivation_is_repeatable(now=NOON + 2 * HOUR)


@pytest.mark.django_db(transaction=True)
def test_concurrent_passes_count_everything_once(grant: AnyCallable, memory: Any) -> None:
    leases = [grant(environment=f"e{number}", ttl=9 * HOUR) for number in range(6)]
    began = monotonic()
    for lease in leases:
        run_true(lease, now=NOON)
    verbs_seconds = monotonic() - began

    def act(number: int) -> None:
        try:
            if number % 2:
                meter_usage(now=NOON + HOUR + number * MINUTE)
            else:
                leasing.release(leases[number // 2].pk, now=NOON + HOUR)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4 if connection.vendor == "postgresql" else 2) as threads:
        [*threads.map(act, range(12))]
    sweeps.reclaim(now=NOON + HOUR)
    meter_usage(now=NOON + 2 * HOUR)
    total, hours, tolerance = sum_exact_seconds(), 6 * 3600, 0.01
    billable = sum(total[state] for state in BILLABLE_STATES)
    assert hours - verbs_seconds - tolerance <= total["waiting"] <= billable <= hours + tolerance  # less the time of the verbs
    assert_derivation_is_repeatable(now=NOON + 2 * HOUR)


# --- storage ----------------------------------------------------------------------------------------------------------


def test_snapshot_storage_lasts_until_it_is_forgotten(cold_lease: Lease) -> None:
    kept = Snapshot.objects.get()
    meter_usage(now=NOON + 2 * HOUR)
    meter_usage(now=MIDNIGHT + HOUR)
    rows = UsageRecord.objects.filter(source__startswith="snapshot").order_by("day")
    assert [round((row.ended_at - row.began_at) / HOUR) for row in rows] == [11, 1]
    assert {(row.holder, row.agent_did, row.size_bytes) for row in rows} == {(cold_lease.pk, "did:plc:ada", kept.size_bytes)}
    Snapshot.objects.filter(pk=kept.pk).update(forgotten_at=NOON + 3 * HOUR)  # earlier than the usage already written
    meter_usage(now=MIDNIGHT + 2 * HOUR)
    assert [round((row.ended_at - row.began_at) / HOUR) for row in rows.all()] == [2]
    assert Snapshot.objects.get().metered


def test_live_snapshot_is_read_once_an_hour(cold_lease: Lease) -> None:
    source = f"snapshot {Snapshot.objects.get().pk}"
    meter_usage(now=NOON + 2 * HOUR)
    with CaptureQueriesContext(connection) as captured:
        meter_usage(now=NOON + 2 * HOUR + 59 * MINUTE)
    assert not [each["sql"] for each in captured if source in each["sql"]]
    meter_usage(now=NOON + 3 * HOUR)
    assert [ended for _, ended in list_snapshot_times()] == [NOON + 3 * HOUR]
    workspace.forget(Snapshot.objects.get(), now=NOON + 3 * HOUR + 10 * MINUTE)
    meter_usage(now=NOON + 3 * HOUR + 20 * MINUTE)
    assert [ended for _, ended in list_snapshot_times()] == [NOON + 3 * HOUR + 10 * MINUTE]
    assert_derivation_is_repeatable(now=NOON + 3 * HOUR + 20 * MINUTE)


def list_snapshot_times() -> list[tuple[datetime, datetime]]:
    rows = UsageRecord.objects.filter(source__startswith="snapshot").order_by("began_at")
    return [*rows.values_list("began_at", "ended_at")]


def test_snapshot_forgotten_during_a_pass_ends_in_the_next_pass(cold_lease: Lease) -> None:
    kept = Snapshot.objects.get()
    rivals = [lambda: workspace.forget(kept, now=NOON + 2.5 * HOUR)]

    def rival(execute: AnyCallable, sql: str, params: Any, *more: Any) -> Any:
        if rivals and sql.startswith("INSERT") and f"snapshot {kept.pk}" in params:
            rivals.pop()()
        return execute(sql, params, *more)

    with connection.execute_wrapper(rival):
        meter_usage(now=NOON + 3 * HOUR)
    assert not rivals
    meter_usage(now=NOON + 4 * HOUR)
    assert [row.ended_at for row in UsageRecord.objects.filter(source=f"snapshot {kept.pk}")] == [NOON + 2.5 * HOUR]


def test_shared_objects_count_once_until_their_last_reference_is_forgotten(cold_lease: Lease) -> None:
    kept = Snapshot.objects.get()
    restored = snapshots.restore_snapshot(cold_lease.pk, kept.pk, now=NOON + HOUR)
    meter_usage(now=NOON + 2 * HOUR)
    named = snapshots.take_snapshot(cold_lease.pk, name="asleep", now=NOON + 2 * HOUR)
    pool = kept.sandbox.pool.name
    request = LeaseRequest(agent_did="did:plc:bob", environment_id="fork", environment_type="catan", pool=pool)
    forked, _ = fork.fork(cold_lease, request, now=NOON + 2 * HOUR)
    ends = {kept: 3, restored: 4, workspace.find_latest(forked.pk): 5, named: 6}
    for copy, hours in ends.items():
        assert copy and workspace.forget(copy, now=NOON + hours * HOUR)
        meter_usage(now=NOON + (hours + 1) * HOUR)
        row = UsageRecord.objects.get(source__startswith="snapshot")
        assert (row.source, row.agent_did, row.holder) == (f"snapshot {kept.pk}", "did:plc:ada", cold_lease.pk)
        assert row.ended_at == NOON + (hours if copy == named else hours + 1) * HOUR
    assert not Snapshot.objects.filter(metered=False).exists()
    assert_derivation_is_repeatable(now=NOON + 7 * HOUR)


def test_agent_data_storage_follows_its_size(grant: AnyCallable) -> None:
    for size, hours in ((1000, 0), (1000, 1), (3000, 2), (0, 5), (7, 6)):
        DataSize.note("did:plc:ada", size, now=NOON + hours * HOUR)
    DataSize.note("did:plc:bob", 50, now=NOON + 5 * HOUR)
    meter_usage(now=MIDNIGHT + 2 * HOUR)
    assert list_storage_hours() == [
        ("did:plc:ada", 7, 2), ("did:plc:ada", 7, 6), ("did:plc:ada", 1000, 2), ("did:plc:ada", 3000, 3),
        ("did:plc:bob", 50, 2), ("did:plc:bob", 50, 7),
    ]  # fmt: skip
    assert DataSize.objects.filter(metered=False).count() == 2
    before = list_usage_records()
    meter_usage(now=MIDNIGHT + 2.9 * HOUR)
    assert list_usage_records() == before  # open storage is written once an hour
    assert_derivation_is_repeatable(now=MIDNIGHT + 2.9 * HOUR)


def test_pass_reads_a_stored_object_once_an_hour_by_one_row() -> None:
    DataSize.note("did:plc:ada", 1000, now=NOON - timedelta(days=9))
    meter_usage(now=NOON)
    for now, written, table, read in (
        (NOON + MINUTE, {}, "sandboxes_datasize", [0]),
        (NOON + HOUR, {"data": 1}, "'storage'", [1, 1]),  # the last record, and again to replace it
    ):
        with CaptureQueriesContext(connection) as captured:
            assert meter_usage(now=now) == written
        selects = [each["sql"] for each in captured if table in each["sql"] and each["sql"].startswith("SELECT")]
        with connection.cursor() as cursor:
            assert [len(cursor.execute(sql).fetchall()) for sql in selects] == read


def test_data_size_is_recorded_on_change_and_in_order(grant: AnyCallable, memory: Any) -> None:
    lease = grant()
    sizes = []
    for script in ("echo 12345 >/data/a", "true", "echo 1 >/data/a"):
        execution.exec_command(lease.pk, Command(argv=["sh", "-c", script], timeout=MINUTE), now=NOON)
        sizes.append(AgentData.objects.get(agent_did="did:plc:ada").size_bytes)
    recorded = [row.size_bytes for row in DataSize.objects.filter(agent_did="did:plc:ada").order_by("pk")]
    assert (recorded, sizes) == ([sizes[0], sizes[0] - 4], [sizes[0], sizes[0], sizes[0] - 4])
    DataSize.note("did:plc:ada", 2, now=NOON - HOUR)
    *_, before, last = DataSize.objects.order_by("pk")
    assert (last.size_bytes, last.at) == (2, before.at)


def list_storage_hours() -> list[tuple[str, int, float]]:
    """Return (agent, bytes, hours) of the storage records."""
    rows = UsageRecord.objects.filter(item=UsageKind.STORAGE)
    return sorted((row.agent_did, row.size_bytes, (row.ended_at - row.began_at) / HOUR) for row in rows)


# --- calls ------------------------------------------------------------------------------------------------------------


def list_token_records() -> list[tuple[Any, ...]]:
    rows = UsageRecord.objects.filter(item=UsageKind.TOKENS).order_by("model", "day")
    return [(row.model, row.calls, row.unpriced, row.input_tokens, row.output_tokens, row.usd) for row in rows]


def test_calls_of_a_lease_and_model_are_summed_exactly_by_day(grant: AnyCallable) -> None:
    lease = grant()
    create_llm_call(lease)
    create_llm_call(lease, outcome="cut", cost=None, priced="", output_tokens=None)
    create_llm_call(lease, started_at=MIDNIGHT, ended_at=MIDNIGHT)
    for cost in ("1234.100000001", "0.100000001", "0.000000001"):
        create_llm_call(lease, model="other", cost=Decimal(cost))
    create_llm_call(lease, outcome="refused", cost=None, priced="")
    create_llm_call(lease, model="refused", outcome="refused", cost=None, priced="")
    create_llm_call(lease, kind="relay", model="", cost=None, priced="")
    create_llm_call(lease, ended_at=None, outcome="open", cost=None, priced="")
    meter_usage(now=NOON + HOUR)
    usd, exact = Decimal("0.001"), Decimal("1234.200000003")
    assert list_token_records() == [("gpt", 2, 1, 200, 7, usd), ("gpt", 1, 0, 100, 7, usd), ("other", 3, 0, 300, 21, exact)]
    assert meter_usage(now=NOON + 2 * HOUR) == {}


def test_estimated_and_unpriced_calls_are_counted_beside_the_cost(grant: AnyCallable) -> None:
    lease, estimate = grant(), {"priced": "estimate", "outcome": "lost"}
    create_llm_call(lease)
    create_llm_call(lease, priced="free", cost=Decimal(0))
    create_llm_call(lease, cost=None, priced="")
    for cost in ("0.25", "0.000000001", "999999999"):  # the last is out of range, and therefore unknown
        create_llm_call(lease, cost=Decimal(cost), **estimate)
    meter_usage(now=NOON + HOUR)
    record = UsageRecord.objects.get(item=UsageKind.TOKENS)
    assert (record.calls, record.unpriced, record.estimated) == (6, 2, 2)
    assert (record.usd, record.estimated_usd) == (Decimal("0.251000001"), Decimal("0.250000001"))


def test_tokens_written_to_the_cache_are_summed_over_both_kinds(grant: AnyCallable) -> None:
    lease = grant()
    create_llm_call(lease, token_counts={"input": 5, "cache_write_5m": 300, "cache_write_1h": 20, "output": 7})
    create_llm_call(lease, token_counts={"input": 60, "output": 7}), create_llm_call(lease)
    meter_usage(now=NOON + HOUR)
    record = UsageRecord.objects.get(item=UsageKind.TOKENS)
    assert (record.input_tokens, record.cached_tokens, record.cache_written_tokens) == (300, 120, 320)


def test_amounts_out_of_range_are_metered_as_unpriced_and_the_others_are_priced(grant: AnyCallable) -> None:
    lease, other = grant(), grant(agent="did:plc:other")
    for _ in range(12):  # each fits its column; their sums do not
        create_llm_call(lease, cost=Decimal("999999999"))
    create_llm_call(lease, model="many", input_tokens=2**63 - 1), create_llm_call(lease, model="many", input_tokens=2**63 - 1)
    create_llm_call(other, model="sane")
    result = schedules.run_sweep("meter", now=NOON + HOUR)
    assert list_token_records() == [
        ("gpt", 12, 12, 1200, 84, 0), ("many", 2, 0, 0, 14, Decimal("0.002")), ("sane", 1, 0, 100, 7, Decimal("0.001")),
    ]  # fmt: skip
    assert len(result.failures) == 14 and "out of range" in result.failures[0]
    assert CostRecord.objects.get(item="llm", agent_did="did:plc:other").usd == Decimal("0.001")
    assert not schedules.run_sweep("meter", now=NOON + 2 * HOUR).failures


def test_model_name_may_be_long_or_empty(grant: AnyCallable) -> None:
    lease, names = grant(), ["", "gpt for no lease", "no model", "without a model"]
    for name in names:
        create_llm_call(lease, model=name)
        create_llm_call(lease, model=name, holder=None, agent_did="")
    for _ in range(2):
        meter_usage(now=NOON + HOUR)
        assert [each[0] for each in list_token_records()] == [name for name in names for _ in range(2)]
        LlmCall.objects.update(counted=False)


def test_late_call_price_counts_once(grant: AnyCallable) -> None:
    """One price is recorded by the proxy, the other is computed by a model rate."""
    call = create_llm_call(grant(), cost=None, priced="", cached_tokens=0)
    create_llm_call(grant(), model="mini", cost=None, priced="", cached_tokens=0)
    meter_usage(now=NOON + HOUR)
    assert [each[-1] for each in list_token_records()] == [0, 0]
    line = b'{"call": "%s", "status": "success", "cost": 0.5, "input": 100, "output": 7}' % call.call_id.encode()
    create_rates("mini", input=1, output=2, since=NOON - HOUR)
    for _ in range(2):
        upstream_records.apply_lines([line], now=NOON + HOUR)
        model_pricing.price_calls(NOON + 2 * HOUR)
        meter_usage(now=NOON + 2 * HOUR)
        records = [("gpt", 1, 0, 100, 7, Decimal("0.5")), ("mini", 1, 0, 100, 7, Decimal("0.000114"))]
        assert list_token_records() == records
