"""Budgets in tokens: they count and refuse model calls of any price, and leave sandboxes alone."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from billing import budgets, metering
from billing.budgets import call_admission
from billing.forecast import forecast_budget
from billing.models import Budget, UsageRecord
from leases import budget_enforcement
from leases.models import Lease
from sandboxes.egress import settlement
from sandboxes.egress.estimates import COUNT_TOKENS_PATH, TokenEstimate
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import LlmCall
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.actors import console_user
from tests.support.billing import ADA, BOB, HOUR, create_budget, create_rate, run_billing_sweeps, run_command
from tests.support.model_calls import MODEL, THOUSAND, close_call, open_call
from tests.support.model_rates import create_rates

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("budgets: sums and locks"),
]
AnyCallable = Callable[..., Any]


@pytest.fixture(autouse=True)
def upstream(settings: Any) -> None:
    settings.LLM_URL, settings.LLM_MODELS = "http://127.0.0.1:9", ["*"]  # never called


@pytest.fixture
def lease(grant: AnyCallable, memory: Any) -> Lease:
    return start(grant)


def start(grant: AnyCallable, agent: str = ADA, environment: str = "game-1") -> Lease:
    lease: Lease = grant(agent, environment, ttl=20 * HOUR, sleep_after=20 * HOUR)
    run_command(lease, "true", now=NOW)
    return lease


def get_refusal(lease: Lease, *arguments: Any, **fields: Any) -> CallRefused:
    with pytest.raises(CallRefused) as caught:
        open_call(lease, *arguments, **fields)
    return caught.value


@pytest.mark.parametrize("period", ["hour", "day", "week", "month", "ever"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_calls_without_a_price_are_counted_and_refused(lease: Lease, period: str, zone: str) -> None:
    fields = {"scope": "agent", "subject": ADA, "time_zone": zone}
    budget = create_budget(3000, "tokens", period, **fields)
    create_rate("time", "100", "2026-01-01", provider="memory")
    close_call(open_call(lease)), get_refusal(lease, TokenEstimate(2000, 1))
    run_billing_sweeps(NOW + MINUTE)
    budget.refresh_from_db()
    assert budget.spent == budget.calls_spent == 1000 and not budget.reserved and not budget.estimated_tokens
    close_call(open_call(lease, now=NOW + MINUTE), 200), open_call(lease, TokenEstimate(800, 1000), now=NOW + MINUTE)
    assert call_admission.sum_spent_now(budget, now=NOW + MINUTE) == 3000
    refusal = get_refusal(lease, TokenEstimate(1, 0), now=NOW + MINUTE)
    assert (refusal.status, refusal.code) == (402, "budget_exhausted")
    assert "3,000 tokens" in refusal.message and "agent did:plc:ada: 3000 spent" in refusal.message
    assert {"spent": "3000", "limit": "3000", "unit": "tokens"}.items() <= refusal.details.items()
    ends = budgets.get_period_bounds(budget, NOW)[1]
    if ends:
        assert get_refusal(lease, now=ends - MINUTE)
        assert call_admission.sum_spent_now(budget, now=ends) == 0
        assert open_call(lease, TokenEstimate(0, 3000), now=ends) and get_refusal(lease, TokenEstimate(1, 0), now=ends)


def test_all_kinds_of_tokens_count_and_web_searches_do_not(lease: Lease) -> None:
    budget, row, usage = create_budget(10**6, "tokens"), open_call(lease), TokenUsage()
    usage.add({"model": MODEL, "usage": {
        "input_tokens": 10, "cache_read_input_tokens": 200, "cache_creation_input_tokens": 3000, "output_tokens": 40_000,
        "output_tokens_details": {"thinking_tokens": 30_000}, "server_tool_use": {"web_search_requests": 7},
    }})  # fmt: skip
    usage.is_final = True
    settlement.settle_call(row, settlement.CallResult(LlmCall.Outcome.OK, 200, usage=usage, estimate=THOUSAND), now=NOW)
    assert call_admission.sum_spent_now(budget, now=NOW) == 43_210
    run_billing_sweeps(NOW)
    budget.refresh_from_db()
    assert (budget.spent, budget.estimated_tokens) == (43_210, 0)


@pytest.mark.django_db(transaction=True)
def test_concurrent_calls_do_not_exceed_a_budget_in_tokens(grant: AnyCallable, memory: Any) -> None:
    """Forty clients of four leases share the tokens of seven calls, and one agent has those of two."""
    leases = [start(grant, BOB if number else ADA, f"e{number}") for number in range(4)]
    budget = create_budget(7000, "tokens")
    create_budget(2000, "tokens", scope="agent", subject=ADA)
    with run_in_threads(40) as run:
        results = run(lambda number: open_call(leases[number % 4]))
    admitted = [row for row in results if isinstance(row, LlmCall)]
    assert {type(each) for each in results} == {LlmCall, CallRefused}
    assert len(admitted) == 7 and sum(row.agent_did == ADA for row in admitted) <= 2
    for row in admitted:
        close_call(row)
    assert call_admission.sum_spent_now(budget, now=NOW) == 7000


def test_free_call_passes_a_budget_in_usd_alone(lease: Lease) -> None:
    create_rates("free", input=0, output=0)
    create_rates(MODEL, input=10, output=10)
    fields = {"scope": "agent", "subject": ADA}
    create_budget("0.01", "usd", **fields), create_budget(3000, "tokens", **fields)
    close_call(open_call(lease))
    assert get_refusal(lease).details["unit"] == "usd"
    close_call(open_call(lease, model="free")), close_call(open_call(lease, model="free"))
    assert get_refusal(lease, model="free").details["unit"] == "tokens"
    assert get_refusal(lease, TokenEstimate(1, 0), model="other").code == "model_not_priced"


def test_the_rest_of_both_units_is_known_to_the_agent(lease: Lease) -> None:
    create_rates(MODEL, input=10, output=10)
    fields = {"scope": "agent", "subject": ADA}
    create_budget("0.05", "usd", **fields), create_budget(9000, "tokens", **fields), create_budget(4000, "tokens", **fields)
    create_budget(3000, "tokens")  # whose spending the agent may not know
    call = call_admission.CallReservation(lease.pk, ADA, MODEL, Decimal("0.01"), 1000)
    funds = call_admission.check_call(call, NOW)
    assert (funds.has_limit, funds.remaining_usd, funds.remaining_tokens) == (True, Decimal("0.04"), 3000)


@pytest.mark.parametrize(
    ("end", "tokens", "estimated"),
    [
        ({"tokens": None, "outcome": "cut"}, 1000, 1000),  # generated to the maximum
        ({"tokens": None, "outcome": "ok", "received_bytes": 300}, 500, 500),  # 400 + 300 / 3 tokens
        ({"tokens": None, "outcome": "ok", "received_bytes": 300, "cost": Decimal("0.5")}, 500, 500),
        ({"tokens": None, "outcome": "failed", "is_free": True}, 0, 0),
        ({"tokens": 1200}, 1200, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("period", ["hour", "day"])
def test_unknown_usage_is_estimated(lease: Lease, end: dict[str, Any], tokens: int, estimated: int, period: str) -> None:
    budget = create_budget(10**6, "tokens", period)
    assert close_call(open_call(lease), **end).tokens == tokens
    run_billing_sweeps(NOW)
    budget.refresh_from_db()
    assert (budget.spent, budgets.get_uncertainty(budget, NOW)) == (tokens, (0, 0, estimated))


def test_lost_call_counts_its_reservation(lease: Lease) -> None:
    budget, row, noted, usage = create_budget(10**6, "tokens"), open_call(lease), open_call(lease), TokenUsage()
    usage.add({"message": {"model": MODEL, "usage": {"input_tokens": 1897, "cache_read_input_tokens": 3, "output_tokens": 1}}})
    settlement.note_usage(noted, usage, THOUSAND)
    assert call_admission.sum_spent_now(budget, now=NOW) == 1000 + 1900 + 600
    assert settlement.close_abandoned(now=NOW + HOUR) == 2
    assert {*LlmCall.objects.values_list("pk", "tokens")} == {(row.pk, 1000), (noted.pk, 2500)}
    run_billing_sweeps(NOW + HOUR)
    budget.refresh_from_db()
    assert (budget.spent, budget.estimated_tokens) == (3500, 1000 + 2500 - 1901)


def test_token_counts_and_refused_calls_count_nothing(lease: Lease) -> None:
    budget = create_budget(1000, "tokens")
    close_call(open_call(lease))
    assert get_refusal(lease).code == "budget_exhausted"
    row = open_call(lease, TokenEstimate(10**6, 0), path=COUNT_TOKENS_PATH)
    assert row.reserved_tokens == 0 and close_call(row, None, is_free=True).tokens == 0
    assert call_admission.sum_spent_now(budget, now=NOW) == 1000


def test_budget_for_a_model_in_tokens_counts_its_calls_alone(lease: Lease) -> None:
    budget = create_budget(1500, "tokens", scope="agent", subject=ADA, model="claude-opus*")
    close_call(open_call(lease, model="claude-opus-4")), close_call(open_call(lease))
    assert get_refusal(lease, model="claude-opus-4").details["unit"] == "tokens"
    assert open_call(lease)
    run_billing_sweeps(NOW)
    budget.refresh_from_db()
    assert budget.spent == 1000


def test_exhausted_budget_in_tokens_refuses_no_start_and_ends_no_lease(lease: Lease, grant: AnyCallable) -> None:
    budget = create_budget(1000, "tokens", grace=timedelta(0))
    close_call(open_call(lease))
    metering.meter_usage(now=NOW)
    assert budgets.update_spending(budget.pk, now=NOW) == ["warned", "exhausted"]
    later = NOW + 10 * MINUTE
    assert not budget_enforcement.find_leases_over_budget(now=later) and not budgets.find_exhausted(now=later)
    run_billing_sweeps(later)
    run_command(lease, "true", now=later)
    run_command(grant(BOB, "game-2", now=later), "true", now=later)
    assert get_refusal(lease, now=later).code == "budget_exhausted"


def test_top_up_admits_calls_until_the_period_ends(lease: Lease) -> None:
    budget = create_budget(1000, "tokens")
    close_call(open_call(lease)), get_refusal(lease)
    with pytest.raises(ValidationError, match="whole number"):
        budgets.top_up(budget.pk, Decimal("0.5"), actor=console_user(), now=NOW)
    budgets.top_up(budget.pk, Decimal(1000), actor=console_user(), now=NOW)
    assert open_call(lease) and get_refusal(lease, TokenEstimate(1, 0))


@pytest.mark.parametrize("amount", ["0.5", "1000000000000", "NaN", "0"])
def test_invalid_amount_is_refused(amount: str) -> None:
    with pytest.raises(ValidationError) as caught:
        create_budget(Decimal(amount), "tokens")
    assert "amount" in caught.value.message_dict and not Budget.objects.exists()


def test_usage_of_an_earlier_version_counts_as_reported_and_billions_fit(lease: Lease) -> None:
    budget = create_budget(999_999_999_999, "tokens", "week")
    day = NOW.date() - timedelta(days=1)
    for number in range(7):
        UsageRecord.objects.create(
            item="tokens", source=f"calls {number}", day=day, began_at=NOW, ended_at=NOW, agent_did=ADA,
            holder=lease.pk, model=f"m{number}", calls=1, input_tokens=10**10, cached_tokens=10**9, output_tokens=10**9,
        )  # fmt: skip
    run_billing_sweeps(NOW)
    budget.refresh_from_db()
    assert budget.spent == 77 * 10**9
    assert call_admission.sum_spent_now(budget, now=NOW) == 77 * 10**9
    [(tab, amount)] = budgets.find_top_spenders(budget, now=NOW, limit=5)
    assert (tab.holder, amount) == (lease.pk, 77 * 10**9)
    assert forecast_budget(budget, NOW).at_end == 77 * 10**9 * 3  # NOW is a Saturday; a day with usage, today and Sunday
    budgets.update_spending(budget.pk, now=NOW + timedelta(days=1))
    budget.refresh_from_db()
    assert budget.calls_before == 77 * 10**9
