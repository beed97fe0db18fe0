"""Background processes, for providers whose sandboxes contain Python: each verb executes image/launch.py in the sandbox.

The output of launch.py is untrusted: it is size-limited, validated, and used only for the sandbox it came from."""

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta

from sandboxes.agent.protocol import TerminalSize
from sandboxes.providers.arguments import check_range
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.providers.command_results import ExecResult, ProcessOutput, ProcessState
from sandboxes.providers.errors import Rejected, StartKilled, Unavailable

LAUNCH_TIMEOUT = timedelta(seconds=30)  # of one launcher command
KILLED_EXIT_CODE = 137
PYTHON_COMMAND = ("python3", "-I", "-S")
_OFFSET_PATTERN, _STATE_PATTERN = re.compile(rb"[0-9]{1,18}"), re.compile(r"running|[0-9]{1,3}")


NO_STDIN = "Background processes of this provider have no stdin."
NO_TERMINAL = "This provider, or the way in which this sandbox is reached, has no terminals."


class BackgroundProcessProvider(Provider):
    """Background process verbs on top of `exec`."""

    @abstractmethod
    def _output_directory(self, ref: str) -> str:
        """Return the directory in the sandbox for output and state, outside of snapshots."""

    def start(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = WORKSPACE,
        mark: str,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
    ) -> ProcessState:
        if stdin:
            raise Rejected(NO_STDIN)
        if terminal:
            raise Rejected(NO_TERMINAL)
        if not argv or not cwd.startswith("/"):
            raise Rejected("argv must not be empty, and cwd must be an absolute path.")
        request = {"argv": [self.inside(ref, argument) for argument in argv], "env": {**env}, "cwd": self.inside(ref, cwd)}
        result = self._run_launcher(ref, "start", mark, mark=mark, stdin=json.dumps(request).encode())
        return _parse_state(result.stdout.decode(errors="replace").strip(), ref)

    def signal_process(self, ref: str, mark: str, number: int) -> None:
        self._run_launcher(ref, "signal", mark, str(number))

    def write_stdin(self, ref: str, mark: str, content: bytes, *, offset: int, last: bool) -> int:
        raise Rejected(NO_STDIN)

    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        result = self._run_launcher(ref, "look", *marks, cap=100 * len(marks))
        lines = (line.partition(" ") for line in result.stdout.decode(errors="replace").splitlines())
        return {mark: _parse_state(state, ref) for mark, _, state in lines if mark in marks}

    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        check_range(start, length)
        result = self._run_launcher(ref, "log", mark, str(start), str(length), cap=length + 20)
        next_offset, _, content = result.stdout.partition(b"\n")
        if not _OFFSET_PATTERN.fullmatch(next_offset) or len(content) > length:
            raise Unavailable(f"{ref}: invalid output of launch.py log")
        return ProcessOutput(content, int(next_offset))

    def _run_launcher(
        self, ref: str, verb: str, *arguments: str, mark: str = "", stdin: bytes = b"", cap: int = 1000
    ) -> ExecResult:
        argv = [*PYTHON_COMMAND, "/opt/leasehold/launch.py", verb, self._output_directory(ref), *arguments]
        result = self.exec(
            ref, argv, env={}, cwd="/", stdin=stdin, timeout=LAUNCH_TIMEOUT, cap=cap, mark=mark or uuid.uuid4().hex
        )
        if verb == "start" and result.exit_code == KILLED_EXIT_CODE and not result.timed_out:
            raise StartKilled(f"{ref}: the start of the process was killed.")
        if result.exit_code:
            reason = "timed out" if result.timed_out else result.stderr[-300:].decode(errors="replace").strip()
            raise Unavailable(f"launch.py {verb} in {ref} failed with exit code {result.exit_code}: {reason}")
        return result


def _parse_state(state: str, ref: str) -> ProcessState:
    if not _STATE_PATTERN.fullmatch(state):
        raise Unavailable(f"{ref}: invalid output of launch.py")
    return ProcessState(True) if state == "running" else ProcessState(False, int(state))
