"""Pods of sandboxes at the API server: creation, look-up, listing and confirmed deletion.

A Pod belongs to a sandbox if its name, its owner label and its uid do. A deletion names the uid, so that it never removes
another Pod of the same name. A Pod is gone when its name is free or has another uid; it is never removed by force, because its
containers could still run then."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from sandboxes.providers.answer_guard import guard_methods
from sandboxes.providers.base import ProviderSandbox, SandboxSpec
from sandboxes.providers.errors import FailureCause, Missing, ProviderError, Rejected, Unavailable
from sandboxes.providers.kubernetes import endings
from sandboxes.providers.kubernetes.api_client import ApiClient, build_path
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration, resolve_gateway
from sandboxes.providers.kubernetes.errors import Conflict, NotFound
from sandboxes.providers.kubernetes.pod_spec import (
    CONTAINER,
    NAME_LABEL,
    OWNER_LABEL,
    ROLE_LABEL,
    SANDBOX_ROLE,
    build_pod,
    build_secret,
)
from sandboxes.providers.kubernetes.quantities import MEBI, MILLI, parse_quantity
from sandboxes.providers.kubernetes.records import PodRecords

REMOVAL_TIMEOUT_SECONDS = 45.0  # of one try; a Pod whose node does not respond stays until an operator acts
REMOVAL_GRACE_SECONDS = 2  # between the end of process 1's work and its kill, of a sandbox that is destroyed
MAX_REMEMBERED = 4096
MAX_SECRET_ATTEMPTS = 8
NO_REASON_LEFT = endings.Ending(FailureCause.REMOVED, "its Pod is gone, and no reason is left")
POLL_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


@guard_methods("create", "destroy", "list_events", "list_sandboxes", "read", "read_live", "read_own")
class PodClient:
    """Pods and Secrets of sandboxes in the namespace of the configuration."""

    kind = "pods"

    def __init__(self, configuration: KubernetesConfiguration, records: PodRecords) -> None:
        self.configuration, self.records = configuration, records
        self._apis: dict[int, ApiClient] = {}
        self._departures: dict[str, endings.Ending] = {}  # name -> reason for which its Pod was being deleted when last seen

    @property
    def api(self) -> ApiClient:
        pid = os.getpid()  # a forked worker must not share its parent's connections
        if pid not in self._apis:
            self._apis = {pid: ApiClient(context=self.configuration.context)}
        return self._apis[pid]

    def path(self, kind: str, name: str = "") -> str:
        return build_path(self.configuration.namespace, kind, name)

    # Creation

    def create(self, spec: SandboxSpec) -> None:
        """Create Pod and Secret. An existing Pod of the same owner that is not being deleted is success.

        The Secret belongs to the Pod, so that the cluster deletes both together, also if someone else deletes the Pod. The node
        waits for the Secret. Raise Rejected if the name belongs to another owner, Unavailable while an earlier Pod of this name
        is being deleted."""
        gateway = resolve_gateway(self.configuration, spec.gateway.url) if spec.gateway else ("", "")
        self.api.creates.take()
        try:
            uid = self._post(spec, gateway)
        except NotFound as error:
            raise Rejected(f"The namespace {self.configuration.namespace} does not exist: {error}") from error
        except Unavailable as error:
            uid = self._find_created(spec, error)
        self.records.store_uid(spec.name, uid)
        if spec.gateway:
            self._create_secret(spec, uid)

    def _post(self, spec: SandboxSpec, gateway: tuple[str, str]) -> str:
        """Create the object of the sandbox. Return the uid of its Pod."""
        created = self.api.call("POST", self.path("pods"), build_pod(spec, self.configuration, gateway=gateway))
        return str(created["metadata"]["uid"])

    def _find_created(self, spec: SandboxSpec, error: Unavailable) -> str:
        """Return the uid of the Pod after a conflict, or a creation whose outcome is not known. Raise `error` without one."""
        try:
            pod = self.read(spec.name)
        except Missing:
            raise error from None
        require_owner(pod, spec)
        if pod["metadata"].get("deletionTimestamp"):
            raise Unavailable(f"An earlier Pod {spec.name} is still being deleted.", cause=FailureCause.ENGINE_ERROR) from error
        return str(pod["metadata"]["uid"])

    def _create_secret(self, spec: SandboxSpec, uid: str) -> None:
        """Create the Secret of a Pod, or replace that of an earlier attempt: its token is not valid any more."""
        assert spec.gateway
        body = build_secret(spec, spec.gateway, self.configuration, uid=uid)
        for _ in range(MAX_SECRET_ATTEMPTS):
            try:
                self.api.call("POST", self.path("secrets"), body)
                return
            except Conflict as conflict:
                error = conflict
            except NotFound as missing:
                raise Rejected(f"The namespace {self.configuration.namespace} does not exist: {missing}") from missing
            self._delete_secret(spec.name)
        raise error  # concurrent calls replace it all the time

    # Look-up

    def read(self, name: str) -> dict[str, Any]:
        """Return the Pod of this name, of any owner. Raise Missing."""
        return self.api.read(self.path("pods", name), "Pod")

    def read_own(self, name: str) -> dict[str, Any]:
        """Return the Pod of a sandbox, in any phase. Raise Missing, with the cause REPLACED if another one has the name."""
        pod = self.read(name)
        metadata = pod["metadata"]
        if OWNER_LABEL not in (metadata.get("labels") or {}):
            raise Missing(f"The Pod {name} belongs to no sandbox.", cause=FailureCause.REPLACED)
        pinned = self.records.find_uid(name)
        if pinned and pinned != metadata["uid"]:
            raise Missing(f"{name} was deleted, and another Pod has its name.", cause=FailureCause.REPLACED)
        return pod

    def read_live(self, name: str) -> dict[str, Any]:
        """Return the Pod of a sandbox that has not ended. Raise Missing with the reason of its end."""
        try:
            pod = self.read_own(name)
        except Missing as error:
            if error.cause:
                raise
            gone = self._departures.get(name) or self.records.find_ending(name) or NO_REASON_LEFT
            raise Missing(f"{name}: {gone.message}", cause=gone.cause) from error
        self._note_departure(name, pod)
        if ending := endings.describe_end(pod):
            raise Missing(f"{name}: {ending.message}", cause=ending.cause)
        return pod

    def list_sandboxes(self, selector: str) -> list[ProviderSandbox]:
        """List the sandboxes with a label selector. Raise Unavailable rather than return a partial list."""
        selectors = f"{selector},{ROLE_LABEL}={SANDBOX_ROLE}"
        found = self.api.list_items(self.path("pods"), selector=selectors)
        for pod in found:
            self._note_departure(get_name(pod), pod)
        return [to_sandbox(pod) for pod in found]

    def _note_departure(self, name: str, pod: Mapping[str, Any]) -> None:
        """Remember why a Pod is being deleted: once it is gone, nothing in the cluster tells."""
        if pod["metadata"].get("deletionTimestamp") or endings.find_disruption(pod):
            if len(self._departures) > MAX_REMEMBERED:
                self._departures.clear()
            self._departures[name] = endings.describe_departure(pod)

    def list_events(self, uid: str) -> list[dict[str, Any]]:
        """Return the events about a Pod, the oldest first. Empty if they cannot be read: they are an aid only."""
        try:
            events = self.api.list_items(self.path("events"), query={"fieldSelector": f"involvedObject.uid={uid}"})
        except ProviderError:
            return []
        return sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    # Deletion

    def destroy(self, name: str) -> None:
        """Delete Pod and Secret, and return once the Pod is gone. Raise Unavailable if it is not gone in time."""
        deadline, attempt = time.monotonic() + REMOVAL_TIMEOUT_SECONDS, 0
        while (pod := self._delete_once(name)) is not None:
            if time.monotonic() > deadline:
                raise Unavailable(describe_stuck(pod, now=datetime.now(UTC)), cause=FailureCause.TIMEOUT)  # noqa: TID251 - text
            time.sleep(POLL_SECONDS[min(attempt, len(POLL_SECONDS) - 1)])
            attempt += 1
        self._delete_secret(name)

    def _delete_once(self, name: str) -> dict[str, Any] | None:
        """Request the deletion of the sandbox's Pod, unless it is in progress. Return the Pod, None if it is gone."""
        try:
            pod = self.read_own(name)
        except Missing:
            return None
        if not is_being_destroyed(pod):
            with suppress(Missing, Conflict):  # gone, or replaced by a Pod with another uid
                self._delete(name, pod)
        return pod

    def _delete(self, name: str, pod: Mapping[str, Any]) -> None:
        self.api.call("DELETE", self.path("pods", name), build_deletion(str(pod["metadata"]["uid"])))

    def _delete_secret(self, name: str) -> None:
        with suppress(Missing):
            self.api.call("DELETE", self.path("secrets", name))


