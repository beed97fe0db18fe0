"""Validation against the published schemas of the oldest and the newest supported version of Kubernetes."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from kubernetes_validate.utils import schema_contents
from referencing import Registry
from referencing import Resource as Document

from tests.emulators.kubernetes.api.resources import SANDBOXES, Resource
from tests.emulators.kubernetes.api.status import cause

VERSIONS = ("1.30", kubernetes_validate.latest_version())
# Of the custom resource, only the outline; the Pod template in it is validated as a Pod.
SANDBOX_SCHEMA = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "apiVersion": {}, "kind": {}, "metadata": {"type": "object"}, "status": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["podTemplate"],
            "additionalProperties": False,
            "properties": {
                "podTemplate": {
                    "type": "object", "required": ["spec"], "properties": {"metadata": {}, "spec": {"type": "object"}}
                },
                "volumeClaimTemplates": {"type": "array"},
                "service": {"type": "boolean"},
                "shutdownTime": {"type": "string"},
                "shutdownPolicy": {"enum": ["Delete", "Retain"]},
                "operatingMode": {"enum": ["Running", "Suspended"]},
            },
        },
    },
    "additionalProperties": False,
}  # fmt: skip


@cache
def _get_validator(version: str, api_version: str, kind: str) -> Draft202012Validator:
    if kind == SANDBOXES.kind:
        return Draft202012Validator(SANDBOX_SCHEMA)
    schema_name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    directory = f"kubernetes-json-schema/v{version}-local-strict"
    schema = schema_contents(f"{directory}/{kind.lower()}-{schema_name}.json", version)
    definitions = Document.from_contents(schema_contents(f"{directory}/_definitions.json", version))
    registry: Registry[Any] = definitions @ (Document.from_contents(schema) @ Registry())
    return Draft202012Validator(schema, registry=registry)


@cache
def _resolve_version(version: str) -> str:
    """Return the version with its patch level, as in the names of the schemas' directories."""
    return next(found for found in kubernetes_validate.utils.all_versions() if found.split(".")[:2] == version.split(".")[:2])


def _iterate_errors(resource: Resource, item: Mapping[str, Any]) -> list[ValidationError]:
    found = []
    for version in VERSIONS:
        validator = _get_validator(_resolve_version(version), resource.api_version, resource.kind)
        found += list(validator.iter_errors(item))
    return found


def format_path(path: Any) -> str:
    """Return a path of keys and indexes as Kubernetes writes it: spec.containers[0].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def find_unknown_fields(resource: Resource, item: Mapping[str, Any]) -> list[str]:
    """Return the paths of fields that a supported version does not know."""
    found = set()
    for error in _iterate_errors(resource, item):
        if error.validator == "additionalProperties":
            known = set(error.schema.get("properties", {}))
            found |= {format_path([*error.absolute_path, name]) for name in error.instance if name not in known}
    return sorted(found)


def find_schema_errors(resource: Resource, item: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the causes of schema errors, without duplicates."""
    causes = {}
    for error in _iterate_errors(resource, item):
        path = [*error.absolute_path]
        reason = {"required": "FieldValueRequired", "enum": "FieldValueNotSupported"}.get(
            str(error.validator), "FieldValueInvalid"
        )
        if error.validator == "required" and (match := re.match(r"'([^']+)'", error.message)):
            path.append(match[1])
        field = format_path(path)
        causes[field] = cause(field, error.message[:500], reason)
    return list(causes.values())
