"""Volumes of Pods: directories of this machine for emptyDir, secret, configMap and projected, and tmpfs in memory."""

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.emulators.kubernetes.api.resources import CONFIG_MAPS, SECRETS, Resource
from tests.emulators.kubernetes.api.store import Object, Store
from tests.emulators.kubernetes.api.validation.names import parse_quantity

DEFAULT_MODE = 0o644
TOKEN_VOLUME, TOKEN_DIRECTORY = "kube-api-access", "/var/run/secrets/kubernetes.io/serviceaccount"


class VolumeMissing(Exception):
    """An object that a volume needs does not exist yet. The kubelet tries again until it does."""


@dataclass(frozen=True)
class Volume:
    """One volume. Without a path, it is a tmpfs of `size` bytes (0: no limit of its own)."""

    path: Path | None
    size: int = 0
    is_read_only: bool = False


@dataclass(frozen=True)
class Credentials:
    """Files of the volume of a service account."""

    token: str
    authority: bytes


def create_volumes(store: Store, pod: Object, directory: Path, credentials: Credentials | None) -> dict[str, Volume]:
    """Create the volumes of a Pod by name. Raise VolumeMissing."""
    group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    namespace, found = pod["metadata"]["namespace"], {}
    for volume in pod["spec"].get("volumes") or ():
        name, path = volume["name"], directory / volume["name"]
        if "emptyDir" in volume:
            found[name] = _create_empty(volume["emptyDir"] or {}, path, group)
            continue
        files: dict[str, tuple[bytes, int]] = {}
        if "projected" in volume:
            source = volume["projected"]
            for part in source.get("sources") or ():
                files |= _read_source(store, namespace, part, source.get("defaultMode", DEFAULT_MODE), "name")
        else:
            kind = "secret" if "secret" in volume else "configMap"
            if kind not in volume:
                raise VolumeMissing(f'volume "{name}": only emptyDir, secret, configMap and projected are emulated')
            mode = volume[kind].get("defaultMode", DEFAULT_MODE)
            files = _read_source(store, namespace, {kind: volume[kind]}, mode, "secretName" if kind == "secret" else "name")
        _write_files(path, files, group)
        found[name] = Volume(path, is_read_only=True)
    if credentials:
        path = directory / TOKEN_VOLUME
        contents = {"token": credentials.token.encode(), "ca.crt": credentials.authority, "namespace": namespace.encode()}
        _write_files(path, {name: (content, DEFAULT_MODE) for name, content in contents.items()}, group)
        found[TOKEN_VOLUME] = Volume(path, is_read_only=True)
    return found


def _create_empty(source: Mapping[str, Any], path: Path, group: int | None) -> Volume:
    size = int(parse_quantity(source.get("sizeLimit", 0)))
    if source.get("medium") == "Memory":
        return Volume(None, size)
    path.mkdir(parents=True, exist_ok=True)
    _own(path, 0o777, group)
    return Volume(path, size)


def _own(path: Path, mode: int, group: int | None) -> None:
    """Set mode and group as the kubelet does for fsGroup: the group may read, and write where the owner may."""
    if group is not None:
        os.chown(path, 0, group)
        mode |= 0o2070 if path.is_dir() else 0o040
    path.chmod(mode)


def _write_files(path: Path, files: Mapping[str, tuple[bytes, int]], group: int | None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, (content, mode) in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        _own(file, mode, group)
    _own(path, 0o755, group)


def _read_source(
    store: Store, namespace: str, part: Mapping[str, Any], mode: int, name_key: str
) -> dict[str, tuple[bytes, int]]:
    """Return (content, mode) by path for one secret or configMap source."""
    kind = next((kind for kind in ("secret", "configMap") if kind in part), None)
    if kind is None:
        raise VolumeMissing(f"source {', '.join(part)} is not emulated")
    source = part[kind]
    resource: Resource = SECRETS if kind == "secret" else CONFIG_MAPS
    item = store.find(resource, namespace, source[name_key])
    if item is None:
        if source.get("optional"):
            return {}
        raise VolumeMissing(f'{resource.plural[:-1]} "{source[name_key]}" not found')
    data = item.get("data") or {}
    contents = {key: base64.b64decode(value) if kind == "secret" else value.encode() for key, value in data.items()}
    chosen = source.get("items") or [{"key": key, "path": key} for key in contents]
    missing = [one["key"] for one in chosen if one["key"] not in contents]
    if missing:
        raise VolumeMissing(f"references non-existent {kind} key: {missing[0]}")
    return {one["path"]: (contents[one["key"]], one.get("mode", mode)) for one in chosen}
