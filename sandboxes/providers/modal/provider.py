"""Modal provider: sandboxes of Modal, by its client.

The name of a sandbox is unique among the running sandboxes of an app. A create whose outcome is unknown, or whose name is
taken, is therefore settled by a look-up of the name. Owner, name and time of creation are tags.

Modal cannot stop a sandbox: one that was idle for its idle timeout, or has reached the end of its lifetime, is terminated and
its files are gone. A finished sandbox does not exist any more.

Most calls of the client have no time limit, so the coroutines of its API are awaited with one. Files are uploaded by stdin of a
command: the file API of the client executes a program of Modal in the sandbox."""

import asyncio
import math
import os
import re
import shlex
import time
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import modal
import modal.experimental
from django.conf import settings
from grpclib.exceptions import StreamTerminatedError
from modal import exception
from modal.stream_type import StreamType
from modal_proto import api_pb2

from sandboxes.providers.answer_guard import guard_answers, translate_answer
from sandboxes.providers.base import Network, ProviderSandbox, SandboxSpec
from sandboxes.providers.errors import FailureCause, NoCapacity, ProviderError, Rejected, Unavailable
from sandboxes.providers.modal.images import ImageBuilds
from sandboxes.providers.remote.configuration import RemoteConfiguration, find_gateway_destination
from sandboxes.providers.remote.errors import (
    MAX_RETRY_AFTER_SECONDS,
    Conflict,
    NotFound,
    raise_for_transport,
    states_quota,
)
from sandboxes.providers.remote.images import ImageBuildingProvider, require_image
from sandboxes.providers.remote.labels import NAME_LABEL, OWNER_LABEL, build_labels, require_owner
from sandboxes.providers.remote.lifecycle import Pause
from sandboxes.providers.remote.provider import TRANSIENT_CAUSES
from sandboxes.redaction.texts import quote_answer

Result = TypeVar("Result")
MAX_THROTTLE_SECONDS = 5  # for which a call waits when Modal limits the rate; after a longer time the caller repeats it
APP_NAME = "leasehold"  # app of all sandboxes, in one environment
CREATED_TAG = "leasehold.created"  # Unix time in seconds: the client's list does not state the time of creation
MAX_TAG_LENGTH = 63
MILLICPUS_PER_CORE = 2000  # Modal counts physical cores of 2 vCPUs. Source: its guide, "Sandbox resources and pricing", 2026
MIN_CORES = 0.125  # the default reservation. Source: its guide, "Configuring CPU, memory, and disk"
CONNECT_TIMEOUT_SECONDS = 10.0  # of the first connection of a process, which the client attempts for a minute
EXEC_GRACE_SECONDS = 30.0  # beyond the time limit of a command
UPLOAD_TIMEOUT_SECONDS = 300
UPLOAD_PART_BYTES = 1 << 20
SNAPSHOT_TIMEOUT_SECONDS = 120
COPY_TIMEOUT = timedelta(minutes=2)  # of the files of a snapshot within a sandbox
MAX_CONCURRENT_CALLS = 20  # of one listing
TIMED_OUT_CODES = (-1, 137)  # of a command at its deadline: stated by the client, or by the vendor that killed the command


