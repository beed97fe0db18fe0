"""Pod Security Standards, levels baseline (in part) and restricted."""

from typing import Any

from tests.emulators.kubernetes.api.resources import PODS
from tests.emulators.kubernetes.api.status import forbidden
from tests.emulators.kubernetes.api.store import Object

RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP_TYPES = {"RuntimeDefault", "Localhost"}


def _get(container: Object, pod_context: Object, key: str) -> Any:
    """Return a field of the security context of a container, or of its Pod."""
    context = container.get("securityContext") or {}
    return context[key] if key in context else pod_context.get(key)


def _check_baseline(spec: Object) -> list[str]:
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    if any("hostPath" in volume for volume in spec.get("volumes") or ()):
        found.append("hostPath volumes")
    for container in spec["containers"]:
        if (container.get("securityContext") or {}).get("privileged"):
            found.append(f'privileged (container "{container["name"]}" must not set securityContext.privileged=true)')
    return found


def _check_restricted(spec: Object) -> list[str]:
    found, context = [], spec.get("securityContext") or {}
    for volume in spec.get("volumes") or ():
        if not RESTRICTED_VOLUMES & set(volume):
            found.append(f'restricted volume types (volume "{volume["name"]}")')
    for container in spec["containers"]:
        own, quoted = container.get("securityContext") or {}, f'container "{container["name"]}"'
        capabilities = own.get("capabilities") or {}
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(
                f"allowPrivilegeEscalation != false ({quoted} must set securityContext.allowPrivilegeEscalation=false)"
            )
        if "ALL" not in (capabilities.get("drop") or ()) or set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
            found.append(f'unrestricted capabilities ({quoted} must set securityContext.capabilities.drop=["ALL"])')
        if _get(container, context, "runAsNonRoot") is not True:
            found.append(f"runAsNonRoot != true (pod or {quoted} must set securityContext.runAsNonRoot=true)")
        if _get(container, context, "runAsUser") == 0:
            found.append(f"runAsUser=0 ({quoted} must not set runAsUser=0)")
        if (_get(container, context, "seccompProfile") or {}).get("type") not in SECCOMP_TYPES:
            found.append(f'seccompProfile (pod or {quoted} must set securityContext.seccompProfile.type to "RuntimeDefault" or '
                         '"Localhost")')  # fmt: skip
    return found


def require(level: str, pod: Object) -> None:
    """Raise ApiError for a Pod that the level of its namespace does not allow."""
    found = [] if level == "privileged" else _check_baseline(pod["spec"])
    if level == "restricted":
        found += _check_restricted(pod["spec"])
    if found:
        raise forbidden(PODS, pod["metadata"]["name"], f'violates PodSecurity "{level}:latest": {", ".join(found)}')
