"""Child processes of the process provider."""

import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

PIPE_GRACE_SECONDS = 0.2  # after a command's exit its pipes are read for this long, if a descendant keeps them open


@dataclass
class OutputCapture:
    """First `cap` bytes of one output stream."""

    pipe: IO[bytes]
    cap: int
    content: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def read(self) -> bool:
        """Read available bytes. Return False at the end of the stream."""
        chunk = os.read(self.pipe.fileno(), 1 << 16)
        room = self.cap - len(self.content)
        self.content += chunk[:room]
        self.truncated |= len(chunk) > room
        return bool(chunk)


class ChildCommunication:
    """Concurrent transfer of a child's stdin, stdout and stderr, so that no full pipe blocks the child."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, cap: int) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        self.pid, self.stdin, self.unsent = child.pid, child.stdin, memoryview(stdin)
        self.out, self.err = OutputCapture(child.stdout, cap), OutputCapture(child.stderr, cap)
        self.exited = self.timed_out = False

    def run(self, deadline: float, kill: Callable[[], None]) -> None:
        """Transfer until the child has exited and its outputs have ended, at most PIPE_GRACE_SECONDS after its exit.

        Call `kill`, which must end the child, at `deadline` (monotonic seconds)."""
        exit_fd = os.pidfd_open(self.pid)
        os.set_blocking(self.stdin.fileno(), False)
        with _closing_fd(exit_fd), selectors.DefaultSelector() as selector:
            selector.register(exit_fd, selectors.EVENT_READ, self._mark_exited)
            selector.register(self.stdin, selectors.EVENT_WRITE, self._write)
            selector.register(self.out.pipe, selectors.EVENT_READ, self.out.read)
            selector.register(self.err.pipe, selectors.EVENT_READ, self.err.read)
            while selector.get_map():
                remaining = deadline - time.monotonic()
                if remaining <= 0 and (self.exited or self.timed_out):
                    return  # a remaining descendant holds the pipes open
                if remaining <= 0:
                    self.timed_out = True
                    kill()
                    deadline = time.monotonic() + PIPE_GRACE_SECONDS
                for key, _ in selector.select(max(remaining, 0)):
                    if key.data():
                        continue
                    selector.unregister(key.fileobj)
                    if key.fileobj is self.stdin:
                        self.stdin.close()
                    if key.fileobj == exit_fd:
                        deadline = time.monotonic() + PIPE_GRACE_SECONDS

    def _write(self) -> bool:
        try:
            self.unsent = self.unsent[os.write(self.stdin.fileno(), self.unsent[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # the child closed its stdin
            return False
        return bool(self.unsent)

    def _mark_exited(self) -> bool:
        self.exited = True
        return False


def start_process(argv: list[str], cwd: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start argv in a new session with pipes. Without a Python in PATH, `python3` is this interpreter."""
    if argv[0] in ("python", "python3") and not shutil.which(argv[0], path=env["PATH"]):
        argv = [sys.executable, *argv[1:]]
    return subprocess.Popen(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


@contextmanager
def _closing_fd(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
