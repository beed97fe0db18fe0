"""Memory provider: the complete provider port on a dict, with simulated programs and fault injection.

No program is executed for real, so sandboxes are isolated. Time is simulated: `sleep 60` returns immediately and reports a
duration of one minute, and a command that exceeds its timeout reports the timeout immediately. Background processes do run for
their duration, and print all their output at the start. Beyond the port it offers:

    memory.before("create", fn)      call fn(ref) before the verb has any effect, outside all locks: it may raise a
    memory.after("exec", fn)         ProviderError, simulate a crash, block at a barrier or run a competing call
    memory.fail("destroy", Unavailable("engine down"), times=3)
    with memory.fail(...):           limited to the block; without `with` hooks stay until reset()
    memory.vanish(ref)  stop(ref)    remove or stop a sandbox externally
    memory.silent.add(ref)           its agent does not respond until a restart
    memory.calls                     [(verb, ref), ...]; for `list` (verb, owner)
    memory.files(ref)                {"/workspace/a b": File(b"..."), ...}, readable and writable
    memory.programs["python3"] = fn  a program is Callable[[ProgramCall], ProgramResult]
    with memory.on_engine("b"):      calls of this thread or task go to the engine "b", which has sandboxes of its own
    memory.select_engine("b")        the same without an end, as from a hook that exchanges the engine during a call"""

import io
import signal
import tarfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from sandboxes.agent.protocol import TerminalSize
from sandboxes.fault_injection import HookedCalls
from sandboxes.image.files import build_exclude_filter, list_path_prefixes
from sandboxes.providers import recoveries
from sandboxes.providers.arguments import (
    check_directory_path,
    check_patterns,
    check_range,
    check_relative_path,
    check_root,
    check_slug,
    split_move,
)
from sandboxes.providers.base import (
    DATA,
    GET_FILES_TIMEOUT,
    MARK_VARIABLE,
    USER_PROGRAMS_DIRECTORY,
    WORKSPACE,
    FileStat,
    Network,
    Provider,
    ProviderSandbox,
    ResourceUsage,
    SandboxSpec,
    VendorIntervals,
)
from sandboxes.providers.command_results import (
    ExecResult,
    ExecState,
    OutputReader,
    OutputView,
    ProcessOutput,
    ProcessState,
)
from sandboxes.providers.errors import BadPath, FailureCause, Missing, NoSuchFile, Rejected, Stopped, TooLarge, Unavailable
from sandboxes.providers.memory.file_tree import (
    File,
    Files,
    Folder,
    check_parents,
    get_regular_file,
    list_below,
    move_entry,
    put_entry,
    stat_entry,
    unpack_member,
    write_tar,
)
from sandboxes.providers.memory.programs import (
    PROGRAMS,
    Program,
    ProgramCall,
    ProgramResult,
    run_program,
    run_shell,
)
from sandboxes.providers.memory.retained_output import RetainedOutput
from sandboxes.providers.recoveries import Recovery
from sandboxes.providers.streams import limit_stream

FATAL_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
MAX_LOG_BYTES = 1 << 20  # retained output of a background process
DEFAULT_ENGINE_ID = "memory"
_selected_engine: ContextVar[str] = ContextVar("memory_engine", default=DEFAULT_ENGINE_ID)


@dataclass
class BackgroundProgram:
    """Background process and its predetermined result."""

    outcome: ProgramResult
    started: float = field(default_factory=time.monotonic)
    killed: bool = False
    signal: int = 0  # that has ended the process
    stdin: bytearray | None = None

    def state(self) -> ProcessState:
        if self.killed:
            return ProcessState(False, 137)
        if self.signal:
            return ProcessState(False, 128 + self.signal)
        running = time.monotonic() < self.started + self.outcome.took.total_seconds()
        return ProcessState(True) if running else ProcessState(False, self.outcome.exit_code)


@dataclass
class MemorySandbox:
    """State of one sandbox."""

    spec: SandboxSpec
    created_at: datetime
    running: bool = True
    suspended: bool = False
    intervals: VendorIntervals = field(default_factory=VendorIntervals)
    used: ResourceUsage = field(default_factory=lambda: ResourceUsage(0, 0))
    files: Files = field(default_factory=lambda: Files({WORKSPACE: Folder(), DATA: Folder()}))
    background: dict[str, BackgroundProgram] = field(default_factory=dict)  # by mark
    retained: dict[str, ExecResult] = field(default_factory=dict)  # results of execs that are not acknowledged, by mark


