"""create_key, acquire, exec, release: output and exit codes."""

import json
from datetime import timedelta
from io import StringIO
from pathlib import Path
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.utils import timezone

from controlplane import schedules
from leases import api_keys, execution
from leases.models import Agent, AgentKey, Lease, LeaseEvent
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import ProgramResult
from tests.commands.manage import call, run_manage

pytestmark = pytest.mark.django_db
NO_LEASE = "00000000-0000-0000-0000-000000000000"
ACQUIRE = ["acquire", "--agent", "did:plc:ada", "--environment", "game-1", "--type", "catan"]


@pytest.fixture(autouse=True)
def only_memory(memory) -> None:
    Pool.objects.update(provider="memory")


@pytest.fixture
def lease() -> str:
    return str(json.loads(call(*ACQUIRE, "--json"))["id"])


def test_a_key_is_printed_once_and_can_act_for_its_agents() -> None:
    output = call("create_key", "--agent", "did:plc:ada", "--agent", "did:plc:bob", "--name", "game server", "--json")
    assert output.count("\n") == 1
    created = json.loads(output)
    row = api_keys.find_active_key(created["key"], now=timezone.now())
    assert row is not None
    assert (row.dids, row.operator, row.name) == (["did:plc:ada", "did:plc:bob"], False, "game server")
    assert row.prefix == created["prefix"]
    output = call("create_key", "--operator")
    assert output.endswith("(for all agents; not shown again)\n")
    assert api_keys.find_active_key(output.split()[0], now=timezone.now()) is not None


def test_a_key_has_scopes_and_an_expiry() -> None:
    call("create_key", "--operator", "--scope", "read", "--scope", "costs", "--expires-in", "90d")
    row = AgentKey.objects.get()
    assert (row.scopes, row.expires_at) == (["read", "costs"], row.created_at + timedelta(days=90))
    for args, message in [(["--scope", "all"], "invalid choice"), (["--expires-in", "soon"], "--expires-in")]:
        with pytest.raises(CommandError, match=message):
            call("create_key", "--operator", *args)


def test_a_rotated_key_is_printed_once_and_the_previous_secret_is_accepted() -> None:
    created = json.loads(call("create_key", "--operator", "--json"))
    output = call("rotate_key", created["prefix"])
    assert output.startswith(f"lh_{created['prefix']}_") and output.endswith("; not shown again)\n")
    for key in (created["key"], output.split()[0]):
        assert api_keys.find_active_key(key, now=timezone.now()) is not None
    with pytest.raises(CommandError, match="previous secret"):
        call("rotate_key", created["prefix"])
    latest = json.loads(call("rotate_key", f"lh_{created['prefix']}_…", "--overlap", "0", "--json"))
    assert api_keys.find_active_key(created["key"], now=timezone.now()) is None
    assert api_keys.find_active_key(latest["key"], now=timezone.now()) is not None
    for args in (["0badc0de"], [created["prefix"], "--overlap", "soon"]):
        with pytest.raises(CommandError):
            call("rotate_key", *args)


def test_a_revoked_key_keeps_its_leases_unless_they_are_ended() -> None:
    created = json.loads(call("create_key", "--agent", "did:plc:ada", "--json"))
    key = AgentKey.objects.get()
    call(*ACQUIRE)
    LeaseEvent.objects.filter(kind="granted").update(actor=f"key {key.prefix}")
    call("acquire", "--agent", "did:plc:ada", "--environment", "game-2", "--type", "catan")
    assert call("revoke_key", key.prefix, "--end-leases", "--dry-run") == f"{key.prefix} has 1 active lease\n"
    assert call("revoke_key", f"lh_{key.prefix}_…") == f"{key.prefix} revoked\n"
    assert api_keys.find_active_key(created["key"], now=timezone.now()) is None
    assert Lease.objects.filter(status="active").count() == 2
    assert call("revoke_key", key.prefix, "--end-leases") == f"{key.prefix} was revoked before, 1 lease ended\n"
    assert Lease.objects.get(status="active").environment_id == "game-2"
    with pytest.raises(CommandError, match="no API key '0badc0de'"):
        call("revoke_key", "0badc0de")


def test_a_key_is_limited_to_types_and_pools() -> None:
    call("create_key", "--operator", "--type", "catan", "--type", "coding", "--pool", "default")
    row = AgentKey.objects.get()
    assert (row.allowed_environment_types, row.allowed_pools) == (["catan", "coding"], ["default"])
    with pytest.raises(CommandError, match="no pool 'none'"):
        call("create_key", "--operator", "--pool", "none")


@pytest.mark.parametrize("args", [[], ["--agent", "ada"], ["--agent", "did:plc:" + "a" * 300]])
def test_a_key_without_an_agent_or_with_a_malformed_did_is_refused(args: list[str]) -> None:
    with pytest.raises(CommandError, match=r"key needs at least one agent|DID"):
        call("create_key", *args)
    assert not AgentKey.objects.exists()


