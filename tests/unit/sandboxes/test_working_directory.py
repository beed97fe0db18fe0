"""Note of a command whose working directory may not be entered."""

import pytest

from sandboxes.models import Run
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.memory import ProgramResult
from sandboxes.runs.failures import describe_unusable_directory
from tests.conftest import NOW
from tests.support.leases import run

DENIED = {
    "agent": b"chdir /workspace: Permission denied\n",
    "engine": b'chdir to cwd ("/workspace") set in config.json failed: permission denied\n',
    "runner": b"[Errno 13] Permission denied: '/workspace'\n",
    "process": b"Permission denied: /workspace\n",
}
OTHERS = {
    "a program without permission": ExecResult(126, stderr=b"bash: /workspace/x: Permission denied\n"),
    "a file of the directory": ExecResult(126, stderr=b"[Errno 13] Permission denied: '/workspace/x'\n"),
    "a directory beside it": ExecResult(126, stderr=b"chdir /workspace-2: Permission denied\n"),
    "a missing directory": ExecResult(126, stderr=b"chdir /workspace: No such file or directory\n"),
    "the program itself": ExecResult(1, stderr=b"chdir /workspace: Permission denied\n"),
}


@pytest.mark.parametrize("stderr", DENIED.values(), ids=DENIED)
def test_denied_directory_is_named_with_what_helps(stderr: bytes) -> None:
    note = describe_unusable_directory(Run(cwd="/workspace"), ExecResult(126, stderr=stderr))
    assert note.startswith("The working directory /workspace may not be entered, so the command was not executed.")
    assert "such as /tmp: chmod u+rwx /workspace" in note


@pytest.mark.parametrize("result", OTHERS.values(), ids=OTHERS)
def test_other_ends_have_no_such_note(result: ExecResult) -> None:
    assert describe_unusable_directory(Run(cwd="/workspace"), result) == ""
    assert describe_unusable_directory(Run(cwd="/"), ExecResult(126, stderr=b"/: permission denied")) == ""


@pytest.mark.django_db
def test_note_is_recorded_with_the_run(grant, memory) -> None:
    memory.programs["denied"] = lambda call: ProgramResult(126, stderr=DENIED["agent"])
    lease = grant()
    assert run(lease, "denied", now=NOW).exit_code == 126
    assert Run.objects.get().note.startswith("The working directory /workspace may not be entered")
