"""manage.py budget: what may be spent, listed, stated and taken back."""

from argparse import ArgumentParser
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from billing import budgets
from billing.forecast import predict_exhaustion_date
from billing.models import Account, Budget
from billing.models.budgets import Period, Scope, Unit
from billing.pricing import format_decimal
from leases.management.base import parse_duration, report_errors
from leases.models import DID_DESCRIPTION, AgentKey, EnvironmentType, validate_did


class Command(BaseCommand):
    help = "List, add, change or remove budgets. Each says in one line what came of it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        acts = parser.add_subparsers(dest="act", required=True)
        acts.add_parser("list", help="one line for each budget")
        add = acts.add_parser("add", help="state a new budget")
        add.add_argument("amount", help="such as 12.50")
        add.add_argument("unit", choices=Unit.values)
        add.add_argument("period", choices=Period.values, help="of the calendar in UTC")
        whose = add.add_mutually_exclusive_group(required=True)
        whose.add_argument("--all", action="store_true", help="for everything")
        whose.add_argument("--agent", metavar="DID")
        whose.add_argument("--key", metavar="PREFIX", help="of an API key, as it is shown in the console")
        whose.add_argument("--type", metavar="NAME", help="an environment type, such as catan")
        whose.add_argument("--account", metavar="NAME")
        change = acts.add_parser("set", help="change a budget: one that is raised is open again at once")
        change.add_argument("id", type=int)
        change.add_argument("--amount")
        change.add_argument("--active", choices=["yes", "no"], help="no: it is kept, and counts for nothing")
        change.add_argument(
            "--hard", action="store_const", const="hard", dest="kind", help="refuse and end leases once it is spent"
        )
        for one in (add, change):
            one.add_argument("--soft", action="store_const", const="soft", dest="kind", help="only warn")
            one.add_argument("--warn", type=int, metavar="PERCENT", help="warn from here on; default: 80")
            one.add_argument("--grace", help='how long what runs may go on once it is spent: "5m", or 0; default: 5m')
        remove = acts.add_parser("remove", help="remove a budget")
        remove.add_argument("id", type=int)

    def handle(self, *args: Any, act: str, **given: Any) -> None:
        with report_errors(given["verbosity"]):
            if act == "list":
                for budget in Budget.objects.all():
                    self.stdout.write(_format_budget(budget))
                return
            if act == "remove":
                budget = _find_budget(given["id"])
                said = _format_budget(budget)
                budget.delete()
                self.stdout.write(f"removed: {said}")
                return
            budget = _find_budget(given["id"]) if act == "set" else _build_budget(**given)
            _apply_options(budget, **given)
            try:
                budgets.save_budget(budget, now=timezone.now())
            except ValidationError as wrong:
                raise CommandError("; ".join(wrong.messages)) from None
            self.stdout.write(f"{'changed' if act == 'set' else 'added'}: {_format_budget(budget)}")


def _find_budget(pk: int) -> Budget:
    found = Budget.objects.filter(pk=pk).first()
    if found is None:
        raise CommandError(f"There is no budget {pk}.")
    return found


def _build_budget(*, unit: str, period: str, agent: str | None, key: str | None, account: str | None, **given: Any) -> Budget:
    budget = Budget(scope=Scope.ALL, unit=unit, period=period)
    if agent is not None:  # a name that is empty, an unset variable say, is no budget for everything
        try:
            validate_did(agent)
        except ValidationError:
            raise CommandError(f"--agent: {agent[:80]!r} is not {DID_DESCRIPTION}.") from None
        budget.scope, budget.subject = Scope.AGENT, agent
    elif key is not None:
        row = AgentKey.objects.filter(prefix=key.removeprefix("lh_").split("_")[0]).first()
        if row is None:
            raise CommandError(f"--key: there is no API key {key[:80]}.")
        budget.scope, budget.subject = Scope.KEY, str(row.pk)
    elif (name := given["type"]) is not None:
        if not EnvironmentType.objects.filter(name=name).exists():
            raise CommandError(f"--type: there is no environment type {name[:80]}.")
        budget.scope, budget.subject = Scope.ENVIRONMENT_TYPE, name
    elif account is not None:
        if not Account.objects.filter(name=account).exists():
            raise CommandError(f"--account: there is no account {account[:80]}.")
        budget.scope, budget.subject = Scope.ACCOUNT, account
    return budget


def _apply_options(
    budget: Budget, *, amount: str | None, kind: str | None, warn: int | None, grace: str | None, active: str = "", **given: Any
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
    now = timezone.now()
    spent = budgets.get_spent(budget, now)
    notes = ["hard" if budget.hard else "soft", f"warns at {budget.warn_percent} %"]
    if budget.hard:
        notes.append(f"grace {budget.grace.total_seconds():g}s")
    if not budget.active:
        notes.append("not active")
    elif spent >= budget.amount:
        notes.append("SPENT")
    elif day := predict_exhaustion_date(budget, now):
        notes.append(f"runs out on {day} at this pace")
    return f"{budget.pk} {budget}: {format_decimal(spent)} spent ({', '.join(notes)})"
