"""Reader of the output of a command in a remote sandbox."""

import threading
from collections.abc import Callable, Sequence

from sandboxes.providers.command_results import OutputPart, OutputReader
from sandboxes.providers.remote.tool import RunState

Follow = Callable[[Sequence[int], float], RunState]  # state of the command with output from these offsets, after seconds


class PollingReader(OutputReader):
    """Reader of the output of a command by repeated calls of the vendor's exec."""

    def __init__(self, follow: Follow, *, stdout: int, stderr: int) -> None:
        self._follow, self._offsets = follow, [stdout, stderr]
        self._interrupted = threading.Event()
        self._pending: list[OutputPart] = []

    def read(self, *, wait: float) -> OutputPart | None:
        if self._pending:
            return self._pending.pop(0)
        if self._interrupted.is_set():
            return None
        state = self._follow(self._offsets, wait)
        if state.state in ("lost", "unknown"):
            return None
        for index, (stream, content) in enumerate((("stdout", state.stdout), ("stderr", state.stderr))):
            if content:
                self._offsets[index] += len(content)
                self._pending.append(OutputPart(stream, content))
        is_complete = self._offsets[0] >= state.sizes[0] and self._offsets[1] >= state.sizes[1]
        if state.state == "ended" and is_complete:
            self._pending.append(OutputPart("", ended=True))
        elif not self._pending:
            self._pending.append(OutputPart(""))
        return self._pending.pop(0)

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._interrupted.set()
