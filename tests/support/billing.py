"""Builders of usage, rates, accounts and budgets for tests, and the billing sweeps.

Usage rows are inserted directly, without the facts that metering would derive them from."""

import itertools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from billing import budgets, costs, dates, intervals, metering, statement_lines, statements
from billing.errors import BudgetExhausted
from billing.models import (
    HOUSE_ACCOUNT_NAME,
    Account,
    Budget,
    CostRecord,
    Membership,
    Rate,
    Statement,
    UsageKind,
    UsageRecord,
    Watermark,
)
from leases import budget_enforcement, execution
from leases.models import Lease
from sandboxes.models import Event, LlmCall, Pool, Reading, Run, Sandbox
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.actors import console_user

ADA, BOB = "did:plc:ada", "did:plc:bob"
HOUR = timedelta(hours=1)
BASIC_INSTANCE = {"provider": "cloudflare", "memory_mib": 1024, "millicpus": 250}
COST_FIELDS = [
    "account__name", "day", "provider", "item", "agent_did", "holder", "environment_id", "rate", "whole", "quantity", "free",
    "usd",
]  # fmt: skip
_sequence = itertools.count(10**9)  # metering names usage records by row ids, which are smaller


def parse_utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def parse_day(text: str) -> date:
    return date.fromisoformat(text)


def derive_lease_id(did: str) -> uuid.UUID:
    """Return the lease id that usage rows of this agent have."""
    return uuid.uuid5(uuid.NAMESPACE_URL, did)


def create_time_usage(began: str | datetime, lasts: timedelta = HOUR, agent: str = ADA, **fields: Any) -> list[UsageRecord]:
    """Insert the time usage of one sandbox, one record for each day."""
    begin = parse_utc(began) if isinstance(began, str) else began
    defaults = {
        "item": UsageKind.TIME, "source": f"transition {next(_sequence)}", "agent_did": agent, "state": "waiting",
        "holder": derive_lease_id(agent) if agent else None, "environment_id": "game-1" if agent else "",
        "provider": "docker", "memory_mib": 512, "millicpus": 1000,
    }  # fmt: skip
    return UsageRecord.objects.bulk_create(
        UsageRecord(day=day, began_at=start, ended_at=end, **{**defaults, **fields})
        for day, start, end in intervals.split_by_day(begin, begin + lasts)
    )


def create_storage_usage(began: str, lasts: timedelta, size_bytes: int, **fields: Any) -> list[UsageRecord]:
    return create_time_usage(
        began, lasts, item=UsageKind.STORAGE, state="", memory_mib=0, millicpus=0, size_bytes=size_bytes, **fields
    )


def create_token_usage(began: str | datetime, usd: str, number: int = 1, **fields: Any) -> list[UsageRecord]:
    return create_time_usage(
        began, timedelta(seconds=1), item=UsageKind.TOKENS, state="", memory_mib=0, millicpus=0, calls=number, usd=Decimal(usd),
        **{"model": "m"} | fields,
    )  # fmt: skip


def create_sandbox(agent: str = ADA, provider: str = "cloudflare", memory_mib: int = 1024, millicpus: int = 250) -> Sandbox:
    """Insert a destroyed, measured sandbox of this size. The default is Cloudflare's basic type."""
    pool = Pool.objects.get_or_create(name="box", defaults={"provider": "memory"})[0]
    moment = parse_utc("2026-01-01")
    return Sandbox.objects.create(
        pool=pool, agent_did=agent, environment_id="game-1", holder=derive_lease_id(agent), provider=provider,
        memory_mib=memory_mib, millicpus=millicpus, pids=64, state="destroyed", measured=True,
        state_since=moment, last_used_at=moment, created_at=moment, destroyed_at=moment,
    )  # fmt: skip


def create_reading(began: str | datetime, lasts: timedelta, of: Sandbox, cpu: timedelta, memory_mib: int = 0) -> Reading:
    """Insert an unmetered reading of a sandbox."""
    begin = parse_utc(began) if isinstance(began, str) else began
    micros = cpu // timedelta(microseconds=1)
    return Reading.objects.create(
        sandbox=of, incarnation=1, number=next(_sequence), holder=of.holder, since=begin, at=begin + lasts, counted=micros,
        cpu_micros=micros, memory_mib=memory_mib,
    )  # fmt: skip


def create_rate(item: str, usd: str, since: str = "2020-01-01", provider: str = "acme", **fields: Any) -> Rate:
    """Insert a rate without validation, so that it may have begun already."""
    defaults = {"provider": provider, "item": item, "usd": Decimal(usd), "valid_from": parse_utc(since)}
    return Rate.objects.bulk_create([Rate(**{**defaults, **fields})])[0]


def price(now: datetime = NOW) -> None:
    """Price all usage that is not priced yet."""
    costs.price_usage(now=now)


def price_and_sum(**filters: Any) -> Decimal:
    """Price all usage, and return the sum of the cost records."""
    price()
    return sum(CostRecord.objects.filter(**filters).values_list("usd", flat=True), Decimal(0))


def price_and_list(*names: str, **filters: Any) -> list[tuple[Any, ...]]:
    """Price all usage, and return columns of the cost records, ordered by day and lease."""
    price()
    return list_cost_values(*names, **filters)


