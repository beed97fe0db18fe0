"""create_key, acquire, exec, release: output and exit codes."""

import json
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane import schedules
from leases import api_keys
from leases.models import Agent, AgentKey, Lease
from sandboxes.models import Pool, Run
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import ProgramResult
from tests.commands.manage import run_manage

pytestmark = pytest.mark.django_db
NO_LEASE = "00000000-0000-0000-0000-000000000000"
ACQUIRE = ["acquire", "--agent", "did:plc:ada", "--environment", "game-1", "--type", "catan"]


@pytest.fixture(autouse=True)
def only_memory(memory) -> None:
    Pool.objects.update(provider="memory")


def run(*args: str) -> str:
    out = StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


@pytest.fixture
def lease() -> str:
    return str(json.loads(run(*ACQUIRE, "--json"))["id"])


def test_a_key_is_printed_once_and_can_act_for_its_agents() -> None:
    output = run("create_key", "--agent", "did:plc:ada", "--agent", "did:plc:bob", "--name", "game server", "--json")
    assert output.count("\n") == 1
    created = json.loads(output)
    row = api_keys.find_active_key(created["key"], now=timezone.now())
    assert row is not None
    assert (row.prefix, row.dids, row.operator, row.name) == (
        created["prefix"], ["did:plc:ada", "did:plc:bob"], False, "game server",
    )  # fmt: skip


def test_without_json_the_key_is_the_first_word_of_one_line() -> None:
    output = run("create_key", "--operator")
    assert output.endswith("(for all agents; not shown again)\n")
    assert api_keys.find_active_key(output.split()[0], now=timezone.now()) is not None


@pytest.mark.parametrize("args", [[], ["--agent", "ada"], ["--agent", "did:plc:" + "a" * 300]])
def test_a_key_without_an_agent_or_with_a_malformed_did_is_refused(args: list[str]) -> None:
    with pytest.raises(CommandError, match=r"key needs at least one agent|DID"):
        run("create_key", *args)
    assert not AgentKey.objects.exists()


def test_acquire_grants_and_a_repeat_prints_that_it_is_held() -> None:
    first, second = run(*ACQUIRE, "--ttl", "60"), run(*ACQUIRE)
    lease = Lease.objects.get()
    assert lease.ttl.total_seconds() == 60
    assert first.startswith(f"{lease.pk} granted: did:plc:ada::game-1 until ")
    assert second == first.replace("granted", "already held")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--agent", "%(x)s", "--environment", "g", "--type", "catan"], "--agent: "),
        (["--agent", "did:plc:a", "--environment", "a b", "--type", "catan"], "--environment: "),
        (["--agent", "did:plc:a", "--environment", "g", "--type", "chess"], "no such environment type"),
        (["--agent", "did:plc:a", "--environment", "g", "--type", "catan", "--ttl", "soon"], "--ttl: "),
        (["--agent", "did:plc:a", "--environment", "g", "--type", "catan", "--ttl", "300d"], "Must be at most"),
    ],
)
def test_acquire_refuses_invalid_input_and_names_it(args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run("acquire", *args)
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


def test_exec_exits_with_0_if_the_command_does(lease: str) -> None:
    assert code(lease, "--", "true") == 0


def test_exec_exits_with_124_after_the_timeout(lease: str, capsys) -> None:
    assert code(lease, "--timeout", "1s", "--", "sleep", "60") == 124
    assert capsys.readouterr().err == "exec: killed after 1 s\n"


def test_exec_refuses_a_timeout_above_the_longest_allowed(lease: str) -> None:
    with pytest.raises(CommandError, match="at most 3600 seconds"):
        run("exec", lease, "--timeout", "2h", "--", "true")
    assert not Run.objects.exists()


def test_exec_prints_why_a_sandbox_cannot_be_started(lease: str, memory) -> None:
    memory.fail("create", Unavailable("engine down"))
    with pytest.raises(CommandError, match="engine down"):
        run("exec", lease, "--", "true")


def test_release_ends_the_lease_and_a_repeat_prints_the_same(lease: str) -> None:
    output = run("release", lease)
    assert output.startswith(f"{lease} ended: released at ")
    assert run("release", lease) == output
    with pytest.raises(CommandError, match=r"The lease ended \(released\)"):
        run("exec", lease, "--", "true")


@pytest.mark.parametrize("verb", ["exec", "release"])
def test_an_unknown_lease_is_an_error_in_one_line(verb: str) -> None:
    argv = ["--", "true"] if verb == "exec" else []
    with pytest.raises(CommandError, match="no such lease"):
        run(verb, NO_LEASE, *argv)
    with pytest.raises(CommandError, match="is not a lease id"):
        run(verb, "nonsense", *argv)


@pytest.mark.parametrize("argv", [["release", NO_LEASE], ["quickstart"], ["up"], ["sweep"]])
def test_without_a_database_each_command_reports_it_in_one_line(tmp_path: Path, argv: list[str]) -> None:
    process = run_manage(tmp_path, *argv, DATABASE_URL="postgres://nobody@127.0.0.1:1/nothing")
    assert (process.returncode, process.stdout) == (1, "")
    assert "connection failed" in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stderr.count("\n") == (len(schedules.SWEEP_NAMES) + 1 if argv == ["sweep"] else 1)
