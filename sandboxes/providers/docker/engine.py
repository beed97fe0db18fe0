"""Client for a Docker Engine: API calls. The streams of an exec are in sandboxes.providers.docker.exec_stream.

Most calls use the SDK. The three calls of an exec use plain connections, because the SDK adds one or two milliseconds to each,
reads an exec's output without a timeout, and discards data that it has read ahead."""

import contextlib
import hashlib
import http.client
import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from docker import APIClient
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env, parse_host
from requests.exceptions import RequestException, Timeout

from sandboxes.providers.base import ResourceUsage
from sandboxes.providers.docker.freezer import Freezer, find_freezer
from sandboxes.providers.errors import FailureCause, Missing, OutOfSpace, ProviderError, Rejected, Unavailable
from sandboxes.providers.launcher import KILLED_EXIT_CODE
from sandboxes.redaction.texts import quote_answer

CALL_TIMEOUT_SECONDS = 60  # of one API call
EXEC_GIDS = range(1 << 20, (1 << 31) - 1)
STOP_EVENT_SECONDS = 0.5  # between the end of a container's processes and the engine's report of the stop
EXITING_FLAG = 0x4  # PF_EXITING of Linux, in the ninth field of /proc/<pid>/stat
SHARED_KERNEL_RUNTIMES = {"runc", "crun", "io.containerd.runc.v2"}  # runtimes whose processes are visible on the host


# Messages of the engine about an object that does not exist: `No such container: x`, `network x not found`.
ABSENCE_PATTERN = re.compile(
    r"(?i)^(?!\s*<).*\b(?:no such (?:container|exec|image|network|volume)\b|(?:network|volume) \S+ not found)"
)


NO_SPACE_PATTERN = re.compile(r"(?i)\bno space left on device\b|\bdisk quota exceeded\b")
# Start of a container whose image lacks the program of process 1.
NO_PROGRAM_PATTERN = re.compile(
    r"(?i)OCI runtime create failed.*\bexec: .*(?:executable file not found|no such file or directory|permission denied)"
)


class Conflict(Unavailable):
    """HTTP 409: the container's state, or a concurrent operation, does not allow this call."""


def _to_provider_error(status: int, message: str) -> ProviderError:
    """Translate an error of the engine. A 404 for an unknown path, or of a proxy before the engine, states no absence."""
    if NO_SPACE_PATTERN.search(message):
        return OutOfSpace(f"Docker answered {status}: {message}")
    text = f"Docker answered {status}: {quote_answer(message)}"
    if status in (400, 500) and NO_PROGRAM_PATTERN.search(message):
        return Rejected(f"Process 1 does not start. {text}", cause=FailureCause.IMAGE_UNUSABLE)
    if status == 410 or (status == 404 and not ABSENCE_PATTERN.search(message)):
        return Unavailable(text, cause=FailureCause.ENGINE_ERROR)
    kinds: dict[int, type[ProviderError]] = {404: Missing, 409: Conflict}
    cause = FailureCause.ENGINE_ERROR if not 400 <= status < 500 else None
    return kinds.get(status, Rejected if 400 <= status < 500 else Unavailable)(text, cause=cause)


def build_unavailable(error: Exception) -> Unavailable:
    """Return the error of the provider port for a failed connection to the engine."""
    is_timeout = isinstance(error, TimeoutError | Timeout)
    cause = FailureCause.TIMEOUT if is_timeout else FailureCause.ENGINE_UNREACHABLE
    return Unavailable(f"Docker is unavailable: {quote_answer(error)}", cause=cause)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Translate SDK exceptions into the provider port's errors."""
    try:
        yield
    except APIError as error:
        raise _to_provider_error(error.status_code or 500, error.explanation or str(error)) from error
    except (DockerException, RequestException) as error:
        raise build_unavailable(error) from error


class _EngineConnection(http.client.HTTPConnection):
    """HTTP connection over the engine's socket."""

    def __init__(self, engine: "Engine") -> None:
        super().__init__("docker")
        self._engine = engine

    def connect(self) -> None:
        self.sock = self._engine.dial()


