"""LangSmith provider: sandboxes of LangSmith, by its own client.

The client repeats requests after errors, and a repeated create without a name makes a second sandbox: it is told not to, and
the name of a sandbox is also its name at LangSmith, which accepts a name once. Durations are seconds in multiples of 60. The
list of sandboxes has no filter, so the owner is a label that is compared here."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import httpcore2
import httpx2  # the HTTP client of LangSmith's client
from django.conf import settings
from langsmith.sandbox import (
    CommandTimeoutError,
    ResourceTimeoutError,
    SandboxClient,
    SandboxClientError,
    SandboxConnectionError,
    SandboxProxyConfig,
)
from langsmith.sandbox import Sandbox as VendorSandbox

from sandboxes.answer_limits import limit_transport
from sandboxes.providers.answer_guard import guard_answers, translate_answer
from sandboxes.providers.base import Network, ProviderSandbox, SandboxSpec, VendorIntervals
from sandboxes.providers.errors import FailureCause, ProviderError, Rejected, Unavailable
from sandboxes.providers.langsmith.snapshots import SnapshotBuilds
from sandboxes.providers.remote.configuration import RemoteConfiguration, find_gateway_destination, round_up_minutes
from sandboxes.providers.remote.errors import (
    ErrorForm,
    NotFound,
    raise_for_answer,
    raise_for_transport,
)
from sandboxes.providers.remote.images import ImageBuildingProvider, require_image
from sandboxes.providers.remote.labels import OWNER_LABEL, build_labels, require_owner
from sandboxes.providers.remote.lifecycle import STOP_TIMEOUT_SECONDS, Pause
from sandboxes.redaction.texts import quote_answer

Result = TypeVar("Result")
CALL_TIMEOUT_SECONDS = 60.0  # of one request
UPLOAD_TIMEOUT_SECONDS = 300
READY, STOPPED, FAILED = "ready", "stopped", "failed"
NO_SANDBOX = "leasehold-none"  # name of no sandbox, because it has no id
NO_HOST = "none.invalid"  # never resolves (RFC 6761). The effect of an empty list is not documented


@guard_answers
class LangSmithProvider(ImageBuildingProvider):
    """Provider for one workspace of LangSmith: LANGSMITH_API_KEY, LANGSMITH_ENDPOINT."""

    name = "langsmith"
    account_option = "workspace"
    has_image_bases = False  # the default image is a snapshot
    can_suspend = has_auto_stop = has_auto_delete = can_set_intervals = can_set_disk = True

    def __init__(self) -> None:
        super().__init__()
        self._sandboxes: dict[str, VendorSandbox] = {}  # by name

    @property
    def _client(self) -> SandboxClient:
        return self._get_clients(lambda: _create_client(self.configuration))

    @property
    def _builds(self) -> SnapshotBuilds:
        return SnapshotBuilds(self._client, self, _translate_errors)

    # Lifecycle

    def create(self, spec: SandboxSpec) -> str:
        configuration, intervals = self.configuration, spec.intervals or self.default_intervals()
        try:
            with _translate_errors(spec.name):
                found = self._client.create_sandbox(
                    name=spec.name,
                    snapshot=spec.image_id or require_image(spec, configuration.image) or None,
                    wait_for_ready=False,
                    labels=build_labels(spec),
                    idle_ttl_seconds=60 * round_up_minutes(intervals.auto_stop),
                    delete_after_stop_seconds=60 * round_up_minutes(intervals.auto_delete),
                    vcpus=math.ceil(spec.millicpus / 1000),
                    mem_bytes=spec.memory_mib << 20,
                    proxy_config=_build_proxy_configuration(configuration.network),
                    fs_capacity_bytes=spec.disk_mib << 20 if spec.disk_mib else None,
                )
        except ProviderError as error:
            found = self._settle_create(spec.name, error)
        require_owner(spec, (found.labels or {}).get(OWNER_LABEL))
        return spec.name

    def set_intervals(self, ref: str, intervals: VendorIntervals) -> None:
        with self._proving_absence(ref), _translate_errors(ref):
            self._client.update_sandbox(
                ref,
                idle_ttl_seconds=60 * round_up_minutes(intervals.auto_stop),
                delete_after_stop_seconds=60 * round_up_minutes(intervals.auto_delete),
            )

    def _wait_running(self, ref: str, deadline: float) -> None:
        pause = Pause(deadline)
        while True:
            found = self._get(ref)
            if found.status == READY:
                self._sandboxes[ref] = found
                return
            if found.status == FAILED:
                raise Rejected(f"LangSmith could not create {ref}: {quote_answer(found.status_message or found.status)}")
            if found.status == STOPPED:
                with suppress(NotFound), _translate_errors(ref), suppress(ResourceTimeoutError):
                    self._client.start_sandbox(ref, timeout=max(math.ceil(deadline - time.monotonic()), 1))
            pause.wait(f"{ref} is {found.status} and not ready in time")

    def restart(self, ref: str) -> None:
        """Stop and start: only that ends every process."""
        self._stop(ref, time.monotonic() + STOP_TIMEOUT_SECONDS)
        self._wait_running(ref, time.monotonic() + settings.SANDBOX_START_TIMEOUT.total_seconds())

    def _stop(self, ref: str, deadline: float) -> None:
        self._sandboxes.pop(ref, None)
        pause = Pause(deadline)
        while (status := self._get(ref).status) != STOPPED:
            if status == READY:
                with suppress(NotFound), _translate_errors(ref):
                    self._client.stop_sandbox(ref)
            pause.wait(f"{ref} is {status} and not stopped in time")

    def _delete(self, ref: str) -> None:
        self._sandboxes.pop(ref, None)
        with _translate_errors(ref):
            self._client.delete_sandbox(ref)

    def inspect(self, ref: str) -> ProviderSandbox:
        return _to_sandbox(self._get(ref))

    def list_all(self) -> list[ProviderSandbox]:
        with _translate_errors("the list of sandboxes"):
            found = self._client.list_sandboxes()
        if not found:
            self._require_vendor()
        return [_to_sandbox(sandbox) for sandbox in found if OWNER_LABEL in (sandbox.labels or {})]

    def _require_vendor(self) -> None:
        """Raise Unavailable unless the vendor answers: the client takes an object of any form for an empty list."""
        with suppress(NotFound):
            self._look_up(NO_SANDBOX)

    def list(self, owner: str) -> list[ProviderSandbox]:
        return [sandbox for sandbox in self.list_all() if sandbox.owner == owner]

    def _look_up(self, ref: str) -> VendorSandbox:
        with _translate_errors(ref):
            found = self._client.get_sandbox(ref)
            if found.name != ref:
                raise ValueError(f"The answer describes the sandbox {found.name}.")
        return found

    # Commands and files

    def _execute(self, ref: str, command: str, *, timeout: timedelta) -> str:
        seconds = math.ceil(timeout.total_seconds())

        def execute(sandbox: VendorSandbox) -> str:
            return str(sandbox.run(command, timeout=seconds).stdout)

        return self._call_running(ref, lambda: self._call_sandbox(ref, execute))

    def _upload(self, ref: str, path: str, content: bytes) -> None:
        def upload(sandbox: VendorSandbox) -> None:
            sandbox.write(path, content, timeout=UPLOAD_TIMEOUT_SECONDS)

        self._call_running(ref, lambda: self._call_sandbox(ref, upload))

    def _call_sandbox(self, ref: str, call: Callable[[VendorSandbox], Result]) -> Result:
        sandbox = self._sandboxes.get(ref)
        if sandbox is None:
            sandbox = self._get(ref)
            if sandbox.status != READY:
                raise Unavailable(f"{ref} is {sandbox.status}", cause=FailureCause.NOT_RUNNING)
            self._sandboxes[ref] = sandbox
        try:
            with _translate_errors(ref):
                return call(sandbox)
        except ProviderError:
            self._sandboxes.pop(ref, None)  # its data plane may be elsewhere after a start
            raise


def _create_client(configuration: RemoteConfiguration) -> SandboxClient:
    client = SandboxClient(
        api_endpoint=f"{configuration.api_url}/api/v2/sandboxes", api_key=configuration.api_key, max_retries=0,
        timeout=CALL_TIMEOUT_SECONDS,
    )  # fmt: skip
    retrying: Any = client._http._transport  # the client accepts no transport
    limit_transport(retrying._transport, httpcore2.ReadTimeout)
    return client


def _build_proxy_configuration(network: Network) -> SandboxProxyConfig | None:
    """Return the configuration of the proxy through which the vendor passes all TCP connections out of a sandbox."""
    if network == Network.OPEN:
        return None
    cidr, domain = find_gateway_destination()
    return {"rules": [], "access_control": {"allow_list": [cidr or domain or NO_HOST]}}


def _read_message(document: Mapping[str, Any]) -> str | None:
    """Return the message of an error document, whose `detail` is an object or, for an invalid field, a list."""
    detail = document.get("detail")
    if isinstance(detail, dict):
        return str(detail.get("message", detail))
    return str(detail) if isinstance(detail, list | str) else None


# The API answers an unknown route with "Not Found", in the same form.
ERRORS = ErrorForm(re.compile(r"(?i)\b(?:sandbox|snapshot)\b.*\bnot found\b"), _read_message)


@contextmanager
def _translate_errors(subject: str) -> Iterator[None]:
    with translate_answer(subject):
        try:
            yield
        except (CommandTimeoutError, ResourceTimeoutError) as error:
            raise Unavailable(f"{subject}: {quote_answer(error)}", cause=FailureCause.TIMEOUT) from error
        except (SandboxConnectionError, httpx2.TransportError, OSError) as error:
            raise_for_transport(subject, error, is_timeout=isinstance(error, httpx2.TimeoutException))
        except (SandboxClientError, httpx2.HTTPError) as error:
            answered = error if isinstance(error, httpx2.HTTPStatusError) else error.__cause__
            if isinstance(answered, httpx2.HTTPStatusError):  # the client's own errors do not state the form of the answer
                raise_for_answer(
                    ERRORS, subject, answered.response.status_code, answered.response.text, answered.response.headers
                )
            raise Unavailable(f"{subject}: {quote_answer(error)}", cause=FailureCause.ENGINE_ERROR) from error


def _to_sandbox(found: VendorSandbox) -> ProviderSandbox:
    created_at = datetime.fromisoformat(found.created_at) if found.created_at else datetime.now(UTC)  # noqa: TID251
    return ProviderSandbox(
        ref=found.name,
        name=found.name,
        running=found.status == READY,
        created_at=created_at,
        suspended=found.status == STOPPED,
        owner=(found.labels or {}).get(OWNER_LABEL, ""),
        memory_mib=found.mem_bytes >> 20 if found.mem_bytes else None,
        millicpus=round(found.vcpus * 1000) if found.vcpus else None,
    )
