"""What a budget counts, whom it refuses and what it ends; by the verbs, with time given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing import budgets, costs, derivation, metering
from billing.errors import BudgetExhausted
from billing.models import Account, Budget, Membership, Tab, UsageRecord
from leases import budget_enforcement, execution, leasing, turns
from leases import fork as forking
from leases import sweeps as leases
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction, runs
from sandboxes import sweeps as below
from sandboxes.db import clock as moments
from sandboxes.lifecycle import CHECKPOINT_HOOKS
from sandboxes.models import Event, Run, Sandbox, Snapshot
from sandboxes.providers.base import Unavailable
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.billing import create_rate, create_time_usage, parse_day, parse_utc
from tests.unit.billing.test_metering import call

pytestmark = pytest.mark.django_db
Act = Callable[..., Any]
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC)
ADA, BOB = "did:plc:ada", "did:plc:bob"


def budget(amount: Any = 1, unit: str = "hours", period: str = "day", now: datetime = NOW, **fields: Any) -> Budget:
    made = Budget(scope="all", amount=Decimal(amount), unit=unit, period=period)
    for name, value in fields.items():
        setattr(made, name, value)
    budgets.save_budget(made, now=now)
    return made


def used(lease: Lease, *argv: str, now: datetime = NOW) -> bytes:
    return execution.exec_command(lease.pk, Command(argv=argv or ["true"], timeout=MINUTE), now=now)[1].stdout


def under_way(lease: Lease, *, now: datetime = NOW, timeout: timedelta = 10 * HOUR) -> Run:
    """A command that somebody else waits for."""
    box = execution.ensure_sandbox_ready(lease.pk, now=now)
    run = runs.open_run(box, Command(argv=["sleep"], timeout=timeout), now=now)
    assert run
    return run


def swept(now: datetime) -> dict[str, int]:
    """What a minute does about money."""
    metering.meter_usage(now=now)
    costs.price_usage(now=now)
    done = budget_enforcement.enforce_budgets(now=now)
    assert not done.failures
    return done.counts


def spent(made: Budget) -> Decimal:
    made.refresh_from_db()
    return round(made.spent, 3)


def said(kind: str = "") -> list[str]:
    events = Event.objects.filter(kind__startswith="budget.").order_by("at", "kind")
    return [event.kind.removeprefix("budget.") for event in events if kind in event.kind]


def ended(lease: Lease) -> tuple[str, str]:
    lease.refresh_from_db()
    return lease.status, lease.end_reason


@contextmanager
def refused(**says: Any) -> Iterator[Any]:
    with pytest.raises(BudgetExhausted) as caught:
        yield caught
    assert {name: caught.value.extra[name] for name in says} == says


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verb does takes no time: so hours are exact."""
    monkeypatch.setattr(moments, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def spend(grant: Act, memory: Any) -> Act:
    """A lease that has used an hour by NOW, and waits."""

    def make(agent: str = ADA, environment: str = "game-1", hours: float = 1, **ask: Any) -> Lease:
        began = NOW - hours * HOUR
        lease = grant(agent, environment, now=began, ttl=20 * HOUR, sleep_after=20 * HOUR, **ask)
        used(lease, "sh", "-c", "echo kept >f", now=began)
        return lease

    return make


# --- periods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "now", "began", "ends"),
    [
        ("day", "2026-11-21T12:00Z", "2026-11-21", "2026-11-22"),
        ("day", "2026-11-21T23:59:59.999999Z", "2026-11-21", "2026-11-22"),
        ("day", "2026-11-22T00:00Z", "2026-11-22", "2026-11-23"),
        ("day", "2026-11-22T00:30+01:00", "2026-11-21", "2026-11-22"),
        ("day", "2028-02-28T12:00Z", "2028-02-28", "2028-02-29"),
        ("day", "2027-02-28T12:00Z", "2027-02-28", "2027-03-01"),
        ("month", "2028-02-29T23:59Z", "2028-02-01", "2028-03-01"),
        ("month", "2026-12-31T23:59Z", "2026-12-01", "2027-01-01"),
        ("month", "2027-01-01T00:30+02:00", "2026-12-01", "2027-01-01"),
        ("month", "2027-01-31T00:00Z", "2027-01-01", "2027-02-01"),
        ("ever", "2026-11-21T12:00Z", "1970-01-01", None),
    ],
)
def test_periods_are_days_and_months_of_utc(period: str, now: str, began: str, ends: str | None) -> None:
    def at(text: str) -> datetime:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)

    assert budgets.get_period_bounds(period, datetime.fromisoformat(now)) == (at(began), at(ends) if ends else None)


def test_a_day_is_over_at_midnight_also_before_a_sweep_has_seen_it(spend: Act, grant: Act) -> None:
    lease, made = spend(), budget(1)
    swept(NOW)
    assert ended(lease) == ("expired", "budget")
    with refused(resets_at=MIDNIGHT, spent="1", limit="1", unit="hours"):
        grant(now=MIDNIGHT - timedelta(seconds=1))
    again = grant(now=MIDNIGHT)
    used(again, now=MIDNIGHT)
    assert swept(MIDNIGHT + MINUTE) == {"budgets open again": 1}
    assert spent(made) == Decimal("0.017")


