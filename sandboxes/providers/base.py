"""The port to whatever runs sandboxes. Each provider keeps this contract, and one conformance suite checks them all.

A sandbox is named by its `ref`: what `create` returned, or the Spec's name, which every provider also accepts. A crash
between `create` and storing its answer therefore loses nothing.
Two places in a sandbox are promised: `/workspace` and `/data`, writable by the user that commands run as.
Three things can go wrong, and only three: Unavailable (the same step again later), Rejected (the request is wrong and
will stay wrong), Missing (it is not there; for destroy that is success). A command that fails, is killed or times out
is none of these: it is a result."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO, NamedTuple

WORKSPACE, DATA, SOCKETS_DIRECTORY = "/workspace", "/data", "/run/leasehold"
LLM_SOCKET = f"{SOCKETS_DIRECTORY}/llm.sock"  # the way out: to models, and to the relay
EGRESS_LOOPBACK_ADDRESS = (
    "127.0.0.1:4010"  # the same, for what speaks to addresses; where the sandbox has a network stack of its own
)
# What SDKs look for. The keys say nothing: whoever passes a call on adds the real one.
EGRESS_ENVIRONMENT = {
    "OPENAI_BASE_URL": f"http://{EGRESS_LOOPBACK_ADDRESS}/v1",
    "OPENAI_API_KEY": "added-on-the-way-out",
    "ANTHROPIC_BASE_URL": f"http://{EGRESS_LOOPBACK_ADDRESS}",
    "ANTHROPIC_API_KEY": "added-on-the-way-out",
    "RELAY_URL": f"ws://{EGRESS_LOOPBACK_ADDRESS}/relay/",
}
MARK_VARIABLE = "LEASEHOLD_RUN"  # environment variable by which the processes of one exec are found again


class ProviderError(Exception):
    """The provider did not do what it was asked."""

    code = "provider_error"


class Unavailable(ProviderError):
    """The provider cannot answer now; whether it acted is unknown. The same step may be taken again later."""

    code = "provider_unavailable"


class Rejected(ProviderError):
    """The provider will not do this, however often it is asked."""

    code = "provider_rejected"


class Missing(ProviderError):
    """There is no such sandbox."""

    code = "sandbox_missing"


class NoSuchFile(ProviderError):
    """There is no such file in the sandbox."""

    code = "file_not_found"


class BadPath(Rejected):
    """The path leaves the sandbox's directory, goes through a symbolic link, or is no regular file."""

    code = "bad_path"


class TooLarge(Rejected):
    """The file is larger than the limit that was given."""

    code = "file_too_large"


@dataclass(frozen=True)
class SandboxSpec:
    """What to create. Limits are hard where the provider can enforce any."""

    name: str  # unique for ever: made from the row's id and incarnation; [a-z0-9-], at most 63 characters
    owner: str  # label by which `list` finds the sandboxes of one pool
    image: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # for people reading `docker ps`; never trusted
    memory_mib: int = 512
    millicpus: int = 1000
    pids: int = 256
    sockets: Path | None = None  # host directory that appears read-only at /run/leasehold
    data: Path | None = None  # host directory that appears at /data, with what is mounted on it later; docker alone
    writable_root: bool = False  # wherever the image lets commands' user; nothing to loosen where the root is never sealed


@dataclass(frozen=True)
class ProviderSandbox:
    """One sandbox as the provider lists it."""

    ref: str
    name: str
    running: bool  # False: it is paused, stopped or half made; what cannot wake by itself answers an exec Unavailable
    created_at: datetime  # by the provider's clock
    is_remnant: bool = False  # inspect says Missing: nothing can run in it any more, and destroy removes what is left of it


