"""Background process launcher: start a program, record its output, report its state.

    launch.py start DIR MARK             the command is read from stdin, as JSON {"argv": …, "env": …, "cwd": …}
    launch.py look DIR MARK...           prints MARK and "running" or the exit code, one line per started program
    launch.py log DIR MARK START LENGTH  prints the offset after the last returned byte, a newline, and the bytes
    launch.py signal DIR MARK NUMBER     sends a signal to a running program and its process group

Each program has a keeper, a process that reads its output. DIR contains MARK.lock, locked while the keeper lives, with the
program's process id; MARK.exit with the exit code of an exited program; and the output in segments MARK.log.OFFSET, of which
the last two are retained. Offsets count from the first byte ever printed. Standard library only: this runs inside sandboxes,
and on the host for providers without isolation."""

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

LOG_SEGMENT_BYTES = 1 << 18  # two segments per program are retained, possibly on a tmpfs
MAX_EXITED_LOGS = 16  # exited programs whose logs are retained
CHUNK_BYTES = 1 << 16
KILLED_EXIT_CODE = 137
RUNNING = "running"


def start(directory: str, mark: str, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """Start a program in the background. Return "running", or its exit code if it has already exited.

    A program that cannot be executed has exit code 127 or 126, as in a shell, and its log contains the reason. Idempotent: a
    second start with the same mark starts nothing."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    base_path = os.path.join(directory, mark)
    lock = os.open(f"{base_path}.{os.getpid()}.tmp", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # before the link: an unlocked file means that the keeper is dead
    try:
        os.link(f"{base_path}.{os.getpid()}.tmp", f"{base_path}.lock")
    except FileExistsError:
        return read_state(directory, mark) or RUNNING
    finally:
        os.unlink(f"{base_path}.{os.getpid()}.tmp")
    _remove_oldest(directory)
    status_reader, status_writer = os.pipe()
    if os.fork() == 0:
        try:
            os.close(status_reader)
            _run_keeper(base_path, argv, env, cwd, status_writer)
        finally:
            os._exit(0)
    os.close(status_writer)
    with os.fdopen(status_reader) as status:
        return status.read() or read_state(directory, mark) or str(KILLED_EXIT_CODE)


def read_state(directory: str, mark: str) -> str | None:
    """Return "running", the exit code, or None if the program was never started. The code is 137 if the keeper was killed."""
    base_path = os.path.join(directory, mark)
    try:
        lock = os.open(f"{base_path}.lock", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if code := _read_exit_code(base_path):
            return code
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _read_exit_code(base_path) or str(KILLED_EXIT_CODE)  # the exit code may have been written since
    except BlockingIOError:
        return RUNNING
    finally:
        os.close(lock)


def read_log(directory: str, mark: str, start: int, length: int) -> tuple[int, bytes]:
    """Return (offset after the returned bytes, at most `length` bytes of output from offset `start`).

    If older output was dropped, the returned bytes begin at a later offset."""
    offset, content = start, b""
    for first in _list_segments(directory, mark):
        with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, f"{mark}.log.{first}"), "rb") as segment:
            size = os.fstat(segment.fileno()).st_size
            if first + size <= offset:
                continue
            if first > offset and content:
                break  # a segment in between was dropped during the read
            offset = max(offset, first)
            segment.seek(offset - first)
            chunk = segment.read(length - len(content))
            offset, content = offset + len(chunk), content + chunk
    return offset, content


def send_signal(directory: str, mark: str, number: int) -> None:
    """Send a signal to a program and its process group, if it runs."""
    if read_state(directory, mark) != RUNNING:
        return
    with open(os.path.join(directory, f"{mark}.lock")) as file:
        pid = file.read()
    if pid:  # else it is being started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), number)


def _list_segments(directory: str, mark: str) -> list[int]:
    prefix = f"{mark}.log."
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix))


def _read_exit_code(base_path: str) -> str:
    try:
        with open(f"{base_path}.exit") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _run_keeper(base_path: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, status: int) -> None:
    """Start the program, record its output until all writers have closed it, and record its exit code.

    The initial state is written to the descriptor `status`."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    log = _SegmentedLog(base_path)
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
        is_missing = isinstance(error, FileNotFoundError) and error.filename != cwd
        log.add(f"{error}\n".encode(errors="replace"))
        _write_exit_code(base_path, 127 if is_missing else 126)
        os.write(status, b"127" if is_missing else b"126")
        return
    with open(f"{base_path}.lock", "w") as file:
        file.write(str(child.pid))
    os.write(status, RUNNING.encode())
    os.close(status)
    assert child.stdout is not None
    _follow_output(base_path, child, child.stdout.fileno(), log)


def _follow_output(base_path: str, child: "subprocess.Popen[bytes]", pipe: int, log: "_SegmentedLog") -> None:
    exit_fd = _open_exit_fd(child.pid)
    os.set_blocking(pipe, False)
    poll = select.poll()
    poll.register(exit_fd, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    reading, alive = True, True
    while reading or alive:
        poll.poll()
        has_exited = alive and child.poll() is not None  # before reading the last output
        reading = reading and log.read_pipe(pipe)
        if not reading:
            with contextlib.suppress(KeyError):
                poll.unregister(pipe)
        if has_exited:
            _write_exit_code(base_path, child.returncode if child.returncode >= 0 else 128 - child.returncode)
            poll.unregister(exit_fd)
            alive = False


def _open_exit_fd(pid: int) -> int:
    """Open a descriptor that becomes readable when the child exits."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:  # gVisor does not implement the call
            raise
    reader, writer = os.pipe()

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    threading.Thread(target=wait, daemon=True).start()
    return reader


def _write_exit_code(base_path: str, code: int) -> None:
    with open(f"{base_path}.exit.tmp", "w") as file:
        file.write(str(code))
    os.rename(f"{base_path}.exit.tmp", f"{base_path}.exit")


def _remove_oldest(directory: str) -> None:
    """Remove logs and exit codes of all but the last MAX_EXITED_LOGS exited programs."""
    exited = [entry for entry in os.scandir(directory) if entry.name.endswith(".exit")]
    for entry in sorted(exited, key=lambda entry: entry.stat().st_mtime)[:-MAX_EXITED_LOGS]:
        mark = entry.name.removesuffix(".exit")
        for name in (*(f"{mark}.log.{first}" for first in _list_segments(directory, mark)), entry.name):
            with contextlib.suppress(FileNotFoundError):  # removed by a concurrent start
                os.unlink(os.path.join(directory, name))
        # The lock file stays: without it the program would appear as never started.


class _SegmentedLog:
    """Writer of one program's output segments."""

    def __init__(self, base_path: str) -> None:
        self._base_path, self._offset, self._segment_starts = base_path, 0, list[int]()

    def read_pipe(self, pipe: int) -> bool:
        """Record available output, at most the capacity of a pipe. Return False at the end of the output."""
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
        with contextlib.suppress(OSError):  # output is lost when the disk is full; the program continues
            while chunk:
                if not self._segment_starts or self._offset >= self._segment_starts[-1] + LOG_SEGMENT_BYTES:
                    self._begin_segment()
                with open(f"{self._base_path}.log.{self._segment_starts[-1]}", "ab") as segment:
                    written = os.write(segment.fileno(), chunk[: self._segment_starts[-1] + LOG_SEGMENT_BYTES - self._offset])
                self._offset, chunk = self._offset + written, chunk[written:]

    def _begin_segment(self) -> None:
        self._segment_starts.append(self._offset)
        if len(self._segment_starts) > 2:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._base_path}.log.{self._segment_starts.pop(0)}")


def main(argv: Sequence[str]) -> int:
    """Execute one command line. Return the exit code."""
    match list(argv):
        case ["start", directory, mark]:
            command = json.load(sys.stdin)
            print(start(directory, mark, command["argv"], command["env"], command["cwd"]))
        case ["look", directory, *marks]:
            for mark in marks:
                if (state := read_state(directory, mark)) is not None:
                    print(mark, state)
        case ["log", directory, mark, first, length]:
            next_offset, content = read_log(directory, mark, int(first), int(length))
            sys.stdout.buffer.write(b"%d\n" % next_offset + content)
        case ["signal", directory, mark, number]:
            send_signal(directory, mark, int(number))
        case _:
            print("usage: launch.py start|look|log|signal DIR MARK ...", file=sys.stderr)
            return 2
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
