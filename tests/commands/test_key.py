"""manage.py key: list and show."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.utils import timezone

from leases import api_keys
from leases.models import AgentKey
from tests.commands.manage import call

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"


@pytest.fixture
def keys() -> dict[str, AgentKey]:
    """An operator's key that was used, a key of ada and bob that has expired, and a revoked one of bob, oldest first."""
    now = timezone.now()
    operator, text = api_keys.issue_key([], operator=True, name="ops", now=now - timedelta(days=3))
    assert api_keys.find_active_key(text, now=now)
    expired, _ = api_keys.issue_key(
        [ADA, BOB], scopes=["read"], environment_types=["catan"], limits={"max_gpus": 1}, expires_at=now - timedelta(hours=1),
        now=now - timedelta(days=2),
    )  # fmt: skip
    revoked, _ = api_keys.issue_key([BOB], now=now - timedelta(days=1))
    api_keys.revoke_key(revoked, now=now)
    return {"operator": operator, "expired": expired, "revoked": revoked}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["revoked", "expired", "operator"]), (["--active"], ["operator"]), (["--agent", BOB], ["revoked", "expired"]),
        (["--agent", ADA], ["expired"]), (["--agent", ADA, "--active"], []),
    ],
)  # fmt: skip
def test_keys_are_listed_by_agent_and_state(keys: dict[str, AgentKey], args: list[str], expected: list[str]) -> None:
    prefixes = [keys[name].prefix for name in expected]
    assert [line.split()[0] for line in call("key", "list", *args).splitlines()] == prefixes
    assert [document["prefix"] for document in json.loads(call("key", "list", "--json", *args))["results"]] == prefixes


def test_a_line_states_agents_scopes_last_use_and_expiry(keys: dict[str, AgentKey]) -> None:
    revoked, expired, operator = call("key", "list").splitlines()
    assert " active all agents leases,costs used 20" in operator and operator.endswith(" expires never ops")
    assert f" expired {ADA},{BOB} read used never expires 20" in expired
    assert revoked.endswith(f" revoked {BOB} leases,costs used never expires never")


def test_a_key_is_shown_by_its_prefix(keys: dict[str, AgentKey]) -> None:
    prefix = keys["expired"].prefix
    document: dict[str, Any] = json.loads(call("key", "show", f"lh_{prefix}_…", "--json"))
    assert (document["agents"], document["limits"], document["environment_types"]) == ([ADA, BOB], ["at most 1 GPU"], ["catan"])
    lines = call("key", "show", prefix).splitlines()
    assert f"agents: {ADA}, {BOB}" in lines and "operator: no" in lines and "pools: -" in lines


def test_no_secret_is_printed(keys: dict[str, AgentKey]) -> None:
    printed = call("key", "list", "--json") + "".join(call("key", "show", row.prefix) for row in AgentKey.objects.all())
    for row in AgentKey.objects.all():
        assert row.digest not in printed and row.first_digest not in printed


@pytest.mark.parametrize(
    ("args", "message"), [(["list", "--agent", "ada"], "is not a DID"), (["show", "0badc0de"], "no API key '0badc0de'")]
)
def test_invalid_arguments_are_named(args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call("key", *args)
