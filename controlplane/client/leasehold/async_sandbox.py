"""AsyncSandbox: the surface of Sandbox for asyncio and trio."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from anyio import to_thread

from . import cleanup, schemas
from .api import Command, LeaseApi, split_path
from .archives import pack_directory, unpack_archive
from .errors import LeaseholdError
from .exchange import Operation
from .results import AgentEvent, ExecResult, OutputPart, RunResult
from .sandbox import FileEntries, LinkNames, ProcessList, SandboxBase
from .transports import AsyncStream, AsyncTransport

T = TypeVar("T")
Item = TypeVar("Item")


class AsyncSandbox(SandboxBase):
    """Sandbox of one lease. Like Sandbox, with coroutines.

    async with AsyncSandbox("coding") as box:
        print((await box.exec("uname -a")).stdout)"""

    _transport: AsyncTransport

    async def open(self) -> Self:
        """Join the environment, which starts the sandbox. The beginning of an `async with` block does the same."""
        self._begin_opening()
        self._transport = AsyncTransport(self._held.settings)
        try:
            await self._transport.run(self._held.open())
        except LeaseholdError as error:
            self._is_closed = True
            await self._transport.close()
            await to_thread.run_sync(self._held.release_after, error)
            raise
        except BaseException as error:  # cancelled: the release goes on in a thread
            self._is_closed = True
            self._run_in_thread(self._held.release_after, error)
            raise
        return self

    async def release(self) -> None:
        """End the lease, unless it is another program's. Idempotent. The end of an `async with` block does the same."""
        if self._is_closed or self._held.document is None:
            return
        self._is_closed = True
        try:
            await self._transport.run(self._held.close())
            self._finalizer.detach()
            await self._transport.close()
        except LeaseholdError:
            raise
        except BaseException:  # cancelled: the release goes on in a thread
            self._run_in_thread(self._held.release_now)
            raise

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except LeaseholdError as failure:
            if error is None:
                raise
            error.add_note(f"The lease was not released and ends by its ttl: {failure}")

    async def exec(
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
        """Execute a command, as Sandbox.exec does. A cancelled call does not end the command."""
        operation = self._require_open().exec(
            command, env=env, cwd=cwd, stdin=stdin, timeout=timeout, shell=shell, run_id=run_id, check=check
        )  # fmt: skip
        return await self._transport.run(operation)

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
    ) -> AsyncClosingStream[OutputPart, RunResult]:
        """Execute a command, and iterate over its output while it runs, as Sandbox.stream does."""
        operation = self._require_open().stream(
            command, env=env, cwd=cwd, stdin=stdin, timeout=timeout, shell=shell, run_id=run_id
        )  # fmt: skip
        return AsyncClosingStream(self, self._transport, operation)

    async def agent(self, prompt: str, **options: Any) -> AsyncAgent:
        """Start an agent CLI with a prompt, as Sandbox.agent does."""
        return AsyncAgent(self, await self._transport.run(self._require_open().start_agent(prompt, options)))

    @property
    def files(self) -> AsyncFiles:
        return AsyncFiles(self)

    @property
    def processes(self) -> AsyncProcesses:
        return AsyncProcesses(self)

    async def _run(self, choose: Callable[[LeaseApi], Operation[T]]) -> T:
        return await self._transport.run(choose(self._require_open()))

    @staticmethod
    def _run_in_thread(function: Callable[..., object], *arguments: object) -> None:
        """Run a blocking function without the event loop, which may be about to end. cleanup.release_all repeats it at exit."""
        cleanup.ExitingThread("leasehold-release", lambda: function(*arguments)).start()


