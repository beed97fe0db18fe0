"""Containers of a local Docker Engine. The container's name is the sandbox's name and its ref. Two volumes belong to it,
one for /workspace and one for /data, so a container that stopped is started again and has lost its processes and what
was in its tmpfs, no more.

Everything else in it is read-only. Process 1 runs as another user than commands do, without capabilities: nothing an
agent runs can end the sandbox, short of the kernel doing so for memory."""

import contextlib
import io
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from django.conf import settings
from docker import APIClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount, Ulimit
from docker.utils import kwargs_from_env

from sandboxes.image import reap
from sandboxes.providers import base
from sandboxes.providers.base import (
    DATA,
    MARK_VARIABLE,
    SOCKETS_DIRECTORY,
    WORKSPACE,
    ExecResult,
    Missing,
    ProviderError,
    ProviderSandbox,
    Rejected,
    ResourceUsage,
    SandboxSpec,
    Unavailable,
)
from sandboxes.providers.docker import seccomp
from sandboxes.providers.docker.engine import (
    CALL_TIMEOUT_SECONDS,
    BoundedBuffer,
    Conflict,
    Engine,
    EngineExec,
    translate_errors,
)
from sandboxes.providers.docker.files import AGENT_UID, PYTHON_COMMAND, ContainerFilesProvider
from sandboxes.providers.launcher import BackgroundProcessProvider

CREATED_AT_LABEL = (
    "leasehold.made_at"  # label of volumes: the engine's own time of one is its directory's, which agents can set
)
INIT_UID = 10002  # user id of process 1, as in image/Dockerfile
INIT_COMMAND = (
    "python3",
    "-I",
    "-S",
    "/opt/leasehold/bridge.py",
    base.EGRESS_LOOPBACK_ADDRESS.rpartition(":")[2],
    base.LLM_SOCKET,
)
KILL_TIMEOUT_SECONDS = 15.0  # seconds until killing one exec gives way to killing the container
REMOVAL_TIMEOUT_SECONDS = 30.0  # seconds in which a removal that others began has to end
# Directories in memory, each by its size as a part of the sandbox's memory, against which what they hold counts. Full to
# the brim, with all the files they can have, they leave more than half of it: so commands still start, and can clean up.
TMPFS_MEMORY_SHARES = {"/tmp": 1 / 4, "/var/tmp": 1 / 16, "/dev/shm": 1 / 16, "/run": 1 / 64}  # noqa: S108 - these are the sandbox's
SHM_MEMORY_SHARE = 1 / 16  # the same for its shared memory, which no process's end gives back either
BYTES_PER_INODE = 16 << 10  # a file in memory takes the kernel about a KiB, which counts too


def is_daemon_available() -> bool:
    """Is there a Docker daemon that answers, now and within two seconds?"""
    try:
        APIClient(**kwargs_from_env(), version="auto", timeout=1).close()
    except (DockerException, OSError):
        return False
    return True