def build_deletion(uid: str) -> dict[str, Any]:
    """Build the options of a deletion. The grace period is never 0, which would not wait for the containers to end."""
    return {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": REMOVAL_GRACE_SECONDS,
        "preconditions": {"uid": uid},
        "propagationPolicy": "Background",
    }


def is_being_destroyed(pod: Mapping[str, Any]) -> bool:
    """Return whether the Pod is being deleted with the grace period of a destroy. A longer one, of a drain, is shortened."""
    metadata = pod["metadata"]
    return (
        bool(metadata.get("deletionTimestamp")) and (metadata.get("deletionGracePeriodSeconds") or 0) <= REMOVAL_GRACE_SECONDS
    )


def require_owner(pod: Mapping[str, Any], spec: SandboxSpec) -> None:
    """Raise Rejected if the Pod belongs to another owner than the one of the spec."""
    if (pod["metadata"].get("labels") or {}).get(OWNER_LABEL) != spec.owner:
        raise Rejected(f"The name {spec.name} is used by a Pod of another owner.")


def describe_stuck(pod: Mapping[str, Any], *, now: datetime) -> str:
    """Describe a Pod that stays although its deletion was requested, with what an operator can do."""
    metadata, node = pod["metadata"], (pod.get("spec") or {}).get("nodeName")
    parts = [f"{metadata['name']} is still being deleted"]
    if since := metadata.get("deletionTimestamp"):
        parts.append(f"its grace period ended {now - parse_time(since)} ago")
    if finalizers := metadata.get("finalizers"):
        parts.append(f"finalizers: {', '.join(finalizers)}")
    if node:
        parts.append(
            f"node: {node}. If that node is dead, delete the Node, or taint it "
            "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute; the Pod then goes"
        )
    return "; ".join(parts) + "."


