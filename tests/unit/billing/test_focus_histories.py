"""Random histories of usage, late changes, credits and closings: exports add up to statements, which never change."""

import itertools
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from billing import statements
from billing.dates import start_of_day, start_of_next_month
from billing.focus.export import iter_csv, open_month
from billing.models import Account, Membership, Statement, UsageRecord
from tests.support.billing import (
    HOUR,
    advance_and_price,
    close_month,
    create_rate,
    create_time_usage,
    create_token_usage,
    parse_utc,
)
from tests.support.focus import Row, read_focus, sum_column
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
MONTHS = [date(2026, number, 1) for number in (8, 9, 10)]
numbers = itertools.count()
# Kind, agent, months ago, day and number: of minutes of a sandbox, or of billionths of the USD of calls.
CHANGES = st.tuples(
    st.sampled_from(["minutes", "calls", "removal"]), st.integers(0, 1), st.integers(0, 2), st.integers(1, 28),
    st.integers(1, 10**9),
)  # fmt: skip
EXPECTED_KINDS = {  # category, class, whether of a lease, and whether within an allowance
    ("Usage", "", True, False),
    ("Usage", "", True, True),
    ("Usage", "Correction", False, False),
    ("Purchase", "", False, False),
    ("Adjustment", "", False, False),
    ("Credit", "", False, False),
}
HISTORIES = st.lists(
    st.tuples(st.lists(CHANGES, min_size=1, max_size=4), st.integers(0, 300)), min_size=len(MONTHS), max_size=len(MONTHS)
)


@dataclass
class History:
    """One account of two agents, and the exports of its closed months."""

    account: Account
    agents: list[str]
    exports: dict[Statement, tuple[str, str]] = field(default_factory=dict)  # by line, and by day

    def apply(self, month: date, kind: str, agent: int, months_ago: int, day: int, number: int) -> None:
        began = parse_utc(f"{MONTHS[max(MONTHS.index(month) - months_ago, 0)].replace(day=day)}T10:00")
        did = self.agents[agent]
        if kind == "minutes":
            create_time_usage(began, HOUR * (number % 4000 + 1) / 60, did, provider="acme")
        elif kind == "calls":
            create_token_usage(
                began, str(Decimal(number).scaleb(-9)), 3, agent=did, provider="acme", unpriced=number % 3,
                model=f"m{number % 2}", input_tokens=number, output_tokens=number % 7, estimated_tokens=number % 5,
            )  # fmt: skip
        elif first := UsageRecord.objects.filter(agent_did=did).order_by("pk").first():
            UsageRecord.objects.filter(pk=first.pk).delete()

    def export(self, month: date, *, daily: bool = False, preliminary: bool = False) -> str:
        source = open_month(self.account, month, preliminary=preliminary)
        assert source
        return "".join(iter_csv([source], daily=daily))

    def close(self, month: date) -> None:
        """Check the preliminary export, close the month and keep its export."""
        now = start_of_day(start_of_next_month(month))
        advance_and_price(now)
        preliminary = read_focus(self.export(month, preliminary=True))
        statement = close_month(self.account, month, now=now)
        assert sum_column(preliminary) == statement.total
        self.exports[statement] = (self.export(month), self.export(month, daily=True))

    def check(self) -> list[Row]:
        """Check the exports of all closed months. Return the rows by day of all of them."""
        rows = []
        for statement, (text, daily_text) in self.exports.items():
            assert self.export(statement.month) == text
            assert self.export(statement.month, daily=True) == daily_text
            by_line, by_day = read_focus(text), read_focus(daily_text)
            assert sum_column(by_day) == sum_column(by_line) == statement.total
            for column in ("x_InputTokens", "x_OutputTokens", "x_EstimatedTokens", "x_UnpricedCalls"):
                assert sum_by_model(by_day, column) == sum_by_model(by_line, column)
            rows += by_day
        return rows


def sum_by_model(rows: list[Row], column: str) -> dict[str, int]:
    models = {row["x_Model"] for row in rows}
    return {model: sum(int(row[column] or 0) for row in rows if row["x_Model"] == model) for model in models}


@pytest.fixture
def rates(db: None) -> None:
    create_rate("memory", "0.337", allowance=Decimal("1.5"))
    create_rate("time", "0.123456789"), create_rate("time", "0.987654321987", "2026-09-03T11:20")
    create_rate("plan", "1.005")


@pytest.mark.usefixtures("rates")
def test_exports_equal_statements_after_any_history() -> None:
    kinds: set[tuple[str, str, bool, bool]] = set()

    @hypothesis.settings(
        max_examples=budget(fast=8, full=60), deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target],
    )  # fmt: skip
    @hypothesis.given(HISTORIES)
    def run(months: list[tuple[list[tuple[str, int, int, int, int]], int]]) -> None:
        number = next(numbers)
        history = History(Account.objects.create(name=f"account-{number}"), [f"did:plc:{number}{name}" for name in "ab"])
        Membership.objects.bulk_create(
            Membership(agent_did=did, account=history.account, since=MONTHS[0]) for did in history.agents
        )
        for month, (changes, cents) in zip(MONTHS, months, strict=True):
            for change in changes:
                history.apply(month, *change)
            if cents:
                usd = Decimal(cents).scaleb(-2)
                statements.grant_credit(history.account, usd, now=start_of_day(month), actor="eve", reason="given")
            history.close(month)
        for row in history.check():
            columns = row["ChargeCategory"], row["ChargeClass"], bool(row["ResourceId"]), bool(row["x_Discount"])
            kinds.add(columns)

    run()
    assert kinds >= EXPECTED_KINDS, "the histories miss a kind of row"
