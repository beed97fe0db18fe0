"""Sandboxes as objects of the project agent-sandbox (agents.x-k8s.io), whose controller makes the Pods.

The Pod has the specification of a plain one. The controller replaces a Pod that is gone by an empty one of the same name. Such
a Pod has another uid than the one that is stored, so the sandbox counts as lost."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sandboxes.providers.answer_guard import guard_methods
from sandboxes.providers.base import ProviderSandbox, SandboxSpec
from sandboxes.providers.errors import FailureCause, Missing, Rejected, Unavailable
from sandboxes.providers.kubernetes.api_client import build_path
from sandboxes.providers.kubernetes.errors import Conflict
from sandboxes.providers.kubernetes.pod_spec import OWNER_LABEL, build_pod
from sandboxes.providers.kubernetes.pods import (
    POLL_SECONDS,
    PodClient,
    build_deletion,
    get_name,
    is_being_destroyed,
    parse_time,
    require_owner,
)

GROUP, KIND, PLURAL = "agents.x-k8s.io", "Sandbox", "sandboxes"
SUPPORTED_VERSIONS = ("v1beta1",)  # of the group; the newest first
POD_TIMEOUT_SECONDS = 20.0  # for the controller to make the Pod


@guard_methods("list_sandboxes", "object_path")
class SandboxObjectClient(PodClient):
    """Pods that belong to Sandbox objects of the same name."""

    _version = ""

    def object_path(self, name: str = "") -> str:
        self._version = self._version or self._discover()
        return build_path(self.configuration.namespace, PLURAL, name, group=f"apis/{GROUP}/{self._version}")

    def _discover(self) -> str:
        """Return the version of the group that the cluster serves. Raise Rejected without a supported one."""
        groups = self.api.call("GET", "/apis").get("groups")
        if not isinstance(groups, list):
            raise Unavailable("/apis: the answer is not a list of groups.", cause=FailureCause.ENGINE_ERROR)
        versions = {each["version"] for group in groups if group["name"] == GROUP for each in group["versions"]}
        for version in SUPPORTED_VERSIONS:
            served = self.api.call("GET", f"/apis/{GROUP}/{version}").get("resources") or [] if version in versions else []
            if any(resource.get("name") == PLURAL for resource in served):
                return version
        message = f"The cluster serves no supported version of {GROUP} ({', '.join(SUPPORTED_VERSIONS)})."
        advice = "Install agent-sandbox, or unset LEASEHOLD_KUBERNETES_OBJECT."
        raise Rejected(f"{message} {advice}", cause=FailureCause.NOT_SUPPORTED)

    def _post(self, spec: SandboxSpec, gateway: tuple[str, str]) -> str:
        pod = build_pod(spec, self.configuration, gateway=gateway)
        path = self.object_path()
        self.api.call("POST", path, build_sandbox_object(pod, f"{GROUP}/{self._version}"))
        return self._await_pod(spec)

    def _await_pod(self, spec: SandboxSpec) -> str:
        """Return the uid of the Pod that the controller has made."""
        deadline, attempt = time.monotonic() + POD_TIMEOUT_SECONDS, 0
        while True:
            try:
                pod = self.read(spec.name)
                require_owner(pod, spec)
                return str(pod["metadata"]["uid"])
            except Missing:
                if time.monotonic() > deadline:
                    message = f"The controller of agent-sandbox has made no Pod for {spec.name}."
                    raise Unavailable(message, cause=FailureCause.TIMEOUT) from None
            time.sleep(POLL_SECONDS[min(attempt, len(POLL_SECONDS) - 1)])
            attempt += 1

    def _find_created(self, spec: SandboxSpec, error: Unavailable) -> str:
        try:
            found = self._read_object(spec.name)
        except Missing:
            raise error from None
        require_owner(found, spec)
        if found["metadata"].get("deletionTimestamp"):
            raise Unavailable(
                f"An earlier Sandbox {spec.name} is still being deleted.", cause=FailureCause.ENGINE_ERROR
            ) from error
        if uid := self.records.find_uid(spec.name):
            return uid  # stays, so that a Pod that was replaced since is not taken for the first one
        return self._await_pod(spec)

    def _read_object(self, name: str) -> dict[str, Any]:
        return self.api.read(self.object_path(name), KIND)

    def list_sandboxes(self, selector: str) -> list[ProviderSandbox]:
        """List the sandboxes: those with a Pod, and objects whose Pod is gone or not made yet as remnants."""
        objects = self.api.list_items(self.object_path(), selector=selector)  # before the Pods: those of new objects are listed
        with_pods = super().list_sandboxes(selector)
        names = {found.name for found in with_pods}
        return with_pods + [_to_remnant(each) for each in objects if get_name(each) not in names]

    def _delete_once(self, name: str) -> dict[str, Any] | None:
        """Request the deletion of the object, with the uid that it has now, and of its Pod. Return the one that is left."""
        try:
            found = self._read_object(name)
        except Missing:
            return self._delete_leftover(name)
        if OWNER_LABEL not in (found["metadata"].get("labels") or {}):
            return None
        if not found["metadata"].get("deletionTimestamp"):
            with suppress(Missing, Conflict):  # gone, or replaced
                self.api.call("DELETE", self.object_path(name), build_deletion(str(found["metadata"]["uid"])))
        return found

    def _delete_leftover(self, name: str) -> dict[str, Any] | None:
        """Delete the Pod of an object that is gone: the garbage collection of the cluster may be late. Return it until then."""
        try:
            pod = self.read(name)
        except Missing:
            return None
        owners = pod["metadata"].get("ownerReferences") or []
        if not any((owner.get("kind"), owner.get("name")) == (KIND, name) for owner in owners):
            return None
        if not is_being_destroyed(pod):
            with suppress(Missing, Conflict):
                self._delete(name, pod)
        return pod


def build_sandbox_object(pod: Mapping[str, Any], api_version: str) -> dict[str, Any]:
    """Wrap a Pod. The controller deletes the Pod with the object, and makes no new one after its end."""
    metadata = pod["metadata"]
    return {
        "apiVersion": api_version,
        "kind": KIND,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "labels": metadata["labels"]},
        "spec": {
            "podTemplate": {
                "metadata": {"labels": metadata["labels"], "annotations": metadata["annotations"]},
                "spec": pod["spec"],
            },
            "shutdownPolicy": "Delete",
        },
    }


def _to_remnant(found: Mapping[str, Any]) -> ProviderSandbox:
    metadata = found["metadata"]
    owner = (metadata.get("labels") or {}).get(OWNER_LABEL, "")
    name, created_at = get_name(found), parse_time(metadata["creationTimestamp"])
    return ProviderSandbox(ref=name, name=name, running=False, created_at=created_at, is_remnant=True, owner=owner)
