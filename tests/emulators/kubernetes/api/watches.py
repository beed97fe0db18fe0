"""Watch streams: events after a resource version, initial events, bookmarks, and their faults."""

import json
import time
from collections.abc import Iterator
from typing import Any

from tests.emulators.kubernetes.api.resources import Resource
from tests.emulators.kubernetes.api.selectors import Selection
from tests.emulators.kubernetes.api.server import Request, Stream
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.api.store import Change, Store
from tests.emulators.kubernetes.api.tables import Render
from tests.emulators.kubernetes.faults import DELAYED, EXPIRED, LOST, REORDERED, TWICE, ClusterFaults, WatchFault

DEFAULT_TIMEOUT_SECONDS = 1800.0
BOOKMARK_INTERVAL_SECONDS = 10.0
POLL_SECONDS = 0.5  # until a closed connection is noticed
INITIAL_EVENTS_END = "k8s.io/initial-events-end"

Event = tuple[str, dict[str, Any]]  # type and object


class Watch:
    """One watch request."""

    def __init__(
        self, store: Store, faults: ClusterFaults, resource: Resource, namespace: str, selection: Selection, request: Request,
        render: Render,
    ) -> None:  # fmt: skip
        self.store, self.faults, self.resource, self.namespace = store, faults, resource, namespace
        self.selection, self.render = selection, render
        self.has_bookmarks = request.is_true("allowWatchBookmarks")
        self.timeout = float(request.get("timeoutSeconds") or DEFAULT_TIMEOUT_SECONDS)
        self.sends_initial_events = request.is_true("sendInitialEvents")
        self.version = request.get("resourceVersion")
        self.starts_with_state = self.version in {"", "0"} or self.sends_initial_events
        if self.sends_initial_events and request.get("resourceVersionMatch") != "NotOlderThan":
            raise ApiError(422, 'resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to '
                           'NotOlderThan')  # fmt: skip
        with store.changed:
            if self.starts_with_state:
                self.position = len(store.history)
                self.initial = [item for item in store.list(resource, namespace) if selection.matches(item)]
                self.minimum = 0
            else:
                self.position, self.initial, self.minimum = 0, [], self._parse_version()
            self.is_expired = not self.starts_with_state and self.minimum < store.oldest_version
            self.start_version = store.version

    def _parse_version(self) -> int:
        try:
            return int(self.version)
        except ValueError:
            raise ApiError(400, f'invalid resource version "{self.version}"') from None

    def serve(self, stream: Stream) -> None:
        """Send events until the timeout, the end of the connection or that of the store."""
        deadline, bookmark_at = time.monotonic() + self.timeout, time.monotonic() + BOOKMARK_INTERVAL_SECONDS
        if self.is_expired:
            self._send(stream, ("ERROR", ApiError(410, f"too old resource version: {self.version}").status))
            return
        for item in self.initial:
            self._send(stream, ("ADDED", item))
        if self.sends_initial_events:
            self._send_bookmark(stream, {INITIAL_EVENTS_END: "true"})
        held: list[Event] = []
        while (now := time.monotonic()) < deadline and not self.store.is_closed and stream.is_open():
            for change in self._wait(min(POLL_SECONDS, deadline - now)):
                event = self._describe(change)
                if event is None:
                    continue
                fault = self.faults.take_watch(self.resource.plural)
                if fault and fault.outcome == EXPIRED:
                    self._send(stream, ("ERROR", ApiError(410, "too old resource version").status))
                    return
                for ready in _apply(fault, event, held):
                    self._send(stream, ready)
            if self.has_bookmarks and time.monotonic() > bookmark_at:
                self._send_bookmark(stream)
                bookmark_at = time.monotonic() + BOOKMARK_INTERVAL_SECONDS
        if self.has_bookmarks and time.monotonic() >= deadline:
            self._send_bookmark(stream)

    def _wait(self, seconds: float) -> list[Change]:
        """Return the changes since the last call, after at most this many seconds."""
        with self.store.changed:
            if self.position == len(self.store.history):
                self.store.changed.wait(seconds)
            found = self.store.history[self.position :]
            self.position += len(found)
            if found:
                self.start_version = found[-1].version
            return found

    def _describe(self, change: Change) -> Event | None:
        """Return the event for a change, or None. An object that leaves or enters the selection is deleted or added for it.

        One that leaves is shown as it was selected, with the version of the change."""
        namespace = change.item["metadata"].get("namespace", "")
        if change.resource != self.resource or change.version <= self.minimum or self.namespace not in {"", namespace}:
            return None
        is_selected = self.selection.matches(change.item)
        was_selected = change.previous is not None and self.selection.matches(change.previous)
        if change.type == "DELETED":
            return ("DELETED", change.item) if is_selected or was_selected else None
        if is_selected:
            return ("MODIFIED" if was_selected else "ADDED"), change.item
        if change.previous is None or not was_selected:
            return None
        version = change.item["metadata"]["resourceVersion"]
        return "DELETED", {**change.previous, "metadata": {**change.previous["metadata"], "resourceVersion": version}}

    def _send(self, stream: Stream, event: Event) -> None:
        kind, item = event
        content = item if kind in {"ERROR", "BOOKMARK"} else self.render(item)
        stream.write(json.dumps({"type": kind, "object": content}).encode() + b"\n")

    def _send_bookmark(self, stream: Stream, annotations: dict[str, str] | None = None) -> None:
        metadata: dict[str, Any] = {"resourceVersion": str(self.start_version), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        item = {"kind": self.resource.kind, "apiVersion": self.resource.api_version, "metadata": metadata}
        if self.resource.plural == "pods":
            item |= {"spec": {"containers": None}, "status": {}}
        self._send(stream, ("BOOKMARK", item))


def _apply(fault: WatchFault | None, event: Event, held: list[Event]) -> Iterator[Event]:
    """Yield the events to be sent now. `held` keeps an event until the next one."""
    if fault and fault.outcome == REORDERED and not held:
        held.append(event)
        return
    if fault and fault.outcome == LOST:
        return
    if fault and fault.outcome == DELAYED:
        time.sleep(fault.seconds)
    yield event
    if fault and fault.outcome == TWICE:
        yield event
    yield from held
    held.clear()
