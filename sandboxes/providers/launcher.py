"""Programs in the background, for providers whose sandboxes have a Python: each verb is one exec of image/launch.py.

What that says is a sandbox's word: it is bounded, and believed only about itself."""

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta

from sandboxes.providers.base import (
    WORKSPACE,
    ExecResult,
    ProcessOutput,
    ProcessState,
    Provider,
    Rejected,
    Unavailable,
    check_range,
)

LAUNCH_TIMEOUT = timedelta(seconds=30)  # one of these verbs takes at most
PYTHON_COMMAND = ("python3", "-I", "-S")
_OFFSET_PATTERN, _STATE_PATTERN = re.compile(rb"[0-9]{1,18}"), re.compile(r"running|[0-9]{1,3}")


class BackgroundProcessProvider(Provider):
    """The verbs about background programs of a provider that can exec."""

    @abstractmethod
    def _output_directory(self, ref: str) -> str:
        """The directory in the sandbox for their output, which no snapshot takes along."""

    def start(self, ref: str, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = WORKSPACE, mark: str) -> ProcessState:
        if not argv or not cwd.startswith("/"):
            raise Rejected("argv has at least one element, and cwd is an absolute path")
        said = {"argv": [self.inside(ref, word) for word in argv], "env": {**env}, "cwd": self.inside(ref, cwd)}
        done = self._run_launcher(ref, "start", mark, mark=mark, stdin=json.dumps(said).encode())
        return _parse_state(done.stdout.decode(errors="replace").strip(), ref)

    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        done = self._run_launcher(ref, "look", *marks, cap=100 * len(marks))
        lines = (line.partition(" ") for line in done.stdout.decode(errors="replace").splitlines())
        return {mark: _parse_state(said, ref) for mark, _, said in lines if mark in marks}

    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        check_range(start, length)
        done = self._run_launcher(ref, "log", mark, str(start), str(length), cap=length + 20)
        after, _, content = done.stdout.partition(b"\n")
        if not _OFFSET_PATTERN.fullmatch(after) or len(content) > length:
            raise Unavailable(f"{ref} does not say plainly what was printed")
        return ProcessOutput(content, int(after))

    def _run_launcher(
        self, ref: str, verb: str, *words: str, mark: str = "", stdin: bytes = b"", cap: int = 1000
    ) -> ExecResult:
        argv = [*PYTHON_COMMAND, "/opt/leasehold/launch.py", verb, self._output_directory(ref), *words]
        done = self.exec(
            ref, argv, env={}, cwd="/", stdin=stdin, timeout=LAUNCH_TIMEOUT, cap=cap, mark=mark or uuid.uuid4().hex
        )
        if done.exit_code:
            why = "took too long" if done.timed_out else done.stderr[-300:].decode(errors="replace").strip()
            raise Unavailable(f"launch.py {verb} in {ref} ended with {done.exit_code}: {why}")
        return done


def _parse_state(said: str, ref: str) -> ProcessState:
    if not _STATE_PATTERN.fullmatch(said):
        raise Unavailable(f"{ref} does not say plainly what runs in it")
    return ProcessState(True) if said == "running" else ProcessState(False, int(said))
