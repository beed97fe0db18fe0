"""Pricing of model calls by token rates."""

from datetime import datetime, timedelta
from decimal import Decimal
from importlib import import_module
from itertools import count
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.db.models import Model
from django.utils import timezone

from sandboxes.claims import Progress, hold
from sandboxes.db.migration_operations import ChangeRowsInBatches
from sandboxes.egress import model_pricing
from sandboxes.egress.amounts import parse_usd
from sandboxes.egress.model_pricing import RateBook, RateTable, find_candidate_names
from sandboxes.models import LlmCall, TokenRate
from sandboxes.models.token_rates import find_superseded, save_rates
from tests.conftest import MINUTE, NOW
from tests.support.model_rates import build_rates, create_rates

DAY = timedelta(days=1)
CLAUDE = {"input": "3", "cache_read": "0.30", "cache_write_5m": "3.75", "cache_write_1h": "6", "output": "15"}


def book(pattern: str = "m", **usd: Any) -> RateBook:
    return number(RateBook(build_rates(pattern, **usd)))


def number(rates: RateBook) -> RateBook:
    for row, pk in zip(rates.rows, count(1), strict=False):
        row.pk = pk
    return rates


def price(rates: RateBook, tier: str = "", **counts: int) -> Decimal | None:
    found = rates.price(counts, tier)
    return found and found.usd


def select(rows: list[TokenRate], *models: str, at: datetime = NOW) -> Decimal | None:
    """Price a million input tokens of a model by its rows among others."""
    return price(RateTable(rows).get_book(find_candidate_names(*models), at), input=10**6)


# --- amounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "usd"),
    [
        ({"input": 1000, "cache_read": 20_000, "cache_write_5m": 8000, "output": 500}, "0.0465"),
        ({"input": 1000, "cache_read": 20_000, "cache_write_1h": 8000, "output": 500}, "0.0645"),
        ({"input": 600, "cache_read": 400, "output": 50}, "0.00267"),  # (600 x 3 + 400 x 0.30 + 50 x 15) / a million
        ({"output": 1}, "0.000015"),
        ({}, "0"),
        ({"input": 10**8, "output": 10**8}, "1800"),
    ],
)
def test_price_is_the_sum_over_the_kinds(counts: dict[str, int], usd: str) -> None:
    found = book(**CLAUDE).price(counts)
    assert found and (found.usd, found.complete) == (Decimal(usd), True)


def test_price_names_the_rows_that_it_was_calculated_from() -> None:
    rates = book(**CLAUDE)
    kinds = {row.pk: row.kind for row in rates.rows}
    found = rates.price({"input": 1, "audio_input": 1, "output": 1})
    assert found and [kinds[pk] for pk in found.rates] == ["input", "output"]


@pytest.mark.parametrize(
    ("size", "usd"),
    [
        ({"input": 300_000, "output": 1000}, "1.8225"),
        ({"input": 200_000, "output": 1000}, "0.615"),
        ({"input": 200_001, "output": 1000}, "1.222506"),
        ({"input": 1000, "cache_read": 299_000, "output": 1000}, "0.1182"),  # 6, 0.30 and 22.5: cached input has one price
    ],
)
def test_call_above_a_size_costs_the_rates_from_that_size(size: dict[str, int], usd: str) -> None:
    higher = build_rates("m", tokens_from=200_001, input=6, output="22.5")
    assert price(number(RateBook([*build_rates("m", **CLAUDE), *higher])), **size) == Decimal(usd)


@pytest.mark.parametrize(("tier", "usd"), [("", 1), ("priority", 2), ("flex", 1)])
def test_rates_of_the_service_tier_precede_those_without_a_tier(tier: str, usd: int) -> None:
    rows = [*build_rates("m", input=1), *build_rates("m", input=2, tier="priority"), *build_rates("m", input=9, tier="batch")]
    assert price(number(RateBook(rows)), tier, input=10**6) == usd


@pytest.mark.parametrize(
    ("kind", "usd"),
    [
        ("cache_read", 1), ("cache_write_5m", 1), ("cache_write_1h", 1), ("audio_input", 1), ("image_input", 1),
        ("reasoning", 2), ("audio_output", 2), ("image_output", 2),
    ],
)  # fmt: skip
def test_kind_without_a_row_costs_as_input_or_output(kind: str, usd: int) -> None:
    found = book(input=1, output=2).price({kind: 10**6})
    assert found and (found.usd, found.complete) == (usd, True)


def test_cache_write_for_an_hour_falls_back_to_that_for_five_minutes() -> None:
    assert price(book(input=1, cache_write_5m="1.25"), cache_write_1h=10**6) == Decimal("1.25")


