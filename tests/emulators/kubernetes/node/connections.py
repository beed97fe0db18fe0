"""Subresources of Pods: log and exec."""

from typing import Any

from tests.emulators.kubernetes.api.server import Request, Response, Stream
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.node.kubelet import Kubelet


class Connections:
    """Connections to containers of the node's Pods."""

    def __init__(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet

    def read_log(self, request: Request, pod: dict[str, Any]) -> Response:
        """Return the output of a container, to its end or until now."""
        identifier = self._find_container(pod, request.get("container"))
        lines = int(request.get("tailLines")) if request.get("tailLines") else "all"
        output = self.kubelet.client.logs(
            identifier, stream=True, follow=request.is_true("follow"), timestamps=request.is_true("timestamps"), tail=lines
        )
        limit = int(request.get("limitBytes") or 0)

        def send(stream: Stream) -> None:
            left = limit
            for chunk in output:
                stream.write(chunk[:left] if limit else chunk)
                left -= len(chunk)
                if limit and left <= 0:
                    break

        return Response(content_type="text/plain", stream=send)

    def open_exec(self, request: Request, pod: dict[str, Any], *, cuts_status: bool) -> Response:
        raise ApiError(400, "exec is not served")

    def _find_container(self, pod: dict[str, Any], name: str) -> str:
        """Return the id of a container, by default the first one. Raise ApiError."""
        name = name or pod["spec"]["containers"][0]["name"]
        if name not in {container["name"] for container in pod["spec"]["containers"]}:
            raise ApiError(400, f"container {name} is not valid for pod {pod['metadata']['name']}")
        sandbox = self.kubelet.find_sandbox(pod)
        if sandbox is None or name not in sandbox.containers:
            raise ApiError(400, f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: ContainerCreating')
        return sandbox.containers[name]
