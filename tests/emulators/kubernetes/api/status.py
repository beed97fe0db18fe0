"""Status objects of the Kubernetes API, and the error that carries one."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.emulators.kubernetes.api.resources import Resource

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed", 409: "Conflict",
    410: "Expired", 415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip


class ApiError(Exception):
    """The request is answered with a Status object."""

    def __init__(
        self, code: int, message: str, *, reason: str = "", details: Mapping[str, Any] | None = None, retry_after: int = 0,
        has_details: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(code, message)
        self.code, self.message, self.reason = code, message, reason or REASONS.get(code, "Unknown")
        self.details, self.retry_after = dict(details or {}), retry_after
        self.has_details = has_details or bool(details or retry_after)

    @property
    def status(self) -> dict[str, Any]:
        details = self.details | ({"retryAfterSeconds": self.retry_after} if self.retry_after else {})
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": self.message,
            "reason": self.reason, "code": self.code, **({"details": details} if self.has_details else {}),
        }  # fmt: skip


def cause(field: str, message: str, reason: str = "FieldValueInvalid") -> dict[str, str]:
    return {"reason": reason, "message": message, "field": field}


def _describe(resource: Resource, name: str) -> dict[str, Any]:
    return {"name": name, "kind": resource.plural, **({"group": resource.group} if resource.group else {})}


def not_found(resource: Resource, name: str) -> ApiError:
    return ApiError(404, f'{resource.qualified} "{name}" not found', details=_describe(resource, name))


def already_exists(resource: Resource, name: str, *, is_dying: bool = False) -> ApiError:
    message = f'{"object is being deleted: " if is_dying else ""}{resource.qualified} "{name}" already exists'
    return ApiError(409, message, reason="AlreadyExists", details=_describe(resource, name))


def conflict(resource: Resource, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, message, details=_describe(resource, name))


def unmet_precondition(resource: Resource, name: str, label: str, expected: str, found: str) -> ApiError:
    """Return the error for a deletion with another uid or resource version. It names the kind, not the resource."""
    causes = {"UID": "deleted and then recreated", "ResourceVersion": "modified"}
    why = f"the {label} in the precondition ({expected}) does not match the {label} in record ({found})"
    message = f'Operation cannot be fulfilled on {resource.kind} "{name}": {why}. The object might have been {causes[label]}'
    return ApiError(409, message, details={**_describe(resource, name), "kind": resource.kind})


def unknown_path() -> ApiError:
    return ApiError(404, "the server could not find the requested resource", has_details=True)


def future_version(asked: int, current: int) -> ApiError:
    """Return the error for a list that has to be at least as new as a resource version which there is not yet."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    return ApiError(504, message, details={"causes": causes}, retry_after=1)


def forbidden(resource: Resource, name: str, why: str) -> ApiError:
    return ApiError(403, f'{resource.qualified} "{name}" is forbidden: {why}', details=_describe(resource, name))


def invalid(resource: Resource, name: str, causes: Sequence[Mapping[str, str]]) -> ApiError:
    """Return the error for an object with invalid fields. `causes` come from `cause`."""
    found = [f"{one['field']}: {one['message']}" for one in causes]
    listed = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
    group = f".{resource.group}" if resource.group else ""
    details = {**_describe(resource, name), "kind": resource.kind, "causes": list(causes)}
    return ApiError(422, f'{resource.kind}{group} "{name}" is invalid: {listed}', details=details)


def expired(message: str = "The provided continue parameter is too old") -> ApiError:
    return ApiError(410, message)
