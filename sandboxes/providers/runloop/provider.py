"""Runloop provider: devboxes of Runloop, by the generated part of its client.

A devbox has no unique name, so name and owner are metadata, by which devboxes are found in the list of all: the API has no
filter for them. The idempotency key of a create is derived from the name, so a repeated create makes no second devbox, and the
list settles an unknown outcome. A command has no timeout of the vendor, and its output may be truncated to the last lines:
the runner in the devbox provides for both. The vendor cannot delete a suspended devbox after a time."""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import httpcore
import httpx
from django.conf import settings
from runloop_api_client import APIStatusError, Runloop, omit
from runloop_api_client.types import DevboxView

from sandboxes.answer_limits import limit_transport
from sandboxes.providers.answer_guard import guard_answers
from sandboxes.providers.base import Network, ProviderSandbox, SandboxSpec
from sandboxes.providers.errors import FailureCause, Rejected, Unavailable
from sandboxes.providers.remote.configuration import RemoteConfiguration, find_gateway_destination
from sandboxes.providers.remote.errors import Conflict, NotFound
from sandboxes.providers.remote.images import ImageBuildingProvider, require_image
from sandboxes.providers.remote.labels import NAME_LABEL, OWNER_LABEL, build_labels, require_owner
from sandboxes.providers.remote.lifecycle import STOP_TIMEOUT_SECONDS, Pause
from sandboxes.providers.runloop.blueprints import BlueprintBuilds
from sandboxes.providers.runloop.errors import translate_errors
from sandboxes.providers.runloop.network_policy import ensure_policy

Result = TypeVar("Result")
CALL_TIMEOUT_SECONDS = 60.0  # of one request
UPLOAD_TIMEOUT_SECONDS = 300.0
MAX_WAIT_SECONDS = 25  # of one request for the end of a command
PAGE_SIZE = 1000
MIN_GIB_PER_CORE, MAX_GIB_PER_CORE = 2, 8
MAX_CREATES = 5  # with keys whose devboxes have been shut down
# Without an idle time Runloop would shut a devbox down an hour after its creation, and delete its files.
MAX_IDLE_TIME = timedelta(days=2)
ENDED = {"failure", "shutdown"}  # such devboxes stay in the list


