"""Billing pages: totals, links from numbers to rows, and actions that book entries."""

import csv
import io
import json
import sys
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any
from urllib.parse import urljoin

import pytest
from django.contrib.admin.models import LogEntry
from django.core.cache import cache
from django.db.models import Sum
from django.test import Client
from django.utils import timezone

from billing import costs, overview, statements
from billing.admin import statements as statement_admin
from billing.admin.costs import explain_amount
from billing.admin.formatting import format_money_aligned, format_quantity_brief
from billing.admin.usage import get_month, get_previous_month
from billing.dates import to_utc_date
from billing.models import Account, CostRecord, Credit, Membership, Rate, Statement, StatementLine, UsageRecord
from controlplane.console import dashboard
from leases.models import Agent, Lease
from tests.support.actors import console_user
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    advance_and_price,
    close_month,
    create_rate,
    create_time_usage,
    create_token_usage,
    derive_lease_id,
    join_account,
)
from tests.support.console import (
    MARKUP,
    WHY,
    assert_constant_queries,
    count_queries,
    fetch,
    get_fields,
    list_messages,
    list_rows,
    row_url,
)
from tests.support.focus import read_focus, sum_column

pytestmark = pytest.mark.django_db
NOW = timezone.now()
TODAY = NOW.astimezone(UTC).date()
MONTH, LAST = get_month(NOW), get_previous_month(NOW)
LATER = TODAY + timedelta(days=3)


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
    advance_and_price(NOW)


def page(client: Client, path: str) -> str:
    return fetch(client, f"/admin/{path}")


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
    create_token_usage(on(MONTH, 1), "0.125", provider="acme")
    create_time_usage(on(MONTH), HOUR, BOB, provider="acme", environment_id="game-2")
    price()
    return team


# --- lists ------------------------------------------------------------------------------------------------------------


PAGES = [
    "spending/", "billing/costrecord/", "billing/costrecord/?slice=all&q=did:plc:a1", "billing/usagerecord/?slice=all",
    "billing/rate/", "billing/rate/?slice=own", "billing/account/", "billing/membership/", "billing/credit/",
    "billing/statement/",
]  # fmt: skip


def test_a_list_costs_as_many_queries_for_many_rows_as_for_few(viewer: Client) -> None:
    create_rate("time", "0.25")

    def create(numbers: range) -> None:
        for number in numbers:
            did = f"did:plc:a{number}"
            account = join_account(f"account-{number}", agent=did).account
            statements.grant_credit(account, Decimal(1), now=NOW, actor="eve", reason="for a start")
            for month in (LAST, MONTH):
                create_time_usage(on(month), HOUR, did, provider="acme")
                create_token_usage(on(month), "0.5", agent=did, provider="acme")
            create_rate("disk", "1", instance_type=f"size-{number}")
        price()
        for account in Account.objects.exclude(name="house"):
            close_month(account, LAST, now=NOW)

    assert_constant_queries(viewer, PAGES, 15, create)


def test_pages_of_one_row_cost_few_queries(viewer: Client, used: Account) -> None:
    cache.set("fleet", dashboard.build_fleet_summary(), 600)
    close_month(used, LAST, now=NOW)
    statements.grant_credit(used, Decimal(1), now=NOW, actor="eve", reason="for a start")
    for model in (CostRecord, UsageRecord, Rate, Account, Membership, Credit, Statement):
        row = model.objects.first()
        assert row
        assert count_queries(viewer, row_url(row)) <= 15


