"""Billing pages: totals, links from numbers to rows, and actions that book entries."""

import csv
import io
import json
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.core.cache import cache
from django.db.models import Sum
from django.test import Client
from django.utils import timezone

from billing import costs, metering, overview, statements
from billing.admin import statements as statement_admin
from billing.admin.costs import explain_amount
from billing.admin.formatting import format_money_aligned, format_quantity_brief
from billing.admin.rates import DELETE_RATE_ACTION
from billing.admin.usage import get_month, get_previous_month
from billing.dates import to_utc_date
from billing.models import Account, CostRecord, Credit, Membership, Rate, Statement, StatementLine, UsageRecord, Watermark
from controlplane.console import dashboard
from leases.models import Agent, Lease
from tests.admin.conftest import count_queries
from tests.support.billing import ADA, BOB, HOUR, create_rate, create_time_usage, create_token_usage, derive_lease_id

pytestmark = pytest.mark.django_db
NOW = timezone.now()
TODAY = NOW.astimezone(UTC).date()
MONTH, LAST = get_month(NOW), get_previous_month(NOW)
LATER = TODAY + timedelta(days=3)
MARKUP = "<img src=x onerror=alert(1)>"
WHY = {"_form_submitted": "on", "reason": "it was agreed"}


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for a day or month that has changed since NOW was read."""
    now = timezone.now()
    day = to_utc_date(now)
    for name, value in [
        ("NOW", now), ("TODAY", day), ("MONTH", get_month(now)), ("LAST", get_previous_month(now)),
        ("LATER", day + timedelta(days=3)),
    ]:  # fmt: skip
        monkeypatch.setattr(sys.modules[__name__], name, value)


def on(day: Any, hour: int = 0) -> datetime:
    return datetime.combine(day, time(hour), UTC)


def price() -> None:
    for name in metering.WATERMARK_NAMES:
        Watermark.objects.update_or_create(name=name, defaults={"at": NOW})
    costs.price_usage(now=NOW)


def page(client: Client, path: str) -> str:
    answer = client.get(f"/admin/{path}")
    assert answer.status_code == 200, path
    found: str = b"".join(answer).decode() if answer.streaming else answer.content.decode()  # type: ignore[arg-type]
    return found


def list_messages(answer: Any) -> list[str]:
    return [str(message) for message in get_messages(answer.wsgi_request)]


@pytest.fixture
def team(db: None) -> Account:
    """Account of Ada. The provider acme charges 0.25 USD per hour with a monthly allowance of 2 hours."""
    create_rate("time", "0.25", allowance=Decimal(2))
    account = Account.objects.create(name="team", title="The team")
    Membership.objects.create(agent_did=ADA, account=account)
    return account


@pytest.fixture
def used(team: Account) -> Account:
    """Ada's usage: 10 h last month, 4 h and a call of 0.125 USD this month. Bob's hour in the house account is free."""
    create_time_usage(on(LAST), 10 * HOUR, provider="acme")
    create_time_usage(on(MONTH), 4 * HOUR, provider="acme")
    create_token_usage(on(MONTH, 1).strftime("%Y-%m-%dT%H:%M"), "0.125", provider="acme")
    create_time_usage(on(MONTH), HOUR, BOB, provider="acme", environment_id="game-2")
    price()
    return team


# --- lists ------------------------------------------------------------------------------------------------------------


def fill(first: int, last: int) -> None:
    for number in range(first, last):
        did = f"did:plc:a{number}"
        account = Account.objects.create(name=f"account-{number}")
        Membership.objects.create(agent_did=did, account=account)
        statements.grant_credit(account, Decimal(1), now=NOW, actor="eve", reason="for a start")
        for month in (LAST, MONTH):
            create_time_usage(on(month), HOUR, did, provider="acme")
            create_token_usage(on(month).strftime("%Y-%m-%dT%H:%M"), "0.5", agent=did, provider="acme")
        create_rate("disk", "1", instance_type=f"size-{number}")
    price()
    for account in Account.objects.exclude(name="house"):
        statements.close_month(account, LAST, now=NOW, actor="eve")


PAGES = [
    "spending/", "billing/costrecord/", "billing/costrecord/?slice=all&q=did:plc:a1", "billing/usagerecord/?slice=all",
    "billing/rate/", "billing/rate/?slice=own", "billing/account/", "billing/membership/", "billing/credit/",
    "billing/statement/",
]  # fmt: skip


def test_a_list_costs_as_many_queries_for_40_rows_as_for_3(viewer: Client) -> None:
    create_rate("time", "0.25")
    fill(0, 3)
    cache.set("fleet", dashboard.build_fleet_summary(), 600)
    for each in PAGES:
        page(viewer, each)
    few = {each: count_queries(viewer, f"/admin/{each}") for each in PAGES}
    fill(3, 40)
    assert {each: count_queries(viewer, f"/admin/{each}") for each in PAGES} == few
    assert max(few.values()) <= 15


def test_pages_of_one_row_cost_few_queries(viewer: Client, used: Account) -> None:
    cache.set("fleet", dashboard.build_fleet_summary(), 600)
    statements.close_month(used, LAST, now=NOW, actor="eve")
    credit = statements.grant_credit(used, Decimal(1), now=NOW, actor="eve", reason="for a start")
    for row in (
        CostRecord.objects.first(), UsageRecord.objects.first(), Rate.objects.first(), used, Membership.objects.first(), credit,
        Statement.objects.first(),
    ):  # fmt: skip
        assert row
        assert count_queries(viewer, f"/admin/billing/{row._meta.model_name}/{row.pk}/change/") <= 15


def test_sums_and_exports_cover_the_filtered_rows(viewer: Client, used: Account) -> None:
    """This month (4 - 2) h cost 0.50 USD and the call 0.125 USD; last month 8 h cost 2.00 USD."""
    for query, usd, number in (
        ("slice=month", "0.63", 3), ("slice=before", "2.00", 1), ("slice=all", "2.63", 4),
        (f"slice=all&agent_did={BOB}", "0.00", 1),
        (f"slice=all&holder={derive_lease_id(ADA)}", "2.63", 3), ("slice=all&environment_id=game-2", "0.00", 1),
        ("slice=all&provider=acme&item__exact=llm", "0.13", 1), (f"slice=all&account__id__exact={used.pk}", "2.63", 3),
        (f"slice=all&day_from={LAST}&day_to={LAST}", "2.00", 1), ("slice=all&provider=nowhere", "0.00", 0),
        (f"slice=all&q={BOB}", "0.00", 1), (f"slice=all&q={derive_lease_id(ADA)}", "2.63", 3),
        ("slice=all&holder=nonsense", "0.00", 0),
        ("slice=all&agent_did=%00", "2.63", 4),
    ):  # fmt: skip
        shown = page(viewer, f"billing/costrecord/?{query}")
        assert f"{usd} USD</strong>" in shown, query
        assert f"in {number} record" in shown, query
        table = [*csv.reader(StringIO(page(viewer, f"billing/costrecord/export/csv/?{query}")))]
        listed = json.loads(page(viewer, f"billing/costrecord/export/json/?{query}"))
        assert (len(table) - 1, len(listed)) == (number, number), query
        assert [each["usd"] for each in listed] == [line[9] for line in table[1:]], query


def test_an_export_has_every_amount_in_full(viewer: Client, used: Account) -> None:
    (line,) = json.loads(page(viewer, "billing/costrecord/export/json/?slice=before"))
    assert line == {
        "day": str(LAST), "account": "team", "agent": ADA, "environment": "game-1", "lease": str(derive_lease_id(ADA)),
        "provider": "acme", "item": "time", "quantity": "10", "free": "2", "usd": "2", "rate_usd": "0.25",
        "rate": str(Rate.objects.get(provider="acme").pk),
    }  # fmt: skip


def test_an_export_needs_permission_to_view_costs(as_role: Any, viewer: Client) -> None:
    for path in ("billing/costrecord/export/csv/", "spending/"):
        assert as_role("None").get(f"/admin/{path}").status_code == 403
        assert Client().get(f"/admin/{path}").status_code == 302
    assert viewer.get("/admin/billing/costrecord/export/xml/").status_code == 404
    assert viewer.get("/admin/billing/costrecord/export/csv/?nonsense=1").status_code == 302


@pytest.mark.parametrize(("quantity", "shown"), [("0", "0"), ("0.0004", "< 0.001"), ("1234.5678", "1,234.568"), ("5", "5")])
def test_a_list_shows_a_quantity_with_at_most_three_decimals(quantity: str, shown: str) -> None:
    assert format_quantity_brief(Decimal(quantity)) == shown


# --- a cost record ----------------------------------------------------------------------------------------------------


def test_a_cost_shows_its_derivation_and_usage(viewer: Client, used: Account) -> None:
    row = CostRecord.objects.get(day=LAST)
    assert [(step.label, step.amount) for step in explain_amount(row)] == [
        ("Used, sandbox-hours", "10"), ("− allowance", "2"), ("= billable", "8"), ("× rate, USD", "0.25"), ("= USD", "2"),
    ]  # fmt: skip
    usage = UsageRecord.objects.get(day=LAST)
    shown = page(viewer, f"billing/costrecord/{row.pk}/change/")
    assert f"/admin/billing/usagerecord/{usage.pk}/change/" in shown
    assert "512 MiB, 1 CPU for 10 h" in shown


def test_the_cost_of_calls_is_the_sum_of_their_prices(viewer: Client, used: Account) -> None:
    row = CostRecord.objects.get(item="llm")
    assert [(step.label, step.amount) for step in explain_amount(row)] == [("Model calls", "1"), ("USD", "0.125")]
    assert "/admin/sandboxes/llmcall/?" in page(viewer, f"billing/costrecord/{row.pk}/change/")


def test_unbilled_usage_is_not_listed_for_a_cost(viewer: Client, team: Account) -> None:
    create_time_usage(on(MONTH), HOUR, provider="acme")
    create_time_usage(on(MONTH, 5), HOUR, provider="acme", state="cold")
    price()
    shown = viewer.get(f"/admin/billing/costrecord/{CostRecord.objects.get().pk}/change/").context["sources"]
    assert [each.state for each, *_ in shown] == ["waiting"]


def test_a_plan_has_no_usage_of_its_own(viewer: Client, team: Account) -> None:
    create_rate("plan", "5")
    create_time_usage(on(MONTH), HOUR, provider="acme")
    price()
    assert "a plan is charged once" in page(viewer, f"billing/costrecord/{CostRecord.objects.get(item='plan').pk}/change/")


def test_a_lease_and_an_agent_show_their_cost_and_link_to_it(viewer: Client, lease: Lease) -> None:
    create_rate("time", "0.25")
    agent, _ = Agent.objects.get_or_create(did=lease.agent_did)
    create_time_usage(on(MONTH), 3 * HOUR, lease.agent_did, provider="acme", holder=lease.pk)
    create_time_usage(on(MONTH), HOUR, lease.agent_did, provider="acme", holder=uuid.uuid4())
    price()
    for path, usd, query in (
        (f"leases/lease/{lease.pk}/change/", "0.75 USD", f"slice=all&holder={lease.pk}"),
        (f"leases/agent/{agent.pk}/change/", "1.00 USD", f"slice=all&agent_did={agent.did.replace(':', '%3A')}"),
    ):
        shown = page(viewer, path)
        assert usd in shown
        assert f"/admin/billing/costrecord/?{query.replace('&', '&amp;')}" in shown
        assert f"{usd}</strong>" in page(viewer, f"billing/costrecord/?{query}")


# --- spending ---------------------------------------------------------------------------------------------------------


def test_spending_adds_up_by_day_and_provider_with_model_calls_apart(team: Account) -> None:
    create_rate("plan", "5")
    for days, hours in ((0, 1), (1, 10), (29, 6), (30, 50)):
        create_time_usage(on(TODAY - timedelta(days=days)), hours * HOUR, "did:plc:x", provider="acme", state="waiting")
    create_token_usage((on(TODAY) - timedelta(hours=20)).strftime("%Y-%m-%dT%H:%M"), "3", agent="did:plc:y", provider="acme")
    price()
    found = overview.build_overview(now=NOW)
    assert [day.day for day in found.days] == [TODAY - timedelta(days=number) for number in range(29, -1, -1)]
    recent = CostRecord.objects.filter(day__gt=TODAY - timedelta(days=30))
    assert found.usd == sum((row.usd for row in recent), Decimal(0))
    assert found.days[-2].parts[overview.MODEL_CALLS_SERIES] == 3
    assert found.days[-2].parts["acme"] == sum(row.usd for row in recent.filter(day=TODAY - timedelta(days=1), item="time"))
    assert sum(found.series.values()) == sum(day.usd for day in found.days) == sum(found.items.values()) == found.usd
    plans = sum(row.usd for row in recent.filter(item="plan"))  # on a 31st its month began before these days did
    assert found.series.get(overview.PLANS_SERIES, 0) == plans and (plans > 0 or TODAY.day == 31)
    assert max(day.bar for day in found.days) <= found.top
    only = overview.build_overview(now=NOW, agent="did:plc:y")
    assert (only.usd, [each.agent_did for each in only.spenders]) == (3, ["did:plc:y"])
    assert overview.build_overview(now=NOW, account="team").usd == 0


@pytest.mark.parametrize(
    ("most", "top"), [("0", "1"), ("1", "1"), ("1.01", "2"), ("4", "5"), ("5.5", "10"), ("0.03", "0.05"), ("70", "100")]
)
def test_an_axis_ends_at_a_round_number(most: str, top: str) -> None:
    assert overview.round_up_axis(Decimal(most)) == Decimal(top)


def test_the_spending_page_accepts_any_query_string(viewer: Client, used: Account) -> None:
    shown = page(viewer, f"spending/?account=team&agent={ADA}")
    assert "<option selected>team</option>" in shown
    assert f"account__id__exact={used.pk}&amp;agent_did=did%3Aplc%3Aada" in shown
    for query in ("account=nobody", "agent=%00", "agent=a%00b", "account=" + "a" * 999, "agent=" + "b" * 999):
        page(viewer, f"spending/?{query}")


def test_a_fresh_installation_explains_the_empty_pages(viewer: Client) -> None:
    assert "No costs in the last 30 days" in page(viewer, "spending/")
    assert "metered and priced every minute" in page(viewer, "billing/costrecord/?slice=all")
    assert "No statements yet" in page(viewer, "billing/statement/")


def test_text_from_agents_is_escaped_on_billing_pages(superuser: Client, team: Account) -> None:
    create_time_usage(on(MONTH), 9 * HOUR, MARKUP, provider="acme", environment_id=MARKUP)
    create_token_usage(on(MONTH).strftime("%Y-%m-%dT%H:%M"), "1", agent=MARKUP, environment_id=MARKUP, provider=MARKUP[:32])
    Membership.objects.create(agent_did=MARKUP, account=team)
    price()
    create_time_usage(on(LAST), 9 * HOUR, MARKUP, provider="acme")
    price()
    statement, _ = statements.close_month(team, LAST, now=NOW, actor=MARKUP)
    credit = statements.grant_credit(team, Decimal(1), now=NOW, actor=MARKUP, reason=MARKUP)
    member = Membership.objects.get(agent_did=MARKUP)
    rows = [("costrecord", each.pk) for each in CostRecord.objects.all()]
    rows += [("usagerecord", each.pk) for each in UsageRecord.objects.all()]
    rows += [("account", team.pk), ("statement", statement.pk), ("credit", credit.pk), ("membership", member.pk)]
    for path in [*PAGES, f"spending/?agent={MARKUP}", *(f"billing/{model}/{pk}/change/" for model, pk in rows)]:
        assert "<img src=x" not in page(superuser, path), path


# --- rates ------------------------------------------------------------------------------------------------------------


def sent(**more: str) -> dict[str, str]:
    known = {"provider": "acme", "item": "time", "instance_type": "", "usd": "0.30", "allowance": "0", "source": ""}
    return {**known, "valid_from_0": str(LATER), "valid_from_1": "00:00:00", **more}


def test_an_administrator_adds_a_rate_that_begins_later(administrator: Client) -> None:
    assert 'value="acme"' in page(administrator, "billing/rate/add/?provider=acme&item=time")
    assert administrator.post("/admin/billing/rate/add/", sent()).status_code == 302
    added = Rate.objects.get(provider="acme")
    assert (added.usd, added.valid_from) == (Decimal("0.30"), on(LATER))
    assert administrator.post(f"/admin/billing/rate/{added.pk}/change/", sent(usd="0.31")).status_code == 302
    added.refresh_from_db()
    assert added.usd == Decimal("0.31")


def test_a_rate_does_not_begin_in_the_past(administrator: Client) -> None:
    again = administrator.post("/admin/billing/rate/add/", sent(valid_from_0=str(TODAY - timedelta(days=1))))
    assert "cannot begin in the past" in again.content.decode()
    assert not Rate.objects.filter(provider="acme").exists()


def test_a_rate_in_force_is_read_only(superuser: Client) -> None:
    begun = create_rate("time", "0.25")
    assert 'name="usd"' not in page(superuser, f"billing/rate/{begun.pk}/change/")
    assert superuser.post(f"/admin/billing/rate/{begun.pk}/change/", sent(usd="9")).status_code == 403
    assert superuser.post(f"/admin/billing/rate/{begun.pk}/delete/", {"post": "yes"}).status_code == 403
    begun.refresh_from_db()
    assert begun.usd == Decimal("0.25")


def test_an_administrator_deletes_a_rate_that_has_not_begun(administrator: Client) -> None:
    later, other = (create_rate("time", "0.25", since=f"{LATER}", provider=name) for name in ("acme", "other"))
    at = f"billing/rate/{later.pk}"
    assert "Delete…" in page(administrator, f"{at}/change/")
    assert administrator.post(f"/admin/{at}/withdraw/").status_code == 200 and Rate.objects.filter(pk=later.pk).exists()
    answer = administrator.post(f"/admin/{at}/withdraw/", WHY)
    assert (list_messages(answer), answer["HX-Redirect"]) == (["1 rate deleted."], "/admin/billing/rate/")
    assert not Rate.objects.filter(pk=later.pk).exists() and Rate.objects.filter(pk=other.pk).exists()
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.get_change_message()) == (str(later.pk), "Delete rate: it was agreed")
    assert administrator.post(f"/admin/{at}/withdraw/", WHY).status_code == 404


def test_a_rate_in_force_is_not_deleted(administrator: Client, team: Account) -> None:
    begun = Rate.objects.get(provider="acme")
    at = f"billing/rate/{begun.pk}"
    assert "Delete…" not in page(administrator, f"{at}/change/")
    answer = administrator.post(f"/admin/{at}/withdraw/", WHY)
    assert list_messages(answer) == ["Nothing changed: already in force; its costs depend on it."]
    assert answer["HX-Redirect"] == f"/admin/{at}/change/"
    assert Rate.objects.filter(pk=begun.pk).exists() and not LogEntry.objects.exists()


def test_a_rate_that_comes_into_force_during_confirmation_is_not_deleted() -> None:
    seen = create_rate("time", "0.25", since=f"{LATER}")
    Rate.objects.filter(pk=seen.pk).update(valid_from=NOW)
    assert not DELETE_RATE_ACTION.verb(seen, "eve", "it was agreed", NOW)
    Rate.objects.filter(pk=seen.pk).update(valid_from=on(LATER))
    create_time_usage(on(LATER), HOUR, provider="acme")  # a clock that went wrong: something is priced by it
    costs.price_usage(now=on(LATER, 2))
    assert not DELETE_RATE_ACTION.verb(seen, "eve", "it was agreed", NOW) and Rate.objects.filter(pk=seen.pk).exists()


@pytest.mark.parametrize("role", ["Viewer", "Operator"])
def test_others_than_administrators_delete_no_rate(as_role: Callable[..., Client], role: str) -> None:
    later, browser = create_rate("time", "0.25", since=f"{LATER}"), as_role(role)
    assert "Delete…" not in page(browser, f"billing/rate/{later.pk}/change/")
    assert browser.post(f"/admin/billing/rate/{later.pk}/withdraw/", WHY).status_code == 403
    assert Rate.objects.filter(pk=later.pk).exists()


def test_rates_are_not_deleted_in_bulk_or_without_confirmation(superuser: Client) -> None:
    later = create_rate("time", "0.25", since=f"{LATER}")
    assert superuser.post(f"/admin/billing/rate/{later.pk}/delete/", {"post": "yes"}).status_code == 403
    many = {"action": "delete_selected", "_selected_action": [str(later.pk)], "post": "yes"}
    superuser.post("/admin/billing/rate/?slice=later", many)
    assert b"delete_selected" not in superuser.get("/admin/billing/rate/?slice=later").content
    assert Rate.objects.filter(pk=later.pk).exists()


def test_missing_prices_are_listed_until_they_are_set(viewer: Client) -> None:
    def asked() -> set[str]:
        return {row.provider for row in viewer.get("/admin/billing/rate/?slice=own").context["cl"].result_list}

    assert "daytona" in asked()
    create_rate("time", "0.1", provider="daytona", since="2021-01-01")
    assert "daytona" not in asked()
    in_force = viewer.get("/admin/billing/rate/?slice=other").context["cl"].result_list
    assert [row.usd for row in in_force if row.provider == "daytona"] == [Decimal("0.1")]


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_an_administrator_adds_an_account_and_moves_an_agent(administrator: Client, used: Account) -> None:
    assert administrator.post("/admin/billing/account/add/", {"name": "lab", "title": ""}).status_code == 302
    lab, member = Account.objects.get(name="lab"), Membership.objects.get(agent_did=ADA)
    shown = administrator.get(f"/admin/billing/membership/add/?agent_did={ADA}").context["adminform"].form
    assert shown.initial["agent_did"] == ADA
    move = {"agent_did": ADA, "account": lab.pk, "since": str(MONTH)}
    assert administrator.post("/admin/billing/membership/add/", move).status_code == 302
    price()
    hers = CostRecord.objects.filter(agent_did=ADA).values_list("day", "account__name").distinct()
    assert {*hers} == {(LAST, "team"), (MONTH, "lab")}
    path = f"/admin/billing/membership/{member.pk}/change/"
    assert "This field is required" in administrator.post(path, {"account": lab.pk}).content.decode()
    assert administrator.post(path, {"account": lab.pk, "since": "1970-01-01"}).status_code == 302
    price()
    assert {*CostRecord.objects.filter(agent_did=ADA).values_list("account__name", flat=True)} == {"lab"}
    assert administrator.post(f"/admin/billing/account/{lab.pk}/change/", {"name": "x", "title": "Lab"}).status_code == 302
    lab.refresh_from_db()
    assert (lab.name, lab.title) == ("lab", "Lab")


@pytest.mark.parametrize(("did", "added"), [(f" {BOB} ", True), ("bob", False), (ADA, False)])
def test_a_member_is_an_agent_of_one_account(administrator: Client, team: Account, did: str, added: bool) -> None:
    answer = administrator.post("/admin/billing/membership/add/", {"agent_did": did, "account": team.pk})
    assert answer.status_code == (302 if added else 200)
    assert Membership.objects.filter(agent_did=BOB).exists() == added
    assert Membership.objects.count() == 1 + added


def test_a_membership_shows_its_end_and_its_history(viewer: Client, team: Account) -> None:
    house = Account.objects.get_or_create(name="house")[0]
    first = Membership.objects.get()
    left = Membership.objects.create(agent_did=ADA, account=house, since=MONTH)
    back = Membership.objects.create(agent_did=ADA, account=team, since=LATER)
    until = MONTH - timedelta(days=1)
    listed = {
        part: [row.pk for row in viewer.get(f"/admin/billing/membership/?slice={part}").context["cl"].result_list]
        for part in ("now", "later", "before", "all")
    }
    assert listed == {"now": [left.pk], "later": [back.pk], "before": [first.pk], "all": [back.pk, left.pk, first.pk]}
    shown = viewer.get(f"/admin/billing/membership/{first.pk}/change/").context
    facts = {fact.label: (fact.value, fact.note) for fact in shown["facts"]}
    assert (facts["From"], facts["To"]) == (("the beginning", ""), (until, "then house"))
    assert [(row.pk, words) for row, words, _ in shown["history"]] == [
        (back.pk, f"since {LATER}"), (left.pk, f"from {MONTH} to {LATER - timedelta(days=1)}, then team"),
        (first.pk, f"from the beginning to {until}, then house"),
    ]  # fmt: skip
    members = viewer.get(f"/admin/billing/account/{team.pk}/change/").context["members"]
    assert [(row.pk, words) for row, words in members] == [(back.pk, f"since {LATER}")]
    agent = Agent.objects.create(did=ADA)
    account = next(
        fact for fact in viewer.get(f"/admin/leases/agent/{agent.pk}/change/").context["facts"] if fact.label == "Account"
    )
    assert f"/admin/billing/membership/{left.pk}/" in account.value


def test_a_month_closed_while_a_form_is_saved_refuses_the_change(
    administrator: Client, used: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Membership.save

    def late(self: Membership, **options: Any) -> None:
        Statement.objects.create(
            account=used, month=MONTH, closed_at=NOW, closed_by="eve", subtotal=0, credit_used=0, total=0
        )  # fmt: skip
        save(self, **options)

    monkeypatch.setattr(Membership, "save", late)
    lab, path = Account.objects.create(name="lab"), "/admin/billing/membership/add/"
    answer = administrator.post(path, {"agent_did": ADA, "account": lab.pk, "since": str(TODAY)})
    assert (answer.status_code, answer["Location"]) == (302, path)
    assert list_messages(answer)[0].startswith(f"Nothing was saved: {used} has closed {MONTH:%Y-%m}")
    assert Membership.objects.count() == 1


def test_a_membership_that_began_in_a_closed_month_is_read_only(administrator: Client, used: Account) -> None:
    statements.close_month(used, LAST, now=NOW, actor="eve")
    member, lab = Membership.objects.get(), Account.objects.create(name="lab")
    path = f"/admin/billing/membership/{member.pk}/change/"
    assert 'name="since"' not in page(administrator, path.removeprefix("/admin/"))
    assert administrator.post(path, {"account": lab.pk, "since": str(MONTH)}).status_code == 403
    early = {"agent_did": ADA, "account": lab.pk, "since": str(LAST)}
    refused = administrator.post("/admin/billing/membership/add/", early)
    assert f"team has closed {LAST:%Y-%m}" in refused.content.decode()
    assert f"can change from {MONTH} on" in refused.content.decode()
    assert administrator.post("/admin/billing/membership/add/", {**early, "since": ""}).status_code == 302
    moved = Membership.objects.latest("pk")
    assert (moved.account, moved.since) == (lab, TODAY)
    again = administrator.post(f"/admin/billing/membership/{moved.pk}/change/", {"account": lab.pk, "since": str(LATER)})
    assert again.status_code == 302
    moved.refresh_from_db()
    assert moved.since == LATER


def test_credit_is_granted_and_taken_back_with_a_reason(administrator: Client, team: Account) -> None:
    path = f"/admin/billing/account/{team.pk}/grant_credit/"
    assert administrator.get(path).status_code == 200
    assert "HX-Redirect" not in administrator.post(path, {**WHY, "usd": "0"}).headers
    assert "HX-Redirect" not in administrator.post(path, {**WHY, "usd": "5", "reason": ""}).headers
    assert not Credit.objects.exists()
    assert list_messages(administrator.post(path, {**WHY, "usd": "5.50"})) == ["1 account credited."]
    credit = Credit.objects.get()
    assert (credit.usd, credit.actor, credit.reason) == (Decimal("5.50"), "administrator", "it was agreed")
    assert "5.50 USD" in page(administrator, f"billing/account/{team.pk}/change/")
    back = f"/admin/billing/credit/{credit.pk}/take_back/"
    assert list_messages(administrator.post(back, WHY)) == ["1 credit reversed."]
    assert list_messages(administrator.post(back, WHY)) == ["1 credit reversed.", "Nothing changed: no unused part remains."]
    assert (statements.get_balance(team), Credit.objects.count()) == (0, 2)
    assert "Reverse credit" not in page(administrator, f"billing/credit/{credit.pk}/change/")


def test_a_month_is_closed_on_its_accounts_page(administrator: Client, used: Account) -> None:
    path = f"/admin/billing/account/{used.pk}/close_month/"
    asked = page(administrator, f"billing/account/{used.pk}/close_month/")
    assert f'<option value="{LAST}">' in asked
    assert f"{MONTH:%Y-%m}" not in asked
    assert "HX-Redirect" not in administrator.post(path, {**WHY, "month": str(MONTH)}).headers
    assert not Statement.objects.exists()
    assert list_messages(administrator.post(path, {**WHY, "month": str(LAST)})) == ["1 account issued the statement."]
    made = Statement.objects.get()
    assert (made.month, made.closed_by, made.total) == (LAST, "administrator", 2)
    assert LogEntry.objects.get(object_id=str(used.pk)).get_change_message() == "Close month: it was agreed"
    shown = page(administrator, f"billing/statement/{made.pk}/change/")
    assert "Amount due, USD" in shown
    assert "Close month" not in page(administrator, f"billing/account/{used.pk}/change/")


def test_months_are_offered_one_after_the_other(administrator: Client, used: Account) -> None:
    before = (LAST - timedelta(days=1)).replace(day=1)
    create_time_usage(on(before), 3 * HOUR, provider="acme")
    price()
    asked = page(administrator, f"billing/account/{used.pk}/close_month/")
    assert f'<option value="{before}">' in asked
    assert str(LAST) not in asked
    assert "HX-Redirect" not in administrator.post(
        f"/admin/billing/account/{used.pk}/close_month/", {**WHY, "month": str(LAST)}
    )
    assert not Statement.objects.exists()


def test_a_month_that_cannot_be_closed_yet_says_why(administrator: Client, used: Account) -> None:
    create_time_usage(on(LAST, 5), HOUR, BOB, provider="acme")
    again = administrator.post(f"/admin/billing/account/{used.pk}/close_month/", {**WHY, "month": str(LAST)})
    assert "is not priced yet" in again.content.decode()
    assert not Statement.objects.exists()


def test_a_statement_shows_the_corrected_month(viewer: Client, used: Account) -> None:
    before = (LAST - timedelta(days=1)).replace(day=1)
    create_time_usage(on(before), 3 * HOUR, provider="acme")
    price()
    statements.close_month(used, before, now=NOW, actor="eve")
    create_time_usage(on(before, 9), 3 * HOUR, provider="acme")
    price()
    made, _ = statements.close_month(used, LAST, now=NOW, actor="eve")
    shown = viewer.get(f"/admin/billing/statement/{made.pk}/change/").context
    assert [(line["month"], line["usd"]) for line in shown["corrections"]] == [(f"{before:%Y-%m}", "0.75")]
    assert [(line["quantity"], line["usd"]) for line in shown["usage"]] == [("10", "2.00")]


def test_half_a_cent_is_rounded_up_on_every_page(viewer: Client, used: Account) -> None:
    spent = CostRecord.objects.filter(account=used, day__gte=MONTH).aggregate(usd=Sum("usd"))["usd"]
    assert spent % Decimal("0.01") == Decimal("0.005")
    shown = f"{spent + Decimal('0.005'):.2f}"
    for path in ("billing/account/", f"billing/account/{used.pk}/change/", f"spending/?account={used.name}"):
        assert shown in page(viewer, path), path


@pytest.mark.parametrize(
    ("usd", "shown"), [("0", "0.0000"), ("0.00004", "< 0.0001"), ("0.00005", "0.0001"), ("1234567.123456789", "1,234,567.1235")]
)
def test_amounts_of_a_column_have_as_many_digits(usd: str, shown: str) -> None:
    assert format_money_aligned(Decimal(usd)) == shown


def test_a_credit_may_be_as_large_as_the_form_takes(administrator: Client, team: Account) -> None:
    for _ in range(2):
        administrator.post(f"/admin/billing/account/{team.pk}/grant_credit/", {**WHY, "usd": "9999999999999.99"})
    assert statements.get_balances() == {team.pk: Decimal("19999999999999.98")}
    assert "19,999,999,999,999.98" in page(administrator, "billing/account/")


@pytest.mark.parametrize(
    "path",
    [
        "costrecord/?item__exact=%00", "costrecord/?provider__exact=%00", "costrecord/?item=%00", "membership/?agent_did=%00",
        "budget/?scope__exact=%00", "costrecord/?agent_did=%00", "costrecord/export/csv/?item__exact=%00",
        "costrecord/?slice=%00", "costrecord/?q=%00",
    ],
)  # fmt: skip
def test_a_nul_in_a_query_string_is_ignored(viewer: Client, used: Account, path: str) -> None:
    answer = viewer.get(f"/admin/billing/{path}")
    if answer.streaming:
        b"".join(answer.streaming_content)
    assert answer.status_code in (200, 302)


def test_allocated_usage_is_listed_where_use_is_not_measured(viewer: Client, team: Account) -> None:
    create_rate("cpu", "0.0012", by_use=True)
    create_time_usage(on(TODAY), HOUR, provider="acme")
    price()
    row = CostRecord.objects.get(item="cpu")
    shown = viewer.get(f"/admin/billing/costrecord/{row.pk}/change/").context
    listed = viewer.get(shown["all_sources"]).context["cl"].result_list
    assert [each.pk for each, *_ in shown["sources"]] == [each.pk for each in listed] != []


def test_each_rate_of_a_day_lists_the_usage_it_priced(viewer: Client, team: Account) -> None:
    first = Rate(provider="cut", item="time", usd=Decimal(1), valid_from=on(LAST - timedelta(days=60)))
    Rate.objects.bulk_create([first, Rate(provider="cut", item="time", usd=Decimal(2), valid_from=on(LAST, 12))])
    (before,) = create_time_usage(on(LAST, 1), HOUR, provider="cut")
    (after,) = create_time_usage(on(LAST, 20), 2 * HOUR, provider="cut")
    price()

    def shown() -> list[tuple[int, list[int], bool]]:
        rows = CostRecord.objects.filter(provider="cut").order_by("rate__valid_from")
        found = [viewer.get(f"/admin/billing/costrecord/{row.pk}/change/").context for row in rows]
        return [
            (row.quantity, [each.pk for each, *_ in one["sources"]], one["split_by_rate"])
            for row, one in zip(rows, found, strict=True)
        ]

    assert shown() == [(1, [before.pk], False), (2, [after.pk], False)]
    (over,) = create_time_usage(on(LAST, 11), 2 * HOUR, provider="cut")
    price()
    assert shown() == [(2, [before.pk, over.pk], True), (3, [over.pk, after.pk], True)]


def test_a_long_statement_is_shown_in_part_and_exported_in_full(
    viewer: Client, used: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statement_admin, "MAX_LINES_SHOWN", 2)
    for number in range(3):
        create_time_usage(on(LAST, number), HOUR, f"did:plc:a{number}", provider="acme")
    price()
    made, _ = statements.close_month(used, LAST, now=NOW, actor="eve")
    StatementLine.objects.bulk_create(
        StatementLine(
            statement=made, kind="usage", for_month=LAST, agent_did=f"did:plc:b{number}", provider="acme", item="time",
            quantity=Decimal("1234567.5"), usd=Decimal("0.25"),
        )
        for number in range(3)
    )  # fmt: skip
    number = made.lines.count()
    shown = viewer.get(f"/admin/billing/statement/{made.pk}/change/")
    assert f"The first 2 of {number} lines" in shown.content.decode()
    assert len(shown.context["usage"]) == 2
    file = viewer.get(shown.context["file"])
    assert file["Content-Disposition"] == f'attachment; filename="{used.name}-{LAST:%Y-%m}.csv"'
    found = [*csv.DictReader(io.StringIO(file.content.decode()))]
    assert len(found) == number
    assert sum(Decimal(line["usd"]) for line in found) == made.subtotal + Decimal("0.75")
    assert found[-1]["quantity"] == "1234567.5"
    assert viewer.get(f"/admin/billing/statement/{made.pk + 1}/lines.csv").status_code == 404
    assert Client().get(shown.context["file"]).status_code == 302


@pytest.mark.parametrize("role", ["Viewer", "Operator"])
def test_only_administrators_book_anything(as_role: Any, used: Account, role: str) -> None:
    client, credit = as_role(role), statements.grant_credit(used, Decimal(1), now=NOW, actor="eve", reason="for a start")
    member = Membership.objects.get()
    for path, body in (
        (f"account/{used.pk}/grant_credit/", {**WHY, "usd": "5"}),
        (f"account/{used.pk}/close_month/", {**WHY, "month": str(LAST)}),
        (f"credit/{credit.pk}/take_back/", WHY), ("rate/add/", sent()), ("account/add/", {"name": "x"}),
        ("membership/add/", {"agent_did": BOB, "account": used.pk}), (f"membership/{member.pk}/change/", {"account": 1}),
    ):  # fmt: skip
        assert client.post(f"/admin/billing/{path}", body).status_code == 403, path
    shown = page(client, f"billing/account/{used.pk}/change/")
    assert "Grant credit" not in shown
    assert "Close month" not in shown
    assert (Credit.objects.count(), Statement.objects.count()) == (1, 0)


@pytest.mark.parametrize("raw", ["0", "x", "9" * 40, "-1", "%00"])
def test_an_action_on_a_missing_account_is_not_found(administrator: Client, raw: str) -> None:
    for act in ("grant_credit", "close_month"):
        assert administrator.get(f"/admin/billing/account/{raw}/{act}/").status_code in (200, 400, 404)
        answer = administrator.post(f"/admin/billing/account/{raw}/{act}/", {**WHY, "usd": "1", "month": str(LAST)})
        assert answer.status_code in (200, 400, 404)
        assert "HX-Redirect" not in answer.headers
    assert not Credit.objects.exists()


def test_booked_entries_are_not_edited_or_deleted(superuser: Client, used: Account) -> None:
    statement, _ = statements.close_month(used, LAST, now=NOW, actor="eve")
    credit = statements.grant_credit(used, Decimal(1), now=NOW, actor="eve", reason="for a start")
    for row in (statement, credit):
        path = f"/admin/billing/{row._meta.model_name}/{row.pk}"
        assert superuser.post(f"{path}/change/", {"usd": "9"}).status_code == 403
        assert superuser.post(f"{path}/delete/", {"post": "yes"}).status_code == 403
    assert superuser.post(f"/admin/billing/account/{used.pk}/delete/", {"post": "yes"}).status_code == 403
