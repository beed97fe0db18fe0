"""manage.py budget: options, output and errors."""

from datetime import UTC, timedelta

import pytest
from django.core.management import CommandError
from django.utils import timezone

from billing import budgets, dates
from billing.models import Account, Budget
from leases import api_keys
from sandboxes.models import OperatorAction
from tests.commands.manage import call
from tests.support.billing import ADA, HOUR, create_time_usage

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


def run(*args: str) -> str:
    return call("budget", *args).removesuffix("\n")


def test_a_budget_is_added_changed_listed_and_removed() -> None:
    added = run("add", "12.50", "usd", "month", "--agent", ADA, "--grace", "30s", "--warn", "60")
    budget = Budget.objects.get()
    resets = f"resets at {budgets.get_period_bounds(budget, timezone.now())[1]:%Y-%m-%d %H:%M} UTC"
    line = f"{budget.pk} 12.5 USD a month for agent {ADA}: 0 spent, 12.5 left (hard, warns at 60 %, grace 30s, {resets})"
    assert added == f"added: {line}" and run("list") == line
    assert (budget.scope, budget.subject, budget.amount, budget.grace) == ("agent", ADA, 12.5, timedelta(seconds=30))
    assert budget.spent_at is not None
    assert run("set", str(budget.pk), "--amount", "20", "--soft", "--active", "no") == (
        f"changed: {budget.pk} 20 USD a month for agent {ADA}: 0 spent, 20 left (soft, warns at 60 %, disabled, {resets})"
    )
    assert run("set", str(budget.pk), "--hard", "--active", "yes", "--grace", "0").endswith(f"grace 0s, {resets})")
    assert run("remove", str(budget.pk)).startswith(f"removed: {budget.pk} 20 USD")
    assert run("list") == "" and not Budget.objects.exists()
    actions = OperatorAction.objects.order_by("at").values_list("action", "actor")
    assert [*actions] == [(f"{verb} budget", "command line") for verb in ("Create", "Change", "Change", "Delete")]


def test_each_scope_has_an_option() -> None:
    Account.objects.create(name="crew")
    for options in (["--all"], ["--type", "catan"], ["--account", "crew"]):
        run("add", "1", "hours", "day", *options)
    scopes = [*Budget.objects.order_by("pk").values_list("scope", "subject")]
    assert scopes == [("all", ""), ("environment_type", "catan"), ("account", "crew")]


@pytest.mark.parametrize("shown", ["{}", "lh_{}", "lh_{}_…"])
def test_a_key_is_named_by_its_prefix_as_the_admin_shows_it(shown: str) -> None:
    key, _ = api_keys.issue_key([ADA], now=timezone.now())
    run("add", "1", "hours", "day", "--key", shown.format(key.prefix))
    assert Budget.objects.values_list("scope", "subject").get() == ("key", str(key.pk))


def test_an_exhausted_budget_is_marked() -> None:
    run("add", "1", "hours", "ever", "--all")
    Budget.objects.update(spent=2, period_began=dates.EPOCH)
    assert run("list").endswith(
        "1 hours (lifetime) for everything: 2 spent, 0 left (hard, warns at 50, 80, 100 %, grace 300s, EXHAUSTED)"
    )


def test_a_budget_shows_its_predicted_exhaustion_date() -> None:
    today = timezone.now().astimezone(UTC).date()
    create_time_usage(dates.start_of_day(today - DAY), 10 * HOUR, ADA)
    run("add", "100", "hours", "ever", "--agent", ADA)
    assert run("list").endswith(
        f": 10 spent, 90 left (hard, warns at 50, 80, 100 %, grace 300s, exhausted on {today + 8 * DAY} at the current rate)"
    )
    run("set", str(Budget.objects.get().pk), "--active", "no")
    assert run("list").endswith("grace 300s, disabled)")


def test_a_budget_for_a_model_in_a_zone_is_topped_up() -> None:
    options = ["--model", "claude-opus*", "--time-zone", "Europe/Berlin", "--warn", "90", "10", "--key"]
    key, _ = api_keys.issue_key([ADA], now=timezone.now())
    run("add", "5", "usd", "week", *options, key.prefix)
    budget = Budget.objects.get()
    assert (budget.model, budget.time_zone, budget.warn_percents) == ("claude-opus*", "Europe/Berlin", [10, 90])
    line = run("top-up", str(budget.pk), "2.5", "--note", "release day")
    subject = f"api key {key.pk}, model claude-opus*"
    assert line.startswith(
        f"topped up: {budget.pk} 5 USD a week (Europe/Berlin) for {subject}: 0 spent, 7.5 left (2.5 topped up, hard"
    )
    assert (budget.top_ups.get().note, budget.top_ups.get().actor) == ("release day", "command line")
    with pytest.raises(CommandError, match="greater than or equal"):
        run("top-up", str(budget.pk), "0")


def test_a_budget_for_an_agent_that_has_not_joined_is_saved_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    api_keys.issue_key(["did:plc:adalovelace"], now=timezone.now())
    run("add", "1", "usd", "day", "--agent", "did:plc:adalovelcae")
    assert "Did you mean did:plc:adalovelace?" in capsys.readouterr().err
    run("add", "1", "usd", "day", "--agent", "did:plc:adalovelace")
    assert capsys.readouterr().err == "" and Budget.objects.count() == 2


ADD = ["add", "1", "hours", "day"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*ADD, "--agent", "ada"], "is not a DID"), ([*ADD, "--agent", ""], "is not a DID"),
        ([*ADD, "--key", "ab"], "no such API key"), ([*ADD, "--key", ""], "no such API key"),
        ([*ADD, "--type", "catann"], "Did you mean catan?"),
        ([*ADD, "--type", "chess"], "no such environment type"), ([*ADD, "--type", ""], "no such environment type"),
        ([*ADD, "--account", "huose"], "Did you mean house?"),
        ([*ADD, "--account", "none"], "no such account"), ([*ADD, "--account", ""], "no such account"),
        (["add", "much", "hours", "day", "--all"], "is not a decimal number"),
        (["add", "0", "hours", "day", "--all"], "greater than or equal"),
        (["add", "nan", "hours", "day", "--all"], "decimal number|a number"),
        ([*ADD, "--all", "--grace", "soon"], "--grace"), (ADD, "required"),
        (["add", "1", "hours", "year", "--all"], "invalid choice"),
        ([*ADD, "--all", "--time-zone", "Mars"], "name of a time zone"),
        ([*ADD, "--all", "--model", "m"], "in USD or tokens"), (["add", "1.5", "tokens", "day", "--all"], "whole number"),
        ([*ADD, "--all", "--warn", "101"], "from 1 to 100"), (["top-up", "77", "1"], "No such budget: 77"),
        (["top-up", "77", "much"], "is not a decimal number"),
        (["set", "77", "--amount", "1"], "No such budget: 77"), (["remove", "77"], "No such budget: 77"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_and_changes_nothing(args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*args)
    assert not Budget.objects.exists()
