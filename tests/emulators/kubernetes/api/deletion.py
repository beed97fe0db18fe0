"""Deletion: preconditions, grace periods, finalizers, garbage collection of owned objects, and eviction of Pods."""

import json
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.emulators.kubernetes.api.admission import Admission
from tests.emulators.kubernetes.api.nodes import Node
from tests.emulators.kubernetes.api.resources import NAMESPACES, PODS, Resource
from tests.emulators.kubernetes.api.server import Request
from tests.emulators.kubernetes.api.status import ApiError, unmet_precondition
from tests.emulators.kubernetes.api.store import Object, Store, format_now, key_of

DEFAULT_GRACE_SECONDS = 30
ENDED_PHASES = {"Failed", "Succeeded"}
NAMESPACE_POLL_SECONDS = 0.2


def set_condition(pod: Object, kind: str, status: str, reason: str = "", message: str = "") -> None:
    """Set one condition in the status of an object."""
    conditions = pod.setdefault("status", {}).setdefault("conditions", [])
    previous = next((one for one in conditions if one["type"] == kind), None)
    condition: Object = {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": format_now()}
    condition |= {key: value for key, value in (("reason", reason), ("message", message)) if value}
    if previous is None:
        conditions.append(condition)
    else:
        if previous["status"] == status:
            condition["lastTransitionTime"] = previous["lastTransitionTime"]
        conditions[conditions.index(previous)] = condition


class Deletion:
    """Deletion of the objects of a store. Methods raise ApiError."""

    def __init__(self, store: Store, node: Node, admission: Admission, resources: tuple[Resource, ...]) -> None:
        self.store, self.node, self.admission, self.resources = store, node, admission, resources

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Mapping[str, Any], request: Request | None = None
    ) -> Object:
        """Delete an object, and return it or a Status, as the API server does."""
        with self.store.changed:
            item = self.store.get(resource, namespace, name)
            _check_preconditions(resource, item, options.get("preconditions") or {})
            grace = _find_grace(options, request)
            policy = options.get("propagationPolicy") or (request.get("propagationPolicy") if request else "")
            if request and (request.get("dryRun") == "All" or "All" in (options.get("dryRun") or ())):
                return item
            if resource == PODS:
                return self._delete_pod(item, grace, policy)
            return self._delete_other(resource, item, policy)

    def finish(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Remove an object whose grace period is over, or as soon as its last finalizer is removed. Idempotent."""
        with self.store.changed:
            item = self.store.find(resource, namespace, name)
            if item is None or item["metadata"]["uid"] != uid:
                return
            if item["metadata"].get("finalizers"):
                self.store.edit(resource, namespace, name, _mark_graceless)
            else:
                self.remove(resource, item)

    def remove(self, resource: Resource, item: Object, policy: str = "") -> Object:
        """Remove an object at once, and everything that it owns."""
        namespace, name = key_of(item)
        removed = self.store.remove(resource, namespace, name, item)
        self.admission.update_quotas(namespace)
        self.node.observe(resource)
        if policy != "Orphan":
            self._delete_owned(item["metadata"]["uid"])
        return removed

    def collect(self, resource: Resource, item: Object) -> None:
        """Remove an object whose owners are all gone, as the garbage collector does."""
        owners = {owner["uid"] for owner in item["metadata"].get("ownerReferences") or ()}
        existing = (one["metadata"]["uid"] for kind in self.resources if "list" in kind.verbs for one in self.store.list(kind))
        if owners and owners.isdisjoint(existing):
            self.remove(resource, item)

    def evict(self, namespace: str, name: str, body: Mapping[str, Any]) -> Object:
        """Delete a Pod through the eviction API."""

        def mark(pod: Object) -> None:
            set_condition(pod, "DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")

        self.store.edit(PODS, namespace, name, mark)
        self.delete(PODS, namespace, name, body.get("deleteOptions") or {})
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _delete_pod(self, pod: Object, asked: int | None, policy: str) -> Object:
        metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
        grace = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS) if asked is None else asked
        if not spec.get("nodeName") or status.get("phase") in ENDED_PHASES:
            grace = 0
        if metadata.get("deletionTimestamp"):
            grace = min(grace, metadata.get("deletionGracePeriodSeconds", grace))
        if grace == 0 and not metadata.get("finalizers"):
            removed = self.remove(PODS, pod, policy)
            self.node.discard(removed)
            return removed
        edited = self.store.edit(PODS, *key_of(pod), lambda item: _mark_deleted(item, grace))
        self.node.stop(edited)
        return edited

    def _delete_other(self, resource: Resource, item: Object, policy: str) -> Object:
        if resource == NAMESPACES:
            return self._delete_namespace(item)
        if item["metadata"].get("finalizers"):
            return self.store.edit(resource, *key_of(item), lambda found: _mark_deleted(found, 0))
        self.remove(resource, item, policy)
        details = {"name": item["metadata"]["name"], "kind": resource.plural, "uid": item["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _delete_namespace(self, item: Object) -> Object:
        name = item["metadata"]["name"]

        def mark(found: Object) -> None:
            _mark_deleted(found, 0)
            found["metadata"]["deletionGracePeriodSeconds"] = DEFAULT_GRACE_SECONDS  # until it is empty
            found["status"] = {"phase": "Terminating"}

        if item["metadata"].get("deletionTimestamp"):
            return item
        marked = self.store.edit(NAMESPACES, "", name, mark)
        threading.Thread(target=self._empty_namespace, args=(name,), daemon=True).start()
        return marked

    def _empty_namespace(self, name: str) -> None:
        """Delete everything in a namespace, then the namespace."""
        namespaced = [resource for resource in self.resources if resource.is_namespaced and "list" in resource.verbs]
        with self.store.changed:
            for resource in namespaced:
                for item in self.store.list(resource, name):
                    self.delete(resource, name, item["metadata"]["name"], {})
            while any(self.store.list(resource, name) for resource in namespaced):
                if self.store.is_closed:
                    return
                self.store.changed.wait(NAMESPACE_POLL_SECONDS)
            if self.store.find(NAMESPACES, "", name):
                self.store.remove(NAMESPACES, "", name)

    def _delete_owned(self, uid: str) -> None:
        for resource in self.resources:
            for item in self.store.list(resource) if "list" in resource.verbs else ():
                if any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences") or ()):
                    self.delete(resource, *key_of(item), {})


def _check_preconditions(resource: Resource, item: Object, preconditions: Mapping[str, Any]) -> None:
    name = item["metadata"]["name"]
    for key, field, label in (("uid", "uid", "UID"), ("resourceVersion", "resourceVersion", "ResourceVersion")):
        expected, found = preconditions.get(key), item["metadata"][field]
        if expected and expected != found:
            raise unmet_precondition(resource, name, label, str(expected), found)


def _find_grace(options: Mapping[str, Any], request: Request | None) -> int | None:
    grace = options.get("gracePeriodSeconds")
    if grace is None and request and request.get("gracePeriodSeconds"):
        grace = request.get("gracePeriodSeconds")
    if grace is None:
        return None
    try:
        return max(0, int(json.loads(str(grace))))
    except ValueError:
        raise ApiError(400, f"invalid gracePeriodSeconds: {grace}") from None


def _mark_deleted(item: Object, grace: int) -> None:
    deleted_at = datetime.now(UTC) + timedelta(seconds=grace)
    item["metadata"] |= {
        "deletionTimestamp": deleted_at.strftime("%Y-%m-%dT%H:%M:%SZ"), "deletionGracePeriodSeconds": grace
    }  # fmt: skip


def _mark_graceless(item: Object) -> None:
    item["metadata"]["deletionGracePeriodSeconds"] = 0
