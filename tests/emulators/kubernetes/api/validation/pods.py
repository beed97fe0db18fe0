"""Semantic checks of Pod specifications."""

import ipaddress
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tests.emulators.kubernetes.api.status import cause
from tests.emulators.kubernetes.api.validation.names import (
    Causes,
    check_duplicates,
    check_enum,
    check_integer,
    check_label,
    check_quantity,
    check_subdomain,
    parse_quantity,
)

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
ENVIRONMENT_NAME = re.compile(r"[ -<>-~]+")
VOLUME_SOURCES = (
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "hostPath", "image", "iscsi", "nfs", "persistentVolumeClaim",
    "projected", "secret",
)  # fmt: skip
_ENUMS = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "preemptionPolicy": ("PreemptLowerPriority", "Never"),
}  # fmt: skip


def check_pod_spec(spec: Mapping[str, Any], field: str) -> Causes:
    """Return the causes for a PodSpec. `field` is its path."""
    found: Causes = []
    for key, allowed in _ENUMS.items():
        found += check_enum(spec.get(key), allowed, f"{field}.{key}")
    found += check_integer(spec.get("activeDeadlineSeconds"), 1, MAX_INT32, f"{field}.activeDeadlineSeconds")
    found += check_integer(spec.get("terminationGracePeriodSeconds"), 0, MAX_INT64, f"{field}.terminationGracePeriodSeconds")
    for key in ("hostname", "subdomain"):
        found += check_label(spec[key], f"{field}.{key}") if spec.get(key) else []
    for key in ("serviceAccountName", "priorityClassName", "runtimeClassName", "nodeName"):
        found += check_subdomain(spec[key], f"{field}.{key}") if spec.get(key) else []
    found += _check_dns(spec, field) + _check_host_aliases(spec, field) + _check_scheduling(spec, field)
    found += _check_security(spec.get("securityContext") or {}, f"{field}.securityContext")
    volumes = spec.get("volumes") or []
    found += check_duplicates([volume["name"] for volume in volumes], field + ".volumes[{}].name")
    for index, volume in enumerate(volumes):
        found += _check_volume(volume, f"{field}.volumes[{index}]")
    containers = spec.get("containers") or []
    if not containers:
        found.append(cause(f"{field}.containers", "Required value", "FieldValueRequired"))
    all_names = [container["name"] for container in [*(spec.get("initContainers") or ()), *containers]]
    found += check_duplicates(all_names, field + ".containers[{}].name")
    for index, container in enumerate(containers):
        found += _check_container(container, {volume["name"] for volume in volumes}, f"{field}.containers[{index}]")
    return found


def check_pod_update(previous: Mapping[str, Any], item: Mapping[str, Any]) -> Causes:
    """Return the cause for a change of a Pod's specification beyond the few fields that can change."""
    before, after = deepcopy(previous["spec"]), deepcopy(item["spec"])
    for spec in (before, after):
        for key in ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"):
            spec.pop(key, None)
        for container in spec["containers"]:
            container.pop("image", None)
    if before == after:
        return []
    message = (
        "Forbidden: pod updates may not change fields other than `spec.containers[*].image`, `spec.initContainers[*].image`, "
        "`spec.activeDeadlineSeconds`, `spec.tolerations` (only additions to existing tolerations), "
        "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
    )
    return [cause("spec", message, "FieldValueForbidden")]


def _check_dns(spec: Mapping[str, Any], field: str) -> Causes:
    servers = (spec.get("dnsConfig") or {}).get("nameservers") or []
    found = [
        cause(f"{field}.dnsConfig.nameservers[{index}]", f'Invalid value: "{server}": must be a valid IP address')
        for index, server in enumerate(servers)
        if not is_address(server)
    ]
    if spec.get("dnsPolicy") == "None" and not servers:
        found.append(cause(f"{field}.dnsConfig.nameservers", "Required value: must provide at least one DNS nameserver when "
                           "`dnsPolicy` is None", "FieldValueRequired"))  # fmt: skip
    if len(servers) > 3:
        found.append(cause(f"{field}.dnsConfig.nameservers", "Invalid value: must not have more than 3 nameservers"))
    return found


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_host_aliases(spec: Mapping[str, Any], field: str) -> Causes:
    found: Causes = []
    for index, alias in enumerate(spec.get("hostAliases") or ()):
        place = f"{field}.hostAliases[{index}]"
        if not is_address(alias.get("ip", "")):
            found.append(cause(f"{place}.ip", f'Invalid value: "{alias.get("ip")}": must be a valid IP address'))
        found += [one for name in alias.get("hostnames") or () for one in check_subdomain(name, f"{place}.hostnames")]
    return found


