"""Export in the FOCUS format: rows, their columns, and the states of a month."""

from datetime import date
from decimal import Decimal

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing import costs, statements
from billing.focus import charges
from billing.focus.export import CHUNK_SIZE, find_accounts, format_value, iter_csv, open_month
from billing.focus.rows import Value, build_account_row, build_charge_rows
from billing.models import Account, BillableItem, Rate, Statement, StatementCharge, StatementLine, Tab, UsageRecord
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    advance_and_price,
    close_month,
    create_rate,
    create_storage_usage,
    create_time_usage,
    create_token_usage,
    derive_lease_id,
    get_house_account,
    parse_day,
    parse_utc,
)
from tests.support.focus import Row, find_faults, read_focus, sum_column

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
OCTOBER, NOVEMBER, DECEMBER = (parse_day(f"2026-{month}-01") for month in (10, 11, 12))
END_OF_NOVEMBER, END_OF_DECEMBER = parse_utc("2026-12-01T00:00"), parse_utc("2027-01-01T00:00")


@pytest.fixture
def november(db: None) -> Account:
    """Ada: 3 h over two days, of which half an hour is free, calls of which two have no price, and a snapshot; Bob: 1 h."""
    create_rate("time", "0.335", allowance=Decimal("0.5")), create_rate("plan", "5"), create_rate("storage", "0.023")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    create_time_usage("2026-11-30T23:00", HOUR, BOB, provider="acme")
    create_storage_usage("2026-11-05T00:00", 24 * HOUR, 10**9, provider="acme")
    create_token_usage(
        "2026-11-03T10:00", "1.2345", 7, unpriced=2, estimated_usd=Decimal("0.1"), provider="acme", source="calls",
        input_tokens=50, cached_tokens=20, output_tokens=9,
    )  # fmt: skip
    Tab.objects.create(
        holder=derive_lease_id(ADA), agent_did=ADA, environment_type="game", project="pilot", opened_at=END_OF_NOVEMBER
    )
    advance_and_price(END_OF_NOVEMBER)
    return get_house_account()


def export(account: Account, month: date = NOVEMBER, *, daily: bool = False, preliminary: bool = False) -> str:
    source = open_month(account, month, preliminary=preliminary)
    assert source
    return "".join(iter_csv([source], daily=daily))


def close(account: Account, month: date = NOVEMBER) -> Statement:
    return close_month(account, month, now=END_OF_DECEMBER)


