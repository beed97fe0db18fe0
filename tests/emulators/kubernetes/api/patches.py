"""Patches of objects: JSON merge patch (RFC 7396) and JSON patch (RFC 6902).

Strategic and apply patches are applied as merge patches.
Difference from an API server: a strategic or apply patch replaces a list as a whole."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tests.emulators.kubernetes.api.status import ApiError

MERGE_TYPES = (
    "application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+yaml",
)  # fmt: skip
JSON_PATCH_TYPE = "application/json-patch+json"


def merge(target: Any, patch: Any) -> Any:
    """Return `target` with a merge patch applied."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif not key.startswith("$"):  # directives of strategic merge patches
            merged[key] = merge(merged.get(key), value)
    return merged


def apply_operations(target: Any, operations: list[dict[str, Any]]) -> Any:
    """Return `target` with the operations of a JSON patch applied. Raise ApiError."""
    document = deepcopy(target)
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place = document
        try:
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place[part]
            _apply(place, last, operation)
        except (KeyError, IndexError, ValueError) as failed:
            raise ApiError(422, f"the server rejected our request due to an error in our request: {failed}") from None
    return document


def _apply(place: Any, last: str, operation: Mapping[str, Any]) -> None:
    kind = operation["op"]
    if isinstance(place, list):
        index = len(place) if last == "-" else int(last)
        if kind == "add":
            place.insert(index, operation["value"])
        elif kind == "remove":
            del place[index]
        elif kind == "replace":
            place[index] = operation["value"]
        elif place[index] != operation["value"]:
            raise ValueError(f"test of {operation['path']} failed")
    elif kind in {"add", "replace"}:
        if kind == "replace" and last not in place:
            raise KeyError(last)
        place[last] = operation["value"]
    elif kind == "remove":
        del place[last]
    elif place[last] != operation["value"]:
        raise ValueError(f"test of {operation['path']} failed")
