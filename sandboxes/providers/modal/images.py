"""Images of Modal, built from the lines of a Dockerfile by calls of its gRPC API.

An image is identified by its definition: a request for a definition that is being built, or was built, returns that image.
The name of a build is a label in the definition, so each requested build has an image of its own, and a repeated request has
the same. Modal states no size of an image, and has no list of images: an image whose process died stays in the account if its
build is not requested again."""

import json
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import modal
from modal._utils.async_utils import synchronize_api
from modal_proto import api_pb2

from sandboxes.providers.answer_guard import guard_methods
from sandboxes.providers.remote.images import BuildState, VendorBuild, VendorBuilds

JOIN_SECONDS = 5.0  # for which one call waits for output
Status = api_pb2.GenericResult.GenericStatus
STATES = {
    Status.GENERIC_STATUS_UNSPECIFIED: BuildState.RUNNING, Status.GENERIC_STATUS_SUCCESS: BuildState.READY,
    Status.GENERIC_STATUS_FAILURE: BuildState.COMMAND_FAILED,
}  # fmt: skip
Call = Callable[[str, Coroutine[Any, Any, Any]], Any]


class Connection(Protocol):
    """Client of one process."""

    environment: str

    async def get_client(self) -> modal.Client: ...

    async def look_up_app(self) -> modal.App: ...


@guard_methods("find", "start", "look", "remove")
class ImageBuilds(VendorBuilds):
    """Builds of images by one environment. `call` awaits a coroutine with a time limit and translates its errors."""

    def __init__(self, connection: Connection, call: Call) -> None:
        self._connection, self._call = connection, call

    def find(self, name: str) -> VendorBuild | None:
        return None  # `start` finds it

    def start(self, name: str, dockerfile: str) -> VendorBuild:
        lines = [*dockerfile.splitlines(), f"LABEL leasehold.build={json.dumps(name)}"]
        response = self._call(name, self._request(lines))
        return VendorBuild(response.image_id, BuildState.RUNNING)

    async def _request(self, lines: list[str]) -> api_pb2.ImageGetOrCreateResponse:
        app, client = await self._connection.look_up_app(), await self._connection.get_client()
        return await _request_image.aio(client, app.app_id or "", self._connection.environment, lines)

    def look(self, build: VendorBuild) -> str:
        text = ""
        for response in self._call(build.id, self._join(build)):
            build.cursor = response.entry_id or build.cursor
            text += "".join(entry.data for entry in response.task_logs)
            if response.result.status:
                build.state = STATES.get(response.result.status, BuildState.REFUSED)
                build.error = response.result.exception or f"The build ended with {Status.Name(response.result.status)}."
        return text

    async def _join(self, build: VendorBuild) -> list[api_pb2.ImageJoinStreamingResponse]:
        return await _join_build.aio(await self._connection.get_client(), build.id, build.cursor)

    def remove(self, build_id: str) -> None:
        self._call(build_id, self._delete(build_id))

    async def _delete(self, build_id: str) -> None:
        await _delete_image.aio(await self._connection.get_client(), build_id)


# The client's own calls run in its own event loop.


@synchronize_api
async def _request_image(client: Any, app_id: str, environment: str, lines: list[str]) -> api_pb2.ImageGetOrCreateResponse:
    found = await client._stub.EnvironmentGetOrCreate(api_pb2.EnvironmentGetOrCreateRequest(deployment_name=environment))
    return await client._stub.ImageGetOrCreate(
        api_pb2.ImageGetOrCreateRequest(
            app_id=app_id,
            image=api_pb2.Image(dockerfile_commands=lines),
            builder_version=found.metadata.settings.image_builder_version,
        )
    )


@synchronize_api
async def _join_build(client: Any, image_id: str, cursor: str) -> list[api_pb2.ImageJoinStreamingResponse]:
    request = api_pb2.ImageJoinStreamingRequest(
        image_id=image_id, timeout=JOIN_SECONDS, last_entry_id=cursor, include_logs_for_finished=True
    )
    return [response async for response in client._stub.ImageJoinStreaming.unary_stream(request)]


@synchronize_api
async def _delete_image(client: Any, image_id: str) -> None:
    await client._stub.ImageDelete(api_pb2.ImageDeleteRequest(image_id=image_id))
