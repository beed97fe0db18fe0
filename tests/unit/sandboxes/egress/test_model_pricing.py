"""Pricing of calls by model rates."""

from collections import namedtuple
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from sandboxes.egress import model_pricing
from sandboxes.egress.amounts import parse_usd
from sandboxes.models import LlmCall, ModelRate
from tests.conftest import MINUTE, NOW

DAY = timedelta(days=1)
Rate = namedtuple("Rate", "pattern input_usd cached_usd output_usd valid_from")


def rate(pattern: str, usd: str, *, since=NOW - DAY, cached: str | None = None, output: str = "0") -> Rate:
    return Rate(pattern, Decimal(usd), None if cached is None else Decimal(cached), Decimal(output), since)


@pytest.mark.parametrize(
    ("tokens", "usd"),
    [
        ((1000, 400, 50), "0.0025"),  # 600 x 2.50 + 400 x 1.25 + 50 x 10.00; divided by a million
        ((1000, 0, 0), "0.0025"),
        ((0, 0, 1), "0.00001"),
        ((0, 0, 0), "0"),
        ((100, 400, 0), "0.000125"),  # cached tokens are capped at the input tokens
        ((10**8, 10**8, 10**8), "1125"),
    ],
)
def test_price_is_tokens_times_rate(tokens: tuple[int, int, int], usd: str) -> None:
    known = [rate("gpt-4o", "2.50", cached="1.25", output="10.00")]
    assert model_pricing.calculate_price(known, "gpt-4o", *tokens, at=NOW) == Decimal(usd)


def test_cached_tokens_without_their_own_rate_cost_as_input() -> None:
    assert model_pricing.calculate_price([rate("m", "3")], "m", 1_000_000, 1_000_000, 0, at=NOW) == 3


@pytest.mark.parametrize(
    ("model", "usd"),
    [("gpt-4o-mini", 1), ("gpt-4o-mini-2024-07-18", 2), ("gpt-4o", 3), ("claude-3", 4), ("gpt-[4]", 5), ("GPT-4o", 4)],
)
def test_most_specific_pattern_applies(model: str, usd: int) -> None:
    known = [rate("*", "4"), rate("gpt-4o-mini*", "2"), rate("gpt-4o-mini", "1"), rate("gpt-*", "3"), rate("gpt-[4]", "5")]
    for order in (known, known[::-1]):
        assert model_pricing.calculate_price(order, model, 1_000_000, 0, 0, at=NOW) == usd


def test_rate_applies_from_its_date() -> None:
    known = [rate("m", "1"), rate("m", "2", since=NOW), rate("m", "3", since=NOW + DAY), rate("m*", "9", since=NOW)]
    moments = {NOW - 2 * DAY: None, NOW - DAY: 1, NOW - MINUTE: 1, NOW: 2, NOW + DAY - MINUTE: 2, NOW + 2 * DAY: 3}
    assert {at: model_pricing.calculate_price(known, "m", 1_000_000, 0, 0, at=at) for at in moments} == moments


def test_model_without_a_rate_has_no_price() -> None:
    assert model_pricing.calculate_price([rate("other", "1")], "m", 1, 1, 1, at=NOW) is None


@pytest.mark.parametrize(
    ("said", "usd"),
    [
        (0, "0"), (-0.0, "0"), (4.9999999999999996e-05, "0.00005"), ("0.0000123", "0.0000123"), (1e-10, "0"), (5e-10, "1e-9"),
        (Decimal("9999.999999999"), "9999.999999999"),
        *[(wrong, None) for wrong in (None, "", "x", True, -1e-9, "NaN", "inf", float("nan"), 10_000, 1e9, 1e99, [], {})],
    ],
)  # fmt: skip
def test_amount_is_rounded_to_nine_places_or_rejected(said: Any, usd: str | None) -> None:
    assert parse_usd(said) == (None if usd is None else Decimal(usd))
    assert str(parse_usd(said))[0] != "-"


# --- rows -------------------------------------------------------------------------------------------------------------