def to_sandbox(pod: Mapping[str, Any]) -> ProviderSandbox:
    """Translate a Pod. One that has ended is a remnant: nothing runs in it again."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    ends_at = metadata.get("deletionTimestamp")
    limits = _find_limits(pod)
    return ProviderSandbox(
        ref=metadata["name"],
        name=metadata["name"],
        running=status.get("phase") == "Running" and not ends_at,
        created_at=parse_time(metadata["creationTimestamp"]),
        ends_at=parse_time(ends_at) if ends_at else None,
        end_reason=endings.describe_departure(pod).message if ends_at else "",
        is_remnant=status.get("phase") in endings.ENDED_PHASES,
        owner=(metadata.get("labels") or {}).get(OWNER_LABEL, ""),
        memory_mib=parse_quantity(limits.get("memory", ""), MEBI),
        millicpus=parse_quantity(limits.get("cpu", ""), MILLI),
    )


def get_name(pod: Mapping[str, Any]) -> str:
    """Return the name of the sandbox of a Pod."""
    metadata = pod["metadata"]
    return str((metadata.get("labels") or {}).get(NAME_LABEL) or metadata["name"])


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def find_age(pod: Mapping[str, Any], *, now: datetime) -> timedelta:
    return now - parse_time(pod["metadata"]["creationTimestamp"])


def _find_limits(pod: Mapping[str, Any]) -> Mapping[str, str]:
    containers = (pod.get("spec") or {}).get("containers") or []
    found: Mapping[str, Any] = next((each for each in containers if each.get("name") == CONTAINER), {})
    limits: Mapping[str, str] = (found.get("resources") or {}).get("limits") or {}
    return limits
