"""Price files of models: both formats, the comparison with the rates in force, and the public prices of this release."""

import json
import tomllib
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from sandboxes.audit import CONTROL_PLANE
from sandboxes.egress.model_pricing import find_candidate_names, load_rates
from sandboxes.egress.prices import changes, files
from sandboxes.egress.prices.files import PriceFileInvalid, parse_price_file
from sandboxes.models import TokenRate
from tests.conftest import NOW
from tests.support.model_rates import create_rates

PUBLIC = Path(files.__file__).with_name("public.toml")
HEADER = 'as_of = 2026-11-29\nsource = "price page"\n'
OWN = f"""{HEADER}
[models."m"]
input = 3
cache_read = 0.30
web_search = 10
above_200000 = {{ input = 6 }}
priority = {{ input = 5, above_200000 = {{ input = 10 }} }}
"""


def list_prices(data: str | bytes, **options: Any) -> list[tuple[str, str, int, str, Decimal]]:
    found = parse_price_file(data.encode() if isinstance(data, str) else data, **options)
    assert found.problems == []
    return [(each.model, each.kind, each.tokens_from, each.tier, each.usd_per_million) for each in found.prices]


def litellm(**columns: Any) -> str:
    return json.dumps({"m": columns})


# --- formats ----------------------------------------------------------------------------------------------------------


def test_own_format_states_kinds_sizes_and_tiers() -> None:
    assert list_prices(OWN) == [
        ("m", "input", 0, "", 3),
        ("m", "cache_read", 0, "", Decimal("0.3")),
        ("m", "web_search", 0, "", 10_000),
        ("m", "input", 200_001, "", 6),
        ("m", "input", 0, "priority", 5),
        ("m", "input", 200_001, "priority", 10),
    ]
    found = parse_price_file(OWN.encode())
    assert (found.as_of, found.source) == (date(2026, 11, 29), "price page")


def test_prices_of_litellm_are_read_by_kind_size_and_tier() -> None:
    text = litellm(
        input_cost_per_token=3e-06, output_cost_per_token=1.5e-05, cache_read_input_token_cost=3e-07,
        cache_creation_input_token_cost=3.75e-06, cache_creation_input_token_cost_above_1hr=6e-06,
        input_cost_per_token_above_200k_tokens=6e-06, cache_creation_input_token_cost_above_1hr_above_200k_tokens=1.2e-05,
        output_cost_per_token_priority=3e-05, input_cost_per_token_above_272k_tokens_flex=1e-06,
        input_cost_per_token_batches=1.5e-06, output_cost_per_reasoning_token=2e-05, input_cost_per_audio_token=4e-05,
        output_cost_per_audio_token=8e-05, input_cost_per_image_token=1e-05, output_cost_per_image_token=4e-05,
        search_context_cost_per_query={"search_context_size_low": 0.01, "search_context_size_medium": 0.025},
        max_tokens=8192, mode="chat",
    )  # fmt: skip
    expected = [
        ("input", 0, "", "3"), ("output", 0, "", "15"), ("cache_read", 0, "", "0.3"), ("cache_write_5m", 0, "", "3.75"),
        ("cache_write_1h", 0, "", "6"), ("input", 200_001, "", "6"), ("cache_write_1h", 200_001, "", "12"),
        ("output", 0, "priority", "30"), ("input", 272_001, "flex", "1"), ("input", 0, "batch", "1.5"),
        ("reasoning", 0, "", "20"), ("audio_input", 0, "", "40"), ("audio_output", 0, "", "80"), ("image_input", 0, "", "10"),
        ("image_output", 0, "", "40"), ("web_search", 0, "", "25000"),
    ]  # fmt: skip
    assert list_prices(text) == [("m", kind, size, tier, Decimal(usd)) for kind, size, tier, usd in expected]


@pytest.mark.parametrize(("text", "usd"), [("3.0000000000000004e-07", "0.3"), ("2e-06", "2"), ("0.0", "0"), ("1e-16", "0")])
def test_price_of_litellm_is_rounded_to_nine_places(text: str, usd: str) -> None:
    assert list_prices(f'{{"m": {{"input_cost_per_token": {text}}}}}') == [("m", "input", 0, "", Decimal(usd))]


def test_prices_of_other_units_are_counted_and_do_not_make_a_model_free() -> None:
    found = parse_price_file(litellm(input_cost_per_token=0, output_cost_per_image=0.04).encode())
    assert (found.prices, dict(found.unread)) == ([], {"output_cost_per_image": 1})
    assert len(list_prices(litellm(input_cost_per_token=1e-06, output_cost_per_image=0.04))) == 1
    assert len(list_prices(litellm(input_cost_per_token=0, output_cost_per_token=0))) == 2


