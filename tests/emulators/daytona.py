"""Emulator of Daytona's API and of its toolbox, as recorded from version 0.226.1 of its SDK.

Sandboxes are created, started, stopped and deleted with a delay, as by the vendor, and are seen in the states between. Commands
merge stdout and stderr into one text, and end with HTTP 408 at their timeout."""

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
from tests.emulators.vendor import Rejected, Request, Response, VendorEmulator, as_json, route

TRANSITION_SECONDS = 0.02  # between the two states of a start, a stop or a deletion


@dataclass
class Sandbox:
    id: str
    name: str
    fields: dict[str, Any]
    machine: Machine
    state: str = "creating"
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())


@dataclass
class Snapshot:
    name: str
    fields: dict[str, Any]
    build: ImageBuild
    is_removing: bool = False
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())


class DaytonaEmulator(VendorEmulator):
    home = "/home/daytona"
    api_path = "/api"

    def __init__(self, directory: Path, port: int = 0) -> None:
        super().__init__(directory, port)
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: dict[str, Snapshot] = {}  # by id

    def list_machines(self) -> list[Machine]:
        return [sandbox.machine for sandbox in self.sandboxes.values()]

    @property
    def is_removing_images(self) -> bool:
        with self.lock:
            return any(snapshot.is_removing for snapshot in self.snapshots.values())

    def find_machines(self, name: str) -> builtins.list[Machine]:
        return [sandbox.machine for sandbox in self._find_named(name)]

    def stop_idle(self, name: str) -> None:
        for sandbox in self._find_named(name):
            sandbox.state = "stopped"
            sandbox.machine.stop()

    def delete_stopped(self, name: str) -> None:
        for sandbox in self._find_named(name):
            sandbox.state = "destroying"
            self._destroy(sandbox)

    def get_creation(self, name: str) -> dict[str, Any]:
        return self._find_named(name)[0].fields

    def _find_named(self, name: str) -> builtins.list[Sandbox]:
        gone = ("destroying", "destroyed")
        return [sandbox for sandbox in self.sandboxes.values() if sandbox.name == name and sandbox.state not in gone]

    # API

    @route("POST", "/api/sandbox")
    def create(self, request: Request) -> Response:
        fields = request.json
        identifier = str(uuid.uuid4())
        name = fields.get("name") or identifier
        with self.lock:
            if any(sandbox.name == name and sandbox.state != "destroyed" for sandbox in self.sandboxes.values()):
                raise Rejected(409, {"message": f"Sandbox with name {name} already exists", "statusCode": 409})
            if not fields.get("buildInfo") and any(fields.get(name) for name in ("cpu", "memory", "disk", "gpu")):
                raise Rejected(400, {"message": "Cannot specify resources of a sandbox of a snapshot", "statusCode": 400})
            if fields.get("autoStopInterval") and fields.get("autoPauseInterval"):
                raise Rejected(400, {"message": "autoStopInterval and autoPauseInterval exclude each other"})
            machine = self.create_machine(identifier, self._find_image(fields))
            sandbox = Sandbox(identifier, name, fields, machine)
            self.sandboxes[identifier] = sandbox
        self._settle(sandbox, "started")
        return as_json(self._describe(sandbox))

    @route("GET", "/api/sandbox")
    def list(self, request: Request) -> Response:
        wanted = json.loads(request.query.get("labels") or "{}")
        with self.lock:
            found = [
                self._describe(sandbox)
                for sandbox in self.sandboxes.values()
                if wanted.items() <= self._labels(sandbox).items() and sandbox.state != "destroyed"
            ]
        if self.is_listing_late:
            found = []
        start, limit = int(request.query.get("cursor") or 0), int(request.query.get("limit") or 100)
        more = str(start + limit) if start + limit < len(found) else None
        return as_json({"items": found[start : start + limit], "nextCursor": more})

    @route("GET", "/api/sandbox/([^/]+)")
    def get(self, request: Request) -> Response:
        return as_json(self._describe(self._find(request)))

    @route("DELETE", "/api/sandbox/([^/]+)")
    def delete(self, request: Request) -> Response:
        sandbox = self._find(request)
        with self.lock:
            sandbox.state = "destroying"
        threading.Thread(target=self._destroy, args=(sandbox,), daemon=True).start()
        return as_json(self._describe(sandbox))

    @route("POST", "/api/sandbox/([^/]+)/start")
    def start(self, request: Request) -> Response:
        sandbox = self._find(request)
        with self.lock:
            if sandbox.state != "stopped":
                raise Rejected(409, {"message": f"Sandbox is {sandbox.state}"})
            sandbox.state = "starting"
        sandbox.machine.start()
        self._settle(sandbox, "started")
        return as_json(self._describe(sandbox))

    @route("POST", "/api/sandbox/([^/]+)/stop")
    def stop(self, request: Request) -> Response:
        sandbox = self._find(request)
        with self.lock:
            if sandbox.state != "started":
                raise Rejected(409, {"message": f"Sandbox is {sandbox.state}"})
            sandbox.state = "stopping"
        sandbox.machine.stop()
        self._settle(sandbox, "stopped")
        return as_json(self._describe(sandbox))

    @route("POST", "/api/sandbox/([^/]+)/(autostop|autodelete|autoarchive|ttl)/(-?[0-9]+)")
    def set_interval(self, request: Request) -> Response:
        sandbox, (_, kind, value) = self._find(request), request.groups
        names = {"autostop": "autoStopInterval", "autodelete": "autoDeleteInterval", "autoarchive": "autoArchiveInterval"}
        sandbox.fields[names.get(kind, "ttlMinutes")] = int(value)
        return as_json(self._describe(sandbox))

    # Snapshots

    @route("POST", "/api/snapshots")
    def create_snapshot(self, request: Request) -> Response:
        fields = request.json
        with self.lock:
            if any(snapshot.name == fields["name"] for snapshot in self.snapshots.values()):
                raise Rejected(409, {"message": f"Snapshot with name {fields['name']} already exists"})
            identifier = str(uuid.uuid4())
            build = self.start_build(identifier, fields["buildInfo"]["dockerfileContent"])
            snapshot = self.snapshots[identifier] = Snapshot(fields["name"], fields, build)
        return as_json(self._describe_snapshot(snapshot))

    @route("GET", "/api/snapshots/([^/]+)")
    def get_snapshot(self, request: Request) -> Response:
        return as_json(self._describe_snapshot(self._find_snapshot(request.groups[0])))

    @route("GET", "/api/snapshots/([^/]+)/build-logs-url")
    def get_build_logs_url(self, request: Request) -> Response:
        return as_json({"url": f"{self.url}/logs/{self._find_snapshot(request.groups[0]).build.id}"})

    @route("GET", "/logs/([^/]+)")
    def get_build_logs(self, request: Request) -> Response:
        log = self._find_snapshot(request.groups[0]).build.log
        return Response(body=log.encode(), content_type="application/octet-stream")

    @route("DELETE", "/api/snapshots/([^/]+)")
    def delete_snapshot(self, request: Request) -> Response:
        snapshot = self._find_snapshot(request.groups[0])
        with self.lock:
            if snapshot.is_removing:
                raise Rejected(409, {"message": f"Snapshot {snapshot.name} is being removed"})
            snapshot.is_removing = True
        self.remove_build(snapshot.build.id)
        threading.Timer(TRANSITION_SECONDS, self.snapshots.pop, (snapshot.build.id, None)).start()
        return Response()

    def _find_snapshot(self, reference: str) -> Snapshot:
        with self.lock:
            for snapshot in self.snapshots.values():
                if reference in (snapshot.build.id, snapshot.name):
                    return snapshot
        raise Rejected(404, {"message": f"Snapshot {reference} not found", "statusCode": 404})

    def _find_image(self, fields: dict[str, Any]) -> Path | None:
        if not fields.get("snapshot"):
            return None
        if disk := self.find_disk(self._find_snapshot(fields["snapshot"]).build.id):
            return disk
        raise Rejected(400, {"message": f"Snapshot {fields['snapshot']} is not active"})

    def _describe_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        build, fields = snapshot.build, snapshot.fields
        state = "building" if not build.ended.is_set() else "build_failed" if build.error else "active"
        if snapshot.is_removing:
            state = "removing"
        size = build.size_bytes / 1e9 if state == "active" else None
        described = {"id": build.id, "name": snapshot.name, "state": state, "size": size, "errorReason": build.error or None}
        described |= {"cpu": fields.get("cpu") or 1, "mem": fields.get("memory") or 1, "disk": 3, "gpu": 0, "general": False}
        described |= {"createdAt": snapshot.created_at, "updatedAt": snapshot.created_at, "lastUsedAt": None}
        return described | {"entrypoint": None, "sourceSandboxId": None}

    # Toolbox

    @route("POST", "/toolbox/([^/]+)/process/execute")
    def execute(self, request: Request) -> Response:
        fields, machine = request.json, self._find_started(request)
        try:
            code, output, _ = machine.run(
                ["bash", "-c", f"exec 2>&1\n{fields['command']}"], cwd=fields.get("cwd") or "", env=fields.get("envs"),
                timeout=fields.get("timeout") or 10,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            body = {"message": "command execution timeout", "code": "PROCESS_EXECUTION_TIMEOUT", "source": "toolbox"}
            raise Rejected(408, body) from None
        return as_json({"exitCode": code, "result": output.decode(errors="replace")})

    @route("POST", "/toolbox/([^/]+)/files/upload-v2")
    def upload(self, request: Request) -> Response:
        path = request.query["path"]
        self._write(request, path, request.parse_form()["file"])
        return as_json({"name": path.rpartition("/")[2], "path": path, "type": "file"})

    @route("POST", "/toolbox/([^/]+)/files/bulk-upload")
    def bulk_upload(self, request: Request) -> Response:
        parts = request.parse_form()
        for name in [name for name in parts if name.endswith(".path")]:
            self._write(request, parts[name].decode(), parts[f"{name.removesuffix('.path')}.file"])
        return as_json({})

    @route("GET", "/toolbox/([^/]+)/files/download")
    def download(self, request: Request) -> Response:
        try:
            return Response(
                body=self._find_started(request).read(request.query["path"]), content_type="application/octet-stream"
            )
        except FileNotFoundError as error:
            raise Rejected(404, {"message": str(error)}) from None

    @route("POST", "/toolbox/([^/]+)/files/bulk-download")
    def bulk_download(self, request: Request) -> Response:
        machine, boundary, body = self._find_started(request), uuid.uuid4().hex, b""
        for path in request.json["paths"]:
            try:
                name, content = "file", machine.read(path)
            except FileNotFoundError as error:
                name, content = "error", str(error).encode()
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{path}"\r\n\r\n'
            body += head.encode() + content + b"\r\n"
        return Response(body=body + f"--{boundary}--\r\n".encode(), content_type=f"multipart/form-data; boundary={boundary}")

    # Parts

    def _find(self, request: Request) -> Sandbox:
        wanted = request.groups[0]
        with self.lock:
            for sandbox in self.sandboxes.values():
                if wanted in (sandbox.id, sandbox.name) and sandbox.state != "destroyed":
                    return sandbox
        raise Rejected(404, {"message": f"Sandbox with ID or name {wanted} not found", "statusCode": 404})

    def _find_started(self, request: Request) -> Machine:
        sandbox = self._find(request)
        if sandbox.state != "started" or not sandbox.machine.is_running:
            raise Rejected(400, {"message": f"sandbox is not running, state: {sandbox.state}"})
        return sandbox.machine

    def _write(self, request: Request, path: str, content: bytes) -> None:
        try:
            self._find_started(request).write(path, content)
        except (OSError, NotRunning) as error:
            raise Rejected(400, {"message": str(error)}) from None

    def _settle(self, sandbox: Sandbox, state: str) -> None:
        """Reach the next state a moment later."""

        def settle() -> None:
            time.sleep(TRANSITION_SECONDS)
            with self.lock:
                if sandbox.state in ("creating", "starting", "stopping"):
                    sandbox.state = state

        threading.Thread(target=settle, daemon=True).start()

    def _destroy(self, sandbox: Sandbox) -> None:
        time.sleep(TRANSITION_SECONDS)
        sandbox.machine.remove()
        with self.lock:
            sandbox.state = "destroyed"

    def _labels(self, sandbox: Sandbox) -> dict[str, str]:
        return sandbox.fields.get("labels") or {}

    def _describe(self, sandbox: Sandbox) -> dict[str, Any]:
        fields = sandbox.fields
        described = {"id": sandbox.id, "name": sandbox.name, "state": sandbox.state, "createdAt": sandbox.created_at}
        described |= {"organizationId": "org-1", "user": "daytona", "public": False, "networkBlockAll": False, "kvm": False}
        described |= {
            "env": fields.get("env") or {},
            "labels": self._labels(sandbox),
            "target": "us",
            "gpu": fields.get("gpu") or 0,
        }
        described |= {"cpu": fields.get("cpu") or 1, "memory": fields.get("memory") or 1, "disk": fields.get("disk") or 3}
        described |= {"autoStopInterval": fields.get("autoStopInterval", 15), "toolboxProxyUrl": f"{self.url}/toolbox"}
        return described | {"autoDeleteInterval": fields.get("autoDeleteInterval", -1)}
