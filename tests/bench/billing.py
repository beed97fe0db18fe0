"""Billing benchmark: derivation of usage and costs, sums of budgets, and the admission checks.

Each is compared with a plain read or SELECT of the same rows. Usage is derived from transitions, runs and readings; costs are
derived from a month of usage records."""

import os
import resource
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

from django.db import connection
from django.utils import timezone

from billing import budgets, costs, metering
from billing.models import Budget, CostRecord, Rate, Unpriced, UsageRecord
from leases import leasing
from leases.models import EnvironmentType
from sandboxes.models import Pool, Reading, Run, Sandbox, Transition
from tests.bench.measure import BenchCase, interleave, measure_seconds, print_report, refresh_statistics

TRANSITION_COUNTS = [int(size) for size in os.environ.get("BENCH_TRANSITIONS", "100000,300000,1000000").split(",")]
TRANSITIONS_PER_DAY = int(os.environ.get("BENCH_DAY", "20000"))
USAGE_RECORD_COUNTS = [int(size) for size in os.environ.get("BENCH_USAGE", "30000,100000,300000").split(",")]
GRANT_COUNT = int(os.environ.get("BENCH_GRANTS", "200"))
TURNS_PER_SANDBOX = 9  # each with a run and two transitions; a sandbox also has four other transitions and two readings
FIRST_DAY = date(2026, 11, 1)
STARTED_AT = datetime(2026, 11, 1, tzinfo=UTC)
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
DAY_COUNT, AGENT_COUNT = 28, 100


def main() -> None:
    bench_metering()
    metering.reset_usage()
    bench_pricing()
    bench_budgets()
    bench_admission()


# --- derivation -------------------------------------------------------------------------------------------------------


def bench_derivation(
    title: str,
    sizes: Iterable[int],
    *,
    fill: Callable[[int], object],
    read: Callable[[], Iterable[object]],
    derive: Callable[[], object],
    add_day: Callable[[], object],
) -> None:
    """Measure a derivation of `size` rows, compared with reading them, then a pass with nothing new and one with a new day."""
    print(f"\n  {title:>18}{'derived in s':>14}{'us each':>10}{'read alone':>12}{'ratio':>8}", end="")
    print(f"{'nothing new':>13}{'one more day':>14}{'peak MiB':>10}")
    for size in sizes:
        fill(size)
        refresh_statistics()
        reading = measure_seconds(lambda: sum(1 for _ in read()))
        derivation = measure_seconds(derive)
        print(
            f"  {size:>18,}{derivation:14.1f}{1e6 * derivation / size:10.1f}{reading:12.2f}{derivation / reading:7.1f}x", end=""
        )
        idle_pass = measure_seconds(derive)
        add_day()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{idle_pass:13.2f}{measure_seconds(derive):14.2f}{peak:10.0f}", flush=True)


def bench_metering() -> None:
    pool = Pool.objects.create(name="bench", provider="memory", capacity=10**9)

    def fill(size: int) -> None:
        metering.reset_usage()
        insert_history(pool, size - Transition.objects.count(), now=STARTED_AT)

    bench_derivation(
        "transitions", TRANSITION_COUNTS, fill=fill,
        read=Transition.objects.order_by("sandbox", "pk").values_list("pk", "to", "holder", "at").iterator,
        derive=lambda: metering.meter_usage(now=NOW),
        add_day=lambda: insert_history(pool, TRANSITIONS_PER_DAY, now=NOW - timedelta(days=1)),
    )  # fmt: skip
    assert UsageRecord.objects.exists()


def bench_pricing() -> None:
    """Price a whole month, then again after one of its days has changed."""
    prices = [("memory", "0.009", 25), ("cpu", "0.0012", 375), ("disk", "0.00025", 200)]
    since = datetime(2026, 1, 1, tzinfo=UTC)
    Rate.objects.bulk_create(
        Rate(provider="bench", item=item, usd=Decimal(usd), allowance=allowance, valid_from=since)
        for item, usd, allowance in prices
    )

    def fill(size: int) -> None:
        insert_usage_records(size - UsageRecord.objects.count())
        costs.reset_costs()

    bench_derivation(
        "usage records", USAGE_RECORD_COUNTS, fill=fill,
        read=UsageRecord.objects.order_by().values_list("day", "holder", "began_at", "ended_at").iterator,
        derive=lambda: costs.price_usage(now=NOW),
        add_day=lambda: Unpriced.note([FIRST_DAY + timedelta(days=DAY_COUNT - 1)]),
    )  # fmt: skip
    assert CostRecord.objects.count() >= USAGE_RECORD_COUNTS[-1]


