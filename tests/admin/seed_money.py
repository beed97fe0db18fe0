"""Seed six weeks of usage and costs. Usage records are written directly, everything else by domain verbs."""

import random
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from billing import costs, metering, statements
from billing.dates import start_of_day, start_of_next_month
from billing.models import Account, Membership
from leases.models import Agent
from tests.support.billing import HOUR, create_rate, create_time_usage, create_token_usage, join_account

DAY = timedelta(days=1)
CLOUDFLARE_SIZE = {"provider": "cloudflare", "memory_mib": 1024, "millicpus": 250}
DOCKER_SIZE = {"provider": "docker", "memory_mib": 2048, "millicpus": 1000}
MODAL_SIZE = {"provider": "modal", "memory_mib": 4096, "millicpus": 2000}
ACCOUNTS = {
    "research": ("Research group, third floor", ["did:plc:ada", "did:plc:grace", "did:plc:archivist"]),
    "tournament": ("Catan tournament 2026", ["did:web:agents.example.com:alan", "did:plc:hurry"]),
}


def seed_money(now: datetime) -> None:
    for name, (title, agents) in ACCOUNTS.items():
        account = Account.objects.create(name=name, title=title)
        for agent in agents:
            join_account(account, agent=agent)
    began = f"{now - 45 * DAY:%Y-%m-%d}"
    create_rate("time", "0.031", began, "docker", source="The rack's invoice")
    create_rate("cpu", "0.0023574", began, "modal", source="The provider's page of prices")
    create_rate("time", "0.035", f"{now + 20 * DAY:%Y-%m-%d}", "docker", source="Next year's contract")
    chance = random.Random(7)
    for agent in [*(did for _, agents in ACCOUNTS.values() for did in agents), "did:plc:worker0", "did:plc:worker1"]:
        Agent.objects.get_or_create(did=agent)
        size = chance.choice([CLOUDFLARE_SIZE, DOCKER_SIZE, DOCKER_SIZE, MODAL_SIZE])
        for number in range(44, -1, -1):
            if chance.random() < 0.7:
                start = now.replace(hour=0, minute=0) - number * DAY + chance.random() * 5 * HOUR
                _create_usage(agent, min(start, now - 3 * HOUR), chance, size)
    metering.meter_usage(now=now)
    costs.price_usage(now=now)
    last = now.astimezone(UTC).date().replace(day=1)
    for account in Account.objects.order_by("name"):
        if account.name == "research":
            statements.grant_credit(account, Decimal("25"), now=now - 40 * DAY, actor="admin", reason="For a start")
        for first in statements.find_open_months(account, now=now):
            if start_of_next_month(first) < last or account.name != "tournament":
                statements.close_month(account, first, now=max(now - DAY, start_of_day(last)), actor="admin")
    research, house = Account.objects.get(name="research"), Account.objects.get(name="house")
    Membership.objects.create(agent_did="did:plc:hurry", account=research, since=last)
    Membership.objects.create(agent_did="did:plc:grace", account=house, since=now.date() + 5 * DAY)
    costs.price_usage(now=now)
    mistake = statements.grant_credit(research, Decimal("400"), now=now - 5 * HOUR, actor="admin", reason="For the workshop")
    statements.reverse_credit(mistake.pk, now=now - 4 * HOUR, actor="admin", reason="It was the other group's")
    statements.grant_credit(research, Decimal("12.50"), now=now - 3 * HOUR, actor="admin", reason="Lost state on Tuesday")


def _create_usage(agent: str, begin: datetime, chance: random.Random, size: dict[str, object]) -> None:
    whose = {"holder": uuid.uuid5(uuid.NAMESPACE_URL, f"{agent}{begin:%U}"), "environment_id": f"study-{begin:%U}"}
    lasts = min(chance.random() * 9 * HOUR, begin.replace(hour=23) - begin)
    create_time_usage(begin, lasts, agent, **whose, **size)
    if chance.random() < 0.5:
        calls = chance.randrange(1, 90)
        tokens = {"input_tokens": 900 * calls, "output_tokens": 70 * calls, "model": "gpt-4o-mini"}
        usd = f"{Decimal(calls) * Decimal('0.0041237')}"
        create_token_usage(begin, usd, calls, agent=agent, provider=size["provider"], **whose, **tokens)
