"""Command execution in Docker containers: exec, deadlines and killing."""

import contextlib
import io
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, BinaryIO

from docker.errors import APIError

from sandboxes.agent.runs import AgentClient, NotStarted
from sandboxes.image import reap
from sandboxes.providers import recoveries
from sandboxes.providers.agent import runs
from sandboxes.providers.agent.commands import AgentCommandProvider, OomWatch
from sandboxes.providers.arguments import check_command
from sandboxes.providers.base import MARK_VARIABLE, WORKSPACE
from sandboxes.providers.command_results import ExecResult, OutputView
from sandboxes.providers.docker import agent_exec, parked_networks, replacement, volumes
from sandboxes.providers.docker.engine import Conflict, Engine, translate_errors
from sandboxes.providers.docker.exec_stream import EngineExec
from sandboxes.providers.errors import FailureCause, Missing, ProviderError, Stopped, Unavailable
from sandboxes.providers.recoveries import Recovery
from sandboxes.providers.streams import BoundedBuffer

AGENT_UID = 10001  # user id of the agent's commands, as in image/Dockerfile
PYTHON_COMMAND = ("python3", "-I", "-S")
KILL_TIMEOUT_SECONDS = 15.0  # after this, all processes of the container are killed instead of one exec's
START_RETRY_DELAYS_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)  # a busy engine takes seconds to notice a container's end


class _EngineOomWatch(OomWatch):
    """OOM kills of a container: by the kernel's counter, or else by the engine's events."""

    def __init__(self, engine: Engine, ref: str, since: float) -> None:
        self._engine, self._ref, self._since, self._before = engine, ref, since, engine.oom_kills(ref)

    def was_killed(self, exit_code: int) -> bool:
        return self._engine.was_oom_killed(self._ref, self._before, self._since, exit_code)


