"""Options of the Docker container for a container of a Pod: security context, limits, mounts and environment."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import ImageNotFound
from docker.types import LogConfig, Mount

from tests.emulators.kubernetes.api.resources import SECRETS
from tests.emulators.kubernetes.api.store import Object, Store
from tests.emulators.kubernetes.api.validation.names import parse_quantity
from tests.emulators.kubernetes.node.pauses import Pause
from tests.emulators.kubernetes.node.volumes import Volume

RUN_LABEL = "leasehold.emulator"  # run of the emulator, of all its containers
POD_LABEL = "leasehold.emulator.pod"  # uid of the Pod


class ContainerError(Exception):
    """The container cannot be created. `reason` is that of its waiting state."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


@dataclass
class Sandbox:
    """Docker objects of one Pod."""

    uid: str
    namespace: str
    name: str
    directory: Path
    pause: Pause | None = None
    containers: dict[str, str] = field(default_factory=dict)  # ids by name
    restarts: dict[str, int] = field(default_factory=dict)
    is_ending: bool = False
    has_run_out_of_memory: bool = False  # switch of tests


def find_image(client: APIClient, container: Object) -> dict[str, Any]:
    """Return the local image of a container. The emulator does not pull any."""
    name = container["image"]
    try:
        return dict(client.inspect_image(name))
    except ImageNotFound:
        if container.get("imagePullPolicy") == "Never":
            message = f'Container image "{name}" is not present with pull policy of Never'
            raise ContainerError("ErrImageNeverPull", message) from None
        raise ContainerError("ErrImagePull", f'failed to pull and unpack image "{name}": not found') from None


def create_container(
    client: APIClient,
    store: Store,
    pod: Object,
    container: Object,
    sandbox: Sandbox,
    volumes: Mapping[str, Volume],
    labels: Mapping[str, str],
    shared_directories: Mapping[str, Path],
) -> str:
    """Create a container of a Pod, and return its id. Raise ContainerError."""
    assert sandbox.pause is not None
    image = find_image(client, container)
    mounts, tmpfs = _build_mounts(container, volumes)
    mounts += [Mount(path, str(directory), type="bind", read_only=True) for path, directory in shared_directories.items()]
    host = client.create_host_config(
        network_mode=f"container:{sandbox.pause.identifier}", mounts=mounts, tmpfs=tmpfs, **_build_security(pod, container),
        **_build_limits(container), log_config=LogConfig(type="json-file"),
    )  # fmt: skip
    entrypoint, command = container.get("command"), container.get("args")
    try:
        created = client.create_container(
            container["image"], entrypoint=entrypoint, command=command if command or entrypoint else None,
            user=_find_user(pod, container, image), working_dir=container.get("workingDir"), labels=dict(labels),
            environment=_build_environment(store, pod, container, sandbox), host_config=host,
            stdin_open=bool(container.get("stdin")), tty=bool(container.get("tty")),
        )  # fmt: skip
    except Exception as failed:
        raise ContainerError("CreateContainerError", str(failed)) from None
    return str(created["Id"])


def _get_context(pod: Object, container: Object, key: str) -> Any:
    own = container.get("securityContext") or {}
    return own[key] if key in own else (pod["spec"].get("securityContext") or {}).get(key)


def _find_user(pod: Object, container: Object, image: Mapping[str, Any]) -> str:
    """Return "uid:gid", or an empty text for the user of the image. Raise ContainerError as the kubelet does for root."""
    uid, gid = _get_context(pod, container, "runAsUser"), _get_context(pod, container, "runAsGroup")
    if _get_context(pod, container, "runAsNonRoot"):
        declared = str(image["Config"].get("User") or "0").partition(":")[0]
        if uid is None and not declared.isdigit():
            message = f"container has runAsNonRoot and image has non-numeric user ({declared}), cannot verify user is non-root"
            raise ContainerError("CreateContainerConfigError", message)
        if int(declared if uid is None else uid) == 0:
            raise ContainerError("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
    if uid is None and gid is None:
        return ""
    uid = str(image["Config"].get("User") or "0").partition(":")[0] if uid is None else uid
    return f"{uid}:{0 if gid is None else gid}"


def _build_security(pod: Object, container: Object) -> dict[str, Any]:
    own = container.get("securityContext") or {}
    capabilities, options = own.get("capabilities") or {}, []
    if own.get("allowPrivilegeEscalation") is False:
        options.append("no-new-privileges:true")
    profile = _get_context(pod, container, "seccompProfile") or {}
    if profile.get("type") == "Unconfined":
        options.append("seccomp=unconfined")
    if profile.get("type") == "Localhost":
        raise ContainerError("CreateContainerError", f"cannot load seccomp profile {profile.get('localhostProfile')!r}")
    context = pod["spec"].get("securityContext") or {}
    groups = [*(context.get("supplementalGroups") or ()), *([context["fsGroup"]] if "fsGroup" in context else ())]
    return {
        "read_only": bool(own.get("readOnlyRootFilesystem")), "privileged": bool(own.get("privileged")),
        "security_opt": options,        "cap_drop": capabilities.get("drop") or [], "cap_add": capabilities.get("add") or [],
        "group_add": [str(one) for one in groups],
    }  # fmt: skip


def _build_limits(container: Object) -> dict[str, Any]:
    limits = (container.get("resources") or {}).get("limits") or {}
    found: dict[str, Any] = {}
    if "memory" in limits:
        found |= {"mem_limit": int(parse_quantity(limits["memory"])), "memswap_limit": int(parse_quantity(limits["memory"]))}
    if "cpu" in limits:
        found |= {"cpu_period": 100_000, "cpu_quota": max(1000, int(parse_quantity(limits["cpu"]) * 100_000))}
    return found


def _build_mounts(container: Object, volumes: Mapping[str, Volume]) -> tuple[list[Mount], dict[str, str]]:
    mounts, tmpfs = [], {}
    for mount in container.get("volumeMounts") or ():
        volume, target = volumes[mount["name"]], mount["mountPath"]
        if volume.path is None:
            tmpfs[target] = ",".join([f"size={volume.size}" if volume.size else "size=100%", "mode=1777", "exec"])
            continue
        source = volume.path / mount.get("subPath", "")
        mounts.append(Mount(target, str(source), type="bind", read_only=volume.is_read_only or bool(mount.get("readOnly"))))
    return mounts, tmpfs


def _build_environment(store: Store, pod: Object, container: Object, sandbox: Sandbox) -> dict[str, str]:
    found = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "KUBERNETES_SERVICE_PORT_HTTPS": "443"}
    for variable in container.get("env") or ():
        source = variable.get("valueFrom") or {}
        if reference := source.get("secretKeyRef"):
            secret = store.find(SECRETS, sandbox.namespace, reference["name"])
            if secret is None or reference["key"] not in (secret.get("data") or {}):
                if reference.get("optional"):
                    continue
                raise ContainerError("CreateContainerConfigError", f'secret "{reference["name"]}" not found')
            found[variable["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
        elif reference := source.get("fieldRef"):
            fields = {
                "metadata.name": sandbox.name, "metadata.namespace": sandbox.namespace, "metadata.uid": sandbox.uid,
                "status.podIP": sandbox.pause.address if sandbox.pause else "",
                "spec.nodeName": pod["spec"].get("nodeName", ""),
            }  # fmt: skip
            found[variable["name"]] = fields.get(reference["fieldPath"], "")
        else:
            found[variable["name"]] = variable.get("value", "")
    return found
