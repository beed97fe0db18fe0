"""Sandboxes in a dict, for tests and the demo: the whole port, a few programs, and hooks by which things go wrong.

It executes nothing real, so it isolates. Time is simulated: `sleep 60` takes no time and says that it took a minute,
and a command whose time is up is told so at once. Only in the background does it take its minute, having printed all that
it prints at the start. What it offers beyond the port:

    memory.before("create", fn)     fn(ref) runs before the verb does anything, outside every lock: it may raise a
    memory.after("exec", fn)        ProviderError or play the death of this process, block at a barrier, run a rival
    memory.fail("destroy", Unavailable("engine down"), times=3)
    with memory.fail(...):          the same for a while; without `with` they stay until reset()
    memory.vanish(ref)  stop(ref)   it is gone, or stopped, behind our back
    memory.calls                    [(verb, ref), ...], for list (verb, owner)
    memory.files(ref)               {"/workspace/a b": File(b"..."), ...}, to look into and to plant things
    memory.programs["python3"] = fn a program is Callable[[Call], Outcome]
    memory.skills["catan"]          what seed copies: {"prompt.md": b"..."}"""

import io
import itertools
import os
import re
import shlex
import tarfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import BinaryIO

from sandboxes.image.files import build_exclude_filter, list_path_prefixes
from sandboxes.providers.base import (
    DATA,
    MARK_VARIABLE,
    WORKSPACE,
    BadPath,
    ExecResult,
    FileStat,
    Missing,
    NoSuchFile,
    ProcessOutput,
    ProcessState,
    Provider,
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


@dataclass(frozen=True)
class _Stamped:
    """When it was made, and a number that only it has: what changes is made anew."""

    mtime: int = field(default_factory=lambda: int(time.time()), kw_only=True, compare=False)
    stamp: int = field(default_factory=itertools.count(1).__next__, kw_only=True, compare=False, init=False)


@dataclass(frozen=True)
class File(_Stamped):
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Link(_Stamped):
    target: str


@dataclass(frozen=True)
class Folder(_Stamped):
    mode: int = 0o755


Entry = File | Link | Folder
Files = dict[str, Entry]  # by absolute path; every directory above an entry is an entry too


@dataclass(frozen=True)
class ProgramCall:
    """What a program is given. It may change `files`; whatever takes longer than `timeout` is killed."""

    argv: list[str]
    stdin: bytes
    env: Mapping[str, str]
    cwd: str
    files: Files
    timeout: timedelta

    def path(self, word: str) -> str:
        return word if word.startswith("/") else f"{self.cwd.rstrip('/')}/{word}"


@dataclass(frozen=True)
class ProgramResult:
    """What a program did, and how long it would have taken."""

    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    took: timedelta = timedelta(0)
    oom: bool = False


Program = Callable[[ProgramCall], ProgramResult]
MAX_LOG_BYTES = 1 << 20  # bytes of what a program in the background has printed


@dataclass
class BackgroundProgram:
    """A program in the background."""

    outcome: ProgramResult
    started: float = field(default_factory=time.monotonic)
    killed: bool = False

    def state(self) -> ProcessState:
        if self.killed:
            return ProcessState(False, 137)
        running = time.monotonic() < self.started + self.outcome.took.total_seconds()
        return ProcessState(True) if running else ProcessState(False, self.outcome.exit_code)


@dataclass
class MemorySandbox:
    spec: SandboxSpec
    created_at: datetime
    running: bool = True
    used: ResourceUsage = field(default_factory=lambda: ResourceUsage(0, 0))
    files: Files = field(default_factory=lambda: Files({WORKSPACE: Folder(), DATA: Folder()}))
    background: dict[str, BackgroundProgram] = field(default_factory=dict)  # by mark


class MemoryProvider(Provider):
    name = "memory"
    isolated = True
    enforces_limits = True
    measures_usage = True

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """As new: no sandbox, no hook, no call, the programs of this module."""
        with self._lock:
            self._boxes: dict[str, MemorySandbox] = {}
            self._hooks: defaultdict[tuple[str, str], list[Callable[[str], None]]] = defaultdict(list)
            self.calls: list[tuple[str, str]] = []
            self.programs: dict[str, Program] = {**PROGRAMS, "sh": self._sh}
            self.skills: dict[str, dict[str, bytes]] = {kind: {"prompt.md": said} for kind, said in SKILLS.items()}

    # --- how things go wrong ------------------------------------------------------------------------------------------

    def before(self, verb: str, fn: Callable[[str], None]) -> ExitStack:
        """Call fn(ref) whenever this verb begins. Stays until reset, or until the answer is closed (also by `with`)."""
        return self._hook("before", verb, fn)

    def after(self, verb: str, fn: Callable[[str], None]) -> ExitStack:
        """Call fn(ref) whenever this verb has succeeded, before its caller learns of it. Stays as `before` does."""
        return self._hook("after", verb, fn)

    def fail(self, verb: str, error: BaseException, *, times: int | None = None) -> ExitStack:
        """The next `times` calls of this verb (None: all) do nothing and raise `error`. Stays as `before` does."""
        left = itertools.repeat(None) if times is None else itertools.repeat(None, times)

        def raise_it(ref: str) -> None:
            for _ in left:
                raise error

        return self._hook("before", verb, raise_it)

    def vanish(self, ref: str) -> None:
        """The sandbox is gone behind our back; Missing if it already was. What runs in it is killed."""
        with self._lock:
            del self._boxes[self._box(ref).spec.name]

    def stop(self, ref: str) -> None:
        """The sandbox exists and can execute nothing, as after a restart of its host. What runs in it is killed."""
        self._box(ref).running = False

    def use(self, ref: str, *, cpu_micros: int = 0, memory_bytes: int | None = None) -> None:
        """The sandbox uses so much more CPU, and has so much memory from now on."""
        with self._lock:
            box = self._box(ref)
            memory = box.used.memory_bytes if memory_bytes is None else memory_bytes
            box.used = ResourceUsage(box.used.cpu_micros + cpu_micros, memory)

    def files(self, ref: str) -> Files:
        """The sandbox's own files, also of a stopped one."""
        return self._box(ref).files

    def _hook(self, when: str, verb: str, fn: Callable[[str], None]) -> ExitStack:
        if verb not in Provider.__abstractmethods__:
            raise ValueError(f"{verb} is no verb of the port")
        hooks, unhook = self._hooks[when, verb], ExitStack()
        hooks.append(fn)

        @unhook.callback
        def remove() -> None:
            with suppress(ValueError):
                hooks.remove(fn)

        return unhook

    @contextmanager
    def _hooked_call(self, verb: str, ref: str) -> Iterator[None]:
        self.calls.append((verb, ref))
        for fn in [*self._hooks["before", verb]]:
            fn(ref)
        yield
        for fn in [*self._hooks["after", verb]]:
            fn(ref)

    # --- the port -----------------------------------------------------------------------------------------------------

    def create(self, spec: SandboxSpec) -> str:
        with self._hooked_call("create", spec.name), self._lock:
            box = self._boxes.setdefault(spec.name, MemorySandbox(spec, datetime.now(UTC)))
            if box.spec.owner != spec.owner:
                raise Rejected(f"the name {spec.name} is taken by another owner's sandbox")
            if not box.running:  # one that had stopped is started again, without what ran in it
                box.running, box.background, box.used = True, {}, ResourceUsage(0, 0)
        return spec.name

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        with self._hooked_call("wait_ready", ref):
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
    ) -> ExecResult:
        with self._hooked_call("exec", ref):  # not under the lock: execs run side by side, and a hook or a program may block
            box = self._running(ref)
            done = self._execute(_build_call(box, argv, env, cwd, mark, stdin, timeout))
            timed_out = done.took >= timeout
            destroyed = self._boxes.get(ref) is not box or not box.running
            return ExecResult(
                exit_code=137 if timed_out or destroyed or done.oom else done.exit_code,
                stdout=done.stdout[:cap],
                stderr=done.stderr[:cap],
                timed_out=timed_out,
                oom=done.oom,
                truncated=max(len(done.stdout), len(done.stderr)) > cap,
                duration=min(done.took, timeout),
            )

    def start(self, ref: str, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = WORKSPACE, mark: str) -> ProcessState:
        with self._hooked_call("start", ref), self._lock:
            box = self._running(ref)
            if mark not in box.background:
                box.background[mark] = BackgroundProgram(
                    self._execute(_build_call(box, argv, env, cwd, mark, b"", timedelta.max))
                )
            return box.background[mark].state()

    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        with self._hooked_call("processes", ref), self._lock:
            background = self._running(ref).background
            return {mark: background[mark].state() for mark in marks if mark in background}

    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        with self._hooked_call("log", ref), self._lock:
            check_range(start, length)
            printed = self._running(ref).background.get(mark, BackgroundProgram(ProgramResult())).outcome
            whole = printed.stdout + printed.stderr
            at = max(start, len(whole) - MAX_LOG_BYTES)
            return ProcessOutput(whole[at : at + length], at + len(whole[at : at + length]))

    def kill(self, ref: str, mark: str) -> None:
        with self._hooked_call("kill", ref), self._lock:
            background = self._box(ref).background  # what an exec runs ends with the call that runs it
            if mark in background and background[mark].state().running:
                background[mark].killed = True

    def destroy(self, ref: str) -> None:
        with self._hooked_call("destroy", ref), self._lock:
            self._boxes.pop(ref, None)

    def inspect(self, ref: str) -> ProviderSandbox:
        with self._hooked_call("inspect", ref), self._lock:
            return _describe_sandbox(self._box(ref))

    def stats(self, ref: str) -> ResourceUsage | None:
        with self._hooked_call("stats", ref), self._lock:
            box = self._box(ref)
            return box.used if box.running else None

    def list(self, owner: str) -> list[ProviderSandbox]:
        with self._hooked_call("list", owner), self._lock:
            return [_describe_sandbox(box) for box in self._boxes.values() if box.spec.owner == owner]

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        with self._hooked_call("read_file", ref), self._lock:
            entry = _get_regular_file(self._running(ref).files, path)
            if len(entry.content) > limit:
                raise TooLarge(f"the file has {len(entry.content)} bytes, and the limit is {limit}")
            return entry.content

    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        with self._hooked_call("read_range", ref), self._lock:
            check_range(start, length)
            content = _get_regular_file(self._running(ref).files, path).content
            return content[start : start + length], len(content)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        with self._hooked_call("write_file", ref), self._lock:
            files, mode = self._running(ref).files, 0o644
            with suppress(NoSuchFile):
                mode = _get_regular_file(files, path).mode
            _put_entry(files, path, File(content, mode))

    def remove_file(self, ref: str, path: str) -> None:
        with self._hooked_call("remove_file", ref), self._lock:
            files = self._running(ref).files
            _get_regular_file(files, path)
            del files[path]

    def manifest(self, ref: str, root: str, *, under: str = "", deep: bool = True, most: int = 100_000) -> dict[str, FileStat]:
        with self._hooked_call("manifest", ref), self._lock:
            files = self._running(ref).files
            top = f"{root}/{under}".removesuffix("/")
            if check_directory_path(root, under):
                _check_parents(files, top)
                if top not in files:
                    raise NoSuchFile(f"there is no directory {top}")
                if not isinstance(files[top], Folder):
                    raise BadPath(f"{top} is no directory")
            entries = [pair for pair in _list_below(files, top) if deep or "/" not in pair[0][len(top) + 1 :]]
            if len(entries) > most:
                raise TooLarge(f"there are more than {most} files")
            return {path.removeprefix(root + "/"): _stat(entry) for path, entry in entries}

    def get_files(
        self, ref: str, root: str, *, only: Collection[str] | None = None, exclude: Sequence[str] = ()
    ) -> Iterator[bytes]:
        skip = build_exclude_filter(check_patterns(exclude))
        wanted = None if only is None else {check_relative_path(root, path) for path in only}
        with self._hooked_call("get_files", ref), self._lock:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for path, entry in _list_below(self._running(ref).files, check_root(root)):
                    name = path.removeprefix(root + "/")
                    if (wanted is None or name in wanted) and not any(map(skip, list_path_prefixes(name))):
                        tar.addfile(*_build_tar_member(name, entry))
        packed.seek(0)
        return iter(lambda: packed.read(1 << 16), b"")

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        sent = io.BytesIO(tar.read())  # before the lock: the sender may be slow
        with self._hooked_call("put_files", ref), self._lock:
            files = self._running(ref).files
            check_root(root)
            try:
                with tarfile.open(fileobj=sent, mode="r|") as members:
                    for member in members:
                        _unpack_member(files, root, member, members)
            except tarfile.TarError as error:
                raise Rejected(f"this is no tar: {error}") from None

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        with self._hooked_call("remove_files", ref), self._lock:
            files = self._running(ref).files
            for path in sorted((check_relative_path(root, path) for path in paths), reverse=True):
                if not _list_below(files, f"{root}/{path}"):
                    files.pop(f"{root}/{path}", None)

    def clear(self, ref: str, root: str) -> None:
        with self._hooked_call("clear", ref), self._lock:
            files = self._running(ref).files
            for path, _ in _list_below(files, check_root(root)):
                del files[path]

    def size(self, ref: str, root: str) -> int:
        with self._hooked_call("size", ref), self._lock:
            entries = _list_below(self._running(ref).files, check_root(root))
            return sum(len(entry.content) for _, entry in entries if isinstance(entry, File))

    def seed(self, ref: str, kind: str) -> None:
        with self._hooked_call("seed", ref), self._lock:
            files, there = self._running(ref).files, f"{DATA}/skills/{check_slug(kind)}"
            if kind in self.skills and there not in files and isinstance(files.get(f"{DATA}/skills", Folder()), Folder):
                for name, content in self.skills[kind].items():
                    _put_entry(files, f"{there}/{name}", File(content))

    def _box(self, ref: str) -> MemorySandbox:
        try:
            return self._boxes[ref]
        except KeyError:
            raise Missing(f"there is no sandbox {ref}") from None

    def _running(self, ref: str) -> MemorySandbox:
        box = self._box(ref)
        if not box.running:
            raise Unavailable(f"{ref} does not run")
        return box

    def _execute(self, call: ProgramCall) -> ProgramResult:
        program = self.programs.get(call.argv[0].removeprefix("/bin/"))
        return program(call) if program else ProgramResult(127, stderr=f"{call.argv[0]}: not found\n".encode())

    def _sh(self, call: ProgramCall) -> ProgramResult:
        """`sh -c` of commands joined by `;`, each with at most one `>file` or `>&2`. Besides programs it knows `exit N`
        and `kill -9 $$`. No variables, no pipes."""
        words = shlex.shlex(call.argv[2], posix=True, punctuation_chars=";>&")
        words.whitespace_split = True
        said = ProgramResult()
        for command in [[*group] for ends, group in itertools.groupby(words, ";".__eq__) if not ends]:
            if command[0] == "exit":
                return replace(said, exit_code=int(command[1]))
            if command == ["kill", "-9", "$$"]:
                return replace(said, exit_code=137)
            argv = [*itertools.takewhile(lambda word: word not in (">", ">&"), command)]
            done = self._execute(replace(call, argv=argv, timeout=call.timeout - said.took))
            if ">" in command:
                _put_entry(call.files, call.path(command[-1]), File(done.stdout))
            shown = done.stdout if len(argv) == len(command) else b""
            complained = done.stderr + (done.stdout if ">&" in command else b"")
            took, oom = said.took + done.took, said.oom or done.oom
            said = ProgramResult(done.exit_code, said.stdout + shown, said.stderr + complained, took, oom)
            if took >= call.timeout:
                break
        return said


