"""Daytona provider: sandboxes of Daytona, by the API clients that Daytona generates from its OpenAPI documents.

Its SDK on top of these clients is not used: it waits for a created sandbox without a limit or with SIGALRM, which only one part
of a process can use, and keeps a connection for events in a thread of its own.

The name of a sandbox is also its name at Daytona, which accepts a name once. A create whose outcome is unknown is therefore
settled by a look-up of the name. All intervals of Daytona are minutes, and an `autoDeleteInterval` of 0 deletes a sandbox as
soon as it stops: off is -1."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import urllib3
from daytona_api_client import (
    ApiClient,
    Configuration,
    CreateBuildInfo,
    CreateSandbox,
    GpuType,
    SandboxApi,
    SandboxListItem,
    SandboxState,
)
from daytona_api_client import Sandbox as VendorSandbox
from daytona_api_client.exceptions import ApiException
from daytona_toolbox_api_client import ApiClient as ToolboxClient
from daytona_toolbox_api_client import Configuration as ToolboxConfiguration
from daytona_toolbox_api_client import ExecuteRequest, FileSystemApi, ProcessApi
from daytona_toolbox_api_client.exceptions import ApiException as ToolboxException
from django.conf import settings

from sandboxes.answer_limits import limit_answers
from sandboxes.providers.answer_guard import guard_answers, translate_answer
from sandboxes.providers.base import Network, ProviderSandbox, SandboxSpec, VendorIntervals
from sandboxes.providers.daytona.snapshots import SnapshotBuilds
from sandboxes.providers.errors import FailureCause, Rejected, Unavailable
from sandboxes.providers.remote.configuration import RemoteConfiguration, find_gateway_destination, round_up_minutes
from sandboxes.providers.remote.errors import (
    Conflict,
    ErrorForm,
    NotFound,
    raise_for_answer,
    raise_for_transport,
)
from sandboxes.providers.remote.images import ImageBuildingProvider, require_image
from sandboxes.providers.remote.labels import NAME_LABEL, OWNER_LABEL, build_labels, require_owner
from sandboxes.providers.remote.lifecycle import STOP_TIMEOUT_SECONDS, Pause
from sandboxes.redaction.texts import quote_answer

Result = TypeVar("Result")
Client = TypeVar("Client", ApiClient, ToolboxClient)
CALL_TIMEOUT_SECONDS = 60.0  # of one request
UPLOAD_TIMEOUT_SECONDS = 300.0
MAX_ANSWER_BYTES = 64 << 20  # of a list, a log or the output of a command
LISTING = "the list of sandboxes"
PAGE_SIZE = 200  # the maximum of the API
NO_AUTO_DELETE = -1
RUNNING = {SandboxState.STARTED}
GONE = {SandboxState.DESTROYED, SandboxState.DESTROYING}
FAILED = {SandboxState.ERROR, SandboxState.BUILD_FAILED}
# The API answers an unknown route with "Cannot GET /path", in the same form.
ERRORS = ErrorForm(absence=re.compile(r"(?i)\b(?:sandbox|snapshot)\b.*\bnot found\b"))
STARTABLE = {SandboxState.STOPPED, SandboxState.ARCHIVED}


@guard_answers
class DaytonaProvider(ImageBuildingProvider):
    """Provider for one organization at Daytona: DAYTONA_API_KEY, DAYTONA_API_URL."""

    name = "daytona"
    account_option = "organization_id"
    can_suspend = has_auto_stop = has_auto_delete = can_set_intervals = True
    can_set_disk = has_gpus = sizes_need_image = True  # the size of a snapshot is part of the snapshot
    gpu_types = frozenset(kind.value for kind in GpuType if kind != GpuType.UNKNOWN_DEFAULT_OPEN_API)

    def __init__(self) -> None:
        super().__init__()
        self._toolbox_urls: dict[str, str] = {}  # by name

    @property
    def _clients(self) -> "_Clients":
        return self._get_clients(lambda: _Clients(self.configuration))

    @property
    def _api(self) -> SandboxApi:
        return self._clients.api

    @property
    def _builds(self) -> SnapshotBuilds:
        return SnapshotBuilds(self._api.api_client, _translate_errors)

    # Lifecycle

    def create(self, spec: SandboxSpec) -> str:
        try:
            with _translate_errors(spec.name):
                request = self._build_request(spec)
                found = _require(self._api.create_sandbox(request, _request_timeout=CALL_TIMEOUT_SECONDS))
        except Unavailable as error:
            found = self._settle_create(spec.name, error)
        require_owner(spec, found.labels.get(OWNER_LABEL))
        self._remember(found)
        return spec.name

    def _build_request(self, spec: SandboxSpec) -> CreateSandbox:
        configuration, intervals = self.configuration, spec.intervals or self.default_intervals()
        image = "" if spec.image_id else require_image(spec, configuration.image)
        if (spec.disk_mib or spec.gpus) and not image:
            raise Rejected("Daytona sets disk and GPUs only for a sandbox of an image: its snapshots have a size of their own.")
        return CreateSandbox(
            name=spec.name,
            labels=build_labels(spec),
            target=configuration.options["target"] or None,
            snapshot=spec.image_id or None,
            build_info=CreateBuildInfo(dockerfile_content=f"FROM {image}\n") if image else None,
            cpu=-(-spec.millicpus // 1000) if image else None,
            memory=_round_up_gib(spec.memory_mib) if image else None,
            disk=_round_up_gib(spec.disk_mib) if spec.disk_mib else None,
            gpu=spec.gpus or None,
            gpu_type=[GpuType(spec.gpu_type)] if spec.gpu_type else None,
            auto_stop_interval=round_up_minutes(intervals.auto_stop),
            auto_delete_interval=round_up_minutes(intervals.auto_delete) or NO_AUTO_DELETE,
            **_build_network(configuration.network),
        )

    def set_intervals(self, ref: str, intervals: VendorIntervals) -> None:
        auto_stop, auto_delete = round_up_minutes(intervals.auto_stop), round_up_minutes(intervals.auto_delete)
        with self._proving_absence(ref), _translate_errors(ref):  # the longer life first: the two calls may be cut apart
            self._api.set_auto_delete_interval(ref, auto_delete or NO_AUTO_DELETE, _request_timeout=CALL_TIMEOUT_SECONDS)
            self._api.set_autostop_interval(ref, auto_stop, _request_timeout=CALL_TIMEOUT_SECONDS)

    def _wait_running(self, ref: str, deadline: float) -> None:
        pause = Pause(deadline)
        while True:
            found = self._get(ref)
            if found.state in RUNNING:
                return
            if found.state in FAILED:
                text = f"Daytona could not create {ref}: {quote_answer(found.error_reason or found.state)}"
                raise Rejected(text, cause=FailureCause.IMAGE_UNUSABLE if found.state == SandboxState.BUILD_FAILED else None)
            if found.state in STARTABLE:
                self._request_start(ref)
            pause.wait(f"{ref} is {found.state} and not ready in time")

    def _request_start(self, ref: str) -> None:
        try:
            with _translate_errors(ref):
                self._api.start_sandbox(ref, _request_timeout=CALL_TIMEOUT_SECONDS)
        except (Conflict, NotFound):
            return  # it is starting already, or the next look decides

    def restart(self, ref: str) -> None:
        """Stop and start: only that ends every process."""
        self._stop(ref, time.monotonic() + STOP_TIMEOUT_SECONDS)
        self._wait_running(ref, time.monotonic() + settings.SANDBOX_START_TIMEOUT.total_seconds())

    def _stop(self, ref: str, deadline: float) -> None:
        pause = Pause(deadline)
        while (state := self._get(ref).state) not in STARTABLE:
            if state in RUNNING:
                with suppress(Conflict, NotFound), _translate_errors(ref):  # it is stopping already
                    self._api.stop_sandbox(ref, _request_timeout=CALL_TIMEOUT_SECONDS)
            pause.wait(f"{ref} is {state} and not stopped in time")

    def _delete(self, ref: str) -> None:
        self._toolbox_urls.pop(ref, None)
        with _translate_errors(ref):
            self._api.delete_sandbox(ref, _request_timeout=CALL_TIMEOUT_SECONDS)

    def inspect(self, ref: str) -> ProviderSandbox:
        return _to_sandbox(self._get(ref))

    def list_all(self) -> list[ProviderSandbox]:
        return [_to_sandbox(found) for found in self._iter_listed(labels=None) if OWNER_LABEL in found.labels]

    def list(self, owner: str) -> list[ProviderSandbox]:
        listed = self._iter_listed(labels=json.dumps({OWNER_LABEL: owner}))
        return [_to_sandbox(found) for found in listed if found.labels.get(OWNER_LABEL) == owner]

    def _iter_listed(self, *, labels: str | None) -> Iterator[SandboxListItem]:
        """Yield the sandboxes of all pages that are not gone, of all labels or of these."""
        cursor = None
        while True:
            with _translate_errors(LISTING):
                listed = self._api.list_sandboxes(
                    labels=labels, cursor=cursor, limit=PAGE_SIZE, _request_timeout=CALL_TIMEOUT_SECONDS
                )
                page = _require(listed)
            yield from (found for found in page.items if found.state not in GONE)
            cursor = page.next_cursor
            if not cursor:
                return

    def _look_up(self, ref: str) -> VendorSandbox:
        found = self._look_up_remains(ref)
        if found.state in GONE:
            raise _build_gone(ref)
        self._remember(found)
        return found

    def _look_up_remains(self, ref: str) -> VendorSandbox:
        with _translate_errors(ref):
            found = _require(self._api.get_sandbox(ref, _request_timeout=CALL_TIMEOUT_SECONDS))
            if found.name != ref:
                raise ValueError(f"The answer describes the sandbox {found.name}.")
        if found.state == SandboxState.DESTROYED:
            raise _build_gone(ref)
        return found

    def _is_listed(self, ref: str) -> bool:
        return any(found.name == ref for found in self._iter_listed(labels=json.dumps({NAME_LABEL: ref})))

    def _remember(self, found: VendorSandbox) -> None:
        self._toolbox_urls[found.name] = _build_toolbox_url(found)

    # Commands and files, by the toolbox of the sandbox

    def _execute(self, ref: str, command: str, *, timeout: timedelta) -> str:
        seconds = int(timeout.total_seconds()) + 1  # stated in each request: the server's default is 10 seconds
        request = ExecuteRequest(command=command, timeout=seconds)

        def execute(client: ToolboxClient) -> str:
            return str(ProcessApi(client).execute_command(request, _request_timeout=seconds + 10.0).result)

        return self._call_running(ref, lambda: self._call_toolbox(ref, execute))

    def _upload(self, ref: str, path: str, content: bytes) -> None:
        def upload(client: ToolboxClient) -> object:
            return FileSystemApi(client).upload_file(path, ("content", content), _request_timeout=UPLOAD_TIMEOUT_SECONDS)

        self._call_running(ref, lambda: self._call_toolbox(ref, upload))

    def _call_toolbox(self, ref: str, call: Callable[[ToolboxClient], Result]) -> Result:
        url = self._toolbox_urls.get(ref) or _build_toolbox_url(self._get(ref))  # a concurrent destroy removes the entry
        client = ToolboxClient(ToolboxConfiguration(host=url, retries=False))
        client.rest_client = self._clients.toolbox_connections
        with _translate_errors(ref):
            return call(_authorize(client, self.configuration.api_key))


class _Clients:
    """Clients of one process: a forked process must not share connections."""

    def __init__(self, configuration: RemoteConfiguration) -> None:
        client = ApiClient(Configuration(host=configuration.api_url, retries=False))
        self.api = SandboxApi(_authorize(client, configuration.api_key))
        self.toolbox_connections = ToolboxClient(ToolboxConfiguration(host="", retries=False)).rest_client
        for connections in (client.rest_client, self.toolbox_connections):
            limit_answers(connections.pool_manager, max_bytes=MAX_ANSWER_BYTES)


def _build_toolbox_url(found: VendorSandbox) -> str:
    return f"{found.toolbox_proxy_url.rstrip('/')}/{found.id}"


def _authorize(client: Client, api_key: str) -> Client:
    client.default_headers["Authorization"] = f"Bearer {api_key}"
    return client


def _round_up_gib(mib: int) -> int:
    return -(-mib // 1024)


def _build_network(network: Network) -> dict[str, Any]:
    """Return the fields of a request that restrict the network. The toolbox does not need the sandbox's network."""
    if network == Network.OPEN:
        return {}
    cidr, domain = find_gateway_destination()
    if not cidr and not domain:
        return {"network_block_all": True}
    return {"network_allow_list": cidr} if cidr else {"domain_allow_list": domain}