def select(rows: list[Row], *columns: str) -> list[tuple[str, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_by_day_have_the_lease_the_rate_and_the_part_within_the_allowance(november: Account) -> None:
    rows = [row for row in read_focus(export(november, preliminary=True)) if row["x_Item"] == "time"]
    assert select(rows, "ChargePeriodStart", "SubAccountId", "PricingQuantity", "ListCost", "BilledCost", "x_Discount") == [
        ("2026-11-02T00:00:00Z", ADA, "0.5", "0.1675", "0", "monthly allowance"),
        ("2026-11-02T00:00:00Z", ADA, "1.5", "0.5025", "0.5025", ""),
        ("2026-11-03T00:00:00Z", ADA, "1", "0.335", "0.335", ""),
        ("2026-11-01T00:00:00Z", ADA, "", "0.0025", "0.0025", ""),  # 0.8375 is 0.84
        ("2026-11-30T00:00:00Z", BOB, "1", "0.335", "0.335", ""),
        ("2026-11-01T00:00:00Z", BOB, "", "0.005", "0.005", ""),
    ]
    paid = rows[1]
    assert {name: value for name, value in paid.items() if value} == {
        "BilledCost": "0.5025", "BillingAccountId": "house", "BillingAccountName": "house", "BillingCurrency": "USD",
        "BillingPeriodEnd": "2026-12-01T00:00:00Z", "BillingPeriodStart": "2026-11-01T00:00:00Z", "ChargeCategory": "Usage",
        "ChargeDescription": "sandbox-hours at acme, 0.335 USD each", "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": "2026-11-03T00:00:00Z", "ChargePeriodStart": "2026-11-02T00:00:00Z", "ConsumedQuantity": "1.5",
        "ConsumedUnit": "Sandbox-Hours", "ContractedCost": "0.5025", "ContractedUnitPrice": "0.335", "EffectiveCost": "0.5025",
        "InvoiceIssuerName": "Leasehold", "ListCost": "0.5025", "ListUnitPrice": "0.335", "PricingCategory": "Standard",
        "PricingQuantity": "1.5", "PricingUnit": "Sandbox-Hours", "ProviderName": "Leasehold", "PublisherName": "acme",
        "ResourceId": str(derive_lease_id(ADA)), "ResourceType": "Lease", "ServiceCategory": "Compute",
        "ServiceName": "Sandboxes", "SkuId": "acme/time", "SkuPriceId": paid["SkuPriceId"], "SubAccountId": ADA,
        "SubAccountName": ADA, "x_Item": "time", "x_Status": "preliminary",
        "Tags": f'{{"leasehold:agent": "{ADA}", "leasehold:environment": "game-1", "leasehold:environment-type": "game", '
        f'"leasehold:lease": "{derive_lease_id(ADA)}", "leasehold:project": "pilot"}}',
    }  # fmt: skip
    adjustment = rows[3]
    assert select([adjustment], "ChargeCategory", "ChargeDescription", "ChargePeriodEnd") == [
        ("Adjustment", "Rounding to cents of sandbox-hours in 2026-11", "2026-12-01T00:00:00Z")
    ]


def test_model_calls_have_their_stated_cost_and_name_the_calls_without_a_price(november: Account) -> None:
    [calls, adjustment] = [row for row in read_focus(export(november, preliminary=True)) if row["x_Item"] == "llm"]
    columns = (
        "BilledCost",
        "ListUnitPrice",
        "PricingQuantity",
        "PricingUnit",
        "ConsumedQuantity",
        "x_UnpricedCalls",
        "x_Estimated",
    )
    assert select([calls], *columns) == [("1.2345", "1", "1.2345", "USD", "7", "2", "0.1")]
    tokens = ("x_InputTokens", "x_CachedTokens", "x_CacheWrittenTokens", "x_OutputTokens")
    assert select([calls], "SkuId", "x_Model", *tokens) == [("acme/llm/m", "m", "50", "20", "0", "9")]
    assert (
        calls["ChargeDescription"]
        == "model calls of m, cost as stated: 2 of them have no price, which the cost does not include"
    )
    assert select([adjustment], "BilledCost", "ChargeCategory", "x_UnpricedCalls") == [("-0.0045", "Adjustment", "")]


def test_a_plan_is_a_recurring_purchase_and_credit_is_a_row_of_its_own(november: Account) -> None:
    statements.grant_credit(november, Decimal("2.5"), now=END_OF_NOVEMBER, actor="eve", reason="welcome")
    statement = close(november)
    rows = read_focus(export(november))
    assert select([row for row in rows if row["x_Item"] == "plan"], "ChargeCategory", "ChargeFrequency", "BilledCost") == [
        ("Purchase", "Recurring", "5")
    ]
    assert select(rows[-1:], "ChargeCategory", "BilledCost", "SubAccountId") == [("Credit", "-2.5", "")]
    assert sum_column(rows) == statement.total == statement.subtotal - Decimal("2.5")


def test_each_item_has_a_unit_a_service_and_an_exact_list_cost() -> None:
    for item in BillableItem:
        rate = Rate(pk=7, item=item, usd=Decimal("0.000000000001"), instance_type="H100" if item == "gpu" else "")
        charge = charges.Charge(
            begin=NOVEMBER, end=DECEMBER, agent_did="", provider="acme", item=item, rate=rate, free=Decimal(0),
            quantity=Decimal("123456789.123456789"), usd=Decimal("0.00"), unpriced=0, estimated_usd=Decimal(0),
        )  # fmt: skip
        [row] = _render(charge)
        assert (find_faults(row), row["ListCost"]) == ([], "0.000123456789123456789"), item
        assert row["SkuId"] == ("acme/gpu/H100" if item == "gpu" else f"acme/{item}")


def test_a_rate_without_a_price_of_its_own_is_named() -> None:
    charge = charges.Charge(
        begin=NOVEMBER, end=DECEMBER, agent_did="", provider="acme", item="time", rate=Rate(usd=Decimal(0), own=True, pk=7),
        quantity=Decimal(1), free=Decimal(0), usd=Decimal(0), unpriced=0, estimated_usd=Decimal(0),
    )  # fmt: skip
    assert [row["ChargeDescription"] for row in _render(charge)] == ["sandbox-hours at acme, 0 USD each: no price has been set"]


# --- months -----------------------------------------------------------------------------------------------------------


def test_export_of_a_closed_month_never_changes(november: Account) -> None:
    preliminary = read_focus(export(november, preliminary=True))
    statement = close(november)
    texts = [export(november, daily=daily) for daily in (False, True)]
    for text in texts:
        assert sum_column(read_focus(text)) == statement.total
    by_line, by_day = map(read_focus, texts)
    assert {(row["x_Status"], row["ResourceId"]) for row in by_line} == {("final", "")}
    assert sorted(map(str, by_day)) == sorted(str(row | {"x_Status": "final"}) for row in preliminary)
    UsageRecord.objects.filter(agent_did=BOB).delete()
    create_time_usage("2026-11-07T10:00", 2 * HOUR, provider="acme")
    create_token_usage("2026-11-03T12:00", "3", 2, provider="acme")
    november.title = "House of agents"
    november.save()
    Tab.objects.update(project="other")
    advance_and_price(END_OF_DECEMBER)
    assert [export(november, daily=daily) for daily in (False, True)] == texts
    close(november, DECEMBER)
    assert [export(november, daily=daily) for daily in (False, True)] == texts
    costs.reset_costs()
    assert [export(november, daily=daily) for daily in (False, True)] == texts


def test_each_line_of_usage_has_charges_that_add_up_to_it_and_corrections_have_none(november: Account) -> None:
    close(november)
    create_time_usage("2026-11-07T10:00", 2 * HOUR, provider="acme")
    create_time_usage("2026-12-07T10:00", 2 * HOUR, provider="acme")
    advance_and_price(END_OF_DECEMBER)
    close(november, DECEMBER)
    kinds = set()
    for line in StatementLine.objects.all():
        parts = [*line.charges.all()]
        kinds.add((line.kind, bool(parts)))
        if parts:
            assert sum(part.quantity for part in parts) == line.quantity
            assert abs(sum(part.usd for part in parts) - line.usd) <= Decimal("0.005")
    assert kinds == {("usage", True), ("correction", False)}


def test_a_changed_line_of_a_version_without_charges_is_one_row_by_day(november: Account) -> None:
    statement = close(november)
    StatementCharge._base_manager.all().delete()
    Statement._base_manager.update(has_charges=False)
    StatementLine._base_manager.update(estimated_tokens=None)
    before = read_focus(export(november, daily=True))
    create_time_usage("2026-11-07T10:00", 2 * HOUR, provider="acme")
    advance_and_price(END_OF_DECEMBER)
    after = read_focus(export(november, daily=True))
    assert sum_column(after) == sum_column(before) == statement.total
    lines = {(line.item, line.agent_did): str(line.usd) for line in statement.lines.all()}
    changed = [row for row in after if (row["x_Item"], row["SubAccountId"]) == ("time", ADA)]
    assert select(changed, "BilledCost", "ResourceId", "ChargePeriodEnd") == [
        ("0", "", "2026-12-01T00:00:00Z"), (lines["time", ADA], "", "2026-12-01T00:00:00Z"),
    ]  # fmt: skip
    others = [[row for row in rows if (row["x_Item"], row["SubAccountId"]) != ("time", ADA)] for rows in (before, after)]
    assert sorted(map(str, others[0])) == sorted(map(str, others[1]))


def test_a_correction_is_on_the_export_of_the_next_month(november: Account) -> None:
    close(november)
    UsageRecord.objects.filter(source="calls").delete()
    create_token_usage("2026-11-03T10:00", "0.25", 6, provider="acme", source="calls")
    create_time_usage("2026-12-07T10:00", 2 * HOUR, BOB, provider="acme")
    advance_and_price(END_OF_DECEMBER)
    statement = close(november, DECEMBER)
    columns = ("ChargeCategory", "BillingPeriodStart", "ChargePeriodStart", "ChargePeriodEnd", "ConsumedQuantity", "BilledCost")
    for daily in (False, True):
        rows = read_focus(export(november, DECEMBER, daily=daily))
        assert sum_column(rows) == statement.total
        [correction] = [row for row in rows if row["ChargeClass"]]
        assert select([correction], *columns, "x_UnpricedCalls", "x_Estimated") == [
            ("Usage", "2026-12-01T00:00:00Z", "2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z", "-1", "-0.98", "-2", "-0.1")
        ]
        assert correction["ChargeDescription"] == (
            "Correction of 2026-11: model calls of m, cost as stated; change of the number of calls without a price: -2"
        )


def test_a_month_that_is_not_closed_is_exported_on_request_only(november: Account) -> None:
    assert open_month(november, NOVEMBER, preliminary=False) is None
    rows = read_focus(export(november, preliminary=True))
    draft = statements.build_statement(november, NOVEMBER, statements.preview_month(november, NOVEMBER))
    assert {row["x_Status"] for row in rows} == {"preliminary"}
    assert sum_column(rows) == draft.total
    assert read_focus(export(november, OCTOBER, preliminary=True)) == []


def test_accounts_to_export_are_those_with_a_statement_or_with_costs_to_bill(november: Account) -> None:
    idle, late = (Account.objects.create(name=name) for name in ("idle", "late"))
    assert find_accounts(NOVEMBER) == [november]
    close(november), close(idle)
    advance_and_price(END_OF_DECEMBER)
    close(late, DECEMBER)
    assert find_accounts(NOVEMBER) == [november, idle]
    assert find_accounts(DECEMBER) == [late]


# --- file -------------------------------------------------------------------------------------------------------------


def test_records_are_streamed_in_two_queries(november: Account) -> None:
    for number in range(300):
        create_time_usage("2026-11-08T10:00", HOUR, f"did:plc:{number:03}", provider="acme")
    advance_and_price(END_OF_NOVEMBER)
    source = open_month(november, NOVEMBER, preliminary=True)
    assert source
    with CaptureQueriesContext(connection) as queries:
        chunks = [*iter_csv([source], daily=True)]
    assert len(queries) == 2  # cost records, and totals of model calls
    assert len(chunks) > 1
    assert max(map(len, chunks)) < CHUNK_SIZE + 4096
    assert len(read_focus("".join(chunks))) > 600


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (Decimal("-0.50"), "-0.5"), (Decimal("0E-9"), "0"), (Decimal("-0.00"), "0"), (Decimal("1E+3"), "1000"),
        (Decimal("1E-12"), "0.000000000001"), (-3, "-3"), (parse_utc("2026-11-01T00:00"), "2026-11-01T00:00:00Z"),
        ("gpt-5", "gpt-5"), ("=1+1", "'=1+1"), ("-1", "'-1"), ("@sum", "'@sum"), ("\t=1", "'\t=1"),
    ],
)  # fmt: skip
def test_numbers_have_no_exponent_and_text_is_no_formula(value: Value, text: str) -> None:
    assert format_value(value) == text