def _check_scheduling(spec: Mapping[str, Any], field: str) -> Causes:
    found: Causes = []
    for index, toleration in enumerate(spec.get("tolerations") or ()):
        place = f"{field}.tolerations[{index}]"
        found += check_enum(toleration.get("operator"), ("Exists", "Equal"), f"{place}.operator")
        found += check_enum(toleration.get("effect"), ("NoSchedule", "PreferNoSchedule", "NoExecute"), f"{place}.effect")
    for index, spread in enumerate(spec.get("topologySpreadConstraints") or ()):
        place = f"{field}.topologySpreadConstraints[{index}]"
        found += check_enum(spread["whenUnsatisfiable"], ("DoNotSchedule", "ScheduleAnyway"), f"{place}.whenUnsatisfiable")
        found += check_integer(spread["maxSkew"], 1, MAX_INT32, f"{place}.maxSkew")
    return found


def _check_security(security: Mapping[str, Any], field: str) -> Causes:
    found: Causes = []
    for key in ("runAsUser", "runAsGroup", "fsGroup"):
        found += check_integer(security.get(key), 0, MAX_INT32, f"{field}.{key}")
    if profile := security.get("seccompProfile"):
        found += check_enum(profile.get("type"), ("Localhost", "RuntimeDefault", "Unconfined"), f"{field}.seccompProfile.type")
        if (profile.get("type") == "Localhost") != bool(profile.get("localhostProfile")):
            found.append(cause(f"{field}.seccompProfile.localhostProfile", "Required value: exactly with Localhost"))
    found += check_enum(security.get("fsGroupChangePolicy"), ("Always", "OnRootMismatch"), f"{field}.fsGroupChangePolicy")
    if security.get("allowPrivilegeEscalation") is False and security.get("privileged"):
        found.append(cause(field, "Invalid value: cannot set `allowPrivilegeEscalation` to false and `privileged` to true"))
    return found


def _check_volume(volume: Mapping[str, Any], field: str) -> Causes:
    found = check_label(volume["name"], f"{field}.name")
    sources = [source for source in VOLUME_SOURCES if source in volume]
    if len(sources) != 1:
        return [*found, cause(field, "Required value: must specify exactly one volume type", "FieldValueRequired")]
    source = volume[sources[0]] or {}
    if sources == ["emptyDir"]:
        found = found + check_enum(source.get("medium"), ("Memory", "HugePages"), f"{field}.emptyDir.medium")
        found += check_quantity(source["sizeLimit"], f"{field}.emptyDir.sizeLimit") if "sizeLimit" in source else []
    found = found + check_integer(source.get("defaultMode"), 0, 0o777, f"{field}.{sources[0]}.defaultMode")
    if sources == ["secret"] and not source.get("secretName"):
        found.append(cause(f"{field}.secret.secretName", "Required value", "FieldValueRequired"))
    for index, part in enumerate(source.get("sources") or ()) if sources == ["projected"] else ():
        if len(part) != 1:
            found.append(cause(f"{field}.projected.sources[{index}]", "Forbidden: more than 1 volume type"))
    return found


def _check_container(container: Mapping[str, Any], volumes: set[str], field: str) -> Causes:
    found = check_label(container["name"], f"{field}.name")
    if not container.get("image"):
        found.append(cause(f"{field}.image", "Required value", "FieldValueRequired"))
    found += check_enum(container.get("imagePullPolicy"), ("Always", "IfNotPresent", "Never"), f"{field}.imagePullPolicy")
    found += check_enum(
        container.get("terminationMessagePolicy"), ("File", "FallbackToLogsOnError"), f"{field}.terminationMessagePolicy"
    )
    found += _check_security(container.get("securityContext") or {}, f"{field}.securityContext")
    found += _check_resources(container.get("resources") or {}, f"{field}.resources")
    for index, port in enumerate(container.get("ports") or ()):
        found += check_integer(port["containerPort"], 1, 65535, f"{field}.ports[{index}].containerPort")
        found += check_enum(port.get("protocol"), ("TCP", "UDP", "SCTP"), f"{field}.ports[{index}].protocol")
    for index, variable in enumerate(container.get("env") or ()):
        if not ENVIRONMENT_NAME.fullmatch(variable["name"]):
            found.append(cause(f"{field}.env[{index}].name", f'Invalid value: "{variable["name"]}": an environment variable '
                               "name must consist of printable ASCII characters except '='"))  # fmt: skip
    mounts = container.get("volumeMounts") or []
    for index, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            found.append(cause(f"{field}.volumeMounts[{index}].name", f'Not found: "{mount["name"]}"', "FieldValueNotFound"))
    found += [
        cause(one["field"], one["message"].replace("Duplicate value", "Invalid value") + ": must be unique")
        for one in check_duplicates([mount["mountPath"] for mount in mounts], field + ".volumeMounts[{}].mountPath")
    ]
    return found


def _check_resources(resources: Mapping[str, Any], field: str) -> Causes:
    found: Causes = []
    for kind in ("requests", "limits"):
        for name, value in (resources.get(kind) or {}).items():
            found += check_quantity(value, f"{field}.{kind}[{name}]")
    if found:
        return found
    limits = resources.get("limits") or {}
    for name, value in (resources.get("requests") or {}).items():
        if name in limits and parse_quantity(value) > parse_quantity(limits[name]):
            found.append(cause(f"{field}.requests", f'Invalid value: "{value}": must be less than or equal to {name} limit of '
                               f"{limits[name]}"))  # fmt: skip
    return found