@guard_answers
class ModalProvider(ImageBuildingProvider):
    """Provider for one environment of a workspace at Modal: MODAL_TOKEN_ID, MODAL_TOKEN_SECRET, MODAL_ENVIRONMENT."""

    name = "modal"
    account_option = "environment"
    has_auto_stop = True  # fixed at the creation
    stop_keeps_files = False
    has_gpus = needs_gpu_type = True  # the client's `Sandbox.create` has no parameter for the disk
    max_inline_bytes = 42_000  # the client accepts 65536 bytes in the arguments of a command, which contain this as base64
    call_timeout_seconds = 60.0  # of one operation, with the repetitions of the client

    def __init__(self) -> None:
        super().__init__()
        self.max_lifetime = timedelta(minutes=int(self.configuration.options["lifetime_minutes"]))
        minimum = self.configuration.options["snapshot_min_mib"]
        self.min_directory_snapshot_bytes = int(minimum) << 20 if minimum else None

    @property
    def _connection(self) -> "_Connection":
        return self._get_clients(lambda: _Connection(self.configuration))

    @property
    def _builds(self) -> ImageBuilds:
        return ImageBuilds(self._connection, self._call)

    # Lifecycle

    def create(self, spec: SandboxSpec) -> str:
        try:
            self._call(spec.name, self._connection.create(spec), seconds=settings.SANDBOX_START_TIMEOUT.total_seconds())
        except ProviderError as error:
            require_owner(spec, self._settle_create(spec.name, error).get(OWNER_LABEL))
        return spec.name

    def _wait_running(self, ref: str, deadline: float) -> None:
        """Wait until a command runs: Modal schedules a sandbox after it has answered the create."""
        pause = Pause(deadline)
        while True:
            try:
                self._execute(ref, "true", timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
                return
            except Unavailable as error:
                if error.cause not in TRANSIENT_CAUSES:
                    raise
                pause.wait(f"{ref} is not ready in time: {error}")

    def _delete(self, ref: str) -> None:
        self._call(ref, self._connection.terminate(ref))

    def _look_up(self, ref: str) -> dict[str, str]:
        """Return the tags of a running sandbox."""
        return self._call(ref, self._connection.fetch_tags(ref))

    def _is_listed(self, ref: str) -> bool:
        return bool(self._call("the list of sandboxes", self._connection.list_sandboxes({NAME_LABEL: ref})))

    def inspect(self, ref: str) -> ProviderSandbox:
        return _to_sandbox(self._get(ref))

    def list_all(self) -> list[ProviderSandbox]:
        return self._call("the list of sandboxes", self._connection.list_sandboxes({}))

    def list(self, owner: str) -> list[ProviderSandbox]:
        return self._call("the list of sandboxes", self._connection.list_sandboxes({OWNER_LABEL: owner}))

    # Snapshots

    def snapshot_directory(self, ref: str, root: str, *, ttl: timedelta) -> str:
        call = self._connection.snapshot_directory(ref, root, ttl)
        return self._call(ref, call, seconds=SNAPSHOT_TIMEOUT_SECONDS + EXEC_GRACE_SECONDS)

    def restore_directory(self, ref: str, root: str, snapshot: str) -> None:
        """Mount the snapshot aside and copy its files: a mount of unknown outcome then changes nothing in `root`."""
        path = f"/mnt/leasehold-{uuid.uuid4().hex}"
        try:
            self._call(ref, self._connection.mount_snapshot(ref, path, snapshot))
        except ProviderError as error:
            self.inspect(ref)  # raises Missing if there is no sandbox
            raise Rejected(f"{ref}: the snapshot {snapshot} could not be mounted: {error}") from error
        copied = self.exec(ref, ["cp", "-a", f"{path}/.", root], env={}, timeout=COPY_TIMEOUT, mark=uuid.uuid4().hex)
        with suppress(ProviderError):
            self._call(ref, self._connection.unmount(ref, path))
        if copied.exit_code or copied.timed_out:
            text = copied.stderr[-300:].decode(errors="replace")
            raise Rejected(f"{ref}: the files of the snapshot {snapshot} could not be copied: {text}")

    def delete_directory_snapshot(self, snapshot: str) -> None:
        with suppress(NotFound):
            self._call(snapshot, self._connection.delete_snapshot(snapshot))

    # Commands and files

    def _execute(self, ref: str, command: str, *, timeout: timedelta) -> str:
        return self._run_shell(ref, command, math.ceil(timeout.total_seconds())).decode(errors="replace")

    def _upload(self, ref: str, path: str, content: bytes) -> None:
        target = shlex.quote(path)
        output = self._run_shell(ref, f"cat >{target} && wc -c <{target}", UPLOAD_TIMEOUT_SECONDS, content)
        if output.split() != [b"%d" % len(content)]:
            text = output[-300:].decode(errors="replace")
            raise Unavailable(f"{ref}: {path} was not written completely: {text}", cause=FailureCause.ENGINE_ERROR)

    def _run_shell(self, ref: str, command: str, seconds: int, stdin: bytes | None = None) -> bytes:
        """Execute a shell command and return its output, in which stdout and stderr are merged."""

        def run() -> bytes:
            call = self._connection.run_command(ref, f"exec 2>&1\n{command}", seconds, stdin)
            try:
                return self._call(ref, call, seconds=seconds + EXEC_GRACE_SECONDS)
            except ProviderError:
                self._connection.forget(ref)  # it may have finished
                raise

        return self._call_running(ref, run)

    def _call(self, subject: str, call: Coroutine[Any, Any, Result], *, seconds: float = 0.0) -> Result:
        """Await a call of the connection, by default for `call_timeout_seconds`."""
        with _translate_errors(subject):
            return asyncio.run(asyncio.wait_for(call, seconds or self.call_timeout_seconds))


class _Connection:
    """Client of one process, with the handles of sandboxes by name, and their tags by id.

    The client is constructed directly, because its constructor for credentials takes the address from the environment."""

    def __init__(self, configuration: RemoteConfiguration) -> None:
        # A setting of the client for this process. Without it the client waits as long as Modal says, however long that is.
        os.environ.setdefault("MODAL_MAX_THROTTLE_WAIT", str(MAX_THROTTLE_SECONDS))
        self._configuration = configuration
        self.environment = configuration.options["environment"]
        self._client: modal.Client | None = None
        self._sandboxes: dict[str, modal.Sandbox] = {}
        self._tags: dict[str, dict[str, str]] = {}  # nothing changes them after the creation

    async def get_client(self) -> modal.Client:
        """Return the client, connected. A client of concurrent first calls that is not kept is connected and not used."""
        if self._client is None:
            configuration = self._configuration
            credentials = (configuration.options["token_id"], configuration.api_key)
            client = modal.Client(configuration.api_url, api_pb2.CLIENT_TYPE_CLIENT, credentials)
            try:
                await asyncio.wait_for(client.__aenter__(), CONNECT_TIMEOUT_SECONDS)
            except TimeoutError:
                raise exception.ConnectionError(f"no connection within {CONNECT_TIMEOUT_SECONDS} s") from None
            self._client = client
        return self._client

    async def create(self, spec: SandboxSpec) -> None:
        auto_stop = spec.intervals.auto_stop if spec.intervals else self._configuration.auto_stop
        client = await self.get_client()
        cpu = max(spec.millicpus / MILLICPUS_PER_CORE, MIN_CORES)
        self._sandboxes[spec.name] = await modal.Sandbox.create.aio(
            "sleep",
            "infinity",
            app=await self.look_up_app(),
            client=client,
            name=spec.name,
            tags=_build_tags(spec),
            image=_choose_image(spec, self._configuration.image, client),
            cpu=(cpu, cpu),
            memory=(spec.memory_mib, spec.memory_mib),
            gpu=f"{spec.gpu_type}:{spec.gpus}" if spec.gpus else None,
            timeout=60 * int(self._configuration.options["lifetime_minutes"]),
            idle_timeout=math.ceil(auto_stop.total_seconds()) if auto_stop else None,
            **_build_network(self._configuration.network),
        )

    async def terminate(self, ref: str) -> None:
        self.forget(ref)
        sandbox = await self._look_up(ref)
        await sandbox.terminate.aio()

    async def fetch_tags(self, ref: str) -> dict[str, str]:
        """Return the tags of a running sandbox. Raise NotFoundError."""
        return await self._get_tags(await self._look_up(ref))

    async def list_sandboxes(self, tags: dict[str, str]) -> list[ProviderSandbox]:
        """Return the running sandboxes that have these tags, and an owner."""
        app = await self.look_up_app()
        listed = modal.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=await self.get_client())
        running = [sandbox async for sandbox in listed if sandbox.returncode is None]
        limit = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def get_tags(sandbox: modal.Sandbox) -> dict[str, str]:
            try:
                async with limit:
                    return await self._get_tags(sandbox)
            except exception.NotFoundError:
                return {}  # it has finished since

        return [_to_sandbox(found) for found in await asyncio.gather(*map(get_tags, running)) if OWNER_LABEL in found]

    async def run_command(self, ref: str, command: str, seconds: int, stdin: bytes | None) -> bytes:
        """Execute a shell command with a time limit, and return its stdout."""
        sandbox = self._sandboxes.get(ref)
        if sandbox is None:
            sandbox = self._sandboxes[ref] = await self._look_up(ref)
        deadline = time.monotonic() + seconds
        process = await sandbox.exec.aio("sh", "-c", command, timeout=seconds, text=False, stderr=StreamType.DEVNULL)
        if stdin is not None:
            for start in range(0, len(stdin), UPLOAD_PART_BYTES):
                process.stdin.write(stdin[start : start + UPLOAD_PART_BYTES])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
        output = await process.stdout.read.aio()
        if await process.wait.aio() in TIMED_OUT_CODES and time.monotonic() >= deadline:
            raise exception.ExecTimeoutError(f"no result within {seconds} s")
        return bytes(output)

    async def snapshot_directory(self, ref: str, root: str, ttl: timedelta) -> str:
        """Return the id of an image with the files of a directory, which Modal deletes after `ttl`."""
        sandbox, seconds = await self._look_up(ref), math.ceil(ttl.total_seconds())
        image = await sandbox.snapshot_directory.aio(root, timeout=SNAPSHOT_TIMEOUT_SECONDS, ttl=seconds)
        return str(image.object_id)

    async def mount_snapshot(self, ref: str, path: str, snapshot: str) -> None:
        image = modal.Image.from_id(snapshot, client=await self.get_client())
        await (await self._look_up(ref)).mount_image.aio(path, image)

    async def unmount(self, ref: str, path: str) -> None:
        await (await self._look_up(ref)).unmount_image.aio(path)

    async def delete_snapshot(self, snapshot: str) -> None:
        await modal.experimental.image_delete.aio(snapshot, client=await self.get_client())

    def forget(self, ref: str) -> None:
        """Discard the handle of a sandbox, which is connected to the machine that runs the sandbox."""
        if sandbox := self._sandboxes.pop(ref, None):
            self._tags.pop(sandbox.object_id, None)

    async def look_up_app(self) -> modal.App:
        return await modal.App.lookup.aio(
            APP_NAME, client=await self.get_client(), environment_name=self.environment or None, create_if_missing=True
        )

    async def _look_up(self, ref: str) -> modal.Sandbox:
        """Return the running sandbox of this name. Raise NotFoundError."""
        sandbox = await modal.Sandbox.from_name.aio(
            APP_NAME, ref, environment_name=self.environment or None, client=await self.get_client()
        )
        if await sandbox.poll.aio() is not None:
            raise exception.NotFoundError(f"{ref} has finished.")
        return sandbox

    async def _get_tags(self, sandbox: modal.Sandbox) -> dict[str, str]:
        tags = self._tags.get(sandbox.object_id)
        if tags is None:
            tags = self._tags[sandbox.object_id] = await sandbox.get_tags.aio()
        return tags


