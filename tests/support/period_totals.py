"""Comparison of the totals by day and month with the records that they sum."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from unittest.mock import patch

from django.db.models import Sum

from billing import totals
from billing.grouping import GROUP_BY_COLUMNS, Selection
from billing.model_providers import find_model_provider
from billing.model_sums import TokenCounts
from billing.models import CostRecord, ModelTotal, PeriodTotal, Unpriced, UsageKind, UsageRecord

Report = list[Any]
DAY = timedelta(days=1)
BY = ("agent", "provider", "day", "account", "item", "model", "model_provider")


def check_period_totals(*, full: bool = True) -> None:
    """Compare the reports from totals with those from records, over ranges that cut months. Nothing to do without totals.

    Not `full`: a few of the reports, for a check after each test."""
    if not PeriodTotal.are_valid():
        return
    choices = list_filters() if full else [{}, *list_filters()[-1:]]
    for filters in choices:
        for by in BY if full and not filters else ("agent", "account"):
            found, expected = (build_report(by, filters, from_records=each) for each in (False, True))
            assert found == expected, (by, filters)
        if "since" in filters and "until" in filters:
            assert sum_days(filters, from_records=False) == sum_days(filters, from_records=True), filters
    for filters in ({}, choices[-1]):
        groups = GROUP_BY_COLUMNS if full else ("item", "model")
        assert len({sum_report(by, filters) for by in groups}) == 1, filters
    if not Unpriced.objects.exists():
        check_models()
    assert not PeriodTotal.objects.filter(records=0).exists()


def sum_report(by: str, filters: dict[str, Any]) -> tuple[Any, ...]:
    """Return the sum of all groups: cost, its uncertainty, calls and tokens."""
    report = totals.sum_costs(by, **filters)
    calls = sum((each.quantities.get("llm", Decimal(0)) for each in report), Decimal(0))
    amounts = [(each.usd, each.estimated_usd, each.unpriced) for each in report]
    return (*map(sum, zip((Decimal(0), Decimal(0), 0), *amounts, strict=True)), calls, sum_tokens(report))


def sum_tokens(report: Report) -> TokenCounts:
    return TokenCounts.sum(each.tokens for each in report)


def check_models() -> None:
    """Compare the calls and tokens of each model and vendor with the usage."""
    usage = UsageRecord.objects.filter(item=UsageKind.TOKENS).order_by().values_list("model")
    names = ("calls", "input_tokens", "cached_tokens", "cache_written_tokens", "output_tokens", "estimated_tokens")
    expected = {model: (Decimal(calls), TokenCounts(*tokens)) for model, calls, *tokens in usage.annotate(*map(Sum, names))}
    report = [each for each in totals.sum_costs("model") if "llm" in each.quantities]
    assert {each.key: (each.quantities["llm"], each.tokens) for each in report} == expected
    for each in totals.sum_costs("model_provider"):
        of_provider = [tokens for model, (_, tokens) in expected.items() if find_model_provider(model) == each.key]
        assert each.tokens == TokenCounts.sum(of_provider)


def list_filters() -> list[dict[str, Any]]:
    days = sorted({*CostRecord.objects.values_list("day", flat=True), *UsageRecord.objects.values_list("day", flat=True)})
    if not days:
        return [{}]
    first, middle, last = days[0] + DAY, days[len(days) // 2], days[-1]
    ranges: list[dict[str, Any]] = [
        {}, {"since": first}, {"until": last}, {"since": first, "until": last},
        {"since": first.replace(day=1), "until": middle},
        {"since": middle.replace(day=1), "until": last + DAY},
    ]  # fmt: skip
    ranges = [each for each in ranges if "until" not in each or each.get("since", date.min) < each["until"]]
    record = CostRecord.objects.select_related("account").order_by("pk").last()
    if record is None:
        return ranges
    narrow = [
        {"account": record.account.name},
        {"agents": [record.agent_did]},
        {"agent": record.agent_did, "item": record.item},
        {"agent": record.agent_did, "item": "llm"},
    ]
    return ranges + [{**ranges[-1], **each} for each in narrow]


@contextmanager
def read(*, from_records: bool) -> Iterator[None]:
    """Have reports read records alone, or totals."""
    with ExitStack() as stack:
        if from_records:
            stack.enter_context(patch.object(PeriodTotal, "are_valid", lambda: False))
            stack.enter_context(patch.object(ModelTotal, "are_derived", lambda: True))
            stack.enter_context(patch.object(Selection, "build_period_filter", lambda self, groups: None))
        yield


def build_report(by: str, filters: dict[str, Any], *, from_records: bool) -> Report:
    """Return the report. Sandbox time is that of the last pricing pass: without it while there is unpriced usage."""
    with read(from_records=from_records):
        report = totals.sum_costs(by, **filters)
    if not Unpriced.objects.exists():
        return report
    return sorted((each.key, each.quantities, each.free, each.usd, each.tokens) for each in report if each.quantities)


def sum_days(filters: dict[str, Any], *, from_records: bool) -> Report:
    with read(from_records=from_records):
        return sorted(totals.sum_amounts("day", "item", **filters))
