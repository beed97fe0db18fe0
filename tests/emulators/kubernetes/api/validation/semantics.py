"""Semantic checks of objects: all resources but Pods."""

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.emulators.kubernetes.api.resources import SANDBOXES, Resource
from tests.emulators.kubernetes.api.status import cause
from tests.emulators.kubernetes.api.validation import names
from tests.emulators.kubernetes.api.validation.names import Causes
from tests.emulators.kubernetes.api.validation.pods import check_pod_spec, check_pod_update

MAX_SECRET_BYTES = 1 << 20
MAX_USER_PRIORITY = 10**9
DATA_KEY = re.compile(r"[-._a-zA-Z0-9]+")
LABEL_NAMED = {"namespaces"}  # names of the other resources are DNS subdomains


def find_semantic_errors(resource: Resource, item: Mapping[str, Any]) -> Causes:
    """Return the causes for fields that the API server refuses although they match their schema."""
    found = _check_metadata(resource, item.get("metadata") or {})
    check = _CHECKS.get(resource.plural)
    return [*found, *(check(item) if check else ())]


def find_update_errors(resource: Resource, previous: Mapping[str, Any], item: Mapping[str, Any]) -> Causes:
    """Return the causes for changes of immutable fields."""
    if resource.plural == "pods":
        return check_pod_update(previous, item)
    fields = {
        "secrets": ("type", *(("data", "immutable") if previous.get("immutable") else ())), "rolebindings": ("roleRef",),
        "priorityclasses": ("value", "preemptionPolicy"), "runtimeclasses": ("handler",),
    }.get(resource.plural, ())  # fmt: skip
    return [cause(field, "Invalid value: field is immutable") for field in fields if previous.get(field) != item.get(field)]


def _check_metadata(resource: Resource, metadata: Mapping[str, Any]) -> Causes:
    name = metadata.get("name", "")
    if not name:
        return [cause("metadata.name", "Required value: name or generateName is required", "FieldValueRequired")]
    if resource.plural in LABEL_NAMED:
        found = names.check_label(name, "metadata.name")
    elif resource.plural == "services":
        found = names.check_name(names.SERVICE_NAME, 63, name, "metadata.name")
    elif resource.group == "rbac.authorization.k8s.io":
        found = [cause("metadata.name", "Invalid value: may not contain '/' or '%'")] if re.search("[/%]", name) else []
    else:
        found = names.check_subdomain(name, "metadata.name")
    found = found + names.check_labels(metadata.get("labels"), "metadata.labels")
    found += names.check_annotations(metadata.get("annotations"), "metadata.annotations")
    for finalizer in metadata.get("finalizers") or ():
        if not names.FINALIZER_LIKE.fullmatch(finalizer):
            found.append(cause("metadata.finalizers", f'Invalid value: "{finalizer}": name is neither a standard finalizer '
                               "name nor is it fully qualified"))  # fmt: skip
    return found


def _check_pod(pod: Mapping[str, Any]) -> Causes:
    return check_pod_spec(pod["spec"], "spec")


def _check_sandbox(sandbox: Mapping[str, Any]) -> Causes:
    template = sandbox["spec"]["podTemplate"]
    labels = (template.get("metadata") or {}).get("labels")
    return [
        *names.check_labels(labels, "spec.podTemplate.metadata.labels"),
        *check_pod_spec(template["spec"], "spec.podTemplate.spec"),
    ]


def _check_secret(secret: Mapping[str, Any]) -> Causes:
    found, size = [], 0
    for key, value in (secret.get("data") or {}).items():
        try:
            size += len(base64.b64decode(value or "", validate=True))
        except binascii.Error:
            found.append(cause(f"data[{key}]", "Invalid value: illegal base64 data"))
    for key in [*(secret.get("data") or {}), *(secret.get("stringData") or {})]:
        found += names.check_name(DATA_KEY, 253, key, f"data[{key}]")
    if size > MAX_SECRET_BYTES:
        found.append(cause("data", f"Too long: may not be more than {MAX_SECRET_BYTES} bytes", "FieldValueTooLong"))
    return found


