"""Requests to image/runner.py, the exec runner that remote providers upload into their sandboxes.

A vendor's exec is used to carry one short command line and one line of output. Commands run below a keeper in the sandbox, so a
cut connection, a timeout of the vendor or a lost response neither ends nor repeats a command."""

import base64
import binascii
import io
import json
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from sandboxes.image import files
from sandboxes.providers.base import DATA, EGRESS_ENVIRONMENT, EGRESS_LOOPBACK_ADDRESS, USER_PROGRAMS_DIRECTORY, WORKSPACE
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.launcher import PYTHON_COMMAND

TOOL_DIRECTORY = "/opt/leasehold"
TOOL_FILES = ("runner.py", "files.py", "launch.py", "reap.py", "gateway_relay.py", "runner_channel.py", "take_turn.py")
MAX_INLINE_BYTES = 60_000  # of a request in the command line; Linux accepts 131072 bytes in one argument
MAX_RESPONSE_BYTES = 1 << 20  # of output in one response, before base64
MAX_SECONDS = 1e9  # of a command, and since its end, as the runner states them
RESPONSE_PREFIX = "leasehold:"  # as in image/runner.py
NO_TOOL = "no_tool"  # state in a response: the files that were uploaded at creation are gone
BASE_ENVIRONMENT = {"HOME": f"{WORKSPACE}/.home", "LANG": "C.UTF-8"}

# Variables of a command if the sandbox has a gateway. "{port}" stands for the port of the relay.
GATEWAY_ENVIRONMENT = {
    name: value.replace(EGRESS_LOOPBACK_ADDRESS, "127.0.0.1:{port}")
    for name, value in EGRESS_ENVIRONMENT.items()
    if not name.startswith("RELAY_")  # WebSockets do not pass the relay
}


@dataclass(frozen=True)
class RunRequest:
    """Command for the runner, without its stdin."""

    mark: str  # unique: the runner never starts the same mark twice
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    timeout_seconds: float
    cap: int  # bytes kept of each stream
    retain: bool = False
    files: Sequence[str] = ()  # arguments of image/files.py, executed in place of `argv`

    def to_fields(self) -> dict[str, Any]:
        return {
            "verb": "run", "mark": self.mark, "argv": self.argv, "env": dict(self.env), "cwd": self.cwd,
            "timeout": self.timeout_seconds, "cap": self.cap, "stdin": "",
            "stdin_path": "", "retain": self.retain, "files": self.files,
            "base_env": BASE_ENVIRONMENT, "gateway_env": GATEWAY_ENVIRONMENT, "path_suffix": USER_PROGRAMS_DIRECTORY,
        }  # fmt: skip


@dataclass(frozen=True)
class RunState:
    """Response of the runner about one command, validated. `stdout` and `stderr` are parts from the requested offsets."""

    state: str  # "running", "ended", "lost" (its keeper is dead) or "unknown" (never started)
    stdout: bytes
    stderr: bytes
    exit_code: int = 0
    timed_out: bool = False
    sizes: tuple[int, int] = (0, 0)  # bytes retained of each stream, once it has ended
    dropped: bool = False
    seconds: float = 0.0
    age_seconds: float | None = None  # since the end. None: running, or a runner that does not state it

    def to_result(self, stdout: bytes, stderr: bytes, seconds: float) -> ExecResult:
        return ExecResult(
            exit_code=self.exit_code, stdout=stdout, stderr=stderr, timed_out=self.timed_out, truncated=self.dropped,
            duration=timedelta(seconds=seconds),
        )  # fmt: skip


class InvalidResponse(Exception):
    """The output of the vendor's exec contains no valid response of the runner."""


def encode_request(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def build_command(tool_directory: str, argument: str) -> str:
    """Return the shell command that executes the runner, and reports if it was never uploaded or is gone."""
    path = f"{tool_directory}/runner.py"
    gone = f'{RESPONSE_PREFIX}{{"state": "{NO_TOOL}"}}'
    # An import, unlike a program, is cached as bytecode.
    program = f"import sys; sys.path.insert(0, {tool_directory!r}); import runner; sys.exit(runner.main(sys.argv[1:]))"
    call = shlex.join([*PYTHON_COMMAND, "-c", program, argument])
    return f"if [ -f {shlex.quote(path)} ]; then {call}; else echo {shlex.quote(gone)}; fi"


def encode_argument(content: bytes) -> str:
    return base64.b64encode(content).decode()


def parse_response(output: str) -> dict[str, Any]:
    """Return the fields of the last response in the output of the vendor's exec. Raise InvalidResponse."""
    for line in reversed(output.splitlines()):
        if line.startswith(RESPONSE_PREFIX):
            try:
                fields = json.loads(line.removeprefix(RESPONSE_PREFIX))
            except (ValueError, RecursionError) as error:
                raise InvalidResponse(f"damaged response: {error}") from error
            if isinstance(fields, dict) and isinstance(fields.get("state"), str):
                return fields
            break
    raise InvalidResponse(output[-300:].strip() or "no output")


def _parse_age(value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= float(value) <= MAX_SECONDS:  # type: ignore[arg-type]
        raise InvalidResponse("an invalid age")
    return float(value)  # type: ignore[arg-type]


def parse_run_state(fields: Mapping[str, Any]) -> RunState:
    """Validate the response to `run` or `follow`. Raise InvalidResponse."""
    try:
        stdout, stderr = (base64.b64decode(content, validate=True) for content in fields["output"])
        if (result := fields["result"]) is None:
            return RunState(fields["state"], stdout, stderr)
        (first, second), seconds = result["sizes"], float(result["seconds"])
        if fields["state"] != "ended" or not all(isinstance(value, int) for value in (result["exit_code"], first, second)):
            raise InvalidResponse("a result with fields of other types")
        if not 0.0 <= seconds <= MAX_SECONDS:
            raise InvalidResponse("a result with an impossible duration")
        return RunState(
            "ended",
            stdout,
            stderr,
            result["exit_code"] & 255,
            bool(result["timed_out"]),
            (first, second),
            dropped=any(result["dropped"]),
            seconds=seconds,
            age_seconds=_parse_age(fields.get("age")),
        )
    except (LookupError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise InvalidResponse(f"{type(error).__name__}: {error}") from error


@cache
def build_archive() -> bytes:
    """Return the zip archive of the runner and the programs that it executes."""
    content = io.BytesIO()
    directory = Path(files.__file__).parent
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TOOL_FILES:
            archive.write(directory / name, name)
    return content.getvalue()


def build_setup_command(tool_directory: str, archive_path: str) -> str:
    """Return the shell command that creates /workspace, /data and the tool directory, and unpacks the archive. Idempotent.

    Directories that the vendor's user may not create are created with sudo, if that needs no password."""
    python = shlex.join([*PYTHON_COMMAND, "-m", "zipfile", "-e", archive_path, tool_directory])
    return f"""set -e
for directory in {WORKSPACE} {DATA} {shlex.quote(tool_directory)}; do
  mkdir -p "$directory" 2>/dev/null || true
  if ! [ -w "$directory" ]; then
    sudo -n mkdir -p "$directory" && sudo -n chown "$(id -u):$(id -g)" "$directory"
  fi
done
mkdir -p {WORKSPACE}/.home
command -v python3 >/dev/null
{python}
rm -f {shlex.quote(archive_path)}
echo {RESPONSE_PREFIX}'{{"state": "ready"}}'
"""
