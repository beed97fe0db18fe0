"""Random histories of usage, moves, closings and credits: statements always add up to costs."""

from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import hypothesis
import pytest
from django.core.exceptions import ValidationError
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from billing import costs, dates, statement_lines, statements
from billing.models import (
    Account,
    CostRecord,
    Credit,
    Membership,
    ModelTotal,
    PeriodTotal,
    Rate,
    Statement,
    StatementCharge,
    StatementLine,
    UsageRecord,
)
from billing.statements import MonthNotClosable
from tests.support.actors import console_user
from tests.support.billing import (
    HOUR,
    advance_and_price,
    create_rate,
    create_time_usage,
    create_token_usage,
    is_balanced,
    list_cost_records,
    list_statement_lines,
    parse_utc,
)
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
DECEMBER = parse_utc("2026-12-01T00:00")
USD = Decimal
MONTHS = [date(2026, number, 1) for number in (8, 9, 10, 11)]
AGENTS = st.sampled_from(["did:plc:a", "did:plc:b", "did:plc:c"])
DAYS = st.dates(date(2026, 8, 1), date(2026, 12, 2))
FIRST_ACCOUNTS = ("house", "one", "two")


class Ledger(RuleBasedStateMachine):
    """Histories of usage added and removed, moves of agents, closings, and credits granted and reversed."""

    @initialize()
    def begin(self) -> None:
        for model in (StatementCharge, StatementLine, Statement, Credit, CostRecord, PeriodTotal, ModelTotal, Membership):
            rows = model._base_manager.all()
            rows.filter(kind="reversal").delete() if model is Credit else None
            rows.delete()
        UsageRecord.objects.all().delete()
        Rate.objects.filter(provider="acme").delete()
        Account.objects.exclude(name="house").delete()
        self.accounts = [Account.objects.get_or_create(name=name)[0] for name in FIRST_ACCOUNTS]
        create_rate("memory", "0.337", allowance=USD("1.5"))
        create_rate("time", "0.123456789")
        create_rate("plan", "1.005")
        advance_and_price(DECEMBER)

    @rule(month=st.sampled_from(MONTHS), number=st.integers(0, 27), agent=AGENTS, minutes=st.integers(1, 2000))
    def add_usage(self, month: date, number: int, agent: str, minutes: int) -> None:
        create_time_usage(parse_utc(f"{month.replace(day=number + 1)}T10:00"), HOUR * minutes / 60, agent, provider="acme")

    @rule(month=st.sampled_from(MONTHS), agent=AGENTS, nano=st.integers(1, 10**8), model=st.sampled_from(["gpt-5", "claude"]))
    def add_model_call(self, month: date, agent: str, nano: int, model: str) -> None:
        usd = str(USD(nano).scaleb(-9))
        create_token_usage(parse_utc(f"{month}T10:00"), usd, agent=agent, provider="acme", model=model, input_tokens=nano)

    @rule(agent=AGENTS)
    def remove_usage(self, agent: str) -> None:
        first = UsageRecord.objects.filter(agent_did=agent).order_by("pk").first()
        UsageRecord.objects.filter(pk=first.pk if first else 0).delete()

    @rule(agent=AGENTS, number=st.integers(0, 2), since=st.none() | DAYS)
    def move_agent(self, agent: str, number: int, since: date | None) -> None:
        memberships = Membership.objects.filter(agent_did=agent)
        if not (memberships.filter(since=since) if since else memberships).exists():  # the default day depends on the clock
            self.try_change(Membership(agent_did=agent, account=self.accounts[number], since=since).save)

    @rule(agent=AGENTS, number=st.integers(0, 2), since=DAYS)
    def change_move(self, agent: str, number: int, since: date) -> None:
        last = Membership.objects.filter(agent_did=agent).order_by("-pk").first()
        if last and not Membership.objects.filter(agent_did=agent, since=since).exclude(pk=last.pk).exists():
            last.account, last.since = self.accounts[number], since
            self.try_change(last.save)

    @rule(agent=AGENTS)
    def delete_move(self, agent: str) -> None:
        if first := Membership.objects.filter(agent_did=agent).order_by("since").first():
            self.try_change(first.delete)

    def try_change(self, change: Callable[[], Any]) -> None:
        """Apply a change, which may be refused. The costs of closed months stay the same either way."""
        advance_and_price(DECEMBER)
        before, message = self.sum_closed_costs(), ""
        try:
            change()
        except ValidationError as error:
            message = str(error)
        advance_and_price(DECEMBER)
        assert self.sum_closed_costs() == before
        assert not message or (before and "closed months cannot change" in message)

    def sum_closed_costs(self) -> dict[str, Any]:
        last = {each: Statement.objects.filter(account=each).order_by("month").last() for each in self.accounts}
        return {
            each.name: statement_lines.sum_derived_costs(each, until=dates.start_of_next_month(statement.month))
            for each, statement in last.items()
            if statement
        }

    @rule()
    def rebuild_costs(self) -> None:
        advance_and_price(DECEMBER)
        before = list_cost_records()
        costs.reset_costs()
        advance_and_price(DECEMBER)
        assert list_cost_records() == before

    @rule(usd=st.integers(1, 300), number=st.integers(0, 2))
    def grant_credit(self, usd: int, number: int) -> None:
        statements.grant_credit(self.accounts[number], USD(usd).scaleb(-2), now=DECEMBER, actor="eve", reason="given")

    @rule()
    def reverse_credit(self) -> None:
        last = Credit.objects.filter(kind="grant").order_by("-pk").first()
        if last:
            statements.reverse_credit(last.pk, now=DECEMBER, actor="eve", reason="taken")

    @rule(number=st.integers(0, 2), month=st.sampled_from(MONTHS))
    def close_any_month(self, number: int, month: date) -> None:
        account = self.accounts[number]
        advance_and_price(DECEMBER)
        before = [list_statement_lines(each) for each in Statement.objects.order_by("pk")]
        try:
            _, created = statements.close_month(account, month, now=DECEMBER, actor=console_user())
        except MonthNotClosable:
            created = False
        after = [list_statement_lines(each) for each in Statement.objects.order_by("pk")]
        assert after[: len(before)] == before
        assert len(after) == len(before) + created
        assert not created or is_balanced(account)

    @invariant()
    def books_balance(self) -> None:
        for account in getattr(self, "accounts", []):
            remaining = statements.get_remaining_credits(account)
            assert all(usd >= 0 for usd in remaining.values())
            assert statements.get_balance(account) == sum(remaining.values(), USD(0))
        for each in Statement.objects.all():
            assert each.subtotal == sum((line.usd for line in each.lines.all()), USD(0))
            assert (each.total, each.credit_used >= 0) == (each.subtotal - each.credit_used, True)


def test_statements_equal_costs_after_any_history() -> None:
    run_state_machine_as_test(
        Ledger,
        settings=hypothesis.settings(
            max_examples=budget(fast=4, full=15), stateful_step_count=25, deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target],
        ),
    )  # fmt: skip
