"""manage.py lease: list, show, renew and limit."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.utils import timezone

from leases import execution, leasing
from leases.models import Lease
from sandboxes.models import Sandbox
from tests.commands.manage import call

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"
NO_LEASE = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def leases(grant: Callable[..., Lease]) -> dict[str, Lease]:
    """Leases by their use: of ada (awake), of bob (released), and of ada in another type (elapsed, not swept yet)."""
    now = timezone.now()
    active = grant(ADA, "game-1", now=now - timedelta(seconds=2))
    execution.ensure_sandbox_ready(active.pk, now=now)
    ended = grant(BOB, "game-1", now=now - timedelta(seconds=3))
    leasing.release(ended.pk, now=now)
    elapsed = grant(ADA, "task-1", now=now - timedelta(days=2), environment_type="coding")
    return {"active": active, "ended": ended, "elapsed": elapsed}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["active", "ended", "elapsed"]),
        (["--agent", ADA], ["active", "elapsed"]),
        (["--environment", "game-1"], ["active", "ended"]),
        (["--type", "coding"], ["elapsed"]),
        (["--status", "active"], ["active"]),
        (["--status", "expired"], ["ended", "elapsed"]),
        (["--status", "destroyed"], []),
        (["--limit", "1"], ["active"]),
        (["--agent", ADA, "--type", "catan", "--status", "expired"], []),
    ],
)
def test_leases_are_listed_and_filtered(leases: dict[str, Lease], args: list[str], expected: list[str]) -> None:
    pks = [str(leases[name].pk) for name in expected]
    assert [line.split()[0] for line in call("lease", "list", *args).splitlines()] == pks
    documents = json.loads(call("lease", "list", "--json", *args))["results"]
    assert [document["id"] for document in documents] == pks


def test_a_line_states_type_status_end_and_sandbox(leases: dict[str, Lease]) -> None:
    active, ended, elapsed = call("lease", "list").splitlines()
    assert " did:plc:ada::game-1 catan active until 20" in active and active.endswith(", sandbox warm")
    assert ended.endswith(" did:plc:bob::game-1 catan expired released, no sandbox")
    assert elapsed.endswith(" did:plc:ada::task-1 coding expired ttl, no sandbox")


def test_a_lease_is_shown_with_its_sandbox_and_model_calls(leases: dict[str, Lease]) -> None:
    lease = leases["active"]
    document = json.loads(call("lease", "show", lease.pk, "--json"))
    assert (document["id"], document["sandbox"]["state"], document["llm"]["calls"]) == (str(lease.pk), "warm", 0)
    lines = call("lease", "show", lease.pk).splitlines()
    assert f"id: {lease.pk}" in lines and "status: active" in lines
    assert len(lines) == len(document)


def test_a_lease_is_renewed_and_an_ended_one_is_not(leases: dict[str, Lease]) -> None:
    lease = leases["active"]
    output = call("lease", "renew", lease.pk)
    renewed = Lease.objects.get(pk=lease.pk)
    assert renewed.expires_at > lease.expires_at
    assert output == f"{lease.pk} renewed until {renewed.expires_at.isoformat(timespec='seconds')}\n"
    assert "expires_at" in json.loads(call("lease", "renew", lease.pk, "--json"))
    for name, reason in (("ended", "released"), ("elapsed", "ttl")):
        with pytest.raises(CommandError, match=rf"The lease ended \({reason}\)"):
            call("lease", "renew", leases[name].pk)


def test_limits_on_model_calls_are_printed_and_set(leases: dict[str, Lease]) -> None:
    lease = leases["active"]
    assert call("lease", "limit", lease.pk) == f"{lease.pk} USD none, tokens none\n"
    assert call("lease", "limit", lease.pk, "--usd", "2.50") == f"{lease.pk} USD 2.5, tokens none\n"
    limits = json.loads(call("lease", "limit", lease.pk, "--usd", "none", "--tokens", "7000", "--json"))
    assert limits == {"limit": None, "token_limit": 7000}
    assert Sandbox.objects.get(holder=lease.pk).llm_token_limit == 7000
    with pytest.raises(CommandError, match=r"The lease ended \(released\)"):
        call("lease", "limit", leases["ended"].pk, "--tokens", "1")


@pytest.mark.parametrize(
    ("option", "value"), [("--usd", "-1"), ("--usd", "NaN"), ("--usd", "much"), ("--tokens", "1.5"), ("--tokens", "-1")]
)
def test_an_invalid_limit_names_its_option(leases: dict[str, Lease], option: str, value: str) -> None:
    with pytest.raises(CommandError, match=f"{option}: .* Or 'none'"):
        call("lease", "limit", leases["active"].pk, f"{option}={value}")
    assert Lease.objects.get(pk=leases["active"].pk).llm_limit is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["list", "--agent", "ada"], "is not a DID"), (["list", "--agent", ""], "is not a DID"),
        (["list", "--environment", "a b"], "is not 1 to 200 letters"),
        (["list", "--type", "chess"], "no environment type 'chess'"),
        (["list", "--status", "ended"], "invalid choice"), (["show", "x"], "is not a lease id"),
        (["show", NO_LEASE], "no such lease"), (["renew", NO_LEASE], "no such lease"),
        (["limit", NO_LEASE], "no such lease"), (["limit", NO_LEASE, "--usd", "1"], "no such lease"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call("lease", *args)