@dataclass(frozen=True)
class ExecResult:
    """How a command ended. exit_code is 128 + n after signal n, so 137 for whatever we killed."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False  # we killed it, and every process it had started
    oom: bool = False  # the kernel killed a process for memory while this ran; told apart from a plain exit 137
    truncated: bool = False  # either stream was longer than the cap; what came after the cap was read and dropped
    duration: timedelta = timedelta(0)


class FileStat(NamedTuple):
    """One entry below /workspace or /data. A tuple, because a look makes thousands."""

    kind: str  # "file", "directory", "link", or "other" (a socket, a pipe, a device: never stored)
    mode: int  # permission bits
    size: int  # bytes of a regular file, else 0
    mtime: int  # whole seconds since 1970
    # Another whenever the content of a file, the mode, or the target of a link may have changed. Two writes of equally
    # many bytes share it if nothing but one tick of the kernel's clock lies between them: 4 ms, and none from Linux 6.13.
    # Reading a file that its owner may not read changes it, and nothing else that reads does.
    stamp: str
    target: str = ""  # of a link


class ResourceUsage(NamedTuple):
    """What all processes of a sandbox together take, those that have ended included."""

    cpu_micros: int  # microseconds of CPU since it was started; from 0 again where it stopped and was started anew
    memory_bytes: int  # now, without what the kernel only keeps of files as long as nobody needs the room


class ProcessState(NamedTuple):
    """Of a program in the background."""

    running: bool
    exit_code: int | None = None  # once it has exited: as of an exec


class ProcessOutput(NamedTuple):
    """Some of what a program in the background has printed."""

    content: bytes
    next: int  # offset after it; counted from the first byte that the program ever printed


class Provider(ABC):
    """See the module's docstring for the contract that holds for every method."""

    name: str
    isolated: bool  # commands cannot reach the host, other sandboxes or the network
    enforces_limits: bool  # memory, CPU and process limits hold, and `oom` can be seen
    measures_usage: bool  # `stats` says what sandboxes use

    @abstractmethod
    def create(self, spec: SandboxSpec) -> str:
        """Start a sandbox and return its ref. One of that name already there is success: the same ref again."""

    @abstractmethod
    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        """Return once commands can run. Unavailable after `timeout`; Missing if it is gone."""

    @abstractmethod
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
        """Run argv (no shell) and wait for it. `mark` is unique for this exec: on timeout every process that descends
        from it is killed, also those that left its session, and no process of another exec. Each stream keeps its first
        `cap` bytes. Several execs may run at once. A program that does not exist is a result with exit code 127."""

    @abstractmethod
    def start(self, ref: str, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = WORKSPACE, mark: str) -> ProcessState:
        """Start argv (no shell) in the background and return at once, with what it is doing. It ends by itself, by `kill`
        or with the sandbox, and has no stdin. A program that does not exist has exited with 127. The same mark again
        starts nothing."""

    @abstractmethod
    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        """What those of these are doing that were started in the background. One has exited when its first process has,
        whatever that left behind; 137 is also the code of one whose end nobody saw."""

    @abstractmethod
    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        """At most `length` bytes of what it printed, stdout and stderr together, from offset `start`. The last 256 KiB at
        least is kept; where the oldest was dropped they begin later: at next - len(content)."""

    @abstractmethod
    def kill(self, ref: str, mark: str) -> None:
        """Return once no process of the exec, or of the program in the background, with this mark is there, whoever had
        started it. Nothing to kill, and a sandbox that is not running, is success; no sandbox at all is Missing."""

    @abstractmethod
    def destroy(self, ref: str) -> None:
        """Return once the sandbox is gone, whatever state it was in. Destroying what is not there is success."""

    @abstractmethod
    def inspect(self, ref: str) -> ProviderSandbox:
        """The sandbox as it is now, or Missing."""

    @abstractmethod
    def stats(self, ref: str) -> ResourceUsage | None:
        """What the sandbox uses, or Missing. None while it does not run, and where nobody counts."""

    @abstractmethod
    def list(self, owner: str) -> list[ProviderSandbox]:
        """Every sandbox with this owner label, running or not. Raises Unavailable rather than return a partial list."""

    @abstractmethod
    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        """One regular file under /workspace or /data, given as an absolute path in the sandbox. NoFile, BadPath, or
        TooLarge past `limit` bytes. No part of the path may be a symbolic link.

        Here and below, a name that is no UTF-8 is written as os.fsdecode gives it."""

    @abstractmethod
    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        """At most `length` bytes of one regular file from `start`, and the size of all of it. NoFile, BadPath."""

    @abstractmethod
    def write_file(self, ref: str, path: str, content: bytes) -> None:
        """Replace or make one file, with the directories above it, owned by the user that commands run as. The file is
        never seen half written. BadPath as for read_file."""

    @abstractmethod
    def remove_file(self, ref: str, path: str) -> None:
        """Remove one regular file; NoFile, BadPath."""

    @abstractmethod
    def manifest(self, ref: str, root: str, *, under: str = "", deep: bool = True, most: int = 100_000) -> dict[str, FileStat]:
        """What is below /workspace or /data, or below a directory in it that `under` names relative to root: path
        relative to root -> Stat. Not that directory itself; with deep=False only its own entries. NoFile or BadPath for
        `under`; TooLarge past `most` entries, or if their paths, or targets, take more than 160 bytes for each of `most`
        and more than a MiB. No link is followed; paths longer than 4000 bytes are left out."""

    @abstractmethod
    def get_files(
        self, ref: str, root: str, *, only: Collection[str] | None = None, exclude: Sequence[str] = ()
    ) -> Iterator[bytes]:
        """The whole of /workspace or /data as an uncompressed tar stream; member names are relative to `root`.

        With `only`, just what has these relative paths and is still there: nothing below it, nothing above it. `exclude`
        are names or patterns (fnmatch's) of path elements, or with a slash in them of relative paths: such an entry is
        left out with all below it."""

    @abstractmethod
    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        """Unpack an uncompressed tar over /workspace or /data. Members that would leave `root` are Rejected, and then
        nothing is promised about the others. Owners in the tar are ignored."""

    @abstractmethod
    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        """Remove files, links and directories by their paths relative to root, the deepest first. Not there is success,
        and so is behind a link or below a file; a directory that is not empty stays. BadPath for what is no path."""

    @abstractmethod
    def clear(self, ref: str, root: str) -> None:
        """Remove everything below /workspace or /data, whatever modes it has, but not that directory itself. The home
        directory that a new sandbox has in /workspace is there afterwards, and empty."""

    @abstractmethod
    def size(self, ref: str, root: str) -> int:
        """Bytes that /workspace or /data takes: the sum of the sizes of the regular files in it."""

    @abstractmethod
    def seed(self, ref: str, kind: str) -> None:
        """Have the image's skill for that kind of environment in /data/skills/<kind>/, unless something is there
        already, or in its way. Nothing happens if the image has none. Rejected if `kind` is no slug."""

    def inside(self, ref: str, path: str) -> str:
        """How a program in the sandbox reaches one of the promised places. Only providers without a file system of
        their own answer anything but `path`."""
        return path


