"""manage.py budget: list, add, change, top up and remove budgets."""

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from billing import budgets
from billing.errors import BudgetNotFound
from billing.forecast import forecast_budget
from billing.models import Budget
from billing.models.budgets import Period, Scope, Unit
from billing.pricing import format_decimal
from leases.agents import describe_unknown_agent
from leases.budget_subjects import find_key_id, require_subject
from leases.management.base import parse_duration, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time

SCOPE_OPTIONS = {
    "agent": Scope.AGENT, "key": Scope.KEY, "type": Scope.ENVIRONMENT_TYPE, "account": Scope.ACCOUNT, "project": Scope.PROJECT,
}  # fmt: skip


class Command(BaseCommand):
    help = "List, add, change, top up or remove budgets. Prints one line per budget."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="print one line per budget")
        add = actions.add_parser("add", help="create a budget")
        add.add_argument("amount", help="amount, such as 12.50; of tokens a whole number")
        add.add_argument("unit", choices=Unit.values)
        add.add_argument("period", choices=Period.values, help="calendar period; ever: no reset")
        add.add_argument("--model", default="", metavar="PATTERN", help='only calls of these models, such as "claude-opus*"')
        scope = add.add_mutually_exclusive_group(required=True)
        scope.add_argument("--all", action="store_true", help="the whole installation")
        scope.add_argument("--agent", metavar="DID", help="agent; one that has not joined yet is accepted with a warning")
        scope.add_argument("--key", metavar="PREFIX", help="prefix of an existing API key, as shown in the console")
        scope.add_argument("--type", metavar="NAME", help="existing environment type, such as catan")
        scope.add_argument("--account", metavar="NAME", help="existing account")
        scope.add_argument("--project", metavar="NAME", help="existing project")
        change = actions.add_parser("set", help="change a budget; raising it takes effect at once")
        change.add_argument("id", type=int)
        change.add_argument("--amount")
        top_up = actions.add_parser("top-up", help="add an amount to the current period alone; takes effect at once")
        top_up.add_argument("id", type=int)
        top_up.add_argument("amount", help="amount in the unit of the budget, such as 5")
        top_up.add_argument("--note", default="", help="reason, up to 300 characters")
        change.add_argument("--active", choices=["yes", "no"], help="no: disable the budget without deleting it")
        change.add_argument(
            "--hard", action="store_const", const="hard", dest="kind", help="refuse and end leases once it is exhausted"
        )
        for subparser in (add, change):
            subparser.add_argument("--soft", action="store_const", const="soft", dest="kind", help="only warn, never refuse")
            subparser.add_argument(
                "--warn", type=int, nargs="*", metavar="PERCENT", help="warnings; none without a number; default: 50 80 100"
            )
            subparser.add_argument(
                "--time-zone", metavar="NAME", help="in which days, weeks and months begin, such as Europe/Berlin; default: UTC"
            )
            subparser.add_argument(
                "--grace", help='grace period of running work once the budget is exhausted: "5m", or 0; default: 5m'
            )
        remove = actions.add_parser("remove", help="delete a budget")
        remove.add_argument("id", type=int)

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            if action == "list":
                for budget in Budget.objects.all():
                    self.stdout.write(_format_budget(budget))
                return
            if action == "remove":
                budget = _find_budget(options["id"])
                line = _format_budget(budget)
                budgets.remove_budget(budget.pk, actor=COMMAND_LINE, now=database_time.now())
                self.stdout.write(f"removed: {line}")
                return
            if action == "top-up":
                self.stdout.write(f"topped up: {_format_budget(_top_up(**options))}")
                return
            budget = _change(**options) if action == "set" else _add(**options)
            if budget.scope == Scope.AGENT and (warning := describe_unknown_agent(budget.subject)):
                self.stderr.write(f"Warning: {warning}")
            self.stdout.write(f"{'changed' if action == 'set' else 'added'}: {_format_budget(budget)}")


def _find_budget(pk: int) -> Budget:
    budget = Budget.objects.filter(pk=pk).first()
    if budget is None:
        raise CommandError(f"No such budget: {pk}.")
    return budget


def _add(**options: Any) -> Budget:
    budget = _build_budget(**options)
    for field, value in _read_fields(**options).items():
        setattr(budget, field, value)
    with _report_invalid():
        return budgets.create_budget(budget, actor=COMMAND_LINE, now=database_time.now())[0]


