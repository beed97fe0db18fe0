"""Images of Daytona: snapshots, built from a Dockerfile. The name of a snapshot is unique in its organization.

The size of a sandbox that is started from a snapshot is that of the snapshot, so a snapshot gets the default size of pools."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from daytona_api_client import CreateBuildInfo, CreateSnapshot, SnapshotDto, SnapshotsApi, SnapshotState
from daytona_api_client.exceptions import ApiException
from django.conf import settings

from sandboxes.providers.answer_guard import guard_methods
from sandboxes.providers.errors import Missing
from sandboxes.providers.remote.errors import NotFound
from sandboxes.providers.remote.images import BuildState, VendorBuild, VendorBuilds, cut_log

CALL_TIMEOUT_SECONDS = 60.0  # of one request
BYTES_PER_GB = 10**9  # Daytona states the size of a snapshot in GB
STATES = {
    SnapshotState.ACTIVE: BuildState.READY, SnapshotState.INACTIVE: BuildState.READY,
    SnapshotState.BUILD_FAILED: BuildState.COMMAND_FAILED, SnapshotState.ERROR: BuildState.REFUSED,
}  # fmt: skip
TranslateErrors = Callable[[str], AbstractContextManager[None]]


@guard_methods("find", "start", "look", "remove")
class SnapshotBuilds(VendorBuilds):
    """Builds of snapshots by one organization."""

    def __init__(self, client: Any, translate_errors: TranslateErrors) -> None:
        self._client, self._api, self._translate_errors = client, SnapshotsApi(client), translate_errors

    def find(self, name: str) -> VendorBuild | None:
        try:
            found = self._get(name)
        except NotFound:
            return None
        return _to_build(found) if found.state != SnapshotState.REMOVING else None

    def start(self, name: str, dockerfile: str) -> VendorBuild:
        request = CreateSnapshot(
            name=name,
            cpu=-(-settings.SANDBOX_MILLICPUS // 1000),
            memory=-(-settings.SANDBOX_MEMORY_MIB // 1024),  # GiB
            build_info=CreateBuildInfo(dockerfile_content=dockerfile),
        )
        with self._translate_errors(name):
            return _to_build(self._api.create_snapshot(request, _request_timeout=CALL_TIMEOUT_SECONDS))

    def look(self, build: VendorBuild) -> str:
        found = self._get(build.id)
        if found.state == SnapshotState.REMOVING:
            raise Missing(f"Daytona removes the snapshot {build.id}.")
        current = _to_build(found)
        build.state, build.note, build.error, build.size_bytes = current.state, current.note, current.error, current.size_bytes
        if build.note == SnapshotState.PENDING:
            return ""  # no runner has it yet, and so no log
        return cut_log(self._read_log(build.id), build)

    def remove(self, build_id: str) -> None:
        with self._translate_errors(build_id):
            self._api.remove_snapshot(build_id, _request_timeout=CALL_TIMEOUT_SECONDS)

    def _get(self, reference: str) -> SnapshotDto:
        with self._translate_errors(reference):
            found = self._api.get_snapshot(reference, _request_timeout=CALL_TIMEOUT_SECONDS)
            if found is None:  # the client's answer for other statuses of success
                raise ValueError("The answer contains no snapshot.")
            return found

    def _read_log(self, build_id: str) -> str:
        """Return the log so far. It is read in full: a stream that follows the log begins anew after each interruption."""
        with self._translate_errors(build_id):
            address = self._api.get_snapshot_build_logs_url(build_id, _request_timeout=CALL_TIMEOUT_SECONDS).url
            response = self._client.rest_client.pool_manager.request(
                "GET", address, headers=self._client.default_headers, timeout=CALL_TIMEOUT_SECONDS
            )
            if response.status >= 400:
                raise ApiException(status=response.status, reason=response.reason, body=response.data.decode(errors="replace"))
            return str(response.data.decode(errors="replace"))


def _to_build(found: SnapshotDto) -> VendorBuild:
    return VendorBuild(
        id=found.id,
        state=STATES.get(found.state, BuildState.RUNNING),
        note=str(found.state.value),
        error=found.error_reason or f"The snapshot is {found.state.value}.",
        size_bytes=round(found.size * BYTES_PER_GB) if found.size else None,
    )
