"""Admission of new objects: defaults, references to other objects, Pod security, and quotas."""

import base64
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.emulators.kubernetes.api import pod_security, quotas
from tests.emulators.kubernetes.api.resources import (
    NAMESPACES,
    PODS,
    PRIORITY_CLASSES,
    QUOTAS,
    RUNTIME_CLASSES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
)
from tests.emulators.kubernetes.api.status import already_exists, forbidden
from tests.emulators.kubernetes.api.store import Object, Store, key_of

SERVICE_NETWORK = "10.96"
SYSTEM_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


# How long a Pod stays on a node that is lost, unless it says so itself.
NODE_TOLERATION = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}


class Admission:
    """Admission of the objects of a store. `register_token` makes a token known as the one of a user."""

    def __init__(self, store: Store, register_token: Callable[[str, str], None]) -> None:
        self.store, self.register_token = store, register_token
        self._services = 100  # number of the last address of a Service

    def admit(self, resource: Resource, item: Object) -> None:
        """Complete an object, or raise ApiError."""
        namespace, name = key_of(item)
        if existing := self.store.find(resource, namespace, name):  # a real API server may name another reason first
            raise already_exists(resource, name, is_dying="deletionTimestamp" in existing["metadata"])
        if resource == NAMESPACES:
            item.setdefault("metadata", {}).setdefault("labels", {})["kubernetes.io/metadata.name"] = name
            item["status"] = {"phase": "Active"}
            item.setdefault("spec", {})["finalizers"] = ["kubernetes"]
        elif resource == PODS:
            self._admit_pod(item)
        elif resource == SECRETS:
            _encode_strings(item)
        elif resource == SERVICES:
            self._services += 1
            spec = item.setdefault("spec", {})
            address = f"{SERVICE_NETWORK}.{self._services >> 8}.{self._services & 255}"
            spec.setdefault("type", "ClusterIP")
            spec["clusterIPs"] = [spec.setdefault("clusterIP", address)]
            for port in spec.get("ports") or ():
                port.setdefault("protocol", "TCP")
                port.setdefault("targetPort", port["port"])
        elif resource == QUOTAS:
            item["status"] = {"hard": (item.get("spec") or {}).get("hard", {}), "used": {}}
        quotas.require(self.store, resource, item)

    def update_quotas(self, namespace: str) -> None:
        """Recompute the usage in the status of the quotas of a namespace."""
        for quota in self.store.list(QUOTAS, namespace) if namespace else ():
            hard = (quota.get("spec") or {}).get("hard") or {}
            status = {"hard": hard, "used": quotas.measure(self.store, namespace, hard)}
            self.store.edit(
                QUOTAS, namespace, quota["metadata"]["name"], lambda found, status=status: found.update(status=status)
            )

    def issue_token(self, namespace: str, name: str) -> Object:
        """Return a TokenRequest with a token of a service account."""
        self.store.get(SERVICE_ACCOUNTS, namespace, name)
        token = f"sa-{secrets.token_urlsafe(32)}"
        self.register_token(token, f"system:serviceaccount:{namespace}:{name}")
        expires_at = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {"token": token, "expirationTimestamp": expires_at}
        return {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "metadata": {"name": name}, "status": status}

    def _admit_pod(self, pod: Object) -> None:
        namespace, name = key_of(pod)
        spec = pod["spec"]
        self._set_defaults(spec)
        account = spec["serviceAccountName"]
        if account != "default" and not self.store.find(SERVICE_ACCOUNTS, namespace, account):
            raise forbidden(
                PODS, name, f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            )
        if priority := spec.get("priorityClassName"):
            found = self.store.find(PRIORITY_CLASSES, "", priority)
            if not found and priority not in SYSTEM_PRIORITIES:
                raise forbidden(PODS, name, f"no PriorityClass with name {priority} was found")
            spec["priority"] = found["value"] if found else SYSTEM_PRIORITIES[priority]
        if runtime := spec.get("runtimeClassName"):
            found = self.store.find(RUNTIME_CLASSES, "", runtime)
            if not found:
                raise forbidden(PODS, name, f'pod rejected: RuntimeClass "{runtime}" not found')
            if overhead := found.get("overhead"):
                spec["overhead"] = overhead["podFixed"]
        labels = self.store.get(NAMESPACES, "", namespace)["metadata"].get("labels") or {}
        pod_security.require(labels.get("pod-security.kubernetes.io/enforce", "privileged"), pod)
        pod["status"] = {"phase": "Pending", "qosClass": _find_service_class(spec)}

    def _set_defaults(self, spec: Object) -> None:
        account = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
        defaults: dict[str, Any] = {
            "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "terminationGracePeriodSeconds": 30,
            "enableServiceLinks": True,
            "schedulerName": "default-scheduler", "priority": 0, "preemptionPolicy": "PreemptLowerPriority",
        }  # fmt: skip
        spec |= {key: spec.get(key, value) for key, value in defaults.items()} | {
            "serviceAccountName": account,
            "serviceAccount": account,
        }
        spec.setdefault("securityContext", {})
        for condition in ("not-ready", "unreachable"):
            key = f"node.kubernetes.io/{condition}"
            if not any(one.get("key") == key for one in spec.setdefault("tolerations", [])):
                spec["tolerations"].append({"key": key, **NODE_TOLERATION})
        for container in spec["containers"]:
            is_tagged = "@" in container["image"] or ":" in container["image"].rpartition("/")[2]
            always = not is_tagged or container["image"].endswith(":latest")
            container.setdefault("imagePullPolicy", "Always" if always else "IfNotPresent")
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            container.setdefault("terminationMessagePolicy", "File")
            resources = container.setdefault("resources", {})
            if limits := resources.get("limits"):
                resources["requests"] = {**limits, **(resources.get("requests") or {})}


def _encode_strings(secret: Object) -> None:
    """Move the plain values of a Secret to its encoded ones."""
    for key, value in (secret.pop("stringData", None) or {}).items():
        secret.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
    secret.setdefault("type", "Opaque")


def _find_service_class(spec: Object) -> str:
    resources = [container.get("resources") or {} for container in spec["containers"]]
    if not any(one.get("requests") or one.get("limits") for one in resources):
        return "BestEffort"
    guaranteed = all(
        {"cpu", "memory"} <= set(one.get("limits") or {})
        and all(one["requests"][key] == one["limits"][key] for key in ("cpu", "memory"))
        for one in resources
    )
    return "Guaranteed" if guaranteed else "Burstable"