@pytest.mark.parametrize("kind", ["web_search", "output", "unheard_of"])
def test_kind_without_any_row_makes_a_price_incomplete(kind: str) -> None:
    found = book(input=1).price({"input": 10**6, kind: 1})
    assert found and (found.usd, found.complete) == (1, False)


def test_web_searches_are_priced_by_a_million() -> None:
    assert price(book(input=1, web_search=10_000), web_search=2) == Decimal("0.02")


@pytest.mark.parametrize(
    ("counts", "usd"),
    [({"input": 10**9 + 1}, None), ({"output": 10**9}, None), ({"input": 1, "output": 999_999_999}, "9999.999991000")],
)
def test_amount_out_of_range_has_no_price(counts: dict[str, int], usd: str | None) -> None:
    assert price(book(input=1, output=10), **counts) == (None if usd is None else Decimal(usd))


def test_book_without_rows_has_no_price_and_no_estimate() -> None:
    assert (RateBook([]).price({"input": 1}), RateBook([]).estimate(1, 1)) == (None, None)


# --- estimates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usd", "size", "expected"),
    [
        ({"input": 3, "cache_read": "0.3", "output": 15}, (1000, 100), "0.0045"),
        (CLAUDE, (1000, 100), "0.0075"),  # all input might be written to the cache for an hour
        ({"input": 1, "output": 2, "reasoning": 3}, (0, 10**6), "3"),
        ({"input": "0.02"}, (10**6, 10**6), "0.02"),  # embeddings have no output
        ({"output": 1}, (1, 1), None),
        ({"input": "0.0001", "output": 1}, (1, 0), "0.000000001"),
        ({"input": 900_000, "output": 900_000}, (10**7, 10**7), "9999.999999999"),  # the largest price of a call
    ],
)
def test_estimate_is_the_price_of_the_dearest_kinds(usd: Any, size: tuple[int, int], expected: str | None) -> None:
    assert book(**usd).estimate(*size) == (None if expected is None else Decimal(expected))


def test_estimate_covers_each_price_of_a_call_of_that_size() -> None:
    rows = [*build_rates("m", **CLAUDE), *build_rates("m", tokens_from=200_001, input=12, output=30)]
    rates = number(RateBook(rows))
    for size in (1000, 200_000, 200_001, 10**6):
        for kind in ("input", "cache_read", "cache_write_5m", "cache_write_1h", "audio_input"):
            found, most = rates.price({kind: size, "reasoning": 500}), rates.estimate(size, 500)
            assert found and most and found.usd <= most, (size, kind)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (("gpt-4o",), ["gpt-4o"]),
        (("gpt-4o-2024-08-06", "gpt-4o"), ["gpt-4o-2024-08-06", "gpt-4o"]),
        (("openai/gpt-4o-2024-08-06",), ["openai/gpt-4o-2024-08-06", "gpt-4o-2024-08-06", "openai/gpt-4o", "gpt-4o"]),
        (
            ("bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0",),
            [
                "bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0", "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
                "claude-sonnet-4-5-20250929-v1:0", "bedrock/us.anthropic.claude-sonnet-4-5-20250929",
                "us.anthropic.claude-sonnet-4-5-20250929", "claude-sonnet-4-5-20250929",
                "bedrock/us.anthropic.claude-sonnet-4-5", "us.anthropic.claude-sonnet-4-5", "claude-sonnet-4-5",
            ],
        ),
        (("amazon.nova-pro-v1:0",), ["amazon.nova-pro-v1:0", "nova-pro-v1:0", "amazon.nova-pro", "nova-pro"]),
        (("vertex_ai/claude-opus-4-1@20250805",), [
            "vertex_ai/claude-opus-4-1@20250805", "claude-opus-4-1@20250805", "vertex_ai/claude-opus-4-1", "claude-opus-4-1",
        ]),
        (("gpt-4.1-mini",), ["gpt-4.1-mini"]),
        (("gpt-4-0613",), ["gpt-4-0613"]),
        (("meta-llama/Llama-3.3-70B-Instruct",), ["meta-llama/Llama-3.3-70B-Instruct", "Llama-3.3-70B-Instruct"]),
        (("", "m"), ["m"]),
        (("m\0",), []),
        (("openai/",), ["openai/"]),
    ],
)  # fmt: skip
def test_names_lose_provider_then_version_then_date(models: tuple[str, ...], names: list[str]) -> None:
    assert find_candidate_names(*models) == names


