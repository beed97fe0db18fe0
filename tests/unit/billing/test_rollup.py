"""Roll-up of usage: rolled-up records have the same sums as records of each fact, however time is divided."""

from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid5

import hypothesis
import pytest
from django.db.models import Q, Sum
from hypothesis import given
from hypothesis import strategies as st

from billing import costs, derivation, hourly, metering, rollup, statements, totals
from billing.models import CostRecord, Meter, PeriodTotal, Rate, UsageKind, UsageRecord
from billing.rollup import HourParts
from leases.models import Lease
from sandboxes.models import Reading, Run, Sandbox, Transition
from tests.conftest import MINUTE, NOW
from tests.support.billing import (
    HOUR,
    create_rate,
    create_reading,
    create_sandbox,
    get_house_account,
    join_account,
    list_cost_records,
    parse_day,
    parse_utc,
    run_command,
)
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: metering aggregates in the database")]
BEGIN = parse_utc("2026-11-21T20:00")  # histories reach beyond midnight
STATES = ("warming", "warm", "running", "waiting", "suspended", "evicting", "cold")
STATE_STEPS = st.tuples(
    st.sampled_from(STATES), st.sampled_from([None, 1, 2]), st.one_of(st.integers(-600, 900), st.integers(3000, 30_000))
)
READING_STEPS = st.tuples(st.integers(1, 4000 * 10**6), st.integers(0, 10**9), st.integers(0, 512))
PASS_STEPS = st.tuples(st.just("pass"), st.sampled_from([None, "cpu", "memory", "time", "suspend"]), st.integers(1, 4000))


def record_transition(sandbox: Sandbox, state: str, holder: UUID | None, at: datetime) -> None:
    last = Transition.objects.filter(sandbox=sandbox).order_by("pk").last()
    Transition.objects.create(sandbox=sandbox, was=last.to if last else "", to=state, at=at, holder=holder, code="operator")
    Sandbox.objects.filter(pk=sandbox.pk).update(state=state, state_since=at, **get_state_fields(state, at))


def get_state_fields(state: str, at: datetime) -> dict[str, Any]:
    """Return the columns that constraints tie to the state."""
    return {
        "open_runs": int(state == "running"), "frozen": state == "suspended", "deadline_at": at + HOUR,
        "destroyed_at": at if state == "destroyed" else None,
    }  # fmt: skip


def create_live_sandbox(agent: str = "did:plc:ada", **size: Any) -> Sandbox:
    sandbox = create_sandbox(agent, provider="acme", **size)
    Sandbox.objects.filter(pk=sandbox.pk).update(state="warm", destroyed_at=None)
    return sandbox


def exec_each_minute(sandbox: Sandbox, began: datetime, number: int) -> None:
    """Record runs of 20 seconds, one a minute."""
    for minute in range(number):
        record_transition(sandbox, "running", sandbox.holder, began + minute * MINUTE)
        record_transition(sandbox, "waiting", sandbox.holder, began + minute * MINUTE + timedelta(seconds=20))


def list_time_records() -> list[tuple[str, datetime, datetime]]:
    rows = UsageRecord.objects.filter(item=UsageKind.TIME).order_by("began_at", "state")
    return [*rows.values_list("state", "began_at", "ended_at")]


def summarize(since: datetime, until: datetime) -> dict[str, Any]:
    """Return every sum that is shown, billed or compared with a budget."""
    hours = [since.replace(minute=0) + number * HOUR for number in range(int((until - since) / HOUR) + 2)]
    summary: dict[str, Any] = {"costs": list_cost_records()}
    for name in totals.GROUP_BY_COLUMNS:
        summary[name] = [*totals.sum_costs(name)]
    for account in ("team", "house"):
        summary[f"time of {account}"] = totals.sum_sandbox_time("day", account=account)
    for hour in hours:
        summary[f"USD at {hour}"] = hourly.sum_hourly_usd(hour, hour + HOUR, [Q()])
        summary[f"time at {hour}"] = hourly.sum_hourly_time(hour, hour + HOUR, [Q()])
    lines = statements.preview_month(get_house_account(), parse_day("2026-11-01"))
    summary["statement"] = [(line.agent_did, line.item, line.quantity, line.free, line.usd) for line in lines]
    use = UsageRecord.objects.filter(item=UsageKind.USE).order_by()
    summary["use"] = sorted(use.values_list("day", "holder").annotate(cpu=Sum("cpu_micros"), mib=Sum("mib_micros")))
    return summary


