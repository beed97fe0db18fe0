"""manage.py join, turn, condition and environment."""

import io
import json
import re
from collections.abc import Callable

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.utils import timezone

from leases.environments.models import Environment
from leases.models import AgentKey, EnvironmentType, Lease, Turn
from sandboxes.models import Pool

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"


def manage(*args: str) -> str:
    output = io.StringIO()
    call_command(*args, stdout=output)
    return output.getvalue()


@pytest.fixture(autouse=True)
def types(pool: Pool) -> None:
    EnvironmentType.objects.update(pool=pool, turn_argv=["cat"])


def test_game_is_played_by_commands() -> None:
    assert manage("environment", "create", "game-9", "--type", "catan", "--phase", "setup") == "game-9 created\n"
    assert manage("environment", "start", "game-9") == "game-9 started\n"
    assert manage("environment", "phase", "game-9", "trade") == "game-9 phase set\n"
    assert "joined: did:plc:ada::game-9, sandbox " in manage("join", "game-9", "--agent", ADA, "--type", "catan")
    assert "already a member" in manage("join", "game-9", "--agent", ADA, "--type", "catan")
    lease = Lease.objects.get()
    for _ in range(2):
        assert json.loads(manage("turn", str(lease.pk), "1", "--state", '{"n": 1}')) == {"n": 1}
    assert Turn.objects.count() == 1
    shown = manage("environment", "show", "game-9")
    assert "game-9 catan open trade" in shown and f"{ADA} {lease.pk} active  1 turns, 0 skipped, 0 USD" in shown
    ended = manage("condition", "game-9", "game.finished", "--outcome", "ada wins")
    assert ended == "game-9: 1 lease ended\n"
    assert Environment.objects.get().outcome == "ada wins"
    assert manage("environment", "list", "--open") == ""
    assert manage("environment", "list").startswith("game-9 catan ended trade ")


def test_environment_is_ended_with_its_leases(lease: Lease) -> None:
    assert manage("environment", "end", "game-1", "--outcome", "draw") == "game-1 ended: 1 lease\n"
    assert manage("environment", "end", "game-1") == "game-1 ended: 0 leases\n"
    shown = manage("environment", "show", "game-1")
    assert re.search(r'outcome of \S+Z: "draw"', shown) and f"participant: {lease.agent_did}" in shown


def test_environment_is_created_for_an_agent_opened_and_opened_again() -> None:
    assert manage("environment", "create", "e-1", "--type", "coding", "--agent", ADA) == "e-1 created\n"
    assert manage("environment", "add", "e-1", ADA, BOB) == "e-1: 1 participant added\n"
    assert manage("environment", "remove", "e-1", BOB) == f"e-1: {BOB} removed, 0 leases ended\n"
    assert manage("environment", "access", "e-1", "project") == "e-1 access set\n"
    manage("environment", "end", "e-1")
    assert manage("environment", "create", "e-1", "--type", "run", "--reopen") == "e-1 created\n"
    assert list(Environment.objects.values_list("type_id", "open_to_project")) == [("run", False)]


def test_project_is_created_and_agents_move_to_it() -> None:
    assert manage("project", "create", "acme") == "acme created\n"
    manage("create_key", "--agent", ADA)
    assert manage("project", "move", "acme", ADA) == "1 agent moved to acme\n"
    assert manage("project", "list") == "acme 1 agent\ndefault 0 agents\n"
    with pytest.raises(CommandError, match="another project"):
        manage("create_key", "--agent", ADA)
    with pytest.raises(CommandError, match="letters"):
        manage("project", "create", "a b")


def test_skipped_turn_exits_with_1(grant: Callable[..., Lease]) -> None:
    lease = grant(now=timezone.now())
    EnvironmentType.objects.update(turn_argv=["false"])
    with pytest.raises(SystemExit) as ended:
        manage("turn", str(lease.pk), "1")
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("join", "a b", "--agent", ADA, "--type", "catan"), "is not 1 to 200 letters"),
        (("join", "game-1", "--agent", "ada", "--type", "catan"), "is not a DID"),
        (("turn", "x", "1"), "is not a lease id"), (("turn", "x", "1", "--state", "[]"), "--state: not a JSON object"),
        (("turn", "x", "1", "--state", "{"), "--state: not JSON"), (("turn", "x", "1" * 30), "NUMBER"),
        (("condition", "game-1", "a b"), "is not 1 to 64 letters"),
        (("environment", "show", "no-game"), "There is no such environment"),
        (("environment", "create", "game-1", "--type", "chess"), "no such environment type"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        manage(*args)
    assert not Environment.objects.exists()


def test_limits_of_resources_are_printed_set_and_removed(pool: Pool) -> None:
    issued = manage("create_key", "--agent", ADA, "--max-memory-mib", "1024", "--allowed-sizes", "lite", "basic", "--json")
    key = AgentKey.objects.get()
    assert key.prefix in issued
    levels = {"key": key.prefix, "type": "catan", "pool": pool.name}
    assert manage("limits", "key", key.prefix).endswith(": at most 1,024 MiB of memory; sizes: lite, basic\n")
    for level, name in levels.items():
        shown = manage("limits", level, name, "--max-memory-mib", "none", "--max-gpus", "1", "--allowed-sizes")
        assert shown == f"{level} {name}: at most 1 GPU\n"
    pool.refresh_from_db()
    assert (pool.max_gpus, pool.max_memory_mib) == (1, None)
    for args, message in (
        (["pool", "none"], "no pool 'none'"),
        (["pool", pool.name, "--max-disk-mib", "1GB"], "--max-disk-mib"),
        (["type", "catan", "--max-memory-mib", "1"], "greater than or equal to 16"),
        (["type", "catan", "--allowed-gpu-types", "h100"], "in capitals"),
    ):
        with pytest.raises(CommandError, match=message):
            manage("limits", *args)
    with pytest.raises(CommandError, match="in capitals"):
        manage("create_key", "--agent", ADA, "--allowed-gpu-types", "h100")
    assert EnvironmentType.objects.get(name="catan").allowed_gpu_types == []


def test_pools_of_a_type_are_listed_and_replaced(pool: Pool) -> None:
    Pool.objects.create(name="second", restricted=True)
    assert manage("environment", "pools", "catan") == f"catan: {pool.name}\n"
    changed = manage("environment", "pools", "catan", "second", pool.name, "--cheapest")
    assert changed == f"catan: second {pool.name} (cheapest first)\n"
    assert manage("environment", "pools", "catan", "--no-cheapest") == f"catan: second {pool.name}\n"
    for names, message in (
        (["catan", "none"], "no pool 'none'"),
        (["catan", "second", "second"], "listed once"),
        (["chess"], "no environment type 'chess'"),
    ):
        with pytest.raises(CommandError, match=message):
            manage("environment", "pools", *names)
    assert manage("environment", "pools", "catan") == f"catan: second {pool.name}\n"