@pytest.mark.parametrize(
    ("model", "usd"),
    [("gpt-4o-mini", 1), ("gpt-4o-mini-new", 2), ("gpt-4o", 3), ("claude-3", 4), ("gpt-[4]", 5), ("GPT-4o", 4)],
)
def test_most_specific_pattern_applies(model: str, usd: int) -> None:
    prices = {"*": 4, "gpt-4o-mini*": 2, "gpt-4o-mini": 1, "gpt-*": 3, "gpt-[4]": 5}
    known = [row for pattern, usd in prices.items() for row in build_rates(pattern, input=usd)]
    assert {select(known, model), select(known[::-1], model)} == {Decimal(usd)}


@pytest.mark.parametrize(
    ("prices", "models", "usd"),
    [
        ({"gpt-5*": 9, "gpt-5-mini": 1}, ("gpt-5-mini-2025-08-07", "gpt-5-mini"), 1),
        ({"gpt-5*": 9, "gpt-5-mini": 1}, ("gpt-5-mini-2025-08-07",), 1),
        ({"gpt-4o": 1, "gpt-4o-2024-05-13": 2}, ("gpt-4o-2024-05-13", "gpt-4o"), 2),
        ({"gpt-4o": 1}, ("gpt-4o-2024-08-06",), 1),
        ({"gpt-4o": 1}, ("openai/gpt-4o",), 1),
        ({"claude-*": 1, "*": 9}, ("bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0",), 1),
        ({"gpt-4*": 1, "*": 9}, ("my-deployment", "gpt-4o"), 1),
        ({"azure/gpt-4o": 2, "gpt-4o": 1}, ("azure/gpt-4o-2024-08-06",), 2),
        ({"claude-*": 9, "gpt-*": 1}, ("gpt-4o-2024-08-06", "claude-sonnet"), 1),
        ({"house": 1, "gpt-4o": 9}, ("house", "gpt-4o"), 1),
        ({"other": 1}, ("m",), None),
        ({"*": 1}, ("", ""), None),
    ],
)
def test_a_rate_applies_to_each_name_of_a_model(prices: dict[str, int], models: tuple[str, ...], usd: int | None) -> None:
    assert select([row for pattern, usd in prices.items() for row in build_rates(pattern, input=usd)], *models) == usd


def test_all_kinds_of_a_call_have_the_rates_of_one_pattern() -> None:
    rows = [*build_rates("gpt-*", input=1, cache_read="0.1"), *build_rates("gpt-4o", input=2)]
    assert price(number(RateTable(rows).get_book(["gpt-4o"], NOW)), cache_read=10**6) == 2


def test_rate_applies_from_its_date() -> None:
    starts = {"1": NOW - DAY, "2": NOW, "3": NOW + DAY}
    known = [row for usd, since in starts.items() for row in build_rates("m", input=usd, since=since)]
    known += build_rates("m*", input=9, since=NOW)
    moments = {NOW - 2 * DAY: None, NOW - DAY: 1, NOW - MINUTE: 1, NOW: 2, NOW + DAY - MINUTE: 2, NOW + 2 * DAY: 3}
    assert {at: select(known, "m", at=at) for at in moments} == moments


@pytest.mark.django_db
def test_two_queries_load_the_rates_of_a_call(django_assert_num_queries: Any) -> None:
    for pattern in ("m", "m*", "other", "x?"):
        create_rates(pattern, input=1)
    create_rates("m", input=2, since=NOW + MINUTE)
    with django_assert_num_queries(2):
        found = model_pricing.load_rates(["m"], at=NOW)
    assert [(row.pattern, row.usd_per_million) for row in found.rows] == [("m", 1)]
    assert {row.pattern: row.is_pattern for row in TokenRate.objects.all()} == {
        "m": False,
        "m*": True,
        "other": False,
        "x?": True,
    }


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


# --- rows of rates ----------------------------------------------------------------------------------------------------


def save(rate: TokenRate) -> TokenRate:
    rate.save()
    return rate


@pytest.mark.django_db
def test_a_rate_that_has_begun_is_neither_changed_nor_deleted() -> None:
    rate = save(*build_rates("m", input=3))
    rate.usd_per_million = Decimal(300)
    for change in (rate.save, rate.delete):
        with pytest.raises(ValidationError, match="This rate has begun"):
            change()
    assert TokenRate.objects.get().usd_per_million == 3


@pytest.mark.django_db
def test_a_scheduled_rate_may_be_changed_and_deleted() -> None:
    rate = save(*build_rates("m", input=3, since=timezone.now() + DAY))
    rate.usd_per_million = Decimal(4)
    assert save(rate).usd_per_million == 4
    rate.delete()
    assert not TokenRate.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("wrong", [{"usd": -1}, {"kind": "other"}, {"pattern": ""}, {"usd": "1e-10"}, {"usd": 10**6}])
