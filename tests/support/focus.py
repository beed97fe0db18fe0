"""Rules of FOCUS 1.0, and a reader of exports that checks them.

Source: FinOps Open Cost and Usage Specification 1.0, chapter "Columns", the section of each column, and chapter "Attributes".
The package focus-validator 1.0.0 is not used: it depends on pandas and pyarrow, does not import with current versions of its
dependencies, and requires columns by names of drafts, such as Provider and ResourceID."""

import csv
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from io import StringIO

Row = dict[str, str]
NUMBER = re.compile(r"-?\d+(\.\d+)?", re.ASCII)  # "Numeric Format", without an exponent
DATE_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)  # "Date/Time Format"
SIZES = r"(?:[KMGTPE]i?)?[Bb]"
NOUNS = r"[A-Z][A-Za-z]*"
TIMES = r"(?:Year|Month|Day|Hour|Minute|Second)s"
UNIT = re.compile(rf"{SIZES}|{NOUNS}|(?:{SIZES}|{NOUNS})-{TIMES}")  # "Unit Format", the formats in use


@dataclass(frozen=True)
class Column:
    """Constraints of a column: its data type, whether it may be null, and its allowed values."""

    kind: str
    is_nullable: bool = True
    allowed: frozenset[str] = frozenset()


REQUIRED_TEXT = Column("text", is_nullable=False)
REQUIRED_NUMBER = Column("number", is_nullable=False)
REQUIRED_TIME = Column("time", is_nullable=False)
TEXT, PRICE = Column("text"), Column("price")
CATEGORIES = {"Usage", "Purchase", "Tax", "Credit", "Adjustment"}
SERVICE_CATEGORIES = {
    "AI and Machine Learning", "Analytics", "Business Applications", "Compute", "Databases", "Developer Tools", "Multicloud",
    "Identity", "Integration", "Internet of Things", "Management and Governance", "Media", "Migration", "Mobile", "Networking",
    "Security", "Storage", "Web", "Other",
}  # fmt: skip


def allow(*values: str, is_nullable: bool = False) -> Column:
    return Column("text", is_nullable, frozenset(values))


COLUMNS = {
    "AvailabilityZone": TEXT,
    "BilledCost": REQUIRED_NUMBER,
    "BillingAccountId": REQUIRED_TEXT,
    "BillingAccountName": TEXT,
    "BillingCurrency": Column("currency", is_nullable=False),
    "BillingPeriodEnd": REQUIRED_TIME,
    "BillingPeriodStart": REQUIRED_TIME,
    "ChargeCategory": allow(*CATEGORIES),
    "ChargeClass": allow("Correction", is_nullable=True),
    "ChargeDescription": REQUIRED_TEXT,  # SHOULD NOT be null
    "ChargeFrequency": allow("One-Time", "Recurring", "Usage-Based"),
    "ChargePeriodEnd": REQUIRED_TIME,
    "ChargePeriodStart": REQUIRED_TIME,
    "CommitmentDiscountCategory": allow("Spend", "Usage", is_nullable=True),
    "CommitmentDiscountId": TEXT,
    "CommitmentDiscountName": TEXT,
    "CommitmentDiscountStatus": allow("Used", "Unused", is_nullable=True),
    "CommitmentDiscountType": TEXT,
    "ConsumedQuantity": Column("number"),
    "ConsumedUnit": Column("unit"),
    "ContractedCost": REQUIRED_NUMBER,
    "ContractedUnitPrice": PRICE,
    "EffectiveCost": REQUIRED_NUMBER,
    "InvoiceIssuerName": REQUIRED_TEXT,
    "ListCost": REQUIRED_NUMBER,
    "ListUnitPrice": PRICE,
    "PricingCategory": allow("Standard", "Dynamic", "Committed", "Other", is_nullable=True),
    "PricingQuantity": Column("number"),
    "PricingUnit": Column("unit"),
    "ProviderName": REQUIRED_TEXT,
    "PublisherName": REQUIRED_TEXT,
    "RegionId": TEXT,
    "RegionName": TEXT,
    "ResourceId": TEXT,
    "ResourceName": TEXT,
    "ResourceType": TEXT,
    "ServiceCategory": allow(*SERVICE_CATEGORIES),
    "ServiceName": REQUIRED_TEXT,
    "SkuId": TEXT,
    "SkuPriceId": TEXT,
    "SubAccountId": TEXT,
    "SubAccountName": TEXT,
    "Tags": Column("tags"),
}
# Sections of these columns: "MUST NOT be null when ChargeClass is not Correction and ChargeCategory is Usage or Purchase".
PRICED_COLUMNS = (
    "ContractedUnitPrice", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "SkuId", "SkuPriceId",
)  # fmt: skip