def list_cost_records() -> list[tuple[Any, ...]]:
    return sorted(CostRecord.objects.values_list(*COST_FIELDS), key=str)


def list_cost_values(*names: str, **filters: Any) -> list[tuple[Any, ...]]:
    """Return columns of the cost records, ordered by day and lease."""
    return [*CostRecord.objects.filter(**filters).order_by("day", "holder", "item", "rate_id").values_list(*names)]


def create_llm_call(lease: Lease, **fields: Any) -> LlmCall:
    """Insert an ended, priced and uncounted model call of a lease."""
    defaults = {
        "call_id": uuid.uuid4().hex, "holder": lease.pk, "agent_did": lease.agent_did, "model": "gpt", "started_at": NOW,
        "environment_id": lease.environment_id, "deadline_at": NOW + MINUTE, "ended_at": NOW + MINUTE, "outcome": "ok",
        "input_tokens": 100, "cached_tokens": 40, "output_tokens": 7, "cost": Decimal("0.001"), "priced": "upstream",
    }  # fmt: skip
    return LlmCall.objects.create(**defaults | fields)


# --- accounts and statements ------------------------------------------------------------------------------------------


def get_house_account() -> Account:
    return Account.objects.get(name=HOUSE_ACCOUNT_NAME)


def join_account(account: Account | str, since: str = "", agent: str = ADA) -> Membership:
    """Make an agent a member of an account. An account given by name is created if necessary."""
    row = account if isinstance(account, Account) else Account.objects.get_or_create(name=account)[0]
    return Membership.objects.create(agent_did=agent, account=row, since=parse_day(since) if since else None)


def advance_and_price(now: datetime) -> None:
    """Advance the watermarks of metering to `now` without metering, and price all usage."""
    for name in metering.WATERMARK_NAMES:
        Watermark.objects.update_or_create(name=name, defaults={"at": now})
    costs.price_usage(now=now)


def close_month(account: Account, month: date, *, now: datetime) -> Statement:
    return statements.close_month(account, month, now=now, actor=console_user())[0]


def list_statement_lines(statement: Statement) -> list[tuple[Any, ...]]:
    return [*statement.lines.values_list("kind", "for_month", "agent_did", "item", "quantity", "usd")]


def is_balanced(account: Account) -> bool:
    """Return whether an account's statements add up to its costs, line by line, up to its last closed month."""
    last = Statement.objects.filter(account=account).order_by("month").last()
    if last is None:
        return not statement_lines.sum_billed_costs(account)
    derived = statement_lines.sum_derived_costs(account, until=dates.start_of_next_month(last.month))
    billed = {key: amount.usd for key, amount in statement_lines.sum_billed_costs(account).items() if amount.usd}
    return billed == {key: amount.usd for key, amount in derived.items() if amount.usd}


# --- budgets ----------------------------------------------------------------------------------------------------------


def create_budget(amount: Any = 1, unit: str = "hours", period: str = "day", *, now: datetime = NOW, **fields: Any) -> Budget:
    """Save a budget as an operator does: on everything, unless `fields` has another scope."""
    budget = Budget(**{"scope": "all", "amount": Decimal(amount), "unit": unit, "period": period} | fields)
    budgets.create_budget(budget, now=now)
    return budget


def create_ten_hours_a_day() -> None:
    """Insert ten hours at 1 USD on each day from 16 to 20 November, and six hours on the 21st until NOW, which is noon."""
    create_rate("time", "1")
    for day in range(16, 21):
        create_time_usage(f"2026-11-{day}T06:00", 10 * HOUR, provider="acme")
    create_time_usage("2026-11-21T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)


def run_billing_sweeps(now: datetime) -> dict[str, int]:
    """Run one pass of metering, pricing and budget enforcement. Return the counts of the enforcement."""
    metering.meter_usage(now=now)
    costs.price_usage(now=now)
    result = budget_enforcement.enforce_budgets(now=now)
    assert not result.failures
    return result.counts


def run_command(lease: Lease, *argv: str, now: datetime = NOW) -> bytes:
    return execution.exec_command(lease.pk, Command(argv=argv or ["true"], timeout=MINUTE), now=now)[1].stdout


def start_run(lease: Lease, *, now: datetime = NOW, timeout: timedelta = 10 * HOUR) -> Run:
    """Open a run that does not end by itself."""
    sandbox = execution.ensure_sandbox_ready(lease.pk, now=now)
    run = operations.open_run(sandbox, Command(argv=["sleep"], timeout=timeout), now=now)
    assert run
    return run


def get_rounded_spending(budget: Budget) -> Decimal:
    """Return the recorded spending, rounded to three places."""
    budget.refresh_from_db()
    return round(budget.spent, 3)


def list_budget_events() -> list[str]:
    events = Event.objects.filter(kind__startswith="budget.").order_by("at", "kind")
    return [event.kind.removeprefix("budget.") for event in events]


def get_lease_end(lease: Lease) -> tuple[str, str]:
    """Return a lease's current status and end reason."""
    lease.refresh_from_db()
    return lease.status, lease.end_reason


@contextmanager
def expect_refusal(**details: Any) -> Iterator[Any]:
    """Expect BudgetExhausted with these details."""
    with pytest.raises(BudgetExhausted) as caught:
        yield caught
    assert {name: caught.value.extra[name] for name in details} == details
