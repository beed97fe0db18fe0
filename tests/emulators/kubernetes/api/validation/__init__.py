"""Validation of objects: published schemas of two Kubernetes versions, and semantic checks that schemas do not express."""

from collections.abc import Mapping
from typing import Any

from tests.emulators.kubernetes.api.resources import Resource
from tests.emulators.kubernetes.api.status import ApiError, cause, invalid
from tests.emulators.kubernetes.api.validation.schema import find_schema_errors, find_unknown_fields
from tests.emulators.kubernetes.api.validation.semantics import find_semantic_errors


def validate(resource: Resource, item: Mapping[str, Any]) -> None:
    """Raise ApiError for an object that a supported version of Kubernetes does not accept, with one cause for each field."""
    name = str((item.get("metadata") or {}).get("name", ""))
    if unknown := find_unknown_fields(resource, item):
        causes = [cause(field, "unknown field", "FieldManagerConflict") for field in unknown]
        message = "strict decoding error: " + ", ".join(f'unknown field "{field}"' for field in unknown)
        raise ApiError(400, message, details={"causes": causes})
    if errors := find_schema_errors(resource, item) or find_semantic_errors(resource, item):
        raise invalid(resource, name, errors)