class DockerProvider(ContainerFilesProvider, BackgroundProcessProvider):
    """The provider for one machine; the daemon is the one that DOCKER_HOST names, over a unix socket or plain TCP."""

    name = "docker"
    isolated = True
    enforces_limits = True
    measures_usage = True

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}

    @property
    def _engine(self) -> Engine:
        pid = os.getpid()  # a forked worker must not share its parent's connections
        if pid not in self._engines:
            with translate_errors():
                self._engines = {pid: Engine()}
        return self._engines[pid]

    # --- being there --------------------------------------------------------------------------------------------

    def create(self, spec: SandboxSpec) -> str:
        client, until = self._engine.client, time.monotonic() + CALL_TIMEOUT_SECONDS
        while time.monotonic() < until:
            with translate_errors():
                if self._make(spec) or self._is_own_container(spec):
                    self._check_volume_owner(spec)
                    client.start(spec.name)  # of one that runs: nothing happens
                    return spec.name
            time.sleep(0.05)
        raise Unavailable(f"The name {spec.name} is taken, and no container has it.")

    def _make(self, spec: SandboxSpec) -> bool:
        """Make the container; False if its name is taken."""
        client, memory, image = self._engine.client, spec.memory_mib << 20, spec.image or settings.SANDBOX_IMAGE
        mounts = [Mount(SOCKETS_DIRECTORY, str(spec.sockets), type="bind", read_only=True)] if spec.sockets else []
        if spec.data:  # rslave: what is mounted on it out here appears inside, and nothing the other way
            mounts.append(Mount(DATA, str(spec.data), type="bind", propagation="rslave"))
        ours = {"leasehold.owner": spec.owner, "leasehold.name": spec.name}
        made = {**ours, CREATED_AT_LABEL: datetime.now(UTC).isoformat()}
        for name, place in _list_volumes(spec):  # made together with the container, from what the image has there
            mounts.append(Mount(place, name, type="volume", labels=made))
        labels = base.truncate_labels((f"leasehold.{key}", value) for key, value in spec.labels.items())
        host_config = client.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true", f"seccomp={seccomp.build_profile()}"],
            ipc_mode="private",
            cgroupns="private",
            init=True,
            read_only=not spec.writable_root,
            tmpfs={path: _tmpfs_options(path, int(memory * part)) for path, part in TMPFS_MEMORY_SHARES.items()},
            sysctls=_sysv_ipc_sysctls(memory),
            ulimits=[Ulimit(name="core", soft=0, hard=0)],
            runtime=settings.DOCKER_RUNTIME or None,
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=spec.millicpus * 1_000_000,
            pids_limit=spec.pids,
            mounts=mounts,
            log_config=LogConfig(type="none"),
        )
        try:
            client.create_container(
                image,
                name=spec.name,
                entrypoint=[*INIT_COMMAND],
                environment=base.EGRESS_ENVIRONMENT | {"LLM_SOCKET": base.LLM_SOCKET},
                hostname="sandbox",
                user=f"{INIT_UID}:{INIT_UID}",
                working_dir=WORKSPACE,
                labels={**labels, **ours},
                host_config=host_config,
                use_config_proxy=False,  # proxies of whoever runs this may carry passwords
            )
        except ImageNotFound as error:
            raise Rejected(f"There is no image {image} here. `manage.py build_image` makes it.") from error
        except APIError as error:
            if error.status_code == 409:
                return False
            if error.status_code in (400, 404) and "runtime" in str(error.explanation).lower():
                raise Rejected(
                    f"LEASEHOLD_DOCKER_RUNTIME={settings.DOCKER_RUNTIME}: the Docker daemon has no such runtime. Its own "
                    f"configuration names them. ({error.explanation})"
                ) from error
            raise
        return True

    def _is_own_container(self, spec: SandboxSpec) -> bool:
        """Is the container of this name the one that was asked for? False if there is none yet, or none any more: the
        engine takes a name before it shows the container, and gives it back after."""
        try:
            found = self._engine.client.inspect_container(spec.name)
        except NotFound:
            return False
        if (found["Config"]["Labels"] or {}).get("leasehold.owner") != spec.owner:
            raise Rejected(f"The name {spec.name} is taken by a container of somebody else.")
        return found["State"]["Status"] != "removing"

    def _check_volume_owner(self, spec: SandboxSpec) -> None:
        """Rejected, and no container, if a volume that was there before took the place of one of its own."""
        for name, _ in _list_volumes(spec):
            labels = self._engine.call("GET", f"/volumes/{name}")["Labels"] or {}
            if (labels.get("leasehold.owner"), labels.get("leasehold.name")) != (spec.owner, spec.name):
                self._engine.client.remove_container(spec.name, force=True)
                raise Rejected(f"The name {name} is taken by a volume of somebody else.")

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        why = "no answer"
        while (left := until - time.monotonic()) > 0:
            if self._is_init_running(ref):
                return
            try:
                tried = self.exec(ref, ["true"], env={}, timeout=timedelta(seconds=left), mark=uuid.uuid4().hex)
                if tried.exit_code == 0:
                    return
                why = tried.stderr.decode(errors="replace")
            except Unavailable as error:
                why = str(error)
            time.sleep(0.1)
        raise Unavailable(f"{ref} is not ready after {timeout}: {why}")

    def _is_init_running(self, ref: str) -> bool:
        """Has the program begun that keeps it running? False also where its processes cannot be seen from here."""
        try:
            cgroup = self._engine.cgroup(ref)
            pids = cgroup.processes.read_text().split() if cgroup else []
            return any(b"bridge.py" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        except OSError:
            return False

    def destroy(self, ref: str) -> None:
        client, until = self._engine.client, time.monotonic() + REMOVAL_TIMEOUT_SECONDS
        while time.monotonic() < until:
            try:
                with translate_errors():
                    client.remove_container(ref, force=True, v=True)
                continue
            except Missing:  # asked until it says so: 204 may come while another removal is at work
                self._engine.cgroups.pop(ref, None)
                self._engine.first_processes.pop(ref, None)
                if self._remove_volumes(ref):
                    return
            except Conflict:  # somebody else's removal is in progress
                pass
            time.sleep(0.05)
        raise Unavailable(f"{ref} is still being removed")

    def _remove_volumes(self, ref: str) -> bool:
        """Remove the volumes that this sandbox's container left; False if one is in use still, or again."""
        for name, _ in _list_volumes(SandboxSpec(ref, owner="")):
            try:
                found = self._engine.call("GET", f"/volumes/{name}")
                if (found["Labels"] or {}).get("leasehold.name") == ref:
                    self._engine.call("DELETE", f"/volumes/{name}")
            except Missing:
                continue
            except Conflict:
                return False
        return True

    def inspect(self, ref: str) -> ProviderSandbox:
        with translate_errors():
            found = self._engine.client.inspect_container(ref)
        return ProviderSandbox(
            ref=found["Name"].lstrip("/"),
            name=found["Name"].lstrip("/"),
            running=found["State"]["Status"] == "running",
            created_at=datetime.fromisoformat(found["Created"]),
        )

    def stats(self, ref: str) -> ResourceUsage | None:
        return self._engine.usage(ref)

    def list(self, owner: str) -> list[ProviderSandbox]:
        label = {"label": f"leasehold.owner={owner}"}
        with translate_errors():
            volumes = self._engine.client.volumes(filters=label)["Volumes"] or []  # first: a container has its own till later
            containers = self._engine.client.containers(all=True, filters=label)
        found = [
            ProviderSandbox(
                ref=name,
                name=name,
                running=each["State"] == "running",
                created_at=datetime.fromtimestamp(each["Created"], UTC),
            )
            for each in containers
            if (name := each["Labels"].get("leasehold.name"))  # ours always have one
        ]
        return found + _find_remnants(volumes, {each.name for each in found})

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
        for pause in (0.05, 0.1, 0.2, 0.5, 1.0):
            try:
                return self._exec(ref, argv, env, cwd, stdin, timeout, cap, mark)
            except Conflict as error:  # it stopped between our asking and the start: nothing has run yet
                why = error
                time.sleep(pause)
        raise Unavailable(f"Nothing can be started in {ref}: {why}")

    def _exec(
        self,
        ref: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: bytes,
        timeout: timedelta,
        cap: int,
        mark: str,
    ) -> ExecResult:
        engine, started, since = self._engine, time.monotonic(), time.time()
        out, err = BoundedBuffer(cap), BoundedBuffer(cap)
        with self._running(ref, argv, env, cwd, io.BytesIO(stdin) if stdin else None, mark, engine.exec_gid(mark)) as run:
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
            exit_code, out, err = _parse_start_failure(run.first, cap)
        return ExecResult(
            exit_code=exit_code,
            stdout=bytes(out),
            stderr=bytes(err),
            timed_out=timed_out,
            oom=engine.was_oom_killed(ref, before, since, exit_code),
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
    ) -> Iterator[EngineExec]:
        """An exec that has been started. Whoever leaves before it ended has it killed."""
        _check_command(argv, env, cwd)
        engine = self._engine
        said = [f"{key}={value}" for key, value in {**env, MARK_VARIABLE: mark}.items()]
        exec_id = self._create_exec(
            ref, argv, AGENT_UID, gid or AGENT_UID, Env=said, WorkingDir=cwd, AttachStdin=stdin is not None
        )
        with engine.dial() as connection:
            run = EngineExec(engine, connection, ref, exec_id, stdin, mark, gid)
            try:
                yield run
            except Conflict:
                raise  # it never started
            except BaseException:
                with contextlib.suppress(ProviderError):
                    self._kill(run)
                raise

    def _create_exec(self, ref: str, argv: Sequence[str], user: int, gid: int, **options: Any) -> str:
        """Make an exec in the container, which runs afterwards whatever it did before; its id."""
        body = {"Cmd": [*argv], "User": f"{user}:{gid}", "AttachStdout": True, "AttachStderr": True, **options}
        for _ in range(5):
            try:
                return str(self._engine.call("POST", f"/containers/{ref}/exec", body)["Id"])
            except Conflict:
                self._ensure_running(ref)
        raise Unavailable(f"{ref} does not stay running")

    def _ensure_running(self, ref: str) -> None:
        client = self._engine.client
        with contextlib.suppress(Conflict), translate_errors():  # another thread may be at it too
            state = client.inspect_container(ref)["State"]
            if state["Paused"]:
                client.unpause(ref)
            elif not state["Running"]:
                client.start(ref)

    def _kill(self, run: EngineExec) -> None:
        """End every process of this exec: from here, where we may signal them, because that needs no process of the
        sandbox and cannot be disturbed; else by a reaper inside; and if that cannot do it either, by killing
        all that runs in the container, which costs its other execs their processes, and no files."""
        until = time.monotonic() + KILL_TIMEOUT_SECONDS
        while self._kill_by_mark(run.ref, run.mark, run.gid):
            if not run.lives():
                return
            if time.monotonic() > until:  # it is still about to start, and does not get there
                break
            time.sleep(0.02)
        with contextlib.suppress(Missing, Conflict), translate_errors():  # not there, or not running: then it is done
            self._engine.client.kill(run.ref)

    def _output_directory(self, ref: str) -> str:
        return "/tmp/.leasehold"  # noqa: S108 - in the container

    def kill(self, ref: str, mark: str) -> None:
        if self.inspect(ref).running and not self._kill_by_mark(ref, mark, self._engine.exec_gid(mark)):
            raise Unavailable(f"The processes of {mark} in {ref} could not be killed")

    def _kill_by_mark(self, ref: str, mark: str, gid: int | None) -> bool:
        return self._kill_by_mark_on_host(ref, mark, gid) or self._kill_by_mark_in_container(ref, mark, gid)

    def _kill_by_mark_in_container(self, ref: str, mark: str, gid: int | None) -> bool:
        argv = [*PYTHON_COMMAND, "/opt/leasehold/reap.py", mark, *([str(gid)] if gid else [])]
        try:
            exec_id = self._create_exec(ref, argv, AGENT_UID, AGENT_UID, WorkingDir="/")
            with self._engine.dial() as connection:
                reaper = EngineExec(self._engine, connection, ref, exec_id, None, mark="")
                reaper.deadline = time.monotonic() + reap.KILL_TIMEOUT_SECONDS + 2
                reaper.collect(BoundedBuffer(0), BoundedBuffer(0))
                return reaper.ended() == (0, True)
        except (Unavailable, TimeoutError):
            return False

    def _kill_by_mark_on_host(self, ref: str, mark: str, gid: int | None) -> bool:
        if os.geteuid() != 0:
            return False
        try:
            cgroup = self._engine.cgroup(ref)
            if cgroup is None:
                return False
            reap.kill_tree(mark, gid, pids=lambda: map(int, cgroup.processes.read_text().split()))
        except (OSError, Unavailable):  # with TimeoutError
            return False
        return True


def _list_volumes(spec: SandboxSpec) -> list[tuple[str, str]]:
    """(name of a volume, where it is mounted) for each that belongs to the sandbox."""
    workspace, data = (f"{spec.name}-workspace", WORKSPACE), (f"{spec.name}-data", DATA)
    return [workspace] if spec.data else [workspace, data]


def _tmpfs_options(path: str, size: int) -> str:
    """Mount options. Programs may run in it: agents' tools build there, and could run what they like anywhere."""
    rights = f"mode=0755,uid={AGENT_UID},gid={AGENT_UID}" if path == "/run" else "mode=1777"
    return f"rw,nosuid,nodev,exec,size={size},nr_inodes={max(size // BYTES_PER_INODE, 16)},{rights}"


def _sysv_ipc_sysctls(memory: int) -> dict[str, str]:
    """Limits on what is kept without any process. By default it could be all of the sandbox's memory."""
    pages = int(memory * SHM_MEMORY_SHARE) // os.sysconf("SC_PAGE_SIZE")
    return {"kernel.shmall": str(pages), "kernel.msgmni": "16", "kernel.sem": "250 8000 32 32"}


def _find_remnants(volumes: Sequence[Mapping[str, Any]], there: Collection[str]) -> list[ProviderSandbox]:
    """The sandboxes of which only volumes are left."""
    made = {each["Labels"]["leasehold.name"]: each["Labels"][CREATED_AT_LABEL] for each in volumes}
    return [
        ProviderSandbox(ref=name, name=name, running=False, created_at=datetime.fromisoformat(at), is_remnant=True)
        for name, at in made.items()
        if name not in there
    ]


def _parse_start_failure(said: bytes, cap: int) -> tuple[int, BoundedBuffer, BoundedBuffer]:
    """A shell's exit code, and stderr, for what the engine reports on stdout when a program could not be started.
    Conflict if it was for the container's sake: it is stopping, or full."""
    text = said.decode(errors="replace").strip().removesuffix(": unknown")
    for prefix in ("OCI runtime exec failed: ", "exec failed: ", "unable to start container process: "):
        text = text.removeprefix(prefix)
    _, _, of_gvisor = text.removeprefix("executing processes for container: executing command ").partition('" in sandbox: ')
    if of_gvisor.startswith(("error finding executable", "failed to load")):
        text = f"exec: {of_gvisor}"
    if not text.startswith(("exec: ", "exec ", "executable ", "chdir ")):  # not about the program: "cannot exec in a ..."
        raise Conflict(text)
    absent = text.startswith("exec") and ("not found" in text or "no such file" in text)
    return 127 if absent else 126, BoundedBuffer(cap), BoundedBuffer(cap, f"{text}\n".encode())


def _check_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
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
