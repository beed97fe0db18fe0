"""Start a program in the background, keep what it prints, and tell what became of it. Standard library only: this runs
inside sandboxes, and beside them where there is no inside.

    launch.py start DIR MARK             what to run comes on stdin, as JSON {"argv": …, "env": …, "cwd": …}
    launch.py look DIR MARK...           one line for each that was started: MARK, and "running" or its exit code
    launch.py log DIR MARK START LENGTH  the offset after the last byte that follows, a newline, those bytes

Each has a keeper, a process of ours that reads its output. In DIR there is MARK.lock, locked while the keeper lives;
MARK.exit with the exit code, once the program has exited; and the output in pieces, MARK.log.OFFSET, of which the
last two stay. Offsets count from the first byte that was ever printed."""

import contextlib
import errno
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

LOG_SEGMENT_BYTES = 1 << 18  # bytes of one piece of a log: two of them stay, perhaps in memory
MAX_EXITED_LOGS = 16  # programs that have exited whose logs stay
CHUNK_BYTES = 1 << 16
KILLED_EXIT_CODE = 137
RUNNING = "running"


def start(directory: str, mark: str, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """Have the program running in the background; "running", or its exit code if it has one already. What cannot be
    executed has 127 or 126, as in a shell, and its log says why. Done twice for one mark, it is started once."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    place = os.path.join(directory, mark)
    lock = os.open(f"{place}.{os.getpid()}.tmp", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # before it has its name: whoever finds it unlocked takes the keeper for dead
    try:
        os.link(f"{place}.{os.getpid()}.tmp", f"{place}.lock")
    except FileExistsError:
        return read_state(directory, mark) or RUNNING
    finally:
        os.unlink(f"{place}.{os.getpid()}.tmp")
    _remove_oldest(directory)
    hear, tell = os.pipe()
    if os.fork() == 0:
        try:
            os.close(hear)
            _run_keeper(place, argv, env, cwd, tell)
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(hear) as heard:
        return heard.read() or read_state(directory, mark) or str(KILLED_EXIT_CODE)


def read_state(directory: str, mark: str) -> str | None:
    """What a program is doing: "running", its exit code, or None if it was never started. What was killed with its keeper
    has 137."""
    place = os.path.join(directory, mark)
    try:
        lock = os.open(f"{place}.lock", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if code := _read_exit_code(place):
            return code
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _read_exit_code(place) or str(KILLED_EXIT_CODE)  # it may have been written since
    except BlockingIOError:
        return RUNNING
    finally:
        os.close(lock)


def read_log(directory: str, mark: str, start: int, length: int) -> tuple[int, bytes]:
    """At most `length` bytes of what was printed from offset `start`, and the offset after them. They begin later where
    the oldest were dropped."""
    at, found = start, b""
    for first in _list_segments(directory, mark):
        with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, f"{mark}.log.{first}"), "rb") as piece:
            size = os.fstat(piece.fileno()).st_size
            if first + size <= at:
                continue
            if first > at and found:
                break  # one between them was dropped while we read
            at = max(at, first)
            piece.seek(at - first)
            chunk = piece.read(length - len(found))
            at, found = at + len(chunk), found + chunk
    return at, found


def _list_segments(directory: str, mark: str) -> list[int]:
    prefix = f"{mark}.log."
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix))


def _read_exit_code(place: str) -> str:
    try:
        with open(f"{place}.exit") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _run_keeper(place: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, tell: int) -> None:
    """The keeper: start the program, keep its output until nobody can write to it any more, and note its exit."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    kept = _SegmentedLog(place)
    env = {**os.environ, **env}
    if argv[0] in ("python", "python3") and not shutil.which(argv[0], path=env.get("PATH", "")):
        argv = [sys.executable, *argv[1:]]
    try:
        child = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        absent = isinstance(error, FileNotFoundError) and error.filename != cwd
        kept.add(f"{error}\n".encode(errors="replace"))
        _write_exit_code(place, 127 if absent else 126)
        os.write(tell, b"127" if absent else b"126")
        return
    os.write(tell, RUNNING.encode())
    os.close(tell)
    assert child.stdout is not None
    _follow_output(place, child, child.stdout.fileno(), kept)


def _follow_output(place: str, child: "subprocess.Popen[bytes]", pipe: int, kept: "_SegmentedLog") -> None:
    exited = _open_exit_fd(child.pid)
    os.set_blocking(pipe, False)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    reading, alive = True, True
    while reading or alive:
        poll.poll()
        ended = alive and child.poll() is not None  # asked before the last of its output is read
        reading = reading and kept.take(pipe)
        if not reading:
            with contextlib.suppress(KeyError):
                poll.unregister(pipe)
        if ended:
            _write_exit_code(place, child.returncode if child.returncode >= 0 else 128 - child.returncode)
            poll.unregister(exited)
            alive = False


def _open_exit_fd(pid: int) -> int:
    """A descriptor on which poll wakes once this child has exited."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:  # gVisor's kernel has no such call
            raise
    hear, tell = os.pipe()

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(tell)

    threading.Thread(target=wait, daemon=True).start()
    return hear


def _write_exit_code(place: str, code: int) -> None:
    with open(f"{place}.exit.tmp", "w") as file:
        file.write(str(code))
    os.rename(f"{place}.exit.tmp", f"{place}.exit")


def _remove_oldest(directory: str) -> None:
    """Remove what is left of programs that exited long ago."""
    ended = [entry for entry in os.scandir(directory) if entry.name.endswith(".exit")]
    for entry in sorted(ended, key=lambda entry: entry.stat().st_mtime)[:-MAX_EXITED_LOGS]:
        mark = entry.name.removesuffix(".exit")
        for name in (*(f"{mark}.log.{first}" for first in _list_segments(directory, mark)), entry.name):
            with contextlib.suppress(FileNotFoundError):  # another start does the same
                os.unlink(os.path.join(directory, name))
        # Its lock stays: without it, what has exited would look as if it had never been started.


class _SegmentedLog:
    """The pieces of one log, as its keeper writes them."""

    def __init__(self, place: str) -> None:
        self._place, self._at, self._segment_starts = place, 0, list[int]()

    def take(self, pipe: int) -> bool:
        """Keep what is in the pipe, but no more than a pipe holds; False at the end of it."""
        for _ in range(16):
            try:
                chunk = os.read(pipe, CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.add(chunk)
        return True

    def add(self, chunk: bytes) -> None:
        with contextlib.suppress(OSError):  # what a full disk does not take is lost, and the program goes on
            while chunk:
                if not self._segment_starts or self._at >= self._segment_starts[-1] + LOG_SEGMENT_BYTES:
                    self._begin_segment()
                with open(f"{self._place}.log.{self._segment_starts[-1]}", "ab") as piece:
                    wrote = os.write(piece.fileno(), chunk[: self._segment_starts[-1] + LOG_SEGMENT_BYTES - self._at])
                self._at, chunk = self._at + wrote, chunk[wrote:]

    def _begin_segment(self) -> None:
        self._segment_starts.append(self._at)
        if len(self._segment_starts) > 2:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._place}.log.{self._segment_starts.pop(0)}")


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["start", directory, mark]:
            said = json.load(sys.stdin)
            print(start(directory, mark, said["argv"], said["env"], said["cwd"]))
        case ["look", directory, *marks]:
            for mark in marks:
                if (state := read_state(directory, mark)) is not None:
                    print(mark, state)
        case ["log", directory, mark, first, length]:
            after, content = read_log(directory, mark, int(first), int(length))
            sys.stdout.buffer.write(b"%d\n" % after + content)
        case _:
            print("usage: launch.py start|look|log DIR MARK ...", file=sys.stderr)
            return 2
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
