"""Provider port: the contract between the control plane and an engine that runs sandboxes.

One conformance suite checks every provider.

- A sandbox is identified by its `ref`: the return value of `create`, or the name in the SandboxSpec, which every provider also
  accepts. A crash between `create` and storing the ref therefore loses nothing.
- Every sandbox has `/workspace` and `/data`, writable by the user that commands run as.
- A verb fails with Unavailable (retry the same step later), Rejected (the request is wrong; do not retry) or Missing (no such
  sandbox; success for `destroy`). A command that fails, is killed or times out is a result, not an error.
- A stop is not a loss. A verb during which the sandbox stops raises Stopped, which is Unavailable, as long as its files exist.
  Missing states that the sandbox and its files are gone."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sandboxes.agent import identity
from sandboxes.agent.protocol import TerminalSize
from sandboxes.providers.command_results import ExecResult, ExecState, OutputReader, OutputView, ProcessOutput, ProcessState
from sandboxes.providers.engine_reports import EngineQuota, SealReport, SetupProblem
from sandboxes.providers.errors import FailureCause, Rejected, Unavailable

WORKSPACE, DATA, SOCKETS_DIRECTORY = "/workspace", "/data", "/run/leasehold"
USER_PROGRAMS_DIRECTORY = f"{WORKSPACE}/.home/.local/bin"  # last in PATH, after the system's programs
AGENT_DIRECTORY = identity.AGENT_DIRECTORY
AGENT_SOCKET = f"{AGENT_DIRECTORY}/agent.sock"  # gateway, to which process 1 of a sandbox connects
LLM_SOCKET = f"{SOCKETS_DIRECTORY}/llm.sock"  # egress proxy: model calls and the relay
EGRESS_LOOPBACK_ADDRESS = "127.0.0.1:4010"  # the egress proxy over TCP, in sandboxes with their own network namespace
PROXY_SOCKET = f"{AGENT_DIRECTORY}/http.sock"  # proxy of the policy's allow list
PROXY_LOOPBACK_ADDRESS = "127.0.0.1:4011"  # the same over TCP
# Variables read by SDKs. The keys are placeholders: the egress proxy adds the credentials.
EGRESS_ENVIRONMENT = {
    "OPENAI_BASE_URL": f"http://{EGRESS_LOOPBACK_ADDRESS}/v1",
    "OPENAI_API_KEY": "added-by-the-egress-proxy",
    "ANTHROPIC_BASE_URL": f"http://{EGRESS_LOOPBACK_ADDRESS}",
    "ANTHROPIC_API_KEY": "added-by-the-egress-proxy",
    "RELAY_URL": f"ws://{EGRESS_LOOPBACK_ADDRESS}/relay/",
}
# Variables from which nproc, OpenMP, Go, Python 3.13, Rayon and Cargo take the number of processors to use. Without them
# programs start a thread for each processor of the host, because a CPU limit restricts the time, and not the processors.
PROCESSOR_COUNT_VARIABLES = ("OMP_NUM_THREADS", "GOMAXPROCS", "PYTHON_CPU_COUNT", "RAYON_NUM_THREADS", "CARGO_BUILD_JOBS")
GET_FILES_TIMEOUT = timedelta(minutes=9)  # beyond the time that the minimum rate of a stream grants
MAX_SUSPEND_TIME = timedelta(minutes=2)  # of a `suspend` that stops the sandbox
TEMPLATE_TAG_PREFIX = "leasehold-template/"  # of the names of the images of templates
MARK_VARIABLE = "LEASEHOLD_RUN"  # environment variable that identifies the processes of one exec


class Network(StrEnum):
    """Destinations that a sandbox reaches."""

    SEALED = "sealed"  # the egress proxy and what the policy allows
    GATEWAY = "gateway"  # this installation's gateway, or nothing without one, enforced by the vendor's allow list
    OPEN = "open"  # not restricted by this control plane


@dataclass(frozen=True)
class BuiltImage:
    """Image at the engine: its identity, and its size with its base, None if the vendor does not state it."""

    id: str
    size_bytes: int | None


@dataclass(frozen=True)
class VendorIntervals:
    """Intervals after which the vendor of a remote provider acts on a sandbox by itself. None: never."""

    auto_stop: timedelta | None = None  # stops a sandbox that was idle for so long
    auto_delete: timedelta | None = None  # deletes a sandbox that was stopped for so long


@dataclass(frozen=True)
class GatewayAccess:
    """Gateway that the agent of a new sandbox joins, with a token that is good for one join."""

    url: str
    token: str = field(repr=False)
    certificate_authority: str = ""  # PEM; empty: those of the sandbox's system


@dataclass(frozen=True)
class SandboxSpec:
    """Description of a sandbox to create. The limits are hard if the provider enforces limits."""

    name: str  # never reused; [a-z0-9-]{1,63}
    owner: str  # label by which `list` finds the sandboxes of one pool
    image: str = ""
    image_id: str = ""  # BuiltImage.id of an image that this provider has built, in place of `image`; needed by vendors alone
    labels: Mapping[str, str] = field(
        default_factory=dict
    )  # informational, shown by `docker ps`; never read by the control plane
    memory_mib: int = 512
    millicpus: int = 1000
    disk_mib: int | None = None  # None: the vendor's default. Only where `can_set_disk`
    gpus: int = 0  # only where `has_gpus`
    gpu_type: str = ""  # in capitals; empty: any
    sized: bool = False  # memory, CPU or disk was requested for this sandbox; otherwise they are the pool's defaults
    pids: int = 256
    runtime: str = ""  # OCI runtime or RuntimeClass, of a provider with runtimes; empty: that of its configuration
    sockets: Path | None = None  # host directory mounted read-only at /run/leasehold
    agent: Path | None = None  # host directory of the gateway's socket, mounted read-only at /run/leasehold-agent
    data: Path | None = None  # host directory mounted at /data, including later mounts below it; docker only
    writable_root: bool = False  # root file system writable as far as the image permits; default read-only, if supported
    intervals: VendorIntervals | None = None  # None: those of the provider's configuration
    pool: str = ""  # name of the pool, by which a provider may choose properties of the sandbox
    gateway: GatewayAccess | None = None  # of a provider with `agents_join`


@dataclass(frozen=True)
class ProviderSandbox:
    """State of one sandbox, as reported by the provider."""

    ref: str
    name: str
    running: bool  # False: suspended, stopped or partly created; exec resumes it or raises Unavailable
    created_at: datetime  # provider's clock
    suspended: bool = False  # frozen, or stopped with its files where `suspend` stops a sandbox
    ends_at: datetime | None = None  # the engine has begun to end the sandbox, which may run until then
    end_reason: str = ""  # with `ends_at`
    is_remnant: bool = False  # only volumes exist: destroy removes them; inspect raises Missing unless they are complete
    owner: str = ""  # label of the SandboxSpec. Stated by `list` and `list_all`
    memory_mib: int | None = None  # size as the engine states it; None: not listed
    millicpus: int | None = None


class FileStat(NamedTuple):
    """Metadata of one entry below /workspace or /data. A tuple saves memory: a manifest has thousands of entries."""

    kind: str  # "file", "directory", "link", or "other" (socket, pipe, device: never stored)
    mode: int  # permission bits
    size: int  # bytes of a regular file, else 0
    mtime: int  # whole seconds since 1970
    # Changes whenever the content of a file, its mode or the target of a link may have changed. Before Linux 6.13 two writes
    # of equal length within one tick of the kernel's clock (4 ms) share a stamp. Reading a file leaves its stamp unchanged,
    # unless its owner may not read it.
    stamp: str
    target: str = ""  # of a symbolic link


class ResourceUsage(NamedTuple):
    """CPU and memory used by all processes of a sandbox, including ended ones."""

    cpu_micros: int  # CPU time since the sandbox was started, in microseconds; reset by a restart
    memory_bytes: int  # current, excluding reclaimable page cache


class Provider(ABC):
    """Engine that runs sandboxes. The module's docstring states the contract common to all methods."""

    name: str
    isolated: bool  # commands cannot reach the host or other sandboxes
    network: Network  # of new sandboxes
    enforces_limits: bool  # memory and CPU limits hold, and ExecResult.oom is reported
    limits_processes: bool = False  # the limit of processes holds
    can_set_size: bool = True  # memory and CPU of a sandbox are those of its spec
    can_set_disk: bool = False  # the disk of a sandbox is that of its spec, if the spec has one
    has_gpus: bool = False  # a sandbox may have GPUs
    gpu_types: frozenset[str] = frozenset()  # types that the vendor's API accepts; empty: not known before the create
    needs_gpu_type: bool = False  # a GPU is requested by its type
    sizes_need_image: bool = False  # memory, CPU, disk and GPUs can be set only for a sandbox of an image
    measures_usage: bool  # `stats` returns measurements
    streams_output: bool = False  # `open_output` returns a reader, if the sandbox can be reached
    has_terminals: bool = False  # `start` accepts `terminal`, and `find_agent_id` returns an id, if the sandbox can be reached
    bridges_proxy: bool = False  # a port in the sandbox leads to the proxy of the policy's allow list
    has_quotas: bool = False  # `read_quotas` returns the engine's limits
    can_list: bool = True  # otherwise `list` raises Unavailable with the cause NOT_SUPPORTED
    builds_images: bool = False  # `build_image` and the other methods of images work; otherwise they raise Rejected
    no_builds_reason: str = ""  # sentence for operators, without `builds_images`
    build_user: str = ""  # user of sandboxes: commands of a build run as root, and this user is set at its end; "": the base's
    has_image_bases: bool = True  # the default image of sandboxes can be the base of a build
    needs_gateway: bool = False  # sandboxes reach models by the public gateway alone, for which `connect_gateway` prepares them
    agents_join: bool = False  # the agent of a sandbox joins the gateway over TLS: SandboxSpec.gateway is required
    pending_timeout: timedelta = timedelta(minutes=10)  # for which a sandbox may wait for room: CapacityPending
    proves_isolation: bool = False  # `isolated` is false until `check_seal` has shown it
    announces_end: bool = False  # `list` states `ends_at` before the engine ends a sandbox
    watches_ends: bool = False  # `watch_ends` yields what `list` would state later
    can_suspend: bool  # `suspend` and `resume` are supported; otherwise `suspend` raises Rejected and `resume` does nothing
    suspend_keeps_processes: bool = True  # False: `suspend` ends all processes, and keeps the files alone
    has_auto_stop: bool = False  # the vendor stops an idle sandbox after VendorIntervals.auto_stop
    has_auto_delete: bool = False  # the vendor deletes a stopped sandbox after VendorIntervals.auto_delete
    stop_keeps_files: bool = True  # a sandbox that the vendor has stopped keeps its files, and its next use starts it
    can_set_intervals: bool = False  # `set_intervals` changes those of an existing sandbox
    # Time after its creation at which the vendor ends every sandbox, at least two hours. None: no such limit.
    max_lifetime: timedelta | None = None

    # Smallest /workspace of which the vendor is to keep a snapshot beside the stored one. None: not supported, or off.
    min_directory_snapshot_bytes: int | None = None

    @abstractmethod
    def engine_id(self) -> str:
        """Ask the engine for its identity, at most 200 characters. Two engines never share one. Raise Unavailable.

        It stays the same over restarts of the engine and of the control plane, as long as the sandboxes do."""

    def ping(self) -> None:
        """Ask the engine for an answer of any kind. Raise Unavailable without one."""
        self.list("health")

    def last_engine_id(self) -> str:
        """Return the identity that the engine last stated, without a call if it is known. Raise Unavailable."""
        return self.engine_id()

    def read_quotas(self) -> Sequence[EngineQuota]:
        """Return the limits of the engine on all sandboxes together. Empty: there are none. Raise ProviderError."""
        return ()

    def find_setup_problems(self) -> Sequence[SetupProblem]:
        """Ask the engine, within seconds, whether it is configured for this provider. Raise ProviderError without an answer."""
        return ()

    def check_seal(self) -> SealReport:
        """Try from within a sandbox to reach other destinations than the gateway. Takes up to minutes. Raise ProviderError."""
        raise Rejected(f"The {self.name} provider has no such check.")

    def total_memory_mib(self) -> int | None:
        """Return the memory of the machine that runs the sandboxes, in MiB; None if it is not known. Raise Unavailable."""
        return None

    def find_disk(self) -> Path | None:
        """Return the directory on this machine where the engine keeps sandboxes. None: another machine's, or not known."""
        return None

    def find_missing_images(self, images: Collection[str]) -> set[str]:
        """Return those of these images that the engine does not have, of an engine that fetches none. Raise ProviderError.

        An image that the engine of another provider cannot fetch fails the start, with the cause IMAGE_UNUSABLE."""
        return set()

    def watch_ends(self, *, timeout: timedelta) -> Generator[ProviderSandbox, None, None]:
        """Yield, for the given time, each sandbox of any owner that the engine has begun to end, or that is gone: a remnant.

        A hint: sandboxes may be missing, repeated or late, and a sandbox that is said to be gone has to be inspected. Raise
        ProviderError if the engine did not respond."""
        yield from ()

    @abstractmethod
    def create(self, spec: SandboxSpec) -> str:
        """Start a sandbox and return its ref. Idempotent: an existing sandbox of that name is returned."""

    @abstractmethod
    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        """Return once commands can run. Raise Unavailable after `timeout`."""

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
        output: OutputView | None = None,
        retain: bool = False,
        digest_data: bool = False,
    ) -> ExecResult:
        """Run `argv` without a shell and wait for it. Execs may run concurrently.

        `mark` is unique for this exec. On timeout every process descended from it is killed, including those that left its
        session, and no process of another exec. Each output stream is cut to its first `cap` bytes. A program that does not
        exist is a result with exit code 127. `output` shows the streams while the command runs. Raise Stopped if the sandbox
        stopped or restarted while the command ran, and Missing if it was removed with its files; a command that a signal ends
        in a running sandbox is a result. With `retain` the sandbox keeps the result until `acknowledge_exec`, if the provider
        can. With `digest_data` the result has a `data_digest`, if the provider can tell it at little cost."""

    @abstractmethod
    def find_exec(self, ref: str, mark: str) -> ExecState | None:
        """Return the state of an exec with a retained result, or None if the exec is unknown. Raise Unavailable.

        A provider that retains no results returns None."""

    @abstractmethod
    def acknowledge_exec(self, ref: str, mark: str) -> None:
        """Let the sandbox drop the retained result of an exec. Best effort: raise nothing."""

    def open_output(self, ref: str, mark: str, *, stdout: int, stderr: int) -> OutputReader | None:
        """Return a reader of the output of an exec with a retained result, from these byte offsets. Any number may be open.

        None if the provider retains no output by offset, or cannot reach it now. Raise Missing, Unavailable."""
        return None

    @abstractmethod
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
        """Start `argv` without a shell in the background, and return its state immediately.

        With `stdin` its stdin is a pipe for `write_stdin`, else it is empty. With `terminal` its stdin and its output are a
        terminal of this size. Raise Rejected where that is not supported.

        The process runs until it exits, is killed by `kill`, or its sandbox stops. A program that does not exist has exited
        with 127. Idempotent: a second call with the same mark starts nothing."""

    @abstractmethod
    def signal_process(self, ref: str, mark: str, number: int) -> None:
        """Send a signal to a background process, and to the processes that it has started in its session.

        A process that has ended is success. Raise Missing."""

    @abstractmethod
    def write_stdin(self, ref: str, mark: str, content: bytes, *, offset: int, last: bool) -> int:
        """Append to the stdin of a background process from a byte offset, and close it after the `last` bytes.

        Return the number of bytes received in all. Bytes below that number are skipped, so a call may be repeated. What a
        process that has ended or has closed its stdin does not read is dropped. Raise Rejected for an offset above the number,
        and for a process without stdin."""

    def find_agent_id(self, ref: str) -> str | None:
        """Return the id by which the gateway of this host knows the agent of a sandbox. Raise Missing.

        None if the provider has no agents, or cannot reach this one."""
        return None

    @abstractmethod
    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        """Return the states of background processes by mark. Unknown marks are absent.

        A process has exited when the started program has, even if children remain. The exit code is 137 if the exit was not
        observed."""

    @abstractmethod
    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        """Return at most `length` bytes of combined stdout and stderr of a background process, from offset `start`.

        At least the last 256 KiB are retained. If older output was dropped, `content` begins at next - len(content)."""

    @abstractmethod
    def kill(self, ref: str, mark: str) -> None:
        """Kill all processes of the exec or background process with this mark, and return once they are gone.

        Idempotent. No such process, or a sandbox that is not running, is success; raise Missing if there is no sandbox."""

    def prepare_starts(self) -> Mapping[str, int]:
        """Prepare resources that make the next starts faster, and remove outdated ones. Idempotent. Return counts by result."""
        return {}

    def discard_prepared(self) -> None:
        """Remove the resources of `prepare_starts`. Idempotent."""
        return

    def pull_image(self, image: str) -> Generator[str, None, None]:
        """Yield the progress of fetching an image that the engine does not have yet. Raise Rejected, Unavailable."""
        raise Rejected(f"The {self.name} provider builds no images.")

    def build_image(
        self,
        dockerfile: str,
        build: str,
        *,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        silence: timedelta,
        use_cache: bool = True,
    ) -> Generator[str, None, BuiltImage]:
        """Build an image from a Dockerfile without other files, yield the output and return the image.

        `build` names the build. A vendor's provider finds a build of this name that was interrupted here, or whose outcome is
        not known, and follows it to its end; at other engines closing the iterator ends the build, and a repeated build
        replaces the first. `arguments` are build arguments. Without `use_cache` each step is executed anew. Raise
        BuildCommandFailed, Rejected, and Unavailable with the cause TIMEOUT after `silence` without output."""
        raise Rejected(f"The {self.name} provider builds no images.")

    def check_image(self, image: BuiltImage) -> list[str]:
        """Return the reasons for which no sandbox can run on an image, as sentences. Raise Missing, Unavailable."""
        raise Rejected(f"The {self.name} provider builds no images.")

    def tag_image(self, build: str, tag: str) -> None:
        """Replace the name of a build by a name which may belong to another image until then. Raise Missing, Unavailable.

        Without effect at vendors, whose images are identified by SandboxSpec.image_id."""
        raise Rejected(f"The {self.name} provider builds no images.")

    def remove_build(self, build: str) -> None:
        """Remove the image of a build of this name, and end the build if it has not ended. Idempotent. Raise Unavailable."""
        raise Rejected(f"The {self.name} provider builds no images.")

    def remove_image(self, image: str) -> None:
        """Remove an image by its identity, or its name, and the image with its last name. Idempotent.

        Raise ImageInUse, Unavailable."""
        raise Rejected(f"The {self.name} provider builds no images.")

    @abstractmethod
    def suspend(self, ref: str) -> None:
        """Freeze all processes of the sandbox: they use no CPU time, and keep their memory. Idempotent.

        Without `suspend_keeps_processes`, stop the sandbox instead, and return once it is stopped: its processes end, and its
        files stay. Such a call takes at most MAX_SUSPEND_TIME.

        Until `resume`, only `inspect`, `list`, `stats`, `suspend` and `destroy` have to work; other methods may raise
        Unavailable or resume the sandbox. Raise Unavailable if the sandbox does not run."""

    @abstractmethod
    def resume(self, ref: str) -> None:
        """Thaw the processes of a suspended sandbox, and return once they run. Idempotent. Raise Missing.

        A sandbox that is not suspended, or that does not run, is success. Without `suspend_keeps_processes`, start a stopped
        sandbox, and return once commands can run."""

    def default_intervals(self) -> VendorIntervals:
        """Return the intervals of new sandboxes according to the configuration."""
        return VendorIntervals()

    def set_intervals(self, ref: str, intervals: VendorIntervals) -> None:  # noqa: B027 - see `can_set_intervals`
        """Set the vendor's intervals of a sandbox in any state. Idempotent. Without effect unless `can_set_intervals`.

        An interval counts from the idleness or the stop that it limits, also if that began before this call. Durations are
        rounded up to the vendor's unit. Raise Missing, and Unavailable if the outcome is not known: repeat the call then."""

    @abstractmethod
    def find_unresponsive(self, refs: Collection[str], *, timeout: timedelta) -> set[str]:
        """Return those of these sandboxes whose agent is connected and does not respond within `timeout`. Raise Unavailable."""

    def responds(self, ref: str, *, timeout: timedelta) -> bool:
        """Return whether the sandbox has answered within `timeout`, without a command. False if that cannot be asked."""
        return False

    def has_outdated_agent(self, ref: str) -> bool:
        """Return whether the agent is of a version that is not spoken. False if that is not known, as before it connects."""
        return False

    def prepare_claim(self, ref: str) -> None:  # noqa: B027 - nothing to prepare by default
        """Prepare a pre-warmed sandbox for the first operation of its future holder. Without effect if that fails."""

    def connect_gateway(self, ref: str, url: str, token: str) -> None:
        """Give a sandbox the gateway's address and its token, which replaces an earlier one. Raise Missing, Unavailable."""
        raise Rejected("The sandboxes of this provider need no gateway.")

    def kill_all(self, ref: str) -> None:  # noqa: B027 - see below
        """Kill all processes of the sandbox but process 1 from outside, and return once they are gone. Idempotent.

        What process 1 needs, it starts again. A sandbox that has no other processes, does not run or does not exist is success.
        Raise Unavailable. Without effect where only `restart`, which takes longer, can do that."""

    @abstractmethod
    def restart(self, ref: str) -> None:
        """Kill all processes of the sandbox, and start it with the same /workspace and /data. Raise Missing.

        An agent of a version that is not spoken is replaced, where the engine has an image with another one."""

    @abstractmethod
    def destroy(self, ref: str) -> None:
        """Destroy the sandbox in any state, and return once it is gone. Idempotent."""

    @abstractmethod
    def inspect(self, ref: str) -> ProviderSandbox:
        """Return the current state of the sandbox. Raise Missing."""

    @abstractmethod
    def stats(self, ref: str) -> ResourceUsage | None:
        """Return the resource usage, or None if the sandbox does not run or usage is not measured. Raise Missing."""

    def list_all(self) -> list[ProviderSandbox]:
        """List every sandbox with an owner label at the engine or the vendor's account.

        Other installations may use the same engine or account. Raise Unavailable rather than return a partial list, and with
        the cause NOT_SUPPORTED if the provider cannot list."""
        raise Unavailable(f"The {self.name} provider cannot list sandboxes.", cause=FailureCause.NOT_SUPPORTED)

    @abstractmethod
    def list(self, owner: str) -> list[ProviderSandbox]:
        """List every sandbox with this owner label, running or not. Raise Unavailable rather than return a partial list."""

    @abstractmethod
    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        """Read one regular file under /workspace or /data, given by its absolute path in the sandbox.

        Raise NoSuchFile, BadPath (also if any part of the path is a symbolic link), or TooLarge above `limit` bytes. In this
        and the following methods, names that are not UTF-8 are represented as by os.fsdecode."""

    @abstractmethod
    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        """Read at most `length` bytes of a file from `start`. Return (content, file size). Raise NoSuchFile, BadPath."""

    @abstractmethod
    def write_file(self, ref: str, path: str, content: bytes) -> None:
        """Create or atomically replace one file, creating missing parent directories. Raise BadPath as `read_file` does.

        The owner is the user that commands run as."""

    @abstractmethod
    def remove_file(self, ref: str, path: str) -> None:
        """Remove one regular file. Raise NoSuchFile, BadPath."""

    @abstractmethod
    def make_directory(self, ref: str, path: str) -> None:
        """Create a directory and its missing parents. An existing directory is success. Raise BadPath."""

    @abstractmethod
    def move_file(self, ref: str, source: str, target: str, *, overwrite: bool) -> None:
        """Rename a file, link or directory within /workspace or within /data, creating missing parents of the target.

        With `overwrite` a file or link replaces a file or link, and a directory an empty directory. Raise NoSuchFile for the
        source, FileExists without `overwrite`, and BadPath, also for a target in another root, below the source, or of another
        kind."""

    @abstractmethod
    def manifest(
        self, ref: str, root: str, *, under: str = "", deep: bool = True, max_entries: int = 100_000
    ) -> dict[str, FileStat]:
        """List all entries below /workspace or /data as path relative to `root` -> FileStat.

        `under` restricts the list to a subdirectory, relative to `root`; `deep=False` to its direct entries. Symbolic links
        are not followed, and paths longer than 4000 bytes are omitted. Raise NoSuchFile or BadPath for `under`, and TooLarge
        above `max_entries` entries, or if their paths or link targets exceed max(1 MiB, 160 bytes * max_entries)."""

    @abstractmethod
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
        """Stream /workspace or /data as an uncompressed tar. Member names are relative to `root`.

        `only` restricts it to existing entries with exactly these relative paths, without their parents or children.
        `exclude` lists fnmatch patterns, matched against path elements, or against relative paths if they contain a slash. A
        matching entry is omitted with everything below it. Raise TooLarge once the tar exceeds `max_bytes`, and Unavailable if
        the sandbox takes longer than `timeout` and a second for each MiB; the limit is never exceeded on the host's disk.

        With `exact`, and without `only`, `put_files` restores from the tar also hard links, holes of sparse files, modification
        times to the nanosecond, and the sticky bit; its last member lists what is not kept (sandboxes/state/exact_tars.py). A
        sandbox with an older image may return a tar without these. Otherwise each name of a file has a copy, sparse files have
        their apparent size, and times are in seconds from 1970 on."""

    @abstractmethod
    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        """Unpack an uncompressed tar over /workspace or /data. Owners in the tar are ignored.

        Raise Rejected if a member would leave `root`; other members may have been unpacked then."""

    @abstractmethod
    def put_and_list_files(self, ref: str, root: str, tar: BinaryIO, *, max_entries: int = 100_000) -> dict[str, FileStat]:
        """Like `put_files`, and return the manifest of `root` afterwards. Raise TooLarge above `max_entries` entries."""

    @abstractmethod
    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        """Remove files, links and empty directories by their paths relative to `root`, deepest first. Idempotent.

        Paths behind a link or below a file count as absent. Directories that are not empty remain. Raise BadPath for a
        malformed path."""

    @abstractmethod
    def clear(self, ref: str, root: str) -> None:
        """Remove everything below /workspace or /data, regardless of modes, but not the directory itself.

        The home directory in /workspace exists afterwards, and is empty."""

    @abstractmethod
    def size(self, ref: str, root: str) -> int:
        """Return the bytes that an exact tar stores of all regular files below /workspace or /data.

        A file with several names counts once, and holes of sparse files do not count."""

    @abstractmethod
    def seed(self, ref: str, kind: str, tar: BinaryIO) -> None:
        """Unpack an uncompressed tar to /data/skills/<kind>/ unless the path is occupied. Owners in the tar are ignored.

        All files appear at once. Raise Rejected if `kind` is not a slug, or a member would leave the directory."""

    def snapshot_directory(self, ref: str, root: str, *, ttl: timedelta) -> str:
        """Have the vendor keep a snapshot of /workspace or /data for `ttl`, and return its id of at most 100 characters.

        Raise Missing, Rejected, and Unavailable if the outcome is not known."""
        raise Rejected(f"The {self.name} provider takes no snapshots of directories.")

    def restore_directory(self, ref: str, root: str, snapshot: str) -> None:
        """Write the files of a snapshot over those in /workspace or /data, with their modes and times, within 4 minutes.

        Raise Missing, Rejected if no process writes to `root` any more, which may have a part of the files, and Unavailable if
        that is not known."""
        raise Rejected(f"The {self.name} provider takes no snapshots of directories.")

    def delete_directory_snapshot(self, snapshot: str) -> None:
        """Delete a snapshot at the vendor. Idempotent. Raise Unavailable."""
        raise Rejected(f"The {self.name} provider takes no snapshots of directories.")

    def inside(self, ref: str, path: str) -> str:
        """Translate a sandbox path to the path that programs in the sandbox use.

        Returns `path` unchanged, except in providers without a separate file system."""
        return path


def build_processor_counts(millicpus: int) -> dict[str, str]:
    """Build the variables that tell programs how many threads to start: a CPU limit, rounded up to whole processors."""
    return dict.fromkeys(PROCESSOR_COUNT_VARIABLES, str(max(-(-millicpus // 1000), 1)))


def truncate_labels(labels: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Truncate label values to 255 characters, the limit of all providers."""
    return {key: value[:255] for key, value in labels}
