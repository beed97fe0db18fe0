"""Common part of the providers of remote sandboxes: all verbs on top of a vendor's exec and its upload of files.

A vendor's provider states how a sandbox is created, found, listed and destroyed, how one shell command is executed and how one
file is uploaded. Everything else is the same for all vendors, and is done by image/runner.py in the sandbox. The vendor's exec
is trusted with one line of text only: exact bytes, separate streams, stdin, timeouts, kills and results that survive a cut
connection do not depend on it.

The ref of a sandbox is its name. The vendor's own id is looked up by the name."""

import io
import math
import os
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, BinaryIO, TypeVar

from django.conf import settings

from sandboxes.providers.arguments import check_command
from sandboxes.providers.base import MARK_VARIABLE, WORKSPACE, ResourceUsage, VendorIntervals
from sandboxes.providers.command_results import ExecResult, ExecState, OutputReader, OutputView
from sandboxes.providers.errors import FailureCause, Missing, ProviderError, Rejected, SandboxUnreadable, Stopped, Unavailable
from sandboxes.providers.file_verbs import FileVerbsProvider, raise_for_exit_code
from sandboxes.providers.launcher import BackgroundProcessProvider
from sandboxes.providers.remote import channel, tool
from sandboxes.providers.remote.configuration import get_configuration
from sandboxes.providers.remote.lifecycle import RemoteLifecycle
from sandboxes.providers.remote.polling_reader import PollingReader
from sandboxes.providers.remote.tool import InvalidResponse, RunRequest, RunState

CALL_GRACE_SECONDS = 40.0  # beyond the time that a call waits in the sandbox, after which the vendor has not responded
FILE_TIMEOUT = timedelta(hours=1)  # of one file operation; a transfer has a limit of its own
FILE_IDLE_SECONDS = 60.0  # without progress of a file operation
UNLIMITED_BYTES = 1 << 50
MIN_LIVE_SECONDS = 0.5  # minimum duration of a vendor's call that shows output of a running command
MAX_REMEMBERED = 4096  # sandboxes whose last call is remembered
VENDOR_CALL_INTERVAL_SECONDS = 120.0  # below the shortest idle time after which a vendor stops a sandbox, 10 minutes
TRANSIENT_CAUSES = {
    FailureCause.ENGINE_UNREACHABLE, FailureCause.ENGINE_ERROR, FailureCause.RATE_LIMITED, FailureCause.AGENT_FAILED,
}  # fmt: skip
Result = TypeVar("Result")
MAX_ACKNOWLEDGED = 50  # results whose release is sent with one call