@guard_answers
class RunloopProvider(ImageBuildingProvider):
    """Provider for one account at Runloop: RUNLOOP_API_KEY, RUNLOOP_BASE_URL."""

    name = "runloop"
    account_option = "account"
    can_suspend = has_auto_stop = True  # the interval is fixed at the creation
    has_image_bases = False  # the default image is a blueprint
    can_set_disk = True
    max_response_bytes = 48 << 10  # the vendor states no limit of the output of a command, and truncates it

    def __init__(self) -> None:
        super().__init__()
        self._ids: dict[str, str] = {}  # by name

    @property
    def _client(self) -> Runloop:
        return self._get_clients(lambda: _create_client(self.configuration))

    @property
    def _builds(self) -> BlueprintBuilds:
        return BlueprintBuilds(self._client)

    # Lifecycle

    def create(self, spec: SandboxSpec) -> str:
        parameters = self._build_launch_parameters(spec)
        for number in range(MAX_CREATES):
            try:
                found = self._create(spec, parameters, f"{spec.name}-{number}")
            except Unavailable as error:
                found = self._settle_create(spec.name, error)
            require_owner(spec, found.metadata.get(OWNER_LABEL))
            if found.status not in ENDED:  # else a sandbox of this name was destroyed before
                self._ids[spec.name] = found.id
                return spec.name
        raise Rejected(f"{MAX_CREATES} devboxes named {spec.name} have been shut down.")

    def _build_launch_parameters(self, spec: SandboxSpec) -> dict[str, Any]:
        configuration, intervals = self.configuration, spec.intervals or self.default_intervals()
        idle_seconds = math.ceil((intervals.auto_stop or MAX_IDLE_TIME).total_seconds())
        parameters: dict[str, Any] = {
            "lifecycle": {"after_idle": {"idle_time_seconds": idle_seconds, "on_idle": "suspend"}}
        }  # fmt: skip
        if spec.sized:
            parameters |= _build_custom_size(spec)
        elif configuration.options["size"]:
            parameters["resource_size_request"] = configuration.options["size"]
        if configuration.network == Network.GATEWAY:
            parameters["network_policy_id"] = ensure_policy(self._client, find_gateway_destination())
        return parameters

    def _create(self, spec: SandboxSpec, parameters: dict[str, Any], key: str) -> DevboxView:
        blueprint = "" if spec.image_id else require_image(spec, self.configuration.image)
        with translate_errors(spec.name):
            created = self._client.devboxes.create(
                name=spec.name,
                metadata=build_labels(spec),
                launch_parameters=parameters,  # type: ignore[arg-type]
                idempotency_key=key,
                blueprint_name=blueprint or omit,
                blueprint_id=spec.image_id or omit,
            )
            return _require_devbox(created)

    def _wait_running(self, ref: str, deadline: float) -> None:
        pause = Pause(deadline)
        while True:
            found = self._get(ref)
            if found.status == "running":
                return
            if found.status == "suspended":
                self._change_state(ref, found, self._client.devboxes.resume)
            pause.wait(f"{ref} is {found.status} and not ready in time")

    def restart(self, ref: str) -> None:
        """Suspend and resume: a suspended devbox has no processes."""
        self._stop(ref, time.monotonic() + STOP_TIMEOUT_SECONDS)
        self._wait_running(ref, time.monotonic() + settings.SANDBOX_START_TIMEOUT.total_seconds())

    def _stop(self, ref: str, deadline: float) -> None:
        pause = Pause(deadline)
        while (found := self._get(ref)).status != "suspended":
            if found.status == "running":
                self._change_state(ref, found, self._client.devboxes.suspend)
            pause.wait(f"{ref} is {found.status} and not suspended in time")

    def _change_state(self, ref: str, found: DevboxView, change: Callable[[str], object]) -> None:
        """Request a suspension or a resumption. It is not refused if a concurrent request has changed the state since."""
        try:
            with translate_errors(ref):
                change(found.id)
        except (Conflict, Rejected):
            if self._get(ref).status == found.status:
                raise

    def _delete(self, ref: str) -> None:
        found = self._look_up(ref)
        with translate_errors(ref):
            self._client.devboxes.shutdown(found.id, force="true")  # also while a snapshot is made

    def inspect(self, ref: str) -> ProviderSandbox:
        return _to_sandbox(self._get(ref))

    def _fetch_devboxes(self) -> list[DevboxView]:
        """Return all devboxes of the account with a name of ours that have not ended."""
        found: list[DevboxView] = []
        with translate_errors("the list of devboxes"):
            for page in self._client.devboxes.list(limit=PAGE_SIZE).iter_pages():
                if not isinstance(page.devboxes, list):  # the client takes any answer for an empty page
                    raise ValueError("The answer is no list of devboxes.")
                devboxes = [_require_devbox(devbox) for devbox in page.devboxes]
                found += [devbox for devbox in devboxes if devbox.status not in ENDED and NAME_LABEL in devbox.metadata]
        self._ids.update({devbox.metadata[NAME_LABEL]: devbox.id for devbox in found})
        return found

    def _find_listed(self, ref: str) -> DevboxView | None:
        return next((devbox for devbox in self._fetch_devboxes() if devbox.metadata[NAME_LABEL] == ref), None)

    def _is_listed(self, ref: str) -> bool:
        return self._find_listed(ref) is not None

    def _look_up(self, ref: str) -> DevboxView:
        """Return the devbox by its id or, if that is not known or has ended, from the list."""
        if devbox := self._ids.get(ref):
            with translate_errors(ref):
                found = _require_devbox(self._client.devboxes.retrieve(devbox))
                if found.metadata.get(NAME_LABEL) != ref:
                    raise ValueError(f"The answer describes the devbox {found.id}.")
            if found.status not in ENDED:
                return found
            self._ids.pop(ref, None)  # a concurrent call may have removed the id
        listed = self._find_listed(ref)
        if listed is None:
            raise NotFound(f"Runloop has no devbox {ref}.", cause=FailureCause.ENGINE_ERROR)
        return listed

    # Commands and files

    def _execute(self, ref: str, command: str, *, timeout: timedelta) -> str:
        def execute(devbox: str) -> str:
            return self._run_command(devbox, command, timeout)

        return self._call_running(ref, lambda: self._call_devbox(ref, execute))

    def _run_command(self, devbox: str, command: str, timeout: timedelta) -> str:
        client, deadline = self._client.devboxes, time.monotonic() + timeout.total_seconds()
        execution = client.execute_async(devbox, command=command)
        while execution.status != "completed":
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                client.executions.kill(execution.execution_id, devbox_id=devbox, kill_process_group=True)
                raise Unavailable(f"{devbox}: a command did not end in time", cause=FailureCause.TIMEOUT)
            try:
                execution = client.wait_for_command(
                    execution.execution_id,
                    devbox_id=devbox,
                    statuses=["completed"],
                    timeout_seconds=max(min(MAX_WAIT_SECONDS, math.ceil(remaining)), 1),
                )
            except APIStatusError as error:
                if error.status_code != 408:  # it still runs
                    raise
        if not isinstance(execution.stdout, str | None):  # the client constructs it without a check
            raise ValueError("The output is no text.")
        return execution.stdout or ""

    def _upload(self, ref: str, path: str, content: bytes) -> None:
        def upload(devbox: str) -> object:
            return self._client.devboxes.upload_file(devbox, path=path, file=content, timeout=UPLOAD_TIMEOUT_SECONDS)

        self._call_running(ref, lambda: self._call_devbox(ref, upload))

    def _call_devbox(self, ref: str, call: Callable[[str], Result]) -> Result:
        devbox = self._ids.get(ref) or self._get(ref).id
        with translate_errors(ref):
            return call(devbox)

    def list_all(self) -> list[ProviderSandbox]:
        return [_to_sandbox(found) for found in self._fetch_devboxes() if OWNER_LABEL in found.metadata]

    def list(self, owner: str) -> list[ProviderSandbox]:
        return [found for found in self.list_all() if found.owner == owner]