def test_a_month_and_a_leap_day(grant: Act, memory: Any) -> None:
    began = datetime(2028, 2, 28, 22, tzinfo=UTC)
    lease = grant(now=began, sleep_after=DAY)
    used(lease, now=began)
    month, day = budget(100, period="month", now=began), budget(100, now=began)
    leap = datetime(2028, 2, 29, 1, tzinfo=UTC)
    swept(leap)
    assert (spent(month), spent(day)) == (3, 1)
    march = datetime(2028, 3, 1, 1, tzinfo=UTC)
    used(grant(environment="e2", now=march - 2 * HOUR, sleep_after=DAY), now=march - 2 * HOUR)
    leasing.release(lease.pk, now=leap)
    swept(march)
    assert (spent(month), spent(day)) == (1, 1)


def test_what_is_spent_for_ever_stays_so(spend: Act, grant: Act) -> None:
    spend(), budget(1, period="ever")
    swept(NOW)
    with refused(resets_at=None):
        grant(environment="e2", now=NOW + 400 * DAY)


# --- scopes -----------------------------------------------------------------------------------------------------------


def test_each_scope_counts_its_own_time(spend: Act, pool: Any) -> None:
    crew = Account.objects.create(name="crew")
    Membership.objects.create(agent_did=BOB, account=crew)
    for number, (agent, kind, key) in enumerate([(ADA, "catan", "7"), (ADA, "rpg", ""), (BOB, "rpg", "8"), (BOB, "catan", "")]):
        spend(agent, f"e{number}", hours=2**number, environment_type=kind, key_id=key)
    whose = {
        ("all", ""): 15, ("agent", ADA): 3, ("agent", BOB): 12, ("agent", "did:plc:eve"): 0, ("environment_type", "catan"): 9,
        ("environment_type", "rpg"): 6, ("key", "7"): 1, ("key", "8"): 4, ("key", "9"): 0, ("account", "crew"): 12,
        ("account", "house"): 3,
    }  # fmt: skip
    made = {key: budget(100, scope=key[0], subject=key[1]) for key in whose}
    swept(NOW)
    assert {key: round(spent(one)) for key, one in made.items()} == whose


def member(account: str, since: str = "", agent: str = ADA) -> Membership:
    found = Account.objects.get_or_create(name=account)[0]
    return Membership.objects.create(agent_did=agent, account=found, since=parse_day(since) if since else None)


@pytest.mark.parametrize("unit", ["hours", "usd"])
def test_what_an_agent_used_before_it_moved_stays_in_the_budget_of_its_account_then(unit: str) -> None:
    create_rate("time", "1")
    for when in ("2026-10-31", "2026-11-01", "2026-11-10", "2026-11-14", "2026-11-15", "2026-11-20"):
        create_time_usage(f"{when}T10:00", provider="acme")
    create_time_usage("2026-11-14T10:00", agent="", provider="acme")
    create_time_usage("2026-11-15T00:00", 8 * HOUR, BOB, provider="acme")
    member("crew", "2026-11-01"), member("lab", "2026-11-15"), member("crew", "2026-11-20")
    kinds = [(name, period) for name in ("house", "crew", "lab") for period in ("month", "ever")]
    made = {kind: budget(100, unit, kind[1], scope="account", subject=kind[0]) for kind in kinds}
    swept(NOW)
    assert {kind: spent(each) for kind, each in made.items()} == {
        ("house", "month"): 9, ("crew", "month"): 4, ("lab", "month"): 1,
        ("house", "ever"): 10, ("crew", "ever"): 4, ("lab", "ever"): 1,
    }  # fmt: skip
    crew = {
        when.day: all_
        for when, (all_, _) in budgets.sum_spending_by_day(made["crew", "month"], parse_utc("2026-11-01"), None).items()
    }
    assert crew == {1: 1, 10: 1, 14: 1, 20: 1}


def test_the_first_account_of_an_agent_has_all_that_it_used(spend: Act) -> None:
    spend()
    house, crew = budget(9, scope="account", subject="house"), budget(9, scope="account", subject="crew")
    swept(NOW)
    assert (spent(house), spent(crew)) == (1, 0)
    member("crew")
    swept(NOW)
    assert (spent(house), spent(crew)) == (0, 1)


