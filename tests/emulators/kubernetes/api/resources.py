"""Resources of the emulated API and their discovery documents."""

from dataclasses import dataclass
from typing import Any

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Resource:
    """One resource type."""

    group: str
    version: str
    plural: str
    kind: str
    short_names: tuple[str, ...] = ()
    is_namespaced: bool = True
    verbs: tuple[str, ...] = VERBS
    subresources: tuple[tuple[str, str, tuple[str, ...]], ...] = ()  # (name, kind, verbs)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


_STATUS_VERBS = ("get", "patch", "update")
_POD_SUBRESOURCES = (
    ("exec", "PodExecOptions", ("create", "get")),
    ("log", "Pod", ("get",)),
    ("status", "Pod", _STATUS_VERBS),
    ("eviction", "Eviction", ("create",)),
)
RBAC = "rbac.authorization.k8s.io"

NAMESPACES = Resource(
    "", "v1", "namespaces", "Namespace", ("ns",), is_namespaced=False, subresources=(("status", "Namespace", _STATUS_VERBS),)
)
PODS = Resource("", "v1", "pods", "Pod", ("po",), subresources=_POD_SUBRESOURCES)
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", ("cm",))
SERVICE_ACCOUNTS = Resource(
    "", "v1", "serviceaccounts", "ServiceAccount", ("sa",), subresources=(("token", "TokenRequest", ("create",)),)
)
SERVICES = Resource("", "v1", "services", "Service", ("svc",))
ENDPOINTS = Resource("", "v1", "endpoints", "Endpoints", ("ep",))
EVENTS = Resource("", "v1", "events", "Event", ("ev",))
QUOTAS = Resource(
    "", "v1", "resourcequotas", "ResourceQuota", ("quota",), subresources=(("status", "ResourceQuota", _STATUS_VERBS),)
)
NODES = Resource("", "v1", "nodes", "Node", ("no",), is_namespaced=False, subresources=(("status", "Node", _STATUS_VERBS),))
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", ("netpol",))
ROLES = Resource(RBAC, "v1", "roles", "Role")
ROLE_BINDINGS = Resource(RBAC, "v1", "rolebindings", "RoleBinding")
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", ("pc",), is_namespaced=False)
RUNTIME_CLASSES = Resource("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", is_namespaced=False)
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", ("pdb",))
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", is_namespaced=False, verbs=("create",)
)
SANDBOXES = Resource(
    "agents.x-k8s.io", "v1beta1", "sandboxes", "Sandbox", ("sandbox",), subresources=(("status", "Sandbox", _STATUS_VERBS),)
)
BUILT_IN = (
    NAMESPACES, PODS, SECRETS, CONFIG_MAPS, SERVICE_ACCOUNTS, SERVICES, ENDPOINTS, EVENTS, QUOTAS, NODES, NETWORK_POLICIES,
    ROLES, ROLE_BINDINGS, PRIORITY_CLASSES, RUNTIME_CLASSES, DISRUPTION_BUDGETS, ACCESS_REVIEWS,
)  # fmt: skip


def build_group_list(resources: tuple[Resource, ...]) -> dict[str, Any]:
    """Return the APIGroupList of /apis."""
    groups = []
    for group in sorted({resource.group for resource in resources if resource.group}):
        version = next(resource.version for resource in resources if resource.group == group)
        entry = {"groupVersion": f"{group}/{version}", "version": version}
        groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def build_resource_list(resources: tuple[Resource, ...], group: str, version: str) -> dict[str, Any] | None:
    """Return the APIResourceList of one group and version. None: it is not served."""
    found: list[dict[str, Any]] = []
    for resource in resources:
        if (resource.group, resource.version) != (group, version):
            continue
        found.append(
            {
                "name": resource.plural, "singularName": resource.kind.lower(), "namespaced": resource.is_namespaced,
                "kind": resource.kind, "verbs": list(resource.verbs), "shortNames": list(resource.short_names),
            }
        )  # fmt: skip
        for name, kind, verbs in resource.subresources:
            found.append(
                {
                    "name": f"{resource.plural}/{name}", "singularName": "", "namespaced": resource.is_namespaced, "kind": kind,
                    "verbs": list(verbs), **({"group": "policy", "version": "v1"} if kind == "Eviction" else {}),
                }
            )  # fmt: skip
    if not found:
        return None
    group_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": found}


def build_openapi_index(resources: tuple[Resource, ...]) -> dict[str, Any]:
    """Return the index of /openapi/v3, which kubectl reads before it creates objects."""
    versions = sorted({("apis/" if one.group else "api/") + one.api_version for one in resources})
    return {"paths": {version: {"serverRelativeURL": f"/openapi/v3/{version}"} for version in versions}}


def build_openapi(resources: tuple[Resource, ...], group: str, version: str) -> dict[str, Any]:
    """Return a document that only declares server-side field validation, the part that kubectl reads."""
    paths = {}
    for resource in resources:
        if (resource.group, resource.version) != (group, version):
            continue
        prefix = f"/apis/{group}/{version}" if group else f"/api/{version}"
        scope = "/namespaces/{namespace}" if resource.is_namespaced else ""
        kind = {"group": group, "version": version, "kind": resource.kind}
        parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        responses = {"200": {"description": "OK"}}
        patch = {"x-kubernetes-group-version-kind": kind, "parameters": [parameter], "responses": responses}
        paths[f"{prefix}{scope}/{resource.plural}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": paths}
