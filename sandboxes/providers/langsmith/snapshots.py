"""Images of LangSmith: snapshots. Its API builds none from a Dockerfile; a sandbox of its default snapshot contains BuildKit.

1. A builder, which is a sandbox of this provider, runs BuildKit as a background process. Its name is derived from that of the
   build, and the process has a mark, so an interrupted build is found again.
2. The API captures a snapshot of the image that the process has loaded. The name of the snapshot is that of the build.
3. The builder is destroyed. The vendor stops and deletes one whose control plane has died."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Protocol

from django.conf import settings
from langsmith.sandbox import ResourceCreationError, ResourceTimeoutError, SandboxClient, Snapshot

from sandboxes.providers.answer_guard import guard_methods
from sandboxes.providers.base import WORKSPACE, ProviderSandbox
from sandboxes.providers.command_results import ProcessOutput, ProcessState
from sandboxes.providers.errors import Missing, ProviderError, Unavailable
from sandboxes.providers.remote.images import BuildState, VendorBuild, VendorBuilds
from sandboxes.providers.remote.labels import NAME_LABEL, OWNER_LABEL

BUILDER_PREFIX = "leasehold-build-"
BUILDER_OWNER = "template-build"
BUILDER_SECONDS = 3600  # without a call, until the vendor stops a builder, and again until it deletes the builder
BUILDER_VCPUS, BUILDER_MEMORY_BYTES = 2, 4 << 30
IMAGE = "leasehold-template:build"  # in the builder
DIRECTORY = f"{WORKSPACE}/build"  # context of the build, with the Dockerfile alone
MAX_LOG_BYTES = 1 << 20  # read at one look
PAGE_SIZE = 500  # the maximum of the API
STATES = {"ready": BuildState.READY, "failed": BuildState.REFUSED}
# BuildKit without containerd. Its files are in /workspace: /tmp of these sandboxes is memory.
SCRIPT = f"""set -euo pipefail
mkdir -p {WORKSPACE}/.buildkit
cd {WORKSPACE}/.buildkit
address=unix://$PWD/buildkitd.sock
buildkitd --addr "$address" --root "$PWD/root" --oci-worker=true --containerd-worker=false \\
  --oci-worker-snapshotter=native --oci-worker-binary buildkit-runc >buildkitd.log 2>&1 &
daemon=$!
trap 'kill "$daemon"' EXIT
until buildctl --addr "$address" debug workers >/dev/null 2>&1; do
  kill -0 "$daemon" || {{ cat buildkitd.log; exit 1; }}
  sleep 0.2
done
buildctl --addr "$address" build --progress=plain --frontend dockerfile.v0 --local context={DIRECTORY} \\
  --local dockerfile={DIRECTORY} --output type=docker,name={IMAGE} | docker load