def _build_call(
    box: MemorySandbox, argv: Sequence[str], env: Mapping[str, str], cwd: str, mark: str, stdin: bytes, timeout: timedelta
) -> ProgramCall:
    if not argv or not cwd.startswith("/") or any("\0" in word for word in argv):
        raise Rejected("argv has at least one element and no NUL, and cwd is an absolute path")
    base = {"PATH": "/usr/bin:/bin", "HOME": f"{WORKSPACE}/.home", "LANG": "C.UTF-8"}
    ours = {"LEASEHOLD_WORKSPACE": WORKSPACE, "LEASEHOLD_DATA": DATA, MARK_VARIABLE: mark}
    return ProgramCall([*argv], stdin, {**base, **env, **ours}, cwd, box.files, timeout)


# --- files --------------------------------------------------------------------------------------------------------


def _check_parents(files: Files, path: str) -> None:
    """BadPath unless the path is well formed and everything above it is a directory or not there."""
    root, parts = split_sandbox_path(path)
    for above in itertools.accumulate(parts[:-1], lambda a, b: f"{a}/{b}", initial=root):
        if not isinstance(files.get(above, Folder()), Folder):
            raise BadPath(f"{above} is no directory")


def _get_regular_file(files: Files, path: str) -> File:
    _check_parents(files, path)
    entry = files.get(path)
    if entry is None:
        raise NoSuchFile(f"there is no file {path}")
    if not isinstance(entry, File):
        raise BadPath(f"{path} is no regular file")
    return entry


