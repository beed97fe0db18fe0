"""manage.py catalog: list, show, add and set."""

import json

import pytest
from django.core.management import CommandError

from leases.catalog.models import CatalogAgent
from tests.commands.manage import call

pytestmark = pytest.mark.django_db
REVIEWER = ["catalog", "add", "reviewer", "--title", "Reviewer", "--environment-type", "coding"]


def test_an_agent_is_added_changed_shown_and_listed() -> None:
    added = call(
        *REVIEWER, "--model", "opus", "--denied-commands", "git push*", "rm *", "--system-prompt", "Be brief.\nReview."
    )
    assert added == (
        'reviewer added: title=Reviewer, environment_type=coding, model=opus, system_prompt="Be brief.\\nReview.", '
        "denied_commands=git push* rm *\n"
    )
    assert call("catalog", "list") == "sandbox:reviewer claude-code opus in coding: Reviewer\n"
    changed = call("catalog", "set", "reviewer", "--no-enabled", "--model", "", "--max-cost", "0.5", "--max-turns", "9")
    assert changed == "reviewer changed: enabled=no, model=-, max_turns=9, max_cost=0.5\n"
    assert call("catalog", "list") == "sandbox:reviewer claude-code default model in coding disabled: Reviewer\n"
    document = json.loads(call("catalog", "show", "reviewer", "--json"))
    assert (document["enabled"], document["max_cost"], document["environment_type"]) == (False, "0.5", "coding")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["catalog", "add", "helper", "--environment-type", "coding"], "^--title: This field cannot be blank"),
        (["catalog", "add", "helper", "--title", "Helper"], "^--environment-type: This field cannot be null"),
        (["catalog", "add", "helper", "--environment-type", "codign"], "^--environment-type: .*Did you mean coding?"),
        (["catalog", "add", "helper", "--environment-type", "none"], "^--environment-type: There is no"),
        (["catalog", "set", "reviewer", "--cli", "vi"], "^--cli: .*is not a valid choice"),
        (["catalog", "set", "reviewer", "--permission-mode", "all"], "^--permission-mode: .*is not a valid choice"),
        (["catalog", "set", "reviewer", "--max-turns", "10001"], "^--max-turns: Ensure"),
        (["catalog", "set", "reviewer", "--allowed-tools", "x" * 201], "^--allowed-tools: Must be a list"),
        (["catalog", "show", "reviwer"], "no catalog agent 'reviwer'. Did you mean reviewer?"),
        (REVIEWER, "^name: Catalog agent with this Name already exists"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(args: list[str], message: str) -> None:
    call(*REVIEWER)
    before = [*CatalogAgent.objects.values()]
    with pytest.raises(CommandError, match=message):
        call(*args)
    assert [*CatalogAgent.objects.values()] == before
