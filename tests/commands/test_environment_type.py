"""manage.py environment_type: list, show, add and set."""

import json
from datetime import timedelta
from decimal import Decimal

import pytest
from django.core.management import CommandError

from leases.models import EnvironmentType
from sandboxes.models import Policy, Pool
from tests.commands.manage import call

pytestmark = pytest.mark.django_db


def test_an_environment_type_is_added_changed_shown_and_listed() -> None:
    Policy.objects.create(name="web")
    added = call(
        "environment_type", "add", "chess", "--ttl", "1h", "--max-ttl", "8h", "--expiry-conditions", "game.finished", "aborted",
        "--policy", "web", "--turn-argv", "python3", "--turn-argv=-u", "--turn-argv", "turn.py", "--open-to-project",
    )  # fmt: skip
    assert added == (
        "chess added: expiry_conditions=game.finished aborted, ttl=3600, max_ttl=28800, turn_argv=python3 -u turn.py, "
        "policy=web, open_to_project=yes\n"
    )
    row = EnvironmentType.objects.get(name="chess")
    assert (row.ttl, row.max_ttl, row.turn_argv) == (timedelta(hours=1), timedelta(hours=8), ["python3", "-u", "turn.py"])
    listed = {line.split()[0]: line for line in call("environment_type", "list").splitlines()}
    assert listed["chess"] == "chess pools default, policy web, ttl 3600s of 28800s, 2 end conditions"
    call(
        "environment_type", "set", "chess", "--policy", "none", "--auto-stop", "0", "--suspend-after", "5m", "--sleep-after",
        "10m", "--llm-limit", "2.5", "--llm-token-limit", "70000", "--restricted",
    )  # fmt: skip
    document = json.loads(call("environment_type", "show", "chess", "--json"))
    assert (document["policy"], document["auto_stop"], document["suspend_after"]) == (None, 0, 300)
    assert (document["sleep_after"], document["llm_limit"], document["restricted"]) == ("10m", "2.5", True)
    assert (document["pools"], document["limits"]) == (["default"], [])
    row.refresh_from_db()
    assert (row.llm_limit, row.llm_token_limit) == (Decimal("2.5"), 70_000)
    call("environment_type", "set", "chess", "--suspend-after", "none", "--expiry-conditions")
    row.refresh_from_db()
    assert (row.suspend_after, row.expiry_conditions, row.policy) == (None, [], None)
    assert "pools: default" in call("environment_type", "show", "chess").splitlines()


def test_pools_and_limits_are_shown_and_set_by_their_own_commands(pool: Pool) -> None:
    call("environment", "pools", "catan", pool.name, "default")
    call("limits", "type", "catan", "--max-gpus", "1")
    document = json.loads(call("environment_type", "show", "catan", "--json"))
    assert (document["pools"], document["limits"]) == ([pool.name, "default"], ["at most 1 GPU"])
    with pytest.raises(CommandError, match="unrecognized arguments: --pool"):
        call("environment_type", "set", "catan", "--pool", "default")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["set", "catan", "--ttl", "soon"], "^--ttl: 'soon' is not a duration"),
        (["set", "catan", "--ttl", "none"], "^--ttl: "),
        (["set", "catan", "--ttl", "48h"], "^ttl must be greater than 0 and at most max_ttl"),
        (["set", "catan", "--ttl", "0"], "^ttl must be greater than 0"),
        (["set", "catan", "--suspend-after", "0"], "^--suspend-after: Must be at least 1 second"),
        (["set", "catan", "--sleep-after", "soon"], "^--sleep-after: "),
        (["set", "catan", "--expiry-conditions", "a", "a"], "^--expiry-conditions: Must not contain a condition twice"),
        (["set", "catan", "--turn-argv"], "^--turn-argv: This field cannot be blank"),
        (["set", "catan", "--turn-collection", "a"], "^--turn-collection: Not "),
        (["set", "catan", "--policy", "seald"], "^--policy: There is no policy 'seald'. Did you mean sealed?"),
        (["set", "catan", "--llm-limit", "-1"], "^--llm-limit: Ensure"),
        (["set", "catan"], "State at least one setting"),
        (["set", "chess", "--ttl", "1h"], "no environment type 'chess'"), (["show", "chess"], "no environment type 'chess'"),
        (["add", "catan"], "^name: Environment type with this Name already exists"),
        (["add", "a b"], "^name: Enter a valid"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(args: list[str], message: str) -> None:
    before = [*EnvironmentType.objects.values()]
    with pytest.raises(CommandError, match=message):
        call("environment_type", *args)
    assert [*EnvironmentType.objects.values()] == before
