"""Top-ups: amounts added to the current period of a budget."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from billing import budgets, costs, metering
from billing.errors import BudgetNotFound
from billing.models import Budget, BudgetTopUp
from leases.models import Lease
from sandboxes.egress.refusals import CallRefused
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.actors import console_user
from tests.support.billing import ADA, HOUR, create_budget, create_time_usage, expect_refusal, run_command
from tests.support.model_calls import MODEL, close_call, open_call
from tests.support.model_rates import create_rates

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("budgets: sums and locks"),
]
DAY = timedelta(days=1)


def top_up(budget: Budget, amount: str, **fields: Any) -> BudgetTopUp:
    return budgets.top_up(budget.pk, Decimal(amount), **{"actor": console_user(), "now": NOW} | fields)[1]


def test_top_up_during_exhaustion_admits_the_next_call(grant: Callable[..., Lease], memory: Any, settings: Any) -> None:
    settings.LLM_URL, settings.LLM_MODELS = "http://127.0.0.1:9", ["*"]  # never called
    create_rates(MODEL, input=10, output=10)
    lease = grant(ADA, "game-1", ttl=20 * HOUR, sleep_after=20 * HOUR)
    run_command(lease, "true", now=NOW)
    budget = create_budget("0.01", "usd", grace=timedelta(0))
    close_call(open_call(lease))
    metering.meter_usage(now=NOW)
    costs.price_usage(now=NOW)
    budgets.update_spending(budget.pk, now=NOW)
    budgets.update_call_blocks(now=NOW)
    with pytest.raises(CallRefused):
        open_call(lease, now=NOW + MINUTE)
    top_up(budget, "1", now=NOW + MINUTE)
    assert open_call(lease, now=NOW + MINUTE)
    budget.refresh_from_db()
    assert (budget.amount, budget.exhausted_at, budgets.get_limit(budget, NOW)) == (Decimal("0.01"), None, Decimal("1.01"))


def test_top_up_counts_for_leases_and_expires_with_the_period(grant: Callable[..., Lease]) -> None:
    budget = create_budget(1, "hours")
    create_time_usage(NOW - HOUR)
    assert budgets.update_spending(budget.pk, now=NOW) == ["warned", "exhausted"]
    with expect_refusal():
        grant(now=NOW)
    row = top_up(budget, "0.5", note="release day")
    budget.refresh_from_db()
    assert (row.amount, row.note, row.actor, row.created_at) == (Decimal("0.5"), "release day", "eve", NOW)
    assert grant(now=NOW) and budget.exhausted_at is None
    budget.refresh_from_db()
    assert budgets.get_limit(budget, NOW) == Decimal("1.5")
    assert budgets.get_limit(budget, NOW + DAY) == 1
    top_up(budget, "2", now=NOW + DAY)
    budget.refresh_from_db()
    assert budgets.get_limit(budget, NOW + DAY) == 3


@pytest.mark.django_db(transaction=True)
def test_concurrent_top_ups_all_count() -> None:
    budget = create_budget(1, "usd")
    with run_in_threads(8) as run:
        results = run(lambda number: top_up(budget, f"0.{number + 1}"))
    assert {type(each) for each in results} == {BudgetTopUp}
    budget.refresh_from_db()
    assert budget.topped_up == Decimal("3.6") and BudgetTopUp.objects.count() == 8


def test_repeated_request_tops_up_once(crash_at: Callable[..., Any]) -> None:
    budget, request_id = create_budget(1, "usd"), uuid.uuid4()
    with crash_at("budget topped up"):
        top_up(budget, "1", request_id=request_id)
    assert not BudgetTopUp.objects.exists()
    with crash_at("budget summed"):  # after the commit, before the update
        top_up(budget, "1", request_id=request_id)
    assert top_up(budget, "1", request_id=request_id) == BudgetTopUp.objects.get()
    budget.refresh_from_db()
    assert budget.topped_up == 1


@pytest.mark.parametrize("amount", ["0", "-1", "0.0000001", "NaN", "Infinity", "1000000000000"])
def test_invalid_top_up_is_refused_and_changes_nothing(amount: str) -> None:
    budget = create_budget(1, "usd")
    top_up(budget, "900000000000")
    with pytest.raises(ValidationError) as caught:
        top_up(budget, amount)
    assert "amount" in caught.value.message_dict
    budget.refresh_from_db()
    assert budget.topped_up == 900000000000 and BudgetTopUp.objects.count() == 1
    with pytest.raises(ValidationError):
        top_up(budget, "200000000000")


def test_top_up_of_an_unknown_budget_is_refused() -> None:
    with pytest.raises(BudgetNotFound):
        budgets.top_up(77, Decimal(1), actor=console_user(), now=NOW)
