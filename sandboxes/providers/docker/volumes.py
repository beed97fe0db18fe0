"""Volumes of containers: their names and labels, and the description of the container that they belong to.

A container that someone else has removed is created again from the label SPEC_LABEL of its volumes, as long as all of them
exist. Volumes of earlier versions have no such label: without their container they are only leftovers."""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sandboxes.providers.base import DATA, WORKSPACE, ProviderSandbox, SandboxSpec
from sandboxes.providers.docker.engine import Conflict, Engine
from sandboxes.providers.errors import Missing

OWNER_LABEL, NAME_LABEL = "leasehold.owner", "leasehold.name"  # of containers and volumes
# Label of volumes. The engine reports the time of a volume's directory as its creation time, and agents can change that time.
CREATED_AT_LABEL = "leasehold.made_at"
SPEC_LABEL = "leasehold.spec"  # JSON object with these fields of the SandboxSpec
SPEC_FIELDS = ("name", "owner", "image", "labels", "memory_mib", "millicpus", "pids", "writable_root", "pool")
LATER_FIELDS = ("runtime",)  # that volumes of earlier versions do not have: their containers had the default
SPEC_PATHS = ("sockets", "agent", "data")  # fields of the SandboxSpec: a path, or None


@dataclass(frozen=True)
class KeptVolumes:
    """All volumes of one sandbox, with the spec of its container."""

    spec: SandboxSpec
    created_at: Mapping[str, datetime]  # by the name of the volume


def list_volumes(spec: SandboxSpec) -> list[tuple[str, str]]:
    """List the sandbox's volumes as (name, mount point)."""
    workspace, data = (f"{spec.name}-workspace", WORKSPACE), (f"{spec.name}-data", DATA)
    return [workspace] if spec.data else [workspace, data]


def build_labels(spec: SandboxSpec) -> dict[str, str]:
    """Build the labels of new volumes of a sandbox."""
    fields = {name: getattr(spec, name) for name in (*SPEC_FIELDS, *LATER_FIELDS)} | {"labels": dict(spec.labels)}
    paths = {name: str(path) if (path := getattr(spec, name)) else None for name in SPEC_PATHS}
    created_at = datetime.now(UTC).isoformat()  # noqa: TID251 - the engine's clock
    return {
        OWNER_LABEL: spec.owner, NAME_LABEL: spec.name, CREATED_AT_LABEL: created_at, SPEC_LABEL: json.dumps(fields | paths)
    }  # fmt: skip


def find_kept(engine: Engine, ref: str) -> KeptVolumes | None:
    """Return the volumes of a sandbox, or None unless all of them exist and describe its container. Raise Unavailable."""
    labels = _read_labels(engine, f"{ref}-workspace")
    spec = _parse_spec(labels.get(SPEC_LABEL, ""))
    if spec is None or spec.name != ref:
        return None
    created_at = {}
    for name, _ in list_volumes(spec):
        labels = _read_labels(engine, name)
        if (labels.get(OWNER_LABEL), labels.get(NAME_LABEL)) != (spec.owner, ref):
            return None
        created_at[name] = _parse_created_at(labels)
    return KeptVolumes(spec, created_at)


def remove_volumes(engine: Engine, ref: str) -> bool:
    """Remove the volumes of a removed container. Return False if one is still in use."""
    for name, _ in list_volumes(SandboxSpec(ref, owner="")):
        if _read_labels(engine, name).get(NAME_LABEL) != ref:
            continue
        try:
            engine.call("DELETE", f"/volumes/{name}")
        except Missing:
            continue
        except Conflict:
            return False
    return True


def remove_newer(engine: Engine, kept: KeptVolumes) -> None:
    """Remove the volumes that the engine has created anew in place of those that were found, and leave the others."""
    for name, _ in list_volumes(kept.spec):
        labels = _read_labels(engine, name)
        if labels.get(NAME_LABEL) == kept.spec.name and _parse_created_at(labels) != kept.created_at[name]:
            with suppress(Missing, Conflict):
                engine.call("DELETE", f"/volumes/{name}")


def find_remnants(volumes: Sequence[Mapping[str, Any]], container_names: Collection[str]) -> list[ProviderSandbox]:
    """List sandboxes of which only volumes are left."""
    labels_by_name = {volume["Labels"][NAME_LABEL]: volume["Labels"] for volume in volumes}
    return [
        ProviderSandbox(
            ref=name, name=name, running=False, created_at=_parse_created_at(labels), is_remnant=True,
            owner=labels[OWNER_LABEL],
        )
        for name, labels in labels_by_name.items()
        if name not in container_names
    ]  # fmt: skip


def _read_labels(engine: Engine, name: str) -> dict[str, str]:
    """Return the labels of a volume; none if it does not exist."""
    try:
        return dict(engine.call("GET", f"/volumes/{name}")["Labels"] or {})
    except Missing:
        return {}


def _parse_created_at(labels: Mapping[str, str]) -> datetime:
    return datetime.fromisoformat(labels[CREATED_AT_LABEL])


def _parse_spec(text: str) -> SandboxSpec | None:
    try:
        fields = json.loads(text)
        values: dict[str, Any] = {name: fields[name] for name in SPEC_FIELDS}
        values |= {name: fields[name] for name in LATER_FIELDS if name in fields}
        values |= {name: Path(fields[name]) if fields[name] else None for name in SPEC_PATHS}
        return SandboxSpec(**values)
    except (ValueError, TypeError, KeyError):
        return None
