"""Results and output of commands and background processes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, SupportsBytes

StreamContent = bytes | bytearray | SupportsBytes


@dataclass(frozen=True)
class ExecResult:
    """Result of a command. `exit_code` is 128 + n after signal n, so 137 for a command killed by the provider."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False  # killed by the provider, with every process it had started
    oom: bool = False  # the kernel or the agent killed a process for lack of memory during the command
    truncated: bool = False  # a stream exceeded the cap; the excess was read and dropped
    duration: timedelta = timedelta(0)
    data_digest: str = ""  # of the manifest of /data after the command, as by state.changes.digest_manifest; "" if not known


class ExecState(NamedTuple):
    """State of an exec whose caller is gone."""

    running: bool
    result: ExecResult | None = None  # None while running
    age: timedelta | None = None  # of the result, by the clock of the sandbox. None: not known


class OutputView:
    """Output so far of an exec, which its provider attaches when the command has started. May be read from any thread."""

    def __init__(self) -> None:
        self._streams: tuple[StreamContent, StreamContent] = (b"", b"")

    def attach(self, stdout: StreamContent, stderr: StreamContent) -> None:
        """Read from these buffers, which the provider goes on filling, up to the cap of the exec."""
        self._streams = stdout, stderr

    def read(self) -> tuple[bytes, bytes]:
        """Return stdout and stderr so far."""
        stdout, stderr = self._streams
        return bytes(stdout), bytes(stderr)


class OutputPart(NamedTuple):
    """Next bytes of the output of an exec."""

    stream: str  # "stdout" or "stderr"; "" without new output
    content: bytes = b""
    ended: bool = False  # the command has ended, and both streams were read to their ends


class OutputReader(ABC):
    """Reader of the output of one exec by byte offsets. One thread reads; `interrupt` may be called from any thread."""

    @abstractmethod
    def read(self, *, wait: float) -> OutputPart | None:
        """Return the next output at once, or what there is after `wait` seconds. None if the output is not available."""

    @abstractmethod
    def interrupt(self) -> None:
        """End a `read` in progress, and all further ones, with None."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the reader. Idempotent."""


class ProcessState(NamedTuple):
    """State of a background process."""

    running: bool
    exit_code: int | None = None  # None while running


class ProcessOutput(NamedTuple):
    """Part of the output of a background process."""

    content: bytes
    next: int  # offset after `content`, counted from the first byte ever printed