def call(**fields: Any) -> LlmCall:
    ended = {
        "started_at": NOW - MINUTE, "deadline_at": NOW, "ended_at": NOW - MINUTE / 2, "outcome": "ok", "model": "m",
        "input_tokens": 1_000_000, "output_tokens": 1_000_000,
    }  # fmt: skip
    return LlmCall.objects.create(call_id=f"{LlmCall.objects.count():032x}", **{**ended, **fields})


@pytest.fixture
def priced(db: None) -> None:
    ModelRate.objects.create(pattern="m", input_usd=1, output_usd=2, valid_from=NOW - DAY)


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({}, 3),
        ({"cached_tokens": 7}, 3),
        ({"outcome": "cut", "output_tokens": None}, 1),
        ({"outcome": "failed", "input_tokens": None}, 2),
        ({"outcome": "ok", "output_tokens": None}, None),
        ({"outcome": "failed", "input_tokens": None, "output_tokens": None}, None),
        ({"outcome": "refused"}, None),
        ({"outcome": "open", "ended_at": None}, None),
        ({"kind": "relay"}, None),
        ({"model": "n"}, None),
        ({"started_at": NOW - 2 * DAY}, None),
        ({"input_tokens": 10**9 + 1}, None),  # implausible
    ],
)
def test_ended_call_without_a_price_is_priced_by_rate(fields: Any, cost: int | None) -> None:
    row = call(**fields)
    assert model_pricing.price_calls(NOW) == (cost is not None)
    row.refresh_from_db()
    assert (row.cost, row.priced) == (cost, "" if cost is None else "rate")
    assert model_pricing.price_calls(NOW) == 0


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("source", ["record", "upstream", "rate"])
def test_existing_price_is_not_changed(source: str) -> None:
    row = call(cost=Decimal("0.5"), priced=source)
    assert model_pricing.price_calls(NOW) == 0
    row.refresh_from_db()
    assert (row.cost, row.priced) == (Decimal("0.5"), source)


@pytest.mark.usefixtures("priced")
def test_rate_is_not_applied_before_the_record_timeout(settings) -> None:
    settings.LLM_RECORDS = "/var/log/records"
    call()
    assert model_pricing.price_calls(NOW) == 0
    assert model_pricing.price_calls(NOW + MINUTE) == 1


@pytest.mark.usefixtures("priced")
def test_pass_is_limited_and_not_blocked_by_calls_without_a_rate(django_assert_max_num_queries) -> None:
    for _ in range(20):
        call(model="n")
        call(started_at=NOW - 2 * DAY)
    for _ in range(5):
        call()
    with django_assert_max_num_queries(10):
        assert model_pricing.price_calls(NOW, limit=3) == 3
    assert model_pricing.price_calls(NOW, limit=3) == 2


@pytest.mark.usefixtures("priced")
def test_call_whose_price_is_out_of_range_is_marked_and_blocks_no_other() -> None:
    ModelRate.objects.create(pattern="dear", input_usd=999_999, output_usd=0, valid_from=NOW - DAY)
    first, second = call(model="dear", input_tokens=10**9), call()
    assert [model_pricing.price_calls(NOW, limit=1) for _ in range(3)] == [0, 1, 0]
    first.refresh_from_db(), second.refresh_from_db()
    assert (first.cost, first.code, second.cost, second.code) == (None, "price_refused", 3, "")


@pytest.mark.django_db
def test_invented_model_names_do_not_block_pricing() -> None:
    call(model="the one")
    for number in range(model_pricing.MAX_MODELS_PER_QUERY):
        call(model=f"refused {number}", outcome="refused", input_tokens=None, output_tokens=None)
        call(model=f"failed {number}", outcome="failed", input_tokens=None, output_tokens=None)
        call(model=f"older {number}", started_at=NOW - 2 * DAY)
    ModelRate.objects.create(pattern="*", input_usd=1, output_usd=1, valid_from=NOW - DAY)
    assert model_pricing.price_calls(NOW) == 1
