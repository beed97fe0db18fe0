"""Local subprocesses for development. Nothing is isolated and no limit holds: agents act with this user's rights.

A sandbox is a directory, STATE_DIR/process/<owner>/<name>/, so any number of web and worker processes share it:

    sandbox.json             when it was made, and its sockets directory. create writes it last and destroy removes it
                             first: a sandbox runs while it is there, and what a crash leaves behind is still listed
    workspace/ data/         the promised places; HOME is workspace/.home
    processes/               what programs in the background have printed

Sandbox paths are not host paths here. Elements of argv, and cwd, that are one of the promised places or lie under one
are translated; inside a longer string (`sh -c "cat /data/x"`) they are not: a program finds its places in
LEASEHOLD_WORKSPACE and LEASEHOLD_DATA, whoever builds a command line asks `inside`. Linux only: pidfd and /proc.

Processes are found again by their environment and by their parents. One that clears the first and loses the second
outlives its timeout, and destroy: the docker provider leaves no such gap."""

import errno
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import quote

from django.conf import settings

from sandboxes.image import files, reap
from sandboxes.providers.base import (
    DATA,
    LLM_SOCKET,
    MARK_VARIABLE,
    SOCKETS_DIRECTORY,
    WORKSPACE,
    BadPath,
    ExecResult,
    FileStat,
    Missing,
    NoSuchFile,
    ProviderSandbox,
    Rejected,
    ResourceUsage,
    SandboxSpec,
    TooLarge,
    Unavailable,
    check_directory_path,
    check_patterns,
    check_range,
    check_relative_path,
    check_root,
    check_slug,
    split_sandbox_path,
)
from sandboxes.providers.launcher import BackgroundProcessProvider

IMAGE_DIRECTORY = Path(files.__file__).resolve().parent  # what the Docker image has in /opt/leasehold
NAME_PATTERN = re.compile(r"[a-z0-9-]{1,63}")
METADATA_FILE = "sandbox.json"
SANDBOX_VARIABLE = "LEASEHOLD_SANDBOX"  # environment variable by which destroy finds what still runs
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
FILES_TIMEOUT_SECONDS = 60.0  # seconds that a look at files, or clearing them, takes at most
PIPE_GRACE_SECONDS = (
    0.2  # seconds that a command's pipes are still read after it ended, if a process it left behind holds them open
)
EXHAUSTION_ERRNOS = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


@dataclass(frozen=True)
class SandboxDirectory:
    """One sandbox's directory, and the host directory of its sockets."""

    path: Path
    sockets: str = ""

    def inside(self, path: str) -> str:
        """The host path of a sandbox path; anything else is returned as it came."""
        places = {
            WORKSPACE: str(self.path / "workspace"),
            DATA: str(self.path / "data"),
            SOCKETS_DIRECTORY: self.sockets,
            "/opt/leasehold": str(IMAGE_DIRECTORY),
        }
        for place, host in places.items():
            if host and (path == place or path.startswith(place + "/")):
                return host + path[len(place) :]
        return path

    def environment(self, given: Mapping[str, str], mark: str) -> dict[str, str]:
        """What a command sees: a clean base, what was given, where and who it is. Our own holds secrets: none of it."""
        return {
            "PATH": DEFAULT_PATH,
            "HOME": self.inside(f"{WORKSPACE}/.home"),
            "LANG": "C.UTF-8",
            **({"LLM_SOCKET": self.inside(LLM_SOCKET)} if self.sockets else {}),
            **given,
            "LEASEHOLD_WORKSPACE": self.inside(WORKSPACE),
            "LEASEHOLD_DATA": self.inside(DATA),
            SANDBOX_VARIABLE: self.path.name,
            MARK_VARIABLE: mark,
        }