@pytest.mark.postgres("sums: pages aggregate in the database")
def test_sums_and_exports_cover_the_filtered_rows(viewer: Client, used: Account) -> None:
    """This month (4 - 2) h cost 0.50 USD and the call 0.125 USD; last month 8 h cost 2.00 USD."""
    for query, usd, number in (
        ("slice=month", "0.63", 3), ("slice=before", "2.00", 1), ("slice=all", "2.63", 4),
        (f"slice=all&agent_did={BOB}", "0.00", 1),
        (f"slice=all&holder={derive_lease_id(ADA)}", "2.63", 3), ("slice=all&environment_id=game-2", "0.00", 1),
        ("slice=all&provider=acme&item__exact=llm", "0.13", 1), (f"slice=all&account__id__exact={used.pk}", "2.63", 3),
        (f"slice=all&day_from={LAST}&day_to={LAST}", "2.00", 1), ("slice=all&provider=nowhere", "0.00", 0),
        (f"slice=all&q={BOB}", "0.00", 1), (f"slice=all&q={derive_lease_id(ADA)}", "2.63", 3),
        ("slice=all&holder=nonsense", "0.00", 0), ("slice=all&agent_did=%00", "2.63", 4),
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
        "rate": str(Rate.objects.get(provider="acme").pk), "estimated_usd": "0", "unpriced_calls": "0",
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
    shown = fetch(viewer, row_url(row))
    assert row_url(usage) in shown
    assert "512 MiB, 1 CPU for 10 h" in shown


def test_the_cost_of_calls_is_the_sum_of_their_prices(viewer: Client, used: Account) -> None:
    row = CostRecord.objects.get(item="llm")
    assert [(step.label, step.amount) for step in explain_amount(row)] == [("Model calls", "1"), ("USD", "0.125")]
    assert "/admin/sandboxes/llmcall/?" in fetch(viewer, row_url(row))


def test_a_cost_lists_billed_usage_and_a_plan_none(viewer: Client, team: Account) -> None:
    create_rate("plan", "5")
    create_rate("cpu", "0.0012", by_use=True)  # not measured, so allocated usage is charged
    (billed,) = create_time_usage(on(MONTH), HOUR, provider="acme")
    create_time_usage(on(MONTH, 5), HOUR, provider="acme", state="cold")
    price()
    for item in ("time", "cpu"):
        shown = viewer.get(row_url(CostRecord.objects.get(item=item))).context
        assert [row.pk for row, *_ in shown["sources"]] == [billed.pk]
    assert billed in list_rows(viewer, shown["all_sources"])
    assert "a plan is charged once" in fetch(viewer, row_url(CostRecord.objects.get(item="plan")))


def test_a_lease_and_an_agent_show_their_cost_and_link_to_it(viewer: Client, lease: Lease) -> None:
    create_rate("time", "0.25")
    agent, _ = Agent.objects.get_or_create(did=lease.agent_did)
    create_time_usage(on(MONTH), 3 * HOUR, lease.agent_did, provider="acme", holder=lease.pk)
    create_time_usage(on(MONTH), HOUR, lease.agent_did, provider="acme", holder=uuid.uuid4())
    price()
    for row, usd, query in (
        (lease, "0.75 USD", f"slice=all&holder={lease.pk}"),
        (agent, "1.00 USD", f"slice=all&agent_did={agent.did.replace(':', '%3A')}"),
    ):
        shown = fetch(viewer, row_url(row))
        assert usd in shown
        assert f"/admin/billing/costrecord/?{query.replace('&', '&amp;')}" in shown
        assert f"{usd}</strong>" in page(viewer, f"billing/costrecord/?{query}")


def test_pages_name_estimated_and_unpriced_calls(viewer: Client, team: Account) -> None:
    create_token_usage(on(LAST), "1", provider="acme")
    price()
    paths = ["billing/costrecord/?slice=all", "billing/usagerecord/?slice=all", "spending/", "", row_url(team)]
    assert not [path for path in paths if "without a price" in fetch(viewer, urljoin("/admin/", path))]
    create_token_usage(on(TODAY), "3", 9, unpriced=5, estimated=1, estimated_usd="0.125", provider="acme")
    price()
    cache.clear()
    row = CostRecord.objects.get(day=TODAY)
    for path in (*paths, row_url(row)):
        assert "0.13 USD estimated, 5 calls without a price" in fetch(viewer, urljoin("/admin/", path)), path
    assert [(step.label, step.amount, step.note) for step in explain_amount(row)][1:] == [
        ("Without a price", "5", "not included in the sum"), ("USD", "3", "sum over all calls, 0.125 of it estimated"),
    ]  # fmt: skip
    exported = [*csv.DictReader(io.StringIO(page(viewer, f"billing/costrecord/export/csv/?slice=all&day_from={TODAY}")))]
    assert [(each["estimated_usd"], each["unpriced_calls"]) for each in exported] == [("0.125", "5")]


# --- spending ---------------------------------------------------------------------------------------------------------


@pytest.mark.postgres("sums: pages aggregate in the database")
def test_spending_adds_up_by_day_and_provider_with_model_calls_apart(team: Account) -> None:
    create_rate("plan", "5")
    for days, hours in ((0, 1), (1, 10), (29, 6), (30, 50)):
        create_time_usage(on(TODAY - timedelta(days=days)), hours * HOUR, "did:plc:x", provider="acme", state="waiting")
    calls = {"model": "claude-opus-4-5", "input_tokens": 1200}
    create_token_usage(on(TODAY) - 20 * HOUR, "3", agent="did:plc:y", provider="acme", **calls)
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
    (model,) = only.models or []
    assert (model.model, model.usd, model.calls, model.tokens.input) == ("claude-opus-4-5", 3, 1, 1200)


def test_spending_shows_the_tokens_of_each_model(viewer: Client) -> None:
    tokens = {"input_tokens": 1234, "cached_tokens": 777, "output_tokens": 55}
    create_token_usage(on(TODAY), "3", model="claude-opus-4-5", **tokens)
    price()
    shown = page(viewer, "spending/")
    for text in ("Model calls by model", "claude-opus-4-5", "anthropic", "1,234", "777", "55"):
        assert text in shown


@pytest.mark.parametrize(
    ("most", "top"), [("0", "1"), ("1", "1"), ("1.01", "2"), ("4", "5"), ("5.5", "10"), ("0.03", "0.05"), ("70", "100")]
)
def test_an_axis_ends_at_a_round_number(most: str, top: str) -> None:
    assert overview.round_up_axis(Decimal(most)) == Decimal(top)


def test_billing_pages_accept_any_query_string(viewer: Client, used: Account) -> None:
    shown = page(viewer, f"spending/?account=team&agent={ADA}")
    assert "<option selected>team</option>" in shown
    assert f"account__id__exact={used.pk}&amp;agent_did=did%3Aplc%3Aada" in shown
    for path in (
        "spending/?account=nobody", "spending/?agent=%00", "spending/?agent=a%00b", f"spending/?account={'a' * 999}",
        f"spending/?agent={'b' * 999}", "billing/membership/?agent_did=%00", "billing/budget/?scope__exact=%00",
        *(f"billing/costrecord/?{name}=%00" for name in ("item__exact", "provider__exact", "item", "agent_did", "slice", "q")),
        "billing/costrecord/export/csv/?item__exact=%00",
    ):  # fmt: skip
        answer = viewer.get(f"/admin/{path}")
        assert b"".join(answer) is not None and answer.status_code in (200, 302), path


def test_a_fresh_installation_explains_the_empty_pages(viewer: Client) -> None:
    assert "No costs in the last 30 days" in page(viewer, "spending/")
    assert "metered and priced every minute" in page(viewer, "billing/costrecord/?slice=all")
    assert "No statements yet" in page(viewer, "billing/statement/")


def test_text_from_agents_is_escaped_on_billing_pages(superuser: Client, team: Account) -> None:
    create_time_usage(on(MONTH), 9 * HOUR, MARKUP, provider="acme", environment_id=MARKUP)
    create_token_usage(on(MONTH), "1", agent=MARKUP, environment_id=MARKUP, provider=MARKUP[:32])
    Membership.objects.create(agent_did=MARKUP, account=team)
    price()
    create_time_usage(on(LAST), 9 * HOUR, MARKUP, provider="acme")
    price()
    statement, _ = statements.close_month(team, LAST, now=NOW, actor=console_user(MARKUP))
    credit = statements.grant_credit(team, Decimal(1), now=NOW, actor=MARKUP, reason=MARKUP)
    member = Membership.objects.get(agent_did=MARKUP)
    rows = [*CostRecord.objects.all(), *UsageRecord.objects.all(), team, statement, credit, member]
    for path in [*PAGES, f"spending/?agent={MARKUP}", *map(row_url, rows)]:
        assert "<img src=x" not in fetch(superuser, urljoin("/admin/", path)), path


# --- rates ------------------------------------------------------------------------------------------------------------


def sent(**more: str) -> dict[str, str]:
    known = {"provider": "docker", "item": "time", "instance_type": "", "usd": "0.30", "allowance": "0", "source": ""}
    return {**known, "valid_from_0": str(LATER), "valid_from_1": "00:00:00", **more}


def test_an_administrator_adds_a_rate_that_begins_later(administrator: Client) -> None:
    assert 'value="acme"' in page(administrator, "billing/rate/add/?provider=acme&item=time")
    refused = administrator.post("/admin/billing/rate/add/", sent(valid_from_0=str(TODAY - timedelta(days=1))))
    assert "cannot begin in the past" in refused.content.decode()
    assert administrator.post("/admin/billing/rate/add/", sent()).status_code == 302
    added = Rate.objects.get(provider="docker", valid_from=on(LATER))
    assert (added.usd, added.valid_from) == (Decimal("0.30"), on(LATER))
    assert administrator.post(row_url(added), sent(usd="0.31")).status_code == 302
    added.refresh_from_db()
    assert added.usd == Decimal("0.31")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"provider": "dcoker"}, "Did you mean docker?"),
        ({"provider": "cloudflare", "instance_type": "baisc"}, "Did you mean basic?"),
        ({"instance_type": "basic"}, "docker sells no instance types"),
    ],
)
def test_a_rate_that_would_price_nothing_is_refused(administrator: Client, wrong: dict[str, str], message: str) -> None:
    before = Rate.objects.count()
    answer = administrator.post("/admin/billing/rate/add/", sent(**wrong))
    assert message in answer.content.decode() and Rate.objects.count() == before