def test_acquire_grants_and_a_repeat_prints_that_it_is_held() -> None:
    first, second = call(*ACQUIRE, "--ttl", "60"), call(*ACQUIRE)
    lease = Lease.objects.get()
    assert lease.ttl.total_seconds() == 60
    assert first.startswith(f"{lease.pk} granted: did:plc:ada::game-1 until ")
    assert second == first.replace("granted", "already held")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--agent", "%(x)s"], "--agent: "), (["--environment", "a b"], "--environment: "),
        (["--type", "chess"], "no such environment type"),
        (["--ttl", "soon"], "--ttl: "), (["--ttl", "300d"], "Must be at most"),
    ],
)  # fmt: skip
def test_acquire_refuses_invalid_input_and_names_it(args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call(*ACQUIRE, *args)
    assert not Lease.objects.exists()
    assert not Agent.objects.exists()


def code(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        call_command("exec", *args)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_exec_passes_output_through_unchanged_and_exits_with_the_same_code(lease: str, memory, capfdbinary) -> None:
    memory.programs["odd"] = lambda call: ProgramResult(exit_code=3, stdout=b"\xff\x00out", stderr=b"err\xfe")
    assert code(lease, "--", "odd", "-x", "--verbosity") == 3
    assert capfdbinary.readouterr() == (b"\xff\x00out", b"err\xfe")
    assert Run.objects.get().argv == ["odd", "-x", "--verbosity"]


def test_exec_exits_with_0_if_the_command_does_and_with_124_after_the_timeout(lease: str, capsys) -> None:
    assert code(lease, "--", "true") == 0
    assert code(lease, "--timeout", "1s", "--", "sleep", "60") == 124
    assert capsys.readouterr().err == "exec: killed after 1 s\n"


def test_exec_prints_why_nothing_is_run(lease: str, memory) -> None:
    with pytest.raises(CommandError, match=r"^argv: must be UTF-8"):
        call("exec", lease, "--", "cat", "a\udcff")
    with pytest.raises(CommandError, match="at most 3600 seconds"):
        call("exec", lease, "--timeout", "2h", "--", "true")
    memory.fail("create", Unavailable("engine down"))
    with pytest.raises(CommandError, match="engine down"):
        call("exec", lease, "--", "true")
    assert not Run.objects.exists()


def test_release_ends_the_lease_and_a_repeat_prints_the_same(lease: str) -> None:
    output = call("release", lease)
    assert output.startswith(f"{lease} ended: released at ")
    assert call("release", lease) == output
    with pytest.raises(CommandError, match=r"The lease ended \(released\)"):
        call("exec", lease, "--", "true")


@pytest.mark.parametrize("verb", ["exec", "release"])
def test_an_unknown_lease_is_an_error_in_one_line(verb: str) -> None:
    argv = ["--", "true"] if verb == "exec" else []
    with pytest.raises(CommandError, match="no such lease"):
        call(verb, NO_LEASE, *argv)
    with pytest.raises(CommandError, match="is not a lease id"):
        call(verb, "nonsense", *argv)


RUN_ONCE = ["run_once", "--agent", "did:plc:ada", "--", "true"]


@pytest.mark.parametrize(("argv", "status"), [(RUN_ONCE, 122), (["costs"], 1)])
def test_without_a_database_a_process_ends_with_one_line(tmp_path: Path, argv: list[str], status: int) -> None:
    process = run_manage(tmp_path, *argv, DATABASE_URL="postgres://nobody@127.0.0.1:1/nothing")
    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (status, "", 1)
    assert "connection failed" in process.stderr


def test_without_a_database_each_command_reports_it_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def down() -> None:
        raise OperationalError("connection failed\nDETAIL: password=secret")

    monkeypatch.setattr(connection, "cursor", down)
    for argv in (["release", NO_LEASE], ["quickstart"]):
        with pytest.raises(CommandError, match=r"^The database does not respond: connection failed$"):
            call(*argv)
    errors = StringIO()
    with pytest.raises(CommandError, match=r"^failed: hosts, seal, mark, expire, "):
        call_command("sweep", stderr=errors)
    lines = errors.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == list(schedules.SWEEP_NAMES)
    assert "secret" not in errors.getvalue()


def test_release_with_discard_destroys_the_sandbox_without_storing_its_state(lease: str) -> None:
    execution.ensure_sandbox_ready(UUID(lease), now=timezone.now())
    assert call("release", lease, "--discard") == f"{lease} discarded: its last state is not stored\n"
    assert call("release", lease, "--discard") == f"{lease} nothing to discard\n"
    sandbox = Sandbox.objects.get(holder=lease)
    assert (sandbox.state, sandbox.final_persist, Lease.objects.get().end_reason) == ("destroying", "none", "operator")
    with pytest.raises(CommandError, match="no such lease"):
        call("release", NO_LEASE, "--discard")
