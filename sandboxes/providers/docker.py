"""Containers of a local Docker Engine. The container's name is the sandbox's name and its ref; everything it writes stays
in its own layer, so a container that stopped is started again and has lost only its processes.

Process 1 runs as another user than commands do, without capabilities: nothing an agent runs can end the sandbox, short
of the kernel doing so for memory. /tmp is in the layer too: as a tmpfs it would count against the memory limit."""

import contextlib
import io
import os
import re
import secrets
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from django.conf import settings
from docker import APIClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount
from docker.utils import kwargs_from_env, parse_host

from sandboxes.image import files, reap
from sandboxes.providers import base
from sandboxes.providers.base import (
    DATA, MARK, SOCKETS, WORKSPACE, BadPath, ExecResult, Found, Missing, NoFile, Provider, ProviderError, Rejected, Spec,
    TooLarge, Unavailable,
)  # fmt: skip

AGENT, KEEPER = 10001, 10002  # user ids, as in image/Dockerfile
OWN_GIDS = range(1 << 20, (1 << 31) - 1)
PYTHON = ("python3", "-I", "-S")
PATIENCE = 60  # seconds in which the engine answers one call, and in which a transfer of files makes some progress
KILL_PATIENCE = 15.0  # seconds until killing one exec gives way to killing the container
GONE_WITHIN = 30.0  # seconds in which a removal that others began has to end
CHUNK = 1 << 18
_FILE_ERRORS: dict[int, type[ProviderError]] = {
    files.NO_FILE: NoFile, files.BAD_PATH: BadPath, files.TOO_LARGE: TooLarge,
}  # fmt: skip


def answers() -> bool:
    """Is there a Docker daemon that answers, now and within two seconds?"""
    try:
        APIClient(**kwargs_from_env(), version="auto", timeout=1.5).close()
    except (DockerException, OSError):
        return False
    return True


