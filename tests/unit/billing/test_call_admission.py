"""Limits on model calls: a call is admitted only if its estimate fits, and settled at its price and tokens at once."""

import random
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from billing import budgets, costs, derivation, metering
from billing.budgets import call_admission
from billing.models import Budget, UsageRecord
from leases.models import Lease
from sandboxes.call_limits import CallLimits
from sandboxes.egress import settlement
from sandboxes.egress.estimates import TokenEstimate
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import LlmCall, Sandbox
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.actors import console_user
from tests.support.billing import ADA, BOB, HOUR, create_budget, join_account, run_billing_sweeps, run_command
from tests.support.model_calls import MODEL, THOUSAND, close_call, open_call
from tests.support.model_rates import create_rates
from tests.support.search import budget as search_budget
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("budgets: sums and locks"),
]
AnyCallable = Callable[..., Any]
CENT = Decimal("0.01")
SEEDS = search_budget(fast=1, full=8)
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC)


@pytest.fixture(autouse=True)
def upstream(settings: Any) -> None:
    settings.LLM_URL, settings.LLM_MODELS = "http://127.0.0.1:9", ["*"]  # never called


@pytest.fixture
def lease(grant: AnyCallable, memory: Any) -> Lease:
    create_rates(MODEL, input=10, output=10)
    return start(grant)


def start(grant: AnyCallable, agent: str = ADA, environment: str = "game-1", **request: Any) -> Lease:
    lease: Lease = grant(agent, environment, ttl=20 * HOUR, sleep_after=20 * HOUR, **request)
    run_command(lease, "true", now=NOW)
    return lease


def limit_spending(lease: Lease, usd: str | None = None, tokens: int | None = None) -> None:
    limits = CallLimits(None if usd is None else Decimal(usd), tokens)
    Sandbox.objects.filter(holder=lease.pk).update(**limits.columns)


def get_refusal(lease: Lease, *arguments: Any, **fields: Any) -> CallRefused:
    with pytest.raises(CallRefused) as caught:
        open_call(lease, *arguments, **fields)
    assert LlmCall.objects.filter(outcome="refused").latest("pk").code == caught.value.code
    return caught.value


# --- limits of a lease ------------------------------------------------------------------------------------------------


def test_spend_limit_counts_each_call_at_its_rate_when_it_ends(lease: Lease) -> None:
    limit_spending(lease, "0.03")
    for _ in range(3):
        row = close_call(open_call(lease))
        assert (row.cost, row.priced) == (CENT, "rate")
    refusal = get_refusal(lease)
    assert (refusal.status, refusal.code) == (402, "spend_limit_reached")
    assert "limit of 0.03 USD" in refusal.message


def test_spend_limit_counts_calls_in_flight_with_their_estimate(lease: Lease) -> None:
    limit_spending(lease, "0.03")
    first, second = open_call(lease), open_call(lease)
    assert first.reserved == second.reserved == CENT
    assert "0.01 of the lease's limit of 0.03 USD are left" in get_refusal(lease, TokenEstimate(400, 601)).message
    close_call(first, 100)  # cheaper than estimated
    assert open_call(lease, TokenEstimate(400, 601)).reserved == Decimal("0.01001")


def test_model_without_a_rate_is_refused_under_a_spend_limit(lease: Lease) -> None:
    assert open_call(lease, model="unknown").reserved is None
    limit_spending(lease, "5")
    refusal = get_refusal(lease, model="unknown")
    assert (refusal.status, refusal.code) == (402, "model_not_priced")
    assert "manage.py rate add --model unknown" in refusal.message
    assert open_call(lease).reserved == CENT


def test_free_requests_pass_a_reached_limit(lease: Lease) -> None:
    limit_spending(lease, "0.01")
    close_call(open_call(lease))
    row = open_call(lease, TokenEstimate(10**6, 0), path="/v1/messages/count_tokens")
    assert row.reserved == 0