def test_only_selected_models_are_read() -> None:
    text = json.dumps({name: {"input_cost_per_token": 1e-06} for name in ("gpt-4o", "gpt-5", "azure/gpt-5", "sample_spec")})
    assert [each[0] for each in list_prices(text, only=["gpt-*", "azure/gpt-5"])] == ["gpt-4o", "gpt-5", "azure/gpt-5"]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("input = -1", "m: input: -1"), ("input = true", "m: input: True"), ('input = "3"', "m: input: '3'"),
        ("input = nan", "m: input: 'NaN'"), ("input = inf", "m: input: 'Infinity'"), ("input = 1000000", "m: input: 1000000"),
        ("input = 1e-10", "m: input: 1E-10 has more than nine"), ("inputs = 1", "m: inputs: 1"), ("source = 1", "m: source"),
        ("web_search = 1000", "m: web_search: 1000"), ("above_x = { }", "m: above_x"), ("input = { }", "m: input"),
        ("Tier = { }", "m: Tier"),
        ("a = { b = { c = { input = 1 } } }", "m: c"), (f"input = 0x{'f' * 9999}", "m: input: a number of many digits"),
    ],
)  # fmt: skip
def test_invalid_entry_is_named_and_the_others_are_read(entry: str, problem: str) -> None:
    found = parse_price_file(f'{HEADER}[models."m"]\noutput = 1\n{entry}\n[models."n"]\ninput = 1\n'.encode())
    assert [each.model for each in found.prices] == ["m", "n"]
    assert len(found.problems) == 1 and found.problems[0].startswith(problem)


@pytest.mark.parametrize("value", ["-1e-06", "1", '"3e-06"', "null", "NaN", "Infinity", "[]", "true"])
def test_invalid_price_of_litellm_is_named(value: str) -> None:
    found = parse_price_file(f'{{"m": {{"input_cost_per_token": {value}}}, "n": 7}}'.encode())
    assert [each.partition(": ")[0] for each in found.problems] == ["m", "n"]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"[]", b"{", b"{" + b'"a":{' * 50_000, b"as_of = 2026-11-29", OWN.replace("as_of", "day").encode(),
        b"models = {}", f"{HEADER}further = 1\n[models]".encode(), OWN.replace("2026-11-29", "2026-11-29T00:00:00Z").encode(),
        OWN.replace('"price page"', "7").encode(), b'{"m": {"input_cost_per_token": 1e99999999999999999999}}',
        b" " * (files.MAX_FILE_BYTES + 1),
    ],
)  # fmt: skip
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(PriceFileInvalid):
        parse_price_file(data)


def test_number_of_prices_is_limited(monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "MAX_ROWS", 5)
    with pytest.raises(PriceFileInvalid, match="More than 5 prices"):
        parse_price_file(OWN.encode())


# --- comparison -------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_only_new_and_changed_prices_become_rates() -> None:
    create_rates("m", input=3, cache_read="0.1")
    create_rates("m", input=9, since=NOW + timedelta(days=1))
    file = parse_price_file(OWN.encode())
    compared = changes.compare(file, at=NOW)
    assert [(each.present, each.is_change) for each in compared] == [
        (3, False), (Decimal("0.1"), True), (None, True), (None, True), (None, True), (None, True),
    ]  # fmt: skip
    assert changes.apply_changes(compared, file, valid_from=NOW, note="imported", actor=CONTROL_PLANE, now=NOW) == 5
    rate = TokenRate.objects.get(kind="cache_read", valid_from=NOW)
    assert (rate.usd_per_million, rate.source, rate.note) == (Decimal("0.3"), "price page, as of 2026-11-29", "imported")
    assert not any(each.is_change for each in changes.compare(file, at=NOW))


@pytest.mark.django_db
def test_a_price_with_the_start_of_an_existing_rate_supersedes_it_once() -> None:
    create_rates("m", cache_read="0.1", since=NOW)
    file = parse_price_file(OWN.encode())
    compared = changes.compare(file, at=NOW)
    added = changes.apply_changes(compared, file, valid_from=NOW, note="", actor=CONTROL_PLANE, now=NOW)
    assert TokenRate.objects.count() == 1 + added
    assert not any(each.is_change for each in changes.compare(file, at=NOW))
    with pytest.raises(ValidationError, match="A rate with this start and price exists: m, "):
        changes.apply_changes(compared, file, valid_from=NOW, note="", actor=CONTROL_PLANE, now=NOW)
    assert TokenRate.objects.count() == 1 + added


# --- public prices ----------------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("model", "counts", "usd"),
    [
        ("claude-sonnet-4-5-20250929", {"input": 1000, "cache_read": 20_000, "cache_write_1h": 8000, "output": 500}, "0.0645"),
        ("openai/gpt-4o-2024-08-06", {"input": 10**6, "output": 10**6}, "12.5"),
        ("gpt-4o-2024-05-13", {"input": 10**6, "output": 10**6}, "20"),
        ("gpt-5-mini-2025-08-07", {"input": 10**6, "output": 10**6}, "2.25"),
        ("text-embedding-3-small", {"input": 10**6}, "0.02"),
    ],
)
def test_public_prices_price_usual_calls(model: str, counts: dict[str, int], usd: str) -> None:
    file = parse_price_file(PUBLIC.read_bytes())
    assert (file.problems, bool(file.source)) == ([], True)
    changes.apply_changes(changes.compare(file, at=NOW), file, valid_from=NOW, note="", actor=CONTROL_PLANE, now=NOW)
    price = load_rates(find_candidate_names(model), at=NOW).price(counts)
    assert price and (price.usd, price.complete) == (Decimal(usd), True)


def test_public_prices_are_part_of_the_package() -> None:
    settings = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    [pattern] = settings["tool"]["setuptools"]["package-data"]["sandboxes"]
    assert PUBLIC in PUBLIC.parents[2].glob(pattern)
