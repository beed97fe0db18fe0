"""Rates: shipped rates, selection, validation and marking of unpriced days."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.models import ProtectedError
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing import costs, pricing
from billing.models import Account, CostRecord, Membership, Rate, Unpriced, UsageRecord
from sandboxes import providers
from tests.conftest import NOW
from tests.support.billing import ADA, create_rate, create_time_usage, list_cost_values, parse_day, parse_utc

pytestmark = pytest.mark.django_db
FIVE_MINUTES = timedelta(minutes=5)
DAY = timedelta(days=1)


def build_rate(**fields: Any) -> Rate:
    defaults = {"provider": "acme", "item": "time", "usd": Decimal(1), "valid_from": timezone.now() + FIVE_MINUTES}
    return Rate(**{**defaults, **fields})


# --- shipped rates ----------------------------------------------------------------------------------------------------


def test_cloudflare_rates_are_shipped() -> None:
    result = Rate.objects.filter(provider="cloudflare").values_list("item", "usd", "allowance", "own")
    assert {*result} == {
        ("memory", Decimal("0.009"), 25, False), ("cpu", Decimal("0.0012"), 375, False),
        ("disk", Decimal("0.00025"), 200, False), ("plan", 5, 0, False),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["docker", "process", "memory"])
def test_local_providers_have_a_rate_of_zero(name: str) -> None:
    items = ["suspend", "time"] if providers.get_provider(name).can_suspend else ["time"]
    rates = Rate.objects.filter(provider=name).order_by("item")
    assert [*rates.values_list("item", "usd", "own")] == [(item, 0, False) for item in items]


def test_only_unknown_prices_have_placeholder_rates() -> None:
    own = Rate.objects.filter(own=True)
    assert {*own.values_list("provider", "item", "usd")} == {("kubernetes", "time", 0), ("langsmith", "suspend", 0)}


def test_quoted_prices_of_vendors_do_not_replace_an_operators_rate() -> None:
    """Runloop has a rate of the operator, Modal has priced usage, Daytona has neither."""
    vendors = ["daytona", "modal", "runloop"]
    Rate.objects.filter(provider__in=vendors).delete()
    now = timezone.now()
    placeholders = [build_rate(provider=provider, usd=Decimal(0), own=True) for provider in vendors]
    Rate.objects.bulk_create([*placeholders, build_rate(provider="runloop", valid_from=now + DAY)])
    UsageRecord.objects.create(source="x", day=now.date(), began_at=now, ended_at=now, provider="modal")
    migration = "0009_vendor_prices"
    historical = MigrationLoader(connection).project_state(("billing", migration)).apps
    import_module(f"billing.migrations.{migration}").create(historical, None)
    rates = Rate.objects.filter(provider__in=vendors)
    assert {*rates.values_list("provider", "item", "own")} == {
        ("daytona", "cpu", False), ("daytona", "memory", False), ("daytona", "disk", False), ("daytona", "suspend", False),
        ("modal", "time", True), ("modal", "cpu", False), ("modal", "memory", False),
        ("runloop", "time", True), ("runloop", "time", False),
    }  # fmt: skip
    assert rates.get(provider="modal", item="cpu").valid_from > timezone.now() - DAY


def test_shipped_rates_have_a_source_and_precede_all_usage() -> None:
    assert not Rate.objects.filter(source="")
    assert not Rate.objects.filter(provider="cloudflare").exclude(source__contains="read in November 2026")
    assert {*Rate.objects.values_list("valid_from", flat=True)} == {datetime(2020, 1, 1, tzinfo=UTC)}


def test_house_account_is_shipped() -> None:
    assert [*Account.objects.values_list("name", flat=True)] == ["house"]


# --- selection --------------------------------------------------------------------------------------------------------


def test_rate_applies_from_its_start() -> None:
    starts = {"1": "2020-01-01", "2": "2026-11-02", "3": "2027-01-01"}
    rates = [create_rate("time", usd, since) for usd, since in starts.items()]
    moments = {"2019-12-31": None, "2020-01-01": 1, "2026-11-01T23:59:59.999999": 1, "2026-11-02": 2, "2030-01-01": 3}
    result = {when: pricing.find_rate(rates, "acme", "", "time", parse_utc(when)) for when in moments}
    assert {when: each and each.usd for when, each in result.items()} == moments


@pytest.mark.parametrize(
    ("provider", "kind", "item", "usd"),
    [
        ("acme", "", "time", 1), ("acme", "small", "time", 2), ("acme", "big", "time", 1), ("acme", "", "memory", 4),
        ("other", "", "time", 5), ("none", "", "time", None), ("acme", "", "disk", None),
    ],
)  # fmt: skip
def test_rate_matches_provider_instance_type_and_item(provider: str, kind: str, item: str, usd: int | None) -> None:
    rates = [create_rate("time", "1"), create_rate("time", "2", instance_type="small"), create_rate("memory", "4")]
    rates.append(create_rate("time", "5", provider="other"))
    for order in (rates, rates[::-1]):
        result = pricing.find_rate(order, provider, kind, item, NOW)
        assert (result and result.usd) == usd


# --- validation -------------------------------------------------------------------------------------------------------


def test_future_rate_can_be_added_changed_and_deleted() -> None:
    rate = build_rate()
    rate.save()
    rate.usd = Decimal(2)
    rate.save()
    assert Rate.objects.get(pk=rate.pk).usd == 2
    rate.delete()
    assert not Rate.objects.filter(provider="acme").exists()


def test_rate_cannot_begin_in_the_past() -> None:
    with pytest.raises(ValidationError) as refused:
        build_rate(valid_from=timezone.now() - timedelta(seconds=1)).save()
    assert refused.value.message_dict.keys() == {"valid_from"}


@pytest.mark.parametrize(
    "change", [{"usd": Decimal(9)}, {"allowance": Decimal(9)}, {"valid_from": datetime(2099, 1, 1, tzinfo=UTC)}]
)
def test_rate_that_has_begun_cannot_be_changed_or_deleted(change: dict[str, Any]) -> None:
    rate = Rate.objects.get(provider="cloudflare", item="memory")
    for name, value in change.items():
        setattr(rate, name, value)
    with pytest.raises(ValidationError, match="has begun"):
        rate.save()
    with pytest.raises(ValidationError, match="has begun"):
        rate.save(update_fields=[*change])
    rate.refresh_from_db()
    with pytest.raises(ValidationError, match="has begun"):
        rate.delete()
    assert (rate.usd, rate.allowance, rate.valid_from.year) == (Decimal("0.009"), 25, 2020)


def test_rate_in_force_is_not_deleted_after_an_unsaved_change_of_its_start() -> None:
    rate = create_rate("time", "1")
    rate.valid_from = timezone.now() + FIVE_MINUTES
    with pytest.raises(ValidationError, match="has begun"):
        rate.delete()
    assert Rate.objects.filter(pk=rate.pk).exists()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"usd": Decimal("-0.01")}, "usd"), ({"usd": Decimal("0.0000000000001")}, "usd"),
        ({"usd": Decimal("12345.678901234567")}, "usd"), ({"usd": Decimal(10**7)}, "usd"), ({"usd": None}, "usd"),
        ({"allowance": Decimal(-1)}, "allowance"), ({"allowance": Decimal("0.0000001")}, "allowance"),
        ({"item": "llm"}, "item"), ({"item": "egress"}, "item"), ({"provider": ""}, "provider"),
        ({"provider": "a b"}, "provider"), ({"valid_from": None}, "valid_from"),
    ],
)  # fmt: skip
def test_invalid_rate_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        build_rate(**fields).save()
    assert field in refused.value.message_dict
    assert not Rate.objects.filter(provider="acme").exists()


def test_rate_is_unique_per_start() -> None:
    when = timezone.now() + FIVE_MINUTES
    build_rate(valid_from=when).save()
    with pytest.raises(ValidationError, match="already exists"):
        build_rate(valid_from=when).save()
    build_rate(valid_from=when, instance_type="basic").save()


@pytest.mark.parametrize("field", ["usd", "allowance"])
def test_database_refuses_negative_rates(field: str) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        create_rate("time", **{"usd": "1", field: "-1"})


# --- unpriced days ----------------------------------------------------------------------------------------------------


def test_new_rate_marks_days_from_its_start_as_unpriced() -> None:
    rate = build_rate()
    first_day = rate.valid_from.date()  # tomorrow, if the test runs just before midnight
    before, after = first_day - timedelta(days=1), first_day + timedelta(days=1)
    for each in (before, after):
        create_time_usage(datetime.combine(each, datetime.min.time(), UTC), provider="acme")
    costs.price_usage(now=NOW)
    with CaptureQueriesContext(connection) as captured:
        rate.save()
    assert not any('"billing_usagerecord"."id"' in each["sql"] for each in captured), "each record is read, not each day"
    assert [*Unpriced.objects.values_list("day", flat=True)] == [after]
    costs.price_usage(now=NOW)
    assert list_cost_values("day", "usd") == [(after, 1)]


def test_move_marks_only_changed_days_as_unpriced() -> None:
    for agent in (ADA, "did:plc:other"):
        for when in ("2026-11-02T10:00", "2026-11-03T10:00", "2026-11-04T10:00"):
            create_time_usage(when, agent=agent)
    team, lab = (Account.objects.create(name=name) for name in ("team", "lab"))

    def list_unpriced_days() -> list[int]:
        days = sorted({*Unpriced.objects.values_list("day", flat=True)})
        costs.price_usage(now=NOW)
        return [each.day for each in days]

    assert list_unpriced_days() == [2, 3, 4]
    move = Membership.objects.create(agent_did=ADA, account=team, since=parse_day("2026-11-03"))
    assert list_unpriced_days() == [3, 4]
    Membership.objects.create(agent_did=ADA, account=lab, since=parse_day("2026-11-04"))
    assert list_unpriced_days() == [4]
    move.save()
    assert list_unpriced_days() == []
    move.since = parse_day("2026-11-02")
    move.save()
    assert list_unpriced_days() == [2, 3, 4]  # the 3rd and 4th did not change
    move.agent_did = "did:plc:other"
    move.save()
    assert list_unpriced_days() == [2, 3, 4]
    assert list_cost_values("account__name", agent_did=ADA) == [("house",), ("house",), ("lab",)]
    assert list_cost_values("account__name", agent_did="did:plc:other") == [("team",)] * 3
    move.delete()
    assert list_unpriced_days() == [2, 3, 4]


def test_costs_are_unique_and_not_negative_and_protect_their_rate() -> None:
    rate = create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", provider="acme", agent="")
    costs.price_usage(now=NOW)
    row = CostRecord.objects.get(rate=rate)
    row.pk = None
    with pytest.raises(IntegrityError), transaction.atomic():
        row.save(force_insert=True)  # NULL leases count as equal
    for wrong in ({"usd": -1}, {"quantity": -1}, {"free": 2}, {"rate": None}):
        with pytest.raises(IntegrityError), transaction.atomic():
            CostRecord.objects.update(**wrong)
    with pytest.raises(ProtectedError):
        Rate.objects.filter(pk=rate.pk).delete()
