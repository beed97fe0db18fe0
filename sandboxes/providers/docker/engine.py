"""The way to a Docker Engine: its calls, and one exec's stdin and output over one connection.

The SDK makes the calls, but not an exec's three: it takes one or two milliseconds more for each, reads an exec's output
without regard to any timeout, and leaves behind what it had read ahead. Those go over plain connections."""

import contextlib
import hashlib
import http.client
import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from docker import APIClient
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env, parse_host
from requests.exceptions import RequestException

from sandboxes.providers.base import Missing, ProviderError, Rejected, ResourceUsage, Unavailable

CALL_TIMEOUT_SECONDS = 60  # seconds in which the engine answers one call
EXEC_GIDS = range(1 << 20, (1 << 31) - 1)
CHUNK_BYTES = 1 << 18
SHARED_KERNEL_RUNTIMES = {
    "runc",
    "crun",
    "io.containerd.runc.v2",
}  # runtimes whose processes are this kernel's, and seen from out here


class Conflict(Unavailable):
    """409: the container is in a state, or in other hands, in which this cannot be done."""


def _to_provider_error(status: int, message: str) -> ProviderError:
    kinds: dict[int, type[ProviderError]] = {404: Missing, 409: Conflict}
    return kinds.get(status, Rejected if 400 <= status < 500 else Unavailable)(message.strip())


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Whatever the SDK says becomes one of the port's three errors."""
    try:
        yield
    except APIError as error:
        raise _to_provider_error(error.status_code or 500, error.explanation or str(error)) from error
    except (DockerException, RequestException) as error:
        raise Unavailable(f"Docker does not answer: {error}") from error


class _EngineConnection(http.client.HTTPConnection):
    def __init__(self, engine: "Engine") -> None:
        super().__init__("docker")
        self._engine = engine

    def connect(self) -> None:
        self.sock = self._engine.dial()


class Cgroup(NamedTuple):
    """Where the kernel says what a container is and does: files of control groups 1, or of 2, which have them all together."""

    processes: Path
    oom: Path  # has a line "oom_kill N"
    cpu: Path  # a number of nanoseconds, or a line "usage_usec N"
    memory: Path  # a number of bytes; beside it, memory.stat

    def usage(self) -> ResourceUsage:
        """OSError if the container does not run any more."""
        said, stat = self.cpu.read_text(), _parse_numbers(self.memory.with_name("memory.stat").read_text())
        micros = int(said) // 1000 if said.strip().isdigit() else _parse_numbers(said)["usage_usec"]
        return ResourceUsage(micros, _memory_in_use(int(self.memory.read_text()), stat))


def _memory_in_use(taken: int, stat: Mapping[str, int]) -> int:
    """Bytes of memory without files that were read once and are kept while there is room, as `docker stats` has it. The first
    of the names is of version 1."""
    return max(taken - stat.get("total_inactive_file", stat.get("inactive_file", 0)), 0)


def _parse_numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, _, number in (line.partition(" ") for line in text.splitlines())}