class ProcessProvider(BackgroundProcessProvider):
    name = "process"
    isolated = False
    enforces_limits = False
    measures_usage = False

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or Path(settings.STATE_DIR) / "process").resolve()

    def create(self, spec: SandboxSpec) -> str:
        if not NAME_PATTERN.fullmatch(spec.name):
            raise Rejected("a sandbox's name is 1 to 63 of a-z, 0-9 and -")
        sockets = str(spec.sockets.resolve()) if spec.sockets else ""
        note = json.dumps({"created_at": datetime.now(UTC).isoformat(), "sockets": sockets})
        with _translate_disk_errors():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.root / _owner_directory_name(spec.owner) / spec.name
            if self._find(spec.name) not in (None, path):
                raise Rejected(f"the name {spec.name} is taken by another owner's sandbox")
            if (path / METADATA_FILE).exists():
                return spec.name
            (path / "workspace" / ".home").mkdir(parents=True, exist_ok=True)
            (path / "data").mkdir(exist_ok=True)
            files.write(str(path), (METADATA_FILE,), note.encode())
        return spec.name

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.inspect(ref).running:
            if time.monotonic() >= deadline:
                raise Unavailable(f"{ref} was not ready after {timeout.total_seconds():g} s")
            time.sleep(0.05)

    def exec(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = WORKSPACE,
        stdin: bytes = b"",
        timeout: timedelta,
        cap: int = 1 << 20,
        mark: str,
    ) -> ExecResult:
        box, started = self._box(ref), time.monotonic()
        if not argv or not cwd.startswith("/"):
            raise Rejected("argv has at least one element, and cwd is an absolute path")
        try:
            child = _start_process([box.inside(word) for word in argv], box.inside(cwd), box.environment(env, mark))
        except ValueError as error:  # NUL in a string, "=" in a variable's name
            raise Rejected(f"this cannot be executed: {error}") from None
        except OSError as error:
            self._box(ref)  # destroyed meanwhile?
            if error.errno in EXHAUSTION_ERRNOS:
                raise Unavailable(f"no process can be started: {error.strerror}") from error
            gone = isinstance(error, FileNotFoundError) and error.filename != box.inside(cwd)
            return ExecResult(127 if gone else 126, stderr=f"{error.strerror}: {error.filename}\n".encode())

        with child:
            try:
                self._box(ref)  # destroy may have looked for processes just before this one was there
                talk = ChildCommunication(child, stdin, cap)
                talk.run(started + timeout.total_seconds(), partial(_kill_run, mark))
            finally:
                if child.poll() is None:
                    _kill_run(mark)
        ended = child.returncode if child.returncode >= 0 else 128 - child.returncode
        return ExecResult(
            exit_code=137 if talk.timed_out else ended,  # it may have ended by itself just before we killed the rest
            stdout=bytes(talk.out.kept),
            stderr=bytes(talk.err.kept),
            timed_out=talk.timed_out,
            truncated=talk.out.truncated or talk.err.truncated,
            duration=timedelta(seconds=time.monotonic() - started),
        )

    def kill(self, ref: str, mark: str) -> None:
        self.inspect(ref)
        _kill_run(mark)

    def destroy(self, ref: str) -> None:
        with _translate_disk_errors():
            path = self._find(ref)
            if path is None:
                return
            (path / METADATA_FILE).unlink(missing_ok=True)  # from here on no exec starts
            _kill_by_environment(f"{SANDBOX_VARIABLE}={ref}")
            _remove_tree(path)

    def inspect(self, ref: str) -> ProviderSandbox:
        with _translate_disk_errors():
            path = self._find(ref)
            found = _inspect_directory(path) if path else None
        if found is None:
            raise Missing(f"there is no sandbox {ref}")
        return found

    def stats(self, ref: str) -> ResourceUsage | None:
        self._box(ref)
        return None

    def list(self, owner: str) -> list[ProviderSandbox]:
        with _translate_disk_errors():
            return [
                found
                for path in _list_directory(self.root / _owner_directory_name(owner))
                if (found := _inspect_directory(path))
            ]

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        root, parts = split_sandbox_path(path)
        with self._files(ref, root) as host:
            return files.read(host, parts, limit)

    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        root, parts = split_sandbox_path(path)
        check_range(start, length)
        with self._files(ref, root) as host:
            return files.read_range(host, parts, start, length)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        root, parts = split_sandbox_path(path)
        with self._files(ref, root) as host:
            files.write(host, parts, content)

    def remove_file(self, ref: str, path: str) -> None:
        root, parts = split_sandbox_path(path)
        with self._files(ref, root) as host:
            files.remove(host, parts)

    def manifest(self, ref: str, root: str, *, under: str = "", deep: bool = True, most: int = 100_000) -> dict[str, FileStat]:
        check_directory_path(root, under)
        with self._files(ref, root) as host:
            seen = files.scan(host, under, deep=deep, most=most, seconds=FILES_TIMEOUT_SECONDS)
            return {path: FileStat._make(fields) for path, fields in seen}

    def get_files(
        self, ref: str, root: str, *, only: Collection[str] | None = None, exclude: Sequence[str] = ()
    ) -> Iterator[bytes]:
        wanted, patterns = only and [check_relative_path(root, path) for path in only], check_patterns(exclude)
        with self._files(ref, root) as host:
            packed = tempfile.TemporaryFile(dir=Path(host).parent)  # noqa: SIM115 - closed by _chunks
            files.pack(host, packed, only=wanted, exclude=patterns)
        return _read_chunks(packed)

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        with self._files(ref, root) as host:
            files.unpack(host, tar)

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        gone = [check_relative_path(root, path) for path in paths]
        with self._files(ref, root) as host:
            files.remove_files(host, gone)

    def clear(self, ref: str, root: str) -> None:
        with self._files(ref, root) as host:
            files.clear(host, (".home",) if root == WORKSPACE else (), seconds=FILES_TIMEOUT_SECONDS)

    def size(self, ref: str, root: str) -> int:
        with self._files(ref, root) as host:
            return files.size(host)

    def seed(self, ref: str, kind: str) -> None:
        check_slug(kind)
        with self._files(ref, DATA) as host:
            if (IMAGE_DIRECTORY / kind / "prompt.md").is_file():
                files.seed(str(IMAGE_DIRECTORY), kind, host, kind)

    def inside(self, ref: str, path: str) -> str:
        return self._box(ref).inside(path)

    def _output_directory(self, ref: str) -> str:
        return str(self._box(ref).path / "processes")

    def _find(self, ref: str) -> Path | None:
        """The directory of this name, whoever owns it and whatever is left of it."""
        if not NAME_PATTERN.fullmatch(ref):
            return None
        return next((path for owner in _list_directory(self.root) for path in _list_directory(owner) if path.name == ref), None)

    def _box(self, ref: str) -> SandboxDirectory:
        """The running sandbox; Missing, or Unavailable while it is being made or destroyed."""
        with _translate_disk_errors():
            path = self._find(ref)
            if path is None:
                raise Missing(f"there is no sandbox {ref}")
            try:
                return SandboxDirectory(path, sockets=json.loads((path / METADATA_FILE).read_bytes())["sockets"])
            except FileNotFoundError:
                raise Unavailable(f"{ref} does not run: it is being made, or destroyed") from None

    @contextmanager
    def _files(self, ref: str, root: str) -> Iterator[str]:
        """The host directory of /workspace or /data, with the errors of `files` made the port's."""
        check_root(root)
        box = self._box(ref)
        with _translate_disk_errors():
            try:
                yield box.inside(root)
            except files.BadPath as error:
                raise BadPath(str(error)) from None
            except files.TooLarge as error:
                raise TooLarge(str(error)) from None
            except tarfile.TarError as error:
                raise Rejected(f"this is no tar: {error}") from None
            except FileNotFoundError:
                self._box(ref)  # destroyed meanwhile?
                raise NoSuchFile("there is no such file") from None


