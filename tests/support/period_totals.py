"""Comparison of the totals by day and month with the records that they sum."""

from datetime import date, timedelta
from typing import Any
from unittest.mock import patch

from billing import totals
from billing.models import CostRecord, PeriodTotal, Unpriced, UsageRecord

Report = list[Any]
DAY = timedelta(days=1)
BY = ("agent", "provider", "day", "account", "item")


def check_period_totals() -> None:
    """Compare the reports from totals with those from records, over ranges that cut months. Nothing to do without totals."""
    if not PeriodTotal.are_valid():
        return
    for filters in list_filters():
        for by in BY if not filters else ("agent", "account"):
            found, expected = (build_report(by, filters, from_records=each) for each in (False, True))
            assert found == expected, (by, filters)
        if "since" in filters and "until" in filters:
            assert sum_days(filters, from_records=False) == sum_days(filters, from_records=True), filters
    assert not PeriodTotal.objects.filter(records=0).exists()


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
    ]
    return ranges + [{**ranges[-1], **each} for each in narrow]


def build_report(by: str, filters: dict[str, Any], *, from_records: bool) -> Report:
    """Return the report. Sandbox time is that of the last pricing pass: without it while there is unpriced usage."""
    with patch.object(PeriodTotal, "are_valid", lambda: not from_records):
        report = totals.sum_costs(by, **filters)
    if not Unpriced.objects.exists():
        return report
    return sorted((each.key, each.quantities, each.free, each.usd) for each in report if each.quantities)


def sum_days(filters: dict[str, Any], *, from_records: bool) -> dict[date, Any]:
    with patch.object(PeriodTotal, "are_valid", lambda: not from_records):
        return totals.sum_usd_by_day(**filters)