class Engine:
    """One process's way to the daemon, which its threads share."""

    def __init__(self) -> None:
        self.client = APIClient(**kwargs_from_env(), version="auto", timeout=CALL_TIMEOUT_SECONDS, max_pool_size=64)
        self.cgroups: dict[str, Cgroup | None] = {}
        self.first_processes: dict[str, tuple[int, str]] = {}  # container -> its first process and its id, as they were once
        self._host = urlsplit(parse_host(os.environ.get("DOCKER_HOST"), tls="tls" in kwargs_from_env()))
        self._idle: deque[_EngineConnection] = deque(maxlen=64)
        options = " ".join(self.client.info().get("SecurityOptions") or [])
        self.has_user_remapping = "name=userns" in options or "name=rootless" in options

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One short call that may safely be made twice; its answer as decoded JSON. Any of the port's errors."""
        content, headers = body and json.dumps(body).encode(), {"Content-Type": "application/json"}
        while True:
            try:
                connection, kept = self._idle.pop(), True
            except IndexError:
                connection, kept = _EngineConnection(self), False
            try:
                connection.request(method, f"/v{self.client.api_version}{path}", content, headers)
                response = connection.getresponse()
                said = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not kept or isinstance(error, TimeoutError):  # else: closed meanwhile, as by a daemon's restart
                    raise Unavailable(f"Docker does not answer: {error}") from error
        self._idle.append(connection)
        return _decode_response(response.status, said)

    def exec_gid(self, mark: str) -> int | None:
        """The group id of the exec with this mark, by which all its processes are known: no process can leave its group.
        Two execs of one sandbox have the same one once in two thousand million times. None where the engine maps only
        few ids. Made from the mark, so that whoever knows the mark can kill the exec, also after a crash of ours."""
        number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8])
        return None if self.has_user_remapping else EXEC_GIDS[number % len(EXEC_GIDS)]

    def dial(self) -> socket.socket:
        """A new connection."""
        try:
            if self._host.scheme == "http":
                return socket.create_connection((self._host.hostname, self._host.port), timeout=CALL_TIMEOUT_SECONDS)
            if self._host.scheme == "http+unix":
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(CALL_TIMEOUT_SECONDS)
                connection.connect(self._host.path)
                return connection
        except OSError as error:
            raise Unavailable(f"Docker does not answer: {error}") from error
        raise Rejected("DOCKER_HOST has to be a unix socket or plain TCP: over TLS or ssh no stdin can be ended.")

    def cgroup(self, ref: str) -> Cgroup | None:
        """The container's memory cgroup, or None if it cannot be seen from here: that takes running on the container's
        host. Unlike the id of its first process, it stays the same when the container is started again."""
        if ref not in self.cgroups:
            with translate_errors():
                found = self.client.inspect_container(ref)
            if not found["State"]["Pid"]:
                return None
            if not shares_kernel(found):
                self.cgroups[ref] = None
                return None
            if len(self.cgroups) > 10_000:
                self.cgroups.clear()
            self.cgroups[ref] = _find_cgroup(found["State"]["Pid"], found["Id"])
        return self.cgroups[ref]

    def usage(self, ref: str) -> ResourceUsage | None:
        """What the container uses, or None while it does not run. The engine takes up to a second to say it, so the kernel is
        asked where that can be done from here."""
        with contextlib.suppress(OSError):  # it has stopped, or is gone
            if cgroup := self.cgroup(ref):
                return cgroup.usage()
        said = self.call("GET", f"/containers/{ref}/stats?stream=false&one-shot=true")
        memory = said["memory_stats"]
        if "usage" not in memory:  # it does not run, or this daemon has no control groups
            return None
        return ResourceUsage(
            said["cpu_stats"]["cpu_usage"]["total_usage"] // 1000, _memory_in_use(memory["usage"], memory["stats"])
        )

    def oom_kills(self, ref: str) -> int | None:
        """Processes that the kernel killed for memory in the container since it started; None: cannot be seen."""
        try:
            cgroup = self.cgroup(ref)
            lines = cgroup.oom.read_bytes().splitlines() if cgroup else []
        except (Missing, OSError):
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), None)

    def was_oom_killed(self, ref: str, before: int | None, since: float, exit_code: int) -> bool:
        """Did the kernel kill anything for memory since? By its own counter, or else by the engine's `oom` events."""
        after = self.oom_kills(ref)
        if before is not None and after is not None:
            return after > before
        until = time.time() + (0.5 if exit_code == 137 else 0)  # the event may come after the end that it explains
        span: dict[str, Any] = {"since": f"{since:.6f}", "until": f"{until:.6f}"}  # finer than the SDK's own conversion
        with translate_errors():
            return any(self.client.events(**span, filters={"container": ref, "event": "oom"}, decode=True))


def shares_kernel(inspected: Mapping[str, Any]) -> bool:
    """Are the container's processes this machine's? Under gVisor or Kata they are not: what is seen is the runtime."""
    return inspected["HostConfig"]["Runtime"] in SHARED_KERNEL_RUNTIMES


def _decode_response(status: int, content: bytes) -> Any:
    try:
        said = json.loads(content)
    except ValueError:
        said = {"message": content.decode(errors="replace")}
    if status >= 400:
        raise _to_provider_error(status, str(said.get("message", "")))
    return said


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
    found = Cgroup(directory / "cgroup.procs", *rest)
    # Seen from inside another container that number is some other process: the id in the path tells.
    return found if container in path and os.access(found.oom, os.R_OK) else None


