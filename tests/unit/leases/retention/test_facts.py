"""Facts are deleted after their usage is final: amounts stay the same, also when they are derived again."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid5

import hypothesis
import pytest
from django.conf import settings
from django.db.models import DurationField, ExpressionWrapper, F, Sum
from hypothesis import given
from hypothesis import strategies as st

from billing import derivation, horizon, totals
from billing.alive_time import get_alive_time
from billing.models import CostRecord, Meter, PeriodTotal, Unpriced, UsageKind, UsageRecord, Watermark
from leases import leasing, sweeps
from leases.models import EnvironmentType, Lease
from leases.retention.facts import LATE_PRICE_PERIOD
from leases.retention.sweep import delete_expired
from sandboxes.models import DataSize, LlmCall, Reading, Run, Sandbox, Snapshot, Transition
from tests.conftest import MINUTE, NOW
from tests.support.billing import HOUR, create_llm_call, create_rate, create_reading, list_cost_records, run_command
from tests.support.search import budget
from tests.unit.billing.test_rollup import BEGIN, STATES, create_live_sandbox, get_state_fields, record_transition

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: metering aggregates in the database")]
DAY = timedelta(days=1)
FACTS = (Run, Transition, Reading, Snapshot)
STEPS = st.tuples(
    st.sampled_from(["run", "run", "read", "derive", "delete", *STATES]),
    st.sampled_from([None, 1, 2]),
    st.one_of(st.integers(-600, 900), st.integers(3000, 60_000)),
)


@pytest.fixture(autouse=True)
def rates() -> None:
    for item in ("time", "cpu", "memory", "suspend", "disk", "storage"):
        for provider in ("acme", "memory"):
            create_rate(item, "1.7", "2020-02-01", provider=provider)


def derive(now: datetime) -> None:
    derivation.derive_usage_and_costs(now=now)


def derive_again(now: datetime) -> None:
    derivation.reset_usage_and_costs()
    derive(now)


def delete_facts(now: datetime) -> None:
    """Run the sweep, as often as it needs for rows that refer to each other."""
    derive(now)
    while sum(delete_expired(now=now).counts.values()):
        pass


def sum_amounts() -> dict[str, Any]:
    duration = Sum(ExpressionWrapper(F("ended_at") - F("began_at"), DurationField()))
    usage = UsageRecord.objects.exclude(item=UsageKind.RUNS).order_by().values_list("day", "item", "state", "holder")
    sums = usage.annotate(duration=duration, cpu=Sum("cpu_micros"), mib=Sum("mib_micros"), size=Sum("size_bytes"))
    runs = UsageRecord.objects.filter(item=UsageKind.RUNS).values_list("day", "holder").annotate(Sum("calls"))
    return {
        "costs": list_cost_records(), "usage": sorted(map(str, sums)), "runs": sorted(map(str, runs.order_by())),
        **{name: totals.sum_costs(name) for name in totals.GROUP_BY_COLUMNS},
    }  # fmt: skip


@hypothesis.settings(
    deadline=None,
    max_examples=budget(fast=5, full=150),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@given(st.lists(STEPS, min_size=10, max_size=60), st.booleans(), st.integers(0, 6))
def test_amounts_do_not_depend_on_deleted_facts(steps: list[tuple[str, int | None, int]], destroyed: bool, idle: int) -> None:
    """A history of states, runs and readings over some days. The clock may jump back by some minutes."""
    for model in (CostRecord, PeriodTotal, UsageRecord, Meter, Unpriced, Watermark, Reading, Run, Transition):
        model.objects.all()._raw_delete(model.objects.db)
    Sandbox.objects.update(metered=True, state="destroyed", **get_state_fields("destroyed", BEGIN - 9 * DAY))
    sandbox = create_live_sandbox(f"did:plc:example-{Sandbox.objects.count()}")
    clock, latest, read_until = BEGIN, BEGIN, BEGIN
    record_transition(sandbox, "warming", None, clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "KEEP_HISTORY", timedelta(0))
        for step, number, seconds in steps:
            clock += timedelta(seconds=seconds)
            latest = max(latest, clock)
            holder = uuid5(sandbox.pk, str(number)) if number else None
            if step == "run":
                record_transition(sandbox, "running", holder, clock)
                record_transition(sandbox, "waiting", holder, clock + timedelta(seconds=9))
                Transition.objects.filter(sandbox=sandbox, to="running").update(code="run_started")
                Transition.objects.filter(sandbox=sandbox, was="running").update(code="run_ended")
                latest = max(latest, clock + timedelta(seconds=9))
            elif step == "read":
                if latest > read_until:
                    create_reading(read_until, latest - read_until, sandbox, timedelta(seconds=1), 100)
                    read_until = latest
            elif step == "derive":
                derive(latest)
            elif step == "delete":
                delete_facts(latest)
            else:
                record_transition(sandbox, step, holder, clock)
        if destroyed:
            record_transition(sandbox, "destroyed", None, latest)
        until = latest + idle * DAY
        derive(until)
        amounts, number = sum_amounts(), Transition.objects.count()
        delete_facts(until)
        assert sum_amounts() == amounts
        hypothesis.event(f"facts deleted: {Transition.objects.count() < number}")
        derive_again(until)
        assert sum_amounts() == amounts


@pytest.fixture
def ended(grant: Callable[..., Lease], memory: Any) -> tuple[Lease, Sandbox]:
    """A lease that has run two commands, one of which called a model, with its sandbox. All has ended."""
    lease = grant(ttl=9 * HOUR)
    for minute in (0, 9):
        run_command(lease, now=NOW + minute * MINUTE)
    sandbox = Sandbox.objects.get(holder=lease.pk)
    create_reading(NOW, HOUR, sandbox, timedelta(seconds=5))
    call = Run.objects.filter(sandbox=sandbox).first()
    LlmCall.objects.create(
        call_id="a", sandbox=sandbox, holder=lease.pk, run=call, started_at=NOW, deadline_at=NOW, ended_at=NOW, outcome="ok",
        cost=1, counted=False,
    )  # fmt: skip
    leasing.release(lease.pk, now=NOW + HOUR)
    for _ in range(2):
        sweeps.reclaim(now=NOW + HOUR)
    sweeps.destroy_cold(now=NOW + HOUR + settings.KEEP_STATE)
    return lease, Sandbox.objects.get(pk=sandbox.pk)


def count_facts(sandbox: Sandbox) -> list[int]:
    return [model.objects.filter(sandbox=sandbox).count() for model in FACTS]


def get_end() -> datetime:
    return NOW + settings.KEEP_HISTORY + settings.KEEP_STATE + 3 * DAY


def test_facts_go_after_their_lease_and_what_it_has_cost_stays(ended: tuple[Lease, Sandbox]) -> None:
    facts = count_facts(ended[1])
    delete_facts(NOW + settings.KEEP_HISTORY - DAY)
    assert count_facts(ended[1]) == facts and all(facts)
    derive(get_end())
    amounts = sum_amounts()
    assert amounts["costs"]
    delete_facts(get_end())
    assert count_facts(ended[1]) == [0] * len(FACTS) and not Lease.objects.exists()
    assert not LlmCall.objects.exists()
    assert sum_amounts() == amounts
    derive_again(get_end())
    assert sum_amounts() == amounts


@pytest.mark.parametrize(
    ("model", "unsettled"),
    [
        (Run, {"metered": False}), (Reading, {"metered": False}), (Sandbox, {"metered": False}), (Snapshot, {"metered": False}),
        (Snapshot, {"forgotten_at": None}), (Snapshot, {"vendor_snapshot": "im-1"}),
    ],
)  # fmt: skip
def test_unsettled_facts_are_kept(model: Any, unsettled: dict[str, Any], ended: tuple[Lease, Sandbox]) -> None:
    derive(get_end())
    Watermark.objects.filter(name=horizon.HORIZON_WATERMARK).update(at=get_end())
    Lease.objects.update(destroyed_at=NOW)
    model.objects.filter(**({"pk": ended[1].pk} if model is Sandbox else {"sandbox": ended[1]})).update(**unsettled)
    kept = Run if model is Sandbox else model
    number = kept.objects.filter(sandbox=ended[1]).count()
    delete_expired(now=get_end())
    assert kept.objects.filter(sandbox=ended[1]).count() == number > 0


def call_models(lease: Lease, usd_by_time: dict[datetime, Any]) -> list[LlmCall]:
    """Insert two calls of a lease at each time, the second with a cost of 0."""
    sandbox = Sandbox.objects.order_by("created_at")[0]
    return [
        create_llm_call(lease, sandbox=sandbox, started_at=at, deadline_at=at, ended_at=at, cost=cost, priced="")
        for at, usd in usd_by_time.items()
        for cost in (usd, 0)
    ]


def list_tokens() -> list[Any]:
    return [
        *UsageRecord.objects.filter(item=UsageKind.TOKENS)
        .order_by("day", "source")
        .values_list("source", "day", "calls", "usd")
    ]


def test_model_calls_go_and_what_they_have_cost_stays(ended: tuple[Lease, Sandbox]) -> None:
    """Two at each moment, around midnight, and in an order other than that of their ids because the clock went back."""
    midnight = NOW.replace(hour=0, minute=0, second=0, microsecond=0) + DAY
    late, tick = midnight + 20 * DAY, timedelta(microseconds=1)
    call_models(ended[0], {NOW: 2, midnight: 3, midnight - tick: 5, NOW - 2 * DAY: 7, late: 11})
    create_llm_call(ended[0], holder=None, agent_did="", outcome="refused", cost=None, priced="")
    for until, kept in ((get_end(), [late, late]), (get_end() + 30 * DAY, [])):
        derive(until)
        amounts, tokens = sum_amounts(), list_tokens()
        assert sum(usd for *_, usd in tokens) == 29 and sum(number for _, _, number, _ in tokens) == 11
        delete_facts(until)
        assert [each.started_at for each in LlmCall.objects.all()] == kept
        assert (sum_amounts(), list_tokens()) == (amounts, tokens)
        derive_again(until)
        assert (sum_amounts(), list_tokens()) == (amounts, tokens)


def test_calls_wait_for_a_late_price_with_the_other_calls_of_their_lease(ended: tuple[Lease, Sandbox]) -> None:
    calls = call_models(ended[0], {NOW: None})
    create_llm_call(ended[0], holder=None, cost=None, priced="")
    create_llm_call(ended[0], holder=None)
    delete_facts(get_end())
    assert LlmCall.objects.count() == 5 and not LlmCall.objects.filter(run__isnull=False).exists()
    LlmCall.objects.filter(pk=calls[0].pk).update(cost=4, counted=False)
    derive(get_end())
    record = UsageRecord.objects.get(item=UsageKind.TOKENS, holder=ended[0].pk, model="gpt")
    assert (record.calls, record.unpriced, record.usd) == (2, 0, 4)
    delete_facts(get_end())
    assert [each.holder for each in LlmCall.objects.all()] == [None, None]
    delete_facts(get_end() + LATE_PRICE_PERIOD)
    assert not LlmCall.objects.exists()


def test_a_price_that_changes_after_other_calls_have_expired_does_not_lose_them(ended: tuple[Lease, Sandbox]) -> None:
    calls = call_models(ended[0], {NOW: 2})
    derive(get_end())
    amounts = sum_amounts()
    LlmCall.objects.filter(pk=calls[1].pk).delete()
    LlmCall.objects.filter(pk=calls[0].pk).update(cost=3, counted=False)
    derive(get_end())
    assert sum_amounts() == amounts
    assert UsageRecord.objects.get(item=UsageKind.TOKENS, model="gpt").calls == 2


def test_sizes_of_data_go_once_a_later_size_is_final_and_what_they_have_cost_stays() -> None:
    create_rate("storage", "1.7", "2020-02-01", provider="store")
    for day, did, size in ((0, "ada", 9), (1, "ada", 8), (1, "bob", 7), (3, "ada", 0), (40, "ada", 6), (41, "ada", 5)):
        DataSize.note(f"did:plc:{did}", size * 2**30, now=NOW + day * DAY)
    late = NOW + settings.KEEP_HISTORY
    for until, kept in ((late + DAY, [9, 8, 7, 0, 6, 5]), (late + 4 * DAY, [8, 7, 0, 6, 5]), (late + 50 * DAY, [7, 5])):
        derive(until)
        amounts = sum_amounts()
        delete_facts(until)
        assert [each.size_bytes // 2**30 for each in DataSize.objects.order_by("pk")] == kept
        derive_again(until)
        assert sum_amounts() == amounts and amounts["costs"]
    DataSize.note("did:plc:ada", 4, now=late + 51 * DAY)
    DataSize.objects.filter(agent_did="did:plc:ada").update(metered=False)
    Watermark.objects.filter(name=horizon.HORIZON_WATERMARK).update(at=late + 99 * DAY)
    delete_expired(now=late + 99 * DAY)
    assert DataSize.objects.count() == 3  # one is not metered


def test_an_open_lease_keeps_its_results_and_its_time_with_a_process(grant: Callable[..., Lease], memory: Any) -> None:
    late = NOW + 2 * settings.KEEP_HISTORY
    EnvironmentType.objects.update(max_ttl=9 * settings.KEEP_HISTORY)
    lease = grant(ttl=9 * settings.KEEP_HISTORY, max_ttl=9 * settings.KEEP_HISTORY)
    for minute in range(5):
        run_command(lease, now=NOW + minute * MINUTE)
    run_command(grant("did:plc:bob", "game-2"), now=NOW + HOUR)
    derive(late)
    alive, amounts = get_alive_time(lease.pk, now=late), sum_amounts()
    delete_facts(late)
    assert Run.objects.filter(holder=lease.pk).count() == 5
    of_runs = Transition.objects.filter(holder=lease.pk, code__in=["run_started", "run_ended"])
    assert [of_runs.count(), of_runs.get().to] == [1, "waiting"]  # the state that it is in
    assert get_alive_time(lease.pk, now=late) == alive
    derive_again(late)
    assert sum_amounts() == amounts
    run_command(lease, now=late)
    derive(late + HOUR)


def test_the_horizon_waits_for_prices_and_for_a_rebuild_and_never_returns() -> None:
    def find(now: datetime) -> datetime:
        horizon.advance_horizon(now=now)
        return horizon.get_horizon()

    begin = (NOW - settings.KEEP_HISTORY).replace(hour=0, minute=0, second=0)
    Unpriced.note([begin.date() - DAY])
    Watermark.objects.create(name=horizon.REBUILD_WATERMARK, at=NOW)
    assert find(NOW).year == 1970
    Watermark.objects.filter(name=horizon.REBUILD_WATERMARK).delete()
    assert find(NOW).year == 1970
    Unpriced.objects.all().delete()
    Unpriced.note([begin.date()])
    assert [find(NOW), find(NOW - 5 * DAY), find(NOW + DAY)] == [begin, begin, begin]
    Unpriced.objects.all().delete()
    assert find(NOW + DAY) == begin + DAY


def test_the_usage_of_yesterday_is_never_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "KEEP_HISTORY", HOUR)
    horizon.advance_horizon(now=NOW)
    assert horizon.get_horizon() == (NOW - 2 * DAY).replace(hour=0, minute=0, second=0)