def test_an_administrator_deletes_a_rate_that_has_not_begun(administrator: Client) -> None:
    later, other = (create_rate("time", "0.25", since=f"{LATER}", provider=name) for name in ("acme", "other"))
    withdraw = row_url(later, "withdraw")
    assert administrator.post(withdraw).status_code == 200 and Rate.objects.filter(pk=later.pk).exists()
    answer = administrator.post(withdraw, WHY)
    assert (list_messages(answer), answer["HX-Redirect"]) == (["1 rate deleted."], "/admin/billing/rate/")
    assert not Rate.objects.filter(pk=later.pk).exists() and Rate.objects.filter(pk=other.pk).exists()
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.get_change_message()) == (str(later.pk), "Delete rate: it was agreed")
    assert administrator.post(withdraw, WHY).status_code == 404


def test_a_rate_in_force_or_with_costs_is_not_deleted(administrator: Client, team: Account) -> None:
    begun, priced = Rate.objects.get(provider="acme"), create_rate("time", "0.25", since=f"{LATER}", provider="next")
    create_time_usage(on(LATER), HOUR, provider="next")  # by a clock that is ahead
    costs.price_usage(now=on(LATER, 2))
    assert row_url(begun, "withdraw") not in fetch(administrator, row_url(begun))
    for rate in (begun, priced):
        answer = administrator.post(row_url(rate, "withdraw"), WHY)
        assert list_messages(answer)[-1] == "Nothing changed: already in force; its costs depend on it."
        assert answer["HX-Redirect"] == row_url(rate)
        assert Rate.objects.filter(pk=rate.pk).exists() and not LogEntry.objects.exists()