class MemoryProvider(HookedCalls, Provider):
    """Provider whose sandboxes exist only in this process."""

    port = Provider
    name = "memory"
    no_builds_reason = "Its sandboxes have no images."
    isolated = True
    network = Network.SEALED
    enforces_limits = limits_processes = True
    measures_usage = True
    can_suspend = True

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Remove all sandboxes, hooks and recorded calls, and restore the default programs."""
        with self._lock:
            self._engines: dict[str, dict[str, MemorySandbox]] = {}
            self.silent: set[str] = set()
            self.disk: Path | None = None
            self.missing_images: set[str] = set()  # `create` rejects them
            _selected_engine.set(DEFAULT_ENGINE_ID)
            self.clear_hooks()
            self.programs: dict[str, Program] = {**PROGRAMS, "sh": lambda call: run_shell(self.programs, call)}

    @property
    def _sandboxes(self) -> dict[str, MemorySandbox]:
        """Sandboxes of the engine that this thread or task calls."""
        return self._engines.setdefault(_selected_engine.get(), {})

    def select_engine(self, engine_id: str) -> None:
        """Direct the calls of this thread or task to an engine, which is empty at its first use."""
        _selected_engine.set(engine_id)

    @contextmanager
    def on_engine(self, engine_id: str) -> Iterator[None]:
        """Direct the calls of this thread or task to an engine within the block. New threads begin with DEFAULT_ENGINE_ID."""
        before = _selected_engine.get()
        _selected_engine.set(engine_id)
        try:
            yield
        finally:
            _selected_engine.set(before)

    def engine_id(self) -> str:
        for hook in [*self._hooks["before", "engine_id"]]:  # not recorded in `calls`: every lookup of a sandbox may ask
            hook("")
        return _selected_engine.get()

    def last_engine_id(self) -> str:
        return _selected_engine.get()

    def vanish(self, ref: str) -> None:
        """Remove a sandbox and its processes, as by an external actor. Raise Missing."""
        with self._lock:
            del self._sandboxes[self._get(ref).spec.name]

    def stop(self, ref: str) -> None:
        """Stop a sandbox and its processes, as by a restart of its host. Raise Missing."""
        sandbox = self._get(ref)
        sandbox.running = sandbox.suspended = False

    def use(self, ref: str, *, cpu_micros: int = 0, memory_bytes: int | None = None) -> None:
        """Add CPU time to a sandbox's usage, and set its memory usage."""
        with self._lock:
            sandbox = self._get(ref)
            memory = sandbox.used.memory_bytes if memory_bytes is None else memory_bytes
            sandbox.used = ResourceUsage(sandbox.used.cpu_micros + cpu_micros, memory)

    def files(self, ref: str) -> Files:
        """Return the file tree of a running or stopped sandbox, for reading and writing."""
        return self._get(ref).files

    def find_missing_images(self, images: Collection[str]) -> set[str]:
        return self.missing_images.intersection(images)

    def find_disk(self) -> Path | None:
        with self.hooked_call("find_disk", ""):
            return self.disk

    def create(self, spec: SandboxSpec) -> str:
        with self.hooked_call("create", spec.name), self._lock:
            if spec.image in self.missing_images:
                raise Rejected(f"Image {spec.image} does not exist.", cause=FailureCause.IMAGE_UNUSABLE)
            sandbox = self._sandboxes.setdefault(spec.name, MemorySandbox(spec, datetime.now(UTC)))  # noqa: TID251
            sandbox.intervals = spec.intervals or sandbox.intervals
            if sandbox.spec.owner != spec.owner:
                raise Rejected(f"The name {spec.name} is used by a sandbox of another owner.")
            if not sandbox.running:
                self._start(sandbox)
        return spec.name

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        with self.hooked_call("wait_ready", ref):
            self._running(ref)

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
        with self.hooked_call("exec", ref):  # without the lock: execs run concurrently, and a program may block
            sandbox = self._running(ref)
            result = run_program(self.programs, _build_call(sandbox, argv, env, cwd, mark, stdin, timeout))
            timed_out = result.took >= timeout
            if output:
                output.attach(result.stdout[:cap], result.stderr[:cap])
            if not timed_out and self._sandboxes.get(ref) is not sandbox:
                raise Missing(f"{ref} was removed while the command ran.")
            if not timed_out and not sandbox.running:
                raise Stopped(f"{ref} stopped while the command ran.")
            outcome = ExecResult(
                exit_code=137 if timed_out or result.oom else result.exit_code,
                stdout=result.stdout[:cap],
                stderr=result.stderr[:cap],
                timed_out=timed_out,
                oom=result.oom,
                truncated=max(len(result.stdout), len(result.stderr)) > cap,
                duration=min(result.took, timeout),
            )
            if retain:
                sandbox.retained[mark] = outcome
            return outcome

    def find_exec(self, ref: str, mark: str) -> ExecState | None:
        with self.hooked_call("find_exec", ref), self._lock:
            result = self._running(ref).retained.get(mark)
            return ExecState(running=False, result=result) if result else None

    def open_output(self, ref: str, mark: str, *, stdout: int, stderr: int) -> OutputReader | None:
        with self.hooked_call("open_output", ref), self._lock:
            sandbox = self._running(ref)
            return RetainedOutput(sandbox.retained, mark, stdout, stderr) if mark in sandbox.retained else None

    def drop_results(self, ref: str) -> None:
        """Drop the retained results of a sandbox, as an agent does that needs the room."""
        with self._lock:
            self._get(ref).retained.clear()

    def acknowledge_exec(self, ref: str, mark: str) -> None:
        with self._lock, suppress(Missing, Unavailable):
            self._running(ref).retained.pop(mark, None)

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
        if terminal:
            raise Rejected("The memory provider has no terminals.")
        with self.hooked_call("start", ref), self._lock:
            sandbox = self._running(ref)
            if mark not in sandbox.background:
                sandbox.background[mark] = BackgroundProgram(
                    run_program(self.programs, _build_call(sandbox, argv, env, cwd, mark, b"", timedelta.max)),
                    stdin=bytearray() if stdin else None,
                )
            return sandbox.background[mark].state()

    def signal_process(self, ref: str, mark: str, number: int) -> None:
        with self.hooked_call("signal_process", ref), self._lock:
            program = self._running(ref).background.get(mark)
            if program and program.state().running and number in FATAL_SIGNALS:
                program.signal = number

    def write_stdin(self, ref: str, mark: str, content: bytes, *, offset: int, last: bool) -> int:
        with self.hooked_call("write_stdin", ref), self._lock:
            program = self._running(ref).background.get(mark)
            if program is None or program.stdin is None or offset > len(program.stdin):
                raise Rejected("The process has no stdin, or has received less than the offset.")
            program.stdin += content[len(program.stdin) - offset :]
            return len(program.stdin)

    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        with self.hooked_call("processes", ref), self._lock:
            background = self._running(ref).background
            return {mark: background[mark].state() for mark in marks if mark in background}

    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        with self.hooked_call("log", ref), self._lock:
            check_range(start, length)
            result = self._running(ref).background.get(mark, BackgroundProgram(ProgramResult())).outcome
            output = result.stdout + result.stderr
            offset = max(start, len(output) - MAX_LOG_BYTES)
            content = output[offset : offset + length]
            return ProcessOutput(content, offset + len(content))

    def kill(self, ref: str, mark: str) -> None:
        with self.hooked_call("kill", ref), self._lock:
            sandbox = self._get(ref)
            if sandbox.suspended:
                self._running(ref)
            background = sandbox.background  # an exec's program never outlives the exec
            if mark in background and background[mark].state().running:
                background[mark].killed = True

    def suspend(self, ref: str) -> None:
        with self.hooked_call("suspend", ref), self._lock:
            sandbox = self._get(ref)
            if not sandbox.running:
                raise Unavailable(f"{ref} does not run.", cause=FailureCause.NOT_RUNNING)
            sandbox.suspended = True
            if not self.suspend_keeps_processes:  # set by tests
                sandbox.background, sandbox.retained = {}, {}

    def resume(self, ref: str) -> None:
        with self.hooked_call("resume", ref), self._lock:
            self._get(ref).suspended = False

    def set_intervals(self, ref: str, intervals: VendorIntervals) -> None:
        with self.hooked_call("set_intervals", ref), self._lock:
            self._get(ref).intervals = intervals

    def find_unresponsive(self, refs: Collection[str], *, timeout: timedelta) -> set[str]:
        with self.hooked_call("find_unresponsive", ""), self._lock:
            return self.silent & {*refs}

    def responds(self, ref: str, *, timeout: timedelta) -> bool:
        with self.hooked_call("responds", ref), self._lock:
            return ref in self._sandboxes and self._sandboxes[ref].running and ref not in self.silent

    def kill_all(self, ref: str) -> None:
        with self.hooked_call("kill_all", ref), self._lock, suppress(Missing):
            for program in self._get(ref).background.values():
                program.killed |= program.state().running

    def restart(self, ref: str) -> None:
        with self.hooked_call("restart", ref), self._lock:
            sandbox = self._get(ref)
            sandbox.running, sandbox.suspended, sandbox.background, sandbox.retained = True, False, {}, {}
            sandbox.used = ResourceUsage(0, 0)
            self.silent.discard(ref)

    def destroy(self, ref: str) -> None:
        with self.hooked_call("destroy", ref), self._lock:
            self._sandboxes.pop(ref, None)

    def inspect(self, ref: str) -> ProviderSandbox:
        with self.hooked_call("inspect", ref), self._lock:
            return _describe_sandbox(self._get(ref))

    def stats(self, ref: str) -> ResourceUsage | None:
        with self.hooked_call("stats", ref), self._lock:
            sandbox = self._get(ref)
            return sandbox.used if sandbox.running else None

    def list_all(self) -> list[ProviderSandbox]:
        with self.hooked_call("list", ""), self._lock:
            return [_describe_sandbox(sandbox) for sandbox in self._sandboxes.values()]

    def list(self, owner: str) -> list[ProviderSandbox]:
        with self.hooked_call("list", owner), self._lock:
            return [_describe_sandbox(sandbox) for sandbox in self._sandboxes.values() if sandbox.spec.owner == owner]

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        with self.hooked_call("read_file", ref), self._lock:
            entry = get_regular_file(self._running(ref).files, path)
            if len(entry.content) > limit:
                raise TooLarge(f"The file has {len(entry.content)} bytes, more than the limit of {limit}.")
            return entry.content

    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        with self.hooked_call("read_range", ref), self._lock:
            check_range(start, length)
            content = get_regular_file(self._running(ref).files, path).content
            return content[start : start + length], len(content)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        with self.hooked_call("write_file", ref), self._lock:
            files, mode = self._running(ref).files, 0o644
            with suppress(NoSuchFile):
                mode = get_regular_file(files, path).mode
            put_entry(files, path, File(content, mode))

    def remove_file(self, ref: str, path: str) -> None:
        with self.hooked_call("remove_file", ref), self._lock:
            files = self._running(ref).files
            get_regular_file(files, path)
            del files[path]

    def make_directory(self, ref: str, path: str) -> None:
        with self.hooked_call("make_directory", ref), self._lock:
            files = self._running(ref).files
            check_parents(files, path)
            if not isinstance(files.get(path, Folder()), Folder):
                raise BadPath(f"{path} is not a directory.")
            if path not in files:
                put_entry(files, path, Folder())

    def move_file(self, ref: str, source: str, target: str, *, overwrite: bool) -> None:
        with self.hooked_call("move_file", ref), self._lock:
            split_move(source, target)
            move_entry(self._running(ref).files, source, target, overwrite=overwrite)

    def manifest(
        self, ref: str, root: str, *, under: str = "", deep: bool = True, max_entries: int = 100_000
    ) -> dict[str, FileStat]:
        with self.hooked_call("manifest", ref), self._lock:
            files = self._running(ref).files
            directory = f"{root}/{under}".removesuffix("/")
            if check_directory_path(root, under):
                check_parents(files, directory)
                if directory not in files:
                    raise NoSuchFile(f"There is no directory {directory}.")
                if not isinstance(files[directory], Folder):
                    raise BadPath(f"{directory} is not a directory.")
            entries = [item for item in list_below(files, directory) if deep or "/" not in item[0][len(directory) + 1 :]]
            if len(entries) > max_entries:
                raise TooLarge(f"There are more than {max_entries} entries.")
            return {path.removeprefix(root + "/"): stat_entry(entry) for path, entry in entries}

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
        skip = build_exclude_filter(check_patterns(exclude))
        selected = None if only is None else {check_relative_path(root, path) for path in only}
        with self.hooked_call("get_files", ref), self._lock:
            packed = io.BytesIO()
            below = list_below(self._running(ref).files, check_root(root))
            named = ((path.removeprefix(root + "/"), entry) for path, entry in below)
            chosen = (
                (name, entry)
                for name, entry in named
                if (selected is None or name in selected) and not any(map(skip, list_path_prefixes(name)))
            )
            write_tar(packed, chosen, exact=exact)
        packed.seek(0)
        return limit_stream(iter(lambda: packed.read(1 << 16), b""), max_bytes=max_bytes, timeout=timeout)

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        content = io.BytesIO(tar.read())  # before taking the lock: the source may be slow
        with self.hooked_call("put_files", ref), self._lock:
            files = self._running(ref).files
            check_root(root)
            try:
                with tarfile.open(fileobj=content, mode="r|") as members:
                    for member in members:
                        unpack_member(files, root, member, members)
            except tarfile.TarError as error:
                raise Rejected(f"Invalid tar: {error}") from None

    def put_and_list_files(self, ref: str, root: str, tar: BinaryIO, *, max_entries: int = 100_000) -> dict[str, FileStat]:
        self.put_files(ref, root, tar)
        return self.manifest(ref, root, max_entries=max_entries)

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        with self.hooked_call("remove_files", ref), self._lock:
            files = self._running(ref).files
            for path in sorted((check_relative_path(root, path) for path in paths), reverse=True):
                if not list_below(files, f"{root}/{path}"):
                    files.pop(f"{root}/{path}", None)

    def clear(self, ref: str, root: str) -> None:
        with self.hooked_call("clear", ref), self._lock:
            files = self._running(ref).files
            for path, _ in list_below(files, check_root(root)):
                del files[path]

    def size(self, ref: str, root: str) -> int:
        with self.hooked_call("size", ref), self._lock:
            entries = list_below(self._running(ref).files, check_root(root))
            contents = {id(entry): len(entry.content) for _, entry in entries if isinstance(entry, File)}
            return sum(contents.values())

    def seed(self, ref: str, kind: str, tar: BinaryIO) -> None:
        content = io.BytesIO(tar.read())
        with self.hooked_call("seed", ref), self._lock:
            files, target = self._running(ref).files, f"{DATA}/skills/{check_slug(kind)}"
            if target in files or not isinstance(files.get(f"{DATA}/skills", Folder()), Folder):
                return
            unpacked: Files = {}
            try:
                with tarfile.open(fileobj=content, mode="r|") as members:
                    for member in members:
                        unpack_member(unpacked, target, member, members)
            except tarfile.TarError as error:
                raise Rejected(f"Invalid tar: {error}") from None
            for path, entry in list_below(unpacked, target):
                put_entry(files, path, entry)

    def _get(self, ref: str) -> MemorySandbox:
        try:
            return self._sandboxes[ref]
        except KeyError:
            raise Missing(f"There is no sandbox {ref}.") from None

    def _start(self, sandbox: MemorySandbox) -> None:
        """Start a stopped sandbox, without the processes and results that it had."""
        sandbox.running, sandbox.background, sandbox.retained, sandbox.used = True, {}, {}, ResourceUsage(0, 0)

    def _running(self, ref: str) -> MemorySandbox:
        """Return the sandbox, which is started if it has stopped. Raise Missing, Unavailable."""
        sandbox = self._get(ref)
        if not sandbox.running:
            self._start(sandbox)
            recoveries.report(Recovery.STARTED)
        if sandbox.suspended:  # stricter than Docker, which resumes the sandbox: a missing `resume` shows in tests
            raise Unavailable(f"{ref} is suspended.")
        return sandbox


