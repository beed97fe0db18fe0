"""Concurrent requests for the rest of a budget."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import Client

from billing import budgets, costs, metering
from billing.errors import BudgetExhausted
from billing.models import Budget, Tab
from leases import budget_enforcement, execution, leasing
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes.guard import OPEN_GUARD
from sandboxes.models import Event, Pool, Run, Sandbox
from sandboxes.pool import allocation
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.billing import HOUR, create_budget, get_lease_end, run_command
from tests.support.console import list_messages, read_form, row_url
from tests.support.waiting import wait_until_blocked

pytestmark = pytest.mark.django_db(transaction=True)
MANY = 50 if connection.vendor == "postgresql" else 16


@pytest.fixture
def used_lease(grant: Callable[..., Lease], memory: Any) -> Lease:
    """A lease with an hour of metered use by NOW."""
    lease = grant(now=NOW - HOUR, ttl=9 * HOUR, sleep_after=9 * HOUR)
    run_command(lease, now=NOW - HOUR)
    metering.meter_usage(now=NOW)
    return lease


@pytest.fixture
def small_minimum(settings: Any) -> None:
    settings.MINIMUM_TIME, settings.MINIMUM_USD = timedelta(minutes=6), Decimal("0.1")


@pytest.mark.parametrize("unit", ["hours", "usd"])
def test_concurrent_acquires_of_a_budget_for_ten_grant_ten(unit: str, small_minimum: None, grant: Callable[..., Lease]) -> None:
    create_budget(1, unit)
    with run_in_threads(MANY) as run:
        results = run(lambda i: grant(f"did:plc:a{i}"))
    assert sum(isinstance(result, Lease) for result in results) == 10
    assert sum(isinstance(result, BudgetExhausted) for result in results) == MANY - 10
    assert Lease.objects.count() == Tab.objects.filter(closed_at=None).count() == 10


def test_concurrent_acquires_under_several_budgets_exceed_none(small_minimum: None, grant: Callable[..., Lease]) -> None:
    (
        create_budget("0.8"),
        create_budget("0.5", scope="agent", subject="did:plc:b"),
        create_budget(1, scope="environment_type", subject="catan"),
    )
    create_budget("0.3", "usd", scope="account", subject="house"), create_budget("0.2", scope="agent", subject="did:plc:a")
    with run_in_threads(MANY) as run:
        results = run(lambda i: grant(f"did:plc:{'ab'[i % 2]}", f"e{i}", environment_type=("catan", "rpg")[i % 3 > 0]))
    assert {type(result) for result in results} == {Lease, BudgetExhausted}
    assert Lease.objects.count() == 3
    assert Lease.objects.filter(agent_did="did:plc:a").count() <= 2


def test_concurrent_acquires_and_releases_never_exceed_the_budget(small_minimum: None, grant: Callable[..., Lease]) -> None:
    create_budget("0.3")
    counts: list[int] = []

    def act(number: int) -> None:
        for turn in range(6):
            try:
                lease = grant(f"did:plc:a{number}", f"e{turn}")
            except BudgetExhausted:
                continue
            counts.append(Tab.objects.filter(closed_at=None).count())
            leasing.release(lease.pk, now=NOW)

    with run_in_threads(8) as run:
        assert run(act) == [None] * 8
    assert 0 < max(counts) <= 3
    assert not Tab.objects.filter(closed_at=None).exists()


def test_concurrent_acquires_of_one_lease_reserve_one_minimum(small_minimum: None, grant: Callable[..., Lease]) -> None:
    create_budget("0.1")
    with run_in_threads(12) as run:
        results = run(lambda i: grant())
    assert len({result.pk for result in results}) == 1


def test_concurrent_budget_sweeps_send_one_event_and_end_each_lease_once(grant: Callable[..., Lease], memory: Any) -> None:
    leases = [grant(environment=f"e{i}", now=NOW - HOUR, ttl=9 * HOUR, sleep_after=9 * HOUR) for i in range(4)]
    for lease in leases:
        run_command(lease, now=NOW - HOUR)
    metering.meter_usage(now=NOW), costs.price_usage(now=NOW)
    create_budget("0.9")
    Budget.objects.update(spent=0, exhausted_at=None, exhausted_for=None, warned_for=None)
    Event.objects.all().delete()
    with run_in_threads(3) as run:
        passes = run(lambda i: budget_enforcement.enforce_budgets(now=NOW))
    assert not any(each.failures for each in passes)
    budget_enforcement.enforce_budgets(now=NOW)
    assert [*Lease.objects.values_list("end_reason", flat=True)] == ["budget"] * 4
    assert sorted(Event.objects.values_list("kind", flat=True)) == ["budget.exhausted", "budget.warning", *["lease.ended"] * 4]


def test_exec_during_the_end_of_its_lease_runs_completely_or_not_at_all(
    used_lease: Lease, at_checkpoint: Callable[..., None]
) -> None:
    results: list[Any] = []

    def rival() -> None:
        try:
            results.append(run_command(used_lease))
        except (BudgetExhausted, LeaseEnded) as error:
            results.append(error)
        connections.close_all()

    thread = threading.Thread(target=rival)
    create_budget("0.9")
    at_checkpoint("persisted", thread.start)
    budget_enforcement.enforce_budgets(now=NOW)
    thread.join(30)
    assert isinstance(results[0], BudgetExhausted | LeaseEnded)
    assert (get_lease_end(used_lease)[1], Run.objects.filter(ended_at=None).count()) == ("budget", 0)
    assert Sandbox.objects.get().state == "destroying"


def test_lease_whose_sandbox_wakes_before_its_end_is_not_ended_during_a_run(
    used_lease: Lease, at_checkpoint: Callable[..., None]
) -> None:
    """A run that passed the budget check before the budget was spent wakes the sandbox late."""
    create_budget("0.9")
    request = replace(execution.build_sandbox_request(used_lease, now=NOW), guard=OPEN_GUARD)  # the checks have passed
    at_checkpoint("budget stored", lambda: allocation.ensure_running(request, now=NOW))
    assert budget_enforcement.enforce_budgets(now=NOW).counts["lost race"] == 1
    assert (get_lease_end(used_lease)[0], Sandbox.objects.get().state) == ("active", "warm")
    assert budget_enforcement.enforce_budgets(now=NOW + MINUTE).counts["leases ended"] == 1


def test_second_grant_waits_for_the_first_and_counts_its_lease(
    pool: Pool, small_minimum: None, grant: Callable[..., Lease]
) -> None:
    """A grant locks the budget until it commits."""
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    created, began, results = create_budget("0.1"), threading.Event(), []

    def rival() -> None:
        began.set()
        try:
            results.append(grant("did:plc:b"))
        except BudgetExhausted as error:
            results.append(error)
        connections.close_all()

    thread = threading.Thread(target=rival)
    request = leasing.LeaseRequest("did:plc:a", "e1", "catan", pool=pool.name)

    def admit() -> None:
        thread.start()
        assert began.wait(30)
        wait_until_blocked(thread)
        assert results == []

    leasing.acquire(request, now=NOW, admit=admit)
    thread.join(30)
    assert isinstance(results[0], BudgetExhausted) and created.pk


@pytest.mark.parametrize("first", ["form", "request"])
def test_form_and_request_that_change_one_budget_at_once_undo_nothing(
    first: str, admin_client: Client, at_checkpoint: Callable[..., None]
) -> None:
    """The second one reads the row before the first one has committed, and then waits for the row's lock."""
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    created = create_budget(1)
    url = row_url(created)
    form = read_form(admin_client, url) | {"grace": "30s"}
    statuses: list[int] = []

    def save_form() -> None:
        statuses.append(admin_client.post(url, form).status_code)

    def send_request() -> None:
        budgets.change_budget(created.pk, {"amount": Decimal(20)}, now=NOW)

    def rival() -> None:
        (send_request if first == "form" else save_form)()
        connections.close_all()

    thread = threading.Thread(target=rival)

    def act() -> None:
        thread.start()
        wait_until_blocked(thread)
        assert thread.is_alive()

    at_checkpoint("budget changed", act)
    (save_form if first == "form" else send_request)()
    thread.join(30)
    created.refresh_from_db()
    assert (statuses, created.amount, created.grace) == ([302], 20, timedelta(seconds=30))


