"""Storage of the emulated API server: objects with resource versions, and the history that watches read.

A stored object is never changed in place. An update replaces it, so that the history and readers keep the earlier one."""

import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from tests.emulators.kubernetes.api.resources import Resource
from tests.emulators.kubernetes.api.status import already_exists, conflict, not_found

Object = dict[str, Any]
FIRST_VERSION = 1000
MODIFIED_MESSAGE = "the object has been modified; please apply your changes to the latest version and try again"


def format_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def key_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """Return (namespace, name) of an object. The namespace of an object of the cluster is empty."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


@dataclass(frozen=True)
class Change:
    """One entry of the history. `previous` is the object before an update."""

    version: int
    type: str  # ADDED, MODIFIED or DELETED
    resource: Resource
    item: Object
    previous: Object | None = None


class Store:
    """Objects of one cluster. Methods raise ApiError."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = FIRST_VERSION
        self.oldest_version = FIRST_VERSION  # watches from an earlier version get 410
        self.history: list[Change] = []
        self.is_closed = False
        self._items: dict[str, dict[tuple[str, str], Object]] = {}

    def create(self, resource: Resource, item: Object) -> Object:
        with self.changed:
            key, items = key_of(item), self._items.setdefault(resource.qualified, {})
            if key in items:
                raise already_exists(resource, key[1])
            created = deepcopy(item)
            created["metadata"] |= {"uid": str(uuid4()), "creationTimestamp": format_now()}
            self._record("ADDED", resource, created)
            items[key] = created
            return created

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        with self.changed:
            found = self.find(resource, namespace, name)
            if found is None:
                raise not_found(resource, name)
            return found

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.changed:
            return self._items.get(resource.qualified, {}).get((namespace, name))

    def list(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Return the objects of a namespace, or of all, in the order of their keys."""
        with self.changed:
            items = self._items.get(resource.qualified, {})
            return [items[key] for key in sorted(items) if not namespace or key[0] == namespace]

    def edit(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Callable[[Object], None],
        *,
        uid: str = "",
        version: str = "",
    ) -> Object:
        """Replace an object by a changed copy. `uid` and `version` are preconditions.

        A deleted object whose grace period is over and that has no finalizers is removed, as the API server does."""
        with self.changed:
            previous = self.get(resource, namespace, name)
            if uid and uid != previous["metadata"]["uid"]:
                raise conflict(resource, name, f"Precondition failed: UID in precondition: {uid}, UID in object meta: "
                               f"{previous['metadata']['uid']}")  # fmt: skip
            if version and version != previous["metadata"]["resourceVersion"]:
                raise conflict(resource, name, MODIFIED_MESSAGE)
            item = deepcopy(previous)
            change(item)
            if item == previous:
                return previous
            metadata = item["metadata"]
            if (
                metadata.get("deletionTimestamp")
                and not metadata.get("finalizers")
                and not metadata.get("deletionGracePeriodSeconds")
            ):
                return self.remove(resource, namespace, name, item)
            self._record("MODIFIED", resource, item, previous)
            self._items[resource.qualified][namespace, name] = item
            return item

    def remove(self, resource: Resource, namespace: str, name: str, last: Object | None = None) -> Object:
        """Remove an object at once. `last` is its last state, by default the stored one."""
        with self.changed:
            previous = self.get(resource, namespace, name)
            item = deepcopy(last or previous)
            self._record("DELETED", resource, item, previous)
            del self._items[resource.qualified][namespace, name]
            return item

    def rewind(self, versions: int) -> None:
        """Let the resource version go backwards, as after the restoration of etcd from a backup."""
        with self.changed:
            self.version -= versions

    def compact(self) -> None:
        """Forget the history: a watch from an earlier resource version gets 410."""
        with self.changed:
            self.oldest_version = self.version

    def close(self) -> None:
        """End all watches."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def _record(self, kind: str, resource: Resource, item: Object, previous: Object | None = None) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, kind, resource, item, previous))
        self.changed.notify_all()