def test_a_budget_refuses_and_ends_the_leases_of_who_belongs_to_its_account_today(spend: Act, grant: Act) -> None:
    """Ada moves to the lab tomorrow. Until then the crew's budget is hers, though it is spent by Bob alone."""
    lease, other = spend(), spend(BOB, "e2")
    member("crew", agent=BOB), member("crew"), member("lab", "2026-11-22")
    crew = budget(2, scope="account", subject="crew", period="ever")
    lab = budget(3, scope="account", subject="lab", period="ever", grace=HOUR)
    late = MIDNIGHT - timedelta(microseconds=1)

    def held() -> list[list[Any]]:
        each = [lease, other]
        return [
            [one for one in each if one.pk in budget_enforcement.find_leases_over_budget(now=when)] for when in (late, MIDNIGHT)
        ]

    metering.meter_usage(now=NOW)
    assert budgets.update_spending(crew.pk, now=NOW) == ["warned of", "spent"]
    assert held() == [[lease, other], [other]]
    with refused(limit="2"):
        grant(environment="e3", now=late)
    with refused(limit="2"):
        budgets.require_budget(lease.pk, now=late)
    budgets.require_budget(lease.pk, now=MIDNIGHT)
    grant(environment="e3", now=MIDNIGHT)
    with refused(limit="2"):
        grant(BOB, "e4", now=MIDNIGHT)
    assert [tab.holder for tab, _ in budgets.find_top_spenders(crew, now=MIDNIGHT, most=9)] == [other.pk]
    assert {tab.holder for tab, _ in budgets.find_top_spenders(lab, now=MIDNIGHT, most=9)} >= {lease.pk}


def test_what_a_lease_spent_in_a_budget_is_what_its_account_paid(spend: Act) -> None:
    lease = spend(hours=3)
    call(lease, cost=Decimal("0.25"))
    member("crew"), member("lab", "2026-11-22")
    metering.meter_usage(now=MIDNIGHT + 2 * HOUR)
    costs.price_usage(now=MIDNIGHT + 2 * HOUR)
    found = {}
    for account in ("crew", "lab"):
        for unit in ("hours", "usd"):
            made = budget(100, unit, "ever", scope="account", subject=account, now=MIDNIGHT + 2 * HOUR)
            spenders = budgets.find_top_spenders(made, now=MIDNIGHT + 2 * HOUR, most=9)
            found[account, unit] = made.spent, [(tab.holder, amount) for tab, amount in spenders]
    assert found == {
        ("crew", "hours"): (15, []), ("crew", "usd"): (Decimal("0.25"), []),
        ("lab", "hours"): (2, [(lease.pk, 2)]), ("lab", "usd"): (0, [(lease.pk, 0)]),
    }  # fmt: skip


def test_whoever_left_counts_for_the_house(spend: Act) -> None:
    lease = spend()
    member("crew"), member("house", "2026-11-21")
    house, crew = budget(9, scope="account", subject="house"), budget(9, scope="account", subject="crew")
    swept(NOW)
    assert (spent(house), spent(crew)) == (1, 0)
    assert [budgets.find_open_tabs(each, now=NOW).count() for each in (house, crew)] == [1, 0]
    assert [budgets.find_open_tabs(each, now=NOW - DAY).count() for each in (house, crew)] == [0, 1]
    assert budgets.find_open_tabs(house, now=NOW).get().holder == lease.pk


def test_usd_are_those_of_the_costs(grant: Act) -> None:
    lease = grant()
    call(lease, cost=Decimal("1.250000001"))
    call(grant("did:plc:bob", "e2"), cost=Decimal("0.5"))
    every, ada = budget("1.76", "usd", "month"), budget("1.25", "usd", "ever", scope="agent", subject=ADA)
    swept(NOW)
    assert (spent(every), ada.spent) == (Decimal("1.750"), 0)
    ada.refresh_from_db()
    assert (ada.spent, ada.exhausted_at) == (Decimal("1.250000001"), NOW)
    with refused(spent="1.250000001", limit="1.25", unit="usd"):
        grant(environment="e3")
    assert ended(lease)[0] == "expired"
    with refused(limit="1.76"):  # bob's lease and this one keep a cent each
        grant("did:plc:bob", "e3")


def test_what_lasts_costs_no_hours_while_it_sleeps_or_starts(grant: Act, memory: Any) -> None:
    lease = grant(now=NOW - 3 * HOUR, ttl=20 * HOUR, sleep_after=HOUR)
    used(lease, now=NOW - 3 * HOUR)
    below.evict_idle(now=NOW - 2 * HOUR)
    made = budget(9)
    swept(NOW)
    assert spent(made) == 1


# --- admission --------------------------------------------------------------------------------------------------------


def test_a_grant_keeps_its_minimum_until_its_lease_ends(grant: Act, settings: Any) -> None:
    settings.MINIMUM_TIME = 6 * MINUTE
    budget(1)
    held = [grant(environment=f"e{number}") for number in range(10)]
    with refused(spent="0", limit="1") as caught:
        grant(environment="e10")
    assert "active leases keep 1 more" in str(caught.value)
    assert not Lease.objects.filter(environment_id="e10").exists()
    leasing.release(held[0].pk, now=NOW)
    grant(environment="e10")
    assert Tab.objects.filter(closed_at=NOW).get().holder == held[0].pk
    assert Tab.objects.filter(closed_at__isnull=True).count() == 10


