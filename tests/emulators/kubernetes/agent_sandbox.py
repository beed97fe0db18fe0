"""Controller of agent-sandbox for Sandbox objects (agents.x-k8s.io/v1beta1): one Pod of the same name for each.

As the original, it replaces a Pod that is gone by a new one with empty volumes, and does not replace one that has failed."""

import threading
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime

from tests.emulators.kubernetes.api.deletion import Deletion, set_condition
from tests.emulators.kubernetes.api.resources import PODS, SANDBOXES
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.api.store import Object, Store, key_of
from tests.emulators.kubernetes.api.verbs import Verbs

RESERVED_PREFIX = "agents.x-k8s.io/"  # of labels that templates may not set
RESYNC_SECONDS = 0.5
FINISHED_REASONS = {"Failed": "PodFailed", "Succeeded": "PodSucceeded"}


class SandboxController:
    """Thread that reconciles all Sandbox objects of a store until the store is closed."""

    def __init__(self, store: Store, verbs: Verbs, deletion: Deletion) -> None:
        self.store, self.verbs, self.deletion = store, verbs, deletion
        self._thread = threading.Thread(target=self._run, name="agent-sandbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        seen = 0
        while not self.store.is_closed:
            with self.store.changed:
                if len(self.store.history) == seen:
                    self.store.changed.wait(RESYNC_SECONDS)
                seen = len(self.store.history)
            for sandbox in self.store.list(SANDBOXES):
                with suppress(ApiError):  # deleted meanwhile
                    self._reconcile(sandbox)

    def _reconcile(self, sandbox: Object) -> None:
        namespace, name = key_of(sandbox)
        spec, uid = sandbox["spec"], sandbox["metadata"]["uid"]
        if sandbox["metadata"].get("deletionTimestamp"):
            return
        pod = self.store.find(PODS, namespace, name)
        is_owned = pod is not None and any(one["uid"] == uid for one in pod["metadata"].get("ownerReferences") or ())
        if pod is not None and not is_owned:
            self._report(sandbox, "False", "ReconcilerError", f"pod {name} is not controlled by this sandbox")
            return
        is_expired = "shutdownTime" in spec and datetime.fromisoformat(spec["shutdownTime"]) <= datetime.now(UTC)
        if is_expired and spec.get("shutdownPolicy") == "Delete":
            self.deletion.delete(SANDBOXES, namespace, name, {})
        elif is_expired or spec.get("operatingMode") == "Suspended":
            self._stop(sandbox, pod, "SandboxExpired" if is_expired else "SandboxSuspended")
        elif pod is None:
            self._create_pod(sandbox)
        else:
            self._copy_status(sandbox, pod)

    def _stop(self, sandbox: Object, pod: Object | None, reason: str) -> None:
        if pod and not pod["metadata"].get("deletionTimestamp"):
            self.deletion.delete(PODS, *key_of(pod), {"preconditions": {"uid": pod["metadata"]["uid"]}})
        suspended = ("Suspended", "False" if pod else "True", "PodTerminating" if pod else "PodTerminated")
        self._report(sandbox, "False", reason, "", suspended)

    def _create_pod(self, sandbox: Object) -> None:
        template = deepcopy(sandbox["spec"]["podTemplate"])
        metadata = template.get("metadata") or {}
        labels = {key: value for key, value in (metadata.get("labels") or {}).items() if not key.startswith(RESERVED_PREFIX)}
        owner = {
            "apiVersion": SANDBOXES.api_version, "kind": SANDBOXES.kind, "name": sandbox["metadata"]["name"],
            "uid": sandbox["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        namespace, name = key_of(sandbox)
        metadata = {
            "name": name,
            "labels": labels,
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner],
        }
        try:
            self.verbs.create(PODS, namespace, {"metadata": metadata, "spec": template["spec"]})
        except ApiError as failed:
            self._report(sandbox, "False", "ReconcilerError", failed.message)

    def _copy_status(self, sandbox: Object, pod: Object) -> None:
        found = {one["type"]: one for one in pod["status"].get("conditions") or ()}
        more = []
        if scheduled := found.get("PodScheduled"):
            more.append(("PodScheduled", scheduled["status"], scheduled.get("reason", "")))
        if reason := FINISHED_REASONS.get(pod["status"]["phase"]):
            more.append(("Finished", "True", reason))
            self._report(sandbox, "False", reason, "", *more)
            return
        is_ready = found.get("Ready", {}).get("status") == "True" and not pod["metadata"].get("deletionTimestamp")
        reason = "DependenciesReady" if is_ready else "DependenciesNotReady"
        self._report(sandbox, "True" if is_ready else "False", reason, "", *more)

    def _report(self, sandbox: Object, status: str, reason: str, message: str, *more: tuple[str, str, str]) -> None:
        def change(item: Object) -> None:
            set_condition(item, "Ready", status, reason, message)
            for kind, value, why in more:
                set_condition(item, kind, value, why)

        self.store.edit(SANDBOXES, *key_of(sandbox), change, uid=sandbox["metadata"]["uid"])