def test_an_invalid_rate_is_refused(wrong: dict[str, Any]) -> None:
    rows = build_rates(wrong.get("pattern", "m"), **{wrong.get("kind", "input"): wrong.get("usd", 1)})
    for attempt in (rows[0].save, lambda: save_rates(rows)):
        with pytest.raises(ValidationError):
            attempt()
    assert not TokenRate.objects.exists()


@pytest.mark.django_db
def test_rates_are_saved_all_or_none() -> None:
    create_rates("m", input=1, since=NOW)
    for rows in (build_rates("m", output=1, input=1, since=NOW), 2 * build_rates("n", input=1)):
        with pytest.raises(ValidationError):
            save_rates(rows)
    assert TokenRate.objects.count() == 1


@pytest.mark.django_db
def test_rates_of_the_version_before_are_carried_over() -> None:
    """Also by a repetition after a crash."""
    with connection.cursor() as cursor:  # the constraint of that version
        cursor.execute(
            "CREATE UNIQUE INDEX tokenrate_once ON sandboxes_tokenrate (pattern, kind, tokens_from, tier, valid_from)"
        )
    historical = MigrationLoader(connection).project_state(("sandboxes", "0080_token_rates")).apps
    before: type[Model] = historical.get_model("sandboxes", "ModelRate")
    table: Any = before._base_manager
    table.create(pattern="gpt-*", input_usd="2.5", cached_usd="1.25", output_usd=10, valid_from=NOW - DAY)
    table.create(pattern="m", input_usd=1, output_usd=0, valid_from=NOW)
    migration = import_module("sandboxes.migrations.0081_carry_model_rates")
    [operation] = [each for each in migration.Migration.operations if isinstance(each, ChangeRowsInBatches)]
    for _ in range(2):
        operation.change(table.all())
    assert [*TokenRate.objects.values_list("pattern", "kind", "usd_per_million", "valid_from")] == [
        ("gpt-*", "cache_read", Decimal("1.25"), NOW - DAY),
        ("gpt-*", "input", Decimal("2.5"), NOW - DAY),
        ("gpt-*", "output", 10, NOW - DAY),
        ("m", "input", 1, NOW),
        ("m", "output", 0, NOW),
    ]


@pytest.mark.django_db
def test_a_newer_rate_with_the_same_start_supersedes_the_earlier_one() -> None:
    wrong, other = save_all(build_rates("m", input=3, output=15, since=NOW))
    [right] = save_all(build_rates("m", input=300, since=NOW))
    save_all(build_rates("m", input=9, since=NOW - DAY)), save_all(build_rates("m", input=7, since=NOW, tier="flex"))
    book = model_pricing.load_rates(["m"], at=NOW)
    found = book.price({"input": 10**6})
    assert found and (found.usd, found.rates) == (300, (right.pk,))
    assert book.estimate(10**6, 0) == 300
    assert [(row.kind, row.tier, row.usd_per_million) for row in book.list_current()] == [
        ("input", "", 300), ("input", "flex", 7), ("output", "", 15),
    ]  # fmt: skip
    assert [*find_superseded()] == [wrong]
    assert [*find_superseded(TokenRate.objects.filter(pk=other.pk))] == []
    with pytest.raises(ValidationError, match="A rate with this start and price exists"):
        save_rates(build_rates("m", input=300, since=NOW))
    save_all(build_rates("m", input=3, since=NOW))  # the earlier price is right after all
    assert price(model_pricing.load_rates(["m"], at=NOW), input=10**6) == 3


def save_all(rows: list[TokenRate]) -> list[TokenRate]:
    save_rates(rows)
    return rows


# --- calls ------------------------------------------------------------------------------------------------------------


def call(**fields: Any) -> LlmCall:
    ended = {
        "started_at": NOW - MINUTE, "deadline_at": NOW, "ended_at": NOW - MINUTE / 2, "outcome": "ok", "model": "m",
        "input_tokens": 1_000_000, "output_tokens": 1_000_000,
    }  # fmt: skip
    return LlmCall.objects.create(call_id=f"{LlmCall.objects.count():032x}", **{**ended, **fields})


NO_COUNTS = {"input_tokens": None, "output_tokens": None}