def test_rates_are_not_deleted_in_bulk(superuser: Client) -> None:
    later, listing = create_rate("time", "0.25", since=f"{LATER}"), "/admin/billing/rate/?slice=later"
    superuser.post(listing, {"action": "delete_selected", "_selected_action": [str(later.pk)], "post": "yes"})
    assert "delete_selected" not in fetch(superuser, listing)
    assert Rate.objects.filter(pk=later.pk).exists()


def test_missing_prices_are_listed_until_they_are_set(viewer: Client) -> None:
    def listed(part: str) -> list[Decimal]:
        rows = list_rows(viewer, f"/admin/billing/rate/?slice={part}")
        return [row.usd for row in rows if (row.provider, row.item) == ("langsmith", "suspend")]

    assert listed("own")
    create_rate("suspend", "0.1", provider="langsmith", since="2021-01-01")
    assert (listed("own"), listed("other")) == ([], [Decimal("0.1")])


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_an_administrator_adds_an_account_and_moves_an_agent(administrator: Client, used: Account) -> None:
    assert administrator.post("/admin/billing/account/add/", {"name": "lab", "title": ""}).status_code == 302
    lab, member = Account.objects.get(name="lab"), Membership.objects.get(agent_did=ADA)
    shown = administrator.get(f"/admin/billing/membership/add/?agent_did={ADA}").context["adminform"].form
    assert shown.initial["agent_did"] == ADA
    move = {"agent_did": ADA, "account": lab.pk, "since": str(MONTH)}
    assert administrator.post("/admin/billing/membership/add/", move).status_code == 302
    assert (Membership.objects.latest("pk").account, Membership.objects.latest("pk").since) == (lab, MONTH)
    path = row_url(member)
    assert "This field is required" in administrator.post(path, {"account": lab.pk}).content.decode()
    assert administrator.post(path, {"account": lab.pk, "since": "1970-01-01"}).status_code == 302
    member.refresh_from_db()
    assert (member.account, member.since) == (lab, date(1970, 1, 1))
    assert administrator.post(row_url(lab), {"name": "x", "title": "Lab"}).status_code == 302
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
    tabs = {"now": [left], "later": [back], "before": [first], "all": [back, left, first]}
    assert {part: list_rows(viewer, f"/admin/billing/membership/?slice={part}") for part in tabs} == tabs
    shown = viewer.get(row_url(first)).context
    facts = {fact.label: (fact.value, fact.note) for fact in shown["facts"]}
    assert (facts["From"], facts["To"]) == (("the beginning", ""), (until, "then house"))
    assert [(row.pk, words) for row, words, _ in shown["history"]] == [
        (back.pk, f"since {LATER}"), (left.pk, f"from {MONTH} to {LATER - timedelta(days=1)}, then team"),
        (first.pk, f"from the beginning to {until}, then house"),
    ]  # fmt: skip
    members = viewer.get(row_url(team)).context["members"]
    assert [(row.pk, words) for row, words in members] == [(back.pk, f"since {LATER}")]
    agent = Agent.objects.create(did=ADA)
    assert f"/admin/billing/membership/{left.pk}/" in get_fields(viewer, row_url(agent))["Account"].value