"""
TranslateErrors = Callable[[str], AbstractContextManager[None]]


class Sandboxes(Protocol):
    """Verbs of the provider that a builder needs."""

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None: ...

    def inspect(self, ref: str) -> ProviderSandbox: ...

    def destroy(self, ref: str) -> None: ...

    def write_file(self, ref: str, path: str, content: bytes) -> None: ...

    def start(self, ref: str, argv: Sequence[str], *, env: Mapping[str, str], mark: str) -> ProcessState: ...

    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]: ...

    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput: ...


@guard_methods("find", "start", "look", "remove")
class SnapshotBuilds(VendorBuilds):
    """Builds of snapshots in one workspace. The cursor of a build is its name; its id is the builder's until the capture."""

    def __init__(self, client: SandboxClient, sandboxes: Sandboxes, translate_errors: TranslateErrors) -> None:
        self._client, self._sandboxes, self._translate_errors = client, sandboxes, translate_errors

    def find(self, name: str) -> VendorBuild | None:
        builder = _get_builder(name)
        if snapshot := self._find_snapshot(name):
            return VendorBuild(snapshot.id, BuildState.RUNNING, cursor=name)
        try:
            self._sandboxes.inspect(builder)
            if builder not in self._sandboxes.processes(builder, [builder]):
                return None
        except Missing:
            return None
        return VendorBuild(builder, BuildState.RUNNING, cursor=name)

    def start(self, name: str, dockerfile: str) -> VendorBuild:
        builder = _get_builder(name)
        self._create_builder(builder)
        self._sandboxes.wait_ready(builder, timeout=settings.SANDBOX_START_TIMEOUT)
        self._sandboxes.write_file(builder, f"{DIRECTORY}/Dockerfile", dockerfile.encode())
        self._sandboxes.start(builder, ["bash", "-c", SCRIPT], env={}, mark=builder)
        return VendorBuild(builder, BuildState.RUNNING, cursor=name)

    def _create_builder(self, builder: str) -> None:
        try:
            with self._translate_errors(builder):
                self._client.create_sandbox(
                    name=builder, wait_for_ready=False, labels={OWNER_LABEL: BUILDER_OWNER, NAME_LABEL: builder},
                    idle_ttl_seconds=BUILDER_SECONDS, delete_after_stop_seconds=BUILDER_SECONDS,
                    vcpus=BUILDER_VCPUS, mem_bytes=BUILDER_MEMORY_BYTES,
                )  # fmt: skip
        except ProviderError as error:
            try:
                self._sandboxes.inspect(builder)  # it exists, or an unknown outcome was a success
            except Missing:
                raise error from None

    def look(self, build: VendorBuild) -> str:
        builder = _get_builder(build.cursor)
        if snapshot := self._find_snapshot(build.cursor):
            text = self._read_rest_of_log(build, builder)
            build.id, build.state = snapshot.id, STATES.get(snapshot.status, BuildState.RUNNING)
            build.error, build.size_bytes = snapshot.status_message or "The capture failed.", snapshot.fs_used_bytes
        else:
            text = self._look_at_builder(build, builder)
        if build.state != BuildState.RUNNING:
            with suppress(ProviderError):
                self._sandboxes.destroy(builder)
        return text

    def _look_at_builder(self, build: VendorBuild, builder: str) -> str:
        process = self._sandboxes.processes(builder, [builder]).get(builder)
        if process is None:
            raise Missing(f"The process of {builder} is gone.")
        text = self._read_log(build, builder)
        if text or process.running:
            return text  # the rest of the log first
        if process.exit_code:
            build.state, build.error = BuildState.COMMAND_FAILED, f"BuildKit exited with code {process.exit_code}. See the log."
        else:
            self._capture(builder, build.cursor)
        return text

    def _capture(self, builder: str, name: str) -> None:
        """Request the capture. The next look finds the snapshot."""
        with self._translate_errors(name), suppress(ResourceCreationError, ResourceTimeoutError):
            self._client.capture_snapshot(builder, name, docker_image=IMAGE, timeout=0)

    def _read_rest_of_log(self, build: VendorBuild, builder: str) -> str:
        try:
            return self._read_log(build, builder)
        except (Missing, Unavailable):
            return ""  # the builder is gone, and so is its log

    def _read_log(self, build: VendorBuild, builder: str) -> str:
        output = self._sandboxes.log(builder, builder, start=build.position, length=MAX_LOG_BYTES)
        build.position = output.next
        return output.content.decode(errors="replace")

    def remove(self, build_id: str) -> None:
        if build_id.startswith(BUILDER_PREFIX):
            self._sandboxes.destroy(build_id)
            return
        with self._translate_errors(build_id):
            self._client.delete_snapshot(build_id)

    def _find_snapshot(self, name: str) -> Snapshot | None:
        with self._translate_errors(name):
            listed = self._client.list_snapshots(name_contains=name, limit=PAGE_SIZE)
        found = [snapshot for snapshot in listed if snapshot.name == name]
        return max(found, key=lambda snapshot: snapshot.created_at or "", default=None)


def _get_builder(name: str) -> str:
    return f"{BUILDER_PREFIX}{hashlib.sha256(name.encode()).hexdigest()[:24]}"
