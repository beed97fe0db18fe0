"""Seed ten weeks of usage and costs. Usage records are written directly, everything else by domain verbs."""

import itertools
import random
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from billing import costs, intervals, metering, statements
from billing.dates import start_of_day, start_of_next_month
from billing.models import Account, Membership, Rate, UsageKind, UsageRecord
from leases.models import Agent

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
CLOUDFLARE_SIZE = {"provider": "cloudflare", "memory_mib": 1024, "millicpus": 250}
DOCKER_SIZE = {"provider": "docker", "memory_mib": 2048, "millicpus": 1000}
MODAL_SIZE = {"provider": "modal", "memory_mib": 4096, "millicpus": 2000}
ACCOUNTS = {
    "research": ("Research group, third floor", ["did:plc:ada", "did:plc:grace", "did:plc:archivist"]),
    "tournament": ("Catan tournament 2026", ["did:web:agents.example.com:alan", "did:plc:hurry"]),
}
_numbers = itertools.count(10**9)


def seed_money(now: datetime) -> None:
    for name, (title, agents) in ACCOUNTS.items():
        account = Account.objects.create(name=name, title=title)
        for agent in agents:
            Membership.objects.create(agent_did=agent, account=account)
    began = now - timedelta(days=70)
    Rate.objects.bulk_create([
        Rate(provider="docker", item="time", usd=Decimal("0.031"), valid_from=began, source="The rack's invoice"),
        Rate(provider="modal", item="cpu", usd=Decimal("0.0023574"), valid_from=began, source="The provider's page of prices"),
        Rate(provider="docker", item="time", usd=Decimal("0.035"), valid_from=now + 20 * DAY, source="Next year's contract"),
    ])  # fmt: skip
    chance = random.Random(7)
    for agent in [*(did for _, agents in ACCOUNTS.values() for did in agents), "did:plc:worker0", "did:plc:worker1"]:
        Agent.objects.get_or_create(did=agent)
        size = chance.choice([CLOUDFLARE_SIZE, DOCKER_SIZE, DOCKER_SIZE, MODAL_SIZE])
        for number in range(69, -1, -1):
            if chance.random() < 0.7:
                start = now.replace(hour=0, minute=0) - timedelta(days=number) + chance.random() * 5 * HOUR
                _create_usage(agent, min(start, now - 3 * HOUR), chance, size)
    metering.meter_usage(now=now)
    costs.price_usage(now=now)
    last = now.astimezone(UTC).date().replace(day=1)
    for account in Account.objects.order_by("name"):
        if account.name == "research":
            statements.grant_credit(account, Decimal("25"), now=now - timedelta(days=60), actor="admin", reason="For a start")
        for first in statements.find_open_months(account, now=now):
            if start_of_next_month(first) < last or account.name != "tournament":
                statements.close_month(account, first, now=max(now - timedelta(days=1), start_of_day(last)), actor="admin")
    research, house = Account.objects.get(name="research"), Account.objects.get(name="house")
    Membership.objects.create(agent_did="did:plc:hurry", account=research, since=last)
    Membership.objects.create(agent_did="did:plc:grace", account=house, since=now.date() + timedelta(days=5))
    costs.price_usage(now=now)
    mistake = statements.grant_credit(research, Decimal("400"), now=now - 5 * HOUR, actor="admin", reason="For the workshop")
    statements.reverse_credit(mistake.pk, now=now - 4 * HOUR, actor="admin", reason="It was the other group's")
    statements.grant_credit(research, Decimal("12.50"), now=now - 3 * HOUR, actor="admin", reason="Lost state on Tuesday")


def _create_usage(agent: str, begin: datetime, chance: random.Random, size: dict[str, object]) -> None:
    holder, environment = uuid.uuid5(uuid.NAMESPACE_URL, f"{agent}{begin:%U}"), f"study-{begin:%U}"
    whose = {"agent_did": agent, "holder": holder, "environment_id": environment}
    lasts = chance.random() * 9 * HOUR
    UsageRecord.objects.bulk_create(
        UsageRecord(
            item=UsageKind.TIME, source=f"transition {next(_numbers)}", day=day, began_at=start, ended_at=end, state="waiting",
            **whose, **size,
        )
        for day, start, end in intervals.split_by_day(begin, min(begin + lasts, begin.replace(hour=23)))
    )  # fmt: skip
    if chance.random() < 0.5:
        calls = chance.randrange(1, 90)
        asked = UsageRecord(
            item=UsageKind.TOKENS,
            source=f"calls of gpt-4o-mini for {holder} {next(_numbers)}",
            day=begin.date(),
            began_at=begin,
            ended_at=begin + HOUR,
            model="gpt-4o-mini",
            calls=calls,
            input_tokens=900 * calls,
            output_tokens=70 * calls,
            usd=Decimal(calls) * Decimal("0.0041237"),
            provider=size["provider"],
            **whose,
        )
        UsageRecord.objects.bulk_create([asked])