@dataclass
class OutputCapture:
    """The first `cap` bytes of one output."""

    pipe: IO[bytes]
    cap: int
    kept: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def read(self) -> bool:
        """Take what is there; False at the end."""
        chunk = os.read(self.pipe.fileno(), 1 << 16)
        room = self.cap - len(self.kept)
        self.kept += chunk[:room]
        self.truncated |= len(chunk) > room
        return bool(chunk)


class ChildCommunication:
    """Writes stdin and reads both outputs of a child at once, so that no pipe fills up and blocks it."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, cap: int) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        self.pid, self.stdin, self.unsent = child.pid, child.stdin, memoryview(stdin)
        self.out, self.err = OutputCapture(child.stdout, cap), OutputCapture(child.stderr, cap)
        self.exited = self.timed_out = False

    def run(self, deadline: float, kill: Callable[[], None]) -> None:
        """Go on until the child has exited and its outputs have ended, but not past GRACE after its exit. At `deadline`
        (monotonic seconds) call `kill`, which must end the child."""
        exit_fd = os.pidfd_open(self.pid)
        os.set_blocking(self.stdin.fileno(), False)
        with _closing_fd(exit_fd), selectors.DefaultSelector() as waiting:
            waiting.register(exit_fd, selectors.EVENT_READ, self._exit)
            waiting.register(self.stdin, selectors.EVENT_WRITE, self._write)
            waiting.register(self.out.pipe, selectors.EVENT_READ, self.out.read)
            waiting.register(self.err.pipe, selectors.EVENT_READ, self.err.read)
            while waiting.get_map():
                left = deadline - time.monotonic()
                if left <= 0 and (self.exited or self.timed_out):
                    return  # a process it left behind holds the pipes
                if left <= 0:
                    self.timed_out = True
                    kill()
                    deadline = time.monotonic() + PIPE_GRACE_SECONDS
                for key, _ in waiting.select(max(left, 0)):
                    if key.data():
                        continue
                    waiting.unregister(key.fileobj)
                    if key.fileobj is self.stdin:
                        self.stdin.close()
                    if key.fileobj == exit_fd:
                        deadline = time.monotonic() + PIPE_GRACE_SECONDS

    def _write(self) -> bool:
        try:
            self.unsent = self.unsent[os.write(self.stdin.fileno(), self.unsent[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # nobody will read it
            return False
        return bool(self.unsent)

    def _exit(self) -> bool:
        self.exited = True
        return False


def _start_process(argv: list[str], cwd: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
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


def _read_chunks(source: IO[bytes]) -> Iterator[bytes]:
    """The whole file, from its beginning; it is closed at the end."""
    with source:
        source.seek(0)
        while chunk := source.read(1 << 16):
            yield chunk


def _inspect_directory(path: Path) -> ProviderSandbox | None:
    """The sandbox in this directory, or None if it was removed meanwhile."""
    with suppress(FileNotFoundError):
        made = datetime.fromisoformat(json.loads((path / METADATA_FILE).read_bytes())["created_at"])
        return ProviderSandbox(ref=path.name, name=path.name, running=True, created_at=made)
    with suppress(FileNotFoundError):
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return ProviderSandbox(ref=path.name, name=path.name, running=False, created_at=changed)
    return None


def _list_directory(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:  # nothing was ever made here
        return []


def _owner_directory_name(owner: str) -> str:
    """A file name for any owner label."""
    return quote(owner, safe="").replace(".", "%2E")


def _kill_run(mark: str) -> None:
    """Return once no process of the exec is there."""
    try:
        reap.kill_tree(mark)
    except TimeoutError as error:
        raise Unavailable(str(error)) from error


def _kill_by_environment(assignment: str) -> None:
    """Return once no process of ours has this `NAME=value` in the environment it started with."""
    deadline = time.monotonic() + 5
    while pids := [pid for pid in os.listdir("/proc") if pid.isdigit() and assignment.encode() in _read_environment(pid)]:
        if time.monotonic() > deadline:
            raise Unavailable(f"processes with {assignment} do not end: {', '.join(pids)}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _read_environment(pid: str) -> list[bytes]:
    try:
        return reap.read_environment(int(pid)).split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or another user's
        return []


def _remove_tree(path: Path) -> None:
    """Remove a tree in which programs may have made directories read-only."""
    for directory, inner, _ in os.walk(path):
        for each in inner:
            with suppress(FileNotFoundError):
                if not os.path.islink(os.path.join(directory, each)):
                    os.chmod(os.path.join(directory, each), 0o700)
    with suppress(FileNotFoundError):  # somebody else destroys it too
        shutil.rmtree(path)
    if path.exists():
        raise Unavailable(f"{path.name} is not gone yet")


@contextmanager
def _closing_fd(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def _translate_disk_errors() -> Iterator[None]:
    """What the disk refuses may go well later: once there is room, or somebody has mended the rights."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{error.strerror}: {error.filename}") from error