class RemoteProvider(RemoteLifecycle, FileVerbsProvider, BackgroundProcessProvider):
    """Provider whose sandboxes run at a vendor."""

    isolated = True
    enforces_limits = False
    measures_usage = False
    streams_output = True
    needs_gateway = True
    tool_directory = tool.TOOL_DIRECTORY
    upload_directory = "/tmp"  # noqa: S108 - in the sandbox; each name is unique
    max_upload_bytes = 16 << 20  # of one upload; larger content is uploaded in parts
    max_response_bytes = tool.MAX_RESPONSE_BYTES
    max_inline_bytes = tool.MAX_INLINE_BYTES
    poll_seconds = 20.0  # the longest time that one call of the vendor waits for a command
    retry_delays_seconds: Sequence[float] = (0.2, 1.0, 3.0)  # before repetitions of calls that may be repeated

    account_option = ""  # option of the configuration that names the account

    def __init__(self) -> None:
        self.configuration = get_configuration(self.name)
        self.network = self.configuration.network
        self._acknowledged: dict[str, list[str]] = {}
        self._acknowledged_lock = threading.Lock()
        self._clients_by_pid: dict[int, Any] = {}
        self._vendor_calls: dict[str, float] = {}  # ref -> monotonic time of the last runner call by the vendor's exec

    def _get_clients(self, create: Callable[[], Result]) -> Result:
        """Return this process's clients of the vendor. A forked process must not share its parent's connections."""
        pid = os.getpid()
        if pid not in self._clients_by_pid:
            self._clients_by_pid = {pid: create()}
        clients: Result = self._clients_by_pid[pid]
        return clients

    def engine_id(self) -> str:
        """Return the address of the vendor's API, and the account if the configuration names one. Makes no call."""
        account = self.configuration.options.get(self.account_option, "")
        return f"{self.configuration.api_url} {account}".strip()[:200]

    def default_intervals(self) -> VendorIntervals:
        configuration = self.configuration
        return VendorIntervals(
            configuration.auto_stop if self.has_auto_stop else None, configuration.auto_delete if self.has_auto_delete else None
        )

    @abstractmethod
    def _execute(self, ref: str, command: str, *, timeout: timedelta) -> str:
        """Execute one shell command by the vendor's exec and return its output. Start a sandbox that is stopped.

        Raise Missing without a sandbox, and Unavailable if the outcome is not known."""

    @abstractmethod
    def _upload(self, ref: str, path: str, content: bytes) -> None:
        """Write one file of at most `max_upload_bytes` by the vendor's file API. Raise Missing, Unavailable, Rejected."""

    # Commands

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
        started = time.monotonic()
        request = RunRequest(
            # The same mark may be used again for a command of the control plane, but a mark starts only once.
            mark=mark if retain else f"{mark}/{uuid.uuid4().hex}",
            argv=tuple(argv),
            env={**env, MARK_VARIABLE: mark},
            cwd=cwd,
            timeout_seconds=timeout.total_seconds(),
            cap=cap,
            retain=retain,
        )
        stdout, stderr = bytearray(), bytearray()
        if output:
            output.attach(stdout, stderr)
        state = RunState("unknown", b"", b"")
        for state in self._run(ref, request, io.BytesIO(stdin), live=output is not None):
            stdout += state.stdout
            stderr += state.stderr
        return state.to_result(bytes(stdout[:cap]), bytes(stderr[:cap]), time.monotonic() - started)

    def _run(self, ref: str, request: RunRequest, stdin: BinaryIO, *, live: bool) -> Generator[RunState, None, None]:
        """Start a command, and yield its states until it has ended and all of its output was yielded.

        A command without a retained result is killed if the caller stops earlier. Raise Stopped if the sandbox stopped, and
        Unavailable if the outcome is not known. The runner starts a mark only once, so each call is repeated before that."""
        fields = self._prepare(ref, request, stdin)
        fields["release"] = self._take_acknowledged(ref)
        deadline = time.monotonic() + request.timeout_seconds + CALL_GRACE_SECONDS
        offsets, has_ended = [0, 0], False
        try:
            while True:
                wait = min(self.poll_seconds, max(deadline - time.monotonic(), 0.0))
                state = self._follow(ref, fields, offsets, wait=wait, live=live)
                if state.state in ("lost", "unknown"):
                    has_ended = True
                    raise Stopped(f"{ref} stopped while the command ran.")
                offsets[0] += len(state.stdout)
                offsets[1] += len(state.stderr)
                has_ended = state.state == "ended"
                yield state
                if has_ended and (offsets[0] >= state.sizes[0] and offsets[1] >= state.sizes[1]):
                    return
                if has_ended and not state.stdout and not state.stderr:
                    raise Unavailable(f"{ref}: the output of a command is gone.")
                if not has_ended and time.monotonic() > deadline:
                    raise Unavailable(f"{ref}: a command did not end after its timeout.", cause=FailureCause.TIMEOUT)
                fields = {"verb": "follow", "mark": request.mark}
        except BaseException:
            if not has_ended and not request.retain:
                with suppress(ProviderError):
                    self._call_runner(ref, {"verb": "kill", "mark": request.env[MARK_VARIABLE]})
            raise

    def _prepare(self, ref: str, request: RunRequest, stdin: BinaryIO) -> dict[str, Any]:
        """Return the fields of the request, after an upload of stdin if it does not fit into a command line."""
        fields = request.to_fields()
        head = stdin.read(self.max_inline_bytes // 2)
        if len(head) < self.max_inline_bytes // 2:
            return fields | {"stdin": tool.encode_argument(head)}
        return fields | {"stdin_path": self._upload_stream(ref, head, stdin)}

    def _upload_stream(self, ref: str, head: bytes, rest: BinaryIO) -> str:
        """Upload content of any length, in parts, and return the path of the file in the sandbox."""
        path = f"{self.upload_directory}/leasehold-{uuid.uuid4().hex}"
        parts: list[str] = []
        content = head + rest.read(self.max_upload_bytes - len(head))
        while content:
            parts.append(f"{path}.{len(parts)}")
            self._retry(lambda part=parts[-1], body=content: self._upload(ref, part, body))  # type: ignore[misc]
            content = rest.read(self.max_upload_bytes)
        if len(parts) == 1:
            return parts[0]
        self._retry(lambda: self._call_runner(ref, {"verb": "join", "path": path, "parts": parts}))
        return path

    def _follow(self, ref: str, fields: Mapping[str, Any], offsets: Sequence[int], *, wait: float, live: bool) -> RunState:
        more = {
            "offsets": [*offsets], "wait": wait, "live": live, "live_after": MIN_LIVE_SECONDS, "limit": self.max_response_bytes,
        }  # fmt: skip
        return self._retry(lambda: _parse(ref, self._call_runner(ref, {**fields, **more}, wait=wait)))

    def _call_runner(
        self, ref: str, fields: Mapping[str, Any], *, wait: float = 0.0, is_secret: bool = False
    ) -> dict[str, Any]:
        """Execute one request of the runner. Raise Missing if two responses say that the runner is gone, Unavailable."""
        response = self._ask_runner(ref, fields, wait=wait, is_secret=is_secret)
        if response["state"] == tool.NO_TOOL:
            response = self._ask_runner(ref, fields, wait=wait, is_secret=is_secret)  # the request has had no effect
        if response["state"] == tool.NO_TOOL:
            self._discard_empty(ref)
            raise Missing(f"{ref}: the vendor has replaced this sandbox by an empty one.")
        return response

    def _ask_runner(self, ref: str, fields: Mapping[str, Any], *, wait: float = 0.0, is_secret: bool = False) -> dict[str, Any]:
        """Execute one request of the runner, and return the response, which is NO_TOOL if the runner is not in the sandbox.

        A secret request is uploaded as a file, because vendors log command lines. Other requests go through the gateway if the
        sandbox is connected to it; without a response they are repeated by the vendor's exec, which the runner permits."""
        if not is_secret and (response := self._call_by_gateway(ref, fields, wait)) is not None:
            return response
        content = tool.encode_request(fields)
        if len(content) <= self.max_inline_bytes and not is_secret:
            argument = tool.encode_argument(content)
        else:
            path = f"{self.upload_directory}/leasehold-{uuid.uuid4().hex}"
            self._upload(ref, path, content)
            argument = f"@{path}"
        command = tool.build_command(self.tool_directory, argument)
        output = self._execute(ref, command, timeout=timedelta(seconds=wait + CALL_GRACE_SECONDS))
        try:
            response = tool.parse_response(output)
        except InvalidResponse as error:
            raise _build_invalid(ref, error) from error
        return response

    def _call_by_gateway(self, ref: str, fields: Mapping[str, Any], wait: float) -> dict[str, Any] | None:
        """Call the runner through the gateway. Return None if the vendor's exec is to be used.

        The vendor counts a sandbox as idle if nothing calls its API, so every call after VENDOR_CALL_INTERVAL_SECONDS does."""
        if not settings.GATEWAY_URL or not settings.RUNNER_GATEWAY.exists():
            return None
        if time.monotonic() > self._vendor_calls.get(ref, -math.inf) + VENDOR_CALL_INTERVAL_SECONDS:
            if len(self._vendor_calls) >= MAX_REMEMBERED:
                self._vendor_calls.clear()
            self._vendor_calls[ref] = time.monotonic()
            return None
        try:
            more = {"live_after": 0.0, "limit": tool.MAX_RESPONSE_BYTES}  # limits of vendors do not apply
            return channel.call(settings.RUNNER_GATEWAY, ref, {**fields, **more}, wait=wait)
        except channel.NotConnected:
            return None

    def _discard_empty(self, ref: str) -> None:
        """Remove a sandbox that exists without the files of its creation, if the vendor has put one in place of another."""

    def _retry(self, call: Callable[[], Result]) -> Result:
        """Repeat a call that may be repeated while it raises Unavailable."""
        for delay in self.retry_delays_seconds:
            try:
                return call()
            except Unavailable as error:
                if error.cause not in TRANSIENT_CAUSES:
                    raise
            time.sleep(delay)
        return call()

    def find_exec(self, ref: str, mark: str) -> ExecState | None:
        output, state = (bytearray(), bytearray()), RunState("unknown", b"", b"")
        while True:
            offsets = [len(content) for content in output]
            state = self._follow(ref, {"verb": "follow", "mark": mark}, offsets, wait=0.0, live=False)
            output[0].extend(state.stdout)
            output[1].extend(state.stderr)
            if state.state == "running":
                return ExecState(running=True)
            if state.state != "ended":
                return None
            is_complete = len(output[0]) >= state.sizes[0] and len(output[1]) >= state.sizes[1]
            if is_complete or not (state.stdout or state.stderr):
                age = None if state.age_seconds is None else timedelta(seconds=state.age_seconds)
                return ExecState(False, state.to_result(bytes(output[0]), bytes(output[1]), state.seconds), age)

    def acknowledge_exec(self, ref: str, mark: str) -> None:
        with self._acknowledged_lock:  # sent with the next command: a call of its own would take as long as a command
            self._acknowledged.setdefault(ref, []).append(mark)

    def _take_acknowledged(self, ref: str) -> list[str]:
        with self._acknowledged_lock:
            return self._acknowledged.pop(ref, [])[-MAX_ACKNOWLEDGED:]

    def open_output(self, ref: str, mark: str, *, stdout: int, stderr: int) -> OutputReader | None:
        def follow(offsets: Sequence[int], wait: float) -> RunState:
            fields = {"verb": "follow", "mark": mark}
            return self._follow(ref, fields, offsets, wait=min(wait, self.poll_seconds), live=True)

        return PollingReader(follow, stdout=stdout, stderr=stderr)

    def kill(self, ref: str, mark: str) -> None:
        if self.inspect(ref).running:
            self._retry(lambda: self._call_runner(ref, {"verb": "kill", "mark": mark}))

    def _output_directory(self, ref: str) -> str:
        return f"{self.tool_directory}/processes"

    # Files

    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        mark = uuid.uuid4().hex
        request = RunRequest(
            mark=mark,
            argv=(),
            files=words,
            env={MARK_VARIABLE: mark},
            cwd="/",
            timeout_seconds=FILE_TIMEOUT.total_seconds(),
            cap=UNLIMITED_BYTES,
        )
        state, message, progressed_at = RunState("unknown", b"", b""), b"", time.monotonic()
        states = self._run(ref, request, stdin or io.BytesIO(), live=True)
        try:
            for state in states:
                message += state.stderr[: 4096 - len(message)]
                if state.stdout:
                    yield state.stdout
                    progressed_at = time.monotonic()
                elif time.monotonic() > progressed_at + FILE_IDLE_SECONDS:
                    text = f"{ref}: no progress of {words[0]} in {words[1]} for {FILE_IDLE_SECONDS:.0f} s"
                    raise SandboxUnreadable(text, cause=FailureCause.TIMEOUT)
        finally:
            states.close()
            if sum(state.sizes) > self.max_response_bytes:
                self.acknowledge_exec(ref, mark)
        if state.dropped:
            raise SandboxUnreadable(f"{ref}: the disk of the sandbox is full: {words[0]} in {words[1]} was not completed.")
        raise_for_exit_code(state.exit_code, message.decode(errors="replace"))

    # Lifecycle

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        self._wait_running(ref, deadline)
        if not self._has_tool(ref):
            self._set_up(ref, deadline)

    def _has_tool(self, ref: str) -> bool:
        fields = {"verb": "follow", "mark": "", "offsets": [0, 0], "wait": 0.0, "live": False, "limit": 0, "live_after": 0.0}
        return self._retry(lambda: self._ask_runner(ref, fields))["state"] != tool.NO_TOOL

    def _set_up(self, ref: str, deadline: float) -> None:
        """Upload the runner, and create the directories. Idempotent."""
        path = f"{self.upload_directory}/leasehold-{uuid.uuid4().hex}.zip"
        self._upload(ref, path, tool.build_archive())
        command = tool.build_setup_command(self.tool_directory, path)
        output = self._execute(ref, command, timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
        try:
            tool.parse_response(output)
        except InvalidResponse as error:
            raise Rejected(
                f"The image of {ref} cannot be used: it needs python3, and directories /workspace, /data and "
                f"{self.tool_directory} that its user can write or create: {error}"
            ) from error

    def connect_gateway(self, ref: str, url: str, token: str) -> None:
        self._retry(lambda: self._call_runner(ref, {"verb": "connect", "url": url, "token": token}, is_secret=True))

    def find_unresponsive(self, refs: Collection[str], *, timeout: timedelta) -> set[str]:
        return set()

    def restart(self, ref: str) -> None:
        self._retry(lambda: self._call_runner(ref, {"verb": "restart"}))

    def stats(self, ref: str) -> ResourceUsage | None:
        self.inspect(ref)
        return None


def _parse(ref: str, response: Mapping[str, Any]) -> RunState:
    try:
        return tool.parse_run_state(response)
    except InvalidResponse as error:
        raise _build_invalid(ref, error) from error


def _build_invalid(ref: str, error: InvalidResponse) -> Unavailable:
    return Unavailable(f"{ref}: invalid response of the runner: {error}", cause=FailureCause.AGENT_FAILED)
