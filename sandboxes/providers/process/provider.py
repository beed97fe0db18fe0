"""Process provider: local subprocesses, for development. No isolation and no limits: agents have this user's permissions.

A sandbox is the directory STATE_DIR/process/<owner>/<name>/, shared by all web and worker processes:

    sandbox.json             creation time and sockets directory. `create` writes it last and `destroy` removes it first:
                             the sandbox runs while it exists, and leftovers of a crash are still listed
    workspace/ data/         /workspace and /data; HOME is workspace/.home
    processes/               output of background processes

Sandbox paths differ from host paths. `cwd` and elements of argv that are sandbox paths are translated. Paths within a longer
string (`sh -c "cat /data/x"`) are not: programs read LEASEHOLD_WORKSPACE and LEASEHOLD_DATA, and callers that build command
lines use `inside`. Linux only (pidfd, /proc).

Processes are identified by their environment and their ancestors. A process that clears its environment and loses its parent
survives its timeout and `destroy`. The docker provider does not have this gap."""

import errno
import json
import os
import re
import signal
import tarfile
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, cast

from django.conf import settings

from sandboxes.image import files, reap
from sandboxes.providers.arguments import (
    check_directory_path,
    check_patterns,
    check_range,
    check_relative_path,
    check_root,
    check_slug,
    split_move,
    split_sandbox_path,
)
from sandboxes.providers.base import (
    DATA,
    GET_FILES_TIMEOUT,
    WORKSPACE,
    FileStat,
    Network,
    ProviderSandbox,
    ResourceUsage,
    SandboxSpec,
)
from sandboxes.providers.command_results import ExecResult, ExecState, OutputView
from sandboxes.providers.errors import BadPath, FailureCause, FileExists, Missing, NoSuchFile, Rejected, TooLarge, Unavailable
from sandboxes.providers.launcher import BackgroundProcessProvider
from sandboxes.providers.process.child import ChildCommunication, start_process
from sandboxes.providers.process.directories import (
    METADATA_FILE,
    SANDBOX_VARIABLE,
    SandboxDirectory,
    encode_owner,
    inspect_directory,
    list_directory,
    remove_tree,
    translate_disk_errors,
)
from sandboxes.providers.streams import BoundedWriter, describe_excess, limit_stream

