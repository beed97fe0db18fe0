"""Emulator of Runloop's devboxes and network policies, as recorded from version 3.0.0 of its client.

A request for the end of a command is held until its timeout before it is answered with 408, as by the vendor. The output of a
command is truncated to its last bytes. Devboxes that were shut down stay in the list. Network policies
are recorded and not enforced."""

import builtins
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.emulators.images import ImageBuild
from tests.emulators.machine import Machine, NotRunning
from tests.emulators.vendor import Rejected, Request, Response, VendorEmulator, as_json, route

TRANSITION_SECONDS = 0.02  # between the two states of a start or a suspension
MAX_OUTPUT_BYTES = 100_000  # of a command, from its end
DEVBOX = "/v1/devboxes/([^/]+)"
BLUEPRINT = "/v1/blueprints/([^/]+)"
POLICIES = "/v1/network-policies"
EGRESS_DEFAULTS: dict[str, Any] = {
    "allow_all": False, "allow_agent_gateway": False, "allow_devbox_to_devbox": False, "allow_mcp_gateway": False,
    "allow_runloop_mirrors": False, "allowed_cidrs": [], "allowed_hostnames": [],
}  # fmt: skip


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


@dataclass
class Blueprint:
    name: str
    build: ImageBuild
    is_deleted: bool = False
    create_time_ms: int = field(default_factory=lambda: int(time.time() * 1000))


class RunloopEmulator(VendorEmulator):
    home = "/home/user"

    def __init__(self, directory: Path, port: int = 0) -> None:
        super().__init__(directory, port)
        self.devboxes: dict[str, Devbox] = {}
        self.blueprints: dict[str, Blueprint] = {}
        self.keys: dict[str, str] = {}  # idempotency key -> id
        self.policies: dict[str, dict[str, Any]] = {}
        self.policy_keys: dict[str, dict[str, Any]] = {}  # idempotency key -> policy

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
        policy = (request.json.get("launch_parameters") or {}).get("network_policy_id")
        with self.lock:
            if policy and policy not in self.policies:
                raise Rejected(400, {"message": f"Network policy {policy} not found"})
            if key not in self.keys:
                identifier = f"dbx_{uuid.uuid4().hex[:20]}"
                self.keys[key] = identifier
                machine = self.create_machine(identifier, self._find_image(request.json))
                self.devboxes[identifier] = Devbox(identifier, request.json, machine)
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

    # Blueprints

    @route("POST", "/v1/blueprints")
    def create_blueprint(self, request: Request) -> Response:
        key = request.headers.get("x-request-id") or uuid.uuid4().hex
        with self.lock:
            if key not in self.keys:
                identifier = self.keys[key] = f"bpt_{uuid.uuid4().hex[:20]}"
                build = self.start_build(identifier, request.json["dockerfile"])
                self.blueprints[identifier] = Blueprint(request.json["name"], build)
            return as_json(self._describe_blueprint(self.blueprints[self.keys[key]]))

    @route("GET", "/v1/blueprints")
    def list_blueprints(self, request: Request) -> Response:
        with self.lock:
            found = [blueprint for blueprint in self.blueprints.values() if blueprint.name == request.query.get("name")]
        described = [self._describe_blueprint(blueprint) for blueprint in found if not blueprint.is_deleted]
        return as_json({"blueprints": described, "has_more": False})

    @route("GET", BLUEPRINT)
    def get_blueprint(self, request: Request) -> Response:
        return as_json(self._describe_blueprint(self._find_blueprint(request.groups[0])))

    @route("GET", f"{BLUEPRINT}/logs")
    def get_blueprint_logs(self, request: Request) -> Response:
        blueprint = self._find_blueprint(request.groups[0])
        logs = [{"level": "info", "message": line, "timestamp_ms": 0} for line in blueprint.build.log.splitlines()]
        return as_json({"blueprint_id": blueprint.build.id, "logs": logs})

    @route("POST", f"{BLUEPRINT}/delete")
    def delete_blueprint(self, request: Request) -> Response:
        blueprint = self._find_blueprint(request.groups[0])
        if not blueprint.is_deleted:
            blueprint.is_deleted = True
            self.remove_build(blueprint.build.id)
        return as_json({})

    def _find_blueprint(self, identifier: str) -> Blueprint:
        if identifier in self.blueprints:
            return self.blueprints[identifier]
        raise Rejected(404, {"message": f"Blueprint {identifier} not found"})

    def _find_image(self, fields: dict[str, Any]) -> Path | None:
        if not fields.get("blueprint_id"):
            return None
        if disk := self.find_disk(self._find_blueprint(fields["blueprint_id"]).build.id):
            return disk
        raise Rejected(400, {"message": f"Blueprint {fields['blueprint_id']} is not built"})

    def _describe_blueprint(self, blueprint: Blueprint) -> dict[str, Any]:
        build = blueprint.build
        status = "building" if not build.ended.is_set() else "failed" if build.error else "build_complete"
        return {
            "id": build.id, "name": blueprint.name, "status": status, "create_time_ms": blueprint.create_time_ms,
            "state": "deleted" if blueprint.is_deleted else "created", "parameters": {"name": blueprint.name},
            "failure_reason": "build_failed" if build.error else None,
        }  # fmt: skip

    # Devboxes

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

    # Network policies

    @route("POST", POLICIES)
    def create_policy(self, request: Request) -> Response:
        key, fields = request.headers.get("x-request-id") or uuid.uuid4().hex, request.json
        with self.lock:
            if key not in self.policy_keys:
                times = dict.fromkeys(("create_time_ms", "update_time_ms"), int(time.time() * 1000))
                egress = {name: fields.get(name, value) for name, value in EGRESS_DEFAULTS.items()}
                policy = {"id": f"npol_{uuid.uuid4().hex[:20]}", "name": fields["name"], "egress": egress, **times}
                self.policies[policy["id"]] = self.policy_keys[key] = policy
            return as_json(self.policy_keys[key])  # also of a policy that was deleted since

    @route("GET", POLICIES)
    def list_policies(self, request: Request) -> Response:
        wanted = request.query.get("name") or ""
        with self.lock:
            found = [policy for policy in self.policies.values() if wanted in policy["name"]]
        return as_json({"network_policies": found, "has_more": False, "total_count": len(found)})

    @route("GET", f"{POLICIES}/([^/]+)")
    def get_policy(self, request: Request) -> Response:
        return as_json(self._find_policy(request))

    @route("POST", f"{POLICIES}/([^/]+)")
    def update_policy(self, request: Request) -> Response:
        policy = self._find_policy(request)
        policy["egress"] |= {name: request.json[name] for name in EGRESS_DEFAULTS if name in request.json}
        return as_json(policy)

    @route("POST", f"{POLICIES}/([^/]+)/delete")
    def delete_policy(self, request: Request) -> Response:
        policy = self._find_policy(request)
        with self.lock:
            del self.policies[policy["id"]]
        return as_json(policy)

    def _find_policy(self, request: Request) -> dict[str, Any]:
        policy = self.policies.get(request.groups[0])
        if policy is None:
            raise Rejected(404, {"message": f"Network policy {request.groups[0]} not found"})
        return policy

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
