"""Emulator of Modal's API and of the command router of its sandboxes, as recorded from version 1.6.4 of its client.

Both are gRPC services, here on one port without TLS. A sandbox cannot be stopped: it runs or has finished. Names are unique
among the running sandboxes. A command is killed at its time limit. Snapshots of directories are stored and can be mounted."""

import asyncio
import base64
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from grpclib import GRPCError, Status
from grpclib.events import RecvRequest, listen
from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.emulators.base import CUT_AFTER, CUT_BEFORE, Emulator, ForeignAnswer, Throttle
from tests.emulators.images import ImageBuild
from tests.emulators.machine import Machine, NotRunning

PAGE_SIZE = 100
MAX_LIFETIME_SECONDS = 86_400
TERMINATION_SECONDS = 0.02  # between the request and the end
TAG_PATTERN = r"[A-Za-z0-9._-]{1,63}"
MAX_THREADS = 200  # of requests that wait
STATUSES = {
    400: Status.INVALID_ARGUMENT, 401: Status.UNAUTHENTICATED, 403: Status.PERMISSION_DENIED, 404: Status.NOT_FOUND,
    409: Status.ALREADY_EXISTS, 429: Status.RESOURCE_EXHAUSTED, 500: Status.INTERNAL, 503: Status.UNAVAILABLE,
}  # fmt: skip
GenericResult = api_pb2.GenericResult
STDOUT = router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
STDERR = router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR


class Output:
    """Output of one stream of a command, collected until its last writer closes it."""

    def __init__(self, pipe: Any) -> None:
        self._content, self._ended, self._changed = bytearray(), False, threading.Condition()
        threading.Thread(target=self._collect, args=(pipe,), daemon=True).start()

    def _collect(self, pipe: Any) -> None:
        for chunk in iter(lambda: pipe.read1(1 << 16), b""):
            with self._changed:
                self._content += chunk
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def read(self, offset: int) -> bytes:
        """Wait for bytes from an offset. Empty: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._content) > offset)
            return bytes(self._content[offset : offset + (1 << 20)])


class Execution:
    """One command in a sandbox."""

    def __init__(self, process: "subprocess.Popen[bytes]", seconds: int) -> None:
        self._process, self._stdin_size, self._lock = process, 0, threading.Lock()
        self.outputs = {STDOUT: Output(process.stdout), STDERR: Output(process.stderr)}
        self.ended = threading.Event()
        threading.Thread(target=self._await_end, args=(seconds or None,), daemon=True).start()

    @property
    def result(self) -> router_pb2.TaskExecWaitResponse:
        code = self._process.returncode
        return router_pb2.TaskExecWaitResponse(signal=-code) if code < 0 else router_pb2.TaskExecWaitResponse(code=code)

    def _await_end(self, seconds: int | None) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.ended.set()

    def write(self, offset: int, data: bytes, *, eof: bool) -> None:
        """Write to stdin. Data before the current offset was written by an earlier attempt."""
        assert self._process.stdin is not None
        with self._lock:
            if offset > self._stdin_size:
                raise GRPCError(Status.OUT_OF_RANGE, f"stdin is at {self._stdin_size}")
            rest = data[self._stdin_size - offset :]
            with suppress(BrokenPipeError, ValueError):
                self._process.stdin.write(rest)
                self._process.stdin.flush()
                self._stdin_size += len(rest)
                if eof:
                    self._process.stdin.close()


@dataclass
class Sandbox:
    id: str
    task_id: str
    token: str  # for the command router
    request: api_pb2.SandboxCreateRequest | api_pb2.SandboxCreateV2Request
    machine: Machine
    result: GenericResult = field(default_factory=GenericResult)  # status 0: running
    created_at: float = field(default_factory=time.time)
    executions: dict[str, Execution] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.request.definition.name

    @property
    def is_of_older_backend(self) -> bool:
        return isinstance(self.request, api_pb2.SandboxCreateRequest)

    @property
    def tags(self) -> dict[str, str]:
        return {tag.tag_name: tag.tag_value for tag in self.request.tags}


@dataclass
class DirectorySnapshot:
    """Image with the files of a directory."""

    directory: Path
    ttl_seconds: int


class ModalEmulator(Emulator):
    home = "/root"
    token_id = "ak-emulator"
    options = {"token_id": token_id}

    def __init__(self, directory: Path, port: int = 0) -> None:
        super().__init__(directory)
        self.sandboxes: dict[str, Sandbox] = {}
        self.images: dict[str, api_pb2.Image] = {}
        self.snapshots: dict[str, DirectorySnapshot] = {}  # by image id
        self.auth_token = create_token()
        self._socket = socket.create_server(("127.0.0.1", port))
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._stopped = threading.Event()

    # Server

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def serve_forever(self) -> None:
        self._loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))
        self._loop.run_until_complete(self._serve())
        self._loop.close()
        self._stopped.set()

    async def _serve(self) -> None:
        server = Server([ControlPlane(self), CommandRouter(self)], status_details_codec=custom_detail_codec)
        listen(server, RecvRequest, self._intercept)
        await server.start(sock=self._socket)
        await self._stopping.wait()
        server.close()

    def stop_server(self) -> None:
        for sandbox in self.sandboxes.values():
            sandbox.machine.stop()  # ends requests that wait for a command
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._stopped.wait(10)

    async def _intercept(self, event: RecvRequest) -> None:
        """Apply the faults, and check the credentials of a request."""
        fault, serve = self.take_fault(f"RPC /{event.method_name.rpartition('/')[2]}"), event.method_func

        async def answer(stream: Any) -> None:
            outcome = None
            if fault:
                await asyncio.sleep(fault.seconds)
                outcome = fault.outcome
            if foreign := outcome if isinstance(outcome, ForeignAnswer) else self.foreign_answer:
                await _answer_in_http(stream, foreign)
                return
            if isinstance(outcome, Throttle):
                policy = api_pb2.RPCRetryPolicy(retry_after_secs=outcome.retry_after_seconds)
                raise GRPCError(Status.RESOURCE_EXHAUSTED, outcome.message, [policy])
            if isinstance(outcome, int):
                raise GRPCError(STATUSES.get(outcome, Status.UNKNOWN), "fault")
            if outcome != CUT_BEFORE:
                self._authorize(event.method_name, event.metadata)
                if callable(outcome):
                    stream = _WithOtherAnswer(stream)
                await serve(_WithoutAnswer(stream) if outcome == CUT_AFTER else stream)
            if outcome in (CUT_BEFORE, CUT_AFTER):
                stream._stream._transport.abort()

        event.method_func = answer

    def _authorize(self, method: str, metadata: Mapping[str, Any]) -> None:
        if "TaskCommandRouter" in method:
            tokens = [f"Bearer {sandbox.token}" for sandbox in self.sandboxes.values()]
            is_authorized = metadata.get("authorization") in tokens
        else:
            stated = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret"))
            is_authorized = stated == (self.token_id, self.key)
            if method.endswith("V2"):
                is_authorized &= metadata.get("x-modal-auth-token") == self.auth_token
        if not is_authorized:
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")

    # Sandboxes

    def list_machines(self) -> list[Machine]:
        return [sandbox.machine for sandbox in self.sandboxes.values()]

    def find_machines(self, name: str) -> list[Machine]:
        return [sandbox.machine for sandbox in self.find_running(name)]

    def stop_idle(self, name: str) -> None:
        for sandbox in self.find_running(name):
            self.finish(sandbox)

    def get_creation(self, name: str) -> dict[str, Any]:
        [sandbox] = self.find_running(name)
        fields = MessageToDict(sandbox.request.definition, preserving_proto_field_name=True)
        image = self.images[sandbox.request.definition.image_id]
        more = {"app_id": sandbox.request.app_id, "tags": sandbox.tags, "dockerfile": image.dockerfile_commands[0]}
        return fields | more

    def find_running(self, name: str) -> list[Sandbox]:
        return [sandbox for sandbox in self.list_running() if sandbox.name == name]

    def list_running(self) -> list[Sandbox]:
        with self.lock:
            return [sandbox for sandbox in self.sandboxes.values() if not sandbox.result.status]

    def finish(self, sandbox: Sandbox) -> None:
        """End a sandbox. Its files are gone."""
        with self.lock:
            sandbox.result = GenericResult(status=GenericResult.GENERIC_STATUS_TERMINATED, exitcode=137)
        sandbox.machine.remove()

    def create(self, request: api_pb2.SandboxCreateRequest | api_pb2.SandboxCreateV2Request) -> Sandbox:
        """Create a sandbox. The client recognizes one of the older backend by the length of its id."""
        definition, identifier = request.definition, uuid.uuid4().hex
        is_of_older_backend = isinstance(request, api_pb2.SandboxCreateRequest)
        if bool(definition.resources.gpu_config.count) != is_of_older_backend:
            raise GRPCError(Status.INVALID_ARGUMENT, "sandboxes with GPUs, and they alone, are of the older backend")
        for tag in request.tags:
            if not (re.fullmatch(TAG_PATTERN, tag.tag_name) and re.fullmatch(TAG_PATTERN, tag.tag_value)):
                raise GRPCError(Status.INVALID_ARGUMENT, f"invalid tag {tag.tag_name}")
        if not 0 < definition.timeout_secs <= MAX_LIFETIME_SECONDS:
            raise GRPCError(Status.INVALID_ARGUMENT, "timeout must be between 1 second and 24 hours")
        if definition.image_id not in self.images:
            raise GRPCError(Status.NOT_FOUND, f"no image {definition.image_id}")
        with self.lock:
            if definition.name and self.find_running(definition.name):
                raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {definition.name} already exists")
            machine = self.create_machine(identifier, self.find_disk(definition.image_id))
            name, task = (identifier[:22], identifier) if is_of_older_backend else (identifier, f"{identifier}V")
            sandbox = Sandbox(f"sb-{name}", f"ta-{task}", create_token(), request, machine)
            self.sandboxes[sandbox.id] = sandbox
        return sandbox

    def find(self, identifier: str) -> Sandbox:
        with self.lock:
            if identifier in self.sandboxes:
                return self.sandboxes[identifier]
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {identifier} not found")

    def take_snapshot(self, request: router_pb2.TaskSnapshotDirectoryRequest) -> str:
        """Copy a directory of a sandbox, once for each snapshot id. Return the id of the image."""
        sandbox, identifier = self.find_task(request.task_id), f"im-{uuid.UUID(request.snapshot_id).hex}"
        with self.lock:
            if identifier not in self.snapshots:
                copy = self.directory / "snapshots" / identifier
                source = sandbox.machine.directory / "disk" / request.path.decode().strip("/")
                copy.parent.mkdir(exist_ok=True)
                subprocess.run(["cp", "-a", source, copy], check=True)
                self.snapshots[identifier] = DirectorySnapshot(copy, request.ttl_seconds)
        return identifier

    def find_snapshot(self, identifier: str) -> DirectorySnapshot:
        with self.lock:
            if identifier in self.snapshots:
                return self.snapshots[identifier]
        raise GRPCError(Status.NOT_FOUND, f"Image {identifier} not found")

    def delete_snapshot(self, identifier: str) -> None:
        """Delete a snapshot, as the vendor does at its expiry."""
        snapshot = self.find_snapshot(identifier)
        with self.lock:
            del self.snapshots[identifier]
        shutil.rmtree(snapshot.directory, ignore_errors=True)

    def find_task(self, task_id: str) -> Sandbox:
        for sandbox in self.list_running():
            if sandbox.task_id == task_id and sandbox.machine.is_running:
                return sandbox
        raise GRPCError(Status.NOT_FOUND, f"Task {task_id} not found")


class _WithoutAnswer:
    """Stream of a request whose answer is lost."""

    def __init__(self, stream: Any) -> None:
        self.recv_message, self.metadata = stream.recv_message, stream.metadata

    async def send_message(self, message: object) -> None:
        return


class _WithOtherAnswer:
    """Stream of a request whose answer has no fields, as that of a service of an older version."""

    def __init__(self, stream: Any) -> None:
        self.recv_message, self.metadata, self._send = stream.recv_message, stream.metadata, stream.send_message

    async def send_message(self, message: Any) -> None:
        await self._send(type(message)())


async def _answer_in_http(stream: Any, answer: ForeignAnswer) -> None:
    """Answer a call without gRPC, as a server that speaks HTTP/2 alone."""
    headers = [(":status", str(answer.status)), ("content-type", answer.content_type)]
    headers += [("location", answer.location)] if answer.location else []
    await stream._stream.send_headers(headers, end_stream=not answer.body)
    if answer.body:
        await stream._stream.send_data(answer.body, end_stream=True)
    stream._send_trailing_metadata_done = True


def implement(base: type) -> Any:
    """Return a subclass of a service in which every RPC answers UNIMPLEMENTED."""

    async def refuse(self: object, stream: Any) -> None:
        raise GRPCError(Status.UNIMPLEMENTED, "not emulated")

    return type(base.__name__, (base,), dict.fromkeys(base.__abstractmethods__, refuse))  # type: ignore[attr-defined]


def unary(handler: Callable[[Any, Any], Any]) -> Any:
    """Serve an RPC with one response by a function of the request, in a thread."""

    async def serve(self: Any, stream: Any) -> None:
        request = await stream.recv_message()
        await stream.send_message(await asyncio.to_thread(handler, self, request))

    return serve


class ControlPlane(implement(ModalClientBase)):  # type: ignore[misc]
    def __init__(self, emulator: ModalEmulator) -> None:
        self.emulator = emulator

    @unary
    def ClientHello(self, request: Empty) -> api_pb2.ClientHelloResponse:
        return api_pb2.ClientHelloResponse()

    @unary
    def AuthTokenGet(self, request: api_pb2.AuthTokenGetRequest) -> api_pb2.AuthTokenGetResponse:
        return api_pb2.AuthTokenGetResponse(token=self.emulator.auth_token)

    @unary
    def EnvironmentGetOrCreate(self, request: Any) -> api_pb2.EnvironmentGetOrCreateResponse:
        environment = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name=request.deployment_name or "main", settings=environment)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-main", metadata=metadata)

    @unary
    def AppGetOrCreate(self, request: api_pb2.AppGetOrCreateRequest) -> api_pb2.AppGetOrCreateResponse:
        return api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.environment_name}-{request.app_name}")

    @unary
    def ImageGetOrCreate(self, request: api_pb2.ImageGetOrCreateRequest) -> api_pb2.ImageGetOrCreateResponse:
        identifier = f"im-{uuid.uuid5(uuid.NAMESPACE_OID, str(request.image)).hex}"
        self.emulator.images[identifier] = request.image
        lines = [*request.image.dockerfile_commands]
        if request.namespace == api_pb2.DEPLOYMENT_NAMESPACE_GLOBAL or len(lines) == 1:  # built by others before
            result = GenericResult(status=GenericResult.GENERIC_STATUS_SUCCESS)
            return api_pb2.ImageGetOrCreateResponse(image_id=identifier, result=result)
        with self.emulator.lock:
            build = self.emulator.builds.get(identifier)
            if build is None or build.error:
                build = self.emulator.start_build(identifier, "\n".join(lines))
        return api_pb2.ImageGetOrCreateResponse(image_id=identifier, result=describe_result(build))

    async def ImageJoinStreaming(self, stream: Any) -> None:
        """Send the log after an entry, whose id is an offset, until the build or the time of the request ends."""
        request = await stream.recv_message()
        build = self._find_build(request.image_id)
        await asyncio.to_thread(build.ended.wait, request.timeout)
        result, start = describe_result(build), int(request.last_entry_id or 0)
        entries = [api_pb2.TaskLogs(data=build.log[start:])] if build.log[start:] else []
        entry_id = str(start + sum(len(entry.data) for entry in entries))
        await stream.send_message(api_pb2.ImageJoinStreamingResponse(task_logs=entries, entry_id=entry_id, result=result))

    @unary
    def ImageFromId(self, request: api_pb2.ImageFromIdRequest) -> api_pb2.ImageFromIdResponse:
        if request.image_id in self.emulator.snapshots:
            return api_pb2.ImageFromIdResponse(image_id=request.image_id)
        return api_pb2.ImageFromIdResponse(image_id=self._find_build(request.image_id).id)

    @unary
    def ImageDelete(self, request: api_pb2.ImageDeleteRequest) -> Empty:
        if request.image_id in self.emulator.snapshots:
            self.emulator.delete_snapshot(request.image_id)
            return Empty()
        self.emulator.remove_build(self._find_build(request.image_id).id)
        del self.emulator.images[request.image_id]
        return Empty()

    def _find_build(self, image_id: str) -> ImageBuild:
        if build := self.emulator.builds.get(image_id):
            return build
        raise GRPCError(Status.NOT_FOUND, f"Image {image_id} not found")

    @unary
    def SandboxCreateV2(self, request: api_pb2.SandboxCreateV2Request) -> api_pb2.SandboxCreateV2Response:
        sandbox = self.emulator.create(request)
        access = api_pb2.CommandRouterAccess(url=self.emulator.api_url, jwt=sandbox.token)
        return api_pb2.SandboxCreateV2Response(sandbox_id=sandbox.id, task_id=sandbox.task_id, command_router_access=access)

    @unary
    def SandboxCreate(self, request: api_pb2.SandboxCreateRequest) -> api_pb2.SandboxCreateResponse:
        return api_pb2.SandboxCreateResponse(sandbox_id=self.emulator.create(request).id)

    @unary
    def SandboxGetFromName(self, request: Any) -> api_pb2.SandboxGetFromNameResponse:
        return self._find_by_name(request, is_of_older_backend=True)

    @unary
    def SandboxGetFromNameV2(self, request: Any) -> api_pb2.SandboxGetFromNameResponse:
        return self._find_by_name(request, is_of_older_backend=False)

    def _find_by_name(self, request: Any, *, is_of_older_backend: bool) -> api_pb2.SandboxGetFromNameResponse:
        for sandbox in self.emulator.find_running(request.sandbox_name):
            is_of_app = sandbox.request.app_id == f"ap-{request.environment_name}-{request.app_name}"
            if is_of_app and sandbox.is_of_older_backend == is_of_older_backend:
                return api_pb2.SandboxGetFromNameResponse(sandbox_id=sandbox.id)
        raise GRPCError(Status.NOT_FOUND, f"Sandbox with name {request.sandbox_name} not found")

    @unary
    def SandboxListV2(self, request: api_pb2.SandboxListRequest) -> api_pb2.SandboxListResponse:
        """List the newest sandboxes before a time, 0: now."""
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        found = [
            api_pb2.SandboxInfo(id=sandbox.id, created_at=sandbox.created_at, name=sandbox.name, app_id=request.app_id)
            for sandbox in sorted(self.emulator.list_running(), key=lambda sandbox: -sandbox.created_at)
            if sandbox.request.app_id == request.app_id
            and wanted.items() <= sandbox.tags.items()
            and sandbox.created_at < (request.before_timestamp or float("inf"))
        ]
        return api_pb2.SandboxListResponse(sandboxes=[] if self.emulator.is_listing_late else found[:PAGE_SIZE])

    @unary
    def SandboxTagsGetV2(self, request: api_pb2.SandboxTagsGetRequest) -> api_pb2.SandboxTagsGetResponse:
        return api_pb2.SandboxTagsGetResponse(tags=self.emulator.find(request.sandbox_id).request.tags)

    @unary
    def SandboxWaitV2(self, request: api_pb2.SandboxWaitRequest) -> api_pb2.SandboxWaitResponse:
        sandbox, deadline = self.emulator.find(request.sandbox_id), time.monotonic() + request.timeout
        while not sandbox.result.status and time.monotonic() < deadline:
            time.sleep(0.01)
        return api_pb2.SandboxWaitResponse(result=sandbox.result)

    @unary
    def SandboxTerminateV2(self, request: api_pb2.SandboxTerminateRequest) -> api_pb2.SandboxTerminateResponse:
        sandbox = self.emulator.find(request.sandbox_id)
        if not sandbox.result.status:
            threading.Timer(TERMINATION_SECONDS, self.emulator.finish, (sandbox,)).start()
        return api_pb2.SandboxTerminateResponse(existing_result=sandbox.result)

    @unary
    def SandboxGetTaskIdV2(self, request: api_pb2.SandboxGetTaskIdRequest) -> api_pb2.SandboxGetTaskIdResponse:
        sandbox = self.emulator.find(request.sandbox_id)
        if sandbox.result.status:
            return api_pb2.SandboxGetTaskIdResponse(task_result=sandbox.result)
        return api_pb2.SandboxGetTaskIdResponse(task_id=sandbox.task_id)

    # The older backend has the same requests under other names.
    SandboxTagsGet, SandboxWait = SandboxTagsGetV2, SandboxWaitV2
    SandboxTerminate, SandboxGetTaskId = SandboxTerminateV2, SandboxGetTaskIdV2

    @unary
    def TaskGetCommandRouterAccess(self, request: Any) -> api_pb2.TaskGetCommandRouterAccessResponse:
        sandbox = self.emulator.find_task(request.task_id)
        return api_pb2.TaskGetCommandRouterAccessResponse(url=self.emulator.api_url, jwt=sandbox.token)

    @unary
    def SandboxGetCommandRouterAccess(self, request: Any) -> api_pb2.SandboxGetCommandRouterAccessResponse:
        sandbox = self.emulator.find(request.sandbox_id)
        if sandbox.result.status:
            raise GRPCError(Status.FAILED_PRECONDITION, f"Sandbox {sandbox.id} has finished")
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self.emulator.api_url, jwt=sandbox.token)


class CommandRouter(implement(TaskCommandRouterBase)):  # type: ignore[misc]
    def __init__(self, emulator: ModalEmulator) -> None:
        self.emulator = emulator

    @unary
    def TaskSnapshotDirectory(self, request: router_pb2.TaskSnapshotDirectoryRequest) -> Any:
        return router_pb2.TaskSnapshotDirectoryResponse(image_id=self.emulator.take_snapshot(request))

    @unary
    def TaskMountDirectory(self, request: router_pb2.TaskMountDirectoryRequest) -> Empty:
        snapshot = self.emulator.find_snapshot(request.image_id)
        self.emulator.find_task(request.task_id).machine.mount(snapshot.directory, request.path.decode())
        return Empty()

    @unary
    def TaskUnmountDirectory(self, request: router_pb2.TaskUnmountDirectoryRequest) -> Empty:
        self.emulator.find_task(request.task_id).machine.unmount(request.path.decode())
        return Empty()

    @unary
    def TaskExecStart(self, request: router_pb2.TaskExecStartRequest) -> router_pb2.TaskExecStartResponse:
        sandbox = self.emulator.find_task(request.task_id)
        with self.emulator.lock:
            if request.exec_id not in sandbox.executions:  # else a repeated request
                try:
                    process = sandbox.machine.popen(
                        [*request.command_args], cwd=request.workdir, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )  # fmt: skip
                except NotRunning:
                    raise GRPCError(Status.NOT_FOUND, f"Task {request.task_id} not found") from None
                sandbox.executions[request.exec_id] = Execution(process, request.timeout_secs)
        return router_pb2.TaskExecStartResponse()

    @unary
    def TaskExecStdinWrite(self, request: router_pb2.TaskExecStdinWriteRequest) -> router_pb2.TaskExecStdinWriteResponse:
        self._find(request).write(request.offset, request.data, eof=request.eof)
        return router_pb2.TaskExecStdinWriteResponse()

    @unary
    def TaskExecWait(self, request: router_pb2.TaskExecWaitRequest) -> router_pb2.TaskExecWaitResponse:
        execution = self._find(request)
        execution.ended.wait()
        return execution.result

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        output, offset = self._find(request).outputs[request.file_descriptor], request.offset
        async for chunk in self._read(output, offset):
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=chunk))

    async def _read(self, output: Output, offset: int) -> AsyncIterator[bytes]:
        while chunk := await asyncio.to_thread(output.read, offset):
            offset += len(chunk)
            yield chunk

    def _find(self, request: Any) -> Execution:
        with self.emulator.lock:
            for sandbox in self.emulator.sandboxes.values():
                if sandbox.task_id == request.task_id and request.exec_id in sandbox.executions:
                    return sandbox.executions[request.exec_id]
        raise GRPCError(Status.NOT_FOUND, f"Exec {request.exec_id} not found")


def describe_result(build: ImageBuild) -> GenericResult:
    """Return the result of a build, without a status until it has ended."""
    if not build.ended.is_set():
        return GenericResult()
    if build.error:
        return GenericResult(status=GenericResult.GENERIC_STATUS_FAILURE, exception=build.error)
    return GenericResult(status=GenericResult.GENERIC_STATUS_SUCCESS)


def create_token() -> str:
    """Return a JSON Web Token that is valid for an hour. Its signature is not checked."""
    parts = {"alg": "none"}, {"exp": int(time.time()) + 3600, "jti": uuid.uuid4().hex}
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), "x"])