def _choose_image(spec: SandboxSpec, default: str, client: modal.Client) -> modal.Image:
    if spec.image_id:
        return modal.Image.from_id(spec.image_id, client=client)
    image = require_image(spec, default)
    return modal.Image.from_registry(image) if image else modal.Image.debian_slim()


def _build_tags(spec: SandboxSpec) -> dict[str, str]:
    """Return the tags of a new sandbox. Characters that Modal does not accept are replaced."""
    tags = {**build_labels(spec), CREATED_TAG: str(int(time.time()))}  # noqa: TID251
    return {key: re.sub(r"[^A-Za-z0-9._-]", "-", value)[:MAX_TAG_LENGTH] for key, value in tags.items() if value}


def _build_network(network: Network) -> dict[str, Any]:
    """Return the arguments that restrict the network of a new sandbox."""
    if network == Network.OPEN:
        return {}
    cidr, domain = find_gateway_destination()
    if not cidr and not domain:
        return {"block_network": True}
    return {"outbound_cidr_allowlist": [cidr]} if cidr else {"outbound_domain_allowlist": [domain]}


def _to_sandbox(tags: dict[str, str]) -> ProviderSandbox:
    name, created_at = tags[NAME_LABEL], datetime.fromtimestamp(int(tags[CREATED_TAG]), UTC)
    return ProviderSandbox(ref=name, name=name, running=True, created_at=created_at, owner=tags.get(OWNER_LABEL, ""))