def split_sandbox_path(path: str) -> tuple[str, tuple[str, ...]]:
    """Split an absolute sandbox path into its root (/workspace or /data) and parts, or BadPath. Purely textual."""
    parts = path.split("/")
    if len(parts) < 3 or parts[0] or "/" + parts[1] not in (WORKSPACE, DATA):
        raise BadPath(f"a path lies under {WORKSPACE} or {DATA}")
    if any(part in ("", ".", "..") for part in parts[2:]) or "\0" in path:
        raise BadPath("a path has no empty part, no '.', no '..' and no NUL")
    try:
        long = len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in parts)
    except UnicodeEncodeError:
        raise BadPath("a path is text, or what os.fsdecode makes of bytes") from None
    if long:
        raise BadPath("a path has at most 4000 bytes, and 255 between two slashes")
    return "/" + parts[1], tuple(parts[2:])


def check_root(path: str) -> str:
    """One of the promised places, or BadPath."""
    if path not in (WORKSPACE, DATA):
        raise BadPath(f"a root is {WORKSPACE} or {DATA}")
    return path


def check_relative_path(root: str, path: str) -> str:
    """A path relative to a root that names something below it, or BadPath."""
    split_sandbox_path(f"{check_root(root)}/{path}")
    return path


def check_directory_path(root: str, under: str) -> str:
    """A path relative to a root, "" for the root itself; or BadPath."""
    return check_relative_path(root, under) if under else check_root(root) and under


def check_range(start: int, length: int) -> None:
    """Rejected unless it is a range of bytes."""
    if start < 0 or length < 0:
        raise Rejected("a range of bytes starts at 0 or later and has no negative length")


def check_patterns(exclude: Sequence[str]) -> Sequence[str]:
    """Patterns that every backend takes, or Rejected."""
    for pattern in exclude:
        try:
            if b"\0" in os.fsencode(pattern):
                raise Rejected("a pattern has no NUL")
        except UnicodeEncodeError:
            raise Rejected("a pattern is text") from None
    return exclude


def check_slug(kind: str) -> str:
    """The name of a kind of environment, or Rejected."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", kind):
        raise Rejected("the kind of an environment is 1 to 100 of a-z, A-Z, 0-9, - and _")
    return kind


def truncate_labels(labels: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Labels cut to what every backend takes."""
    return {key: value[:255] for key, value in labels}