class EngineExec:
    """One started exec: stdin goes out and frames come in over one connection, in one loop with a deadline."""

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        ref: str,
        exec_id: str,
        stdin: BinaryIO | None,
        mark: str,
        gid: int | None = None,
    ) -> None:
        self.ref, self.mark, self.gid = ref, mark, gid
        self.deadline = time.monotonic() + CALL_TIMEOUT_SECONDS
        self.idle: float | None = None  # seconds by which each progress puts off the deadline
        self.first = b""  # of what came: the engine's own words, if it could not start the program
        self._engine, self._connection, self._exec_id, self._stdin = engine, connection, exec_id, stdin
        self._unsent = memoryview(b"")
        self._read = bytearray()
        self._open = False  # the engine has taken the connection over; what came before would have been lost
        body = '{"Detach":false,"Tty":false}'
        head = (
            f"POST /v{engine.client.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\n"
            "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            connection.sendall((head + body).encode())
        except OSError as error:
            raise Unavailable(f"Docker does not answer: {error}") from error
        connection.setblocking(False)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """(1 for stdout or 2 for stderr, some bytes) until the connection ends. TimeoutError at the deadline; then it
        may be called again."""
        poll = select.poll()  # not select(): a busy server has more than 1024 descriptors
        while True:
            sending = self._open and self._stdin is not None
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if sending else 0))
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = poll.poll(left * 1000)
            if ready and self.idle:
                self.deadline = time.monotonic() + self.idle
            for _, event in ready:
                if event & ~select.POLLOUT:
                    if not self._receive():
                        return
                    yield from self._frames()
                if event & select.POLLOUT:
                    self._send()

    def collect(self, out: "BoundedBuffer", err: "BoundedBuffer") -> None:
        """Keep of both streams what there is room for, until they end. TimeoutError at the deadline."""
        for stream, chunk in self.frames():
            (err if stream == 2 else out).add(chunk)

    def ended(self) -> tuple[int, bool]:
        """The exit code, and whether the program was started at all. TimeoutError at the deadline."""
        pause = 0.002
        while (state := self._state())["Running"]:  # streams may end before the process does
            if time.monotonic() > self.deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        code = state["ExitCode"]
        return (137, True) if code is None else (code, bool(state["Pid"]))

    def lives(self) -> bool:
        """Does the engine still count its first process among the living?"""
        return bool(self._state()["Running"])

    def _state(self) -> dict[str, Any]:
        try:
            return dict(self._engine.call("GET", f"/exec/{self._exec_id}/json"))
        except Missing:  # of a container that stopped, or of one that is gone
            self._engine.call("GET", f"/containers/{self.ref}/json")
            return {"Running": False, "ExitCode": None}

    def _receive(self) -> bool:
        try:
            received = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._read += received
        if not self._open and b"\r\n\r\n" in self._read:
            self._accept_upgrade(*self._read.split(b"\r\n\r\n", 1))
        return bool(received)

    def _accept_upgrade(self, head: bytearray, rest: bytearray) -> None:
        status = int(head.split(maxsplit=2)[1])
        if status not in (101, 200):  # 404, 409 or 500: the container stopped since, and perhaps is gone
            raise Conflict(rest.decode(errors="replace").strip())
        self._open, self._read = True, rest

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        at = 0
        while self._open and len(self._read) - at >= 8:
            stream, length = struct.unpack_from(">BxxxI", self._read, at)
            if len(self._read) - at - 8 < length:
                break  # the engine's frames are of 32 KiB at most
            chunk = bytes(self._read[at + 8 : at + 8 + length])
            self.first = self.first or chunk
            yield stream, chunk
            at += 8 + length
        del self._read[:at]

    def _send(self) -> None:
        assert self._stdin is not None
        if not self._unsent:
            self._unsent = memoryview(self._stdin.read(CHUNK_BYTES))
        try:
            if self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
                return
            self._connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except ConnectionError:
            pass  # it ended, or closed its stdin, without reading everything: its right
        self._stdin = None


class BoundedBuffer:
    """The first `cap` bytes of a stream, and whether there were more."""

    def __init__(self, cap: int, content: bytes = b"") -> None:
        self._content, self._cap, self.truncated = bytearray(), cap, False
        self.add(content)

    def add(self, chunk: bytes) -> None:
        room = self._cap - len(self._content)
        self._content += chunk[:room]
        self.truncated |= len(chunk) > room

    def __bytes__(self) -> bytes:
        return bytes(self._content)