def test_what_is_held_is_never_refused(spend: Act, grant: Act) -> None:
    lease = spend()
    budget("0.5", grace=HOUR)
    under_way(lease)
    swept(NOW)
    assert grant() == lease


def test_one_whose_time_is_over_does_not_stand_in_the_way_of_the_next(grant: Act, settings: Any) -> None:
    settings.MINIMUM_TIME = HOUR
    budget(1)
    old = grant(ttl=MINUTE)
    with refused():
        grant(environment="e2", now=NOW + HOUR)
    new = grant(now=NOW + HOUR)
    assert (new != old, Tab.objects.get(holder=old.pk).closed_at) == (True, NOW + HOUR)


def test_a_refusal_leaves_nothing(grant: Act) -> None:
    budget("0.001")
    with refused():
        grant()
    assert not Lease.objects.exists() and not Tab.objects.exists() and not Sandbox.objects.exists()


def test_the_strictest_budget_is_named_and_nobody_else(spend: Act, grant: Act) -> None:
    spend(BOB)
    budget(1), budget(1, period="month"), budget(1, period="ever", scope="agent", subject=BOB), budget(1, hard=False)
    swept(NOW)
    with refused(resets_at=datetime(2026, 12, 1, tzinfo=UTC)) as caught:
        grant(ADA, "e2")
    assert str(caught.value) == (
        "There is a budget of 1 hours a month for everything: 1 are spent. It begins anew at 2026-12-01 00:00 UTC."
    )


def test_a_budget_of_others_refuses_nobody(spend: Act, grant: Act) -> None:
    spend(BOB)
    for scope, subject in [("agent", BOB), ("key", "3"), ("environment_type", "rpg"), ("account", "crew")]:
        budget("0.001", scope=scope, subject=subject)
    swept(NOW)
    grant(ADA, key_id="4")
    for field in ({"key_id": "3"}, {"environment_type": "rpg"}, {"agent": BOB}):
        with refused():
            grant(**{"agent": ADA, "environment": "e2"} | field)


def test_a_soft_budget_only_warns(spend: Act, grant: Act) -> None:
    lease, made = spend(), budget("0.5", hard=False)
    assert swept(NOW) == {"budgets warned of": 1, "budgets spent": 1}
    assert (ended(lease)[0], said()) == ("active", ["exhausted", "warning"])
    used(lease), grant(environment="e2")
    swept(NOW + HOUR)
    assert (ended(lease)[0], spent(made)) == ("active", 2)


@contextmanager
def statements() -> Iterator[list[str]]:
    told: list[str] = []
    with CaptureQueriesContext(
        connection,
    ) as caught:
        yield told
    told += [query["sql"] for query in caught if "billing_" in query["sql"]]


def test_without_budgets_a_grant_asks_once_and_writes_its_tab_and_a_renewal_does_neither(spend: Act, grant: Act) -> None:
    lease = spend()
    with statements() as asked:
        grant(environment="e2")
    assert [("billing_budget" in one, one[:6]) for one in asked] == [(True, "SELECT"), (False, "INSERT")]
    with statements() as asked:
        used(lease)
    assert len(asked) == 1 and "LIMIT 1" in asked[0]
    with statements() as asked:
        leasing.renew(lease, now=NOW)
        grant()
    assert asked == []
    with statements() as asked:
        leasing.release(lease.pk, now=NOW)
    assert [one[:6] for one in asked] == ["UPDATE"]


# --- what is refused while it is spent --------------------------------------------------------------------------------


@pytest.fixture
def over(spend: Act) -> Lease:
    """A lease whose budget is spent, within its grace: something runs."""
    lease: Lease = spend()
    budget(1, grace=HOUR, scope="agent", subject=ADA)
    under_way(lease)
    assert swept(NOW)["sandboxes in grace period"] == 1
    return lease


def test_what_would_run_is_refused_and_a_number_stays_free(over: Lease, grant: Act) -> None:
    with refused(spent="1", limit="1", unit="hours", resets_at=MIDNIGHT) as caught:
        used(over)
    assert str(caught.value).startswith(f"There is a budget of 1 hours a day for agent {ADA}: 1 are spent. It begins anew at ")
    with refused():
        turns.take_turn(over.pk, 1, {}, now=NOW)
    with refused():
        execution.ensure_sandbox_ready(over.pk, now=NOW)
    assert over.turns.count() == 0
    leasing.renew(over, now=NOW)
    used(grant(BOB, "e2"))


def test_files_are_written_where_something_runs_and_start_nothing(over: Lease, at_checkpoint: Act) -> None:
    file = Command(argv=["write"], timeout=MINUTE, kind="file")
    execution.call_in_sandbox(over.pk, file, lambda provider, box: provider.write_file(box.ref, "/workspace/g", b"1"), now=NOW)
    box = Sandbox.objects.get()
    runs.close_run(Run.objects.get(ended_at=None), now=NOW, outcome=runs.RunOutcome.OK)
    eviction.evict(box.pk, now=NOW, reason="idle")
    with refused():
        execution.call_in_sandbox(over.pk, file, lambda provider, box: None, now=NOW)
    box.refresh_from_db()
    assert box.state == "cold"


