"""Table representation, which kubectl asks for to print objects."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tests.emulators.kubernetes.api.resources import Resource

Render = Callable[[dict[str, Any]], dict[str, Any]]


def _format_age(item: Mapping[str, Any]) -> str:
    created = datetime.fromisoformat(item["metadata"]["creationTimestamp"])
    seconds = int((datetime.now(UTC) - created).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def describe_pod(pod: Mapping[str, Any]) -> str:
    """Return the STATUS column of a Pod: its phase, or the reason of its end or of its containers' state."""
    status = pod.get("status") or {}
    text = status.get("reason") or status.get("phase", "")
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        for kind in ("waiting", "terminated"):
            text = (state.get(kind) or {}).get("reason") or text
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return str(text)


def _pod_cells(pod: Mapping[str, Any]) -> list[Any]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    ready = sum(bool(status.get("ready")) for status in statuses)
    restarts = sum(status.get("restartCount", 0) for status in statuses)
    return [f"{ready}/{len(pod['spec']['containers'])}", describe_pod(pod), restarts]


def _event_cells(event: Mapping[str, Any]) -> list[Any]:
    involved = event.get("involvedObject") or {}
    return [
        event.get("type"),
        event.get("reason"),
        f"{involved.get('kind', '').lower()}/{involved.get('name')}",
        event.get("message"),
    ]


def _phase_cells(item: Mapping[str, Any]) -> list[Any]:
    return [(item.get("status") or {}).get("phase", "Active")]


COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[Any]]]] = {
    "pods": (("Ready", "Status", "Restarts"), _pod_cells),
    "events": (("Type", "Reason", "Object", "Message"), _event_cells),
    "namespaces": (("Status",), _phase_cells),
}


def build_table(resource: Resource, items: list[dict[str, Any]], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Table of some objects."""
    names, describe = COLUMNS.get(resource.plural, ((), lambda item: []))
    columns = [
        {
            "name": name, "type": "integer" if name == "Restarts" else "string", "format": "name" if name == "Name" else "",
            "description": name, "priority": 0,
        }
        for name in ("Name", *names, "Age")
    ]  # fmt: skip
    rows = []
    for item in items:
        part = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}
        rows.append({"cells": [item["metadata"]["name"], *describe(item), _format_age(item)], "object": part})
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": dict(metadata), "columnDefinitions": columns, "rows": rows,
    }  # fmt: skip