def _check_quota(quota: Mapping[str, Any]) -> Causes:
    hard = (quota.get("spec") or {}).get("hard") or {}
    return [one for key, value in hard.items() for one in names.check_quantity(value, f"spec.hard[{key}]")]


def _check_network_policy(policy: Mapping[str, Any]) -> Causes:
    spec, found = policy.get("spec") or {}, []
    for index, kind in enumerate(spec.get("policyTypes") or ()):
        found += names.check_enum(kind, ("Ingress", "Egress"), f"spec.policyTypes[{index}]")
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for number, rule in enumerate(spec.get(direction) or ()):
            field = f"spec.{direction}[{number}]"
            for index, peer in enumerate(rule.get(side) or ()):
                found += _check_peer(peer, f"{field}.{side}[{index}]")
            for index, port in enumerate(rule.get("ports") or ()):
                found += names.check_enum(port.get("protocol"), ("TCP", "UDP", "SCTP"), f"{field}.ports[{index}].protocol")
    return found


def _check_peer(peer: Mapping[str, Any], field: str) -> Causes:
    if not peer:
        return [cause(field, "Required value: must specify a peer", "FieldValueRequired")]
    block = peer.get("ipBlock")
    if block is None:
        return []
    if len(peer) > 1:
        return [cause(field, "Forbidden: may not specify both ipBlock and another peer", "FieldValueForbidden")]
    found: Causes = []
    for value in [block.get("cidr"), *(block.get("except") or ())]:
        try:
            ipaddress.ip_network(value)
        except ValueError:
            found.append(cause(f"{field}.ipBlock.cidr", f'Invalid value: "{value}": must be a valid CIDR value'))
    return found


def _check_role(role: Mapping[str, Any]) -> Causes:
    found = []
    for index, rule in enumerate(role.get("rules") or ()):
        for key in ("verbs", "apiGroups", "resources"):
            if not rule.get(key):
                found.append(cause(f"rules[{index}].{key}", "Required value", "FieldValueRequired"))
    return found


def _check_role_binding(binding: Mapping[str, Any]) -> Causes:
    reference = binding.get("roleRef") or {}
    found = names.check_enum(reference.get("kind"), ("Role", "ClusterRole"), "roleRef.kind")
    for index, subject in enumerate(binding.get("subjects") or ()):
        field = f"subjects[{index}]"
        found = found + names.check_enum(subject.get("kind"), ("User", "Group", "ServiceAccount"), f"{field}.kind")
        if subject.get("kind") == "ServiceAccount" and not subject.get("namespace"):
            found.append(cause(f"{field}.namespace", "Required value", "FieldValueRequired"))
    return found


def _check_priority_class(item: Mapping[str, Any]) -> Causes:
    found = names.check_enum(item.get("preemptionPolicy"), ("PreemptLowerPriority", "Never"), "preemptionPolicy")
    if item["value"] > MAX_USER_PRIORITY:
        found = [*found, cause("value", f"Forbidden: maximum allowed value of a user defined priority is {MAX_USER_PRIORITY}",
                               "FieldValueForbidden")]  # fmt: skip
    return found


def _check_service(service: Mapping[str, Any]) -> Causes:
    ports = (service.get("spec") or {}).get("ports") or []
    found = [
        one
        for index, port in enumerate(ports)
        for one in names.check_integer(port.get("port"), 1, 65535, f"spec.ports[{index}].port")
    ]
    if len(ports) > 1:
        found += names.check_duplicates([port.get("name", "") for port in ports], "spec.ports[{}].name")
    return found


_CHECKS: dict[str, Callable[[Mapping[str, Any]], Causes]] = {
    "networkpolicies": _check_network_policy, "pods": _check_pod, "priorityclasses": _check_priority_class,
    "resourcequotas": _check_quota, "rolebindings": _check_role_binding, "roles": _check_role, "secrets": _check_secret,
    "services": _check_service, SANDBOXES.plural: _check_sandbox,
}  # fmt: skip
