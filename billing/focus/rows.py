"""Rows of the export: charges with the columns of FOCUS 1.0, and columns of this project with the prefix x_.

Source of the columns, their nullability and their allowed values: FinOps Open Cost and Usage Specification 1.0, sections
"Columns" and "Attributes"."""

import json
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Context, Decimal

from billing.dates import start_of_day, start_of_next_month
from billing.focus.charges import Charge, Rounding
from billing.models import BillableItem, Rate

FOCUS_VERSION = "1.0"
Value = str | Decimal | datetime | int | None
Row = dict[str, Value]
FOCUS_COLUMNS = (
    "AvailabilityZone", "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd",
    "ChargePeriodStart", "CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName",
    "CommitmentDiscountStatus", "CommitmentDiscountType", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory",
    "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "RegionId", "RegionName", "ResourceId", "ResourceName",
    "ResourceType", "ServiceCategory", "ServiceName", "SkuId", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags",
)  # fmt: skip
CUSTOM_COLUMNS = (
    "x_CacheWrittenTokens", "x_CachedTokens", "x_Discount", "x_Estimated", "x_EstimatedTokens", "x_InputTokens", "x_Item",
    "x_Model", "x_OutputTokens", "x_Status", "x_UnpricedCalls",
)  # fmt: skip
# Of model calls alone. The input includes the tokens read from and written to the cache, but no estimated ones.
CALL_COLUMNS = (
    "x_CacheWrittenTokens", "x_CachedTokens", "x_Estimated", "x_EstimatedTokens", "x_InputTokens", "x_OutputTokens",
    "x_UnpricedCalls",
)  # fmt: skip
COLUMNS = FOCUS_COLUMNS + CUSTOM_COLUMNS
PROVIDER_NAME = "Leasehold"  # sells the sandboxes and issues the statements; the publisher runs the sandboxes
CURRENCY = "USD"
TAG_PREFIX = "leasehold:"  # of the keys of tags that the provider defines
FINAL, PRELIMINARY = "final", "preliminary"
ALLOWANCE_DISCOUNT = "monthly allowance"
MAX_NAME_LENGTH = 80  # of a model in a description, for which the specification suggests 240 characters
EXACT = Context(prec=60)  # digits of a quantity (18) times a rate (18)
UNITS = {
    BillableItem.TIME: "Sandbox-Hours",
    BillableItem.MEMORY: "GiB-Hours",
    BillableItem.CPU: "VCPU-Minutes",
    BillableItem.DISK: "GB-Hours",
    BillableItem.GPU: "GPU-Hours",
    BillableItem.SUSPENSION: "GiB-Hours",
    BillableItem.STORAGE: "GB-Months",
    BillableItem.REQUEST: "Requests",
    BillableItem.PLAN: "Months",
    BillableItem.LLM: "Requests",
}
SANDBOX_SERVICE = ("Sandboxes", "Compute")
SERVICES = {
    BillableItem.STORAGE: ("Snapshots and data", "Storage"),
    BillableItem.LLM: ("Model calls", "AI and Machine Learning"),
}


def build_account_row(account: str, month: date, status: str) -> Row:
    """Build the columns that all rows of an account's month share. The others are null."""
    return dict.fromkeys(COLUMNS) | {
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingCurrency": CURRENCY,
        "BillingPeriodStart": start_of_day(month),
        "BillingPeriodEnd": start_of_day(start_of_next_month(month)),
        "InvoiceIssuerName": PROVIDER_NAME,
        "ProviderName": PROVIDER_NAME,
        "PublisherName": PROVIDER_NAME,
        "x_Status": status,
    }


def build_charge_rows(charge: Charge | Rounding) -> Iterator[Row]:
    """Build the rows of a charge: a part within the allowance is a row of its own, because it has another discount."""
    if isinstance(charge, Rounding):
        yield _build_rounding_row(charge)
    elif charge.rate is None:
        yield _build_common_columns(charge) | _build_stated_price(charge)
    else:
        if charge.free:
            free = _build_price(charge, charge.rate, charge.free, Decimal(0))
            yield _build_common_columns(charge) | free | {"x_Discount": ALLOWANCE_DISCOUNT}
        if not charge.free or charge.quantity != charge.free or charge.usd:
            yield _build_common_columns(charge) | _build_price(charge, charge.rate, charge.quantity - charge.free, charge.usd)


def build_credit_row(month: date, used: Decimal) -> Row:
    """Build the row of the credit that a statement uses."""
    return {
        **_build_period(month, start_of_next_month(month)),
        **_build_costs(-used),
        "ChargeCategory": "Credit",
        "ChargeDescription": f"Credit used by the statement of {month:%Y-%m}",
        "ChargeFrequency": "One-Time",
        "ServiceCategory": "Other",
        "ServiceName": "Credit",
    }


