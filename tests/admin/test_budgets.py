"""Budgets in the console: amounts, open leases, notices and notifications."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, Permission
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from billing import budgets, dates, metering
from billing.admin.budget_notices import MAX_NOTICES, build_all_notices
from billing.admin.budgets import MAX_PANEL_ROWS, BudgetAdmin
from billing.admin.overshoot import describe_overshoot
from billing.models import Account, Budget
from leases import api_keys, budget_enforcement, execution, leasing
from leases.models import Agent, Lease
from sandboxes.audit import COMMAND_LINE, Actor, ActorKind
from sandboxes.models import Event, OperatorAction
from sandboxes.runs.operations import Command
from tests.admin.conftest import ADA
from tests.conftest import MINUTE
from tests.support.actors import console_user
from tests.support.billing import create_budget, create_llm_call, create_time_usage
from tests.support.console import (
    WHY,
    assert_constant_queries,
    count_queries,
    fetch,
    get_fields,
    list_messages,
    list_rows,
    read_form,
    row_url,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stopped_clock")]
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
LIST = "/admin/billing/budget/"
BUDGET_FORM = {
    "scope": "agent", "subject": ADA, "amount": "2.5", "unit": "usd", "period": "month", "hard": "on",
    "warn_percents": "50, 80", "time_zone": "UTC", "grace": "5m",
}  # fmt: skip


def budget(amount: Any = 10, **fields: Any) -> Budget:
    return create_budget(amount, period=fields.pop("period", "ever"), now=timezone.now(), **fields)


@pytest.fixture
def spend(grant: Callable[..., Lease]) -> Callable[..., Lease]:
    """Create a lease with a waiting sandbox that has used a number of hours."""

    def make(hours: float = 1, agent: str = ADA, environment: str = "game-1", **ask: Any) -> Lease:
        now = timezone.now()
        began = now - hours * HOUR
        lease = grant(agent, environment, now=began, ttl=20 * HOUR, sleep_after=20 * HOUR, **ask)
        execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=began)
        metering.meter_usage(now=now)
        return lease

    return make


# --- forms ------------------------------------------------------------------------------------------------------------


def test_a_budget_is_added_and_changed_with_its_spending(administrator: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    form = BUDGET_FORM | {"unit": "hours", "period": "ever", "warn_percents": "60"}
    assert administrator.post(f"{LIST}add/", form | {"grace": "0"}).status_code == 302
    made = Budget.objects.get()
    assert (made.scope, made.subject, made.amount, made.hard, made.grace) == ("agent", ADA, Decimal("2.5"), True, timedelta(0))
    assert made.warned_for and round(made.spent, 1) == 2
    shown = administrator.get(row_url(made)).context["adminform"].form["grace"].value()
    assert administrator.post(row_url(made), form | {"amount": "40", "grace": shown}).status_code == 302
    changed = Budget.objects.get()
    assert (changed.amount, changed.grace, changed.warned_for) == (40, timedelta(0), None)
    assert (changed.active, changed.created_at) == (True, made.created_at)


@pytest.mark.parametrize("first", ["form", "request"])
def test_a_form_and_a_request_that_change_different_fields_are_both_kept(first: str, administrator: Client) -> None:
    """The request is carried out while the form is open, or after it was saved."""
    made = budget(10, warn_percents=[50, 80])
    form = read_form(administrator, row_url(made)) | {"grace": "30s"}
    changes = {"amount": Decimal(20), "warn_percents": [90], "hard": False}
    if first == "request":
        budgets.change_budget(made.pk, changes, now=timezone.now())
    assert administrator.post(row_url(made), form).status_code == 302
    if first == "form":
        budgets.change_budget(made.pk, changes, now=timezone.now())
    made.refresh_from_db()
    assert (made.amount, made.warn_percents, made.hard, made.grace) == (20, [90], False, timedelta(seconds=30))
    assert LogEntry.objects.get().get_change_message() == "Changed Grace period."


def test_an_invalid_budget_is_refused(administrator: Client) -> None:
    for wrong in (
        {"amount": "0"}, {"amount": ""}, {"warn_percents": "101"}, {"scope": "all"}, {"subject": ""}, {"subject": "ada"},
        {"scope": "environment_type", "subject": "no-such"}, {"scope": "key", "subject": "17"},
        {"scope": "key", "subject": "9" * 30}, {"scope": "account", "subject": "nobody"}, {"grace": "soon"},
    ):  # fmt: skip
        answer = administrator.post(f"{LIST}add/", {**BUDGET_FORM, **wrong})
        assert answer.status_code == 200 and answer.context["adminform"].form.errors, wrong
    assert not Budget.objects.exists()


def test_a_key_budget_accepts_the_prefix_shown_in_lists(administrator: Client) -> None:
    key, _ = api_keys.issue_key([ADA], name="ci", now=timezone.now())
    for subject in (f"lh_{key.prefix}_…", key.prefix, str(key.pk)):
        assert administrator.post(f"{LIST}add/", {**BUDGET_FORM, "scope": "key", "subject": subject}).status_code == 302
    assert {each.subject for each in Budget.objects.all()} == {str(key.pk)}
    assert f'href="/admin/leases/agentkey/{key.pk}/change/">ci</a>' in administrator.get(LIST).content.decode()


def test_an_unknown_subject_is_refused_with_the_nearest_name(administrator: Client) -> None:
    for scope, subject, nearest in (
        ("environment_type", "catann", "catan"),
        ("account", "huose", "house"),
        ("project", "defalt", "default"),
    ):
        answer = administrator.post(f"{LIST}add/", {**BUDGET_FORM, "scope": scope, "subject": subject})
        assert f"Did you mean {nearest}?" in answer.content.decode() and not Budget.objects.exists()


def test_a_budget_for_an_agent_that_has_not_joined_is_saved_with_a_warning(administrator: Client) -> None:
    api_keys.issue_key(["did:plc:adalovelace"], now=timezone.now())
    answer = administrator.post(f"{LIST}add/", {**BUDGET_FORM, "subject": "did:plc:adalovelcae"}, follow=True)
    assert "Did you mean did:plc:adalovelace?" in answer.content.decode() and Budget.objects.count() == 1


def test_a_budget_is_turned_off_and_on_again(administrator: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    made = budget(1)
    for act, active in (("turn_off", False), ("turn_off", False), ("turn_on", True)):
        Budget.objects.filter(pk=made.pk, active=False).update(spent=0)
        assert administrator.post(row_url(made, act), WHY).status_code == 200
        made.refresh_from_db()
        assert made.active is active
    assert made.spent >= 2
    assert len(administrator.get(row_url(made)).context["audit"]) == 2


def top_up_fields(client: Client, row: Budget, **fields: str) -> dict[str, str]:
    return read_form(client, row_url(row, "top_up")) | {"reason": "release day"} | fields


def test_a_budget_is_topped_up_once_for_a_dialog(administrator: Client) -> None:
    made = budget(10, unit="usd", period="month")
    dialog = administrator.get(row_url(made, "top_up")).content.decode()
    assert "Amount (USD)" in dialog and "The period has 10 USD. It ends at" in dialog
    form = top_up_fields(administrator, made, amount="2.5")
    assert list_messages(administrator.post(row_url(made, "top_up"), form)) == ["1 budget topped up."]
    again = administrator.post(row_url(made, "top_up"), form | {"amount": "3"})
    assert "its amount was added once" in list_messages(again)[-1]
    (row,) = made.top_ups.all()
    assert (row.amount, row.note, row.actor) == (Decimal("2.5"), "release day", "administrator")
    (entry,) = administrator.get(row_url(made)).context["audit"]
    assert (entry.action, entry.reason, entry.actor) == ("Top up budget", "release day", "administrator")
    assert administrator.post(row_url(made, "top_up"), top_up_fields(administrator, made, amount="1")).status_code == 200
    assert made.top_ups.count() == 2


def test_a_top_up_that_is_refused_names_its_field(administrator: Client, operator: Client, viewer: Client) -> None:
    made = budget(10)
    budgets.top_up(made.pk, Decimal(900_000_000_000), actor=console_user(), now=timezone.now())
    for fields, field in (({"amount": "0"}, "amount"), ({"amount": "200000000000"}, "amount"), ({"reason": ""}, "reason")):
        form = top_up_fields(administrator, made, **{"amount": "1"} | fields)
        answer = administrator.post(row_url(made, "top_up"), form)
        assert [*answer.context["form"].errors] == [field]
    for other in (operator, viewer):
        other.post(row_url(made, "top_up"), form | {"reason": "release day"})
    assert made.top_ups.count() == 1 and not OperatorAction.objects.exists() and not LogEntry.objects.exists()


def test_changes_by_keys_and_commands_are_listed_with_those_of_the_console(administrator: Client, viewer: Client) -> None:
    now = timezone.now()
    made = create_budget(10, period="ever", now=now)
    for number, changes in enumerate(
        ({"amount": Decimal(20), "hard": True}, {"grace": HOUR, "warn_percents": [90]}, {"active": True})
    ):
        budgets.change_budget(made.pk, changes, actor=Actor("key <b>", ActorKind.KEY), now=now + number * MINUTE)
    assert administrator.post(row_url(made, "turn_off"), WHY).status_code == 200
    page = viewer.get(row_url(made))
    assert [(each.action, each.reason, each.actor) for each in page.context["audit"]] == [
        ("Change budget", "grace 300s → 3600s, warn_percents [50, 80, 100] → [90]", "key <b>"),
        ("Deactivate budget", "it was agreed", "administrator"),
        ("Change budget", "amount 10 → 20", "key <b>"),
    ]
    assert "key &lt;b&gt;" in page.content.decode()
    budgets.remove_budget(made.pk, actor=COMMAND_LINE, now=now + HOUR)
    newest = list_rows(viewer, "/admin/sandboxes/operatoraction/")[0]
    assert (newest.action, newest.object_text, newest.actor) == (
        "Delete budget",
        "20 hours (lifetime) for everything",
        "command line",
    )
    assert get_fields(viewer, row_url(newest))["Budget"].value == "20 hours (lifetime) for everything (deleted)"


# --- the list and the page --------------------------------------------------------------------------------------------


def test_each_tab_lists_its_own_rows(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    made = {"within": budget(10), "warned": budget("2.3"), "exhausted": budget(1), "soft": budget(1, hard=False)}
    made["off"] = budget(1, active=False)
    names = {each.pk: name for name, each in made.items()}
    found = {name: {names[row.pk] for row in list_rows(viewer, f"{LIST}?slice={name}")} for name in BudgetAdmin.list_tabs}
    assert found == {"all": {*made}, "warned": {"warned"}, "exhausted": {"exhausted", "soft"}, "off": {"off"}}
    shown = fetch(viewer, LIST)
    for level in ("within", "warned", "exhausted", "off"):
        assert f'<meter class="lh-meter is-{level}"' in shown
    assert 'style="--warn: 50%"' in shown


def test_spending_of_a_past_period_is_not_shown(viewer: Client) -> None:
    made = budget(1, period="day")
    long_ago = timezone.now() - timedelta(days=2)
    began = budgets.compute_period_bounds("day", long_ago)[0]
    marks = {"warned_for": began, "exhausted_for": began, "exhausted_at": long_ago}
    Budget.objects.filter(pk=made.pk).update(spent=1, period_began=began, **marks)
    assert "0 of 1 hours, 0 %" in fetch(viewer, LIST)
    assert not list_rows(viewer, f"{LIST}?slice=exhausted")
    assert not viewer.get("/admin/").context["notices"]


def test_a_list_costs_as_many_queries_for_many_budgets_as_for_few(viewer: Client) -> None:
    def create(numbers: range) -> None:
        for number in numbers:
            key, _ = api_keys.issue_key([ADA], now=timezone.now())
            agent = Agent.objects.create(did=f"did:plc:a{number}").did
            account = Account.objects.create(name=f"team-{number}").name
            for scope, subject in (
                ("key", str(key.pk)), ("agent", agent), ("environment_type", "catan"), ("account", account),
                ("project", "default"),
            ):  # fmt: skip
                budget(scope=scope, subject=subject)

    assert_constant_queries(viewer, ["billing/budget/"], 11, create)
    assert "/admin/billing/account/" in fetch(viewer, LIST)


def test_the_page_lists_top_spenders_with_a_constant_number_of_queries(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend(2, "did:plc:most")
    spend(1, ADA)
    gone = spend(3, "did:plc:gone")
    leasing.release(gone.pk, now=timezone.now())
    made = budget(100)
    shown = viewer.get(row_url(made))
    spenders = [(tab.agent_did, amount) for _, tab, _, amount in shown.context["spenders"]]
    assert spenders == [("did:plc:most", "2"), (ADA, "1")]
    free = viewer.get(row_url(budget(5, unit="usd"))).context["spenders"]
    assert {(tab.agent_did, amount) for _, tab, _, amount in free} == {("did:plc:most", "0"), (ADA, "0")}
    assert f'href="/admin/leases/lease/{shown.context["spenders"][0][1].holder}/change/"' in shown.content.decode()
    few = count_queries(viewer, row_url(made))
    for number in range(MAX_PANEL_ROWS + 2):
        spend(number / 100, f"did:plc:a{number}")
    budgets.update_spending(made.pk, now=timezone.now())
    shown = viewer.get(row_url(made))
    assert len(shown.context["spenders"]) == MAX_PANEL_ROWS and f"of {MAX_PANEL_ROWS + 4}" in shown.content.decode()
    assert count_queries(viewer, row_url(made)) < few <= 18  # only one spender exists


def test_the_page_lists_only_notifications_of_its_own_budget(viewer: Client, spend: Callable[..., Lease]) -> None:
    made, others = budget(1), [budget(1) for _ in range(10)]
    spend(2)
    for each in (made, *others):
        budgets.update_spending(each.pk, now=timezone.now())
    notices = viewer.get(row_url(made)).context["notifications"]
    assert [each.kind for each in notices] == ["budget.exhausted", "budget.warning"]
    assert Event.objects.filter(kind__startswith="budget.").count() == 22
    assert notices[0].spent.endswith(" of 1 hours")
    assert viewer.get(notices[0].href).status_code == 200


def test_the_page_of_a_budget_for_a_model_shows_its_top_ups(viewer: Client) -> None:
    made = budget(10, unit="usd", period="week", model="claude-opus*", time_zone="Asia/Kolkata", warn_percents=[])
    budgets.top_up(made.pk, Decimal(5), note="release <day>", actor=console_user(), now=timezone.now())
    facts = get_fields(viewer, row_url(made))
    assert (facts["Left"].value, facts["Left"].note) == ("15 USD", "of 15, 5 of it topped up")
    assert facts["Period"].value == "Week, Asia/Kolkata" and facts["Warnings"].value == "none"
    assert (
        facts["On exhaustion"].value == "model calls are refused" and facts["Applies to"].note == "model calls of claude-opus*"
    )
    assert "release &lt;day&gt;" in fetch(viewer, row_url(made)) and "model claude-opus*" in fetch(viewer, LIST)


def test_the_page_of_a_budget_in_tokens_shows_whole_numbers(viewer: Client) -> None:
    made = budget(5_000_000, unit="tokens", period="week")
    budgets.top_up(made.pk, Decimal(1_000_000), actor=console_user(), now=timezone.now())
    facts = get_fields(viewer, row_url(made))
    assert (facts["Left"].value, facts["Left"].note) == ("6,000,000 tokens", "of 6,000,000, 1,000,000 of it topped up")
    assert facts["Spent"].value == "0 of 6,000,000 tokens" and facts["Applies to"].note == "model calls of all models"
    assert facts["Warnings"].note == "3,000,000, 4,800,000, 6,000,000 tokens"
    assert facts["On exhaustion"].value == "model calls are refused" and not facts["Open leases"].note
    assert "5,000,000 tokens" in fetch(viewer, LIST)
    assert "reserves its estimated tokens" in " ".join(describe_overshoot(made, 1, timezone.now()))
    Budget.objects.update(estimated_tokens=1200)
    assert ", 1,200 tokens estimated" in fetch(viewer, row_url(made))


def test_the_overshoot_is_explained_with_the_budgets_numbers() -> None:
    now = timezone.now()
    hours = " ".join(describe_overshoot(budget(10), 12, now))
    assert "12 leases are open" in hours and "reserved for 7 m ahead" in hours and "up to 600 open leases" in hours
    usd = " ".join(describe_overshoot(budget(10, unit="usd", grace=HOUR), 1, now))
    assert "reserved for 1 h 2 m ahead" in usd and "Model calls are reserved at their estimated price" in usd
    assert "no bound" in " ".join(describe_overshoot(budget(10, hard=False), 12, now))
    assert "The budget is inactive" in " ".join(describe_overshoot(budget(10, active=False), 12, now))


def test_the_page_forecasts_the_day_a_budget_runs_out(viewer: Client) -> None:
    today = dates.to_utc_date(timezone.now())
    create_time_usage(dates.start_of_day(today - DAY), 10 * HOUR)

    def forecast_field(amount: Any, **fields: Any) -> tuple[str, str, str]:
        facts = get_fields(viewer, row_url(budget(amount, **fields)))
        fact = facts.get("Runs out") or facts["Ran out"]
        return fact.label, fact.value, fact.note

    pace = "at the average of the last 7 days"
    assert forecast_field(100) == ("Runs out", f"on {today + 8 * DAY}", pace)
    assert forecast_field(5, period="day") == ("Runs out", f"on {today}", pace)
    assert forecast_field(100, period="day") == forecast_field(9999, period="month") == ("Runs out", "not in this period", pace)
    assert get_fields(viewer, row_url(budget(100, period="day")))["Expected"].value == "10 hours at the end of the period"
    unknown = "needs one full day of usage"
    assert forecast_field(100, scope="agent", subject="did:plc:idle") == ("Runs out", "no forecast yet", unknown)
    assert forecast_field(5) == ("Ran out", f"on {today}", "day of detection")
    assert forecast_field(100, active=False) == ("Runs out", "–", "the budget is inactive")


def test_an_hourly_budget_has_a_page_with_its_hour_and_its_spenders(viewer: Client, spend: Callable[..., Lease]) -> None:
    lease = spend(2)
    create_llm_call(lease, cost=Decimal("0.5"), started_at=timezone.now())
    hourly, usd = budget(1, period="hour"), budget(1, unit="usd", period="hour")
    assert "per hour" in fetch(viewer, LIST)
    for row in (hourly, usd):
        answer = viewer.get(row_url(row))
        began = budgets.compute_period_bounds("hour", timezone.now())[0]
        assert f"since {began:%Y-%m-%d %H:%M}" in answer.content.decode()
        assert str(lease.pk) in answer.content.decode()
    assert Budget.objects.get(pk=usd.pk).spent >= Decimal("0.5")


def test_the_page_names_the_estimated_part_and_the_unpriced_calls(viewer: Client) -> None:
    row = budget(1, unit="usd")
    assert "without a price" not in fetch(viewer, row_url(row))
    Budget.objects.update(estimated_usd="0.25", unpriced=5)
    assert ", 0.25 USD estimated, 5 calls without a price" in fetch(viewer, row_url(row))


# --- other pages ------------------------------------------------------------------------------------------------------


def test_the_dashboard_names_each_budget_past_its_warning_level(
    viewer: Client, spend: Callable[..., Lease], django_assert_num_queries: Any
) -> None:
    spend(2)
    budget(10)
    assert "lh-over" not in fetch(viewer, "/admin/")
    cache.clear()
    warned, hard = budget("2.3"), budget(1)
    for url in ("/admin/", "/admin/fleet/"):
        shown = fetch(viewer, url)
        assert shown.count('class="lh-notice lh-over') == 2
        assert shown.index(row_url(hard)) < shown.index(row_url(warned))
        assert "leases are refused and active ones end" in shown
    with django_assert_num_queries(2):
        assert len(build_all_notices(timezone.now())) == 2
    for _ in range(MAX_NOTICES):
        budget(1)
    with django_assert_num_queries(2):
        assert len(build_all_notices(timezone.now())) == MAX_NOTICES + 1
    cache.clear()
    shown = fetch(viewer, "/admin/")
    assert shown.count('class="lh-notice lh-over') == MAX_NOTICES + 1 and f"{LIST}?slice=exhausted" in shown


def test_an_agents_page_names_the_budgets_of_its_leases(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    spend(1, "did:plc:bob")
    mine, theirs = budget(1, scope="agent", subject=ADA), budget("0.5", scope="agent", subject="did:plc:bob")
    kind, other = budget(1, scope="environment_type", subject="catan"), budget(1, scope="environment_type", subject="rpg")
    house = budget(1, scope="account", subject="house")
    agent = Agent.objects.get(did=ADA)
    shown = fetch(viewer, row_url(agent))
    assert all(row_url(each) in shown for each in (mine, kind, house))
    assert not any(row_url(each) in shown for each in (theirs, other))


def test_a_leases_page_shows_the_remainder_of_its_tightest_budget(
    viewer: Client, as_role: Callable[..., Client], spend: Callable[..., Lease]
) -> None:
    key, _ = api_keys.issue_key([ADA], now=timezone.now())
    lease = spend(2, key_id=str(key.pk))
    url = row_url(lease)
    assert "cost does not end this lease" in fetch(viewer, url)
    none = count_queries(viewer, url)
    budget(100), budget(1, hard=False)
    tight = budget("2.5", scope="key", subject=str(key.pk))
    shown = viewer.get(url)
    fact = next(fact for fact in shown.context["facts"] if fact.label == "2 hard budgets")
    assert fact.value == "0.5 hours left" and row_url(tight) in fact.note
    assert shown.content.decode().count('class="lh-notice lh-over') == 2  # the soft one, and this
    assert count_queries(viewer, url) == none
    codenames = ["view_lease", "view_sandbox", "view_pool", "view_sweep"]
    Group.objects.create(name="Few").permissions.set(Permission.objects.filter(codename__in=codenames))
    for hidden in (fetch(as_role("Few"), each) for each in ("/admin/", url)):
        assert "lh-over" not in hidden and "hard budget" not in hidden


def test_a_lease_ended_by_a_budget_names_the_budget(viewer: Client, spend: Callable[..., Lease]) -> None:
    lease, made = spend(2), budget(1, scope="agent", subject=ADA)
    budget_enforcement.enforce_budgets(now=timezone.now())
    url = row_url(lease)
    fact = get_fields(viewer, url)["Ended by budget"]
    assert str(made) in fact.value and row_url(made) in fact.value
    label = str(made)
    Budget.objects.filter(pk=made.pk).update(amount=7)  # the text of the event is shown, without a link
    assert get_fields(viewer, url)["Ended by budget"].value == label


def test_health_counts_hard_budgets_that_are_spent(client: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    budget(1, hard=False)
    assert not any("budget" in each for each in client.get("/healthz").json()["warnings"])
    budget(1, scope="agent", subject=ADA)
    warnings = [each for each in client.get("/healthz").json()["warnings"] if "budget" in each]
    assert warnings == ["Exhausted hard budgets, whose leases are refused and ended: 1."]
