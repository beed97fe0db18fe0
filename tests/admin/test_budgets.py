"""Budgets in the console: amounts, open leases, notices and notifications."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from billing import budgets, dates, metering
from billing.admin.budget_notices import MAX_NOTICES, build_all_notices
from billing.admin.budgets import MAX_PANEL_ROWS, BudgetAdmin
from billing.admin.overshoot import SWEEP_INTERVAL, describe_overshoot
from billing.models import Account, Budget
from controlplane import schedules
from controlplane.console import dashboard
from leases import api_keys, budget_enforcement, execution, leasing
from leases.models import Agent, Lease
from sandboxes.db import clock
from sandboxes.models import Event
from sandboxes.runs import Command
from tests.admin.conftest import count_queries
from tests.conftest import MINUTE
from tests.support.billing import create_time_usage

pytestmark = pytest.mark.django_db
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
ADA = "did:plc:ada"
WHY = {"_form_submitted": "on", "reason": "said so in the meeting"}
LIST = "/admin/billing/budget/"
BUDGET_FORM = {
    "scope": "agent", "subject": ADA, "amount": "2.5", "unit": "usd", "period": "month", "hard": "on", "warn_percent": "80",
    "grace": "5m",
}  # fmt: skip


def budget(amount: Any = 10, **fields: Any) -> Budget:
    known = {"scope": "all", "unit": "hours", "period": "ever", **fields}
    made = Budget(amount=Decimal(amount), **known)
    budgets.save_budget(made, now=timezone.now())
    return made


def page(made: Budget) -> str:
    return f"{LIST}{made.pk}/change/"


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of domain verbs, so that hours are exact."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 0.0))


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


def test_a_new_budget_counts_past_spending_at_once(administrator: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    answer = administrator.post(f"{LIST}add/", {**BUDGET_FORM, "unit": "hours", "period": "ever", "warn_percent": "60"})
    assert answer.status_code == 302
    made = Budget.objects.get()
    assert (made.scope, made.subject, made.amount, made.hard, made.grace) == ("agent", ADA, Decimal("2.5"), True, 5 * MINUTE)
    assert made.active and made.warned_for and round(made.spent, 1) == 2


def test_a_changed_budget_is_evaluated_at_once_and_keeps_other_columns(
    administrator: Client, spend: Callable[..., Lease]
) -> None:
    spend(2)
    made = budget(1)
    assert made.exhausted_at
    form_data = {**BUDGET_FORM, "scope": "all", "subject": "", "unit": "hours", "period": "ever", "amount": "40"}
    assert administrator.post(page(made), form_data).status_code == 302
    created = made.created_at
    made.refresh_from_db()
    assert (made.amount, made.exhausted_at, made.warned_for, made.created_at) == (40, None, None, created)


def test_a_budget_without_grace_is_added_and_changed(administrator: Client) -> None:
    assert administrator.post(f"{LIST}add/", {**BUDGET_FORM, "grace": "0"}).status_code == 302
    made = Budget.objects.get()
    shown = administrator.get(page(made)).context["adminform"].form["grace"].value()
    assert administrator.post(page(made), {**BUDGET_FORM, "amount": "3", "grace": shown}).status_code == 302
    made.refresh_from_db()
    assert (made.grace, made.amount) == (timedelta(0), 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"amount": "0"},
        {"amount": "-1"},
        {"amount": ""},
        {"warn_percent": "101"},
        {"scope": "all"},
        {"subject": ""},
        {"subject": "ada"},
        {"scope": "environment_type", "subject": "no-such"},
        {"scope": "key", "subject": "17"},
        {"scope": "key", "subject": "9" * 30},
        {"scope": "account", "subject": "nobody"},
        {"grace": "soon"},
    ],
)
def test_an_invalid_budget_is_refused(administrator: Client, wrong: dict[str, str]) -> None:
    answer = administrator.post(f"{LIST}add/", {**BUDGET_FORM, **wrong})
    assert answer.status_code == 200 and answer.context["adminform"].form.errors
    assert not Budget.objects.exists()


def test_a_key_budget_accepts_the_prefix_shown_in_lists(administrator: Client) -> None:
    key, _ = api_keys.issue_key([ADA], name="ci", now=timezone.now())
    for subject in (f"lh_{key.prefix}_…", key.prefix, str(key.pk)):
        assert administrator.post(f"{LIST}add/", {**BUDGET_FORM, "scope": "key", "subject": subject}).status_code == 302
    assert {each.subject for each in Budget.objects.all()} == {str(key.pk)}
    assert f'href="/admin/leases/agentkey/{key.pk}/change/">ci</a>' in administrator.get(LIST).content.decode()


def test_a_budget_is_turned_off_and_on_again(administrator: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    made = budget(1)
    for act, active in (("turn_off", False), ("turn_off", False), ("turn_on", True)):
        Budget.objects.filter(pk=made.pk, active=False).update(spent=0)
        assert administrator.post(f"{LIST}{made.pk}/{act}/", WHY).status_code == 200
        made.refresh_from_db()
        assert made.active is active
    assert made.spent >= 2
    assert len(administrator.get(page(made)).context["audit"]) == 2


@pytest.mark.parametrize("role", ["Viewer", "Operator"])
def test_only_administrators_change_budgets(as_role: Callable[..., Client], role: str) -> None:
    made, browser = budget(), as_role(role)
    shown = browser.get(page(made))
    assert shown.status_code == 200
    assert b'name="_save"' not in shown.content and "Deactivate…" not in shown.content.decode()
    assert browser.post(page(made), {**BUDGET_FORM, "amount": "99"}).status_code == 403
    assert browser.post(f"{LIST}add/", BUDGET_FORM).status_code == 403
    assert browser.post(f"{LIST}{made.pk}/turn_off/", WHY).status_code == 403
    made.refresh_from_db()
    assert (made.amount, made.active, Budget.objects.count()) == (10, True, 1)


# --- the list and the page --------------------------------------------------------------------------------------------


def test_each_tab_lists_its_own_rows(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    made = {"within": budget(10), "warned": budget("2.1"), "exhausted": budget(1), "soft": budget(1, hard=False)}
    made["off"] = budget(1, active=False)
    names = {each.pk: name for name, each in made.items()}
    found = {
        name: {names[row.pk] for row in viewer.get(f"{LIST}?slice={name}").context["cl"].result_list}
        for name in BudgetAdmin.list_tabs
    }
    assert found == {"all": {*made}, "warned": {"warned"}, "exhausted": {"exhausted", "soft"}, "off": {"off"}}
    shown = viewer.get(LIST).content.decode()
    for level in ("within", "warned", "exhausted", "off"):
        assert f'<meter class="lh-meter is-{level}"' in shown
    assert 'style="--warn: 80%"' in shown


def test_spending_of_a_past_period_is_not_shown(viewer: Client) -> None:
    made = budget(1, period="day")
    long_ago = timezone.now() - timedelta(days=2)
    began = budgets.get_period_bounds("day", long_ago)[0]
    Budget.objects.filter(pk=made.pk).update(
        spent=1, period_began=began, warned_for=began, exhausted_for=began, exhausted_at=long_ago
    )  # fmt: skip
    assert "0 of 1 hours, 0 %" in viewer.get(LIST).content.decode()
    assert not viewer.get(f"{LIST}?slice=exhausted").context["cl"].result_count
    assert not viewer.get("/admin/").context["notices"]


def test_a_list_costs_as_many_queries_for_40_budgets_as_for_4(viewer: Client) -> None:
    def fill(first: int, last: int) -> None:
        for number in range(first, last):
            key, _ = api_keys.issue_key([ADA], now=timezone.now())
            Agent.objects.create(did=f"did:plc:a{number}")
            Account.objects.create(name=f"team-{number}")
            subjects = {
                "key": str(key.pk),
                "agent": f"did:plc:a{number}",
                "environment_type": "catan",
                "account": f"team-{number}",
            }
            for scope, subject in subjects.items():
                budget(scope=scope, subject=subject)

    fill(0, 1)
    cache.set("fleet", dashboard.build_fleet_summary(), 600)
    viewer.get(LIST)
    few = count_queries(viewer, LIST)
    fill(1, 10)
    assert count_queries(viewer, LIST) == few <= 10
    assert "/admin/billing/account/" in viewer.get(LIST).content.decode()


def test_the_page_lists_top_spenders_with_a_constant_number_of_queries(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend(2, "did:plc:most")
    spend(1, ADA)
    gone = spend(3, "did:plc:gone")
    leasing.release(gone.pk, now=timezone.now())
    made = budget(100)
    shown = viewer.get(page(made))
    assert [(tab.agent_did, amount) for _, tab, _, amount in shown.context["spenders"]] == [
        ("did:plc:most", "2"), (ADA, "1"),
    ]  # fmt: skip
    assert f'href="/admin/leases/lease/{shown.context["spenders"][0][1].holder}/change/"' in shown.content.decode()
    few = count_queries(viewer, page(made))
    for number in range(MAX_PANEL_ROWS + 2):
        spend(number / 100, f"did:plc:a{number}")
    budgets.update_spending(made.pk, now=timezone.now())
    shown = viewer.get(page(made))
    assert len(shown.context["spenders"]) == MAX_PANEL_ROWS and f"of {MAX_PANEL_ROWS + 4}" in shown.content.decode()
    assert count_queries(viewer, page(made)) < few <= 13  # only one spender exists


def test_a_budget_in_usd_lists_leases_that_cost_nothing_yet(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend()
    shown = viewer.get(page(budget(5, unit="usd")))
    assert [(tab.agent_did, amount) for _, tab, _, amount in shown.context["spenders"]] == [(ADA, "0")]


def test_the_page_lists_only_notifications_of_its_own_budget(viewer: Client, spend: Callable[..., Lease]) -> None:
    made, others = budget(1), [budget(1) for _ in range(10)]
    spend(2)
    for each in (made, *others):
        budgets.update_spending(each.pk, now=timezone.now())
    notices = viewer.get(page(made)).context["notifications"]
    assert [each.kind for each in notices] == ["budget.exhausted", "budget.warning"]
    assert Event.objects.filter(kind__startswith="budget.").count() == 22
    assert notices[0].spent.endswith(" of 1 hours")
    assert viewer.get(notices[0].href).status_code == 200


def test_the_overshoot_is_explained_with_the_budgets_numbers() -> None:
    now = timezone.now()
    hours = " ".join(describe_overshoot(budget(10), 12, now))
    assert "12 leases are open" in hours and "12 x 8 m = 1.6 hours" in hours and "up to 600 open leases" in hours
    usd = " ".join(describe_overshoot(budget(10, unit="usd", grace=HOUR), 1, now))
    assert "what 1 sandbox costs in 1 h 3 m" in usd
    assert "no bound" in " ".join(describe_overshoot(budget(10, hard=False), 12, now))
    assert "The budget is inactive" in " ".join(describe_overshoot(budget(10, active=False), 12, now))
    assert schedules.get_interval("meter") == schedules.get_interval("budgets") == SWEEP_INTERVAL


def test_the_page_forecasts_the_day_a_budget_runs_out(viewer: Client) -> None:
    today = dates.to_utc_date(timezone.now())
    create_time_usage(dates.start_of_day(today - DAY), 10 * HOUR)

    def forecast_field(amount: Any, **fields: Any) -> tuple[str, str, str]:
        facts = viewer.get(page(budget(amount, **fields))).context["facts"]
        fact = next(fact for fact in facts if fact.label in ("Runs out", "Ran out"))
        return fact.label, fact.value, fact.note

    pace = "at the average of the last 7 days"
    assert forecast_field(100) == ("Runs out", f"on {today + 8 * DAY}", pace)
    assert forecast_field(5, period="day") == ("Runs out", f"on {today}", pace)
    assert forecast_field(100, period="day") == forecast_field(9999, period="month") == ("Runs out", "not in this period", pace)
    unknown = "needs one full day of usage"
    assert forecast_field(100, scope="agent", subject="did:plc:idle") == ("Runs out", "no forecast yet", unknown)
    assert forecast_field(5) == ("Ran out", f"on {today}", "day of detection")
    assert forecast_field(100, active=False) == ("Runs out", "–", "the budget is inactive")


# --- other pages ------------------------------------------------------------------------------------------------------


def test_the_dashboard_names_each_budget_past_its_warning_level(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    budget(10)
    assert "lh-over" not in viewer.get("/admin/").content.decode()
    cache.clear()
    warned, hard = budget("2.1"), budget(1)
    for url in ("/admin/", "/admin/fleet/"):
        shown = viewer.get(url).content.decode()
        assert shown.count('class="lh-notice lh-over') == 2
        assert shown.index(page(hard)) < shown.index(page(warned))
        assert "leases are refused and active ones end" in shown
    for _ in range(MAX_NOTICES):
        budget(1)
    cache.clear()
    shown = viewer.get("/admin/").content.decode()
    assert shown.count('class="lh-notice lh-over') == MAX_NOTICES + 1 and f"{LIST}?slice=exhausted" in shown


def test_notices_cost_one_query_whatever_their_number(spend: Callable[..., Lease], django_assert_num_queries: Any) -> None:
    spend(2)
    for count in (0, 3):
        for _ in range(count):
            budget(1)
        with django_assert_num_queries(1):
            assert len(build_all_notices(timezone.now())) == count


def test_an_agents_page_names_the_budgets_of_its_leases(viewer: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    spend(1, "did:plc:bob")
    mine, theirs = budget(1, scope="agent", subject=ADA), budget("0.5", scope="agent", subject="did:plc:bob")
    kind, other = budget(1, scope="environment_type", subject="catan"), budget(1, scope="environment_type", subject="rpg")
    house = budget(1, scope="account", subject="house")
    agent = Agent.objects.get(did=ADA)
    shown = viewer.get(f"/admin/leases/agent/{agent.pk}/change/").content.decode()
    assert all(page(each) in shown for each in (mine, kind, house))
    assert not any(page(each) in shown for each in (theirs, other))


def test_a_leases_page_shows_the_remainder_of_its_tightest_budget(viewer: Client, spend: Callable[..., Lease]) -> None:
    key, _ = api_keys.issue_key([ADA], now=timezone.now())
    lease = spend(2, key_id=str(key.pk))
    url = f"/admin/leases/lease/{lease.pk}/change/"
    assert "cost does not end this lease" in viewer.get(url).content.decode()
    none = count_queries(viewer, url)
    budget(100), budget(1, hard=False)
    tight = budget("2.5", scope="key", subject=str(key.pk))
    shown = viewer.get(url)
    fact = next(fact for fact in shown.context["facts"] if fact.label == "2 hard budgets")
    assert fact.value == "0.5 hours left" and page(tight) in fact.note
    assert shown.content.decode().count('class="lh-notice lh-over') == 2  # the soft one, and this
    assert count_queries(viewer, url) == none


def test_a_lease_ended_by_a_budget_names_the_budget(viewer: Client, spend: Callable[..., Lease]) -> None:
    lease, made = spend(2), budget(1, scope="agent", subject=ADA)
    budget_enforcement.enforce_budgets(now=timezone.now())
    url = f"/admin/leases/lease/{lease.pk}/change/"
    fact = next(fact for fact in viewer.get(url).context["facts"] if fact.label == "Ended by budget")
    assert str(made) in fact.value and page(made) in fact.value
    label = str(made)
    Budget.objects.filter(pk=made.pk).update(amount=7)  # it says what held then
    fact = next(fact for fact in viewer.get(url).context["facts"] if fact.label == "Ended by budget")
    assert fact.value == label


def test_budgets_are_hidden_without_permission_to_view_them(
    as_role: Callable[..., Client], spend: Callable[..., Lease]
) -> None:
    lease = spend(2)
    budget(1)
    few = Group.objects.create(name="Few")
    few.permissions.set(
        Permission.objects.filter(codename__in=["view_lease", "view_sandbox", "view_pool", "view_sweep"])
    )  # fmt: skip
    browser = as_role("Few")
    for url in ("/admin/", f"/admin/leases/lease/{lease.pk}/change/"):
        shown = browser.get(url)
        assert shown.status_code == 200
        assert "lh-over" not in shown.content.decode() and "hard budget" not in shown.content.decode()


def test_health_counts_hard_budgets_that_are_spent(client: Client, spend: Callable[..., Lease]) -> None:
    spend(2)
    budget(1, hard=False)
    assert not any("budget" in each for each in client.get("/healthz").json()["warnings"])
    budget(1, scope="agent", subject=ADA)
    warnings = [each for each in client.get("/healthz").json()["warnings"] if "budget" in each]
    assert warnings == ["Exhausted hard budgets, whose leases are refused and ended: 1."]