@contextmanager
def _translate_errors(subject: str) -> Iterator[None]:
    with translate_answer(subject):
        try:
            yield
        except (ApiException, ToolboxException) as error:
            if not error.status:
                raise_for_transport(subject, error)
            raise_for_answer(ERRORS, subject, error.status, str(error.body or error.reason), error.headers)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise_for_transport(subject, error, is_timeout=isinstance(error, urllib3.exceptions.TimeoutError))


def _require(answer: Result | None) -> Result:
    """Return the object of an answer. Raise ValueError without one: the client returns None for other statuses of success."""
    if answer is None:
        raise ValueError("The answer contains no object.")
    return answer


def _build_gone(ref: str) -> NotFound:
    return NotFound(f"Daytona has no sandbox {ref}.", cause=FailureCause.ENGINE_ERROR)


def _to_sandbox(found: VendorSandbox | SandboxListItem) -> ProviderSandbox:
    return ProviderSandbox(
        ref=found.name,
        name=found.name,
        running=found.state in RUNNING,
        suspended=found.state in STARTABLE,
        created_at=datetime.fromisoformat(found.created_at) if found.created_at else datetime.now(UTC),  # noqa: TID251
        owner=found.labels.get(OWNER_LABEL, ""),
        memory_mib=round(found.memory * 1024),  # GiB
        millicpus=round(found.cpu * 1000),
    )
