"""Totals by day and month: derived with the costs, read in their place, and derived anew after a pass without totals."""

import re
from datetime import timedelta
from decimal import Decimal
from itertools import chain

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing import costs, period_totals, totals
from billing.errors import TotalsPending
from billing.model_usage import ModelUsage
from billing.models import CostRecord, ModelTotal, PeriodTotal, UsageRecord, Watermark
from billing.models.period_totals import TOTALS_WATERMARK
from tests.conftest import NOW, run_in_threads
from tests.support.billing import ADA, BOB, HOUR, create_rate, create_time_usage, create_token_usage, join_account, price
from tests.support.period_totals import check_period_totals

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: totals are computed in the database")]
GROUPS = ("agent", "provider", "account", "item", "day")
TOKENS = {"input_tokens": 900, "cached_tokens": 500, "cache_written_tokens": 300, "output_tokens": 40}


@pytest.fixture(autouse=True)
def usage(db: None) -> None:
    create_rate("time", "1", provider="acme")
    join_account("team", "2026-10-15", ADA)
    for day in ("2026-09-30", "2026-10-14", "2026-10-15", "2026-11-02"):
        for agent in (ADA, BOB):
            create_time_usage(f"{day}T05:00", 2 * HOUR, agent, provider="acme")
        create_token_usage(f"{day}T06:00", "0.123456789", agent=ADA, model="claude-opus-4-5", **TOKENS)
        create_token_usage(f"{day}T06:00", "0.000000001", 3, agent=ADA, model="gpt-5", output_tokens=1)


def list_read_tables(by: str) -> set[str]:
    with CaptureQueriesContext(connection) as captured:
        totals.sum_costs(by)
    tables = {model: model._meta.db_table for model in (CostRecord, UsageRecord, PeriodTotal, ModelTotal)}
    statements = [re.sub(r"EXISTS\(.*?\)", "", query["sql"]) for query in captured]  # whether totals lack amounts: by an index
    return {model.__name__ for model, table in tables.items() if any(f'FROM "{table}"' in text for text in statements)}


def test_a_report_reads_totals_and_no_records_except_by_lease_and_environment() -> None:
    assert list_read_tables("agent") == {"CostRecord", "UsageRecord"}, "before the first pricing pass"
    price()
    assert {*chain(*map(list_read_tables, (*GROUPS, "model", "model_provider")))} == {"PeriodTotal", "ModelTotal"}
    for by in ("lease", "environment", "project"):
        assert list_read_tables(by) == {"CostRecord", "UsageRecord", "ModelTotal"}
    check_period_totals()


def test_totals_follow_changed_and_deleted_usage() -> None:
    price()
    create_time_usage("2026-10-14T12:00", HOUR, "did:plc:new", provider="acme")
    price()
    assert sum_time() == {ADA: 8 * HOUR, BOB: 8 * HOUR, "did:plc:new": HOUR}
    UsageRecord.objects.filter(agent_did__in=[BOB, "did:plc:new"]).delete()
    price()
    assert sum_time() == {ADA: 8 * HOUR}
    assert {each.key for each in totals.sum_costs("account")} == {"house", "team"}
    check_period_totals()


def test_costs_that_are_derived_again_have_the_same_totals() -> None:
    price()
    before = list_totals()
    costs.reset_costs()
    assert PeriodTotal.are_valid() and not PeriodTotal.objects.exists()
    price()
    assert list_totals() == before


def test_a_pass_of_the_version_before_has_all_totals_derived_anew() -> None:
    price()
    Watermark.hold("costs", NOW + HOUR)  # it writes no totals
    CostRecord.objects.filter(day__lt="2026-10-15").delete()
    UsageRecord.objects.filter(day__lt="2026-10-15").delete()
    assert list_read_tables("agent") == {"CostRecord", "UsageRecord"}
    costs.price_usage(now=NOW + 2 * HOUR)
    assert list_read_tables("agent") == {"PeriodTotal", "ModelTotal"}
    assert {each.key for each in totals.sum_costs("day")} == {"2026-10-15", "2026-11-02"}
    check_period_totals()


def test_totals_of_an_installation_without_them_are_derived_by_the_next_pass() -> None:
    price()
    before = list_totals()
    PeriodTotal.objects.all().delete()
    Watermark.objects.filter(name=TOTALS_WATERMARK).delete()
    costs.price_usage(now=NOW + timedelta(minutes=1))
    assert list_totals() == before