class AsyncClosingStream(AsyncStream[Item, T]):
    """Stream that the end of an `async with` block closes."""

    def __init__(self, sandbox: AsyncSandbox, transport: AsyncTransport, operation: Operation[T]) -> None:
        super().__init__(transport, operation)
        self._sandbox = sandbox  # a sandbox that is in use is not released as garbage

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class AsyncAgent:
    """A running agent CLI. Iterate over its events; `wait` returns the agent run at its end."""

    def __init__(self, sandbox: AsyncSandbox, run_id: str) -> None:
        self.run_id, self._sandbox = run_id, sandbox

    def __aiter__(self) -> AsyncIterator[AgentEvent]:
        """Iterate over the events from the first one, also again and after the end."""
        return self._open()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Iterate over the JSON objects that the CLI prints."""
        async for event in self:
            if event.message is not None:
                yield event.message

    async def wait(self) -> schemas.AgentRun:
        """Wait for the end. A CLI that fails is a result: see `state`."""
        return await self._open().wait()

    async def interrupt(self) -> schemas.AgentRun:
        """Kill the CLI and everything that it started. Idempotent."""
        return await self._sandbox._run(lambda lease: lease.interrupt_agent(self.run_id))

    def _open(self) -> AsyncClosingStream[AgentEvent, schemas.AgentRun]:
        operation = self._sandbox._require_open().follow_agent(self.run_id)
        return AsyncClosingStream(self._sandbox, self._sandbox._transport, operation)


class AsyncFiles:
    """Files below /workspace and /data. A relative path is one below /workspace."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._run = sandbox._run

    async def read(self, path: str) -> bytes:
        return await self._run(lambda lease: lease.read_file(path))

    async def read_text(self, path: str) -> str:
        return (await self.read(path)).decode()

    async def write(self, path: str, content: str | bytes) -> None:
        """Create or replace a file, with its parent directories."""
        await self._run(lambda lease: lease.write_file(path, content))

    async def list(self, path: str = "", *, deep: bool = False) -> FileEntries:
        """Return the entries of a directory; with `deep` all descendants."""
        return await self._run(lambda lease: lease.list_files(path, deep=deep))

    async def remove(self, path: str) -> None:
        """Delete one file."""
        await self._run(lambda lease: lease.remove_file(path))

    async def make_directory(self, path: str) -> None:
        """Create a directory with its parents."""
        await self._run(lambda lease: lease.make_directory(path))

    async def upload(self, directory: str | Path, path: str = "") -> None:
        """Copy a local directory into a directory of the sandbox. Other files there stay."""
        root, target = split_path(path)
        with tempfile.TemporaryFile() as archive:
            await to_thread.run_sync(pack_directory, Path(directory), target, archive)
            await self._run(lambda lease: lease.put_archive(root, archive))

    async def download(self, path: str, directory: str | Path) -> LinkNames:
        """Copy a directory of the sandbox into a local directory. Nothing is written outside the local directory.

        Return the names of the links that lead outside of the directory: they are left out."""
        root, source = split_path(path)
        with tempfile.TemporaryFile() as archive:
            await self._run(lambda lease: lease.get_archive(root, source, archive))
            return await to_thread.run_sync(unpack_archive, archive, source, Path(directory))


class AsyncProcesses:
    """Background processes."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._run = sandbox._run

    async def start(self, command: Command, **options: Any) -> schemas.StartedProcess:
        """Start a process. `options` are fields of the HTTP API: `name`, `env`, `wait_for`, `wait_for_port`, `restart`, …"""
        return await self._run(lambda lease: lease.start_process(command, options))

    async def list(self) -> ProcessList:
        """Return the newest 200 processes of the lease."""
        return await self._run(lambda lease: lease.list_processes())

    async def get(self, process_id: str) -> schemas.Process:
        return await self._run(lambda lease: lease.get_process(process_id))

    async def logs(self, process_id: str, *, start: int = 0) -> schemas.ProcessLog:
        """Return output from an offset on. `next` of the answer is the offset to continue from."""
        return await self._run(lambda lease: lease.read_process_log(process_id, start=start))

    async def signal(self, process_id: str, signal: str) -> schemas.Process:
        """Send a signal, such as INT."""
        return await self._run(lambda lease: lease.signal_process(process_id, signal))

    async def kill(self, process_id: str) -> schemas.Process:
        """Kill a process and its descendants. Idempotent."""
        return await self._run(lambda lease: lease.kill_process(process_id))