def test_form_of_a_budget_that_is_deleted_meanwhile_saves_nothing(admin_client: Client) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    created = create_budget(1)
    url, messages = row_url(created), []
    form = read_form(admin_client, url) | {"grace": "30s"}

    def save_form() -> None:
        messages.extend(list_messages(admin_client.post(url, form)))
        connections.close_all()

    thread = threading.Thread(target=save_form)
    with transaction.atomic():
        Budget.objects.select_for_update().get()
        thread.start()
        wait_until_blocked(thread)
        created.delete()
    thread.join(30)
    assert messages == ["Nothing was saved: The row was deleted."]


def test_concurrent_grants_ends_changes_and_sweeps_do_not_deadlock(
    small_minimum: None, grant: Callable[..., Lease], memory: Any
) -> None:
    created = [create_budget(5, scope=scope, subject=subject) for scope, subject in [("all", ""), ("account", "house")]]
    created += [create_budget(5, scope="agent", subject=f"did:plc:a{i}") for i in range(3)] + [create_budget("0.7", "usd")]

    def act(number: int) -> None:
        for turn in range(5):
            if number == 0:
                assert not budget_enforcement.enforce_budgets(now=NOW + turn * MINUTE).failures
            elif number == 1:
                metering.meter_usage(now=NOW + turn * MINUTE), costs.price_usage(now=NOW + turn * MINUTE)
                budgets.change_budget(created[turn].pk, {"amount": Decimal(6 + turn)}, now=NOW)
            else:
                try:
                    lease = grant(f"did:plc:a{number % 3}", f"e{number}")
                    run_command(lease)
                    leasing.release(lease.pk, now=NOW)
                except BudgetExhausted:
                    continue

    with run_in_threads(7 if connection.vendor == "postgresql" else 4) as run:
        assert [result for result in run(act) if result] == []
    assert not Tab.objects.filter(closed_at=None).exists()
