"""manage.py account: list, show, add, set and assign."""

import json
from datetime import UTC, date, timedelta

import pytest
from django.core.management import CommandError
from django.utils import timezone

from billing.dates import EPOCH_DATE
from billing.models import Account, Membership, Statement
from tests.commands.manage import call
from tests.conftest import NOW

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"


@pytest.fixture(autouse=True)
def lab() -> Account:
    Account.objects.get_or_create(name="house")
    return Account.objects.create(name="lab", title="Laboratory")


def test_accounts_are_added_changed_and_listed() -> None:
    assert call("account", "add", "school", "--title", "A school") == "school added: title=A school\n"
    assert call("account", "set", "school", "--title", "") == "school changed: title=-\n"
    call("account", "assign", ADA, "lab")
    assert call("account", "list").splitlines() == [
        "house all other agents (Agents without an account)", "lab 1 agent (Laboratory)", "school 0 agents",
    ]  # fmt: skip
    assert json.loads(call("account", "show", "lab", "--json")) == {"name": "lab", "title": "Laboratory", "agents": [ADA]}


def test_an_agent_is_assigned_from_the_beginning_and_moved_on_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("account", "assign", ADA, "lab") == f"{ADA} assigned to lab from {EPOCH_DATE} on\n"
    assert f"No agent {ADA} is known yet" in capsys.readouterr().err
    later = timezone.now().astimezone(UTC).date() + timedelta(days=9)
    assert call("account", "assign", ADA, "house", "--since", later) == f"{ADA} assigned to house from {later} on\n"
    assert [*Membership.objects.values_list("account__name", "since")] == [("lab", EPOCH_DATE), ("house", later)]
    assert json.loads(call("account", "show", "lab", "--json"))["agents"] == [ADA]


def test_a_dry_run_changes_nothing() -> None:
    assert call("account", "assign", ADA, "lab", "--dry-run") == f"{ADA} would be assigned to lab from {EPOCH_DATE} on\n"
    assert not Membership.objects.exists()


def test_a_closed_month_is_not_changed(lab: Account) -> None:
    amounts = dict.fromkeys(("subtotal", "credit_used", "total"), 0)
    Statement.objects.create(account=lab, month=date(2026, 10, 1), closed_at=NOW, closed_by="eve", **amounts)
    for args in ([], ["--dry-run"]):
        with pytest.raises(CommandError, match=r"^--since: lab has closed 2026-10"):
            call("account", "assign", ADA, "lab", "--since", "2026-10-15", *args)
    assert call("account", "assign", ADA, "lab") == f"{ADA} assigned to lab from 2026-11-01 on\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["assign", "ada", "lab"], "is not a DID"), (["assign", ADA, "lib"], "no account 'lib'. Did you mean lab?"),
        (["assign", ADA, "house"], "already belongs to house"), (["assign", BOB, "lab"], "already belongs to lab"),
        (["assign", ADA, "lab", "--since", "soon"], "^--since: must be a day"),
        (["assign", BOB, "house", "--since", "2026-11-01"], "already has a membership that begins on this day"),
        (["add", "lab"], "^name: Account with this Name already exists"), (["add", "a b"], "^name: Enter a valid"),
        (["set", "lab", "--title", "x" * 201], "^--title: Ensure"), (["set", "lab"], "State at least one setting"),
        (["show", "none"], "no account 'none'"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(lab: Account, args: list[str], message: str) -> None:
    Membership(agent_did=BOB, account=lab, since=date(2026, 11, 1)).save()
    before = [[*model.objects.values()] for model in (Account, Membership)]
    with pytest.raises(CommandError, match=message):
        call("account", *args)
    assert [[*model.objects.values()] for model in (Account, Membership)] == before
