"""Results of commands and parts of their output."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from . import schemas
from .errors import CommandFailed


@dataclass(frozen=True)
class RunResult:
    """End of a command. `exit_code` is 128 + n after signal n."""

    run_id: str
    exit_code: int
    timed_out: bool
    oom: bool
    truncated: bool  # output above the limit of the server was dropped
    duration: timedelta
    note: str  # a warning, such as a workspace above its limit, or empty
    failed_by: schemas.FailedByEnum | None  # origin of the failure; None: the command has not failed

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True)
class ExecResult(RunResult):
    """Result of a command with its output, exact in bytes and as text in UTF-8 with invalid bytes replaced."""

    stdout_bytes: bytes
    stderr_bytes: bytes

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")

    def check(self) -> ExecResult:
        """Return this result. Raise CommandFailed if the exit code is not 0 or the command timed out."""
        if not self.ok:
            raise CommandFailed(self)
        return self


@dataclass(frozen=True)
class OutputPart:
    """Part of the output of a running command. `offset`: bytes of that stream before it.

    With `lost_bytes` the part stands for output that is not available any more, and `data` is empty."""

    stream: Literal["stdout", "stderr"]
    data: str
    offset: int = 0
    lost_bytes: int = 0


@dataclass(frozen=True)
class AgentEvent:
    """Event of a running agent CLI: `message`, `malformed`, `stderr` or `gap`, with the data that docs/api.md describes."""

    name: str
    data: dict[str, Any]

    @property
    def message(self) -> dict[str, Any] | None:
        """JSON object that the CLI printed; None with another event."""
        message: dict[str, Any] | None = self.data["message"] if self.name == "message" else None
        return message


def parse_exec_result(body: schemas.ExecResult) -> ExecResult:
    """Parse an answer with output in base64."""
    output = base64.b64decode(body["stdout"]), base64.b64decode(body["stderr"])
    return ExecResult(*_parse_end(body), *output)


def parse_exit(data: Mapping[str, Any]) -> RunResult:
    """Parse the last event of a stream."""
    return RunResult(*_parse_end(data))


def _parse_end(data: Mapping[str, Any]) -> tuple[str, int, bool, bool, bool, timedelta, str, schemas.FailedByEnum | None]:
    duration = timedelta(seconds=data["duration_seconds"] or 0)
    flags = data["timed_out"], data["oom"], data["truncated"]
    return data["run_id"], data["exit_code"], *flags, duration, data["note"], data["failed_by"]
