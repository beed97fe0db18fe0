"""Documents of closed months: no later fact, price or derivation changes a byte of them."""

import json
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from billing import costs, derivation, metering, statements
from billing.api.statements import find_lines, render_lines_csv, render_statement_detail, render_statements_csv
from billing.focus.export import AccountMonth, iter_csv
from billing.models import Rate, Statement, StatementLine, Tab
from leases.models import Lease
from sandboxes.egress import model_pricing
from sandboxes.egress.logs import upstream_records
from sandboxes.egress.repricing import reprice_calls
from sandboxes.models import LlmCall
from tests.support.billing import (
    BOB,
    HOUR,
    close_month,
    create_llm_call,
    create_rate,
    create_time_usage,
    get_house_account,
    join_account,
    parse_day,
    parse_utc,
)
from tests.support.model_rates import create_rates

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
NOVEMBER, DECEMBER = parse_day("2026-11-01"), parse_day("2026-12-01")
CALLED, JANUARY = parse_utc("2026-11-21T12:00"), parse_utc("2027-01-01T00:00")
EARLY = parse_utc("2026-11-01T00:00")


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    """Lease with three calls: one priced by rate, one estimated, one without a price. The month is metered and not closed."""
    create_rate("time", "0.335", allowance=Decimal("0.5"))
    create_rates("m", input=3, output=5, since=EARLY)
    lease = grant(now=CALLED)
    call(lease, input_tokens=10**6, output_tokens=7, tokens=10**6 + 7)
    call(lease, input_tokens=9, output_tokens=None, tokens=40, cost=Decimal("0.123"), priced="estimate", outcome="cut")
    call(lease, model="unknown", input_tokens=10**5, output_tokens=5, tokens=10**5 + 5)
    create_time_usage("2026-11-02T22:00", 3 * HOUR, lease.agent_did, provider="acme")
    create_time_usage("2026-11-30T23:00", HOUR, BOB, provider="acme")
    model_pricing.price_calls(CALLED)
    derive(JANUARY)
    return lease


def call(lease: Lease, *, at: datetime = CALLED, **fields: Any) -> LlmCall:
    fields = {"model": "m", "cached_tokens": 0, "cost": None, "priced": ""} | fields
    return create_llm_call(lease, started_at=at, ended_at=at, **fields)


def derive(now: datetime) -> None:
    metering.meter_usage(now=now)
    costs.price_usage(now=now)


def render_documents(month: date = NOVEMBER) -> dict[str, str]:
    statement = Statement.objects.get(account=get_house_account(), month=month)
    source = AccountMonth.of(statement)
    return {
        "statement": json.dumps(render_statement_detail(statement), default=str),
        "lines": render_lines_csv(find_lines(statement)),
        "list": render_statements_csv(Statement.objects.filter(pk=statement.pk)),
        "FOCUS": "".join(iter_csv([source], daily=False)),
        "FOCUS by day": "".join(iter_csv([source], daily=True)),
    }


def settle_late(lease: Lease) -> None:
    call(lease, input_tokens=10**6, output_tokens=0, tokens=10**6, cost=Decimal(2), priced="upstream")


def record_late(lease: Lease) -> None:
    row = LlmCall.objects.get(outcome="cut")
    line = {"call": row.call_id, "status": "success", "error": "", "input": 9, "cached": 0, "output": 99, "cost": 1.25}
    assert upstream_records.apply_lines([json.dumps(line).encode()], now=JANUARY)["recorded"] == 1


def price_late(lease: Lease) -> None:
    create_rates("unknown", input=7, output=7, since=EARLY)
    assert model_pricing.price_calls(JANUARY) == 1


def reprice(lease: Lease) -> None:
    create_rates("m", input=30, output=1, since=EARLY)
    assert reprice_calls(EARLY, now=JANUARY, apply=True).total.changed


def change_records(lease: Lease) -> None:
    create_time_usage("2026-11-07T10:00", 2 * HOUR, lease.agent_did, provider="acme")
    Rate.objects.create(provider="acme", item="time", usd=Decimal(9), valid_from=parse_utc("2099-01-01T00:00"))


def move_and_rename(lease: Lease) -> None:
    join_account("team", "2027-01-01", lease.agent_did)
    Tab.objects.update(project="other", environment_type="other")
    account = get_house_account()
    account.title = "House of agents"
    account.save()


def derive_again(lease: Lease) -> None:
    derivation.reset_usage_and_costs()
    derivation.derive_usage_and_costs(now=JANUARY)


CHANGES = [settle_late, record_late, price_late, reprice, change_records, move_and_rename, derive_again]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_document_of_a_closed_month_changes_after(change: Callable[[Lease], None], lease: Lease) -> None:
    close_month(get_house_account(), NOVEMBER, now=JANUARY)
    documents = render_documents()
    change(lease)
    assert render_documents() == documents
    derive(JANUARY)
    assert render_documents() == documents
    close_month(get_house_account(), DECEMBER, now=JANUARY)
    assert render_documents() == documents


def test_all_changes_together_are_corrections_on_the_next_statement_with_their_tokens(lease: Lease) -> None:
    first = close_month(get_house_account(), NOVEMBER, now=JANUARY)
    for change in (settle_late, record_late, price_late, reprice, change_records):
        change(lease)
    derive(JANUARY)
    statement = close_month(get_house_account(), DECEMBER, now=JANUARY)
    corrections = statement.lines.filter(kind=StatementLine.Kind.CORRECTION, item="llm")
    assert {line.model: (line.output_tokens, line.estimated_tokens) for line in corrections} == {
        "m": (99, -31), "unknown": (0, 0),
    }  # fmt: skip
    assert statements.find_open_months(get_house_account(), now=JANUARY) == []
    assert first.lines.get(item="llm", model="m").estimated_tokens == 31
