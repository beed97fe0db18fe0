"""The bound of a hard budget's overshoot, as documented in billing.budgets.

Random histories, with each sweep once a minute at a random second of the minute."""

from datetime import datetime, timedelta
from decimal import Decimal

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import strategies as st

from billing import budgets, metering, totals
from billing.errors import BudgetExhausted
from billing.models import Account, Budget, Membership, Tab, UsageRecord
from leases import budget_enforcement, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes.models import Pool, Run, RunOutcome
from sandboxes.runs import operations
from tests.conftest import MINUTE, NOW
from tests.support.billing import HOUR, create_budget, run_command, start_run
from tests.support.search import budget

pytestmark = pytest.mark.django_db
SECOND = timedelta(seconds=1)
SWEEP_INTERVAL = MINUTE  # of both sweeps
AGENTS = 5
ACTIONS = ["acquire", "exec", "begin", "begin", "finish", "release"]
histories = st.lists(
    st.tuples(st.integers(1, 90), st.sampled_from(ACTIONS), st.integers(0, AGENTS - 1)), max_size=15
)  # (seconds since the previous action, action, agent number)


class History:
    """Agents of one account, the account's budget, and two sweeps at fixed seconds of each minute."""

    def __init__(self, pool: Pool, now: datetime, amount: timedelta, grace: timedelta, meters_at: int, sweeps_at: int) -> None:
        self.pool, self.now, self.max_leases, self.number = pool, now, 0, Account.objects.count()
        account = Account.objects.create(name=f"crew-{self.number}")
        for agent in range(AGENTS):
            Membership.objects.create(agent_did=self.did(agent), account=account)
        hours = round(Decimal(amount / HOUR), 6)
        self.budget = create_budget(hours, period="ever", scope="account", subject=account.name, grace=grace, now=now)
        self.due = {"meter": now + meters_at * SECOND, "sweep": now + sweeps_at * SECOND}

    def did(self, agent: int) -> str:
        return f"did:plc:c{self.number}a{agent}"

    def advance(self, until: datetime) -> None:
        while (at := min(self.due.values())) <= until:
            name = min(self.due, key=lambda sweep: self.due[sweep])
            self.due[name] += SWEEP_INTERVAL
            if name == "meter":
                metering.meter_usage(now=at)
            else:
                assert not budget_enforcement.enforce_budgets(now=at).failures
            self.count()
        self.now = until

    def act(self, action: str, agent: int) -> None:
        did = self.did(agent)
        lease = Lease.objects.filter(agent_did=did, status="active").first()
        try:
            if action == "acquire":
                request = leasing.LeaseRequest(did, "game", "catan", ttl=20 * HOUR, sleep_after=20 * HOUR, pool=self.pool.name)
                leasing.acquire(request, now=self.now)
            elif lease and action == "exec":
                run_command(lease, now=self.now)
            elif lease and action == "begin":
                start_run(lease, now=self.now, timeout=20 * HOUR)
            elif lease and action == "finish":
                for run in Run.objects.filter(holder=lease.pk, ended_at=None).select_related("sandbox"):
                    operations.close_run(run, now=self.now, outcome=RunOutcome.OK)
            elif lease:
                leasing.release(lease.pk, now=self.now)
        except (BudgetExhausted, LeaseEnded):
            pass
        self.count()

    def count(self) -> None:
        self.max_leases = max(self.max_leases, budgets.find_open_tabs(self.budget, now=self.now).count())

    def used(self) -> timedelta:
        """Return the agents' billable time, metered up to now."""
        metering.meter_usage(now=self.now)
        rows = UsageRecord.objects.filter(agent_did__startswith=self.did(0)[:-1], state__in=totals.BILLABLE_STATES)
        return sum((row.ended_at - row.began_at for row in rows), timedelta(0))

    def close(self) -> None:
        Budget.objects.all().delete()
        for pk in Tab.objects.filter(closed_at=None).values_list("pk", flat=True):
            leasing.end(pk, reason="released", now=self.now)
        sweeps.reclaim(now=self.now)


def test_overshoot_stays_within_the_documented_bound(pool: Pool, stopped_clock: None) -> None:
    overshoots: list[timedelta] = []

    @hypothesis.settings(
        max_examples=budget(fast=2, full=6), deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )  # fmt: skip
    @example([], 20, 181, 11, 10)  # worst case: each step runs one second before the state that it would act on
    @given(histories, st.integers(5, budget(fast=9, full=40)), st.integers(0, 240), st.integers(0, 59), st.integers(0, 59))
    def check(actions: list[tuple[int, str, int]], amount: int, grace: int, meters_at: int, sweeps_at: int) -> None:
        now = NOW + len(overshoots) * 3 * HOUR  # each history begins after the previous one, because watermarks do not go back
        history = History(pool, now, amount * MINUTE, grace * SECOND, meters_at, sweeps_at)
        for agent in range(AGENTS):
            history.act("acquire", agent), history.act("begin", agent)
        for gap, action, agent in actions:
            history.advance(history.now + gap * SECOND)
            history.act(action, agent)
        history.advance(history.now + amount * MINUTE + grace * SECOND + 4 * MINUTE)
        used, allowed = history.used(), amount * MINUTE
        overshoots.append(used - allowed)
        history.close()
        metering_, sweep = SWEEP_INTERVAL, SWEEP_INTERVAL
        ended = Lease.objects.filter(agent_did__startswith=history.did(0)[:-1])
        assert used <= allowed + ended.filter(end_reason="released").count() * (metering_ + sweep)
        reserved = history.max_leases * (metering_ + sweep + grace * SECOND + sweep)
        assert not ended.filter(end_reason="budget").exists() or used >= allowed - reserved - history.max_leases * sweep

    check()
    assert -AGENTS * SWEEP_INTERVAL < overshoots[0] <= timedelta(0)  # less than a pass of each sandbox is left