def _build_call(
    sandbox: MemorySandbox, argv: Sequence[str], env: Mapping[str, str], cwd: str, mark: str, stdin: bytes, timeout: timedelta
) -> ProgramCall:
    if not argv or not cwd.startswith("/") or any("\0" in word for word in argv):
        raise Rejected("argv must not be empty or contain NUL, and cwd must be an absolute path.")
    base = {"PATH": f"/usr/bin:/bin:{USER_PROGRAMS_DIRECTORY}", "HOME": f"{WORKSPACE}/.home", "LANG": "C.UTF-8"}
    fixed = {"LEASEHOLD_WORKSPACE": WORKSPACE, "LEASEHOLD_DATA": DATA, MARK_VARIABLE: mark}
    return ProgramCall([*argv], stdin, {**base, **env, **fixed}, cwd, sandbox.files, timeout)


def _describe_sandbox(sandbox: MemorySandbox) -> ProviderSandbox:
    name, is_running = sandbox.spec.name, sandbox.running and not sandbox.suspended
    return ProviderSandbox(
        name, name, is_running, sandbox.created_at, suspended=sandbox.suspended, owner=sandbox.spec.owner,
        memory_mib=sandbox.spec.memory_mib, millicpus=sandbox.spec.millicpus,
    )  # fmt: skip