@pytest.fixture
def priced(db: None) -> None:
    create_rates("m", input=1, output=2)


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({}, 3),
        ({"cached_tokens": 7}, 3),
        ({"outcome": "cut", "output_tokens": None}, 1),
        ({"outcome": "failed", "input_tokens": None}, 2),
        ({"outcome": "ok", "output_tokens": None}, None),
        ({"outcome": "ok", "output_tokens": None, "path": "/v1/embeddings"}, 1),
        ({"outcome": "failed", **NO_COUNTS}, None),
        ({**NO_COUNTS, "token_counts": {"input": 500_000, "reasoning": 250_000}}, 1),
        ({**NO_COUNTS, "token_counts": {}}, None),
        ({"input_tokens": 0, "output_tokens": 0, "token_counts": {}}, 0),
        ({"outcome": "refused"}, None),
        ({"outcome": "open", "ended_at": None}, None),
        ({"kind": "relay"}, None),
        ({"model": "n"}, None),
        ({"model": "n", "requested_model": "openai/m"}, 3),
        ({"model": "m-2025-08-07"}, 3),
        ({"started_at": NOW - 2 * DAY}, None),
        ({"input_tokens": 10**9 + 1}, None),  # implausible
    ],
)
def test_ended_call_without_a_price_is_priced_by_rate(fields: Any, cost: int | None) -> None:
    row = call(**fields)
    assert len([*model_pricing.find_priceable(NOW)]) == (cost is not None or fields.get("input_tokens") == 10**9 + 1)
    assert model_pricing.price_calls(NOW) == (cost is not None)
    row.refresh_from_db()
    source = "rate" if row.outcome == "ok" else "estimate"  # of an interrupted call more may have been generated than is known
    assert (row.cost, row.priced) == (cost, "" if cost is None else source)
    assert model_pricing.price_calls(NOW) == 0


@pytest.mark.django_db
def test_priced_call_names_its_rows() -> None:
    rows = {rate.kind: rate.pk for rate in create_rates("m", input=1, output=2, reasoning=3)}
    row = call(token_counts={"input": 1, "cache_read": 1, "output": 1})
    assert model_pricing.price_calls(NOW) == 1
    row.refresh_from_db()
    assert row.rate_ids == [rows["input"], rows["output"]]


@pytest.mark.usefixtures("priced")
def test_call_with_a_kind_without_a_rate_counts_as_an_estimate() -> None:
    row, other = call(token_counts={"input": 10**6, "web_search": 3}), call(token_counts={"web_search": 3})
    assert model_pricing.price_calls(NOW) == 1
    row.refresh_from_db(), other.refresh_from_db()
    assert [(each.cost, each.priced) for each in (row, other)] == [(1, "estimate"), (None, "")]


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("source", ["record", "upstream", "rate", "free", "estimate"])
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
def test_one_pass_prices_all_calls_with_few_statements(django_assert_max_num_queries: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_pricing, "BATCH_SIZE", 100)
    for fields in ({"model": "n"}, {"started_at": NOW - 2 * DAY}, *[{}] * 250):
        call(**fields)
    with django_assert_max_num_queries(30), hold(Progress()) as progress:
        assert model_pricing.price_calls(NOW) == 250
    assert progress.steps >= 3
    assert model_pricing.price_calls(NOW) == 0


@pytest.mark.usefixtures("priced")
def test_call_whose_price_is_out_of_range_is_marked_and_blocks_no_other() -> None:
    create_rates("dear", input=999_999)
    first, second = call(model="dear", token_counts={"input": 10**9}), call()
    assert [model_pricing.price_calls(NOW) for _ in range(2)] == [1, 0]
    first.refresh_from_db(), second.refresh_from_db()
    assert (first.cost, first.code, second.cost, second.code) == (None, "price_refused", 3, "")


@pytest.mark.django_db
def test_any_number_of_model_names_is_priced() -> None:
    for number_ in range(model_pricing.MAX_MODELS_PER_QUERY):
        call(model=f"refused {number_}", outcome="refused", **NO_COUNTS)
        call(model=f"older {number_}", started_at=NOW - 2 * DAY)
        call(model=f"priced {number_}")
    call(model="the last one")
    create_rates("*", input=1, output=1)
    assert model_pricing.price_calls(NOW) == model_pricing.MAX_MODELS_PER_QUERY + 1


@pytest.mark.usefixtures("priced")
def test_unpriced_calls_are_counted_for_the_pattern_that_would_price_them() -> None:
    create_rates("m*", input=1)
    for model in ("m", "m", "m-mini", "n"):
        call(model=model)
    assert [model_pricing.count_priceable(pattern, NOW, 10) for pattern in ("m", "m*", "n")] == [2, 1, 0]
    assert model_pricing.count_priceable("m", NOW, 1) == 1
