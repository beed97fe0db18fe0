"""Rivals for what a budget has left."""

import threading
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, connections

from billing import budgets, costs, metering
from billing.errors import BudgetExhausted
from billing.models import Budget, Tab
from leases import budget_enforcement, execution, leasing
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import pool as pools
from sandboxes.models import Event, Pool, Run, Sandbox
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.waiting import wait_until_blocked

pytestmark = pytest.mark.django_db(transaction=True)
MANY = 50 if connection.vendor == "postgresql" else 16
HOUR = timedelta(hours=1)


def budget(amount: Any, unit: str = "hours", **fields: Any) -> Budget:
    made = Budget(**{"scope": "all", "amount": Decimal(amount), "unit": unit, "period": "day"} | fields)
    budgets.save_budget(made, now=NOW)
    return made


def true() -> Command:
    return Command(argv=["true"], timeout=MINUTE)


@pytest.fixture
def for_ten(settings: Any) -> None:
    settings.MINIMUM_TIME, settings.MINIMUM_USD = timedelta(minutes=6), Decimal("0.1")


@pytest.mark.parametrize("unit", ["hours", "usd"])
def test_fifty_acquires_at_once_of_what_is_enough_for_ten_get_ten(
    unit: str, for_ten: None, grant: Callable[..., Lease]
) -> None:
    budget(1, unit)
    with run_in_threads(MANY) as run:
        answers = run(lambda i: grant(f"did:plc:a{i}"))
    assert sum(isinstance(answer, Lease) for answer in answers) == 10
    assert sum(isinstance(answer, BudgetExhausted) for answer in answers) == MANY - 10
    assert Lease.objects.count() == Tab.objects.filter(closed_at=None).count() == 10


def test_several_budgets_are_locked_in_one_order_and_each_is_kept(for_ten: None, grant: Callable[..., Lease]) -> None:
    budget("0.8"), budget("0.5", scope="agent", subject="did:plc:b"), budget(1, scope="environment_type", subject="catan")
    budget("0.3", "usd", scope="account", subject="house"), budget("0.2", scope="agent", subject="did:plc:a")
    with run_in_threads(MANY) as run:
        answers = run(lambda i: grant(f"did:plc:{'ab'[i % 2]}", f"e{i}", environment_type=("catan", "rpg")[i % 3 > 0]))
    assert {type(answer) for answer in answers} == {Lease, BudgetExhausted}
    assert Lease.objects.count() == 3
    assert Lease.objects.filter(agent_did="did:plc:a").count() <= 2


def test_acquires_and_releases_never_keep_more_than_there_is(for_ten: None, grant: Callable[..., Lease]) -> None:
    budget("0.3")
    most: list[int] = []

    def act(number: int) -> None:
        for turn in range(6):
            try:
                lease = grant(f"did:plc:a{number}", f"e{turn}")
            except BudgetExhausted:
                continue
            most.append(Tab.objects.filter(closed_at=None).count())
            leasing.release(lease.pk, now=NOW)

    with run_in_threads(8) as run:
        assert run(act) == [None] * 8
    assert 0 < max(most) <= 3
    assert not Tab.objects.filter(closed_at=None).exists()


def test_one_agent_in_one_environment_keeps_one_minimum(for_ten: None, grant: Callable[..., Lease]) -> None:
    budget("0.1")
    with run_in_threads(12) as run:
        answers = run(lambda i: grant())
    assert len({answer.pk for answer in answers}) == 1


def test_two_sweeps_at_once_say_it_once_and_end_each_lease_once(grant: Callable[..., Lease], memory: Any) -> None:
    leases = [grant(environment=f"e{i}", now=NOW - HOUR, ttl=9 * HOUR, sleep_after=9 * HOUR) for i in range(4)]
    for lease in leases:
        execution.exec_command(lease.pk, true(), now=NOW - HOUR)
    metering.meter_usage(now=NOW), costs.price_usage(now=NOW)
    budget("0.9")
    Budget.objects.update(spent=0, exhausted_at=None, exhausted_for=None, warned_for=None)
    Event.objects.all().delete()
    with run_in_threads(3) as run:
        swept = run(lambda i: budget_enforcement.enforce_budgets(now=NOW))
    assert not any(each.failures for each in swept)
    budget_enforcement.enforce_budgets(now=NOW)
    assert [*Lease.objects.values_list("end_reason", flat=True)] == ["budget"] * 4
    assert sorted(Event.objects.values_list("kind", flat=True)) == ["budget.exhausted", "budget.warning", *["lease.ended"] * 4]


