"""manage.py rate: prices of models by kind of token, and price files."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from billing import horizon
from billing.models import Watermark
from sandboxes.models import LlmCall, TokenRate
from tests.conftest import NOW
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db


def run(*args: str) -> str:
    out = StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


def add_model(*arguments: str) -> str:
    return run("rate", "add", "--model", *arguments, "--source", "price page")


def test_prices_of_a_model_are_added_and_listed() -> None:
    added = add_model("claude-*", "--input", "3", "--output", "15", "--cache-write-5m", "3.75", "--web-search", "10")
    assert added.count("added: ") == 4 and "claude-*, web search: 10 USD per 1,000 searches" in added
    above = add_model("claude-*", "--input", "6", "--above-tokens", "200000", "--tier", "priority", "--note", "long contexts")
    assert "claude-*, input, tier priority, from 200,001 input tokens: 6 USD per million tokens" in above
    assert [*TokenRate.objects.values_list("kind", "tokens_from", "tier", "usd_per_million", "note").order_by("pk")] == [
        ("input", 0, "", 3, ""), ("cache_write_5m", 0, "", Decimal("3.75"), ""), ("output", 0, "", 15, ""),
        ("web_search", 0, "", 10_000, ""), ("input", 200_001, "priority", 6, "long contexts"),
    ]  # fmt: skip
    assert len(run("rate", "list", "--models").splitlines()) == 6


def test_rates_of_a_model_are_those_that_price_it() -> None:
    for pattern, since in (("gpt-4o", "2026-01-01"), ("gpt-*", "2026-01-01"), ("gpt-4o", "2999-01-01T00:00Z")):
        add_model(pattern, "--input", "3", "--from", f"{since[:10]}T00:00Z")
    listed = run("rate", "list", "--models", "openai/gpt-4o-2024-08-06").splitlines()
    assert len(listed) == 2 and listed[1].startswith("gpt-4o ")


def test_a_model_without_a_price_of_output_is_a_warning() -> None:
    assert "warning: m has no price of output" in add_model("m", "--input", "3")
    assert "warning" not in add_model("m", "--output", "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model m", "State at least one price"), ("--model m --input x", "--input: "), ("--model m --input -1", "--input: "),
        ("--model m --input 1000000", "usd_per_million: "), ("--model m --input 1 --above-tokens -1", "--above-tokens: "),
        ("--model m --input 1 --from soon", "--from: "), ("daytona 1 vcpu-hour --model m", "--model: "),
        ("daytona 1 vcpu-hour --input 1", "--input: Only with --model"), ("daytona 1", "State provider, price and unit"),
        ("--model m --input 1 --from 2026-01-01T00:00Z", "valid_from: A rate with this start and price exists"),
    ],
)  # fmt: skip
def test_invalid_prices_of_a_model_are_named(arguments: str, message: str) -> None:
    create_rates("m", input=1, since=datetime(2026, 1, 1, tzinfo=UTC))
    with pytest.raises(CommandError, match=f"^{message}"):
        run("rate", "add", *arguments.replace("--input -1", "--input=-1").split(), "--source", "x")
    assert TokenRate.objects.count() == 1


def test_a_price_with_the_same_start_supersedes_the_earlier_one() -> None:
    start = ["--from", "2026-01-01T00:00Z"]
    add_model("m", "--input", "300", "--output", "15", *start)
    added = add_model("m", "--input", "3", *start).splitlines()
    assert added[1].startswith("superseded: m, input: 300 USD per million tokens. Calls that have a price keep it")
    assert [line.split()[1:3] for line in run("rate", "list", "--models", "m").splitlines()[1:]] == [
        ["input", "3"],
        ["output", "15"],
    ]
    listed = [line.split() for line in run("rate", "list", "--models").splitlines()[1:]]
    assert sorted((line[2], "superseded" in line) for line in listed) == [("15", False), ("3", False), ("300", True)]


def test_calls_are_priced_again_on_request() -> None:
    create_rates("m*", input=1, output=2)
    for model, priced in (("m", "rate"), ("m-mini", "rate"), ("m", "record"), ("unheard-of", "rate")):
        create_call(model, priced)
    create_call("m", "estimate", output_tokens=None)
    shown = run("rate", "reprice", "--from", "2026-11-01").splitlines()
    assert [line.split() for line in shown[1:5]] == [
        ["m", "1", "1", "5", "3", "-2"], ["m-mini", "1", "1", "5", "3", "-2"], ["unheard-of", "1", "0", "5", "5", "0"],
        ["total", "3", "2", "15", "11", "-4"],
    ]  # fmt: skip
    assert shown[5:] == [
        "1 calls keep their price: no rate prices their usage, or the price is out of range",
        "1 estimated calls keep their price: their usage is unknown", "Nothing was changed: add --apply.",
    ]  # fmt: skip
    assert not LlmCall.objects.exclude(cost=5).exists()
    assert run("rate", "reprice", "--from", "2026-11-01", "--model", "m", "--apply").splitlines()[-2].split()[1:3] == ["1", "1"]
    run("rate", "reprice", "--from", "2026-11-01", "--model", "m", "--apply", "--stated")
    assert [*LlmCall.objects.order_by("pk").values_list("cost", flat=True)] == [3, 5, 3, 5, 5]


def create_call(model: str, priced: str, **fields: Any) -> None:
    tokens = {"input_tokens": 10**6, "output_tokens": 10**6} | fields
    LlmCall.objects.create(
        call_id=f"{LlmCall.objects.count():032x}", model=model, priced=priced, cost=5, outcome="ok", started_at=NOW,
        deadline_at=NOW, ended_at=NOW, **tokens,
    )  # fmt: skip


def test_calls_of_final_days_are_not_priced_again() -> None:
    Watermark.hold(horizon.HORIZON_WATERMARK, datetime(2026, 11, 1, tzinfo=UTC))
    with pytest.raises(CommandError, match=r"^--from: Usage before 2026-11-01 00:00 UTC is final"):
        run("rate", "reprice", "--from", "2026-10-31T23:59Z", "--apply")
    run("rate", "reprice", "--from", "2026-11-01T00:00Z")


def test_a_price_file_is_compared_and_applied(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    columns = {"input_cost_per_token": 2.5e-06, "output_cost_per_token": 1e-05, "output_cost_per_image": 0.04}
    file.write_text(json.dumps({"gpt-4o": columns, "gpt-5": {"input_cost_per_token": 1.25e-06}}))
    create_rates("gpt-4o", input=2, output=10)
    shown = run("rate", "import", str(file))
    assert [line.split() for line in shown.splitlines()[1:3]] == [
        ["changed", "gpt-4o", "input", "2", "2.5"], ["new", "gpt-5", "input", "1.25"],
    ]  # fmt: skip
    assert "not read, of 1 names: output_cost_per_image (1)" in shown
    assert shown.splitlines()[-1].startswith("1 new, 1 changed, 1 unchanged, 0 invalid. Nothing was changed")
    assert TokenRate.objects.count() == 2
    assert "1 new, 0 changed, 0 unchanged" in run("rate", "import", str(file), "--only", "gpt-5")
    applied = run("rate", "import", str(file), "--apply", "--from", "2026-11-29T00:00Z")
    assert applied.splitlines()[-1].endswith("2 rates added, from 2026-11-29 00:00 UTC.")
    assert run("rate", "import", str(file)).splitlines()[-1].startswith("0 new, 0 changed, 3 unchanged")


def test_a_file_with_invalid_entries_is_applied_only_on_request(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"m": {"input_cost_per_token": -1}, "n": {"input_cost_per_token": 1e-06}}))
    with pytest.raises(CommandError, match="invalid: m: input_cost_per_token"):
        run("rate", "import", str(file), "--apply")
    assert not TokenRate.objects.exists()
    run("rate", "import", str(file), "--apply", "--skip-invalid")
    assert TokenRate.objects.get().pattern == "n"


def test_a_file_that_is_no_price_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "prices.txt").write_text("prices")
    for name in ("missing", ".", "prices.txt"):
        with pytest.raises(CommandError, match=str(tmp_path)):
            run("rate", "import", str(tmp_path / name))


def test_public_prices_of_the_release_are_imported() -> None:
    assert "0 invalid. Nothing was changed" in run("rate", "import", "public")
    assert "rates added" in run("rate", "import", "public", "--apply")
    assert TokenRate.objects.filter(pattern="claude-sonnet-4-5", source__contains="as of 2026-11-29").exists()
