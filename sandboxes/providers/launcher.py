"""Programs in the background, for providers whose sandboxes have a Python: each verb is one exec of image/launch.py.

What that says is a sandbox's word: it is bounded, and believed only about itself."""

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta

from sandboxes.providers.base import WORKSPACE, ExecResult, Log, ProcessState, Provider, Rejected, Unavailable, whole_range

SOON = timedelta(seconds=30)  # one of these verbs takes at most
PYTHON = ("python3", "-I", "-S")
_OFFSET, _STATE = re.compile(rb"[0-9]{1,18}"), re.compile(r"running|[0-9]{1,3}")


class Launching(Provider):
    """The verbs about background programs of a provider that can exec."""

    @abstractmethod
    def _kept_in(self, ref: str) -> str:
        """The directory in the sandbox for their output, which no snapshot takes along."""

    def start(self, ref: str, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = WORKSPACE, mark: str) -> ProcessState:
        if not argv or not cwd.startswith("/"):
            raise Rejected("argv has at least one element, and cwd is an absolute path")
        said = {"argv": [self.inside(ref, word) for word in argv], "env": {**env}, "cwd": self.inside(ref, cwd)}
        done = self._launch(ref, "start", mark, mark=mark, stdin=json.dumps(said).encode())
        return _state(done.stdout.decode(errors="replace").strip(), ref)

    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        done = self._launch(ref, "look", *marks, cap=100 * len(marks))
        lines = (line.partition(" ") for line in done.stdout.decode(errors="replace").splitlines())
        return {mark: _state(said, ref) for mark, _, said in lines if mark in marks}

    def log(self, ref: str, mark: str, *, start: int, length: int) -> Log:
        whole_range(start, length)
        done = self._launch(ref, "log", mark, str(start), str(length), cap=length + 20)
        after, _, content = done.stdout.partition(b"\n")
        if not _OFFSET.fullmatch(after) or len(content) > length:
            raise Unavailable(f"{ref} does not say plainly what was printed")
        return Log(content, int(after))

    def _launch(self, ref: str, verb: str, *words: str, mark: str = "", stdin: bytes = b"", cap: int = 1000) -> ExecResult:
        argv = [*PYTHON, "/opt/leasehold/launch.py", verb, self._kept_in(ref), *words]
        done = self.exec(ref, argv, env={}, cwd="/", stdin=stdin, timeout=SOON, cap=cap, mark=mark or uuid.uuid4().hex)
        if done.exit_code:
            why = "took too long" if done.timed_out else done.stderr[-300:].decode(errors="replace").strip()
            raise Unavailable(f"launch.py {verb} in {ref} ended with {done.exit_code}: {why}")
        return done


def _state(said: str, ref: str) -> ProcessState:
    if not _STATE.fullmatch(said):
        raise Unavailable(f"{ref} does not say plainly what runs in it")
    return ProcessState(True) if said == "running" else ProcessState(False, int(said))