def test_files_are_not_touched_where_something_runs_once_the_grace_is_over(over: Lease, at_checkpoint: Act) -> None:
    touched: list[datetime] = []

    def look(now: datetime) -> None:
        file = Command(argv=["read"], timeout=MINUTE, kind="file")
        execution.call_in_sandbox(over.pk, file, lambda provider, box: touched.append(now), now=now)

    def rival() -> None:
        with refused():
            look(NOW + HOUR)

    look(NOW + HOUR - MINUTE)
    at_checkpoint("budget stopped", rival)
    assert swept(NOW + HOUR) == {"leases ended": 1}
    assert touched == [NOW + HOUR - MINUTE]


def test_raised_it_is_open_again_at_once(over: Lease) -> None:
    made = Budget.objects.get()
    made.amount = Decimal(2)
    budgets.save_budget(made, now=NOW)
    assert (made.exhausted_at, made.exhausted_for, made.spent) == (None, None, 1)
    used(over)
    assert said() == ["exhausted", "warning"]
    assert swept(NOW + HOUR)["budgets spent"] == 1  # of the new amount: that is another fact
    assert said() == ["exhausted", "warning"] * 2


def test_raised_by_other_means_it_refuses_nothing_either(over: Lease) -> None:
    Budget.objects.update(amount=2)
    used(over)
    assert swept(NOW) == {"budgets open again": 1}


def test_what_was_counted_too_much_opens_it_again(over: Lease) -> None:
    UsageRecord.objects.all().delete()
    made = Budget.objects.get()
    assert budgets.update_spending(made.pk, now=NOW) == ["open again"]
    used(over)
    metering.reset_usage()
    assert swept(NOW)["budgets spent"] == 1
    assert said() == ["exhausted", "warning"]  # once in a period


def test_what_is_derived_anew_opens_nothing_before_all_of_it_is_there(over: Lease) -> None:
    made = Budget.objects.get()
    derivation.reset_usage_and_costs()
    assert budgets.update_spending(made.pk, now=NOW) == []
    with refused(spent="1", limit="1"):
        used(over)
    metering.meter_usage(now=NOW)
    assert budgets.update_spending(made.pk, now=NOW) == []
    derivation.derive_usage_and_costs(now=NOW)
    assert (budgets.update_spending(made.pk, now=NOW), spent(made)) == ([], 1)
    assert not derivation.is_rebuilding()


def test_what_is_thrown_away_while_it_is_summed_counts_when_it_is_there_again(over: Lease, at_checkpoint: Act) -> None:
    made = Budget.objects.get()
    UsageRecord.objects.all().delete()  # it would be open again by that
    at_checkpoint("budget summed", derivation.reset_usage_and_costs)
    assert (budgets.update_spending(made.pk, now=NOW), spent(made)) == ([], 1)