NAME_PATTERN = re.compile(r"[a-z0-9-]{1,63}")
ENGINE_ID_FILE = "engine-id"  # beside the root directory
MACHINE_ID_PATH = Path("/etc/machine-id")
FILES_TIMEOUT_SECONDS = 60.0  # of a manifest, or of clearing a directory
EXHAUSTION_ERRNOS = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class ProcessProvider(BackgroundProcessProvider):
    """Provider that runs commands as local subprocesses of the current user."""

    name = "process"
    no_builds_reason = "Its commands run with the programs of this machine."
    isolated = False
    network = Network.OPEN
    enforces_limits = False
    can_set_size = False
    measures_usage = False
    can_suspend = False  # the processes have no cgroup of their own, and a stopped shell would be seen by its parent

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or Path(settings.STATE_DIR) / "process").resolve()

    def engine_id(self) -> str:
        """Return the id of the sandboxes' directory on this machine.

        The machine's id alone would be shared by containers of one image and by two state directories of one machine, the id
        in the directory alone by two machines that mount the same directory."""
        path = self.root.with_name(f"{self.root.name}-{ENGINE_ID_FILE}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                _create_engine_id(path)
            directory_id = path.read_text()
        except OSError as error:
            raise Unavailable(f"{path} cannot be used: {error}") from error
        machine_id = MACHINE_ID_PATH.read_text().strip() if MACHINE_ID_PATH.exists() else ""
        return f"{machine_id}-{directory_id}".strip("-")

    def total_memory_mib(self) -> int | None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20

    def create(self, spec: SandboxSpec) -> str:
        if not NAME_PATTERN.fullmatch(spec.name):
            raise Rejected("The name of a sandbox must be 1 to 63 characters of a-z, 0-9 and -.")
        sockets = str(spec.sockets.resolve()) if spec.sockets else ""
        metadata = json.dumps({"created_at": datetime.now(UTC).isoformat(), "sockets": sockets})  # noqa: TID251
        with translate_disk_errors():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.root / encode_owner(spec.owner) / spec.name
            if self._find(spec.name) not in (None, path):
                raise Rejected(f"The name {spec.name} is used by a sandbox of another owner.")
            if (path / METADATA_FILE).exists():
                return spec.name
            (path / "workspace" / ".home").mkdir(parents=True, exist_ok=True)
            (path / "data").mkdir(exist_ok=True)
            files.write(str(path), (METADATA_FILE,), metadata.encode())
        return spec.name

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.inspect(ref).running:
            if time.monotonic() >= deadline:
                raise Unavailable(f"{ref} is not ready after {timeout.total_seconds():g} s", cause=FailureCause.TIMEOUT)
            time.sleep(0.05)

    def find_exec(self, ref: str, mark: str) -> ExecState | None:
        return None  # a command does not outlive the process that waits for it

    def acknowledge_exec(self, ref: str, mark: str) -> None:
        pass

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
        output: OutputView | None = None,
        retain: bool = False,
        digest_data: bool = False,
    ) -> ExecResult:
        directory, started = self._open(ref), time.monotonic()
        if not argv or not cwd.startswith("/"):
            raise Rejected("argv must not be empty, and cwd must be an absolute path.")
        try:
            host_argv = [directory.inside(argument) for argument in argv]
            child = start_process(host_argv, directory.inside(cwd), directory.environment(env, mark))
        except ValueError as error:  # NUL in a string, "=" in a variable's name
            raise Rejected(f"The command cannot be executed: {error}") from None
        except OSError as error:
            self._require_not_destroyed(ref)
            if error.errno in EXHAUSTION_ERRNOS:
                raise Unavailable(f"No process can be started: {error.strerror}") from error
            is_missing = isinstance(error, FileNotFoundError) and error.filename != directory.inside(cwd)
            return ExecResult(127 if is_missing else 126, stderr=f"{error.strerror}: {error.filename}\n".encode())

        with child:
            try:
                self._require_not_destroyed(ref)  # `destroy` may have searched for processes just before this one started
                communication = ChildCommunication(child, stdin, cap)
                if output:
                    output.attach(communication.out.content, communication.err.content)
                communication.run(started + timeout.total_seconds(), partial(_kill_run, mark))
            finally:
                if child.poll() is None:
                    _kill_run(mark)
        exit_code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if exit_code > 128 and not communication.timed_out:
            self._require_not_destroyed(ref)
        return ExecResult(
            exit_code=137 if communication.timed_out else exit_code,  # the child may have exited just before the kill
            stdout=bytes(communication.out.content),
            stderr=bytes(communication.err.content),
            timed_out=communication.timed_out,
            truncated=communication.out.truncated or communication.err.truncated,
            duration=timedelta(seconds=time.monotonic() - started),
        )

    def _require_not_destroyed(self, ref: str) -> None:
        """Raise Missing if a sandbox that was running is destroyed, or is being destroyed."""
        if not self.inspect(ref).running:
            raise Missing(f"{ref} was destroyed while the command ran.")

    def kill(self, ref: str, mark: str) -> None:
        self.inspect(ref)
        _kill_run(mark)

    def suspend(self, ref: str) -> None:
        raise Rejected("The process provider cannot suspend sandboxes.")

    def resume(self, ref: str) -> None:
        self.inspect(ref)

    def find_unresponsive(self, refs: Collection[str], *, timeout: timedelta) -> set[str]:
        return set()  # no agent

    def responds(self, ref: str, *, timeout: timedelta) -> bool:
        return self._find(ref) is not None

    def kill_all(self, ref: str) -> None:
        _kill_by_environment(f"{SANDBOX_VARIABLE}={ref}")

    def restart(self, ref: str) -> None:
        self.inspect(ref)
        self.kill_all(ref)

    def destroy(self, ref: str) -> None:
        with translate_disk_errors():
            path = self._find(ref)
            if path is None:
                return
            (path / METADATA_FILE).unlink(missing_ok=True)  # prevents further execs
            _kill_by_environment(f"{SANDBOX_VARIABLE}={ref}")
            remove_tree(path)

    def inspect(self, ref: str) -> ProviderSandbox:
        with translate_disk_errors():
            path = self._find(ref)
            sandbox = inspect_directory(path) if path else None
        if sandbox is None:
            raise Missing(f"There is no sandbox {ref}.")
        return sandbox

    def stats(self, ref: str) -> ResourceUsage | None:
        self._open(ref)
        return None

    def list_all(self) -> list[ProviderSandbox]:
        with translate_disk_errors():
            paths = [path for directory in list_directory(self.root) for path in list_directory(directory)]
            return [sandbox for path in paths if (sandbox := inspect_directory(path))]

    def list(self, owner: str) -> list[ProviderSandbox]:
        with translate_disk_errors():
            return [sandbox for path in list_directory(self.root / encode_owner(owner)) if (sandbox := inspect_directory(path))]

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

    def make_directory(self, ref: str, path: str) -> None:
        root, parts = split_sandbox_path(path)
        with self._files(ref, root) as host:
            files.make_directory(host, parts)

    def move_file(self, ref: str, source: str, target: str, *, overwrite: bool) -> None:
        root, old, new = split_move(source, target)
        with self._files(ref, root) as host:
            files.move(host, old, new, overwrite=overwrite)

    def manifest(
        self, ref: str, root: str, *, under: str = "", deep: bool = True, max_entries: int = 100_000
    ) -> dict[str, FileStat]:
        check_directory_path(root, under)
        with self._files(ref, root) as host:
            entries = files.scan(host, under, deep=deep, max_entries=max_entries, seconds=FILES_TIMEOUT_SECONDS)
            return {path: FileStat._make(fields) for path, fields in entries}

    def get_files(
        self,
        ref: str,
        root: str,
        *,
        only: Collection[str] | None = None,
        exclude: Sequence[str] = (),
        exact: bool = False,
        max_bytes: int | None = None,
        timeout: timedelta = GET_FILES_TIMEOUT,
    ) -> Iterator[bytes]:
        selected, patterns = only and [check_relative_path(root, path) for path in only], check_patterns(exclude)
        with self._files(ref, root) as host:
            packed = tempfile.TemporaryFile(dir=Path(host).parent)  # noqa: SIM115 - closed by _read_chunks
            limit = files.UNLIMITED if max_bytes is None else max_bytes
            bounded = cast(BinaryIO, BoundedWriter(packed, limit, describe_excess(limit)))
            files.pack(host, bounded, only=selected, exclude=patterns, exact=exact, seconds=timeout.total_seconds())
        return limit_stream(_read_chunks(packed), max_bytes=max_bytes, timeout=timeout)

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        with self._files(ref, root) as host:
            files.unpack(host, tar)

    def put_and_list_files(self, ref: str, root: str, tar: BinaryIO, *, max_entries: int = 100_000) -> dict[str, FileStat]:
        self.put_files(ref, root, tar)
        return self.manifest(ref, root, max_entries=max_entries)

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        checked = [check_relative_path(root, path) for path in paths]
        with self._files(ref, root) as host:
            files.remove_files(host, checked)

    def clear(self, ref: str, root: str) -> None:
        with self._files(ref, root) as host:
            files.clear(host, (".home",) if root == WORKSPACE else (), seconds=FILES_TIMEOUT_SECONDS)

    def size(self, ref: str, root: str) -> int:
        with self._files(ref, root) as host:
            return files.size(host)

    def seed(self, ref: str, kind: str, tar: BinaryIO) -> None:
        check_slug(kind)
        with self._files(ref, DATA) as host:
            files.seed(host, kind, tar)

    def inside(self, ref: str, path: str) -> str:
        return self._open(ref).inside(path)

    def _output_directory(self, ref: str) -> str:
        return str(self._open(ref).path / "processes")

    def _find(self, ref: str) -> Path | None:
        """Return the directory of this sandbox under any owner, even if only leftovers exist."""
        if not NAME_PATTERN.fullmatch(ref):
            return None
        return next((path for owner in list_directory(self.root) for path in list_directory(owner) if path.name == ref), None)

    def _open(self, ref: str) -> SandboxDirectory:
        """Return the running sandbox. Raise Missing, or Unavailable while it is being created or destroyed."""
        with translate_disk_errors():
            path = self._find(ref)
            if path is None:
                raise Missing(f"There is no sandbox {ref}.")
            try:
                return SandboxDirectory(path, sockets=json.loads((path / METADATA_FILE).read_bytes())["sockets"])
            except FileNotFoundError:
                message = f"{ref} does not run: it is being created or destroyed."
                raise Unavailable(message, cause=FailureCause.NOT_RUNNING) from None

    @contextmanager
    def _files(self, ref: str, root: str) -> Iterator[str]:
        """Yield the host directory of /workspace or /data. Translate errors of image/files.py into the provider port's."""
        check_root(root)
        directory = self._open(ref)
        with translate_disk_errors():
            try:
                yield directory.inside(root)
            except files.BadPath as error:
                raise BadPath(str(error)) from None
            except files.TooLarge as error:
                raise TooLarge(str(error)) from None
            except files.Exists as error:
                raise FileExists(str(error)) from None
            except tarfile.TarError as error:
                raise Rejected(f"Invalid tar: {error}") from None
            except FileNotFoundError:
                self._require_not_destroyed(ref)
                raise NoSuchFile("The file does not exist.") from None


def _read_chunks(source: IO[bytes]) -> Iterator[bytes]:
    """Yield a file's content from its beginning, and close the file."""
    with source:
        source.seek(0)
        while chunk := source.read(1 << 16):
            yield chunk


def _create_engine_id(path: Path) -> None:
    """Write a new id, unless another process is first: a link, unlike a rename, does not replace."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    temporary.write_text(uuid.uuid4().hex)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _kill_run(mark: str) -> None:
    """Kill all processes of an exec, and return once they are gone."""
    try:
        reap.kill_tree(mark)
    except TimeoutError as error:
        raise Unavailable(str(error)) from error


def _kill_by_environment(assignment: str) -> None:
    """Kill all processes that were started with `NAME=value` in their environment, and return once they are gone."""
    deadline = time.monotonic() + 5
    while pids := [pid for pid in os.listdir("/proc") if pid.isdigit() and assignment.encode() in _read_environment(pid)]:
        if time.monotonic() > deadline:
            raise Unavailable(f"Processes with {assignment} did not end: {', '.join(pids)}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _read_environment(pid: str) -> list[bytes]:
    try:
        return reap.read_environment(int(pid)).split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # exited, or owned by another user
        return []