def _build_exhausted_error(subject: str, error: exception.ResourceExhaustedError) -> Unavailable:
    """Build the error of a quota that is used up, or of too many requests, with the time to wait that Modal states."""
    text = f"{subject}: {quote_answer(error)}"
    exhausted = (
        NoCapacity(text, cause=FailureCause.NO_CAPACITY)
        if states_quota(str(error))
        else Unavailable(text, cause=FailureCause.RATE_LIMITED)
    )
    # The client sets the details. Its public property of them warns that it will be removed.
    for detail in getattr(error, "_grpc_details", None) or ():
        if isinstance(detail, api_pb2.RPCRetryPolicy):
            seconds = detail.retry_after_secs if math.isfinite(detail.retry_after_secs) else MAX_RETRY_AFTER_SECONDS
            exhausted.retry_after = min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_SECONDS)
    return exhausted


@contextmanager
def _translate_errors(subject: str) -> Iterator[None]:
    with translate_answer(subject):
        try:
            yield
        except (exception.NotFoundError, exception.SandboxTerminatedError, exception.SandboxTimeoutError) as error:
            raise NotFound(f"{subject}: {quote_answer(error)}", cause=FailureCause.ENGINE_ERROR) from error
        except (exception.AlreadyExistsError, exception.ConflictError) as error:
            raise Conflict(f"{subject}: {quote_answer(error)}") from error
        except (exception.AuthError, exception.PermissionDeniedError) as error:
            raise Unavailable(f"{subject}: {quote_answer(error)}", cause=FailureCause.CREDENTIALS_REFUSED) from error
        except exception.ResourceExhaustedError as error:
            raise _build_exhausted_error(subject, error) from error
        except exception.ImageBuildError as error:
            raise Rejected(f"{subject}: {quote_answer(error)}", cause=FailureCause.IMAGE_UNUSABLE) from error
        except exception.InvalidError as error:
            raise Rejected(f"{subject}: {quote_answer(error)}") from error
        except (exception.TimeoutError, TimeoutError) as error:
            if isinstance(error.__cause__, exception.ResourceExhaustedError):  # the client has repeated the call for too long
                raise _build_exhausted_error(subject, error.__cause__) from error
            raise Unavailable(
                f"{subject}: no response of the vendor in time: {quote_answer(error)}", cause=FailureCause.TIMEOUT
            ) from error
        except (exception.ConnectionError, StreamTerminatedError, OSError) as error:
            raise_for_transport(subject, error)
        except exception.Error as error:
            raise Unavailable(f"{subject}: {quote_answer(error)}", cause=FailureCause.ENGINE_ERROR) from error
