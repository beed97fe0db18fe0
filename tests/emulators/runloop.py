"""Emulator of Runloop's devboxes, as recorded from version 3.0.0 of its client.

A request for the end of a command is held until its timeout before it is answered with 408, as by the vendor. The output of a
command is truncated to its last bytes. Devboxes that were shut down stay in the list."""

import builtins
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.emulators.machine import Machine, NotRunning
from tests.emulators.vendor import Rejected, Request, Response, VendorEmulator, as_json, route

TRANSITION_SECONDS = 0.02  # between the two states of a start or a suspension
MAX_OUTPUT_BYTES = 100_000  # of a command, from its end
DEVBOX = "/v1/devboxes/([^/]+)"


@dataclass
class Execution:
    id: str
    ended: threading.Event = field(default_factory=threading.Event)
    process: "subprocess.Popen[bytes] | None" = None
    exit_status: int = 0
    stdout: str = ""
    stderr: str = ""


@dataclass
class Devbox:
    id: str
    fields: dict[str, Any]
    machine: Machine
    status: str = "provisioning"
    create_time_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    executions: dict[str, Execution] = field(default_factory=dict)


class RunloopEmulator(VendorEmulator):
    home = "/home/user"

    def __init__(self, directory: Path, port: int = 0) -> None:
        super().__init__(directory, port)
        self.devboxes: dict[str, Devbox] = {}
        self.keys: dict[str, str] = {}  # idempotency key -> id

    def list_machines(self) -> list[Machine]:
        return [devbox.machine for devbox in self.devboxes.values()]

    def find_machines(self, name: str) -> builtins.list[Machine]:
        return [devbox.machine for devbox in self._find_named(name)]

    def stop_idle(self, name: str) -> None:
        for devbox in self._find_named(name):
            devbox.machine.stop()
            devbox.status = "suspended"

    def delete_stopped(self, name: str) -> None:
        for devbox in self._find_named(name):
            devbox.machine.remove()
            devbox.status = "shutdown"

    def get_creation(self, name: str) -> dict[str, Any]:
        return self._find_named(name)[0].fields

    def _check_size(self, parameters: dict[str, Any]) -> None:
        """Refuse a custom size that the API's description excludes."""
        if parameters.get("resource_size_request") != "CUSTOM_SIZE":
            return
        cores, memory = parameters.get("custom_cpu_cores") or 0, parameters.get("custom_gb_memory") or 0
        disk = parameters.get("custom_disk_size", 2)
        is_offered = (cores in (0.5, 1) or cores % 2 == 0) and (memory == 1 or memory % 2 == 0) and disk % 2 == 0
        is_within = 0 < cores <= 16 and 0 < memory <= 64 and 2 <= disk <= 64
        if not (is_offered and is_within and 2 <= memory / cores <= 8):
            raise Rejected(400, {"message": f"Invalid custom size: {cores} cores, {memory} GiB, disk {disk} GiB"})

    def _find_named(self, name: str) -> builtins.list[Devbox]:
        return [box for box in self.devboxes.values() if box.fields.get("name") == name and box.status != "shutdown"]

    @route("POST", "/v1/devboxes")
    def create(self, request: Request) -> Response:
        key = request.headers.get("x-request-id") or uuid.uuid4().hex
        self._check_size(request.json.get("launch_parameters") or {})
        with self.lock:
            if key not in self.keys:
                identifier = f"dbx_{uuid.uuid4().hex[:20]}"
                self.keys[key] = identifier
                self.devboxes[identifier] = Devbox(identifier, request.json, self.create_machine(identifier))
                self._settle(self.devboxes[identifier], "running")
            return as_json(self._describe(self.devboxes[self.keys[key]]))

    @route("GET", "/v1/devboxes")
    def list(self, request: Request) -> Response:
        with self.lock:
            devboxes = [] if self.is_listing_late else [*self.devboxes.values()]
        ids = [devbox.id for devbox in devboxes]
        after, limit = request.query.get("starting_after"), int(request.query.get("limit") or 20)
        start = ids.index(after) + 1 if after in ids else 0
        page = [self._describe(devbox) for devbox in devboxes[start : start + limit]]
        return as_json({"devboxes": page, "has_more": start + limit < len(devboxes), "total_count": len(devboxes)})

    @route("GET", DEVBOX)
    def get(self, request: Request) -> Response:
        return as_json(self._describe(self._find(request)))

    @route("POST", f"{DEVBOX}/suspend")
    def suspend(self, request: Request) -> Response:
        devbox = self._find(request)
        self._require(devbox, "running")
        devbox.status = "suspending"
        devbox.machine.stop()
        self._settle(devbox, "suspended")
        return as_json(self._describe(devbox))

    @route("POST", f"{DEVBOX}/resume")
    def resume(self, request: Request) -> Response:
        devbox = self._find(request)
        self._require(devbox, "suspended")
        devbox.status = "resuming"
        devbox.machine.start()
        self._settle(devbox, "running")
        return as_json(self._describe(devbox))

    @route("POST", f"{DEVBOX}/shutdown")
    def shut_down(self, request: Request) -> Response:
        devbox = self._find(request)
        devbox.machine.remove()
        devbox.status = "shutdown"
        return as_json(self._describe(devbox))

    @route("POST", f"{DEVBOX}/execute_async")
    def execute(self, request: Request) -> Response:
        devbox = self._find(request)
        self._require(devbox, "running")
        execution = Execution(f"exec_{uuid.uuid4().hex[:20]}")
        devbox.executions[execution.id] = execution
        try:
            execution.process = devbox.machine.popen(
                ["bash", "-lc", request.json["command"]],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except NotRunning:
            raise Rejected(400, {"message": "devbox is not running"}) from None
        threading.Thread(target=_collect, args=(execution,), daemon=True).start()
        return as_json(self._describe_execution(devbox, execution))

    @route("POST", f"{DEVBOX}/executions/([^/]+)/wait_for_status")
    def wait_for_status(self, request: Request) -> Response:
        devbox = self._find(request)
        execution = devbox.executions[request.groups[1]]
        if not execution.ended.wait(min(request.json.get("timeout_seconds") or 25, 25)):
            raise Rejected(408, {"message": "timeout"})
        return as_json(self._describe_execution(devbox, execution))

    @route("POST", f"{DEVBOX}/executions/([^/]+)/kill")
    def kill(self, request: Request) -> Response:
        devbox = self._find(request)
        execution = devbox.executions[request.groups[1]]
        assert execution.process is not None
        execution.process.kill()
        return as_json(self._describe_execution(devbox, execution))

    @route("POST", f"{DEVBOX}/upload_file")
    def upload(self, request: Request) -> Response:
        devbox, form = self._find(request), request.parse_form()
        self._require(devbox, "running")
        try:
            devbox.machine.write(form["path"].decode(), form["file"])
        except (OSError, NotRunning) as error:
            raise Rejected(400, {"message": str(error)}) from None
        return as_json({})

    @route("POST", f"{DEVBOX}/download_file")
    def download(self, request: Request) -> Response:
        try:
            content = self._find(request).machine.read(request.json["path"])
        except FileNotFoundError as error:
            raise Rejected(404, {"message": str(error)}) from None
        return Response(body=content, content_type="application/octet-stream")

    def _find(self, request: Request) -> Devbox:
        devbox = self.devboxes.get(request.groups[0])
        if devbox is None:
            raise Rejected(404, {"message": f"Devbox {request.groups[0]} not found"})
        return devbox

    def _require(self, devbox: Devbox, status: str) -> None:
        if devbox.status != status:
            raise Rejected(400, {"message": f"Devbox is {devbox.status}"})

    def _settle(self, devbox: Devbox, status: str) -> None:
        def settle() -> None:
            time.sleep(TRANSITION_SECONDS)
            with self.lock:
                if devbox.status != "shutdown":
                    devbox.status = status

        threading.Thread(target=settle, daemon=True).start()

    def _describe(self, devbox: Devbox) -> dict[str, Any]:
        fields = devbox.fields
        return {
            "id": devbox.id, "name": fields.get("name"), "status": devbox.status, "create_time_ms": devbox.create_time_ms,
            "metadata": fields.get("metadata") or {}, "launch_parameters": fields.get("launch_parameters") or {},
            "capabilities": [], "state_transitions": [],
        }  # fmt: skip

    def _describe_execution(self, devbox: Devbox, execution: Execution) -> dict[str, Any]:
        described: dict[str, Any] = {"devbox_id": devbox.id, "execution_id": execution.id, "status": "running"}
        if execution.ended.is_set():
            described |= {"status": "completed", "exit_status": execution.exit_status}
            described |= {"stdout": execution.stdout, "stderr": execution.stderr}
        return described


def _collect(execution: Execution) -> None:
    assert execution.process is not None
    stdout, stderr = execution.process.communicate()
    execution.stdout = stdout[-MAX_OUTPUT_BYTES:].decode(errors="replace")
    execution.stderr = stderr[-MAX_OUTPUT_BYTES:].decode(errors="replace")
    execution.exit_status = execution.process.returncode
    execution.ended.set()