def test_an_exec_that_comes_as_its_lease_is_ended_runs_whole_or_not_at_all(
    grant: Callable[..., Lease], memory: Any, at_checkpoint: Callable[..., None]
) -> None:
    lease = grant(now=NOW - HOUR, ttl=9 * HOUR, sleep_after=9 * HOUR)
    execution.exec_command(lease.pk, true(), now=NOW - HOUR)
    metering.meter_usage(now=NOW)
    answers: list[Any] = []

    def rival() -> None:
        try:
            answers.append(execution.exec_command(lease.pk, true(), now=NOW)[1].exit_code)
        except (BudgetExhausted, LeaseEnded) as refused:
            answers.append(refused)
        connections.close_all()

    thread = threading.Thread(target=rival)
    budget("0.9")
    at_checkpoint("persisted", thread.start)
    budget_enforcement.enforce_budgets(now=NOW)
    thread.join(30)
    assert isinstance(answers[0], BudgetExhausted | LeaseEnded)
    lease.refresh_from_db()
    assert (lease.end_reason, Run.objects.filter(ended_at=None).count()) == ("budget", 0)
    assert Sandbox.objects.get().state == "destroying"


def test_one_that_wakes_before_its_end_is_not_ended_under_what_runs(
    grant: Callable[..., Lease], memory: Any, at_checkpoint: Callable[..., None]
) -> None:
    """It was let through before its budget was spent, and is late."""
    lease = grant(now=NOW - HOUR, ttl=9 * HOUR, sleep_after=9 * HOUR)
    execution.exec_command(lease.pk, true(), now=NOW - HOUR)
    metering.meter_usage(now=NOW)
    budget("0.9")
    at_checkpoint("budget stored", lambda: _ready(lease))
    assert budget_enforcement.enforce_budgets(now=NOW).counts["lost race"] == 1
    lease.refresh_from_db()
    assert (lease.status, Sandbox.objects.get().state) == ("active", "warm")
    assert budget_enforcement.enforce_budgets(now=NOW + MINUTE).counts["leases ended"] == 1


def _ready(lease: Lease) -> None:
    pools.ensure_running(execution.build_sandbox_request(lease, now=NOW), now=NOW)


def test_a_pass_waits_for_a_grant_and_counts_its_lease(pool: Pool, for_ten: None, grant: Callable[..., Lease]) -> None:
    """Whoever is granted the last place holds the budget until it commits."""
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    made, began, answers = budget("0.1"), threading.Event(), []

    def rival() -> None:
        began.set()
        try:
            answers.append(grant("did:plc:b"))
        except BudgetExhausted as refused:
            answers.append(refused)
        connections.close_all()

    thread = threading.Thread(target=rival)
    ask = leasing.LeaseRequest("did:plc:a", "e1", "catan", pool=pool.name)

    def admit() -> None:
        thread.start()
        assert began.wait(30)
        wait_until_blocked(thread)
        assert answers == []

    leasing.acquire(ask, now=NOW, admit=admit)
    thread.join(30)
    assert isinstance(answers[0], BudgetExhausted) and made.pk


def test_grants_ends_changes_and_passes_at_once_do_not_stand_in_each_others_way(
    for_ten: None, grant: Callable[..., Lease], memory: Any
) -> None:
    made = [budget(5, scope=scope, subject=subject) for scope, subject in [("all", ""), ("account", "house")]]
    made += [budget(5, scope="agent", subject=f"did:plc:a{i}") for i in range(3)] + [budget("0.7", "usd")]

    def act(number: int) -> None:
        for turn in range(5):
            if number == 0:
                assert not budget_enforcement.enforce_budgets(now=NOW + turn * MINUTE).failures
            elif number == 1:
                metering.meter_usage(now=NOW + turn * MINUTE), costs.price_usage(now=NOW + turn * MINUTE)
                made[turn].amount = Decimal(6 + turn)
                budgets.save_budget(made[turn], now=NOW)
            else:
                try:
                    lease = grant(f"did:plc:a{number % 3}", f"e{number}")
                    execution.exec_command(lease.pk, true(), now=NOW)
                    leasing.release(lease.pk, now=NOW)
                except BudgetExhausted:
                    continue

    with run_in_threads(7 if connection.vendor == "postgresql" else 4) as run:
        assert [answer for answer in run(act) if answer] == []
    assert not Tab.objects.filter(closed_at=None).exists()