def test_hours_and_priced_time_of_a_group_are_one_number() -> None:
    """Three records of a third of an hour, each rounded, would add up to 0.999999999."""
    for day in (3, 4, 5):
        create_time_usage(f"2026-11-0{day}T05:00", HOUR / 3, "did:plc:new", provider="acme")
    price()
    for by in ("agent", "lease"):
        (total,) = totals.sum_costs(by, agent="did:plc:new")
        assert (total.quantities["time"], total.sandbox_time) == (1, HOUR)


@pytest.mark.django_db(transaction=True)
def test_concurrent_passes_and_derivations_write_the_same_as_one() -> None:
    def act(index: int) -> None:
        if index < 2:
            price()
        elif index == 2:
            period_totals.derive_missing_totals()
        else:
            create_time_usage("2026-10-14T18:00", HOUR, BOB, provider="acme", source="while pricing")

    with run_in_threads(4) as run:
        assert run(act) == [None] * 4
    price()
    together = list_totals()
    check_period_totals()
    costs.reset_costs()
    price()
    assert list_totals() == together


def test_a_change_of_the_unpriced_or_estimated_calls_alone_reaches_the_record_and_the_totals() -> None:
    def set_usage(**fields: object) -> None:
        UsageRecord.objects.filter(source="calls", day="2026-11-02").delete()
        create_token_usage("2026-11-02T07:00", "2", 5, agent=BOB, source="calls", **fields)
        price()

    found = []
    for fields in ({}, {"unpriced": 3}, {"unpriced": 1, "estimated_usd": "0.5"}, {"estimated_usd": "2"}, {}):
        set_usage(**fields)
        check_period_totals()
        record, (total,) = CostRecord.objects.get(agent_did=BOB, item="llm"), totals.sum_costs("item", agent=BOB, item="llm")
        assert (record.unpriced, record.estimated_usd) == (total.unpriced, total.estimated_usd)
        found.append((total.usd, total.unpriced, total.estimated_usd))
    assert found == [(2, 0, 0), (2, 3, 0), (2, 1, Decimal("0.5")), (2, 0, 2), (2, 0, 0)]


def test_a_pass_after_one_of_the_version_before_adds_the_unpriced_and_estimated_calls() -> None:
    create_token_usage("2026-09-30T07:00", "2", 5, agent=BOB, unpriced=3)
    create_token_usage("2026-10-14T07:00", "2", 5, agent=BOB, estimated=1, estimated_usd="0.5")
    price()
    CostRecord.objects.update(unpriced=0, estimated_usd=0)
    Watermark.hold("costs", NOW + HOUR)  # it writes no totals
    costs.price_usage(now=NOW + 2 * HOUR)
    days = {each.key: (each.unpriced, each.estimated_usd) for each in totals.sum_costs("day", agent=BOB, item="llm")}
    assert days == {"2026-09-30": (3, 0), "2026-10-14": (0, Decimal("0.5"))}
    check_period_totals()


def test_totals_by_model_of_the_version_before_are_derived_again_with_their_estimated_tokens() -> None:
    create_token_usage("2026-09-30T07:00", "2", 5, agent=BOB, input_tokens=10, estimated_tokens=70)
    create_token_usage("2026-10-14T07:00", "2", 5, agent=BOB, output_tokens=3, estimated_tokens=8)
    price()
    expected = list_model_totals()
    for written in ({"period": "lday", "day": "2026-10-14"}, {"period": "amonth"}, {}):
        ModelTotal.objects.filter(**written).update(estimated_tokens=None)
        [total] = totals.sum_costs("agent", agent=BOB)
        assert total.tokens is None
        with pytest.raises(TotalsPending):
            totals.sum_costs("model")
        create_token_usage("2026-10-14T07:00", "1", agent=ADA)
        costs.price_usage(now=NOW + HOUR)
        assert list_model_totals() == expected
        check_period_totals()


def list_model_totals() -> list[tuple[object, ...]]:
    columns = ("period", "day", "account", "provider", "model", "agent_did", "environment_id", "holder")
    rows = ModelTotal.objects.filter(agent_did=BOB).order_by(*columns)
    return [*rows.values_list(*columns, *ModelUsage._fields)]


def sum_time() -> dict[str, timedelta | None]:
    return {each.key: each.sandbox_time for each in totals.sum_costs("agent")}


def list_totals() -> list[tuple[object, ...]]:
    columns = ("period", "day", "account", "provider", "item", "agent_did")
    return [*PeriodTotal.objects.order_by(*columns).values_list(*columns, *period_totals.AMOUNTS)]