class Cgroup(NamedTuple):
    """Files of a container's cgroup, version 1 or 2."""

    processes: Path
    oom: Path  # contains a line "oom_kill N"
    cpu: Path  # nanoseconds (version 1), or a line "usage_usec N" (version 2)
    memory: Path  # bytes; memory.stat is in the same directory
    freezer: Freezer | None = None

    def has_processes(self) -> bool:
        """Return whether the container has a process. False after the container has stopped or was replaced."""
        try:
            return bool(self.processes.read_text())
        except OSError:
            return False

    def usage(self) -> ResourceUsage:
        """Read the current usage. Raise OSError if the container has stopped."""
        cpu, stat = self.cpu.read_text(), _parse_numbers(self.memory.with_name("memory.stat").read_text())
        micros = int(cpu) // 1000 if cpu.strip().isdigit() else _parse_numbers(cpu)["usage_usec"]
        return ResourceUsage(micros, _memory_in_use(int(self.memory.read_text()), stat))


def _memory_in_use(usage: int, stat: Mapping[str, int]) -> int:
    """Memory in bytes excluding inactive page cache, like `docker stats`. The `total_` name is from cgroup version 1."""
    return max(usage - stat.get("total_inactive_file", stat.get("inactive_file", 0)), 0)


def _parse_numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, _, number in (line.partition(" ") for line in text.splitlines())}


