"""manage.py quota: list, set and remove."""

import json
from collections.abc import Callable
from uuid import UUID

import pytest
from django.core.management import CommandError

from leases import execution
from leases.models import Lease
from sandboxes.errors import SandboxError
from sandboxes.models import Pool, Quota
from tests.commands.manage import call
from tests.conftest import NOW

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"


def start(pk: UUID) -> None:
    execution.ensure_sandbox_ready(pk, now=NOW)


def test_a_quota_limits_the_agent_until_it_is_removed(pool: Pool, grant: Callable[..., Lease]) -> None:
    start(grant(ADA, "game-1").pk)
    line = f"{pool.name} {ADA} 1 used, at most 1, 0 guaranteed\n"
    assert call("quota", "set", pool.name, ADA, "--most", "1") == f"set: {line}"
    second = grant(ADA, "game-2").pk
    with pytest.raises(SandboxError) as refused:
        start(second)
    assert refused.value.code == "quota_exceeded"
    assert call("quota", "list") == line
    assert call("quota", "remove", pool.name, ADA) == f"removed: {pool.name} {ADA}\n"
    assert call("quota", "list") == ""
    assert call("quota", "list", "--all") == f"{pool.name} {ADA} 1 used, no limit, 0 guaranteed\n"
    start(second)
    assert Quota.objects.get(pool=pool, agent_did=ADA).used == 2


def test_a_quota_of_an_agent_without_sandboxes_is_added_with_a_warning(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    call("quota", "set", pool.name, BOB, "--most", "3", "--guaranteed", "2")
    assert f"No agent {BOB} is known yet" in capsys.readouterr().err
    call("quota", "set", pool.name, BOB, "--most", "none")
    assert Quota.objects.filter(pool=pool, agent_did=BOB, most=None, guaranteed=2).exists()


def test_quotas_are_listed_by_pool_and_agent(pool: Pool) -> None:
    for name, agent in ((pool.name, ADA), (pool.name, BOB), ("default", ADA)):
        call("quota", "set", name, agent, "--most", "1")

    def list_pairs(*args: str) -> list[tuple[str, str]]:
        results = json.loads(call("quota", "list", "--json", *args))["results"]
        assert len(call("quota", "list", *args).splitlines()) == len(results)
        return [(each["pool"], each["agent_did"]) for each in results]

    assert list_pairs() == [("default", ADA), (pool.name, ADA), (pool.name, BOB)]
    assert list_pairs("--pool", pool.name) == [(pool.name, ADA), (pool.name, BOB)]
    assert list_pairs("--agent", ADA) == [("default", ADA), (pool.name, ADA)]


def test_a_dry_run_changes_nothing(pool: Pool) -> None:
    line = f"{pool.name} {ADA} 0 used, at most 2, 0 guaranteed\n"
    assert call("quota", "set", pool.name, ADA, "--most", "2", "--dry-run") == f"would be set: {line}"
    assert not Quota.objects.exists()
    call("quota", "set", pool.name, ADA, "--most", "2")
    assert call("quota", "remove", pool.name, ADA, "--dry-run") == f"would be removed: {pool.name} {ADA}\n"
    assert call("quota", "list") == line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["set", "default", ADA], "State --most or --guaranteed"),
        (["set", "default", ADA, "--most", "-1"], "^--most: must be a number or 'none'"),
        (["set", "default", ADA, "--guaranteed", "none"], "^--guaranteed: must be a number"),
        (["set", "default", ADA, "--most", "1", "--guaranteed", "2"], "guarantee may not exceed the maximum"),
        (["set", "defualt", ADA, "--most", "1"], "no pool 'defualt'. Did you mean default?"),
        (["set", "default", "ada", "--most", "1"], "is not a DID"), (["list", "--agent", ""], "is not a DID"),
        (["list", "--pool", ""], "no pool ''"), (["remove", "default", ADA], "has no quota in the pool default"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(memory: object, args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call("quota", *args)
    assert not Quota.objects.exists()
