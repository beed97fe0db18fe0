"""manage.py budget: list, add, change and remove budgets."""

from argparse import ArgumentParser
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from billing import budgets
from billing.forecast import predict_exhaustion_date
from billing.models import Account, Budget
from billing.models.budgets import Period, Scope, Unit
from billing.pricing import format_decimal
from leases.agents import describe_unknown_agent
from leases.management.base import parse_duration, report_errors
from leases.models import DID_DESCRIPTION, AgentKey, EnvironmentType, validate_did
from leases.projects.models import Project
from sandboxes.db import database_time
from sandboxes.formatting import suggest_match

MAX_SUGGESTIONS = 1000  # newest keys compared with an unknown one


class Command(BaseCommand):
    help = "List, add, change or remove budgets. Prints one line per budget."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="print one line per budget")
        add = actions.add_parser("add", help="create a budget")
        add.add_argument("amount", help="amount, such as 12.50")
        add.add_argument("unit", choices=Unit.values)
        add.add_argument("period", choices=Period.values, help="calendar period, in UTC; ever: no reset")
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
        change.add_argument("--active", choices=["yes", "no"], help="no: disable the budget without deleting it")
        change.add_argument(
            "--hard", action="store_const", const="hard", dest="kind", help="refuse and end leases once it is exhausted"
        )
        for subparser in (add, change):
            subparser.add_argument("--soft", action="store_const", const="soft", dest="kind", help="only warn, never refuse")
            subparser.add_argument("--warn", type=int, metavar="PERCENT", help="warning threshold; default: 80")
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
                budgets.remove_budget(budget.pk, now=database_time.now())
                self.stdout.write(f"removed: {line}")
                return
            budget = _find_budget(options["id"]) if action == "set" else _build_budget(**options)
            _apply_options(budget, **options)
            try:
                budgets.save_budget(budget, now=database_time.now())
            except ValidationError as error:
                raise CommandError("; ".join(error.messages)) from None
            if budget.scope == Scope.AGENT and (warning := describe_unknown_agent(budget.subject)):
                self.stderr.write(f"Warning: {warning}")
            self.stdout.write(f"{'changed' if action == 'set' else 'added'}: {_format_budget(budget)}")


def _find_budget(pk: int) -> Budget:
    budget = Budget.objects.filter(pk=pk).first()
    if budget is None:
        raise CommandError(f"No such budget: {pk}.")
    return budget


def _build_budget(*, unit: str, period: str, agent: str | None, key: str | None, account: str | None, **options: Any) -> Budget:
    budget = Budget(scope=Scope.ALL, unit=unit, period=period)
    if agent is not None:  # an empty name, as from an unset shell variable, must not create a budget for everything
        try:
            validate_did(agent)
        except ValidationError:
            raise CommandError(f"--agent: {agent[:80]!r} is not {DID_DESCRIPTION}.") from None
        budget.scope, budget.subject = Scope.AGENT, agent
    elif key is not None:
        prefix = key.removeprefix("lh_").split("_")[0]
        row = AgentKey.objects.filter(prefix=prefix).first()
        if row is None:
            prefixes = AgentKey.objects.order_by("-pk").values_list("prefix", flat=True)[:MAX_SUGGESTIONS]
            raise CommandError(f"--key: no such API key: {key[:80]}.{suggest_match(prefix, prefixes)}")
        budget.scope, budget.subject = Scope.KEY, str(row.pk)
    elif (name := options["type"]) is not None:
        if not EnvironmentType.objects.filter(name=name).exists():
            names = EnvironmentType.objects.values_list("name", flat=True)
            raise CommandError(f"--type: no such environment type: {name[:80]}.{suggest_match(name, names)}")
        budget.scope, budget.subject = Scope.ENVIRONMENT_TYPE, name
    elif account is not None:
        if not Account.objects.filter(name=account).exists():
            accounts = Account.objects.values_list("name", flat=True)
            raise CommandError(f"--account: no such account: {account[:80]}.{suggest_match(account, accounts)}")
        budget.scope, budget.subject = Scope.ACCOUNT, account
    elif (name := options["project"]) is not None:
        if not Project.objects.filter(name=name).exists():
            projects = Project.objects.values_list("name", flat=True)
            raise CommandError(f"--project: no such project: {name[:80]}.{suggest_match(name, projects)}")
        budget.scope, budget.subject = Scope.PROJECT, name
    return budget


def _apply_options(
    budget: Budget,
    *,
    amount: str | None,
    kind: str | None,
    warn: int | None,
    grace: str | None,
    active: str = "",
    **options: Any,
) -> None:
    if amount is not None:
        try:
            budget.amount = Decimal(amount)
        except InvalidOperation:
            raise CommandError(f"{amount[:80]!r} is not a decimal number.") from None
    if kind:
        budget.hard = kind == "hard"
    if warn is not None:
        budget.warn_percent = warn
    if grace is not None:
        budget.grace = timedelta(0) if grace == "0" else parse_duration("--grace", grace)
    if active:
        budget.active = active == "yes"


def _format_budget(budget: Budget) -> str:
    now = database_time.now()
    spent = budgets.get_spent(budget, now)
    notes = ["hard" if budget.hard else "soft", f"warns at {budget.warn_percent} %"]
    if budget.hard:
        notes.append(f"grace {budget.grace.total_seconds():g}s")
    if not budget.active:
        notes.append("disabled")
    elif budgets.is_over(budget, spent, budgets.compute_reservation(budget, now=now)):
        notes.append("EXHAUSTED")
    elif day := predict_exhaustion_date(budget, now):
        notes.append(f"exhausted {'in this hour' if budget.period == Period.HOUR else f'on {day}'} at the current rate")
    if uncertainty := str(budgets.get_uncertainty(budget, now)):
        notes.insert(0, uncertainty)
    return f"{budget.pk} {budget}: {format_decimal(spent)} spent ({', '.join(notes)})"