def test_token_limit_counts_each_call_when_it_ends_also_without_a_price(lease: Lease) -> None:
    limit_spending(lease, tokens=2700)
    for model, reported, tokens in ((MODEL, 900, 900), ("unknown", 800, 800), (MODEL, None, 400)):
        row = close_call(open_call(lease, model=model), reported)
        assert (row.reserved_tokens, row.tokens) == (1000, tokens)  # without a report, the estimate of the input
    refusal = get_refusal(lease, TokenEstimate(600, 1))
    assert (refusal.status, refusal.code) == (402, "token_limit_reached")
    assert refusal.details == {"limit_tokens": "2700", "spent_tokens": "2100", "call_tokens": "601"}
    assert "use 601 tokens, and 600 of the lease's limit of 2700 tokens are left" in refusal.message
    close_call(open_call(lease, TokenEstimate(600, 0)), 600)
    assert get_refusal(lease, TokenEstimate(1, 0)).message == "This lease has reached its limit of 2700 tokens for model calls."


def test_token_limit_counts_calls_in_flight_and_metered_ones_once(lease: Lease) -> None:
    limit_spending(lease, tokens=3000)
    close_call(open_call(lease), 900)
    metering.meter_usage(now=NOW)
    assert budgets.sum_lease_calls(lease.pk, "tokens") == 900
    first = open_call(lease)
    get_refusal(lease, TokenEstimate(600, 501))
    close_call(first, 500)  # fewer than estimated
    assert open_call(lease, TokenEstimate(1000, 600)).reserved_tokens == 1600
    assert budgets.sum_lease_calls(lease.pk, "tokens") == 3000


def test_requests_without_tokens_pass_a_reached_token_limit(lease: Lease) -> None:
    limit_spending(lease, tokens=0)
    get_refusal(lease)
    assert open_call(lease, TokenEstimate(10**6, 0), path="/v1/messages/count_tokens").reserved_tokens == 0


@pytest.mark.parametrize(
    ("usd", "tokens", "code"),
    [("0.02", 2500, "spend_limit_reached"), ("0.03", 2000, "token_limit_reached"), ("0.02", 2000, "spend_limit_reached")],
)
def test_both_limits_of_a_lease_hold(lease: Lease, usd: str, tokens: int, code: str) -> None:
    limit_spending(lease, usd, tokens)
    open_call(lease), open_call(lease)
    assert get_refusal(lease).code == code


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("limits", "unit", "amount", "each"), [({"usd": "0.02"}, "usd", "0.07", CENT), ({"tokens": 2000}, "tokens", "7000", 1000)]
)
def test_concurrent_calls_do_not_exceed_a_limit(
    grant: AnyCallable, memory: Any, limits: dict[str, Any], unit: str, amount: str, each: Any
) -> None:
    """Fifty clients of four leases share a budget for seven calls, and one of the leases has a limit of two."""
    create_rates(MODEL, input=10, output=10)
    leases = [start(grant, environment=f"e{number}") for number in range(4)]
    limit_spending(leases[0], **limits)
    budget = create_budget(amount, unit)

    with run_in_threads(50) as run:
        results = run(lambda number: open_call(leases[number % 4]))
    admitted = [row for row in results if isinstance(row, LlmCall)]
    assert {type(result) for result in results} == {LlmCall, CallRefused}
    assert len(admitted) == 7 and sum(row.holder == leases[0].pk for row in admitted) <= 2
    for row in admitted:
        close_call(row)
    assert call_admission.sum_spent_now(budget, now=NOW) == 7 * each
    assert isinstance(run_one(leases[1]), CallRefused)


def run_one(lease: Lease) -> Any:
    with run_in_threads(1) as run:
        return run(lambda _: open_call(lease))[0]


# --- budgets ----------------------------------------------------------------------------------------------------------


