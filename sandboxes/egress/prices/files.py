"""Price files: prices by model and kind of token, in the own format (TOML) or in LiteLLM's (JSON).

The own format states the day and the source of the prices, and for each model USD per million tokens by kind, or per 1,000 web
searches. A table in a model has the prices above a size of the input (`above_200000`) or those of a service tier:

    as_of = 2026-11-29
    source = "https://…"

    [models."gpt-5.4"]
    input = 2.5
    output = 15
    above_272000 = { input = 5, output = 22.5 }
    priority = { input = 5, output = 30 }

LiteLLM's format is `model_prices_and_context_window.json`: USD per token. Its prices by image, page, character or second have
no kind here and are not read."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from fnmatch import fnmatchcase
from typing import Any

from sandboxes.models import TokenKind
from sandboxes.models.token_rates import MILLION, get_unit

MAX_FILE_BYTES = 16 * 2**20
MAX_ROWS = 50_000
MAX_USD_PER_MILLION = 10**6  # of the column, exclusive
DECIMAL_PLACES = Decimal("1e-9")  # of the column
MAX_NESTING = 2  # levels of tables: tier, then size
ABOVE_TABLE = re.compile(r"above_(\d{1,9})")
TIER_NAME = re.compile(rf"(?!(?:above.*|{'|'.join(TokenKind.values)})$)[a-z][a-z0-9_-]{{0,31}}")
LITELLM_COLUMN = re.compile(r"(?P<price>.+?)(?:_above_(?P<thousands>\d{1,6})k_tokens)?(?:_(?P<tier>priority|flex|batches))?")
LITELLM_KINDS = {
    "input_cost_per_token": TokenKind.INPUT,
    "output_cost_per_token": TokenKind.OUTPUT,
    "cache_read_input_token_cost": TokenKind.CACHE_READ,
    "cache_creation_input_token_cost": TokenKind.CACHE_WRITE_5M,
    "cache_creation_input_token_cost_above_1hr": TokenKind.CACHE_WRITE_1H,
    "input_cost_per_audio_token": TokenKind.AUDIO_INPUT,
    "input_cost_per_image_token": TokenKind.IMAGE_INPUT,
    "output_cost_per_reasoning_token": TokenKind.REASONING,
    "output_cost_per_audio_token": TokenKind.AUDIO_OUTPUT,
    "output_cost_per_image_token": TokenKind.IMAGE_OUTPUT,
}
LITELLM_TIERS = {None: "", "priority": "priority", "flex": "flex", "batches": "batch"}
LITELLM_SEARCHES, LITELLM_SEARCH_SIZE = "search_context_cost_per_query", "search_context_size_medium"
LITELLM_EXAMPLE = "sample_spec"  # describes the format


class PriceFileInvalid(Exception):
    """The file is not a price file: the message says why."""


@dataclass(frozen=True)
class StatedPrice:
    """Price of one kind of a model, in USD per million tokens or searches."""

    model: str
    kind: str
    tokens_from: int
    tier: str
    usd_per_million: Decimal
    source: str = ""


@dataclass
class PriceFile:
    """Prices of a file, its invalid entries, one line each, and the prices of other units, by name."""

    prices: list[StatedPrice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    as_of: date | None = None
    source: str = ""


def parse_price_file(data: bytes, *, only: Iterable[str] = ()) -> PriceFile:
    """Parse a file of either format. `only` are patterns of the models to read; without one all are read.

    Raise PriceFileInvalid if the file is no price file or exceeds a limit. Invalid entries are listed in `problems`."""
    if len(data) > MAX_FILE_BYTES:
        raise PriceFileInvalid(f"The file is larger than {MAX_FILE_BYTES // 2**20} MiB.")
    try:
        text = data.decode()
        is_json = text.lstrip().startswith("{")
        document = json.loads(text, parse_float=Decimal) if is_json else tomllib.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise PriceFileInvalid(f"Not a price file in TOML, nor in LiteLLM's format (JSON): {error}") from None
    result = PriceFile()
    models = document if is_json else _read_header(document, result)
    read = _read_litellm_model if is_json else _read_model
    for model, entry in models.items():
        if (is_json and model == LITELLM_EXAMPLE) or (only and not any(fnmatchcase(model, pattern) for pattern in only)):
            continue
        if not 0 < len(model) <= 200 or not isinstance(entry, dict):
            result.problems.append(f"{model[:200]}: not a model with prices")
            continue
        result.prices += read(model, entry, result)
        if len(result.prices) > MAX_ROWS:
            raise PriceFileInvalid(f"More than {MAX_ROWS:,} prices. Select models with --only.")
    return result


def _read_header(document: dict[str, Any], result: PriceFile) -> dict[str, Any]:
    models, as_of, source = document.pop("models", None), document.pop("as_of", None), document.pop("source", "")
    if not isinstance(models, dict) or type(as_of) is not date or not isinstance(source, str) or document:
        raise PriceFileInvalid(
            "The file needs as_of (a day), and may have source (a text) and models (tables), and nothing else."
        )
    result.as_of, result.source = as_of, source
    return models


def _read_model(model: str, entry: Mapping[str, Any], result: PriceFile) -> list[StatedPrice]:
    source = entry.get("source", result.source)
    source = source if isinstance(source, str) else ""
    return [*_read_table(model, entry, result, source, tier="", tokens_from=0, nesting=0)]


def _read_table(
    model: str, table: Mapping[str, Any], result: PriceFile, source: str, *, tier: str, tokens_from: int, nesting: int
) -> Iterator[StatedPrice]:
    for name, value in table.items():
        above = ABOVE_TABLE.fullmatch(name)
        if name == "source" and nesting == 0:
            if not isinstance(value, str):
                result.problems.append(f"{model}: source: not a text")
        elif isinstance(value, dict) and nesting < MAX_NESTING and (above or TIER_NAME.fullmatch(name)):
            size = int(above[1]) + 1 if above else tokens_from
            inner = tier if above else name
            yield from _read_table(model, value, result, source, tier=inner, tokens_from=size, nesting=nesting + 1)
        elif name in TokenKind.values and (usd := _parse_price(value)) is not None:
            per_million = usd * MILLION / get_unit(name)[0]
            if per_million == per_million.quantize(DECIMAL_PLACES) and per_million < MAX_USD_PER_MILLION:
                yield StatedPrice(model, name, tokens_from, tier, per_million, source)
            else:
                result.problems.append(f"{model}: {name}: {value} has more than nine decimal places, or is too large")
        else:
            result.problems.append(f"{model}: {name}: {_describe(value)} is not a price of 0 or more of a known kind")


def _read_litellm_model(model: str, entry: Mapping[str, Any], result: PriceFile) -> list[StatedPrice]:
    source = entry.get("source")
    source = source[:300] if isinstance(source, str) else ""
    has_other_prices = False
    prices = []
    for name, value in entry.items():
        parts = LITELLM_COLUMN.fullmatch(name)
        kind = LITELLM_KINDS.get(parts["price"]) if parts else None
        if name == LITELLM_SEARCHES:
            kind, value = TokenKind.WEB_SEARCH, value.get(LITELLM_SEARCH_SIZE) if isinstance(value, dict) else None
        if kind is None or not parts:
            if "cost" in name:
                result.unread[name] += 1
                has_other_prices |= bool(value)
            continue
        usd = _parse_price(value)
        per_million = usd * MILLION if usd is not None else Decimal(MAX_USD_PER_MILLION)
        if per_million >= MAX_USD_PER_MILLION:
            result.problems.append(f"{model}: {name}: {_describe(value)} is not a price from 0 to 1 USD")
            continue
        tokens_from = int(parts["thousands"]) * 1000 + 1 if parts["thousands"] else 0
        rounded = per_million.quantize(DECIMAL_PLACES, ROUND_HALF_UP)  # 3.0000000000000004e-07 is a product of floats
        prices.append(StatedPrice(model, kind.value, tokens_from, LITELLM_TIERS[parts["tier"]], rounded, source))
    if has_other_prices and not any(price.usd_per_million for price in prices):
        return []  # charged by image or query, for example, and tokens at 0 would make the model free
    return prices


def _parse_price(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    return abs(Decimal(value)) if value == value and 0 <= value < MAX_USD_PER_MILLION else None  # NaN differs from itself


def _describe(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of many digits"
    return repr(str(value) if isinstance(value, Decimal) else value)[:60]
