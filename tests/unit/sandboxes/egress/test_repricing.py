"""Pricing of calls again, after rates were corrected or added."""

from datetime import timedelta
from decimal import Decimal
from itertools import count
from typing import Any

import pytest

from sandboxes.claims import Progress, hold
from sandboxes.egress import model_pricing, repricing
from sandboxes.egress.repricing import reprice_calls
from sandboxes.models import LlmCall
from tests.conftest import MINUTE, NOW
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)
SINCE = NOW - 2 * DAY
_numbers = count(1)


def call(**fields: Any) -> LlmCall:
    """Create a call that was metered at 3 USD: a million input and output tokens at 1 and 2."""
    ended = {
        "call_id": f"{next(_numbers):032x}", "started_at": NOW - MINUTE, "deadline_at": NOW, "ended_at": NOW - MINUTE / 2,
        "outcome": "ok", "model": "m", "input_tokens": 10**6, "output_tokens": 10**6, "cost": 3, "metered_cost": 3,
        "counted": True, "priced": "rate", "rate_ids": [1, 2],
    }  # fmt: skip
    return LlmCall.objects.create(**{**ended, **fields})


def shown(row: LlmCall) -> tuple[Any, ...]:
    row.refresh_from_db()
    return row.cost, row.priced, row.counted, row.metered_cost


@pytest.fixture
def corrected() -> list[int]:
    """Ids of the rates that supersede those of 1 and 2: 10 for input and 20 for output."""
    create_rates("m", input=1, output=2, since=NOW - DAY)
    return [rate.pk for rate in create_rates("m", input=10, output=20, since=NOW - DAY)]


def test_calls_get_the_price_of_the_corrected_rates_and_are_metered_again(corrected: list[int]) -> None:
    row, before, other = call(), call(started_at=SINCE - MINUTE), call(model="n")
    old = call(started_at=NOW - 1.5 * DAY)  # before the start of the rates
    result = reprice_calls(SINCE, now=NOW, apply=True)
    assert shown(row) == (30, "rate", False, 3)
    assert row.rate_ids == corrected
    assert {shown(each) for each in (before, other, old)} == {(3, "rate", True, 3)}
    assert result.models == {
        "m": repricing.RepricedModel(calls=2, changed=1, without_rate=1, old=Decimal(6), new=Decimal(33)),
        "n": repricing.RepricedModel(calls=1, without_rate=1, old=Decimal(3), new=Decimal(3)),
    }
    assert result.total == repricing.RepricedModel(3, 1, 2, Decimal(9), Decimal(36))


@pytest.mark.usefixtures("corrected")
def test_without_apply_the_totals_are_returned_and_nothing_changes() -> None:
    row = call()
    result = reprice_calls(SINCE, now=NOW)
    assert (result.total.changed, result.total.old, result.total.new) == (1, 3, 30)
    assert shown(row) == (3, "rate", True, 3)


@pytest.mark.usefixtures("corrected")
def test_repetition_changes_nothing() -> None:
    row = call()
    reprice_calls(SINCE, now=NOW, apply=True)
    LlmCall.objects.update(counted=True)
    assert reprice_calls(SINCE, now=NOW, apply=True).total.changed == 0
    assert shown(row) == (30, "rate", True, 3)


@pytest.mark.usefixtures("corrected")
@pytest.mark.parametrize(
    ("fields", "cost", "priced", "with_stated"),
    [
        ({"priced": "upstream", "rate_ids": None}, 3, "upstream", 30),
        ({"priced": "record", "rate_ids": None}, 3, "record", 30),
        ({"priced": "record", "rate_ids": None, "outcome": "cut"}, 3, "record", 3),  # its tokens are a lower bound
        ({"priced": "record", "rate_ids": None, "output_tokens": None}, 3, "record", 3),
        ({"priced": "free", "cost": 0, "rate_ids": None}, 0, "free", 0),
        ({"priced": "estimate"}, 30, "rate", 30),  # a kind had no rate
        ({"priced": "estimate", "rate_ids": None}, 30, "rate", 30),  # a record without a price stated the usage
        ({"priced": "estimate", "rate_ids": None, "output_tokens": None}, 3, "estimate", 3),
        ({"priced": "estimate", "rate_ids": None, "outcome": "lost"}, 3, "estimate", 3),
        ({"rate_ids": None}, 30, "rate", 30),  # of a version that did not keep the ids
        ({"outcome": "cut", "output_tokens": None, "cost": 1}, 10, "rate", 10),
        ({"token_counts": {"input": 10**6, "web_search": 1}}, 10, "estimate", 10),
        ({"cost": None, "priced": "", "rate_ids": None}, None, "", None),  # left to the sweep
        ({"input_tokens": 10**9 + 1}, 3, "rate", 3),
        ({"outcome": "open", "ended_at": None}, 3, "rate", 3),
        ({"kind": "relay"}, 3, "rate", 3),
    ],
)  # fmt: skip
def test_only_prices_of_a_known_usage_are_calculated_again(
    fields: dict[str, Any], cost: int | None, priced: str, with_stated: int | None
) -> None:
    row = call(**fields)
    reprice_calls(SINCE, now=NOW, apply=True)
    assert shown(row)[:2] == (cost, priced)
    reprice_calls(SINCE, now=NOW, apply=True, stated=True)
    assert shown(row)[0] == with_stated