class DockerProvider(Provider):
    """The provider for one machine; the daemon is the one that DOCKER_HOST names, over a unix socket or plain TCP."""

    name = "docker"
    isolated = True
    enforces_limits = True

    def __init__(self) -> None:
        self._engines: dict[int, _Engine] = {}

    @property
    def _engine(self) -> "_Engine":
        pid = os.getpid()  # a forked worker must not share its parent's connections
        if pid not in self._engines:
            with _asking():
                self._engines = {pid: _Engine()}
        return self._engines[pid]

    # --- being there --------------------------------------------------------------------------------------------

    def create(self, spec: Spec) -> str:
        client, image = self._engine.client, spec.image or settings.SANDBOX_IMAGE
        memory = spec.memory_mib << 20
        sockets = [Mount(SOCKETS, str(spec.sockets), type="bind", read_only=True)] if spec.sockets else []
        with _asking():
            host_config = client.create_host_config(
                network_mode="none",
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                ipc_mode="private",
                cgroupns="private",
                init=True,
                mem_limit=memory,
                memswap_limit=memory,
                nano_cpus=spec.millicpus * 1_000_000,
                pids_limit=spec.pids,
                mounts=sockets,
                log_config=LogConfig(type="none"),
            )
            try:
                client.create_container(
                    image,
                    name=spec.name,
                    entrypoint=["sleep", "infinity"],
                    hostname="sandbox",
                    user=f"{KEEPER}:{KEEPER}",
                    working_dir=WORKSPACE,
                    labels={
                        **{f"leasehold.{key}": value for key, value in base.label_safe(spec.labels.items()).items()},
                        "leasehold.owner": spec.owner,
                        "leasehold.name": spec.name,
                    },
                    host_config=host_config,
                    use_config_proxy=False,  # proxies of whoever runs this may carry passwords
                )
            except ImageNotFound as error:
                raise Rejected(f"There is no image {image} here. `manage.py build_image` makes it.") from error
            except APIError as error:
                if error.status_code != 409:
                    raise
                labels = client.inspect_container(spec.name)["Config"]["Labels"] or {}
                if labels.get("leasehold.owner") != spec.owner:
                    raise Rejected(f"The name {spec.name} is taken by a container that is not {spec.owner}'s.") from error
            client.start(spec.name)  # of one that runs: nothing happens
        return spec.name

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        why = "no answer"
        while (left := until - time.monotonic()) > 0:
            try:
                tried = self.exec(ref, ["true"], env={}, timeout=timedelta(seconds=left), mark=uuid.uuid4().hex)
                if tried.exit_code == 0:
                    return
                why = tried.stderr.decode(errors="replace")
            except Unavailable as error:
                why = str(error)
            time.sleep(0.1)
        raise Unavailable(f"{ref} is not ready after {timeout}: {why}")

    def destroy(self, ref: str) -> None:
        client, until = self._engine.client, time.monotonic() + GONE_WITHIN
        while time.monotonic() < until:
            try:
                with _asking():
                    client.remove_container(ref, force=True, v=True)
            except Missing:  # asked until it says so: 204 may come while another removal is at work
                self._engine.cgroups.pop(ref, None)
                return
            except _Conflict:  # somebody else's removal is in progress
                time.sleep(0.05)
        raise Unavailable(f"{ref} is still being removed")

    def inspect(self, ref: str) -> Found:
        with _asking():
            found = self._engine.client.inspect_container(ref)
        return Found(
            ref=found["Name"].lstrip("/"),
            name=found["Name"].lstrip("/"),
            running=found["State"]["Status"] == "running",
            created_at=datetime.fromisoformat(found["Created"]),
        )

    def list(self, owner: str) -> list[Found]:
        with _asking():
            found = self._engine.client.containers(all=True, filters={"label": f"leasehold.owner={owner}"})
        return [
            Found(
                ref=each["Labels"]["leasehold.name"],
                name=each["Labels"]["leasehold.name"],
                running=each["State"] == "running",
                created_at=datetime.fromtimestamp(each["Created"], UTC),
            )
            for each in found
        ]

    # --- commands -----------------------------------------------------------------------------------------------

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
        engine, started, since = self._engine, time.monotonic(), time.time()
        gid = engine.own_gid()
        out, err = _Kept(cap), _Kept(cap)
        with self._running(ref, argv, env, cwd, io.BytesIO(stdin) if stdin else None, mark, gid) as run:
            before = engine.oom_kills(ref)
            run.deadline = started + timeout.total_seconds()
            try:
                run.collect(out, err)
                exit_code, began = run.ended()
                timed_out = False
            except TimeoutError:
                self._kill(run)
                exit_code, began, timed_out = 137, True, True
                run.deadline = time.monotonic() + 1
                with contextlib.suppress(TimeoutError):  # what it had said before it was killed
                    run.collect(out, err)
        if not began:
            exit_code, out, err = _never_began(bytes(out), cap)
        return ExecResult(
            exit_code=exit_code,
            stdout=bytes(out),
            stderr=bytes(err),
            timed_out=timed_out,
            oom=engine.killed_for_memory(ref, before, since, exit_code),
            truncated=out.truncated or err.truncated,
            duration=timedelta(seconds=time.monotonic() - started),
        )

    @contextlib.contextmanager
    def _running(
        self,
        ref: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: BinaryIO | None,
        mark: str,
        gid: int | None = None,
    ) -> "Iterator[_Run]":
        """An exec that has been started. Whoever leaves before it ended has it killed."""
        _check_words(argv, env, cwd)
        engine = self._engine
        exec_id = self._exec_create(
            ref, argv, environment={**env, MARK: mark}, workdir=cwd, stdin=stdin is not None, user=f"{AGENT}:{gid or AGENT}"
        )
        with _asking(), engine.dial() as connection:
            run = _Run(engine, connection, ref, exec_id, stdin, mark, gid)
            try:
                yield run
            except BaseException:
                with contextlib.suppress(ProviderError):
                    self._kill(run)
                raise

    def _exec_create(self, ref: str, argv: Sequence[str], **options: Any) -> str:
        """Make an exec in the container, which runs afterwards whatever it did before."""
        client = self._engine.client
        for _ in range(5):
            with _asking():
                try:
                    return str(client.exec_create(ref, [*argv], **options)["Id"])
                except APIError as error:
                    if error.status_code != 409:
                        raise
                state = client.inspect_container(ref)["State"]
                with contextlib.suppress(_Conflict), _asking():  # another thread may be waking it too
                    if state["Paused"]:
                        client.unpause(ref)
                    elif not state["Running"]:
                        client.start(ref)
        raise Unavailable(f"{ref} does not stay running")

    def _kill(self, run: "_Run") -> None:
        """End every process of this exec: from inside; from here, if a fork bomb leaves the reaper no process to run in;
        and where that is not permitted, by killing the container's processes all together, which costs other execs
        in it theirs but no files."""
        until = time.monotonic() + KILL_PATIENCE
        while self._reap_inside(run) or self._reap_from_host(run):
            if not run.lives():
                return
            if time.monotonic() > until:  # it was starting while we looked, and does not get started either
                break
            time.sleep(0.02)
        with contextlib.suppress(Missing, _Conflict), _asking():  # not there, not running: then it is done
            self._engine.client.kill(run.ref)

    def _reap_inside(self, run: "_Run") -> bool:
        argv = [*PYTHON, "/opt/leasehold/reap.py", run.mark, *([str(run.gid)] if run.gid else [])]
        try:
            exec_id = self._exec_create(run.ref, argv, user=f"{AGENT}:{AGENT}", workdir="/")
            with _asking(), self._engine.dial() as connection:
                reaper = _Run(self._engine, connection, run.ref, exec_id, None, mark="")
                reaper.deadline = time.monotonic() + reap.PATIENCE + 2
                reaper.collect(_Kept(0), _Kept(0))
                return reaper.ended() == (0, True)
        except (Unavailable, TimeoutError):
            return False

    def _reap_from_host(self, run: "_Run") -> bool:
        try:
            cgroup = self._engine.cgroup(run.ref)
            if cgroup is None:
                return False
            reap.kill_tree(run.mark, run.gid, pids=lambda: map(int, (cgroup / "cgroup.procs").read_text().split()))
        except (OSError, TimeoutError):
            return False
        return True

    # --- files --------------------------------------------------------------------------------------------------

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        root, parts = base.under_roots(path)
        return self._files(ref, "read", root, str(limit), *parts, cap=limit)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        root, parts = base.under_roots(path)
        self._files(ref, "write", root, *parts, stdin=io.BytesIO(content))

    def remove_file(self, ref: str, path: str) -> None:
        root, parts = base.under_roots(path)
        self._files(ref, "remove", root, *parts)

    def get_files(self, ref: str, root: str) -> Iterator[bytes]:
        yield from self._files_stream(ref, ("pack", _root(root)))

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        self._files(ref, "unpack", _root(root), stdin=tar)

    def size(self, ref: str, root: str) -> int:
        said = self._files(ref, "size", _root(root), cap=20)
        if not said.strip().isdigit():
            raise Unavailable(f"{ref} did not say how much is in {root}")
        return int(said)

    def _files(self, ref: str, *words: str, stdin: BinaryIO | None = None, cap: int = 0) -> bytes:
        """What image/files.py answers; at most `cap` bytes, whatever the sandbox says."""
        out = _Kept(cap)
        for chunk in self._files_stream(ref, words, stdin):
            out.add(chunk)
        return bytes(out)

    def _files_stream(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        err = _Kept(4096)
        argv = (*PYTHON, "/opt/leasehold/files.py", *words)
        with self._running(ref, argv, {}, "/", stdin or io.BytesIO(), uuid.uuid4().hex) as run:
            run.idle = PATIENCE
            try:
                for stream, chunk in run.frames():
                    if stream == 2:
                        err.add(chunk)
                    else:
                        yield chunk
                exit_code, _ = run.ended()
            except TimeoutError as error:
                raise Unavailable(f"{ref} took longer than {PATIENCE} s over {words[0]} in {words[1]}") from error
        if exit_code:
            said = bytes(err).decode(errors="replace").strip() or f"exit code {exit_code}"
            raise _FILE_ERRORS.get(exit_code, Unavailable)(said)


class _Conflict(Unavailable):
    """409: the container is in a state, or in other hands, in which this cannot be done."""


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Whatever the engine or the way to it says becomes one of the port's three errors."""
    try:
        yield
    except NotFound as error:
        raise Missing(error.explanation or str(error)) from error
    except APIError as error:
        kind = _Conflict if error.status_code == 409 else Rejected if error.is_client_error() else Unavailable
        raise kind(error.explanation or str(error)) from error
    except TimeoutError:
        raise  # our own deadline; those of the SDK are RequestExceptions
    except (DockerException, OSError) as error:
        raise Unavailable(f"Docker does not answer: {error}") from error


class _Engine:
    """One process's way to the daemon. The client's connections are pooled; threads may share it."""

    def __init__(self) -> None:
        self.client = APIClient(**kwargs_from_env(), version="auto", timeout=PATIENCE, max_pool_size=64)
        self.cgroups: dict[str, Path | None] = {}
        options = " ".join(self.client.info().get("SecurityOptions") or [])
        self._remapped = "name=userns" in options or "name=rootless" in options

    def own_gid(self) -> int | None:
        """A group id for one exec, by which all its processes are known: no process can leave its group. Two execs of
        one sandbox draw the same one once in two thousand million times. None where the engine maps only few ids."""
        return None if self._remapped else secrets.choice(OWN_GIDS)

    def dial(self) -> socket.socket:
        """A connection of its own. The SDK's would do, but reads ahead into a buffer that it then leaves behind."""
        host = urlsplit(parse_host(os.environ.get("DOCKER_HOST"), tls="tls" in kwargs_from_env()))
        if host.scheme == "http+unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(PATIENCE)
            connection.connect(host.path)
        elif host.scheme == "http":
            connection = socket.create_connection((host.hostname, host.port), timeout=PATIENCE)
        else:  # neither can end stdin and still read stdout
            raise Rejected("DOCKER_HOST has to be a unix socket or plain TCP, not TLS or ssh.")
        return connection

    # --- the kernel's side of a container; readable only where we run on its host, with the right to ---

    def cgroup(self, ref: str) -> Path | None:
        """The container's memory cgroup, or None if it cannot be seen from here. Unlike its first process's id, the
        path stays the same when the container is started again."""
        if ref not in self.cgroups:
            if len(self.cgroups) > 10_000:
                self.cgroups.clear()
            found = self.client.inspect_container(ref)
            if not found["State"]["Pid"]:
                return None
            self.cgroups[ref] = _cgroup_of(found["State"]["Pid"], found["Id"])
        return self.cgroups[ref]

    def oom_kills(self, ref: str) -> int | None:
        """How many processes the kernel has killed for memory in the container since it started; None: cannot be seen."""
        try:
            cgroup = self.cgroup(ref)
        except NotFound:
            return None
        for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
            with contextlib.suppress(OSError):
                if cgroup and (count := re.search(r"^oom_kill (\d+)$", (cgroup / name).read_text(), re.MULTILINE)):
                    return int(count[1])
        return None

    def killed_for_memory(self, ref: str, before: int | None, since: float, exit_code: int) -> bool:
        """Did the kernel kill anything for memory since? By its own counter, or else by the engine's `oom` events."""
        after = self.oom_kills(ref)
        if before is not None and after is not None:
            return after > before
        until = time.time() + (0.5 if exit_code == 137 else 0)  # the event may come after the end that it explains
        filters = {"container": ref, "event": "oom"}
        with _asking():
            return any(self.client.events(since=f"{since:.6f}", until=f"{until:.6f}", filters=filters, decode=True))


def _cgroup_of(pid: int, container: str) -> Path | None:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {controller: path for _, names, path in (line.split(":", 2) for line in lines) for controller in names.split(",")}
    root, path = ("/sys/fs/cgroup/memory", paths["memory"]) if "memory" in paths else ("/sys/fs/cgroup", paths.get("", ""))
    cgroup = Path(root + path)
    # Seen from inside another container that number is another process: the id in the path tells.
    return cgroup if container in path and cgroup.is_dir() else None


class _Run:
    """One started exec: stdin goes out and frames come in over one connection, in one loop with a deadline."""

    def __init__(
        self,
        engine: _Engine,
        connection: socket.socket,
        ref: str,
        exec_id: str,
        stdin: BinaryIO | None,
        mark: str,
        gid: int | None = None,
    ) -> None:
        self.ref, self.mark, self.gid = ref, mark, gid
        self.deadline = time.monotonic() + PATIENCE
        self.idle: float | None = None  # seconds by which each progress puts off the deadline
        self._engine, self._connection, self._exec_id, self._stdin = engine, connection, exec_id, stdin
        self._unsent = memoryview(b"")
        self._read = bytearray()
        self._open = False  # the engine has taken the connection over; what came before would have been lost
        body = b'{"Detach":false,"Tty":false}'
        connection.sendall(
            f"POST /v{engine.client.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\n"
            "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
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

    def collect(self, out: "_Kept", err: "_Kept") -> None:
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
            return dict(self._engine.client.exec_inspect(self._exec_id))
        except NotFound:  # so is every exec of a container that stopped
            self._engine.client.inspect_container(self.ref)
            return {"Running": False, "ExitCode": None}

    def _receive(self) -> bool:
        try:
            received = self._connection.recv(CHUNK)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._read += received
        if not self._open and b"\r\n\r\n" in self._read:
            self._open_with(*self._read.split(b"\r\n\r\n", 1))
        return bool(received)

    def _open_with(self, head: bytearray, rest: bytearray) -> None:
        status = int(head.split(maxsplit=2)[1])
        if status not in (101, 200):
            raise {404: Missing, 409: _Conflict}.get(status, Unavailable)(rest.decode(errors="replace").strip())
        self._open, self._read = True, rest

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        at = 0
        while self._open and len(self._read) - at >= 8:
            stream, length = struct.unpack_from(">BxxxI", self._read, at)
            if len(self._read) - at - 8 < length:
                break  # the engine's frames are of 32 KiB at most
            yield stream, bytes(self._read[at + 8 : at + 8 + length])
            at += 8 + length
        del self._read[:at]

    def _send(self) -> None:
        assert self._stdin is not None
        if not self._unsent:
            self._unsent = memoryview(self._stdin.read(CHUNK))
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


class _Kept:
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


def _never_began(said: bytes, cap: int) -> tuple[int, _Kept, _Kept]:
    """A shell's exit code, and stderr, for what the engine reports on stdout when a program could not be started."""
    text = said.decode(errors="replace").strip().removesuffix(": unknown")
    text = text.removeprefix("OCI runtime exec failed: exec failed: ").removeprefix("unable to start container process: ")
    absent = text.startswith("exec: ") and ("not found" in text or "no such file" in text)
    return 127 if absent else 126, _Kept(cap), _Kept(cap, f"{text}\n".encode())


def _check_words(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    if not argv:
        raise Rejected("There is no command to run.")
    if not cwd.startswith("/"):
        raise Rejected("cwd is an absolute path.")
    if any(not key or "=" in key for key in env):
        raise Rejected("The name of an environment variable is not empty and has no '='.")
    for word in (*argv, *env, *env.values(), cwd):
        if "\0" in word or not _is_text(word):
            raise Rejected("Arguments and environment are text without NUL.")


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _root(path: str) -> str:
    if path not in (WORKSPACE, DATA):
        raise BadPath(f"only {WORKSPACE} and {DATA} are kept")
    return path
