"""Emulator of the Cloudflare sandbox bridge, as recorded from a running bridge of version 0.12.7.

Any request with a well-formed id starts a container for it. `lose` replaces a container by an empty one at the next request, as
the platform does with idle ones, and nothing says so."""

import base64
import builtins
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxes.providers.cloudflare.provider import derive_id
from tests.emulators.machine import Machine, NotRunning
from tests.emulators.vendor import Rejected, Request, Response, VendorEmulator, as_json, route

ID = re.compile("[a-z2-7]{1,128}")
MAX_WRITE_BYTES = 24_000_000  # more fails as base64 in one argument of an RPC
FRAME_BYTES = 180_224


class CloudflareEmulator(VendorEmulator):
    home = "/home/sandbox"
    rejection = staticmethod(lambda status, message: {"error": message, "code": CODES.get(status, "invalid_request")})

    def __init__(self, directory: Path, port: int = 0) -> None:
        super().__init__(directory, port)
        self.containers: dict[str, Machine] = {}
        self.started = 0
        self.max_instances = 1000

    def list_machines(self) -> builtins.list[Machine]:
        return [*self.containers.values()]

    def find_machines(self, name: str) -> builtins.list[Machine]:
        found = self.containers.get(derive_id(name))
        return [found] if found else []

    def stop_idle(self, name: str) -> None:
        """Let a container sleep: its files are gone, and the next request starts an empty one."""
        with self.lock:
            machine = self.containers.pop(derive_id(name), None)
        if machine:
            machine.remove()

    def is_authorized(self, request: Request) -> bool:
        return request.path == "/health" or super().is_authorized(request)

    @route("GET", "/health")
    def report_health(self, request: Request) -> Response:
        return as_json({"ok": True})

    @route("GET", "/v1/pool/stats")
    def get_stats(self, request: Request) -> Response:
        count = len(self.containers)
        return as_json({"warm": 0, "assigned": count, "total": count, "config": {}, "maxInstances": self.max_instances})

    @route("GET", "/v1/sandbox/([^/]+)/running")
    def get_running(self, request: Request) -> Response:
        return as_json({"running": self._ensure(request).is_running})

    @route("DELETE", "/v1/sandbox/([^/]+)")
    def delete(self, request: Request) -> Response:
        self._ensure(request)
        with self.lock:
            machine = self.containers.pop(request.groups[0], None)
        if machine:
            machine.remove()
        return Response(204)

    @route("POST", "/v1/sandbox/([^/]+)/exec")
    def execute(self, request: Request) -> Response:
        fields, machine = request.json, self._ensure(request)
        if not fields.get("argv"):
            raise Rejected(400, self.rejection(400, "argv must be a non-empty array"))

        def stream(send: Callable[[bytes], None]) -> None:
            limit = fields["timeout_ms"] / 1000 if fields.get("timeout_ms") else None
            try:
                code, stdout, stderr = machine.run(fields["argv"], timeout=limit, cwd=fields.get("cwd") or "/workspace")
            except subprocess.TimeoutExpired:
                code, stdout, stderr = 124, b"", f"Command timed out after {fields['timeout_ms']}ms".encode()
            except NotRunning:
                send(_frame("error", json.dumps({"error": "exec failed: stopped", "code": "exec_transport_error"})))
                return
            if not machine.is_running:  # destroyed or lost meanwhile
                error = "exec failed: WritableStream RPC stub was disposed without calling close()"
                send(_frame("error", json.dumps({"error": error, "code": "exec_transport_error"})))
                return
            for event, content in (("stdout", stdout), ("stderr", stderr)):
                text = content.decode(errors="replace").encode()  # lossy
                for start in range(0, len(text), FRAME_BYTES):
                    send(_frame(event, base64.b64encode(text[start : start + FRAME_BYTES]).decode()))
            send(_frame("exit", json.dumps({"exit_code": code})))

        return Response(content_type="text/event-stream", stream=stream)

    @route("PUT", "/v1/sandbox/([^/]+)/file/(.*)")
    def write(self, request: Request) -> Response:
        machine, path = self._ensure(request), f"/{request.groups[1]}"
        if not path.startswith("/workspace/") or ".." in path:
            raise Rejected(403, self.rejection(403, "path must resolve to a location within /workspace"))
        if len(request.body) > MAX_WRITE_BYTES:
            raise Rejected(502, {"error": "write failed: limited to 32MiB", "code": "workspace_archive_write_error"})
        try:
            machine.write(path, request.body)
        except (OSError, NotRunning) as error:
            raise Rejected(502, {"error": str(error), "code": "workspace_archive_write_error"}) from None
        return as_json({"ok": True})

    def _ensure(self, request: Request) -> Machine:
        """Return the container of an id, after starting one if there is none."""
        identifier = request.groups[0]
        if not ID.fullmatch(identifier):
            raise Rejected(400, self.rejection(400, "Invalid sandbox ID format"))
        with self.lock:
            if identifier not in self.containers:
                if len(self.containers) >= self.max_instances:
                    message = "Cannot start container: instance limit reached. Wait for existing containers to stop."
                    raise Rejected(503, {"error": message, "code": "capacity_exceeded"})
                self.started += 1
                self.containers[identifier] = self.create_machine(f"{self.started}")
            return self.containers[identifier]

    def get_creation(self, name: str) -> dict[str, Any]:
        raise NotImplementedError("The bridge accepts no parameters.")


CODES = {401: "unauthorized", 502: "pool_error", 503: "capacity_exceeded"}


def _frame(event: str, data: str) -> bytes:
    return f"event: {event}\ndata: {data}\n\n".encode()