def _build_price(charge: Charge, rate: Rate, quantity: Decimal, usd: Decimal) -> Row:
    """Build the price of a part of a charge. The rate is the list price and, for lack of negotiation, the contracted price."""
    cost = EXACT.multiply(rate.usd, quantity)
    item = BillableItem(charge.item)
    origin = f" at {charge.provider}" if charge.provider else ""
    note = ": no price has been set" if rate.own else ""
    return _build_consumption(item, quantity) | {
        "BilledCost": usd,
        "ChargeDescription": f"{_describe_correction(charge)}{item.label}{origin}, {format_number(rate.usd)} USD each{note}",
        "ContractedCost": cost,
        "ContractedUnitPrice": rate.usd,
        "EffectiveCost": usd,
        "ListCost": cost,
        "ListUnitPrice": rate.usd,
        "PricingCategory": "Standard",
        "PricingQuantity": quantity,
        "PricingUnit": UNITS[item],
        "SkuPriceId": f"rate-{rate.pk}",
    }


def _build_stated_price(charge: Charge) -> Row:
    """Build the price of a charge without a rate, such as model calls: its stated amount, at 1 USD per USD."""
    item = BillableItem(charge.item)
    model = f" of {charge.model[:MAX_NAME_LENGTH]}" if charge.model else ""
    return {
        **_build_consumption(item, charge.quantity),
        **_build_costs(charge.usd),
        "ChargeDescription": f"{_describe_correction(charge)}{item.label}{model}, cost as stated{_describe_unpriced(charge)}",
        "ContractedUnitPrice": Decimal(1),
        "ListUnitPrice": Decimal(1),
        "PricingCategory": "Other",
        "PricingQuantity": charge.usd,
        "PricingUnit": CURRENCY,
        "SkuPriceId": f"{_build_sku(charge)}/stated",
    }


def _build_consumption(item: BillableItem, quantity: Decimal) -> Row:
    """Build the quantity consumed. A purchase has none."""
    return {} if item == BillableItem.PLAN else {"ConsumedQuantity": quantity, "ConsumedUnit": UNITS[item]}


def _build_rounding_row(rounding: Rounding) -> Row:
    line = rounding.line
    return _build_common_columns(line) | {
        **_build_costs(rounding.usd),
        "ChargeCategory": "Adjustment",
        "ChargeDescription": f"Rounding to cents of {BillableItem(line.item).label} in {line.begin:%Y-%m}",
        "ChargeFrequency": "One-Time",
        **dict.fromkeys(CALL_COLUMNS),
    }


def _build_common_columns(charge: Charge) -> Row:
    item = BillableItem(charge.item)
    service_name, service_category = SERVICES.get(item, SANDBOX_SERVICE)
    is_plan = item == BillableItem.PLAN
    return {
        **_build_period(charge.begin, charge.end),
        "ChargeCategory": "Purchase" if is_plan else "Usage",
        "ChargeClass": "Correction" if charge.is_correction else None,
        "ChargeFrequency": "Recurring" if is_plan else "Usage-Based",
        "PublisherName": charge.provider or PROVIDER_NAME,
        "ResourceId": str(charge.lease) if charge.lease else None,
        "ResourceType": "Lease" if charge.lease else None,
        "ServiceCategory": service_category,
        "ServiceName": service_name,
        "SkuId": _build_sku(charge),
        "SubAccountId": charge.agent_did or None,
        "SubAccountName": charge.agent_did or None,
        "Tags": _build_tags(charge),
        **(_build_call_columns(charge) if item == BillableItem.LLM else {}),
        "x_Item": charge.item,
        "x_Model": charge.model or None,
    }


def _build_call_columns(charge: Charge) -> Row:
    """Build the values of CALL_COLUMNS."""
    return {
        "x_CacheWrittenTokens": charge.tokens.cache_written,
        "x_CachedTokens": charge.tokens.cached,
        "x_Estimated": charge.estimated_usd,
        "x_EstimatedTokens": charge.tokens.estimated if charge.has_estimated_tokens else None,
        "x_InputTokens": charge.tokens.input,
        "x_OutputTokens": charge.tokens.output,
        "x_UnpricedCalls": charge.unpriced,
    }


def _build_period(begin: date, end: date) -> Row:
    return {"ChargePeriodStart": start_of_day(begin), "ChargePeriodEnd": start_of_day(end)}


def _build_costs(usd: Decimal) -> Row:
    """Build the four costs of a row whose price is not reduced."""
    return {"BilledCost": usd, "ContractedCost": usd, "EffectiveCost": usd, "ListCost": usd}


def _build_sku(charge: Charge) -> str:
    instance_type = charge.rate.instance_type if charge.rate else ""
    return "/".join(filter(None, (charge.provider or "any", charge.item, instance_type, charge.model)))


def _build_tags(charge: Charge) -> str | None:
    tags = {
        "agent": charge.agent_did,
        "environment": charge.environment,
        "environment-type": charge.environment_type,
        "lease": str(charge.lease or ""),
        "project": charge.project,
    }
    present = {f"{TAG_PREFIX}{name}": value for name, value in tags.items() if value}
    return json.dumps(present, ensure_ascii=False) if present else None


def _describe_correction(charge: Charge) -> str:
    return f"Correction of {charge.begin:%Y-%m}: " if charge.is_correction else ""


def _describe_unpriced(charge: Charge) -> str:
    if not charge.unpriced:
        return ""
    if charge.is_correction:
        return f"; change of the number of calls without a price: {charge.unpriced:+}"
    return f": {charge.unpriced} of them have no price, which the cost does not include"


def format_number(number: Decimal) -> str:
    """Format a decimal of any precision without an exponent and without trailing zeros."""
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