def test_an_estimate_gets_its_whole_price_once_the_missing_kind_has_a_rate() -> None:
    [rate] = create_rates("m", input=1)
    row = call(token_counts={"input": 10**6, "web_search": 2}, cost=1, priced="estimate", rate_ids=[rate.pk])
    create_rates("m", web_search=10_000)
    reprice_calls(SINCE, now=NOW, apply=True)
    assert shown(row)[:2] == (Decimal("1.02"), "rate")


def test_a_call_whose_price_was_out_of_range_is_priced_by_the_corrected_rate() -> None:
    create_rates("m", input=999_999, output=1)
    row = call(cost=None, priced="", rate_ids=None, token_counts={"input": 10**9})
    row.counted = False
    model_pricing.price_calls(NOW)
    row.refresh_from_db()
    assert row.code == "price_refused"
    create_rates("m", input=1)
    reprice_calls(SINCE, now=NOW, apply=True)
    assert shown(row)[0] == 1000 and row.code == ""


@pytest.mark.usefixtures("corrected")
def test_unknown_usage_is_counted() -> None:
    call(priced="estimate", rate_ids=None, output_tokens=None)
    call(priced="estimate", rate_ids=None, output_tokens=None, model="n")
    assert reprice_calls(SINCE, now=NOW, model="m").estimates == 1


def test_calls_are_selected_by_one_of_their_names() -> None:
    create_rates("*", input=10, output=20)
    rows = [call(model=name) for name in ("gpt-4o-2024-08-06", "openai/gpt-4o", "gpt-4o-mini", "claude")]
    selected = {"gpt-4o": 2, "gpt-*": 3, "claude": 1, "*": 4, "none": 0}
    assert {name: reprice_calls(SINCE, now=NOW, model=name).total.calls for name in selected} == selected
    reprice_calls(SINCE, now=NOW, model="gpt-4o", apply=True)
    assert [shown(row)[0] for row in rows] == [30, 30, 3, 3]


@pytest.mark.usefixtures("corrected")
def test_an_interrupted_pass_keeps_its_batches_and_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repricing, "BATCH_SIZE", 2)
    rows = [call(started_at=NOW - MINUTE * (number // 2)) for number in range(7)]

    class Interrupted(Exception):
        pass

    class OneBatch(Progress):
        def note_progress(self) -> None:
            raise Interrupted

    with hold(OneBatch()), pytest.raises(Interrupted):
        reprice_calls(SINCE, now=NOW, apply=True)
    assert LlmCall.objects.filter(cost=30).count() == 2
    with hold(Progress()) as progress:
        assert reprice_calls(SINCE, now=NOW, apply=True).total.changed == 5
    assert progress.steps == 4
    assert {shown(row)[0] for row in rows} == {30}


@pytest.mark.usefixtures("corrected")
def test_a_price_that_was_stated_since_the_selection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    row = call()
    batches = repricing._iter_batches

    def select_and_record(calls: Any) -> Any:
        for batch in batches(calls):
            LlmCall.objects.filter(pk=row.pk).update(cost=7, priced="record", rate_ids=None)
            yield batch

    monkeypatch.setattr(repricing, "_iter_batches", select_and_record)
    assert reprice_calls(SINCE, now=NOW, apply=True).total.calls == 0
    assert shown(row)[:2] == (7, "record")


@pytest.mark.usefixtures("corrected")
def test_any_number_of_models_is_priced_again(monkeypatch: pytest.MonkeyPatch, django_assert_max_num_queries: Any) -> None:
    monkeypatch.setattr(repricing, "MAX_MODELS_PER_QUERY", 3)
    create_rates("model *", input=10, output=20)
    for number in range(7):
        call(model=f"model {number}")
    with django_assert_max_num_queries(40):
        assert reprice_calls(SINCE, now=NOW, apply=True).total.changed == 7
