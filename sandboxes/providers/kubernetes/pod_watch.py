"""Watch of the Pods of sandboxes, as a hint that is faster than a list.

Events may be late, repeated, in the wrong order or missing. Each is therefore handled by the Pod that it shows alone, and only
if this Pod is the sandbox's. The watch continues where the last one of this process has ended; on an error, an expired
resource version or one that goes backwards, as after the restoration of a cluster, the Pods are listed again."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import structlog

from sandboxes.providers.base import ProviderSandbox
from sandboxes.providers.errors import FailureCause, ProviderError, Unavailable
from sandboxes.providers.kubernetes import endings
from sandboxes.providers.kubernetes.errors import Expired
from sandboxes.providers.kubernetes.pod_spec import ANY_OWNER, ROLE_LABEL, SANDBOX_ROLE
from sandboxes.providers.kubernetes.pods import PodClient, is_being_destroyed, to_sandbox

log = structlog.get_logger(__name__)
SELECTOR = f"{ANY_OWNER},{ROLE_LABEL}={SANDBOX_ROLE}"
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)  # between two attempts, after each failure in a row
MAX_REMEMBERED = 4096  # hints, so that further changes of a Pod that ends are not yielded again
GONE = 410


class PodWatch:
    """Watches of one process, one after another."""

    def __init__(
        self, pods: PodClient, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._pods, self._clock, self._sleep = pods, clock, sleep
        self._version = ""  # resource version from which to watch; empty: the Pods have to be listed first
        self._yielded: set[tuple[str, ...]] = set()

    def iter_ends(self, timeout: timedelta) -> Generator[ProviderSandbox, None, None]:
        """See Provider.watch_ends. Raise ProviderError at the end if the last attempt failed, at once if it is refused."""
        deadline, failures = self._clock() + timeout.total_seconds(), 0
        while (left := deadline - self._clock()) > 0:
            try:
                if not self._version:
                    yield from self._list()
                yield from self._watch(max(deadline - self._clock(), 1.0))
                failures = 0
            except Unavailable as error:
                self._version = ""
                wait = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                log.info("watch of Pods interrupted", error=str(error), retry_seconds=wait)
                if self._clock() + wait >= deadline and not isinstance(error, Expired):
                    raise
                failures += 1
                self._sleep(min(wait, left))

    def _list(self) -> Iterator[ProviderSandbox]:
        pods, version = self._pods.api.list_with_version(self._pods.path("pods"), selector=SELECTOR)
        for pod in pods:
            yield from self._handle(pod)
        self._version = version

    def _watch(self, seconds: float) -> Iterator[ProviderSandbox]:
        """Yield the hints of one watch. Raise Unavailable if the Pods have to be listed again."""
        query = {"labelSelector": SELECTOR, "resourceVersion": self._version, "allowWatchBookmarks": "true"}
        started = self._clock()
        with closing(self._pods.api.watch(self._pods.path("pods"), query, timeout=timedelta(seconds=seconds))) as events:
            for event in events:
                kind, item = event.get("type"), event["object"]
                if kind == "ERROR":
                    raise _build_error(item)
                if kind != "BOOKMARK":
                    yield from self._handle(item, is_gone=kind == "DELETED")
                self._advance(str((item.get("metadata") or {}).get("resourceVersion") or ""))
        if self._clock() - started < min(seconds, 1.0):
            raise Unavailable("The API server has ended a watch at once.", cause=FailureCause.ENGINE_ERROR)

    def _advance(self, version: str) -> None:
        """Note the resource version of an event. Raise Expired if versions go backwards: events may have been missed."""
        if not version:
            return
        if version.isdecimal() and self._version.isdecimal() and int(version) < int(self._version):
            message = f"Resource versions went back from {self._version} to {version}."
            raise Expired(message, cause=FailureCause.ENGINE_ERROR)
        self._version = version

    def _handle(self, pod: Mapping[str, Any], *, is_gone: bool = False) -> Iterator[ProviderSandbox]:
        """Store the reason for which a Pod ends, and yield its sandbox, once for each step of its end."""
        metadata = pod.get("metadata") or {}
        # A destroy by the control plane is known, and as short a deletion by someone else leaves no time to store anything.
        is_leaving = is_gone or (bool(metadata.get("deletionTimestamp")) and not is_being_destroyed(pod))
        ending = find_ending(pod)
        if not (is_leaving or ending):
            return
        cause = ending.cause if ending else ""
        hint = (str(metadata.get("uid")), str(metadata.get("deletionTimestamp") or ""), cause, str(is_gone))
        if hint in self._yielded or self._pods.records.find_uid(metadata["name"]) not in ("", metadata.get("uid")):
            return
        if ending:
            self._pods.records.store_ending(metadata["name"], str(metadata["uid"]), ending)
        if len(self._yielded) >= MAX_REMEMBERED:
            self._yielded.clear()
        self._yielded.add(hint)
        if is_leaving:
            found = to_sandbox(pod)
            yield replace(found, running=False, is_remnant=True) if is_gone else found


def find_ending(pod: Mapping[str, Any]) -> endings.Ending | None:
    """Return why a Pod ends, if its status tells. A Pod that the control plane destroys has no reason of its own."""
    if disruption := endings.find_disruption(pod):
        return endings.describe_end(pod) or disruption
    return None if is_being_destroyed(pod) else endings.describe_end(pod)


def _build_error(status: Mapping[str, Any]) -> ProviderError:
    message = f"The API server has ended the watch: {status.get('message') or status}"
    kind = Expired if status.get("code") == GONE else Unavailable
    return kind(message, cause=FailureCause.ENGINE_ERROR)
