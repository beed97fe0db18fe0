"""Background processes in a holder's sandbox: start, logs, kill.

A row is inserted before the provider is called. From then on the provider is the authority: the first listing after a
process has ended closes the row, at the latest the listing by `sweep stalled`. The transaction that evicts or destroys a
sandbox closes the rows of its processes."""

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q, QuerySet

from sandboxes import process_restarts, suspension
from sandboxes.agent.protocol import TerminalSize
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import log_connection_errors
from sandboxes.egress.environment import build_environment
from sandboxes.errors import (
    ProcessEnded,
    ProcessOutputGone,
    ProviderCallFailed,
    SandboxBusy,
    SandboxNotHeld,
    TooManyProcesses,
)
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Sandbox, SandboxState
from sandboxes.models.processes import Process, ProcessStatus, RestartPolicy
from sandboxes.output_search import OutputMatch, OutputSearch, PatternSearch, TextSearch
from sandboxes.pool.allocation import SandboxRequest
from sandboxes.process_ends import close_ended_in_sandbox, is_sandbox_alive, may_still_start
from sandboxes.process_restarts import MAX_PROCESSES, START_TIMEOUT, close_process
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.providers.command_results import ProcessOutput
from sandboxes.providers.errors import Missing, ProviderError, Rejected
from sandboxes.runs import operations, workspace_limit
from sandboxes.runs.operations import Command, Operation

LOG_CHUNK_BYTES = 1 << 18  # read of a log at once
MAX_CHUNKS_AFTER_DEADLINE = 8  # searched by wait_for_log once its time is over, so that a short wait covers existing output
LISTENERS_COMMAND, LISTENING = ("cat", "/proc/net/tcp", "/proc/net/tcp6"), "0A"  # the state TCP_LISTEN
LISTENERS_TIMEOUT = timedelta(seconds=10)
PORT_PATTERN = re.compile("[0-9A-F]{4}")
POLL_DELAYS_SECONDS = (0.05, 0.1, 0.2, 0.4)  # between reads of a log; the last one repeats


