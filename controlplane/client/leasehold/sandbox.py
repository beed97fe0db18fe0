"""Sandbox: blocking client of one leased sandbox."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from . import schemas
from .api import Command, LeaseApi, split_path
from .archives import pack_directory, unpack_archive
from .errors import LeaseholdError, SandboxClosed
from .exchange import Operation, RetryPolicy
from .lease import HeldLease, LeaseOptions
from .results import AgentEvent, ExecResult, OutputPart, RunResult
from .settings import Settings, load_agent
from .transports import Stream, Transport

T = TypeVar("T")
Item = TypeVar("Item")
FileEntries = list[schemas.FileEntry]  # classes below have a method `list`
ProcessList = list[schemas.Process]
LinkNames = list[str]


class SandboxBase:
    """Arguments of a sandbox, and the state of its lease."""

    def __init__(
        self,
        environment_type: str = "coding",
        *,
        agent: str | None = None,
        environment: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
        release: bool | None = None,
        ttl_seconds: int | None = None,
        max_ttl_seconds: int | None = None,
        sleep_after: int | str | None = None,
        pool: str | None = None,
        resources: schemas.ResourcesRequest | None = None,
        wait_seconds: int | None = None,
        retries: RetryPolicy | None = None,
    ) -> None:
        """Lease a sandbox of `environment_type` at the beginning of the `with` block.

        - `agent`: DID; default: LEASEHOLD_AGENT, or the only agent of the key.
        - `environment`: environment to join; default: one of its own. The agent's active lease in it is used, if there is one.
        - `url`, `api_key`: default: LEASEHOLD_URL and LEASEHOLD_API_KEY.
        - `release`: release the lease at the end; default: if the join granted it.
        - `ttl_seconds`: time for which the lease outlives a program that was killed. It is renewed while the block is open.
          Default: 120, and that of the environment type with `release=False`.
        - `max_ttl_seconds`, `sleep_after`, `pool`, `resources`, `wait_seconds`: as in the HTTP API."""
        options = LeaseOptions(
            environment_type, load_agent(agent), environment, release,
            {
                "ttl_seconds": ttl_seconds, "max_ttl_seconds": max_ttl_seconds, "sleep_after": sleep_after, "pool": pool,
                "resources": resources, "wait_seconds": wait_seconds,
            },
        )  # fmt: skip
        self._held = HeldLease(Settings.load(url, api_key, retries), options)
        self._was_opened = self._is_closed = False
        self._finalizer = weakref.finalize(self, self._held.abandon)
        self._finalizer.atexit = False  # cleanup.release_all releases the lease then

    @property
    def lease(self) -> schemas.Lease:
        """The lease as the join returned it."""
        return self._held.require_open()

    @property
    def lease_id(self) -> str:
        return self.lease["id"]

    @property
    def environment(self) -> str:
        return self._held.environment

    def _begin_opening(self) -> None:
        if self._was_opened:
            raise SandboxClosed("The sandbox was opened before. Create another one.")
        self._was_opened = True

    def _require_open(self) -> LeaseApi:
        if self._is_closed:
            raise SandboxClosed("The sandbox was released.")
        return LeaseApi(self._held.require_open()["id"], self._held.settings.retries)


class Sandbox(SandboxBase):
    """Sandbox of one lease.

    with Sandbox("coding") as box:
        print(box.exec("uname -a").stdout)"""

    _transport: Transport

    def open(self) -> Self:
        """Join the environment, which starts the sandbox. The beginning of a `with` block does the same."""
        self._begin_opening()
        self._transport = Transport(self._held.settings)
        try:
            self._transport.run(self._held.open())
        except BaseException as error:
            self._is_closed = True
            self._transport.close()
            self._held.release_after(error)
            raise
        return self

    def release(self) -> None:
        """End the lease, unless it is another program's. Idempotent. The end of a `with` block does the same."""
        if self._is_closed or self._held.document is None:
            return
        self._is_closed = True
        try:
            self._transport.run(self._held.close())
            self._finalizer.detach()
        finally:
            self._transport.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.release()
        except LeaseholdError as failure:
            if error is None:
                raise
            error.add_note(f"The lease was not released and ends by its ttl: {failure}")

    def exec(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | bytes = "",
        timeout: int | None = None,
        shell: str | None = None,
        run_id: str | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Execute a command: a list of arguments, or a script for `sh`. A command that fails or times out is a result.

        `timeout` in seconds, default: that of the server. `shell`: name of a shell of the lease. `run_id`: random UUID of the
        run; a repeated call with it executes nothing and returns the first result. `check`: raise CommandFailed unless the exit
        code is 0. Raise OutcomeUnknown if the command may have been executed and its result is not known."""
        operation = self._require_open().exec(
            command, env=env, cwd=cwd, stdin=stdin, timeout=timeout, shell=shell, run_id=run_id, check=check
        )  # fmt: skip
        return self._transport.run(operation)

    def stream(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str = "",
        timeout: int | None = None,
        shell: str | None = None,
        run_id: str | None = None,
    ) -> ClosingStream[OutputPart, RunResult]:
        """Execute a command, and iterate over its output while it runs. The first iteration starts the command.

        An interrupted connection is continued where it ended. After the last part `result` has the exit code."""
        operation = self._require_open().stream(
            command, env=env, cwd=cwd, stdin=stdin, timeout=timeout, shell=shell, run_id=run_id
        )  # fmt: skip
        return ClosingStream(self, self._transport, operation)

    def agent(self, prompt: str, **options: Any) -> Agent:
        """Start an agent CLI with a prompt. `options` are fields of the HTTP API: `cli`, `model`, `max_turns`, …"""
        return Agent(self, self._transport.run(self._require_open().start_agent(prompt, options)))

    @property
    def files(self) -> Files:
        return Files(self)

    @property
    def processes(self) -> Processes:
        return Processes(self)

    def _run(self, choose: Callable[[LeaseApi], Operation[T]]) -> T:
        return self._transport.run(choose(self._require_open()))


class ClosingStream(Stream[Item, T]):
    """Stream that the end of a `with` block closes."""

    def __init__(self, sandbox: Sandbox, transport: Transport, operation: Operation[T]) -> None:
        super().__init__(transport, operation)
        self._sandbox = sandbox  # a sandbox that is in use is not released as garbage

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Agent:
    """A running agent CLI. Iterate over its events; `wait` returns the agent run at its end."""

    def __init__(self, sandbox: Sandbox, run_id: str) -> None:
        self.run_id, self._sandbox = run_id, sandbox

    def __iter__(self) -> Iterator[AgentEvent]:
        """Iterate over the events from the first one, also again and after the end."""
        return self._open()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Iterate over the JSON objects that the CLI prints."""
        return (event.message for event in self if event.message is not None)

    def wait(self) -> schemas.AgentRun:
        """Wait for the end. A CLI that fails is a result: see `state`."""
        return self._open().wait()

    def interrupt(self) -> schemas.AgentRun:
        """Kill the CLI and everything that it started. Idempotent."""
        return self._sandbox._run(lambda lease: lease.interrupt_agent(self.run_id))

    def _open(self) -> ClosingStream[AgentEvent, schemas.AgentRun]:
        operation = self._sandbox._require_open().follow_agent(self.run_id)
        return ClosingStream(self._sandbox, self._sandbox._transport, operation)


class Files:
    """Files below /workspace and /data. A relative path is one below /workspace."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._run = sandbox, sandbox._run

    def read(self, path: str) -> bytes:
        return self._run(lambda lease: lease.read_file(path))

    def read_text(self, path: str) -> str:
        """Return the text of a file. Raise UnicodeDecodeError if it is not UTF-8."""
        return self.read(path).decode()

    def write(self, path: str, content: str | bytes) -> None:
        """Create or replace a file, with its parent directories."""
        self._run(lambda lease: lease.write_file(path, content))

    def list(self, path: str = "", *, deep: bool = False) -> FileEntries:
        """Return the entries of a directory; with `deep` all descendants."""
        return self._run(lambda lease: lease.list_files(path, deep=deep))

    def remove(self, path: str) -> None:
        """Delete one file."""
        self._run(lambda lease: lease.remove_file(path))

    def make_directory(self, path: str) -> None:
        """Create a directory with its parents."""
        self._run(lambda lease: lease.make_directory(path))

    def upload(self, directory: str | Path, path: str = "") -> None:
        """Copy a local directory into a directory of the sandbox. Other files there stay."""
        root, target = split_path(path)
        with tempfile.TemporaryFile() as archive:
            pack_directory(Path(directory), target, archive)
            self._run(lambda lease: lease.put_archive(root, archive))

    def download(self, path: str, directory: str | Path) -> LinkNames:
        """Copy a directory of the sandbox into a local directory. Nothing is written outside the local directory.

        Return the names of the links that lead outside of the directory: they are left out."""
        root, source = split_path(path)
        with tempfile.TemporaryFile() as archive:
            self._run(lambda lease: lease.get_archive(root, source, archive))
            return unpack_archive(archive, source, Path(directory))


class Processes:
    """Background processes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._run = sandbox._run

    def start(self, command: Command, **options: Any) -> schemas.StartedProcess:
        """Start a process. `options` are fields of the HTTP API: `name`, `env`, `wait_for`, `wait_for_port`, `restart`, …"""
        return self._run(lambda lease: lease.start_process(command, options))

    def list(self) -> ProcessList:
        """Return the newest 200 processes of the lease."""
        return self._run(lambda lease: lease.list_processes())

    def get(self, process_id: str) -> schemas.Process:
        return self._run(lambda lease: lease.get_process(process_id))

    def logs(self, process_id: str, *, start: int = 0) -> schemas.ProcessLog:
        """Return output from an offset on. `next` of the answer is the offset to continue from."""
        return self._run(lambda lease: lease.read_process_log(process_id, start=start))

    def signal(self, process_id: str, signal: str) -> schemas.Process:
        """Send a signal, such as INT."""
        return self._run(lambda lease: lease.signal_process(process_id, signal))

    def kill(self, process_id: str) -> schemas.Process:
        """Kill a process and its descendants. Idempotent."""
        return self._run(lambda lease: lease.kill_process(process_id))
