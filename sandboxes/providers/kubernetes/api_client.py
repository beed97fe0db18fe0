"""Client of the API server: configuration, authentication and connections of the official client, with plain JSON.

The client's module `stream` is not used: it replaces a method of the shared client during a handshake, so that calls of other
threads fail. The client's models are not used either: a new value of an enum or a missing field would be an exception."""

import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import urllib3
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException

from sandboxes.providers.answer_guard import guard_methods
from sandboxes.providers.errors import FailureCause, ProviderError, Unavailable
from sandboxes.providers.kubernetes.configuration import SERVICE_HOST_VARIABLE
from sandboxes.providers.kubernetes.errors import Expired, build_error
from sandboxes.redaction.texts import quote_answer

CALL_TIMEOUT_SECONDS = 30.0  # of one request
CONNECT_TIMEOUT_SECONDS = 10.0  # of a watch, and allowance for its end
MAX_CHUNK_BYTES, MAX_EVENT_BYTES = 64 << 10, 8 << 20  # of a watch; an object has at most about 1.5 MiB
PAGE_SIZE = 500
MAX_LIST_ATTEMPTS = 3
TRANSPORT_ERRORS = (urllib3.exceptions.HTTPError, client.ApiException, ConfigException, OSError)
MAX_CREATES_PER_SECOND = 10.0  # more would meet limits of the API server that apply to all clients of the account