class Engine:
    """Connection pool to the daemon. One per process, shared by its threads."""

    def __init__(self) -> None:
        self.client = APIClient(**kwargs_from_env(), version="auto", timeout=CALL_TIMEOUT_SECONDS, max_pool_size=64)
        self.cgroups: dict[str, Cgroup | None] = {}
        # name -> id of the container, empty if its processes run on another kernel; may be outdated
        self.container_ids: dict[str, str] = {}
        self._host = urlsplit(parse_host(os.environ.get("DOCKER_HOST"), tls="tls" in kwargs_from_env()))
        self._idle: deque[_EngineConnection] = deque(maxlen=64)
        info = self.client.info()
        self.id = str(info.get("ID") or "")  # last stated by the engine
        options = " ".join(info.get("SecurityOptions") or [])
        self.data_root = self._find_data_root(str(info.get("DockerRootDir") or ""))
        self.has_user_remapping = "name=userns" in options or "name=rootless" in options

    def _find_data_root(self, stated: str) -> Path | None:
        """Return the engine's data directory if it is on this machine: the engine has a unix socket, the directory exists."""
        try:
            is_local = self._host.scheme == "http+unix" and bool(stated) and Path(stated).is_dir()
        except OSError:  # not permitted to look
            return None
        return Path(stated) if is_local else None

    def fetch_id(self) -> str:
        """Ask the engine for its id, which it keeps with its containers. Raise Unavailable, also if it states none."""
        self.id = str(self.call("GET", "/info").get("ID") or "")
        if not self.id:
            raise Unavailable("The Docker Engine states no id.")
        return self.id

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make one short, idempotent call. Return the decoded JSON response. Raise the provider port's errors."""
        request_body, headers = body and json.dumps(body).encode(), {"Content-Type": "application/json"}
        while True:
            try:
                connection, is_reused = self._idle.pop(), True
            except IndexError:
                connection, is_reused = _EngineConnection(self), False
            try:
                connection.request(method, f"/v{self.client.api_version}{path}", request_body, headers)
                response = connection.getresponse()
                content = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not is_reused or isinstance(error, TimeoutError):  # a reused connection may have been closed by the daemon
                    raise build_unavailable(error) from error
        self._idle.append(connection)
        return _decode_response(response.status, content)

    def exec_gid(self, mark: str) -> int | None:
        """Return the group id that identifies all processes of the exec with this mark. A process cannot leave its group.

        The id is derived from the mark, so an exec can be killed after a crash of the process that started it. Two execs of one
        sandbox collide with a probability of about one in two billion. None if the engine maps only few ids."""
        number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8])
        return None if self.has_user_remapping else EXEC_GIDS[number % len(EXEC_GIDS)]

    def dial(self) -> socket.socket:
        """Open a new connection to the daemon."""
        try:
            if self._host.scheme == "http":
                return socket.create_connection((self._host.hostname, self._host.port), timeout=CALL_TIMEOUT_SECONDS)
            if self._host.scheme == "http+unix":
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(CALL_TIMEOUT_SECONDS)
                connection.connect(self._host.path)
                return connection
        except OSError as error:
            raise build_unavailable(error) from error
        raise Rejected("DOCKER_HOST must be a unix socket or plain TCP: stdin cannot be half-closed over TLS or ssh.")

    def cgroup(self, ref: str) -> Cgroup | None:
        """Return the container's cgroup, or None if it does not run or is not visible, as on another host. Raise Missing.

        Unlike the pid of process 1, the cgroup stays the same when the container is restarted, but not when it is replaced."""
        if ref in self.cgroups:
            cached = self.cgroups[ref]
            if cached is None or cached.has_processes():
                return cached
        inspected = self.call("GET", f"/containers/{ref}/json")
        pid = inspected["State"]["Pid"]
        cgroup = _find_cgroup(pid, inspected["Id"]) if pid else None
        # A container that has just stopped is not invisible, which would be remembered.
        if cgroup is None and (not pid or self.call("GET", f"/containers/{ref}/json")["State"]["Pid"] != pid):
            self.cgroups.pop(ref, None)
            return None
        if len(self.cgroups) > 10_000:
            self.cgroups.clear()
        self.cgroups[ref] = cgroup
        return cgroup

    def is_frozen(self, ref: str) -> bool | None:
        """Return whether the kernel has frozen the container's processes. None: not visible, or not running. Raise Missing.

        The engine does not know of a container that was frozen without it."""
        try:
            cgroup = self.cgroup(ref)
            return cgroup.freezer.is_frozen() if cgroup and cgroup.freezer else None
        except OSError:  # stopped meanwhile
            return None

    def container_id(self, ref: str) -> str:
        """Return the id of the container with this name, empty if its processes run on another kernel. Raise Missing.

        The id may be outdated."""
        if ref not in self.container_ids:
            if len(self.container_ids) > 10_000:
                self.container_ids.clear()
            inspected = self.call("GET", f"/containers/{ref}/json")
            self.container_ids[ref] = str(inspected["Id"]) if shares_kernel(inspected) else ""
        return self.container_ids[ref]

    def usage(self, ref: str) -> ResourceUsage | None:
        """Return the container's resource usage, or None if it does not run.

        Read from the kernel if its cgroup is visible: the engine takes up to a second."""
        with contextlib.suppress(OSError):  # stopped or removed
            if cgroup := self.cgroup(ref):
                return cgroup.usage()
        stats = self.call("GET", f"/containers/{ref}/stats?stream=false&one-shot=true")
        memory = stats["memory_stats"]
        if "usage" not in memory:  # not running, or the daemon has no cgroups
            return None
        return ResourceUsage(
            stats["cpu_stats"]["cpu_usage"]["total_usage"] // 1000, _memory_in_use(memory["usage"], memory["stats"])
        )

    def oom_kills(self, ref: str) -> int | None:
        """Return the number of OOM kills in the container since it started, or None if it is not visible."""
        try:
            cgroup = self.cgroup(ref)
            lines = cgroup.oom.read_bytes().splitlines() if cgroup else []
        except (Missing, OSError):
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), None)

    def ended_before(self, ref: str, since: float) -> bool:
        """Return whether the container does not run, and stopped before `since` (monotonic clock). Raise Missing.

        A container that was created since has never run, but its predecessor of the same name may have until then."""
        inspected = self.call("GET", f"/containers/{ref}/json")
        state = inspected["State"]
        if state["Running"]:
            return False
        moment = self.translate_time(since)
        return _parse_timestamp(inspected["Created"]) <= moment and _parse_timestamp(state["FinishedAt"]) < moment

    def has_stopped(self, ref: str, since: float) -> bool:
        """Return whether the container has stopped or restarted after `since` (monotonic clock). Raise Missing.

        When process 1 dies, the kernel kills all other processes of the container before the engine learns of the stop. A
        process 1 that is visible from here and not exiting shows at once since when the container runs; else the engine is
        asked again for STOP_EVENT_SECONDS."""
        began, deadline, moment = _read_uptime() - (time.monotonic() - since), time.monotonic() + STOP_EVENT_SECONDS, 0.0
        while True:
            inspected = self.call("GET", f"/containers/{ref}/json")
            state = inspected["State"]
            if not state["Running"]:
                return True
            started = _find_process_start(state["Pid"], inspected["Id"])
            if started is not None:
                return started > began
            moment = moment or self.translate_time(since)
            if _parse_timestamp(state["StartedAt"]) > moment:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)

    def translate_time(self, moment: float) -> float:
        """Return the engine's time, in seconds since 1970, at a past reading of this process's monotonic clock.

        The clock of this process may differ from the engine's, and either may have been set since."""
        elapsed, now = time.monotonic() - moment, _parse_timestamp(self.call("GET", "/info")["SystemTime"])
        return now - elapsed

    def was_oom_killed(self, ref: str, before: int | None, since: float, exit_code: int) -> bool:
        """Return whether a command that ended with `exit_code` was killed for lack of memory since `since` (monotonic clock).

        By the kernel's counter, or else the engine's `oom` events since `since`. Both count the kills of the whole container: a
        command that was not killed has ended beside one that was."""
        if exit_code != KILLED_EXIT_CODE:
            return False
        after = self.oom_kills(ref)
        if before is not None and after is not None:
            return after > before
        now = time.monotonic()
        began = self.translate_time(since)
        until = began + (now - since) + 0.5  # the event may arrive after the exit it caused
        # Formatted here, because the SDK's conversion truncates to seconds.
        period: dict[str, Any] = {"since": f"{began:.6f}", "until": f"{until:.6f}"}
        with translate_errors():
            return any(self.client.events(**period, filters={"container": ref, "event": "oom"}, decode=True))