class ContainerCommandProvider(AgentCommandProvider):
    """Command verbs of DockerProvider, and the engine of the current process."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}

    @property
    def _engine(self) -> Engine:
        pid = os.getpid()  # a forked worker must not share its parent's connections
        if pid not in self._engines:
            with translate_errors():
                self._engines = {pid: Engine()}
        return self._engines[pid]

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
        check_command(argv, env, cwd)
        output = output or OutputView()
        run = self._build_run(argv, env, cwd, stdin, timeout, cap, mark, retain=retain, digest_data=digest_data)
        with self._translating_removal(ref):
            result = self._exec_by_agent(ref, run, output, retain=retain)
            if result:
                return result
            for delay in START_RETRY_DELAYS_SECONDS:
                try:
                    return self._exec(ref, argv, env, cwd, stdin, timeout, cap, mark, output)
                except Conflict as error:  # the container stopped before the exec started: nothing has run yet
                    reason = error
                    time.sleep(delay)
        raise Unavailable(f"No command can be started in {ref}: {reason}", cause=FailureCause.NOT_RUNNING)

    @abstractmethod
    def _recreate(self, ref: str, *, is_recovery: bool = True) -> bool:
        """Create the container of a sandbox again on its volumes. Return False unless all of them exist."""

    def _has_volumes(self, ref: str) -> bool:
        """Return whether the files of a sandbox exist, with which its container can be created again."""
        return volumes.find_kept(self._engine, ref) is not None

    @contextlib.contextmanager
    def _translating_removal(self, ref: str) -> Iterator[None]:
        """Raise Stopped in place of Missing while the files of the sandbox exist: only its container was removed."""
        try:
            yield
        except Missing as missing:
            if not self._has_volumes(ref):
                raise
            raise Stopped(f"The container of {ref} was removed during the operation.") from missing

    def _find_agent(self, ref: str) -> AgentClient | None:
        """See AgentCommandProvider. Also None for a removed container: the engine's exec creates it again on its volumes."""
        try:
            return agent_exec.find_agent(self._engine, ref)
        except Missing:
            if not self._has_volumes(ref):
                raise
            return None

    def _note_fallback(self, ref: str, error: NotStarted, mark: str = "") -> None:
        agent_exec.note_fallback(self._engine, ref, error, mark)

    def _watch_oom(self, ref: str, since: float) -> OomWatch:
        return _EngineOomWatch(self._engine, ref, since)

    def _has_stopped(self, ref: str, since: float) -> bool:
        return self._engine.has_stopped(ref, since)

    def _require_running(self, ref: str, since: float) -> None:
        with self._translating_removal(ref):
            if self._engine.ended_before(ref, since):
                raise NotStarted("The container was not running.", "not_running")
            self._require_not_stopped(ref, since)
        self._ensure_running(ref)

    def _kill_from_outside(self, ref: str, mark: str) -> None:
        if not self._kill_by_mark(ref, mark, None):
            with contextlib.suppress(Missing, Conflict), translate_errors():  # gone or not running: no process is left
                self._engine.client.kill(ref)

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
        output: OutputView,
    ) -> ExecResult:
        engine, started = self._engine, time.monotonic()
        out, err = BoundedBuffer(cap), BoundedBuffer(cap)
        output.attach(out, err)
        with self._running(ref, argv, env, cwd, io.BytesIO(stdin) if stdin else None, mark, engine.exec_gid(mark)) as run:
            oom_kills_before = engine.oom_kills(ref)
            began = time.monotonic()
            run.deadline = started + timeout.total_seconds()
            try:
                run.collect(out, err)
                exit_code, was_started = run.wait()
                timed_out = False
            except TimeoutError:
                with run.draining(out, err):
                    self._kill(run)
                exit_code, was_started, timed_out = 137, True, True
                run.deadline = time.monotonic() + 1
                with contextlib.suppress(TimeoutError):  # collect output written before the kill
                    run.collect(out, err)
        oom = engine.was_oom_killed(ref, oom_kills_before, started, exit_code)
        if exit_code > 128 and not timed_out and engine.has_stopped(ref, began):
            raise Stopped(f"{ref} stopped while the command ran{', with an OOM kill' if oom else ''}.")
        if not was_started:
            exit_code, out, err = _parse_start_failure(run.first_chunk, cap)
        return ExecResult(
            exit_code=exit_code,
            stdout=bytes(out),
            stderr=bytes(err),
            timed_out=timed_out,
            oom=oom,
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
        """Start an exec for the duration of the block. Kill the exec if the block raises an exception."""
        engine = self._engine
        variables = [f"{key}={value}" for key, value in {**env, MARK_VARIABLE: mark}.items()]
        exec_id = self._create_exec(
            ref, argv, AGENT_UID, gid or AGENT_UID, Env=variables, WorkingDir=cwd, AttachStdin=stdin is not None
        )
        with engine.dial() as connection:
            run, began = EngineExec(engine, connection, ref, exec_id, stdin, mark, gid), time.monotonic()
            run.check = lambda: self._require_not_stopped(ref, began)
            try:
                yield run
            except Conflict:
                raise  # the exec never started
            except BaseException:
                with contextlib.suppress(ProviderError), run.draining(BoundedBuffer(0), BoundedBuffer(0)):
                    self._kill(run)
                raise

    def _require_not_stopped(self, ref: str, since: float) -> None:
        """Raise Missing or Stopped unless the container has been running since `since` (monotonic clock)."""
        if self._has_stopped(ref, since):
            raise Stopped(f"{ref} stopped during the operation.")

    def _create_exec(self, ref: str, argv: Sequence[str], user: int, gid: int, **options: Any) -> str:
        """Create an exec, starting or resuming the container if necessary. Return the exec's id."""
        body = {"Cmd": [*argv], "User": f"{user}:{gid}", "AttachStdout": True, "AttachStderr": True, **options}
        for delay in (0.0, *START_RETRY_DELAYS_SECONDS[:-1]):
            time.sleep(delay)  # another command may be creating and starting the container
            try:
                self._wake(ref)
                return str(self._engine.call("POST", f"/containers/{ref}/exec", body)["Id"])
            except Conflict:
                self._ensure_running(ref)
            except Missing:
                if not replacement.complete_replacement(self._engine, ref) and not self._recreate(ref):
                    raise
        raise Unavailable(f"The container {ref} does not stay running", cause=FailureCause.NOT_RUNNING)

    def _start_stopped(self, ref: str) -> bool:
        """Start a container that has stopped, or was removed without its volumes. Return False if it was running."""
        try:
            inspected = self._inspect(ref)
        except Missing:
            if not replacement.complete_replacement(self._engine, ref) and not self._recreate(ref):
                raise
        else:
            if inspected["State"]["Running"]:
                return False
        self._ensure_running(ref)
        return True

    def _inspect(self, ref: str) -> dict[str, Any]:
        """Return the engine's document of a container. Raise Missing, also for a dead one, whose removal is finished first."""
        inspected: dict[str, Any] = self._engine.call("GET", f"/containers/{ref}/json")
        if replacement.finish_removal(self._engine, inspected):
            raise Missing(f"{ref} was being removed")
        return inspected

    def _ensure_running(self, ref: str) -> None:
        with contextlib.suppress(Conflict, Missing), translate_errors():  # another thread may be doing the same
            inspected = self._inspect(ref)
            if inspected["State"]["Paused"]:
                self._unpause(ref)
            elif not inspected["State"]["Running"]:
                self._start(ref, inspected["Id"])
                recoveries.report(Recovery.STARTED)
            else:
                self._wake(ref)

    def _wake(self, ref: str) -> None:
        """Resume a container whose processes are frozen, without a call of the engine if they are not. Raise Missing."""
        if self._engine.is_frozen(ref):
            self.resume(ref)

    def _unpause(self, ref: str) -> None:
        """Unpause a container that the engine has paused. The engine fails to if the container was thawed without it."""
        cgroup = self._engine.cgroup(ref)
        if cgroup and cgroup.freezer and cgroup.freezer.is_writable():
            with contextlib.suppress(OSError):
                cgroup.freezer.freeze()
        self._engine.client.unpause(ref)

    def _start(self, ref: str, container: str) -> None:
        """Start the container with this id, or a replacement if the engine has a stale task of this id.

        A container whose parked network namespace is gone is replaced, too."""
        client = self._engine.client
        try:
            client.start(container)  # no effect if it is running
        except APIError as error:
            if replacement.is_stale_task(error):
                reason = "stale task of a killed engine"
            elif parked_networks.is_gone(error, container):
                reason = "started again without its parked network namespace"
            else:
                raise
            replacement.replace_container(self._engine, ref, container, reason=reason)
            client.start(ref)

    def _kill(self, run: EngineExec) -> None:
        """Kill every process of an exec.

        1. Signal the processes from the host, where permitted. No process in the sandbox is needed, so agents cannot interfere.
        2. Otherwise run reap.py in the container.
        3. If both fail, kill the container. Other execs lose their processes and raise Stopped."""
        deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
        while self._kill_by_mark(run.ref, run.mark, run.gid):
            if not run.is_alive():
                return
            if time.monotonic() > deadline:  # the exec hangs before its program starts
                break
            time.sleep(0.02)
        with contextlib.suppress(Missing, Conflict), translate_errors():  # gone or not running: no process is left
            self._engine.client.kill(run.ref)

    def kill(self, ref: str, mark: str) -> None:
        try:
            self._kill_mark(ref, mark)
        except Missing:
            if not self._has_volumes(ref):
                raise  # else only the container was removed, and with it all processes

    def _kill_mark(self, ref: str, mark: str) -> None:
        self._wake(ref)  # a frozen process does not end before it is thawed
        agent = self._find_agent(ref)
        killed = agent is not None and runs.kill(agent, mark)  # also reaches daemons with an environment of their own
        gid = self._engine.exec_gid(mark)
        if self._kill_by_mark_on_host(ref, mark, gid):  # does not need the engine
            return
        if self.inspect(ref).running and not killed and not self._kill_by_mark_in_container(ref, mark, gid):
            raise Unavailable(f"The processes of exec {mark} in {ref} could not be killed")

    def _kill_by_mark(self, ref: str, mark: str, gid: int | None) -> bool:
        with contextlib.suppress(ProviderError):
            self._wake(ref)
        return self._kill_by_mark_on_host(ref, mark, gid) or self._kill_by_mark_in_container(ref, mark, gid)

    def _kill_by_mark_in_container(self, ref: str, mark: str, gid: int | None) -> bool:
        argv = [*PYTHON_COMMAND, "/opt/leasehold/reap.py", mark, *([str(gid)] if gid else [])]
        try:
            exec_id = self._create_exec(ref, argv, AGENT_UID, AGENT_UID, WorkingDir="/")
            with self._engine.dial() as connection:
                reaper = EngineExec(self._engine, connection, ref, exec_id, None, mark="")
                reaper.deadline = time.monotonic() + reap.KILL_TIMEOUT_SECONDS + 2
                reaper.collect(BoundedBuffer(0), BoundedBuffer(0))
                return reaper.wait() == (0, True)
        except (Unavailable, TimeoutError):
            return False

    def _kill_by_mark_on_host(self, ref: str, mark: str, gid: int | None) -> bool:
        if os.geteuid() != 0:
            return False
        try:
            cgroup = self._engine.cgroup(ref)
            if cgroup is None or not self._engine.container_id(ref):
                return False
            reap.kill_tree(mark, gid, pids=lambda: map(int, cgroup.processes.read_text().split()))
        except (OSError, Unavailable):  # OSError includes TimeoutError
            return False
        return True


def _parse_start_failure(message: bytes, cap: int) -> tuple[int, BoundedBuffer, BoundedBuffer]:
    """Translate the engine's message about a program that could not be started to (exit code, stdout, stderr).

    The engine writes the message to stdout. The exit code is that of a shell: 127 not found, 126 not executable. Raise Conflict
    if the container is the cause: it is stopping, or has reached its process limit."""
    text = message.decode(errors="replace").strip().removesuffix(": unknown")
    for prefix in ("OCI runtime exec failed: ", "exec failed: ", "unable to start container process: "):
        text = text.removeprefix(prefix)
    _, _, gvisor_message = text.removeprefix("executing processes for container: executing command ").partition(
        '" in sandbox: '
    )
    if gvisor_message.startswith(("error finding executable", "failed to load")):
        text = f"exec: {gvisor_message}"
    if not text.startswith(("exec: ", "exec ", "executable ", "chdir ")):  # about the container: "cannot exec in a ..."
        raise Conflict(text)
    is_missing = text.startswith("exec") and ("not found" in text or "no such file" in text)
    return 127 if is_missing else 126, BoundedBuffer(cap), BoundedBuffer(cap, f"{text}\n".encode())
