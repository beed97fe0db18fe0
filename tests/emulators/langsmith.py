"""Emulator of LangSmith's sandboxes, as recorded from version 0.14.17 of its client, with the labels of version 0.15.

Commands arrive over a WebSocket for each. A command with a known id is not started again: its result is sent once more."""

import builtins
import json
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.emulators.images import ImageBuild
from tests.emulators.machine import Machine, NotRunning
from tests.emulators.vendor import Rejected, Request, Response, VendorEmulator, WebSocket, as_json, route

TRANSITION_SECONDS = 0.02  # between the two states of a start
CHUNK_BYTES = 32 << 10  # of output in one message; the client accepts 1 MiB
BOXES = "/api/v2/sandboxes/boxes"
SNAPSHOTS = "/api/v2/sandboxes/snapshots"
BUILDER_DIRECTORY = "/opt/builder"  # programs of a sandbox that stand for BuildKit and Docker
BUILD_CLIENT = """#!/usr/bin/python3
import json, sys, urllib.request
options = dict(each.split("=", 1) for each in sys.argv if "=" in each and not each.startswith("--"))
if "dockerfile" not in options:
    sys.exit(0)  # a question for the state of the daemon
with open(options["dockerfile"] + "/Dockerfile") as file:
    body = json.dumps({{"dockerfile": file.read(), "name": options["type"].partition("name=")[2]}}).encode()
request = urllib.request.Request("{url}", body, {{"X-Api-Key": "{key}"}})
with urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request) as response:
    built = json.load(response)
sys.stderr.write(built["log"])
sys.exit(1 if built["error"] else 0)
"""
DOCKER = "#!/bin/sh\nexec cat\n"


@dataclass
class Box:
    name: str
    fields: dict[str, Any]
    machine: Machine
    status: str = "provisioning"
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    images: dict[str, ImageBuild] = field(default_factory=dict)  # of the sandbox's Docker Engine, by name
    results: dict[str, tuple[int, bytes, bytes] | None] = field(default_factory=dict)  # by command id


@dataclass
class Snapshot:
    name: str
    build: ImageBuild
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())