def test_what_is_thrown_away_while_it_is_derived_is_not_all_there(over: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    def price(*, now: datetime, price: Act = costs.price_usage) -> Any:
        done = price(now=now)
        derivation.reset_usage_and_costs()
        return done

    derivation.reset_usage_and_costs()
    with monkeypatch.context() as patched:
        patched.setattr(costs, "price_usage", price)
        derivation.derive_usage_and_costs(now=NOW)
    assert derivation.is_rebuilding()
    derivation.derive_usage_and_costs(now=NOW)
    assert not derivation.is_rebuilding()


def test_lowered_below_what_is_spent_it_refuses_and_ends(spend: Act, grant: Act) -> None:
    lease, made = spend(), budget(9)
    swept(NOW)
    Budget.objects.update(amount=Decimal("0.5"))
    with refused(spent="1", limit="0.5"):
        grant(environment="e2")
    assert swept(NOW)["leases ended"] == 1
    assert (ended(lease), spent(made)) == (("expired", "budget"), 1)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_warned_and_spent_once_in_a_period(grant: Act, memory: Any) -> None:
    lease = grant(now=NOW, ttl=23 * HOUR, sleep_after=DAY)
    used(lease)
    made = budget(1, grace=5 * DAY)
    under_way(lease, timeout=9 * DAY)
    marks = {}
    for minute in range(0, 70, 6):
        swept(NOW + minute * MINUTE)
        marks[minute] = len(said())
    assert [minute for minute in marks if marks[minute] > marks.get(minute - 6, 0)] == [48, 60]
    first = Event.objects.get(kind="budget.exhausted").payload
    assert (first["budget"], first["spent"], first["amount"], first["resets_at"]) == (made.pk, "1", "1", "2026-11-22T00:00:00Z")
    swept(MIDNIGHT + 50 * MINUTE), swept(MIDNIGHT + HOUR)
    assert said() == ["warning", "exhausted", "warning", "exhausted"]


@pytest.mark.parametrize("becomes", [{"subject": BOB}, {"scope": "all", "subject": ""}, {"period": "month"}])
def test_a_budget_that_becomes_one_for_others_says_so_of_them(becomes: dict[str, str]) -> None:
    now = datetime(2026, 11, 1, 12, tzinfo=UTC)  # the first day of a month
    create_time_usage(now - HOUR, agent=ADA), create_time_usage(now - HOUR, agent=BOB)
    made = budget(1, scope="agent", subject=ADA, now=now)
    for name, value in becomes.items():
        setattr(made, name, value)
    budgets.save_budget(made, now=now + MINUTE), budgets.save_budget(made, now=now + 2 * MINUTE)
    of = Event.objects.filter(kind="budget.exhausted").order_by("at")
    names = ["subject", "period", "scope"]
    was = {"subject": ADA, "period": "day", "scope": "agent"}
    assert [{name: each.payload[name] for name in names} for each in of] == [was, was | becomes]


def test_a_sum_that_comes_late_does_not_open_what_is_spent(spend: Act, at_checkpoint: Act) -> None:
    spend()
    made = budget(1, period="ever")

    def rival() -> None:
        metering.meter_usage(now=NOW)
        assert budgets.update_spending(made.pk, now=NOW + MINUTE) == ["warned of", "spent"]

    at_checkpoint("budget summed", rival)
    assert budgets.update_spending(made.pk, now=NOW) == []
    made.refresh_from_db()
    assert (made.spent, made.exhausted_at) == (1, NOW + MINUTE)


# --- leases that are ended --------------------------------------------------------------------------------------------


def readable(lease: Lease) -> bytes:
    """What a fork of an ended lease finds, once there is room again."""
    Budget.objects.update(amount=100)
    lease.refresh_from_db()
    ask = leasing.LeaseRequest(ADA, "fork", "catan", pool=lease.pool.name)
    fork, _ = forking.fork(lease, ask, now=NOW)
    return used(fork, "cat", "f")


def test_what_waits_is_stored_and_then_its_lease_ends(spend: Act, memory: Any) -> None:
    lease, asleep, other = spend(), spend(environment="e2"), spend(BOB, "e3")
    eviction.evict(Sandbox.objects.get(holder=asleep.pk).pk, now=NOW, reason="idle")
    empty = leasing.acquire(leasing.LeaseRequest(ADA, "e4", "catan", pool=lease.pool.name), now=NOW)[0]
    budget(1, scope="agent", subject=ADA)
    assert swept(NOW) == {"budgets warned of": 1, "budgets spent": 1, "leases ended": 3}
    assert [ended(one) for one in (lease, asleep, empty)] == [("expired", "budget")] * 3
    assert (ended(other)[0], Snapshot.objects.filter(holder=lease.pk, forgotten_at=None).count()) == ("active", 1)
    event = lease.events.get(kind="ended")
    assert (event.actor, event.reason) == ("sweep", f"budget: 1 hours a day for agent {ADA}")
    assert budget_enforcement.enforce_budgets(now=NOW).counts == {}
    leases.reclaim(now=NOW + MINUTE)
    assert ended(lease)[0] == "destroyed"
    with pytest.raises(LeaseEnded, match=r"\(budget\)"):
        used(lease)
    assert readable(lease) == b"kept\n"


def test_what_runs_has_until_the_end_of_the_grace(spend: Act) -> None:
    lease = spend()
    budget(1, grace=5 * MINUTE)
    run = under_way(lease)
    for minute in (0, 1, 4):
        assert swept(NOW + minute * MINUTE)["sandboxes in grace period"] == 1
        assert (ended(lease)[0], Run.objects.get(pk=run.pk).ended_at) == ("active", None)
    assert swept(NOW + 5 * MINUTE) == {"leases ended": 1}
    run.refresh_from_db()
    assert (ended(lease)[1], run.outcome, run.note) == (
        "budget", "lost", "Killed: a budget of the lease is exhausted and its grace period is over.",
    )  # fmt: skip
    assert readable(lease) == b"kept\n"


@pytest.mark.parametrize(
    ("was", "becomes"), [({"hard": False}, {"hard": True}), ({"subject": BOB}, {"subject": ADA}), ({}, {"active": True})]
)
def test_what_runs_has_all_of_the_grace_of_a_budget_that_becomes_one_for_it(
    spend: Act, was: dict[str, Any], becomes: dict[str, Any]
) -> None:
    lease, _ = spend(), spend(BOB, "e2")
    made = budget(**{"period": "ever", "scope": "agent", "subject": ADA, "grace": 5 * MINUTE} | was)
    run = under_way(lease)
    swept(NOW)
    if not was:
        budgets.set_active(made.pk, active=False, now=NOW)
    for name, value in becomes.items():
        setattr(made, name, value)
    budgets.save_budget(made, now=NOW + HOUR)
    assert swept(NOW + HOUR) == {"sandboxes in grace period": 1}
    assert swept(NOW + HOUR + 4 * MINUTE) == {"sandboxes in grace period": 1}
    assert swept(NOW + HOUR + 5 * MINUTE) == {"leases ended": 1}
    run.refresh_from_db()
    assert run.outcome == "lost"


def test_what_runs_has_all_of_the_grace_of_a_budget_that_is_on_again(spend: Act) -> None:
    lease = spend()
    made = budget(1, period="ever", grace=5 * MINUTE)
    under_way(lease)
    swept(NOW), budgets.set_active(made.pk, active=False, now=NOW)
    assert budgets.set_active(made.pk, active=True, now=NOW + HOUR)
    assert swept(NOW + HOUR) == {"sandboxes in grace period": 1}
    assert swept(NOW + HOUR + 5 * MINUTE) == {"leases ended": 1}
    assert said() == ["exhausted", "warning"]


def test_what_has_ended_by_itself_within_the_grace_has_ended_well(spend: Act) -> None:
    lease = spend()
    budget(1)
    run = under_way(lease)
    swept(NOW)
    runs.close_run(run, now=NOW + MINUTE, outcome=runs.RunOutcome.OK)
    assert swept(NOW + MINUTE) == {"leases ended": 1}
    assert (ended(lease)[1], Run.objects.get(pk=run.pk).outcome) == ("budget", "ok")


def test_a_command_that_is_killed_says_that_its_lease_has_ended(spend: Act, memory: Any) -> None:
    lease = spend()
    budget(1, grace=timedelta(0))

    def rival(ref: str) -> None:
        unhook.close()
        swept(NOW)

    unhook = memory.before("exec", rival)
    with pytest.raises(LeaseEnded) as caught:
        used(lease)
    assert caught.value.extra["end_reason"] == "budget"


def test_what_cannot_be_killed_is_tried_again(spend: Act, memory: Any) -> None:
    lease = spend()
    budget(1, grace=timedelta(0))
    under_way(lease)
    with memory.fail("kill", Unavailable("no answer")):
        assert swept(NOW)["sandboxes not stored yet"] == 1
    assert (ended(lease)[0], Sandbox.objects.get().state) == ("active", "running")
    assert swept(NOW + MINUTE) == {"leases ended": 1}


def test_what_cannot_be_stored_stays_and_is_tried_again(spend: Act, memory: Any) -> None:
    lease = spend()
    budget(1, grace=timedelta(0))
    with memory.fail("get_files", Unavailable("no answer")):
        for minute in range(3):
            assert swept(NOW + minute * MINUTE)["sandboxes not stored yet"] == 1
            assert (ended(lease)[0], Sandbox.objects.get().state) == ("active", "waiting")
            with refused():
                used(lease)
    assert Sandbox.objects.get().tries == 2  # it waits longer each time
    assert swept(NOW + 20 * MINUTE) == {"leases ended": 1}
    assert readable(lease) == b"kept\n"


def test_what_is_looked_at_while_it_cannot_be_stored_gains_no_time(spend: Act, memory: Any) -> None:
    lease = spend()
    budget(1)
    with memory.fail("get_files", Unavailable("no answer")):
        swept(NOW)
    file = Command(argv=["read"], timeout=MINUTE, kind="file")
    execution.call_in_sandbox(lease.pk, file, lambda provider, box: None, now=NOW + MINUTE)
    assert Sandbox.objects.get().tries == 1
    assert swept(NOW + 2 * MINUTE) == {"leases ended": 1}
    assert readable(lease) == b"kept\n"


def test_what_its_clock_has_ended_says_so(spend: Act) -> None:
    lease = spend()
    budget(1)
    assert swept(lease.expires_at)["leases ended"] == 1
    assert ended(lease)[1] == "ttl"


def test_what_the_provider_has_lost_is_left_to_reconcile(spend: Act, memory: Any) -> None:
    lease = spend()
    budget(1)
    memory.vanish(Sandbox.objects.get().ref)
    assert swept(NOW)["sandboxes not stored yet"] == 1
    assert swept(NOW + MINUTE) == {"sandboxes lost": 1}
    leases.reconcile(now=NOW + MINUTE, grace=MINUTE)
    assert ended(lease)[1] == "lost"


def test_raised_while_it_is_stored_the_lease_goes_on(spend: Act, at_checkpoint: Act) -> None:
    lease = spend()
    budget(1)
    at_checkpoint("budget stored", lambda: Budget.objects.update(amount=2))
    assert swept(NOW)["lost race"] == 1
    assert ended(lease)[0] == "active"
    assert used(lease, "cat", "f") == b"kept\n"


@pytest.mark.parametrize("change", [{"amount": 9}, {"grace": HOUR}])
def test_raised_while_others_are_stored_what_runs_is_not_killed(spend: Act, at_checkpoint: Act, change: dict[str, Any]) -> None:
    spend(hours=2)  # so its turn comes first
    other = spend(BOB, "e2")
    budget(1, grace=timedelta(0))
    run = under_way(other)
    at_checkpoint("budget stored", lambda: Budget.objects.update(**change))
    swept(NOW)
    run.refresh_from_db()
    assert (ended(other)[0], run.ended_at) == ("active", None)


def test_leases_end_however_long_summing_takes(spend: Act, monkeypatch: pytest.MonkeyPatch, at_checkpoint: Act) -> None:
    lease, clock = spend(), [0.0]
    budget(1)
    monkeypatch.setattr(moments, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    at_checkpoint("budget settled", lambda: clock.append(clock.pop() + budget_enforcement.PASS_TIME_LIMIT.total_seconds() + 1))
    assert swept(NOW)["leases ended"] == 1
    assert ended(lease) == ("expired", "budget")


def test_one_that_fails_does_not_keep_the_others(spend: Act, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = spend(), spend(environment="e2")
    budget(1), budget(1, scope="agent", subject=ADA)
    settle, end = budgets.update_spending, leasing.end

    def sometimes(pk: Any, **options: Any) -> Any:
        if pk in (first.pk, Budget.objects.order_by("pk").values_list("pk", flat=True)[0]):
            raise RuntimeError("a bug")
        return settle(pk, **options) if isinstance(pk, int) else end(pk, **options)

    monkeypatch.setattr(budgets, "update_spending", sometimes)
    monkeypatch.setattr(leasing, "end", sometimes)
    metering.meter_usage(now=NOW)
    done = budget_enforcement.enforce_budgets(now=NOW)
    assert (done.counts["leases ended"], len(done.failures)) == (1, 2)
    assert (ended(first)[0], ended(second)[0]) == ("active", "expired")


STEPS = [
    "budget summed", "budget marked", "budget settled", "budget stopped", "eviction claimed", "objects stored", "persisted",
    "process gone", "budget stored", "budget ended",
]  # fmt: skip


@pytest.mark.parametrize("where", STEPS)
def test_dying_anywhere_and_going_on_comes_to_the_same_end(where: str, spend: Act, at_checkpoint: Act, memory: Any) -> None:
    lease = spend()
    budget(1, grace=timedelta(0), now=NOW - 2 * HOUR)
    run = under_way(lease)

    def die() -> None:
        raise SimulatedCrash

    at_checkpoint(where, die)
    with pytest.raises(SimulatedCrash):
        swept(NOW)
    assert where == "budget ended" or ended(lease)[0] == "active"
    for later in (NOW + MINUTE, NOW + HOUR, NOW + 2 * HOUR):  # by then a claim that nobody carries out is stalled
        leases.recover_stalled(now=later)
        swept(later)
        leases.reclaim(now=later)
    assert (ended(lease), said()) == (("destroyed", "budget"), ["exhausted", "warning"])
    assert lease.events.filter(kind="ended").count() == 1
    assert (Run.objects.get(pk=run.pk).outcome, Run.objects.filter(ended_at=None).count()) == ("lost", 0)
    assert memory.list(str(lease.pool.owner)) == []
    assert readable(lease) == b"kept\n"


def test_every_step_that_is_died_at_is_there(spend: Act) -> None:
    reached: set[str] = set()
    CHECKPOINT_HOOKS.append(hook := lambda name, subject: reached.add(name))
    try:
        under_way(spend()), budget(1, grace=timedelta(0)), swept(NOW)
    finally:
        CHECKPOINT_HOOKS.remove(hook)
    assert {*STEPS} <= reached


# --- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"amount": 0}, "amount"), ({"amount": -1}, "amount"), ({"scope": "agent"}, "__all__"), ({"subject": ADA}, "__all__"),
        ({"scope": "key", "subject": "ab"}, "subject"), ({"warn_percent": 0}, "warn_percent"),
        ({"warn_percent": 101}, "warn_percent"), ({"unit": "eur"}, "unit"), ({"period": "week"}, "period"),
        ({"scope": "team"}, "scope"), ({"grace": timedelta(seconds=-1)}, "__all__"),
    ],
)  # fmt: skip
def test_a_budget_that_means_nothing_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        budget(**fields)
    assert field in caught.value.message_dict
    assert not Budget.objects.exists()


def test_one_that_is_not_active_counts_for_nothing(spend: Act, grant: Act) -> None:
    lease, made = spend(), budget(1)
    swept_first = swept(NOW)
    assert swept_first["leases ended"] == 1
    made.refresh_from_db()
    made.active = False
    budgets.save_budget(made, now=NOW)
    used(grant(environment="e2"))
    assert swept(NOW + HOUR) == {}
    assert ended(lease)[0] == "expired"


def test_leases_that_were_there_before_get_their_tabs(grant: Act) -> None:
    lease, gone = grant(), grant(environment="e2")
    leasing.release(gone.pk, now=NOW + MINUTE)
    before = sorted(Tab.objects.values_list())
    Tab.objects.all().delete()
    for _ in range(2):
        import_module("leases.migrations.0013_tabs").open_tabs(apps, None)
        assert sorted(Tab.objects.values_list()) == before
    assert Tab.objects.get(closed_at=None).holder == lease.pk
