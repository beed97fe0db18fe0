"""Budgets for models: they count and refuse the calls of matching models, and leave sandboxes alone."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from billing import budgets, costs, metering
from billing.budgets import call_admission
from billing.models import Budget
from leases import budget_enforcement
from leases.models import Lease
from sandboxes.egress.model_pricing import find_candidate_names, is_match
from sandboxes.egress.refusals import CallRefused
from tests.conftest import MINUTE, NOW
from tests.support.billing import ADA, BOB, HOUR, create_budget, create_rate, run_billing_sweeps, run_command
from tests.support.model_calls import close_call, open_call
from tests.support.model_rates import create_rates

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("budgets: sums and locks"),
]
CENT = Decimal("0.01")
OPUS, HAIKU = "us.anthropic.claude-opus-4-20250514-v1:0", "claude-haiku-4-5"
NAMES = (
    OPUS, HAIKU, "claude-opus-4", "anthropic/claude-opus-4@20250514", "a/b/gpt-4o-2024-08-06", "gpt-4o", "gpt-4.1", "gpt-40",
    "ai21.jamba-1-5-mini-v1:0", "claude-v2.1", "a.b.1x", "us.anthropic.claude-v2", "x/claude-opus-4-1", "GPT-4o", "",
)  # fmt: skip
PATTERNS = (
    "*", "claude-opus*", "claude-opus-4", "anthropic.claude*", "gpt-4?", "gpt-4.1", "gpt-4o-2024-08-06", "b/gpt-4o", "jamba*",
    "claude-v2", "1x", "b.1x", "*haiku*", "opus", "gpt*",
)  # fmt: skip


@pytest.fixture
def lease(grant: Callable[..., Lease], memory: Any, settings: Any) -> Lease:
    settings.LLM_URL, settings.LLM_MODELS = "http://127.0.0.1:9", ["*"]  # never called
    create_rates("*", input=10, output=10)
    lease = grant(ADA, "game-1", ttl=20 * HOUR, sleep_after=20 * HOUR)
    run_command(lease, "true", now=NOW)
    return lease


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_matches_the_names_that_a_rate_may_have(pattern: str) -> None:
    matching = {name for name in NAMES if budgets.is_model_match(pattern, name)}
    assert matching - {""} == {name for name in NAMES if any(is_match(pattern, each) for each in find_candidate_names(name))}


@pytest.mark.parametrize("period", ["hour", "day", "week", "month", "ever"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_only_calls_of_the_model_are_counted_and_refused(lease: Lease, period: str, zone: str) -> None:
    fields = {"scope": "agent", "subject": ADA, "model": "claude-opus*", "time_zone": zone}
    budget = create_budget("0.03", "usd", period, **fields)
    create_rate("time", "100", "2026-01-01", provider="memory")
    close_call(open_call(lease, model=HAIKU)), close_call(open_call(lease, model=OPUS))
    run_billing_sweeps(NOW + MINUTE)
    budget.refresh_from_db()
    assert budget.spent == budget.calls_spent == CENT and not budget.reserved
    open_call(lease, model=OPUS, now=NOW + MINUTE), close_call(open_call(lease, model="claude-opus-4", now=NOW + MINUTE))
    assert call_admission.sum_spent_now(budget, now=NOW + MINUTE) == 3 * CENT
    with pytest.raises(CallRefused) as caught:
        open_call(lease, model=OPUS, now=NOW + MINUTE)
    assert (caught.value.status, caught.value.code) == (402, "budget_exhausted")
    assert "agent did:plc:ada, model claude-opus*: 0.03 spent" in caught.value.message
    assert open_call(lease, model=HAIKU, now=NOW + MINUTE)


def test_an_alias_is_refused_once_the_upstream_has_answered_it_by_the_model(lease: Lease) -> None:
    create_budget("0.02", "usd", "day", model="claude-opus*")
    close_call(open_call(lease, model="best"), model=OPUS)  # its model is unknown until it is answered
    close_call(open_call(lease, model="best"), model=OPUS)
    with pytest.raises(CallRefused) as caught:
        open_call(lease, model="best")
    assert caught.value.code == "budget_exhausted"
    assert open_call(lease, model="other")


def test_exhausted_budget_for_a_model_refuses_no_start_and_ends_no_lease(lease: Lease, grant: Callable[..., Lease]) -> None:
    budget = create_budget("0.01", "usd", model="*opus*")
    close_call(open_call(lease, model=OPUS))
    metering.meter_usage(now=NOW)
    costs.price_usage(now=NOW)
    assert budgets.update_spending(budget.pk, now=NOW) == ["warned", "exhausted"]
    later = NOW + 10 * MINUTE
    assert not budget_enforcement.find_leases_over_budget(now=later) and not budgets.find_exhausted(now=later)
    run_billing_sweeps(later)
    run_command(lease, "true", now=later)
    assert open_call(lease, model=HAIKU, now=later) and grant(BOB, "game-2", now=later)
    with pytest.raises(CallRefused):
        open_call(lease, model=OPUS, now=later)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "claude *"}, "model"), ({"model": "[a]"}, "model"), ({"model": "a\\d"}, "model"),
        ({"model": "opus", "unit": "hours"}, "__all__"),
    ],
)  # fmt: skip
def test_invalid_model_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        create_budget(**{"amount": 1, "unit": "usd"} | fields)
    assert field in caught.value.message_dict and not Budget.objects.exists()