class LangSmithEmulator(VendorEmulator):
    home = "/root"
    rejection = staticmethod(lambda status, message: {"detail": {"error": str(status), "message": message}})

    def __init__(self, directory: Path, port: int = 0) -> None:
        super().__init__(directory, port)
        self.boxes: dict[str, Box] = {}
        self.snapshots: dict[str, Snapshot] = {}  # by id

    def list_machines(self) -> list[Machine]:
        return [box.machine for box in self.boxes.values()]

    def is_authorized(self, request: Request) -> bool:
        return request.headers.get("X-Api-Key") == self.key

    def find_machines(self, name: str) -> builtins.list[Machine]:
        return [box.machine for box in self.boxes.values() if box.name == name]

    def stop_idle(self, name: str) -> None:
        if box := self.boxes.get(name):
            box.machine.stop()
            box.status = "stopped"

    def delete_stopped(self, name: str) -> None:
        if box := self.boxes.pop(name, None):
            box.machine.remove()

    def get_creation(self, name: str) -> dict[str, Any]:
        return self.boxes[name].fields

    # Control plane

    @route("POST", BOXES)
    def create(self, request: Request) -> Response:
        fields = request.json
        for name in ("idle_ttl_seconds", "delete_after_stop_seconds"):
            if fields.get(name, 0) % 60:
                raise Rejected(422, {"detail": [{"loc": ["body", name], "msg": "must be a multiple of 60", "type": "value"}]})
        with self.lock:
            name = fields.get("name") or f"box-{len(self.boxes)}"
            if name in self.boxes:
                raise Rejected(409, self.rejection(409, f"Sandbox '{name}' already exists"))
            disk = self.find_disk(fields.get("snapshot") or "")
            box = self.boxes[name] = Box(name, fields, self.create_machine(name, disk))
        self._install_builder(box)
        self._settle(box)
        return as_json(self._describe(box), 201)

    @route("GET", BOXES)
    def list(self, request: Request) -> Response:
        with self.lock:
            boxes = [] if self.is_listing_late else [self._describe(box) for box in self.boxes.values()]
        return as_json({"sandboxes": boxes})

    @route("GET", f"{BOXES}/([^/]+)")
    def get(self, request: Request) -> Response:
        return as_json(self._describe(self._find(request)))

    @route("GET", f"{BOXES}/([^/]+)/status")
    def get_status(self, request: Request) -> Response:
        return as_json({"status": self._find(request).status})

    @route("PATCH", f"{BOXES}/([^/]+)")
    def update(self, request: Request) -> Response:
        box = self._find(request)
        box.fields |= request.json
        return as_json(self._describe(box))

    @route("POST", f"{BOXES}/([^/]+)/stop")
    def stop(self, request: Request) -> Response:
        box = self._find(request)
        box.machine.stop()
        box.status = "stopped"
        return Response(204)

    @route("POST", f"{BOXES}/([^/]+)/start")
    def start(self, request: Request) -> Response:
        box = self._find(request)
        box.status = "provisioning"
        box.machine.start()
        self._settle(box)
        return as_json(self._describe(box), 202)

    @route("DELETE", f"{BOXES}/([^/]+)")
    def delete(self, request: Request) -> Response:
        box = self._find(request)
        with self.lock:
            del self.boxes[box.name]
            images = [build.id for build in box.images.values() if build.id not in self.snapshots]
        for identifier in images:
            self.remove_build(identifier)
        box.machine.remove()
        return Response(204)

    # Snapshots

    @route("POST", f"{BOXES}/([^/]+)/snapshot")
    def capture(self, request: Request) -> Response:
        box, fields = self._find(request), request.json
        if fields.get("docker_image") not in box.images:
            raise Rejected(404, self.rejection(404, "no such image in the sandbox"))
        build = box.images[fields["docker_image"]]
        with self.lock:
            snapshot = self.snapshots[build.id] = Snapshot(fields["name"], build)
        return as_json(self._describe_snapshot(snapshot), 201)

    @route("GET", SNAPSHOTS)
    def list_snapshots(self, request: Request) -> Response:
        part = request.query.get("name_contains", "").lower()
        with self.lock:
            found = [self._describe_snapshot(each) for each in self.snapshots.values() if part in each.name.lower()]
        return as_json({"snapshots": found})

    @route("GET", f"{SNAPSHOTS}/([^/]+)")
    def get_snapshot(self, request: Request) -> Response:
        return as_json(self._describe_snapshot(self._find_snapshot(request)))

    @route("DELETE", f"{SNAPSHOTS}/([^/]+)")
    def delete_snapshot(self, request: Request) -> Response:
        snapshot = self._find_snapshot(request)
        with self.lock:
            del self.snapshots[snapshot.build.id]
        self.remove_build(snapshot.build.id)
        return Response(204)

    @route("POST", "/buildkit/([^/]+)")
    def build_image(self, request: Request) -> Response:
        """Build an image for a program in a sandbox, which stands for BuildKit and for the Docker Engine."""
        box, fields = self._find(request), request.json
        build = self.start_build(str(uuid.uuid4()), fields["dockerfile"])
        build.ended.wait()
        if build.error:
            self.remove_build(build.id)
        else:
            box.images[fields["name"]] = build
        return as_json({"log": build.log, "error": build.error})

    def _install_builder(self, box: Box) -> None:
        directory = box.machine.directory / "disk" / BUILDER_DIRECTORY.lstrip("/")
        directory.mkdir(exist_ok=True)
        client = BUILD_CLIENT.format(url=f"{self.url}/buildkit/{box.name}", key=self.key)
        for name, program in {"buildctl": client, "buildkitd": "#!/bin/sh\nexec sleep 600\n", "docker": DOCKER}.items():
            (directory / name).write_text(program)
            (directory / name).chmod(0o755)

    def _find_snapshot(self, request: Request) -> Snapshot:
        if snapshot := self.snapshots.get(request.groups[0]):
            return snapshot
        raise Rejected(404, self.rejection(404, f"Snapshot '{request.groups[0]}' not found"))

    def _describe_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        return {
            "id": snapshot.build.id, "name": snapshot.name, "status": "ready", "fs_capacity_bytes": 16 << 30,
            "fs_used_bytes": snapshot.build.size_bytes, "created_at": snapshot.created_at,
        }  # fmt: skip

    # Data plane

    @route("POST", "/dp/([^/]+)/upload")
    def upload(self, request: Request) -> Response:
        box = self._find_ready(request)
        try:
            box.machine.write(request.query["path"], request.parse_form()["file"])
        except (OSError, NotRunning) as error:
            raise Rejected(500, {"detail": {"error": "WriteError", "message": str(error)}}) from None
        return as_json({})

    @route("GET", "/dp/([^/]+)/download")
    def download(self, request: Request) -> Response:
        try:
            content = self._find_ready(request).machine.read(request.query["path"])
        except FileNotFoundError as error:
            raise Rejected(404, self.rejection(404, str(error))) from None
        return Response(body=content, content_type="application/octet-stream")

    @route("GET", "/dp/([^/]+)/execute/ws")
    def execute(self, request: Request) -> Response:
        box = self._find_ready(request)
        return Response(websocket=lambda connection: self._serve_command(box, connection))

    def _serve_command(self, box: Box, connection: WebSocket) -> None:
        message = json.loads(connection.receive() or "{}")
        identifier = message["command_id"]
        with self.lock:
            is_new = identifier not in box.results
            box.results.setdefault(identifier, None)
        connection.send(json.dumps({"type": "started", "command_id": identifier, "pid": 1}))
        if is_new:
            try:
                box.results[identifier] = box.machine.run(
                    [message.get("shell") or "/bin/bash", "-c", message["command"]],
                    timeout=message["timeout_seconds"], cwd=message.get("cwd") or "",
                    env={"PATH": f"{BUILDER_DIRECTORY}:/usr/local/bin:/usr/bin:/bin", **(message.get("env") or {})},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                error = {"type": "error", "error_type": "CommandTimeout", "error": "command timed out"}
                connection.send(json.dumps(error))
                connection.close()
                return
            except NotRunning:
                return  # the connection ends without an exit
        code, stdout, stderr = box.results[identifier] or (1, b"", b"")
        for stream, content in (("stdout", stdout), ("stderr", stderr)):
            for start in range(0, len(content), CHUNK_BYTES):
                text = content[start : start + CHUNK_BYTES].decode(errors="replace")
                connection.send(json.dumps({"type": stream, "data": text, "offset": start}))
        connection.send(json.dumps({"type": "exit", "exit_code": code}))
        connection.close()

    # Parts

    def _find(self, request: Request) -> Box:
        with self.lock:
            box = self.boxes.get(request.groups[0])
        if box is None:
            raise Rejected(404, self.rejection(404, f"Sandbox '{request.groups[0]}' not found"))
        return box

    def _find_ready(self, request: Request) -> Box:
        box = self._find(request)
        if box.status != "ready":
            raise Rejected(409, {"detail": {"error": "NotReady", "message": f"sandbox is {box.status}"}})
        return box

    def _settle(self, box: Box) -> None:
        def settle() -> None:
            time.sleep(TRANSITION_SECONDS)
            with self.lock:
                if box.status == "provisioning":
                    box.status = "ready"

        threading.Thread(target=settle, daemon=True).start()

    def _describe(self, box: Box) -> dict[str, Any]:
        return {
            "name": box.name, "id": box.name, "status": box.status, "created_at": box.created_at,
            "dataplane_url": f"{self.url}/dp/{box.name}", "labels": box.fields.get("labels") or {},
            "idle_ttl_seconds": box.fields.get("idle_ttl_seconds", 600),
            "delete_after_stop_seconds": box.fields.get("delete_after_stop_seconds"),
        }  # fmt: skip
