"""Manifest of the Pod of a sandbox: one pure function. The Pod satisfies the level "restricted" of Pod security.

Every user who may list Pods reads them, and each command inherits the environment: neither has a secret. The
token of the agent is in a Secret of the Pod's name."""

import json
from collections.abc import Mapping
from typing import Any

from sandboxes.providers import base
from sandboxes.providers.base import (
    DATA,
    EGRESS_ENVIRONMENT,
    SOCKETS_DIRECTORY,
    WORKSPACE,
    GatewayAccess,
    SandboxSpec,
    build_processor_counts,
)
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration

OWNER_LABEL, NAME_LABEL, ROLE_LABEL = "leasehold.dev/owner", "leasehold.dev/name", "leasehold.dev/role"
MANAGED_LABELS = {"app.kubernetes.io/managed-by": "leasehold"}
SANDBOX_ROLE = "sandbox"
ANY_OWNER = ",".join([*(f"{key}={value}" for key, value in MANAGED_LABELS.items()), OWNER_LABEL])  # selector
# Node autoscalers do not remove a node for its low use while a sandbox is on it.
AUTOSCALER_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
CONTAINER = "sandbox"
AGENT_UID = 10001  # as in image/Dockerfile
GATEWAY_FILE = "gateway.json"
AGENT_COMMAND = (
    "python3",
    "-I",
    "-S",
    "/opt/leasehold/agent.pyc",
    f"{SOCKETS_DIRECTORY}/{GATEWAY_FILE}",
    "/opt/leasehold/shim",
    base.EGRESS_LOOPBACK_ADDRESS.rpartition(":")[2],
    "gateway",
)
CPU_REQUEST_SHARE = 1 / 4  # of the limit: sandboxes are idle most of the time
TMP_MEMORY_SHARES = {"/tmp": 1 / 4, "/var/tmp": 1 / 16}  # noqa: S108 - of the memory limit, to which their content counts
NO_NAME_SERVER = "127.0.0.1"


def build_pod(spec: SandboxSpec, configuration: KubernetesConfiguration, *, gateway: tuple[str, str]) -> dict[str, Any]:
    """Build the Pod of a sandbox. `gateway`: host name and IP address; an empty name needs no entry in the hosts file."""
    labels = {**MANAGED_LABELS, OWNER_LABEL: spec.owner, NAME_LABEL: spec.name, ROLE_LABEL: SANDBOX_ROLE}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": spec.name,
            "namespace": configuration.namespace,
            "labels": labels,
            "annotations": {**AUTOSCALER_ANNOTATIONS, **_build_annotations(spec.labels)},
        },
        "spec": build_pod_spec(spec, configuration, gateway=gateway),
    }


def build_pod_spec(spec: SandboxSpec, configuration: KubernetesConfiguration, *, gateway: tuple[str, str]) -> dict[str, Any]:
    """Build the `spec` of the Pod, which other objects may wrap."""
    memory, host, address = spec.memory_mib << 20, *gateway
    runtime_class = spec.runtime or configuration.find_runtime_class(spec.pool)
    optional: dict[str, Any] = {
        "runtimeClassName": runtime_class,
        "priorityClassName": configuration.priority_class,
        "hostAliases": [{"ip": address, "hostnames": [host]}] if host else [],
        "imagePullSecrets": [{"name": configuration.pull_secret}] if configuration.pull_secret else [],
    }
    return {
        "restartPolicy": "Never",  # a restarted container would have lost its processes and its session
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # addresses of Services stay out of the environment
        "serviceAccountName": configuration.service_account,
        "hostname": "sandbox",
        "terminationGracePeriodSeconds": int(configuration.grace.total_seconds()),
        "activeDeadlineSeconds": int(configuration.lifetime.total_seconds()),
        "dnsPolicy": "None",  # queries to a name server would carry data out of the Pod
        "dnsConfig": {"nameservers": [NO_NAME_SERVER]},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": AGENT_UID,
            "runAsGroup": AGENT_UID,
            "fsGroup": AGENT_UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {OWNER_LABEL: spec.owner}},
            }
        ],
        "containers": [_build_container(spec, configuration)],
        "volumes": _build_volumes(spec, memory),
        **{key: value for key, value in optional.items() if value},
        **({"hostUsers": False} if configuration.user_namespaces else {}),
    }


def _build_container(spec: SandboxSpec, configuration: KubernetesConfiguration) -> dict[str, Any]:
    fixed = {"memory": str(spec.memory_mib << 20), "ephemeral-storage": f"{spec.disk_mib or configuration.disk_mib}Mi"}
    variables = EGRESS_ENVIRONMENT | build_processor_counts(spec.millicpus)
    mounts = [{"name": "workspace", "mountPath": WORKSPACE}, {"name": "data", "mountPath": DATA}]
    mounts += [{"name": _name_volume(path), "mountPath": path} for path in TMP_MEMORY_SHARES]
    return {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*AGENT_COMMAND],
        "workingDir": WORKSPACE,
        "env": [{"name": name, "value": value} for name, value in variables.items() if name != "RELAY_URL"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": not spec.writable_root,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {
            "requests": {"cpu": f"{max(int(spec.millicpus * CPU_REQUEST_SHARE), 10)}m", **fixed},
            "limits": {"cpu": f"{spec.millicpus}m", **fixed},
        },
        "volumeMounts": [*mounts, {"name": "session", "mountPath": SOCKETS_DIRECTORY, "readOnly": True}],
    }


def _build_volumes(spec: SandboxSpec, memory: int) -> list[dict[str, Any]]:
    sizes = {_name_volume(path): str(int(memory * share)) for path, share in TMP_MEMORY_SHARES.items()}
    return [
        {"name": "workspace", "emptyDir": {}},  # bounded by the container's ephemeral storage: one limit, one message
        {"name": "data", "emptyDir": {}},
        *({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}} for name, size in sizes.items()),
        {"name": "session", "projected": {"defaultMode": 0o440, "sources": [{"secret": {"name": spec.name}}]}},
    ]


def _name_volume(path: str) -> str:
    return path.strip("/").replace("/", "-")


def _build_annotations(labels: Mapping[str, str]) -> dict[str, str]:
    """Return informational labels of the spec as annotations: their values have colons, which labels must not have."""
    return {f"leasehold.dev/{key}": value for key, value in base.truncate_labels(labels.items()).items() if value}


def build_secret(
    spec: SandboxSpec, access: GatewayAccess, configuration: KubernetesConfiguration, *, uid: str
) -> dict[str, Any]:
    """Build the Secret with which the agent of a sandbox joins the gateway. It has the name of the Pod, and `uid` is the Pod's.

    The cluster deletes an object whose owner is gone."""
    content = {"url": access.url, "token": access.token, "ca": access.certificate_authority}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": spec.name,
            "namespace": configuration.namespace,
            "labels": {**MANAGED_LABELS, OWNER_LABEL: spec.owner},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": spec.name, "uid": uid}],
        },
        "type": "Opaque",
        "stringData": {GATEWAY_FILE: json.dumps(content)},
    }
