"""manage.py run_agent: an agent CLI on the command line. The agent is `cat`, which prints its prompt."""

import io
import json
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.utils import timezone

from leases.agent_runs.models import AgentRun
from leases.models import Lease

pytestmark = pytest.mark.django_db(transaction=True)
MESSAGES = [{"type": "assistant", "turn_id": "1", "text": "Hello."}, {"type": "assistant", "turn_id": "2", "text": "Done."}]


def run_agent(monkeypatch: pytest.MonkeyPatch, lease: Lease, *args: str) -> tuple[Any, list[Any], str]:
    """Return the exit code, the printed messages and the text on stderr."""
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{json.dumps(message)}\n" for message in MESSAGES)))
    with pytest.raises(SystemExit) as ended:
        call_command("run_agent", str(lease.pk), "--cli", "program", "--program", "cat", *args, stdout=output, stderr=errors)
    return ended.value.code, [json.loads(line) for line in output.getvalue().splitlines()], errors.getvalue()


def test_messages_and_result_are_printed(monkeypatch: pytest.MonkeyPatch, grant) -> None:
    lease = grant(now=timezone.now())
    code, messages, result = run_agent(monkeypatch, lease)
    assert (code, messages, result) == (0, MESSAGES, "completed: Done.\n")
    assert AgentRun.objects.get().state == "completed"


def test_violation_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, grant) -> None:
    code, _, result = run_agent(monkeypatch, grant(now=timezone.now()), "--max-turns", "1")
    assert (code, result) == (1, "interrupted: Turn limit exceeded: 2 of 1\n")


def test_invalid_arguments_are_named(monkeypatch: pytest.MonkeyPatch, grant) -> None:
    lease = grant(now=timezone.now())
    for args, message in {("--max-cost", "x"): "--max-cost", ("--cli", "program"): "argv|Required"}.items():
        monkeypatch.setattr("sys.stdin", io.StringIO("x"))
        with pytest.raises(CommandError, match=message):
            call_command("run_agent", str(lease.pk), *args)
    assert not AgentRun.objects.exists()