def test_a_month_closed_while_a_form_is_saved_refuses_the_change(
    administrator: Client, used: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Membership.save

    def late(self: Membership, **options: Any) -> None:
        amounts = {"subtotal": 0, "credit_used": 0, "total": 0}
        Statement.objects.create(account=used, month=MONTH, closed_at=NOW, closed_by="eve", **amounts)
        save(self, **options)

    monkeypatch.setattr(Membership, "save", late)
    lab, path = Account.objects.create(name="lab"), "/admin/billing/membership/add/"
    answer = administrator.post(path, {"agent_did": ADA, "account": lab.pk, "since": str(TODAY)})
    assert (answer.status_code, answer["Location"]) == (302, path)
    assert list_messages(answer)[0].startswith(f"Nothing was saved: {used} has closed {MONTH:%Y-%m}")
    assert Membership.objects.count() == 1


def test_a_membership_that_began_in_a_closed_month_is_read_only(administrator: Client, used: Account) -> None:
    close_month(used, LAST, now=NOW)
    member, lab = Membership.objects.get(), Account.objects.create(name="lab")
    path = row_url(member)
    assert 'name="since"' not in page(administrator, path.removeprefix("/admin/"))
    assert administrator.post(path, {"account": lab.pk, "since": str(MONTH)}).status_code == 403
    early = {"agent_did": ADA, "account": lab.pk, "since": str(LAST)}
    refused = administrator.post("/admin/billing/membership/add/", early)
    assert f"team has closed {LAST:%Y-%m}" in refused.content.decode()
    assert f"can change from {MONTH} on" in refused.content.decode()
    assert administrator.post("/admin/billing/membership/add/", {**early, "since": ""}).status_code == 302
    moved = Membership.objects.latest("pk")
    assert (moved.account, moved.since) == (lab, TODAY)
    again = administrator.post(row_url(moved), {"account": lab.pk, "since": str(LATER)})
    assert again.status_code == 302
    moved.refresh_from_db()
    assert moved.since == LATER


def test_credit_is_granted_and_taken_back_with_a_reason(administrator: Client, team: Account) -> None:
    path = row_url(team, "grant_credit")
    assert "HX-Redirect" not in administrator.post(path, {**WHY, "usd": "0"}).headers
    assert not Credit.objects.exists()
    assert list_messages(administrator.post(path, {**WHY, "usd": "5.50"})) == ["1 account credited."]
    credit = Credit.objects.get()
    assert (credit.usd, credit.actor, credit.reason) == (Decimal("5.50"), "administrator", "it was agreed")
    assert "5.50 USD" in fetch(administrator, row_url(team))
    back = row_url(credit, "take_back")
    assert list_messages(administrator.post(back, WHY)) == ["1 credit reversed."]
    assert list_messages(administrator.post(back, WHY)) == ["1 credit reversed.", "Nothing changed: no unused part remains."]
    assert (statements.get_balance(team), Credit.objects.count()) == (0, 2)
    assert "Reverse credit" not in fetch(administrator, row_url(credit))


def test_months_are_closed_in_order_on_the_accounts_page(administrator: Client, used: Account) -> None:
    path, before = row_url(used, "close_month"), (LAST - timedelta(days=1)).replace(day=1)

    def close(month: date) -> Any:
        return administrator.post(path, {**WHY, "month": str(month)})

    create_time_usage(on(before), 3 * HOUR, provider="acme")
    price()
    for month, later in ((before, LAST), (LAST, MONTH)):
        asked = fetch(administrator, path)
        assert f'<option value="{month}">' in asked
        assert str(later) not in asked
        assert "HX-Redirect" not in close(later).headers
        create_time_usage(on(month, 5), HOUR, BOB, provider="acme")
        assert "is not priced yet" in close(month).content.decode()
        assert not Statement.objects.filter(month__gte=month).exists()
        price()
        assert list_messages(close(month))[-1] == "1 account issued the statement."
    made = Statement.objects.get(month=LAST)
    assert (made.closed_by, made.total) == ("administrator", 2)
    assert LogEntry.objects.filter(object_id=str(used.pk))[0].get_change_message() == "Close month: it was agreed"
    assert "Amount due, USD" in fetch(administrator, row_url(made))
    assert "Close month" not in fetch(administrator, row_url(used))


def test_a_closed_month_names_estimated_and_unpriced_calls(administrator: Client, team: Account) -> None:
    create_token_usage(on(LAST), "3", 9, unpriced=5, estimated=1, estimated_usd="0.125", provider="acme")
    price()
    note = "0.13 USD estimated, 5 calls without a price"
    answer = administrator.post(row_url(team, "close_month"), {**WHY, "month": str(LAST)})
    assert list_messages(answer)[-1] == f"Model calls of {LAST:%Y-%m}: {note}."
    shown = fetch(administrator, row_url(Statement.objects.get()))
    assert f"Model calls of this month: {note}." in shown
    assert shown.count(note) == 3, "in the message of the button, in its line and below the sum"
    assert note in page(administrator, "billing/statement/")


def test_a_statement_shows_the_corrected_month(viewer: Client, used: Account) -> None:
    before = (LAST - timedelta(days=1)).replace(day=1)
    create_time_usage(on(before), 3 * HOUR, provider="acme")
    price()
    close_month(used, before, now=NOW)
    create_time_usage(on(before, 9), 3 * HOUR, provider="acme")
    price()
    made = close_month(used, LAST, now=NOW)
    shown = viewer.get(row_url(made)).context
    assert [(line["month"], line["usd"]) for line in shown["corrections"]] == [(f"{before:%Y-%m}", "0.75")]
    assert [(line["quantity"], line["usd"]) for line in shown["usage"]] == [("10", "2.00")]


def test_a_statement_shows_the_tokens_of_each_model(viewer: Client, used: Account) -> None:
    tokens = {"input_tokens": 1200, "cached_tokens": 800, "output_tokens": 40}
    create_token_usage(on(LAST), "3", provider="acme", model="claude-opus-4-5", **tokens)
    price()
    shown = viewer.get(row_url(close_month(used, LAST, now=NOW)))
    notes = {line["item"]: line["note"] for line in shown.context["usage"] if line["model"]}
    assert notes == {"claude-opus-4-5": "1,200 in (800 cached), 40 out"}
    assert "1,200 in (800 cached), 40 out" in shown.content.decode()


def test_an_open_month_is_exported_as_preliminary(viewer: Client, used: Account) -> None:
    shown = viewer.get(row_url(used))
    name, url = shown.context["previews"][-1]
    file = viewer.get(url)
    assert file["Content-Disposition"] == f'attachment; filename="{used.name}-{name}-preliminary.csv"'
    rows = [*csv.DictReader(io.StringIO(file.content.decode()))]
    assert rows and {row["status"] for row in rows} == {"preliminary"}


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
        administrator.post(row_url(team, "grant_credit"), {**WHY, "usd": "9999999999999.99"})
    assert statements.get_balances() == {team.pk: Decimal("19999999999999.98")}
    assert "19,999,999,999,999.98" in page(administrator, "billing/account/")


def test_each_rate_of_a_day_lists_the_usage_it_priced(viewer: Client, team: Account) -> None:
    create_rate("time", "1", since=f"{LAST - timedelta(days=60)}", provider="cut")
    create_rate("time", "2", since=f"{LAST}T12:00", provider="cut")
    (before,) = create_time_usage(on(LAST, 1), HOUR, provider="cut")
    (after,) = create_time_usage(on(LAST, 20), 2 * HOUR, provider="cut")
    price()

    def shown() -> list[tuple[int, list[int], bool]]:
        rows = CostRecord.objects.filter(provider="cut").order_by("rate__valid_from")
        found = [viewer.get(row_url(row)).context for row in rows]
        sources = [[each.pk for each, *_ in one["sources"]] for one in found]
        return [(row.quantity, pks, one["split_by_rate"]) for row, pks, one in zip(rows, sources, found, strict=True)]

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
    made = close_month(used, LAST, now=NOW)
    line = {"kind": "usage", "for_month": LAST, "provider": "acme", "item": "time", "quantity": "1234567.5", "usd": "0.25"}
    for number in range(3):
        StatementLine.objects.create(statement=made, agent_did=f"did:plc:b{number}", **line)
    number = made.lines.count()
    shown = viewer.get(row_url(made))
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


def test_a_statement_is_downloaded_in_the_focus_format(viewer: Client, used: Account) -> None:
    made = close_month(used, LAST, now=NOW)
    shown = viewer.get(row_url(made))
    for link, name in (("focus_file", "focus"), ("focus_daily_file", "focus-daily")):
        url = shown.context[link]
        assert f'href="{url}"' in shown.content.decode()
        file = viewer.get(url)
        assert file["Content-Disposition"] == f'attachment; filename="{used.name}-{LAST:%Y-%m}-{name}.csv"'
        rows = read_focus(b"".join(file.streaming_content).decode())  # type: ignore[attr-defined]
        assert rows and sum_column(rows) == made.total
        assert viewer.get(url.replace(f"/{made.pk}/", f"/{made.pk + 1}/")).status_code == 404
        assert Client().get(url).status_code == 302