def insert_history(pool: Pool, count: int, *, now: datetime) -> None:
    """Insert destroyed sandboxes with at least `count` transitions."""
    states = ["warming", "warm", *["running", "waiting"] * TURNS_PER_SANDBOX, "destroying", "destroyed"]
    inserted = 0
    while inserted < count:
        sandboxes = [
            Sandbox(
                pool=pool, agent_did=f"did:plc:{number % 100}", environment_id="e", holder=uuid.uuid4(), state="destroyed",
                state_since=now, provider="memory", memory_mib=512, millicpus=1000, pids=64, last_used_at=now, created_at=now,
                destroyed_at=now,
            )
            for number in range(min(500, -(-(count - inserted) // len(states))))
        ]  # fmt: skip
        Sandbox.objects.bulk_create(sandboxes)
        moments = [now + timedelta(minutes=number) for number in range(len(states))]
        transitions = [
            Transition(sandbox=sandbox, was=was, to=to, at=at, holder=sandbox.holder, reason="bench")
            for sandbox in sandboxes
            for was, to, at in zip(["", *states], states, moments, strict=False)
        ]
        Transition.objects.bulk_create(transitions, batch_size=2000)
        runs = [
            Run(sandbox=sandbox, holder=sandbox.holder, argv=["true"], started_at=at, deadline_at=at + timedelta(minutes=1))
            for sandbox in sandboxes
            for at in moments[2:-2:2]
        ]
        Run.objects.bulk_create(runs, batch_size=2000)
        Reading.objects.bulk_create(
            Reading(
                sandbox=sandbox, incarnation=1, number=number, holder=sandbox.holder, since=now + timedelta(minutes=9 * number),
                at=now + timedelta(minutes=9 * number + 9), counted=10**6 * number, cpu_micros=10**6, memory_mib=40,
            )
            for sandbox in sandboxes
            for number in (1, 2)
        )  # fmt: skip
        inserted += len(sandboxes) * len(states)


def insert_usage_records(count: int) -> None:
    """Insert usage records of this month, each of its own lease."""
    last = UsageRecord.objects.count()
    for first in range(last, last + count, 5000):
        UsageRecord.objects.bulk_create(
            (build_usage_record(number) for number in range(first, min(first + 5000, last + count))), batch_size=500
        )


def build_usage_record(number: int) -> UsageRecord:
    day = FIRST_DAY + timedelta(days=number % DAY_COUNT)
    began = datetime(day.year, day.month, day.day, 9, tzinfo=UTC) + timedelta(seconds=number % 3000)
    return UsageRecord(
        item="time", source=f"transition {number}", day=day, began_at=began, ended_at=began + timedelta(minutes=7),
        holder=uuid.uuid4(), agent_did=f"did:plc:{number % AGENT_COUNT}", environment_id="e", provider="bench", state="running",
        memory_mib=1024, millicpus=250,
    )  # fmt: skip


# --- budgets ----------------------------------------------------------------------------------------------------------


def bench_budgets() -> None:
    """Sum a month for a budget on everything and for a budget on one agent."""
    where = "FROM billing_costrecord WHERE day >= %s AND day < %s"

    def raw(number: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT SUM(usd) {where}", [FIRST_DAY, date(2026, 12, 1)])
            assert cursor.fetchone()[0]

    fields = {"unit": "usd", "period": "month", "amount": Decimal(10**6), "created_at": NOW}
    everything = Budget.objects.create(scope="all", **fields)
    one_agent = Budget.objects.create(scope="agent", subject="did:plc:7", **fields)
    cases = [
        BenchCase("raw: SELECT SUM of a month", raw),
        BenchCase("update a budget on everything", lambda number: budgets.update_spending(everything.pk, now=NOW)),
        BenchCase("update a budget on one agent", lambda number: budgets.update_spending(one_agent.pk, now=NOW)),
    ]
    interleave(cases, rounds=20, warmup=2)
    print_report(f"a budget's sum over {CostRecord.objects.count():,} cost records", cases, raw=cases[0])
    Budget.objects.all().delete()


def bench_admission() -> None:
    """Measure a grant and the check before an exec, with more and more hard budgets in scope."""
    kind = EnvironmentType.objects.get(name="coding").name
    now = timezone.now()
    fields = {"unit": "hours", "amount": Decimal(10**6), "hard": True, "created_at": now}
    budget_rows = [
        Budget.objects.create(scope="all", period="ever", active=False, **fields),
        Budget.objects.create(scope="agent", subject="did:plc:gate", period="month", active=False, **fields),
        Budget.objects.create(scope="environment_type", subject=kind, period="day", active=False, **fields),
    ]
    spent = Budget.objects.create(scope="agent", subject="did:plc:other", period="ever", active=False, **fields)

    def activate_only(*rows: Budget) -> None:
        Budget.objects.update(active=False, exhausted_at=None, exhausted_for=None)
        Budget.objects.filter(pk__in=[row.pk for row in rows]).update(active=True)

    def grant(number: int) -> None:
        request = leasing.LeaseRequest("did:plc:gate", f"gate-{uuid.uuid4().hex}", kind)
        assert leasing.acquire(request, now=now)[1]

    cases = [
        BenchCase("a grant, no budget", grant, before=lambda number: activate_only()),
        BenchCase("with one budget in scope", grant, before=lambda number: activate_only(budget_rows[0])),
        BenchCase("with three budgets in scope", grant, before=lambda number: activate_only(*budget_rows)),
    ]
    interleave(cases, rounds=GRANT_COUNT, warmup=5)
    print_report("a grant with budgets", cases, raw=cases[0])
    lease = leasing.acquire(leasing.LeaseRequest("did:plc:gate", "gate", kind), now=now)[0].pk

    def check(number: int) -> None:
        budgets.require_budget(lease, now=now)

    def exhaust_other(number: int) -> None:
        activate_only(spent, *budget_rows)
        begun = budgets.compute_period_bounds("ever", now)[0]
        Budget.objects.filter(pk=spent.pk).update(exhausted_at=now, exhausted_for=begun, period_began=begun, spent=10**6)

    cases = [
        BenchCase("raw: the lease's row", lambda number: leasing.require_active(lease, now=now)),
        BenchCase("no budget is exhausted", check, before=lambda number: activate_only(*budget_rows)),
        BenchCase("a budget out of scope is exhausted", check, before=exhaust_other),
    ]
    interleave(cases, rounds=GRANT_COUNT, warmup=5)
    print_report("budget check before each exec", cases, raw=cases[0])
