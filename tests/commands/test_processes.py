"""manage.py processes: list, start, show, log, signal and kill."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.utils import timezone

from leases.models import Lease
from sandboxes.models import Process
from tests.commands.manage import call

pytestmark = pytest.mark.django_db
NONE = "00000000-0000-0000-0000-000000000000"
PRINTS_AND_STAYS = ["--", "sh", "-c", "echo ready; sleep 300"]


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> str:
    return str(grant(now=timezone.now()).pk)


def start(lease: str, *args: object) -> Process:
    return Process.objects.get(pk=call("processes", "start", lease, *args).split()[0])


def test_a_process_is_started_listed_read_and_killed(lease: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    call("shells", "create", lease, "work", "--env", "WORD=from-the-shell", "--cwd", "/tmp")
    process = start(
        lease, "--name", "watcher\x1b", "--shell", "work", "--env", "OWN=1", "--keep-awake", "--restart", "on_failure",
        "--max-restarts", "2", "--restart-window-seconds", "60", "--restart-after-wake", "--wait-for", "from-the-shell\n1",
        "--", "sh", "-c", "printenv WORD OWN; sleep 300",
    )  # fmt: skip
    assert (process.cwd, process.env_names, process.keep_awake) == ("/tmp", ["OWN", "WORD"], True)
    assert (process.restart, process.max_restarts, process.restart_window_seconds) == ("on_failure", 2, 60)
    assert process.restart_after_wake
    [line] = call("processes", "list", lease).splitlines()
    assert line.startswith(f"{process.pk} running 20") and " watcher\\x1b: sh -c " in line
    assert json.loads(call("processes", "show", lease, process.pk, "--json"))["state"] == "running"
    call("processes", "log", lease, process.pk)
    call("processes", "log", lease, process.pk, "--start", "15")
    assert capfdbinary.readouterr().out == b"from-the-shell\n1\n1\n"
    assert call("processes", "signal", lease, process.pk, "CONT").split()[1] == "running"
    assert call("processes", "kill", lease, process.pk).split()[1:3] == ["killed", "137"]
    documents = json.loads(call("processes", "list", lease, "--json"))["results"]
    assert [(each["process_id"], each["exit_code"]) for each in documents] == [(str(process.pk), 137)]
    assert call("processes", "list", lease, "--limit", "0") == ""


def test_what_was_waited_for_and_did_not_happen_is_an_error_and_the_process_goes_on(lease: str) -> None:
    with pytest.raises(CommandError, match=r"Not found within 1 seconds\. The process goes on\."):
        call("processes", "start", lease, "--wait-for", "never", "--wait-seconds", "1", *PRINTS_AND_STAYS)
    assert Process.objects.get().ended_at is None
    with pytest.raises(CommandError, match=r"The process ended first\."):
        call("processes", "start", lease, "--wait-for-port", "1", "--", "true")


def test_the_log_says_what_it_leaves_out(
    lease: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    process = start(lease, "--wait-for", "ready", *PRINTS_AND_STAYS)
    monkeypatch.setattr("leases.management.commands.processes.MAX_LOG_BYTES", 4)
    call("processes", "log", lease, process.pk)
    assert capfdbinary.readouterr() == (b"read", b"log: continue with --start 4\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["list", "x"], "is not a lease id"), (["list", NONE], "no such lease"), (["start", NONE, "true"], "no such lease"),
        (["show", "LEASE", "x"], "is not a process id"), (["show", "LEASE", NONE], "has no such process"),
        (["kill", "LEASE", NONE], "has no such process"), (["log", "LEASE", NONE], "has no such process"),
        (["signal", "LEASE", NONE, "SEGV"], "invalid choice"), (["signal", "LEASE", NONE, "TERM"], "has no such process"),
        (["start", "LEASE", ""], "^--argv: The first element"), (["start", "LEASE", "\udcff"], "^argv: must be UTF-8"),
        (["start", "LEASE", "--shell", "none", "true"], 'The lease has no shell "none"'),
        (["start", "LEASE", "--cwd", "tmp", "true"], "^--cwd: Must be an absolute path"),
        (["start", "LEASE", "--env", "A-B=1", "--", "true"], "^--env: 'A-B' must consist"),
        (["start", "LEASE", "--name", "x" * 101, "true"], "^--name: Ensure this field has no more"),
        (["start", "LEASE", "--wait-seconds", "301", "true"], "^--wait-seconds: "),
        (["start", "LEASE", "--max-restarts", "0", "true"], "^--max-restarts: "),
        (["start", "LEASE", "--wait-for", "a", "--wait-for-port", "80", "true"], "^--wait-for-port: Not together"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_start_nothing(lease: str, args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call("processes", *[lease if arg == "LEASE" else arg for arg in args])
    assert not Process.objects.exists()


def test_another_lease_and_an_ended_one_are_refused(lease: str, grant: Callable[..., Lease]) -> None:
    process = start(lease, *PRINTS_AND_STAYS)
    other = str(grant(environment="game-2", now=timezone.now() - timedelta(seconds=1)).pk)
    with pytest.raises(CommandError, match="has no such process"):
        call("processes", "kill", other, process.pk)
    call("release", lease)
    for args in (["log", lease, process.pk], ["kill", lease, process.pk], ["start", lease, "true"]):
        with pytest.raises(CommandError, match=r"The lease ended \(released\)"):
            call("processes", *args)