def test_the_check_of_the_rules_finds_each_broken_one(november: Account) -> None:
    row = next(row for row in read_focus(export(november, preliminary=True)) if row["ListCost"] == "0.335")
    for changes, fault in (
        ({"BilledCost": "1E-9"}, "BilledCost"), ({"BilledCost": ""}, "BilledCost"), ({"BilledCost": "+1"}, "BilledCost"),
        ({"ServiceCategory": "Agents"}, "ServiceCategory"), ({"ListUnitPrice": "-1"}, "ListUnitPrice"),
        ({"ListCost": "0.5"}, "ListCost is"), ({"SkuPriceId": ""}, "SkuPriceId is not"), ({"ResourceType": ""}, "ResourceType"),
        ({"ChargePeriodStart": "2026-11-02"}, "ChargePeriodStart"), ({"ConsumedUnit": "GiB-hours"}, "ConsumedUnit"),
        ({"ChargeClass": "Correction"}, "only corrections"), ({"ChargeCategory": "Adjustment"}, "ConsumedQuantity is null"),
        ({"PricingQuantity": "-1", "ListCost": "-0.335", "ContractedCost": "-0.335"}, "PricingQuantity is negative"),
        ({"Tags": '{"agent": "a"}'}, "Tags"), ({"BillingCurrency": "usd"}, "BillingCurrency"),
    ):  # fmt: skip
        assert any(found.startswith(fault) for found in find_faults(row | changes)), changes


def _render(charge: charges.Charge) -> list[Row]:
    rows = [build_account_row("house", NOVEMBER, "final") | row for row in build_charge_rows(charge)]
    return [{column: format_value(value) for column, value in row.items()} for row in rows]