def _put_entry(files: Files, path: str, entry: Entry) -> None:
    """Place an entry, with the directories above it. BadPath in place of a directory, unless by a directory."""
    _check_parents(files, path)
    if isinstance(files.get(path), Folder) and not isinstance(entry, Folder):
        raise BadPath(f"{path} is a directory")
    files[path] = entry
    while (path := path.rpartition("/")[0]) and path not in files:
        files[path] = Folder()


def _list_below(files: Files, top: str) -> list[tuple[str, Entry]]:
    """Everything under a directory, directories before what is in them."""
    return sorted(((path, entry) for path, entry in [*files.items()] if path.startswith(top + "/")), key=lambda pair: pair[0])


def _stat(entry: Entry) -> FileStat:
    stamp = f"{entry.stamp}"
    if isinstance(entry, File):
        return FileStat("file", entry.mode, len(entry.content), entry.mtime, stamp)
    if isinstance(entry, Link):
        return FileStat("link", 0o777, 0, entry.mtime, stamp, entry.target)
    return FileStat("directory", entry.mode, 0, entry.mtime, stamp)


def _build_tar_member(name: str, entry: Entry) -> tuple[tarfile.TarInfo, BinaryIO | None]:
    member, stat = tarfile.TarInfo(name), _stat(entry)
    member.mode, member.mtime, member.size, member.linkname = stat.mode, stat.mtime, stat.size, stat.target
    if isinstance(entry, File):
        return member, io.BytesIO(entry.content)
    member.type = tarfile.SYMTYPE if isinstance(entry, Link) else tarfile.DIRTYPE
    return member, None


