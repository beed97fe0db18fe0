"""How far a hard budget is overshot at most, as billing.budgets says: random histories, each sweep once a minute, whenever
in it."""

from datetime import datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import strategies as st

from billing import budgets, costs, metering, totals
from billing.errors import BudgetExhausted
from billing.models import Account, Budget, Membership, Tab, UsageRecord
from leases import budget_enforcement, execution, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import runs
from sandboxes.db import clock
from sandboxes.models import Pool, Run, RunOutcome
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
EVERY = MINUTE  # both sweeps
AGENTS = 5
ACTS = ["acquire", "exec", "begin", "begin", "finish", "release"]
histories = st.lists(
    st.tuples(st.integers(1, 90), st.sampled_from(ACTS), st.integers(0, AGENTS - 1)), max_size=15
)  # seconds since the act before, the act, by whom


class History:
    """Agents of one account, its budget, and the two sweeps, each at a second of its own of every minute."""

    def __init__(self, pool: Pool, now: datetime, amount: timedelta, grace: timedelta, meters_at: int, settles_at: int) -> None:
        self.pool, self.now, self.most, self.number = pool, now, 0, Account.objects.count()
        account = Account.objects.create(name=f"crew-{self.number}")
        for who in range(AGENTS):
            Membership.objects.create(agent_did=self.did(who), account=account)
        self.budget = Budget(
            scope="account", subject=account.name, unit="hours", period="ever", grace=grace,
            amount=round(Decimal(amount / HOUR), 6),
        )  # fmt: skip
        budgets.save_budget(self.budget, now=now)
        self.due = {"meter": now + meters_at * SECOND, "settle": now + settles_at * SECOND}

    def did(self, who: int) -> str:
        return f"did:plc:c{self.number}a{who}"

    def wait(self, until: datetime) -> None:
        while (at := min(self.due.values())) <= until:
            name = min(self.due, key=lambda one: self.due[one])
            self.due[name] += EVERY
            if name == "meter":
                metering.meter_usage(now=at)
                costs.price_usage(now=at)
            else:
                assert not budget_enforcement.enforce_budgets(now=at).failures
            self.count()
        self.now = until

    def act(self, act: str, who: int) -> None:
        did = self.did(who)
        lease = Lease.objects.filter(agent_did=did, status="active").first()
        try:
            if act == "acquire":
                ask = leasing.LeaseRequest(did, "game", "catan", ttl=20 * HOUR, sleep_after=20 * HOUR, pool=self.pool.name)
                leasing.acquire(ask, now=self.now)
            elif lease and act == "exec":
                execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=self.now)
            elif lease and act == "begin":
                box = execution.ensure_sandbox_ready(lease.pk, now=self.now)
                assert runs.open_run(box, Command(argv=["sleep"], timeout=20 * HOUR), now=self.now)
            elif lease and act == "finish":
                for run in Run.objects.filter(holder=lease.pk, ended_at=None).select_related("sandbox"):
                    runs.close_run(run, now=self.now, outcome=RunOutcome.OK)
            elif lease:
                leasing.release(lease.pk, now=self.now)
        except (BudgetExhausted, LeaseEnded):
            pass
        self.count()

    def count(self) -> None:
        self.most = max(self.most, budgets.find_open_tabs(self.budget, now=self.now).count())

    def used(self) -> timedelta:
        """Anew, from the facts."""
        metering.meter_usage(now=self.now)
        rows = UsageRecord.objects.filter(agent_did__startswith=self.did(0)[:-1], state__in=totals.BILLABLE_STATES)
        return sum((row.ended_at - row.began_at for row in rows), timedelta(0))

    def close(self) -> None:
        Budget.objects.all().delete()
        for pk in Tab.objects.filter(closed_at=None).values_list("pk", flat=True):
            leasing.end(pk, reason="released", now=self.now)
        sweeps.reclaim(now=self.now)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verb does takes no time, and so storing takes none."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 0.0))


def test_overshoot_stays_within_the_documented_bound(pool: Pool, still: None) -> None:
    over: list[timedelta] = []

    @hypothesis.settings(
        max_examples=10, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )  # fmt: skip
    @example([], 11, 181, 11, 10)  # each step comes a second too early for the one before it
    @given(histories, st.integers(2, 12), st.integers(0, 240), st.integers(0, 59), st.integers(0, 59))
    def check(acts: list[tuple[int, str, int]], amount: int, grace: int, meters_at: int, settles_at: int) -> None:
        now = NOW + len(over) * 3 * HOUR  # a watermark does not go back
        history = History(pool, now, amount * MINUTE, grace * SECOND, meters_at, settles_at)
        for who in range(AGENTS):
            history.act("acquire", who), history.act("begin", who)
        for gap, act, who in acts:
            history.wait(history.now + gap * SECOND)
            history.act(act, who)
        history.wait(history.now + amount * MINUTE + grace * SECOND + 4 * MINUTE)
        used, allowed = history.used(), amount * MINUTE
        over.append(used - allowed)
        history.close()
        metering_, settling = EVERY, EVERY
        assert used <= allowed + history.most * (metering_ + settling + grace * SECOND + settling)
        ended = Lease.objects.filter(agent_did__startswith=history.did(0)[:-1], end_reason="budget")
        assert not ended.exists() or used >= allowed - SECOND

    check()
    assert over[0] == AGENTS * (3 * EVERY + 181 * SECOND - 3 * SECOND)  # so there is no smaller bound