def read_focus(text: str) -> list[Row]:
    """Return the rows of an export. Raise AssertionError naming the row and the rules that it breaks."""
    reader = csv.DictReader(StringIO(text))
    names = [*(reader.fieldnames or ())]
    assert names[: len(COLUMNS)] == [*COLUMNS], "FOCUS columns come first"
    assert all(name.startswith("x_") for name in names[len(COLUMNS) :]), "custom columns have the prefix x_"
    rows = [*reader]
    broken = {number: faults for number, row in enumerate(rows, 2) if (faults := find_faults(row))}
    assert not broken, broken
    skus = {(row["SkuPriceId"], row["SkuId"]) for row in rows if row["SkuPriceId"]}
    assert len(skus) == len({price for price, _ in skus}), "a SkuPriceId has one SkuId"
    return rows


def find_faults(row: Row) -> list[str]:
    """Return the rules that a row breaks."""
    faults = [f"{name}: {row[name]!r}" for name, column in COLUMNS.items() if not _is_valid(row[name], column)]
    return faults or [rule for rule, is_kept in _check_columns_together(row) if not is_kept]


def sum_column(rows: Iterable[Row], name: str = "BilledCost") -> Decimal:
    return sum((Decimal(row[name]) for row in rows), Decimal(0))


def _is_valid(text: str, column: Column) -> bool:
    if not text:
        return column.is_nullable
    if column.kind in ("number", "price"):
        return bool(NUMBER.fullmatch(text)) and (column.kind == "number" or not text.startswith("-"))
    if column.kind == "tags":
        tags = json.loads(text)
        return all(key.startswith("leasehold:") and isinstance(value, str) for key, value in tags.items())
    patterns = {"time": DATE_TIME, "currency": re.compile("[A-Z]{3}"), "unit": UNIT}
    pattern = patterns.get(column.kind, re.compile(r".*\S.*"))
    return bool(pattern.fullmatch(text)) and (not column.allowed or text in column.allowed)


def _check_columns_together(row: Row) -> Iterable[tuple[str, bool]]:
    """Yield the rules on several columns, each with whether the row keeps it."""
    category, is_correction = row["ChargeCategory"], row["ChargeClass"] == "Correction"
    is_priced = category in ("Usage", "Purchase") and not is_correction
    for name in PRICED_COLUMNS:
        yield f"{name} is not null for usage and purchases", bool(row[name]) or not is_priced
    for name in ("ConsumedQuantity", "ConsumedUnit"):
        yield f"{name} is not null for usage", bool(row[name]) or not (is_priced and category == "Usage")
        yield f"{name} is null for other categories", not row[name] or category == "Usage"
    for cost, price in (("ListCost", "ListUnitPrice"), ("ContractedCost", "ContractedUnitPrice")):
        if row[price] and not is_correction:
            product = Fraction(row[price]) * Fraction(row["PricingQuantity"])
            yield f"{cost} is {price} x PricingQuantity", product == Fraction(row[cost])
        if not row[price]:
            yield f"{cost} is BilledCost without {price}", row[cost] == row["BilledCost"]
    for name in ("PricingQuantity", "ConsumedQuantity"):
        yield f"{name} is negative in corrections only", is_correction or not row[name].startswith("-")
    yield "EffectiveCost is BilledCost of credits", category != "Credit" or row["EffectiveCost"] == row["BilledCost"]
    yield "ChargeFrequency of purchases", category != "Purchase" or row["ChargeFrequency"] != "Usage-Based"
    yield "ResourceType is null if and only if ResourceId is", bool(row["ResourceType"]) == bool(row["ResourceId"])
    yield "ResourceName differs from ResourceId", not row["ResourceName"] or row["ResourceName"] != row["ResourceId"]
    yield "SubAccountName is null if and only if SubAccountId is", bool(row["SubAccountName"]) == bool(row["SubAccountId"])
    yield "no commitment discount", not row["CommitmentDiscountId"] and row["PricingCategory"] != "Committed"
    yield "charge period", row["ChargePeriodStart"] < row["ChargePeriodEnd"]
    yield "billing period", row["BillingPeriodStart"] < row["BillingPeriodEnd"]
    within = row["BillingPeriodStart"] <= row["ChargePeriodStart"] and row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
    earlier = row["ChargePeriodEnd"] <= row["BillingPeriodStart"]
    yield "only corrections are of an earlier billing period", earlier if is_correction else within
