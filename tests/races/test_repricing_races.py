"""Concurrent `rate reprice`: each call gets the price of the present rates once, and statements one correction."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from billing import costs, metering
from billing.models import UsageRecord
from sandboxes.claims import Progress, hold
from sandboxes.egress import repricing
from sandboxes.egress.repricing import RepricedModel, reprice_calls
from sandboxes.models import LlmCall
from tests.conftest import run_in_threads
from tests.support.billing import (
    close_month,
    create_llm_call,
    get_house_account,
    is_balanced,
    list_statement_lines,
    parse_day,
    parse_utc,
)
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db(transaction=True)
SINCE, CALLED = parse_utc("2026-11-01T00:00"), parse_utc("2026-11-21T12:00")
DECEMBER, JANUARY = parse_utc("2026-12-01T00:00"), parse_utc("2027-01-01T00:00")
CALL_COUNT = 20
ACTOR_COUNT = 4


@pytest.fixture(autouse=True)
def billed_calls(grant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 3 USD each on the statement of November. Batches are smaller than their number."""
    monkeypatch.setattr(repricing, "BATCH_SIZE", 3)
    rates = create_rates("m", input=3, output=1, since=SINCE)
    lease = grant(now=CALLED)
    fields = {"model": "m", "input_tokens": 10**6, "cached_tokens": 0, "output_tokens": 0, "rate_ids": [rates[0].pk]}
    for number in range(CALL_COUNT):
        at = CALLED + timedelta(seconds=number)
        create_llm_call(lease, started_at=at, ended_at=at, cost=Decimal(3), priced="rate", **fields)
    meter(DECEMBER)
    assert list_statement_lines(close_month(get_house_account(), parse_day("2026-11-01"), now=DECEMBER))[0][5] == 60


def meter(now: Any) -> None:
    metering.meter_usage(now=now)
    costs.price_usage(now=now)


def require_price(usd: int) -> None:
    """Require that every call has the price, that usage counts each call once, and that December corrects November once."""
    assert {*LlmCall.objects.values_list("cost", flat=True)} == {Decimal(usd)}
    meter(JANUARY)
    assert sum(UsageRecord.objects.filter(model="m").values_list("usd", flat=True)) == CALL_COUNT * usd
    [line] = list_statement_lines(close_month(get_house_account(), parse_day("2026-12-01"), now=JANUARY))
    assert (line[0], line[1], line[5]) == ("correction", parse_day("2026-11-01"), CALL_COUNT * (usd - 3))
    assert is_balanced(get_house_account())


def test_concurrent_repricing_beside_metering_changes_each_call_once() -> None:
    create_rates("m", input=10, since=SINCE)

    def act(number: int) -> RepricedModel | None:
        if number == 0:
            meter(JANUARY)
            return None
        return reprice_calls(SINCE, now=JANUARY, apply=True).total

    with run_in_threads(ACTOR_COUNT) as run:
        totals = run(act)[1:]
    assert [(type(each), each.calls) for each in totals] == [(RepricedModel, CALL_COUNT)] * (ACTOR_COUNT - 1)
    assert sum(each.changed for each in totals) == CALL_COUNT
    require_price(10)


def test_repricing_that_began_before_a_correction_does_not_undo_a_later_one() -> None:
    """The first one continues with its next batch after the second one has priced all calls by a newer rate."""
    create_rates("m", input=10, since=SINCE)

    class AfterFirstBatch(Progress):
        changed: int | None = None

        def note_progress(self) -> None:
            if self.changed is None:
                self.changed = 0
                create_rates("m", input=7, since=SINCE)
                self.changed = reprice_calls(SINCE, now=JANUARY, apply=True).total.changed

    with hold(AfterFirstBatch()) as second:
        first = reprice_calls(SINCE, now=JANUARY, apply=True).total
    assert (first.changed, second.changed) == (repricing.BATCH_SIZE, CALL_COUNT)
    require_price(7)