class TokenBucket:
    """Limit on the rate of calls of this process: `take` waits."""

    def __init__(
        self,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._lock, self._tokens, self._filled_at = threading.Lock(), rate, clock()

    def take(self) -> None:
        """Take a token, and wait until it is due. Concurrent callers are served in the order of their calls."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._rate, self._tokens + (now - self._filled_at) * self._rate) - 1
            self._filled_at = now
            wait = -self._tokens / self._rate
        if wait > 0:
            self._sleep(wait)


@guard_methods("call", "fetch", "list_with_version", "read", "watch")
class ApiClient:
    """Calls of one process to one cluster. No call is repeated here."""

    def __init__(self, *, context: str = "") -> None:
        """Read the configuration. Raise Unavailable if there is none that can be read."""
        configuration = client.Configuration()
        try:
            if os.environ.get(SERVICE_HOST_VARIABLE) and not context:
                config.load_incluster_config(client_configuration=configuration)
            else:
                path = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
                config.load_kube_config(path, context=context or None, client_configuration=configuration)
        except (ConfigException, OSError) as error:
            message = f"No configuration of a cluster can be read: {error}"
            raise Unavailable(message, cause=FailureCause.ENGINE_UNREACHABLE) from error
        configuration.retries = False
        self.creates = TokenBucket(MAX_CREATES_PER_SECOND)
        self._client = client.ApiClient(configuration)

    @property
    def configuration(self) -> Any:
        """Configuration of the official client: address, certificates and credentials."""
        return self._client.configuration

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(seconds=CALL_TIMEOUT_SECONDS),
    ) -> dict[str, Any]:
        """Make one call, and return the decoded object. Raise ProviderError; Unavailable if the outcome is not known."""
        content = self.fetch(method, path, body, query=query, timeout=timeout)
        try:
            decoded = json.loads(content)
            if isinstance(decoded, dict):
                return decoded
        except ValueError:
            pass
        raise Unavailable(f"{path}: the answer is not a JSON object.", cause=FailureCause.ENGINE_ERROR)

    def read(self, path: str, kind: str) -> dict[str, Any]:
        """Return the object of a path. Raise Missing, and Unavailable for an answer that is no object of this kind and name."""
        found = self.call("GET", path)
        metadata = found.get("metadata")
        stated = (metadata.get("name"), type(metadata.get("uid"))) if isinstance(metadata, dict) else None
        if found.get("kind") != kind or stated != (unquote(path.rpartition("/")[2]), str):
            raise Unavailable(f"{path}: the answer is not the {kind} of this name.", cause=FailureCause.ENGINE_ERROR)
        return found

    def fetch(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(seconds=CALL_TIMEOUT_SECONDS),
    ) -> bytes:
        """Like `call`, and return the content of the answer."""
        headers = {"Accept": "application/json", **({"Content-Type": "application/json"} if body is not None else {})}
        try:
            self.authorize(headers)
            response = self._client.call_api(
                method, self.build_url(path, query), headers, body, _request_timeout=timeout.total_seconds()
            )
            content, status = response.read() or b"", response.status
        except TRANSPORT_ERRORS as error:
            raise _build_transport_error(path, error) from error
        if status >= 300:
            raise build_error(status, content, path, response.headers)
        return bytes(content)

    def watch(self, path: str, query: Mapping[str, str], *, timeout: timedelta) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a watch until the API server ends it after `timeout`. Raise ProviderError.

        The connection counts as broken if nothing was received for longer than that. Close the iterator to end the watch."""
        seconds = timeout.total_seconds()
        parameters = {**query, "watch": "true", "timeoutSeconds": str(max(ceil(seconds), 1))}
        headers = {"Accept": "application/json"}
        try:
            self.authorize(headers)
            limits = (CONNECT_TIMEOUT_SECONDS, seconds + CONNECT_TIMEOUT_SECONDS)
            url = self.build_url(path, parameters)
            response = self._client.call_api("GET", url, headers, _request_timeout=limits).response
            try:
                if response.status >= 400:
                    raise build_error(response.status, response.data or b"", path, response.headers)
                yield from _iter_events(response, path)
            finally:
                response.close()
        except TRANSPORT_ERRORS as error:
            raise _build_transport_error(path, error) from error

    def build_url(self, path: str, query: Mapping[str, str] | None = None) -> str:
        return self.configuration.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")

    def authorize(self, headers: dict[str, str]) -> None:
        """Add the credentials to the headers of a request. A token that rotates is read again when it is due."""
        self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)

    def list_items(self, path: str, *, selector: str = "", query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """List all objects with a label selector. Raise Unavailable rather than return a partial list."""
        return self.list_with_version(path, selector=selector, query=query)[0]

    def list_with_version(
        self, path: str, *, selector: str = "", query: Mapping[str, str] | None = None
    ) -> tuple[list[dict[str, Any]], str]:
        """Like `list_items`, and also return the resource version from which a watch misses nothing."""
        fixed = {"limit": str(PAGE_SIZE), **({"labelSelector": selector} if selector else {}), **(query or {})}
        for _ in range(MAX_LIST_ATTEMPTS):
            try:
                items: list[dict[str, Any]] = []
                version = ""
                for page in self._iter_pages(path, fixed):
                    items += page.get("items") or []
                    version = version or str((page.get("metadata") or {}).get("resourceVersion") or "")
                return items, version
            except Expired as error:
                expired = error
        raise Unavailable(f"{path}: the list changed too often: {expired}", cause=FailureCause.ENGINE_ERROR)

    def _iter_pages(self, path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        continuation = ""
        while True:
            page = self.call("GET", path, query={**query, **({"continue": continuation} if continuation else {})})
            items = page.get("items") or []
            is_list = str(page.get("kind")).endswith("List") and isinstance(items, list)
            if not is_list or not all(isinstance(each, dict) for each in items):
                raise Unavailable(f"{path}: the answer is not a list.", cause=FailureCause.ENGINE_ERROR)
            yield page
            continuation = (page.get("metadata") or {}).get("continue") or ""
            if not continuation:
                return


def _iter_events(response: Any, path: str) -> Iterator[dict[str, Any]]:
    """Parse the lines of a watch as they arrive."""
    buffer = b""
    for chunk in response.stream(MAX_CHUNK_BYTES, decode_content=True):
        *lines, buffer = (buffer + chunk).split(b"\n")
        if len(buffer) > MAX_EVENT_BYTES:
            raise Unavailable(f"{path}: an event is too large.", cause=FailureCause.ENGINE_ERROR)
        for line in filter(None, lines):
            try:
                event = json.loads(line)
                is_event = isinstance(event["object"], dict)
            except (ValueError, KeyError, TypeError):
                is_event = False
            if not is_event:
                raise Unavailable(f"{path}: an event cannot be read.", cause=FailureCause.ENGINE_ERROR)
            yield event


def build_path(namespace: str, kind: str, name: str = "", *, group: str = "api/v1") -> str:
    """Build the path of a kind of objects, or of one object, in a namespace."""
    return f"/{group}/namespaces/{quote(namespace)}/{kind}" + (f"/{quote(name)}" if name else "")


def _build_transport_error(subject: str, error: Exception) -> ProviderError:
    is_timeout = isinstance(error, urllib3.exceptions.TimeoutError | TimeoutError)
    cause = FailureCause.TIMEOUT if is_timeout else FailureCause.ENGINE_UNREACHABLE
    return Unavailable(f"{subject}: no answer of the API server: {type(error).__name__}: {quote_answer(error)}", cause=cause)