def _require_devbox(found: object) -> DevboxView:
    """Return the description of a devbox. Raise ValueError for another answer: the client constructs it without a check."""
    if not isinstance(found, DevboxView) or not isinstance(found.metadata, dict):
        raise ValueError("The answer describes no devbox.")
    if not isinstance(found.id, str) or not isinstance(found.status, str):
        raise ValueError("The answer describes a devbox without an id or a status.")
    return found


def _build_custom_size(spec: SandboxSpec) -> dict[str, Any]:
    """Return the launch parameters of the smallest size that Runloop offers with at least the requested resources.

    Cores are 0.5, 1 or even, memory in GiB is 1 or even, and there are 2 to 8 GiB a core. Source: description of
    `resource_size_request` in Runloop's Python client 3.0.0."""
    memory_gib = _round_up_even(math.ceil(spec.memory_mib / 1024))
    cores = _round_up_cores(max(spec.millicpus / 1000, memory_gib / MAX_GIB_PER_CORE))
    memory_gib = _round_up_even(max(memory_gib, math.ceil(cores * MIN_GIB_PER_CORE)))
    size = {"resource_size_request": "CUSTOM_SIZE", "custom_cpu_cores": cores, "custom_gb_memory": memory_gib}
    return size | ({"custom_disk_size": 2 * math.ceil(spec.disk_mib / 2048)} if spec.disk_mib else {})


def _round_up_even(gib: int) -> int:
    return gib if gib <= 1 else 2 * math.ceil(gib / 2)


def _round_up_cores(cores: float) -> float:
    return next((offered for offered in (0.5, 1) if cores <= offered), 2 * math.ceil(cores / 2))


def _create_client(configuration: RemoteConfiguration) -> Runloop:
    transport = limit_transport(httpx.HTTPTransport(), httpcore.ReadTimeout)
    http_client = httpx.Client(transport=transport, timeout=CALL_TIMEOUT_SECONDS, follow_redirects=True)
    return Runloop(
        bearer_token=configuration.api_key, base_url=configuration.api_url, max_retries=0, timeout=CALL_TIMEOUT_SECONDS,
        http_client=http_client,
    )  # fmt: skip


def _to_sandbox(found: DevboxView) -> ProviderSandbox:
    name = found.metadata[NAME_LABEL]
    created_at = datetime.fromtimestamp(found.create_time_ms / 1000, UTC)
    return ProviderSandbox(
        ref=name,
        name=name,
        running=found.status == "running",
        created_at=created_at,
        suspended=found.status == "suspended",
        owner=found.metadata.get(OWNER_LABEL, ""),
    )
