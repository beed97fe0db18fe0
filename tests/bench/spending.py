"""Billing benchmark: pricing of a month of usage and of one late day, sums of budgets, and the admission checks.

Each is compared with a plain read or SELECT of the same rows."""

import os
import sys
import time
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import configure

USAGE_RECORD_COUNTS = [int(size) for size in os.environ.get("BENCH_USAGE", "30000,100000,300000").split(",")]
GRANT_COUNT = int(os.environ.get("BENCH_GRANTS", "200"))
FIRST_DAY = date(2026, 11, 1)
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
DAY_COUNT, AGENT_COUNT = 28, 100


def main(name: str, database: str, here: Path) -> None:
    configure(database, here)
    from django.db import connection

    from billing.models import Rate

    print(f"\n===== spending, {name} =====")
    prices = [("memory", "0.009", 25), ("cpu", "0.0012", 375), ("disk", "0.00025", 200)]
    since = datetime(2026, 1, 1, tzinfo=UTC)
    Rate.objects.bulk_create(
        Rate(provider="bench", item=item, usd=Decimal(usd), allowance=allowance, valid_from=since)
        for item, usd, allowance in prices
    )
    print(f"  {'usage records':>14}{'priced in s':>13}{'us each':>9}{'read alone':>12}{'ratio':>8}{'one more day':>14}")
    inserted = 0
    for size in USAGE_RECORD_COUNTS:
        insert_usage_records(size - inserted)
        inserted = size
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE" if connection.vendor == "postgresql" else "ANALYZE")
        bench_pricing(size)
    bench_budgets()
    bench_admission()


def bench_pricing(size: int) -> None:
    """Price a whole month, then again after one of its days has changed."""
    from billing import costs
    from billing.models import CostRecord, Unpriced, UsageRecord

    costs.reset_costs()
    began = time.perf_counter()
    sum(1 for _ in UsageRecord.objects.order_by().values_list("day", "holder", "began_at", "ended_at").iterator())
    read = time.perf_counter() - began
    began = time.perf_counter()
    costs.price_usage(now=NOW)
    seconds = time.perf_counter() - began
    assert CostRecord.objects.count() >= size
    Unpriced.note([FIRST_DAY + timedelta(days=DAY_COUNT - 1)])
    began = time.perf_counter()
    costs.price_usage(now=NOW)
    second_pass = time.perf_counter() - began
    print(
        f"  {size:>14,}{seconds:13.1f}{1e6 * seconds / size:9.1f}{read:12.2f}{seconds / read:7.1f}x{second_pass:12.2f} s",
        flush=True,
    )


def bench_budgets() -> None:
    """Sum a month for a budget on everything and for a budget on one agent."""
    from django.db import connection

    from billing import budgets
    from billing.models import Budget, CostRecord

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
        BenchCase("update a budget on one agent of a hundred", lambda number: budgets.update_spending(one_agent.pk, now=NOW)),
    ]
    interleave(cases, rounds=20, warmup=2)
    print_report(f"a budget's sum over {CostRecord.objects.count():,} cost records", cases, raw=cases[0])
    Budget.objects.all().delete()


def bench_admission() -> None:
    """Measure a grant and the check before an exec, with more and more hard budgets in scope."""
    from django.utils import timezone

    from billing import budgets
    from billing.models import Budget
    from leases import leasing
    from leases.models import EnvironmentType

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
        begun = budgets.get_period_bounds("ever", now)[0]
        Budget.objects.filter(pk=spent.pk).update(exhausted_at=now, exhausted_for=begun, period_began=begun, spent=10**6)

    cases = [
        BenchCase("raw: the lease's row", lambda number: leasing.require_active(lease, now=now)),
        BenchCase("no budget is exhausted", check, before=lambda number: activate_only(*budget_rows)),
        BenchCase("a budget out of scope is exhausted", check, before=exhaust_other),
    ]
    interleave(cases, rounds=GRANT_COUNT, warmup=5)
    print_report("budget check before each exec", cases, raw=cases[0])


def insert_usage_records(count: int) -> None:
    """Insert usage records of this month, each of its own lease."""
    from billing.models import UsageRecord

    last = UsageRecord.objects.count()
    for first in range(last, last + count, 5000):
        UsageRecord.objects.bulk_create(
            (build_usage_record(number) for number in range(first, min(first + 5000, last + count))), batch_size=500
        )


def build_usage_record(number: int) -> object:
    from billing.models import UsageRecord

    day = FIRST_DAY + timedelta(days=number % DAY_COUNT)
    began = datetime(day.year, day.month, day.day, 9, tzinfo=UTC) + timedelta(seconds=number % 3000)
    return UsageRecord(
        item="time", source=f"transition {number}", day=day, began_at=began, ended_at=began + timedelta(minutes=7),
        holder=uuid.uuid4(), agent_did=f"did:plc:{number % AGENT_COUNT}", environment_id="e", provider="bench", state="running",
        memory_mib=1024, millicpus=250,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