@hypothesis.settings(
    deadline=None,
    max_examples=budget(fast=5, full=150),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.one_of(STATE_STEPS, STATE_STEPS, STATE_STEPS, READING_STEPS, PASS_STEPS), min_size=5, max_size=40))
def test_sums_are_those_of_records_of_each_fact(steps: list[tuple[Any, ...]]) -> None:
    """A history of states, of readings, and of passes before some of which a rate is added. The clock may jump back."""
    for model in (CostRecord, PeriodTotal, UsageRecord, Meter, Reading, Run, Transition, Rate):
        model.objects.all()._raw_delete(model.objects.db)
    Sandbox.objects.update(metered=True)
    for item in ("time", "cpu", "memory", "suspend"):
        create_rate(item, "1.7", allowance=Decimal("0.5"), by_use=item == "memory")
    agent = f"did:plc:example-{Sandbox.objects.count()}"
    join_account("team", "2026-11-22", agent=agent)
    sandbox = create_live_sandbox(agent)
    clock, latest, read_until = BEGIN, BEGIN, BEGIN
    record_transition(sandbox, "warming", None, clock)
    for number, step in enumerate(steps):
        if step[0] == "pass":
            _, item, delay = step
            begins = latest + timedelta(seconds=delay)  # a rate cannot begin before it is added
            if item and not Rate.objects.filter(item=item, valid_from=begins).exists():
                create_rate(item, f"{number + 2}", valid_from=begins, by_use=item == "memory")
            metering.meter_usage(now=latest)
        elif step[0] in STATES:
            state, lease, seconds = step
            clock += timedelta(seconds=seconds)
            latest = max(latest, clock)
            record_transition(sandbox, state, uuid5(sandbox.pk, str(lease)) if lease else None, clock)
        else:
            lasts, cpu, mib = step
            create_reading(read_until, timedelta(microseconds=lasts), sandbox, timedelta(microseconds=cpu), mib)
            read_until += timedelta(microseconds=lasts)
    until = max(latest, read_until) + 2 * HOUR
    derivation.derive_usage_and_costs(now=until)
    rolled_up, number = summarize(BEGIN, until), UsageRecord.objects.count()
    derivation.reset_usage_and_costs()
    derivation.derive_usage_and_costs(now=until)
    assert summarize(BEGIN, until) == rolled_up, "derived again"
    derivation.reset_usage_and_costs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HourParts, "find_start", lambda *_: None)
        derivation.derive_usage_and_costs(now=until)
    assert summarize(BEGIN, until) == rolled_up
    assert UsageRecord.objects.count() >= number


def test_runs_of_an_hour_share_a_record_for_each_state() -> None:
    sandbox = create_live_sandbox()
    exec_each_minute(sandbox, NOW, 60)
    for minute in range(0, 70, 7):
        metering.meter_usage(now=NOW + minute * MINUTE)
    metering.meter_usage(now=NOW + 3 * HOUR)
    last = NOW + 59 * MINUTE + timedelta(seconds=20)  # has not ended
    assert list_time_records() == [
        ("running", NOW, NOW + 20 * MINUTE),
        ("waiting", NOW + timedelta(seconds=20), NOW + timedelta(seconds=20) + 59 * timedelta(seconds=40)),
        ("waiting", last, NOW + 3 * HOUR),
    ]


def test_facts_of_different_hours_leases_and_rates_do_not_share_a_record() -> None:
    create_rate("time", "1", "2026-11-21T12:30")
    create_rate("time", "1", "2026-11-21T12:40", provider="other")
    sandbox = create_live_sandbox()
    exec_each_minute(sandbox, NOW, 119)
    Transition.objects.filter(sandbox=sandbox, at__gte=NOW + 90 * MINUTE).update(holder=UUID(int=7))
    metering.meter_usage(now=NOW + 2 * HOUR)
    running = [(began, ended) for state, began, ended in list_time_records() if state == "running"]
    assert running == [
        (NOW + minutes * MINUTE, NOW + minutes * MINUTE + number * timedelta(seconds=20))
        for minutes, number in ((0, 30), (30, 30), (60, 30), (90, 29))
    ]