def _parse_timestamp(text: str) -> float:
    """Convert the engine's RFC 3339 time, which has up to nine decimals, to seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def _read_uptime() -> float:
    """Return the seconds since the machine was started, which is the unit of a process's start time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _find_process_start(pid: int, container: str) -> float | None:
    """Return the uptime at which the process was started. None if it is not visible from here, is exiting, or is not the
    container's."""
    try:
        if container not in Path(f"/proc/{pid}/cgroup").read_text():
            return None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    is_running = fields[0] not in "ZX" and not int(fields[6]) & EXITING_FLAG
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if is_running else None


def shares_kernel(inspected: Mapping[str, Any]) -> bool:
    """Return whether the container's processes run on the host's kernel. Under gVisor or Kata only the runtime is visible."""
    return inspected["HostConfig"]["Runtime"] in SHARED_KERNEL_RUNTIMES


def _decode_response(status: int, content: bytes) -> Any:
    try:
        decoded = json.loads(content or b"{}")
    except ValueError:
        text = f"Docker answered {status} without JSON: {quote_answer(content.decode(errors='replace'))}"
        raise Unavailable(text, cause=FailureCause.ENGINE_ERROR) from None
    if status >= 300:
        message = decoded.get("message", "") if isinstance(decoded, dict) else ""
        raise _to_provider_error(status, str(message))
    return decoded


def _find_cgroup(pid: int, container: str) -> Cgroup | None:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    if "memory" in paths:  # version 1
        path = paths["memory"]
        directory, cpu = Path(f"/sys/fs/cgroup/memory{path}"), Path(f"/sys/fs/cgroup/cpuacct{paths.get('cpuacct')}")
        rest = (directory / "memory.oom_control", cpu / "cpuacct.usage", directory / "memory.usage_in_bytes")
    else:
        path = paths.get("", "")
        directory = Path(f"/sys/fs/cgroup{path}")
        rest = (directory / "memory.events", directory / "cpu.stat", directory / "memory.current")
    cgroup = Cgroup(directory / "cgroup.procs", *rest, find_freezer(pid, container))
    # If this process runs in a container itself, the pid denotes an unrelated process. The id in the path excludes that.
    return cgroup if container in path and os.access(cgroup.oom, os.R_OK) else None