SCOPES = {
    "all": {}, "agent": {"subject": ADA}, "environment_type": {"subject": "catan"}, "account": {"subject": "crew"},
    "project": {"subject": "default"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("scope", "period"), [*((scope, "day") for scope in SCOPES), *(("agent", period) for period in ("hour", "month", "ever"))]
)
def test_hard_budget_stops_calls_of_all_leases_in_scope(lease: Lease, grant: AnyCallable, scope: str, period: str) -> None:
    join_account("crew")
    other = start(grant, environment="game-2")
    budget = create_budget("0.05", "usd", period, scope=scope, **SCOPES[scope])
    rows = [open_call(each) for each in (lease, other, lease)]
    for row in rows[:2]:
        close_call(row)
    metering.meter_usage(now=NOW)  # calls in every stage: open, ended, metered, priced
    costs.price_usage(now=NOW)
    rows += [close_call(open_call(other)), open_call(lease)]
    assert call_admission.sum_spent_now(budget, now=NOW) == 5 * CENT
    refusal = get_refusal(other)
    assert (refusal.status, refusal.code) == (402, "budget_exhausted")
    assert ("0.05 spent" in refusal.message) == (scope == "agent")  # others would disclose the spending of other agents


@pytest.mark.parametrize(
    "fields", [{"hard": False}, {"active": False}, {"unit": "hours"}, {"scope": "agent", "subject": BOB}], ids=str
)
def test_other_budgets_admit_calls_of_any_price(lease: Lease, fields: dict[str, Any]) -> None:
    create_budget(**{"amount": "0.001", "unit": "usd"} | fields)
    assert open_call(lease).reserved == CENT


def test_model_without_a_rate_is_refused_under_a_hard_budget(lease: Lease) -> None:
    create_budget(100, "usd")
    assert get_refusal(lease, model="unknown").code == "model_not_priced"


def test_removed_budget_admits_calls_at_once(lease: Lease) -> None:
    budget = create_budget("0.01", "usd", grace=timedelta(0))
    close_call(open_call(lease))
    metering.meter_usage(now=NOW)
    costs.price_usage(now=NOW)
    budgets.update_spending(budget.pk, now=NOW)
    budgets.update_call_blocks(now=NOW)
    assert get_refusal(lease, now=NOW + MINUTE).code == "budget_exhausted"
    removed = [budgets.remove_budget(budget.pk, actor=console_user(), now=NOW + MINUTE) for _ in range(2)]
    assert removed == [True, False]
    assert open_call(lease, now=NOW + MINUTE)


def test_next_period_admits_calls_before_the_next_update(lease: Lease) -> None:
    budget = create_budget("0.01", "usd")
    close_call(open_call(lease))
    assert get_refusal(lease).code == "budget_exhausted"
    late = open_call(lease, now=MIDNIGHT)
    assert call_admission.sum_spent_now(budget, now=MIDNIGHT) == CENT == late.reserved


@pytest.mark.parametrize(
    ("scope", "subject", "period"),
    [
        ("agent", ADA, "hour"), ("agent", ADA, "day"), ("account", "team", "month"), ("account", "house", "month"),
        ("all", "", "ever"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(SEEDS))
def test_sum_is_exact_after_every_step_of_a_random_history(
    lease: Lease, grant: AnyCallable, scope: str, subject: str, period: str, seed: int
) -> None:
    """Calls begin, end, change their price and get lost while sweeps meter, price, update and derive again.

    At midnight one agent moves to another account. The other agent belongs to the house account."""
    rng, now = random.Random(f"{scope} {subject} {period} {seed}"), MIDNIGHT - 3 * HOUR
    leases = [lease, start(grant, BOB, "game-2")]
    join_account("crew", "2026-11-01")
    join_account("team", f"{MIDNIGHT:%Y-%m-%d}")
    budget, in_tokens = (create_budget(10**6, unit, period, scope=scope, subject=subject) for unit in ("usd", "tokens"))

    def is_in_scope(row: LlmCall) -> bool:
        account = "house" if row.agent_did == BOB else "crew" if row.started_at < MIDNIGHT else "team"
        return {"all": True, "agent": row.agent_did == subject, "account": account == subject}[scope]

    rows: list[LlmCall] = []
    sweeps: dict[str, Callable[[], object]] = {
        "meter": lambda: metering.meter_usage(now=now),
        "price": lambda: costs.price_usage(now=now),
        "update": lambda: [budgets.update_spending(each.pk, now=now) for each in (budget, in_tokens)],
        "all": lambda: run_billing_sweeps(now),
        "again": lambda: derive_again(now),
        "lost": lambda: settlement.close_abandoned(now=now),
    }
    for _ in range(40):
        step = rng.choice(["open", "open", "close", "close", "record", "older", "wait", *sweeps])
        if step == "open":
            rows.append(open_call(rng.choice(leases), TokenEstimate(rng.randrange(1000), rng.randrange(1000)), now=now))
        elif step == "close" and rows:
            close_call(rng.choice(rows), rng.choice([None, rng.randrange(3000)]), now=now)
        elif step == "record" and rows:  # a better price and better counts arrive from the upstream's records
            changed = LlmCall.objects.filter(pk=rng.choice(rows).pk, ended_at__isnull=False)
            usd, counts = Decimal(rng.randrange(10**6)).scaleb(-9), {"input_tokens": 10, "tokens": rng.randrange(10, 3000)}
            changed.update(cost=usd, priced="record", counted=False, **counts)
        elif step == "older" and rows:  # as if the version before had admitted and ended the call
            older = LlmCall.objects.filter(pk=rng.choice(rows).pk, ended_at__isnull=False, metered_tokens=None)
            older.filter(input_tokens__isnull=False).update(tokens=None, reserved_tokens=None)
        elif step == "wait":
            now += timedelta(minutes=rng.choice([1, 20, 90]))
        elif step in sweeps:
            sweeps[step]()
        if now >= MIDNIGHT + 24 * HOUR:  # changes of the day before yesterday are part of the sum after the next update
            sweeps["update"]()
        began, _ = budgets.compute_period_bounds(period, now)
        counted = LlmCall.objects.filter(started_at__gte=began).exclude(outcome="refused")
        expected = [row for row in counted if is_in_scope(row)]
        budget.refresh_from_db(), in_tokens.refresh_from_db()
        spent, others = call_admission.sum_spent_now(budget, now=now), budget.spent - budget.calls_spent
        assert spent - others == sum((get_usd(row) for row in expected), Decimal(0)), step
        assert call_admission.sum_spent_now(in_tokens, now=now) == sum(map(count_tokens, expected)), step
        lease_sum = LlmCall.objects.filter(holder=lease.pk).exclude(outcome="refused")
        assert budgets.sum_lease_calls(lease.pk) == sum((row.cost or row.reserved or 0 for row in lease_sum), Decimal(0)), step


def keep_sum(lease: Lease, **scope: str) -> Budget:
    """Return a budget with the kept sum of one metered call, beside a call that is open."""
    budget = create_budget(100, "usd", **scope)
    close_call(open_call(lease))
    run_billing_sweeps(NOW)
    open_call(lease)
    budget.refresh_from_db()
    newest = UsageRecord.objects.filter(item="tokens").latest("pk")
    assert (budget.calls_metered, budget.calls_metered_mark) == (10**7, newest.pk)
    return budget


def test_metered_calls_are_not_summed_again_until_their_usage_changes(lease: Lease) -> None:
    budget = keep_sum(lease)
    UsageRecord.objects.filter(item="tokens").update(usd=100)  # no pass of metering changes a record in place
    assert call_admission.sum_spent_now(budget, now=NOW) == 2 * CENT
    close_call(open_call(lease))
    metering.meter_usage(now=NOW)
    assert call_admission.sum_spent_now(budget, now=NOW) == 3 * CENT


def test_calls_of_an_agent_leave_the_kept_sum_with_its_membership(lease: Lease) -> None:
    membership = join_account("crew")
    budget = keep_sum(lease, scope="account", subject="crew")
    membership.delete()
    budget.refresh_from_db()
    assert call_admission.sum_spent_now(budget, now=NOW) == 0


def test_calls_of_an_earlier_day_are_not_kept_twice(lease: Lease) -> None:
    budget = keep_sum(lease, period="month")
    for later, before in ((MIDNIGHT, 0), (MIDNIGHT + 24 * HOUR, CENT)):
        budgets.update_spending(budget.pk, now=later)
        budget.refresh_from_db()
        assert (budget.calls_day, budget.calls_before) == ((later - 24 * HOUR).date(), before)
        assert call_admission.sum_spent_now(budget, now=later) == 2 * CENT


def test_changed_budget_admits_by_its_own_sum_before_its_update(lease: Lease, at_checkpoint: AnyCallable) -> None:
    budget = keep_sum(lease)
    sums = list[Decimal]()

    def sum_other_calls() -> None:
        changed = Budget.objects.get(pk=budget.pk)
        sums.append(call_admission.sum_spent_now(changed, now=NOW) - (changed.spent - changed.calls_spent))

    at_checkpoint("budget summed", sum_other_calls)
    budgets.change_budget(budget.pk, {"scope": "agent", "subject": BOB}, now=NOW)
    assert sums == [0]


def get_usd(row: LlmCall) -> Decimal:
    return (row.reserved if row.cost is None else row.cost) or Decimal(0)


def count_tokens(row: LlmCall) -> int:
    counts = (row.tokens, row.reserved_tokens, (row.input_tokens or 0) + (row.output_tokens or 0))
    return next(count for count in counts if count is not None)


def derive_again(now: datetime) -> None:
    derivation.reset_usage_and_costs()
    derivation.derive_usage_and_costs(now=now)


# --- unknown usage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "usd", "source"),
    [
        ({"tokens": None, "outcome": "cut"}, CENT, "estimate"),  # generated to the maximum
        ({"tokens": None, "outcome": "failed"}, CENT, "estimate"),
        ({"tokens": None, "outcome": "ok", "received_bytes": 300}, Decimal("0.005"), "estimate"),  # 400 + 300 / 3 tokens
        ({"tokens": None, "outcome": "failed", "is_free": True}, Decimal(0), "free"),
        ({"tokens": None, "outcome": "ok", "cost": Decimal("0.5")}, Decimal("0.5"), "upstream"),
    ],
    ids=str,
)
def test_call_with_unknown_usage_is_estimated(lease: Lease, end: dict[str, Any], usd: Decimal, source: str) -> None:
    row = close_call(open_call(lease), **end)
    assert (row.cost, row.priced) == (usd, source)


def test_lost_call_costs_its_estimate_and_frees_its_place_at_once(lease: Lease) -> None:
    row = open_call(lease)
    assert settlement.is_server_alive(row.server)
    assert settlement.close_calls_of_dead_servers(now=NOW) == 0
    assert settlement.close_calls_of_dead_servers(now=NOW, is_alive=lambda server: False) == 1
    row.refresh_from_db()
    assert (row.outcome, row.cost, row.priced, row.ended_at) == ("lost", CENT, "estimate", NOW)
    other = open_call(lease)
    LlmCall.objects.filter(pk=other.pk).update(server="elsewhere:1:2")
    assert settlement.close_calls_of_dead_servers(now=NOW, is_alive=lambda server: False) == 0
    assert settlement.close_abandoned(now=NOW + HOUR) == 1
    assert LlmCall.objects.get(pk=other.pk).cost == CENT


def test_process_with_a_reused_id_is_not_alive(lease: Lease) -> None:
    host, pid, _ = open_call(lease).server.rsplit(":", 2)
    assert not settlement.is_server_alive(f"{host}:{pid}:1")
    assert not settlement.is_server_alive(f"{host}:4194305:1")  # above the largest process id of Linux


def test_zombie_process_is_not_alive() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        stat = Path(f"/proc/{child.pid}/stat")
        server = f"host:{child.pid}:{stat.read_text().rpartition(')')[2].split()[19]}"
        assert settlement.is_server_alive(server)
        child.kill()
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the process has ended")
        assert not settlement.is_server_alive(server)


def test_usage_of_an_open_call_is_kept_and_replaces_its_reservation(lease: Lease) -> None:
    """A conversation that the upstream keeps can have much more input than its request shows."""
    limit_spending(lease, "0.03")
    row, usage = open_call(lease), TokenUsage()
    usage.add({"message": {"model": MODEL, "usage": {"input_tokens": 1897, "cache_read_input_tokens": 3, "output_tokens": 1}}})
    settlement.note_usage(row, usage, THOUSAND)
    assert get_refusal(lease).code == "spend_limit_reached"
    settlement.close_abandoned(now=NOW + HOUR)
    row.refresh_from_db()
    assert (row.outcome, row.input_tokens, row.cached_tokens, row.cost) == ("lost", 1900, 3, Decimal("0.025"))
    assert row.usage == {"input_tokens": 1897, "cache_read_input_tokens": 3, "output_tokens": 1}