def _unpack_member(files: Files, root: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    path, mode, mtime = _resolve_member_path(root, member.name), member.mode & 0o777, int(member.mtime)
    if path == root:
        return
    if member.isdir():
        if not isinstance(files.get(path, Folder()), Folder):
            raise BadPath(f"{member.name} is no directory here")
        _put_entry(files, path, Folder(mode, mtime=mtime))
    elif member.issym():
        _put_entry(files, path, Link(member.linkname, mtime=mtime))
    elif member.islnk():
        target = files.get(_resolve_member_path(root, member.linkname))
        if not isinstance(target, File):
            raise BadPath(f"{member.name} links to {member.linkname}, which is no file here")
        _put_entry(files, path, target)
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        _put_entry(files, path, File(content.read(), mode, mtime=mtime))
    else:
        raise BadPath(f"{member.name} is a device or a pipe")


def _resolve_member_path(root: str, name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise BadPath(f"{name!r} leaves {root}")
    return "/".join([root, *parts])


def _describe_sandbox(box: MemorySandbox) -> ProviderSandbox:
    return ProviderSandbox(box.spec.name, box.spec.name, box.running, box.created_at)


# --- programs -----------------------------------------------------------------------------------------------------


def _print_lines(*lines: str) -> ProgramResult:
    return ProgramResult(stdout=b"".join(os.fsencode(line) + b"\n" for line in lines))


def _cat(call: ProgramCall) -> ProgramResult:
    said = b""
    for word in call.argv[1:]:
        entry = call.files.get(call.path(word))
        if not isinstance(entry, File):
            return ProgramResult(1, said, f"cat: {word}: No such file or directory\n".encode())
        said += entry.content
    return ProgramResult(stdout=said if call.argv[1:] else call.stdin)


def _printenv(call: ProgramCall) -> ProgramResult:
    if not call.argv[1:]:
        return _print_lines(*(f"{name}={value}" for name, value in call.env.items()))
    values = [call.env[name] for name in call.argv[1:] if name in call.env]
    return replace(_print_lines(*values), exit_code=int(len(values) < len(call.argv[1:])))


def _printf(call: ProgramCall) -> ProgramResult:
    """Octal escapes, the usual letters, and a format of `%s` that is used again for every argument."""
    letters = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"\\": b"\\"}
    form = re.sub(
        rb"\\([0-7]{1,3}|[ntr\\])",
        lambda found: letters.get(found[1]) or bytes([int(found[1], 8) & 255]),
        os.fsencode(call.argv[1]),
    )
    words = [os.fsencode(word) for word in call.argv[2:]] or [b""]
    return ProgramResult(stdout=b"".join(form.replace(b"%s", word) for word in words))


def _head(call: ProgramCall) -> ProgramResult:
    if call.argv[1] != "-c" or call.argv[3:] != ["/dev/zero"]:
        return ProgramResult(2, stderr=b"head: here it knows only -c N /dev/zero\n")
    return ProgramResult(stdout=bytes(int(call.argv[2])))


def _link(call: ProgramCall) -> ProgramResult:
    if call.argv[1] != "-s" or len(call.argv) != 4:
        return ProgramResult(2, stderr=b"ln: here it knows only -s TARGET PATH\n")
    _put_entry(call.files, call.path(call.argv[3]), Link(call.argv[2]))
    return ProgramResult()


SKILLS = {kind: f"Play {kind}. Answer with JSON.\n".encode() for kind in ("rpg", "catan", "coding")}
PROGRAMS: dict[str, Program] = {
    "true": lambda call: ProgramResult(),
    "false": lambda call: ProgramResult(1),
    "echo": lambda call: _print_lines(" ".join(call.argv[1:])),
    "pwd": lambda call: _print_lines(call.cwd),
    "env": _printenv,
    "printenv": _printenv,
    "printf": _printf,
    "cat": _cat,
    "head": _head,
    "ln": _link,
    "sleep": lambda call: ProgramResult(took=timedelta(seconds=min(float(call.argv[1]), 1e9))),
    "oom": lambda call: ProgramResult(137, oom=True),
}