@dataclass(frozen=True)
class ProcessSpec:
    """Process to start. Values of `env` may be secret: they are never logged, and stored encrypted only for a restart."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKSPACE
    name: str = ""
    process_id: uuid.UUID = field(default_factory=uuid.uuid4)
    keep_awake: bool = False  # the sandbox is not suspended while the process runs
    stdin: bool = False  # its stdin is a pipe for write_stdin
    terminal: TerminalSize | None = None
    restart: RestartPolicy = RestartPolicy.NEVER
    max_restarts: int = 5  # in the window
    restart_window: timedelta = timedelta(minutes=10)
    restart_after_wake: bool = False

    @property
    def may_restart(self) -> bool:
        return self.restart != RestartPolicy.NEVER or self.restart_after_wake


def start_process(request: SandboxRequest, spec: ProcessSpec, *, now: datetime, actor: str = "") -> Process:
    """Start a background process in the holder's sandbox, which is started or woken first. Returns its row.

    The start is a Run of kind "process" that ends when the process has begun. The sandbox is not evicted meanwhile. If the
    calling process dies, the sweep that closes the Run kills the background process. Raises TooManyProcesses and
    the errors of runs.exec_in_sandbox."""
    clock = clock_from(now)
    command = Command(spec.argv, START_TIMEOUT, spec.env, spec.cwd, kind="process", run_id=spec.process_id)
    with operations.operation(request, command, now=now, actor=actor) as opened:
        with opened.prepare():
            workspace_limit.require_workspace_space(opened.provider, opened.sandbox, now=clock())
            process = _insert_process(opened.sandbox, spec, now=clock())
        checkpoint("process inserted", process)
        _launch(process, spec, opened, clock)
    return Process.objects.get(pk=spec.process_id)


def _launch(process: Process, spec: ProcessSpec, opened: Operation, clock: Clock) -> None:
    env = {**build_environment(opened.sandbox, opened.provider), **spec.env}
    try:
        state = opened.provider.start(
            opened.sandbox.ref, list(spec.argv), env=env, cwd=spec.cwd, mark=process.current_mark, stdin=spec.stdin,
            terminal=spec.terminal,
        )  # fmt: skip
    except Rejected as refused:
        close_process(process, ProcessStatus.FAILED, now=clock(), note=str(refused))
        raise
    checkpoint("process started", process)
    if not state.running:
        with log_connection_errors("end of a process not recorded; a sweep does", process=str(process.pk)):
            close_process(process, ProcessStatus.EXITED, now=clock(), exit_code=state.exit_code)


def _insert_process(sandbox: Sandbox, spec: ProcessSpec, *, now: datetime) -> Process:
    """Insert the row. Raises TooManyProcesses at the limit, and SandboxNotHeld if the sandbox has left `running`."""
    same_incarnation = Sandbox.objects.filter(pk=sandbox.pk, holder=sandbox.holder, incarnation=sandbox.incarnation)
    assert sandbox.holder is not None  # ensured by allocation.ensure_running
    with transaction.atomic():
        # Locks the sandbox's row: a concurrent destroy either closes this process, or makes this UPDATE match nothing.
        if not same_incarnation.filter(state=SandboxState.RUNNING).update(last_used_at=now):
            raise SandboxNotHeld()
        counted = Q(ended_at__isnull=True) | Q(restart_at__isnull=False)
        if Process.objects.filter(counted, sandbox=sandbox).count() >= MAX_PROCESSES:
            raise TooManyProcesses(f"Process limit reached ({MAX_PROCESSES}). Stop a process, then try again.")
        return Process.objects.create(
            pk=spec.process_id,
            sandbox=sandbox,
            holder=sandbox.holder,
            agent_did=sandbox.agent_did,
            incarnation=sandbox.incarnation,
            name=spec.name,
            argv=list(spec.argv),
            cwd=spec.cwd,
            env_names=sorted(spec.env),
            keep_awake=spec.keep_awake,
            is_terminal=spec.terminal is not None,
            has_stdin=spec.stdin,
            restart=spec.restart,
            max_restarts=spec.max_restarts,
            restart_window_seconds=int(spec.restart_window.total_seconds()),
            restart_after_wake=spec.restart_after_wake,
            sealed_env=process_restarts.seal_env(spec.process_id, dict(spec.env)) if spec.may_restart else None,
            started_at=now,
            starts_by=now + START_TIMEOUT,
        )


def find_by_holder(holder: uuid.UUID) -> QuerySet[Process]:
    """Select all processes that were started for a holder, ended ones included."""
    return Process.objects.filter(holder=holder)


def refresh_by_holder(holder: uuid.UUID, *, now: datetime) -> None:
    """Update the rows of a holder's open processes from the provider, except in a suspended sandbox, where none ends.

    Raises ProviderCallFailed if the provider did not respond."""
    try:
        close_ended_in_sandbox(find_by_holder(holder).filter(ended_at__isnull=True).select_related("sandbox"), now=now)
    except ProviderError as failed:
        raise ProviderCallFailed(f"The processes could not be listed: {failed}") from failed


def kill_process(process: Process, *, now: datetime) -> Process:
    """Kill a process and all its descendants. Returns its row. A suspended sandbox is resumed. Idempotent.

    The row of a process that exited before stays `exited`, but its remaining descendants are killed. Raises ProviderCallFailed
    if the kill failed, and SandboxBusy while the process is being started or its sandbox is being evicted. An eviction
    that succeeds ends the process. A killed process is not restarted, by its policy or after a wake."""
    process_restarts.forbid(process, now=now)
    if is_sandbox_alive(process):
        registry.require_local(process.sandbox)
        try:
            provider = registry.get_sandbox_provider(process.sandbox)
            suspension.ensure_awake(process.sandbox, provider, now=now)
            provider.kill(process.sandbox.ref, process.current_mark)
            state = provider.processes(process.sandbox.ref, [process.current_mark]).get(process.current_mark)
        except Missing as missing:  # reconcile handles the missing sandbox
            close_process(process, ProcessStatus.GONE, now=now, note=f"The provider has no such sandbox: {missing}")
        except ProviderError as failed:
            raise ProviderCallFailed(f"The process could not be killed: {failed}") from failed
        else:
            if state is None and may_still_start(process, now=now):
                raise SandboxBusy("The process is still being started. Try again in a moment.")
            if state is None or state.running or state.exit_code == 137:
                close_process(process, ProcessStatus.KILLED, now=now, exit_code=137)
            else:
                close_process(process, ProcessStatus.EXITED, now=now, exit_code=state.exit_code)
    process.refresh_from_db()
    if process.ended_at is None:
        raise SandboxBusy("The sandbox is being evicted. Try again in a moment.")
    return process


def send_signal(process: Process, number: int, *, now: datetime) -> Process:
    """Send a signal to a process and its process group. Return its row. A suspended sandbox is resumed.

    Raises ProcessEnded, and ProviderCallFailed if the provider did not respond."""
    with _reaching(process, now=now) as provider:
        provider.signal_process(process.sandbox.ref, process.current_mark, number)
    _refresh_process(process, now=now)
    return process


def write_stdin(process: Process, content: bytes, *, offset: int, last: bool, now: datetime) -> int:
    """Append to the stdin of a process from a byte offset. Return the number of bytes received in all.

    Bytes below that number are skipped, so a call may be repeated. Raises ProcessEnded, Rejected for a process without stdin or
    an offset above the number, and ProviderCallFailed if the provider did not respond."""
    if process.is_terminal:  # its input has no offsets that several connections could agree on
        raise Rejected("The process has a terminal. Connect to the terminal to write to it.")
    with _reaching(process, now=now) as provider:
        return provider.write_stdin(process.sandbox.ref, process.current_mark, content, offset=offset, last=last)


def find_terminal_agent(process: Process, *, now: datetime) -> str:
    """Return the gateway's id of the agent that runs a terminal. A suspended sandbox is resumed.

    Raises ProcessEnded, and ProviderCallFailed if the agent cannot be reached."""
    with _reaching(process, now=now) as provider:
        agent_id = provider.find_agent_id(process.sandbox.ref)
    if agent_id is None:
        raise ProviderCallFailed("The agent of the sandbox cannot be reached.")
    return agent_id


def postpone_eviction(process_id: uuid.UUID, *, now: datetime) -> None:
    """Begin the idle time of the sandbox of a process again, as the end of a run does.

    A sandbox that is not `waiting` has no such time, and one whose state could not be stored keeps the time of the next try."""
    sandbox = Sandbox.objects.get(processes__pk=process_id)
    waiting = Sandbox.objects.filter(pk=sandbox.pk, state=SandboxState.WAITING, persist_failures=0)
    waiting.update(last_used_at=now, idle_at=now + sandbox.idle_after)


@contextmanager
def _reaching(process: Process, *, now: datetime) -> Iterator[Provider]:
    """Yield the provider of a running process, whose sandbox is awake. Raises ProcessEnded and ProviderCallFailed."""
    if process.ended_at is not None or not is_sandbox_alive(process):
        raise ProcessEnded()
    registry.require_local(process.sandbox)
    provider = registry.get_sandbox_provider(process.sandbox)
    try:
        suspension.ensure_awake(process.sandbox, provider, now=now)
        yield provider
    except Missing as missing:
        raise ProcessEnded() from missing
    except Rejected:
        raise
    except ProviderError as failed:
        raise ProviderCallFailed(f"The process could not be reached: {failed}") from failed


def read_log(process: Process, *, start: int, length: int, now: datetime) -> ProcessOutput:
    """Read up to `length` bytes of a process's output from offset `start`. A suspended sandbox is resumed.

    Raises ProcessOutputGone once its sandbox is cold or gone, and ProviderCallFailed if the provider did not respond."""
    if not is_sandbox_alive(process):
        raise ProcessOutputGone()
    registry.require_local(process.sandbox)
    provider = registry.get_sandbox_provider(process.sandbox)
    try:
        suspension.ensure_awake(process.sandbox, provider, now=now)
        return provider.log(process.sandbox.ref, process.current_mark, start=start, length=length)
    except Missing as missing:
        raise ProcessOutputGone() from missing
    except ProviderError as failed:
        raise ProviderCallFailed(f"The output could not be read: {failed}") from failed


@dataclass(frozen=True)
class OutputWait:
    """Result of a wait for output. Without a match and not `ended`, the time was over."""

    match: OutputMatch | None
    ended: bool = False  # the process has ended without a match


def wait_for_log(process: Process, text: str, *, start: int = 0, within: timedelta, now: datetime) -> bool:
    """Wait until a process has printed `text` at or after offset `start`. Returns whether the text was printed.

    Returns False when `within` has passed, or when the process has ended without printing the text. Output that a long log
    dropped before the read is skipped. After `within`, at most MAX_CHUNKS_AFTER_DEADLINE chunks are searched, because a process
    may print faster than its log is read. Raises TooManyLongCalls."""
    with LONG_CALLS.admit():
        return _poll_log(process, TextSearch(text), start=start, within=within, clock=clock_from(now)).match is not None


def wait_for_pattern(
    process: Process, search: PatternSearch, *, start: int = 0, within: timedelta, now: datetime
) -> OutputWait:
    """Wait until the output of a process matches a regular expression at or after offset `start`. Like `wait_for_log`."""
    with LONG_CALLS.admit():
        return _poll_log(process, search, start=search.read_from(start), within=within, clock=clock_from(now))


def _poll_log(process: Process, search: OutputSearch, *, start: int, within: timedelta, clock: Clock) -> OutputWait:
    deadline = clock() + within
    pauses, pause = iter(POLL_DELAYS_SECONDS), 0.0
    chunks_left = MAX_CHUNKS_AFTER_DEADLINE
    while True:
        expired = clock() >= deadline  # evaluated before the last read of the log
        _refresh_process(process, now=clock())
        ended = process.ended_at is not None
        while True:
            try:
                content, end = read_log(process, start=start, length=LOG_CHUNK_BYTES, now=clock())
            except ProcessOutputGone:
                return OutputWait(None, ended=True)
            if match := search.feed(content, end=end):
                return OutputWait(match)
            start = end
            if clock() >= deadline:
                chunks_left -= 1
            if len(content) < LOG_CHUNK_BYTES or not chunks_left:
                break
        if expired or ended or not chunks_left:
            return OutputWait(None, ended=ended)
        pause = next(pauses, pause)
        time.sleep(pause)


def wait_for_port(process: Process, port: int, *, within: timedelta, now: datetime) -> bool:
    """Wait until a program in the sandbox of a process listens on a TCP port. Returns whether one does.

    Returns False when `within` has passed, or when the process has ended. Raises TooManyLongCalls."""
    clock, deadline = clock_from(now), now + within
    pauses, pause = iter(POLL_DELAYS_SECONDS), 0.0
    with LONG_CALLS.admit():
        while True:
            expired = clock() >= deadline  # evaluated before the last look
            _refresh_process(process, now=clock())
            try:
                with _reaching(process, now=clock()) as provider:
                    if port in list_listening_ports(provider, process.sandbox.ref):
                        return True
            except ProcessEnded:
                return False
            if expired:
                return False
            pause = next(pauses, pause)
            time.sleep(pause)


def list_listening_ports(provider: Provider, ref: str) -> set[int]:
    """Return the TCP ports on which programs in the sandbox listen, according to the kernel (proc(5), /proc/net/tcp)."""
    result = provider.exec(ref, LISTENERS_COMMAND, env={}, timeout=LISTENERS_TIMEOUT, mark=uuid.uuid4().hex)
    rows = [line.split() for line in result.stdout.decode(errors="replace").splitlines()]
    listening = [row[1].rpartition(":")[2] for row in rows if len(row) > 3 and row[3] == LISTENING]
    return {int(port, 16) for port in listening if PORT_PATTERN.fullmatch(port)}


def _refresh_process(process: Process, *, now: datetime) -> None:
    if process.ended_at is None:
        refresh_by_holder(process.holder, now=now)
        process.refresh_from_db()
