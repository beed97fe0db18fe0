"""Subresources of Pods: log and exec."""

from typing import Any

from docker.errors import APIError

from tests.emulators.kubernetes.api.server import Request, Response, Stream
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.node.exec import V4, V5, Session
from tests.emulators.kubernetes.node.kubelet import Kubelet


class Connections:
    """Connections to containers of the node's Pods."""

    def __init__(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet

    def read_log(self, request: Request, pod: dict[str, Any]) -> Response:
        """Return the output of a container, to its end or until now."""
        identifier = self._find_container(pod, request.get("container"))
        lines = int(request.get("tailLines")) if request.get("tailLines") else "all"
        output = self.kubelet.engine.client.logs(
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
        """Execute a command over a WebSocket. SPDY is refused."""
        if (request.headers.get("Upgrade") or "").lower() != "websocket":
            raise ApiError(400, "Upgrade request required: only WebSockets are served")
        offered = [name.strip() for name in (request.headers.get("Sec-WebSocket-Protocol") or "").split(",")]
        subprotocol = next((name for name in (V5, V4) if name in offered), None)
        if subprotocol is None:
            raise ApiError(400, f"unable to negotiate protocol: client supports {offered}, server supports {[V5, V4]}")
        identifier, command = self._find_container(pod, request.get("container")), list(request.query.get("command", ()))
        if not command:
            raise ApiError(400, "you must specify at least 1 command")
        flags = {name: request.is_true(name) for name in ("stdin", "stdout", "stderr", "tty")}
        try:
            exec_id = self.kubelet.engine.client.exec_create(identifier, command, **flags)["Id"]
        except APIError as failed:
            raise ApiError(500, f"unable to upgrade connection: container not found: {failed.explanation}") from None
        session = Session(
            self.kubelet.engine.client, exec_id, tty=flags["tty"], has_stdin=flags["stdin"], cuts_status=cuts_status
        )  # fmt: skip
        return Response(upgrade=session.serve, subprotocol=subprotocol)

    def _find_container(self, pod: dict[str, Any], name: str) -> str:
        """Return the id of a container, by default the first one. Raise ApiError."""
        name = name or pod["spec"]["containers"][0]["name"]
        if name not in {container["name"] for container in pod["spec"]["containers"]}:
            raise ApiError(400, f"container {name} is not valid for pod {pod['metadata']['name']}")
        sandbox = self.kubelet.find_sandbox(pod)
        if sandbox is None or name not in sandbox.containers:
            raise ApiError(400, f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: ContainerCreating')
        return sandbox.containers[name]