def test_interval_that_crosses_an_hour_or_the_start_of_a_rate_has_its_own_record() -> None:
    create_rate("time", "1", "2026-11-21T12:30")
    sandbox = create_live_sandbox()
    moments = [NOW + minutes * MINUTE for minutes in (10, 29, 31, 59, 61, 240, 245)]
    for moment, state in zip(moments, ["waiting", "running", "waiting", "running", "waiting", "running", "cold"], strict=True):
        record_transition(sandbox, state, sandbox.holder, moment)
    metering.meter_usage(now=NOW + 5 * HOUR)
    pairs = [*pairwise(moments), (moments[-1], NOW + 5 * HOUR)]
    assert [(began, ended) for _, began, ended in list_time_records()] == pairs
    own = UsageRecord.objects.filter(source__startswith="transition").order_by("began_at").values_list("began_at", flat=True)
    assert [*own] == [moments[1], moments[3], moments[4], moments[6]]


def test_readings_of_an_hour_share_a_record() -> None:
    sandbox = create_live_sandbox()
    for number in range(12):
        create_reading(NOW + 5 * number * MINUTE, 5 * MINUTE, sandbox, timedelta(seconds=1), memory_mib=number)
        if number % 5 == 0:
            metering.meter_usage(now=NOW + 5 * number * MINUTE)
    metering.meter_usage(now=NOW + HOUR)
    record = UsageRecord.objects.get(item=UsageKind.USE)
    assert (record.began_at, record.ended_at, record.memory_mib) == (NOW, NOW + HOUR, 11)
    assert (record.cpu_micros, record.mib_micros) == (12 * 10**6, 300 * 10**6 * sum(range(12)))


def test_facts_added_in_several_statements_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours on two days have the same sources: a statement for some of them must not add the others."""
    monkeypatch.setattr(rollup, "BATCH_SIZE", 2)
    sandbox, parts, moments = create_live_sandbox(), HourParts(), [NOW, NOW + 25 * HOUR, NOW + HOUR, NOW + 24 * HOUR]
    for _ in range(2):
        rollup.add_usage(
            [
                UsageRecord(
                    item=UsageKind.USE, day=at.date(), began_at=at, ended_at=at + MINUTE, sandbox=sandbox, cpu_micros=5,
                    provider="acme",
                )
                for at in moments
            ],
            parts,
        )  # fmt: skip
    assert [*UsageRecord.objects.values_list("cpu_micros", flat=True)] == [10] * 4


def test_number_of_records_does_not_grow_with_the_execs(grant: Callable[..., Lease], memory: Any) -> None:
    counts = []
    for number in (1, 6):
        lease = grant(environment=f"e{number}", ttl=9 * HOUR)
        for second in range(number):
            run_command(lease, now=NOW + second * timedelta(seconds=10))
        metering.meter_usage(now=NOW + HOUR)
        counts.append(UsageRecord.objects.filter(holder=lease.pk, item__in=[UsageKind.TIME, UsageKind.RUNS]).count())
    assert counts[0] == counts[1] - 1  # one execution leaves no ended time in the state waiting


def test_pricing_reads_no_more_rows_after_more_execs() -> None:
    sandbox = create_live_sandbox()
    create_rate("time", "1")
    exec_each_minute(sandbox, NOW, 5)
    derivation.derive_usage_and_costs(now=NOW + 5 * MINUTE)
    before = UsageRecord.objects.count()
    exec_each_minute(sandbox, NOW + 5 * MINUTE, 50)
    metering.meter_usage(now=NOW + 55 * MINUTE)
    assert UsageRecord.objects.count() == before
    costs.price_usage(now=NOW + 55 * MINUTE)
    assert CostRecord.objects.get().whole == str(55 * 60 * 10**6)
