"""Usage and rates as rows: what they say is the test's, how they came to be is not."""

import itertools
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from billing import intervals
from billing.models import CostRecord, Rate, UsageKind, UsageRecord
from sandboxes.models import Pool, Reading, Sandbox

ADA, BOB = "did:plc:ada", "did:plc:bob"
HOUR = timedelta(hours=1)
BASIC_INSTANCE = {"provider": "cloudflare", "memory_mib": 1024, "millicpus": 250}
COST_FIELDS = [
    "account__name", "day", "provider", "item", "agent_did", "holder", "environment_id", "rate", "whole", "quantity", "free",
    "usd",
]  # fmt: skip
_numbers = itertools.count(1)


def parse_utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def parse_day(text: str) -> date:
    return date.fromisoformat(text)


def derive_lease_id(did: str) -> uuid.UUID:
    """The one lease of an agent."""
    return uuid.uuid5(uuid.NAMESPACE_URL, did)


def create_time_usage(began: str | datetime, lasts: timedelta = HOUR, agent: str = ADA, **fields: Any) -> list[UsageRecord]:
    """A sandbox that was there from then on, as metering has it: a record for each day."""
    begin = parse_utc(began) if isinstance(began, str) else began
    known = {
        "item": UsageKind.TIME, "source": f"transition {next(_numbers)}", "agent_did": agent, "state": "waiting",
        "holder": derive_lease_id(agent) if agent else None, "environment_id": "game-1" if agent else "",
        "provider": "docker", "memory_mib": 512, "millicpus": 1000,
    }  # fmt: skip
    return UsageRecord.objects.bulk_create(
        UsageRecord(day=each, began_at=start, ended_at=end, **{**known, **fields})
        for each, start, end in intervals.split_by_day(begin, begin + lasts)
    )


def create_storage_usage(began: str, lasts: timedelta, size_bytes: int, **fields: Any) -> list[UsageRecord]:
    return create_time_usage(
        began, lasts, item=UsageKind.STORAGE, state="", memory_mib=0, millicpus=0, size_bytes=size_bytes, **fields
    )


def create_token_usage(began: str, usd: str, number: int = 1, **fields: Any) -> list[UsageRecord]:
    return create_time_usage(
        began, timedelta(seconds=1), item=UsageKind.TOKENS, state="", memory_mib=0, millicpus=0, calls=number, usd=Decimal(usd),
        model="m", **fields,
    )  # fmt: skip


def create_sandbox(agent: str = ADA, provider: str = "cloudflare", memory_mib: int = 1024, millicpus: int = 250) -> Sandbox:
    """The row of a sandbox of this size."""
    pool = Pool.objects.get_or_create(name="box", defaults={"provider": "memory"})[0]
    moment = parse_utc("2026-01-01")
    return Sandbox.objects.create(
        pool=pool,
        agent_did=agent,
        environment_id="game-1",
        holder=derive_lease_id(agent),
        provider=provider,
        memory_mib=memory_mib,
        millicpus=millicpus,
        pids=64,
        state="destroyed",
        state_since=moment,
        last_used_at=moment,
        created_at=moment,
        destroyed_at=moment,
        measured=True,
    )


def create_reading(began: str | datetime, lasts: timedelta, of: Sandbox, cpu: timedelta, memory_mib: int = 0) -> Reading:
    """What that sandbox used then, not metered yet."""
    begin = parse_utc(began) if isinstance(began, str) else began
    micros = cpu // timedelta(microseconds=1)
    return Reading.objects.create(
        sandbox=of, incarnation=1, number=next(_numbers), holder=of.holder, since=begin, at=begin + lasts, counted=micros,
        cpu_micros=micros, memory_mib=memory_mib,
    )  # fmt: skip


def create_rate(item: str, usd: str, since: str = "2020-01-01", provider: str = "acme", **fields: Any) -> Rate:
    """One that may have begun already, as one does once time has passed."""
    known = {"provider": provider, "item": item, "usd": Decimal(usd), "valid_from": parse_utc(since)}
    return Rate.objects.bulk_create([Rate(**{**known, **fields})])[0]


def list_cost_records() -> list[tuple[Any, ...]]:
    return sorted(CostRecord.objects.values_list(*COST_FIELDS), key=str)


def list_cost_values(*names: str, **only: Any) -> list[tuple[Any, ...]]:
    """Some columns of the cost records, in the order of days and leases."""
    return [*CostRecord.objects.filter(**only).order_by("day", "holder", "item", "rate_id").values_list(*names)]