def _change(*, id: int, **options: Any) -> Budget:
    with _report_invalid(id):
        return budgets.change_budget(id, _read_fields(**options), actor=COMMAND_LINE, now=database_time.now())


def _top_up(*, id: int, amount: str, note: str, **options: Any) -> Budget:
    with _report_invalid(id):
        return budgets.top_up(id, _parse_amount(amount), note=note, actor=COMMAND_LINE, now=database_time.now())[0]


@contextmanager
def _report_invalid(pk: int | None = None) -> Iterator[None]:
    try:
        yield
    except BudgetNotFound:
        raise CommandError(f"No such budget: {pk}.") from None
    except ValidationError as error:
        raise CommandError("; ".join(error.messages)) from None


def _parse_amount(amount: str) -> Decimal:
    try:
        return Decimal(amount)
    except InvalidOperation:
        raise CommandError(f"{amount[:80]!r} is not a decimal number.") from None


def _build_budget(*, unit: str, period: str, model: str, **options: Any) -> Budget:
    budget = Budget(scope=Scope.ALL, unit=unit, period=period, model=model)
    for option, scope in SCOPE_OPTIONS.items():
        subject = options[option]
        if subject is not None:  # an empty name, as from an unset shell variable, must not create a budget for everything
            try:
                budget.scope, budget.subject = scope, find_key_id(subject) if scope == Scope.KEY else subject
                require_subject(budget.scope, budget.subject)
            except ValidationError as error:
                raise CommandError(f"--{option}: {error.messages[0]}") from None
    return budget


def _read_fields(
    *,
    amount: str | None,
    kind: str | None,
    warn: list[int] | None,
    time_zone: str | None,
    grace: str | None,
    active: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Return the fields of a budget that options state."""
    fields: dict[str, Any] = {}
    if amount is not None:
        fields["amount"] = _parse_amount(amount)
    if kind:
        fields["hard"] = kind == "hard"
    if warn is not None:
        fields["warn_percents"] = sorted({*warn})
    if time_zone is not None:
        fields["time_zone"] = time_zone
    if grace is not None:
        fields["grace"] = timedelta(0) if grace == "0" else parse_duration("--grace", grace)
    if active:
        fields["active"] = active == "yes"
    return fields


def _format_budget(budget: Budget) -> str:
    now = database_time.now()
    spent, limit = budgets.get_spent(budget, now), budgets.get_limit(budget, now)
    reserved = budgets.compute_reservation(budget, now=now)
    notes = [str(budgets.get_uncertainty(budget, now)), _format_top_ups(budget, now)]
    notes.append(f"{format_decimal(reserved)} reserved" if reserved else "")
    notes.append("hard" if budget.hard else "soft")
    notes.append(f"warns at {', '.join(map(str, budget.warn_percents))} %" if budget.warn_percents else "no warnings")
    if budget.hard and not budget.counts_calls_alone:
        notes.append(f"grace {budget.grace.total_seconds():g}s")
    if not budget.active:
        notes.append("disabled")
    elif budgets.is_over(budget, spent, reserved, now=now):
        notes.append("EXHAUSTED")
    else:
        notes.append(_format_forecast(budget, now))
    resets_at = budgets.get_period_bounds(budget, now)[1]
    notes.append(f"resets at {resets_at:%Y-%m-%d %H:%M} UTC" if resets_at else "")
    amounts = f"{format_decimal(spent)} spent, {format_decimal(max(limit - spent - reserved, Decimal(0)))} left"
    return f"{budget.pk} {budget}: {amounts} ({', '.join(filter(None, notes))})"


def _format_top_ups(budget: Budget, now: datetime) -> str:
    topped_up = budgets.get_topped_up(budget, now)
    return f"{format_decimal(topped_up)} topped up" if topped_up else ""


def _format_forecast(budget: Budget, now: datetime) -> str:
    forecast, notes = forecast_budget(budget, now), []
    if forecast.at_end is not None:
        notes.append(f"{format_decimal(round(forecast.at_end, 6))} expected at the end of the period")
    if forecast.runs_out:
        day = "in this hour" if budget.period == Period.HOUR else f"on {forecast.runs_out}"
        notes.append(f"exhausted {day} at the current rate")
    return ", ".join(notes)
