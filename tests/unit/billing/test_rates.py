"""Rates: what is shipped, and that one which has begun stays as it is."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.db.models import ProtectedError
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing import costs, pricing
from billing.models import Account, CostRecord, Membership, Rate, Unpriced
from sandboxes import providers
from tests.conftest import NOW
from tests.support.billing import ADA, create_rate, create_time_usage, list_cost_values, parse_day, parse_utc

pytestmark = pytest.mark.django_db
SOON = timedelta(minutes=5)


def new(**fields: Any) -> Rate:
    known = {"provider": "acme", "item": "time", "usd": Decimal(1), "valid_from": timezone.now() + SOON}
    return Rate(**{**known, **fields})


# --- what is shipped --------------------------------------------------------------------------------------------------


def test_cloudflares_prices_are_there() -> None:
    found = Rate.objects.filter(provider="cloudflare").values_list("item", "usd", "allowance", "own")
    assert {*found} == {
        ("memory", Decimal("0.009"), 25, False),
        ("cpu", Decimal("0.0012"), 375, False),
        ("disk", Decimal("0.00025"), 200, False),
        ("plan", 5, 0, False),
    }


@pytest.mark.parametrize("name", ["docker", "process", "memory"])
def test_what_runs_here_costs_nothing_until_somebody_says_so(name: str) -> None:
    assert providers.get_provider(name)
    assert [*Rate.objects.filter(provider=name).values_list("item", "usd", "own")] == [("time", 0, False)]


def test_of_the_others_each_is_to_be_set() -> None:
    own = Rate.objects.filter(own=True)
    assert {*own.values_list("provider", flat=True)} == {"daytona", "modal", "runloop", "langsmith", "kubernetes"}
    assert {*own.values_list("item", "usd")} == {("time", 0)}


def test_every_shipped_rate_says_where_it_is_from_and_was_there_before_all_usage() -> None:
    assert not Rate.objects.filter(source="")
    assert {*Rate.objects.values_list("valid_from", flat=True)} == {datetime(2020, 1, 1, tzinfo=UTC)}


def test_there_is_a_house() -> None:
    assert [*Account.objects.values_list("name", flat=True)] == ["house"]


# --- which counts -----------------------------------------------------------------------------------------------------


def test_a_rate_counts_from_its_moment_on() -> None:
    known = [
        create_rate("time", "1"),
        create_rate("time", "2", since="2026-11-02"),
        create_rate("time", "3", since="2027-01-01"),
    ]
    moments = {"2019-12-31": None, "2020-01-01": 1, "2026-11-01T23:59:59.999999": 1, "2026-11-02": 2, "2030-01-01": 3}
    found = {when: pricing.find_rate(known, "acme", "", "time", parse_utc(when)) for when in moments}
    assert {when: each and each.usd for when, each in found.items()} == moments


@pytest.mark.parametrize(
    ("provider", "kind", "item", "usd"),
    [
        ("acme", "", "time", 1), ("acme", "small", "time", 2), ("acme", "big", "time", 1), ("acme", "", "memory", 4),
        ("other", "", "time", 5), ("none", "", "time", None), ("acme", "", "disk", None),
    ],
)  # fmt: skip
def test_a_rate_is_of_a_provider_an_instance_type_and_an_item(provider: str, kind: str, item: str, usd: int | None) -> None:
    known = [
        create_rate("time", "1"),
        create_rate("time", "2", instance_type="small"),
        create_rate("memory", "4"),
        create_rate("time", "5", provider="other"),
    ]
    for order in (known, known[::-1]):
        found = pricing.find_rate(order, provider, kind, item, NOW)
        assert (found and found.usd) == usd


# --- what may be written ----------------------------------------------------------------------------------------------


def test_a_rate_that_begins_later_may_be_added_changed_and_removed() -> None:
    one = new()
    one.save()
    one.usd = Decimal(2)
    one.save()
    assert Rate.objects.get(pk=one.pk).usd == 2
    one.delete()
    assert not Rate.objects.filter(provider="acme").exists()


def test_a_rate_does_not_begin_in_the_past() -> None:
    with pytest.raises(ValidationError) as refused:
        new(valid_from=timezone.now() - timedelta(seconds=1)).save()
    assert refused.value.message_dict.keys() == {"valid_from"}


@pytest.mark.parametrize(
    "change", [{"usd": Decimal(9)}, {"allowance": Decimal(9)}, {"valid_from": datetime(2099, 1, 1, tzinfo=UTC)}]
)
def test_a_rate_that_has_begun_is_not_changed(change: dict[str, Any]) -> None:
    one = Rate.objects.get(provider="cloudflare", item="memory")
    for name, value in change.items():
        setattr(one, name, value)
    with pytest.raises(ValidationError, match="has begun"):
        one.save()
    with pytest.raises(ValidationError, match="has begun"):
        one.save(update_fields=[*change])
    one.refresh_from_db()
    assert (one.usd, one.allowance, one.valid_from.year) == (Decimal("0.009"), 25, 2020)


def test_a_rate_that_has_begun_is_not_removed() -> None:
    one = Rate.objects.get(provider="cloudflare", item="memory")
    with pytest.raises(ValidationError, match="has begun"):
        one.delete()


def test_a_rate_by_which_something_was_priced_cannot_go() -> None:
    one = create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", provider="acme")
    costs.price_usage(now=NOW)
    with pytest.raises(ProtectedError):
        Rate.objects.filter(pk=one.pk).delete()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"usd": Decimal("-0.01")}, "usd"),
        ({"usd": Decimal("0.0000000000001")}, "usd"),
        ({"usd": Decimal("12345.678901234567")}, "usd"),
        ({"usd": Decimal(10**7)}, "usd"),
        ({"usd": None}, "usd"),
        ({"allowance": Decimal(-1)}, "allowance"),
        ({"allowance": Decimal("0.0000001")}, "allowance"),
        ({"item": "llm"}, "item"),
        ({"item": "egress"}, "item"),
        ({"provider": ""}, "provider"),
        ({"provider": "a b"}, "provider"),
        ({"valid_from": None}, "valid_from"),
    ],
)
def test_a_rate_that_is_none_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        new(**fields).save()
    assert named in refused.value.message_dict
    assert not Rate.objects.filter(provider="acme").exists()


def test_of_one_moment_there_is_one_rate() -> None:
    when = timezone.now() + SOON
    new(valid_from=when).save()
    with pytest.raises(ValidationError, match="already exists"):
        new(valid_from=when).save()
    new(valid_from=when, instance_type="basic").save()


@pytest.mark.parametrize("field", ["usd", "allowance"])
def test_the_database_keeps_rates_above_zero_itself(field: str) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        create_rate("time", **({"usd": "1"} | {field: "-1"} if field == "usd" else {"usd": "1", field: Decimal(-1)}))


# --- what is priced again ---------------------------------------------------------------------------------------------


def test_a_rate_that_begins_has_the_days_since_then_priced_again() -> None:
    one = new()
    that_day = one.valid_from.date()  # tomorrow, if today is as good as over
    before, after = that_day - timedelta(days=1), that_day + timedelta(days=1)
    for each in (before, after):
        create_time_usage(datetime.combine(each, datetime.min.time(), UTC), provider="acme")
    costs.price_usage(now=NOW)
    with CaptureQueriesContext(connection) as asked:
        one.save()
    assert not any('"billing_usagerecord"."id"' in each["sql"] for each in asked), "each record is read, not each day"
    assert [*Unpriced.objects.values_list("day", flat=True)] == [after]
    costs.price_usage(now=NOW)
    assert list_cost_values("day", "usd") == [(after, 1)]


def test_only_the_days_of_an_agent_that_moves_are_priced_again_from_the_first_that_changes() -> None:
    for agent in (ADA, "did:plc:other"):
        for when in ("2026-11-02T10:00", "2026-11-03T10:00", "2026-11-04T10:00"):
            create_time_usage(when, agent=agent)
    team, lab = (Account.objects.create(name=name) for name in ("team", "lab"))

    def noted() -> list[int]:
        days = sorted({*Unpriced.objects.values_list("day", flat=True)})
        costs.price_usage(now=NOW)
        return [each.day for each in days]

    assert noted() == [2, 3, 4]
    move = Membership.objects.create(agent_did=ADA, account=team, since=parse_day("2026-11-03"))
    assert noted() == [3, 4]
    Membership.objects.create(agent_did=ADA, account=lab, since=parse_day("2026-11-04"))
    assert noted() == [4]
    move.save()
    assert noted() == []
    move.since = parse_day("2026-11-02")
    move.save()
    assert noted() == [2, 3, 4]  # the 3rd and 4th did not change: they are priced as they were
    move.agent_did = "did:plc:other"
    move.save()
    assert noted() == [2, 3, 4]
    assert list_cost_values("account__name", agent_did=ADA) == [("house",), ("house",), ("lab",)]
    assert list_cost_values("account__name", agent_did="did:plc:other") == [("team",)] * 3
    move.delete()
    assert noted() == [2, 3, 4]


def test_a_cost_is_never_below_zero_and_there_is_one_of_each() -> None:
    one = create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", provider="acme", agent="")
    costs.price_usage(now=NOW)
    row = CostRecord.objects.get(rate=one)
    row.pk = None
    with pytest.raises(IntegrityError), transaction.atomic():
        row.save(force_insert=True)  # although its lease is null
    for wrong in ({"usd": -1}, {"quantity": -1}, {"free": 2}, {"rate": None}):
        with pytest.raises(IntegrityError), transaction.atomic():
            CostRecord.objects.update(**wrong)
