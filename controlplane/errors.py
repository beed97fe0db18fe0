"""Mapping of errors to problem documents (RFC 9457).

The body is {type, title, status, detail, code, retryable, operation, provider, cause}, with {field} for one invalid field and
{errors: [{field, detail}]} for several."""

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import structlog
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpResponse, UnreadablePostError
from rest_framework import exceptions as drf

from billing import errors as billing
from leases import errors as leases
from leases.api.base import schema
from sandboxes import errors as sandboxes
from sandboxes.db.clock import format_timestamp
from sandboxes.db.connection_errors import NoFreeConnection
from sandboxes.failures import find_cause, find_provider, find_retry_after, needs_operator
from sandboxes.providers import errors as provider
from sandboxes.providers import observed as provider_observed
from sandboxes.redaction.texts import omit_answers, redact
from sandboxes.storage import base as store
from sandboxes.storage import observed as store_observed

log = structlog.get_logger(__name__)
CONTENT_TYPE = "application/problem+json"

STATUS_BY_ERROR: dict[type[Exception], int] = {
    leases.InvalidRequest: 400,
    leases.NotAllowed: 403,
    leases.KeyExpired: 401,
    leases.InvalidSignature: 401,
    leases.GrantEnded: 401,
    leases.SignedUrlInvalid: 401,
    leases.SignedUrlExpired: 401,
    leases.InsufficientScope: 403,
    leases.HostNotAllowed: 421,
    leases.OriginNotAllowed: 403,
    leases.McpNotInstalled: 501,
    leases.LeaseEnded: 410,
    leases.Conflict: 409,
    leases.TurnInProgress: 409,
    leases.AgentRunNotFound: 404,
    leases.AgentRunClosed: 503,
    leases.CatalogAgentNotFound: 404,
    leases.InvalidPack: 400,
    leases.ArtifactNotFound: 404,
    leases.QueuedRunNotFound: 404,
    leases.NoActiveLease: 404,
    leases.EnvironmentNotFound: 404,
    leases.EnvironmentEnded: 409,
    leases.RepositoryNotFound: 404,
    leases.RepositoryUnavailable: 502,
    leases.CodingTaskNotFound: 404,
    leases.CodingTaskEnded: 409,
    leases.CodingTaskBusy: 409,
    leases.CheckoutFailed: 409,
    leases.QueuedRunInterrupted: 409,
    leases.StopIncomplete: 503,
    leases.EventNotFound: 410,
    leases.TooManyQueuedRuns: 429,
    leases.StreamServerUnavailable: 503,
    leases.PreviewsForbidden: 403,
    leases.TerminalNotFound: 404,
    leases.ShellNotFound: 404,
    leases.ShellExists: 409,
    leases.TooManyShells: 409,
    leases.ShellDecryptionFailed: 409,
    billing.BudgetExhausted: 402,
    billing.BudgetNotFound: 404,
    billing.TotalsPending: 503,
    leases.RateLimited: 429,
    leases.RequestTooLarge: 413,
    leases.LengthRequired: 411,
    leases.UnsupportedEncoding: 415,
    leases.RangeNotSatisfiable: 416,
    sandboxes.SandboxBusy: 409,
    sandboxes.SandboxNotHeld: 409,
    sandboxes.SandboxNotListed: 404,
    sandboxes.SandboxHasOwner: 409,
    sandboxes.SandboxTooYoung: 409,
    sandboxes.SandboxNotAdoptable: 409,
    sandboxes.InstallationMismatch: 409,
    sandboxes.IllegalTransition: 409,
    sandboxes.WrongHost: 503,
    sandboxes.HostLost: 503,
    sandboxes.NotIsolated: 503,
    sandboxes.CapacityExhausted: 503,
    sandboxes.CapacityPending: 503,
    sandboxes.QuotaExceeded: 429,
    sandboxes.TooManyRuns: 429,
    sandboxes.TooManyStreams: 429,
    sandboxes.TooManyLongCalls: 503,
    sandboxes.TooManyAdmissionRequests: 429,
    sandboxes.PoolDraining: 503,
    sandboxes.WorkspaceFull: 409,
    sandboxes.DataFull: 409,
    sandboxes.TooManyProcesses: 409,
    sandboxes.NoGateway: 409,
    sandboxes.InvalidTemplate: 400,
    sandboxes.TemplatesNotSupported: 409,
    sandboxes.TemplateNotFound: 404,
    sandboxes.TemplateBusy: 409,
    sandboxes.TemplateInUse: 409,
    sandboxes.ProcessOutputGone: 404,
    sandboxes.ProcessEnded: 409,
    sandboxes.StoreUnavailable: 503,
    sandboxes.SnapshotNotFound: 404,
    sandboxes.SigningKeyNotFound: 409,
    sandboxes.SigningKeyRevoked: 409,
    sandboxes.SigningKeyExists: 409,
    sandboxes.SigningKeyDecryptionFailed: 503,
    sandboxes.StartsPaused: 503,
    sandboxes.TooManyStarts: 503,
    sandboxes.NoPoolAvailable: 503,
    sandboxes.EngineDiskFull: 503,
    sandboxes.SandboxNotReady: 503,
    sandboxes.ClaimLost: 503,
    sandboxes.ProviderCallFailed: 503,
    sandboxes.SandboxLost: 410,
    sandboxes.OutcomeUnknown: 409,
    sandboxes.RunExists: 409,
    provider.NoSuchFile: 404,
    provider.FileExists: 409,
    provider.BadPath: 400,
    provider.TooLarge: 413,
    provider.Rejected: 400,
    provider_observed.DestroyRefused: 503,
    provider.Unavailable: 503,
    provider.Missing: 410,
    store.DiskFull: 503,
    store.StoreRefused: 400,
    store_observed.DeleteRefused: 503,
    store.StoreError: 503,
    Http404: 404,
    PermissionDenied: 403,
    RequestDataTooBig: 413,
    UnreadablePostError: 400,
    NoFreeConnection: 503,
    OperationalError: 503,  # no connection, or a lock timeout
    InterfaceError: 503,
}
PUBLIC_MESSAGES = {  # for exceptions whose own message must not reach a client
    Http404: "Not found.",
    PermissionDenied: "This is not allowed.",
    RequestDataTooBig: "The request body is too large.",
    UnreadablePostError: "The request body could not be read completely.",
    NoFreeConnection: "No free database connection. Try again in a moment.",
    OperationalError: "The database did not answer.",
    InterfaceError: "The database did not answer.",
    store.StoreError: "The object store is unavailable. Try again.",
}
NULLABLE_FIELDS = ("resets_at",)  # null means never
DEFAULT_RETRY_AFTER_SECONDS = 5  # for a 503 whose error names no time
CODE_BY_STATUS = {
    400: "invalid", 401: "unauthenticated", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    406: "not_acceptable", 409: "conflict", 413: "too_large", 415: "unsupported_media_type", 429: "rate_limited",
    500: "internal", 503: "unavailable",
}  # fmt: skip


def build_error_response(exception: Exception, path: str, operation: str) -> HttpResponse:
    """Return the problem document for an exception of a view. Unexpected exceptions are logged and reported without details.

    `operation` is the OpenAPI operation id, or the HTTP method of a request that no operation accepts."""
    if isinstance(exception, drf.ValidationError):
        return _build_validation_response(exception, operation)
    if isinstance(exception, drf.APIException):
        wait = getattr(exception, "wait", None)
        return build_problem_response(
            exception.status_code, operation, detail=str(exception.detail), retry_after=int(wait) if wait else None
        )
    error_class = next((error_class for error_class in STATUS_BY_ERROR if isinstance(exception, error_class)), None)
    if error_class is None:
        log.exception("unexpected", path=path, exc_info=exception)
        return build_problem_response(500, operation, detail="Internal error in the control plane. It was logged.")
    if isinstance(exception, OperationalError | InterfaceError):
        log.error("database", path=path, error=str(exception))
    if error_class is store.StoreError:
        log.error("store", path=path, error=str(exception))
    extra = dict(getattr(exception, "extra", {}))
    if isinstance(exception, provider.NoSuchFile | provider.BadPath | provider.TooLarge):
        extra["field"] = "path"
    if isinstance(exception, provider.FileExists):
        extra["field"] = "target"
    response = build_problem_response(
        STATUS_BY_ERROR[error_class],
        operation,
        detail=PUBLIC_MESSAGES.get(error_class) or str(exception),
        code=getattr(exception, "code", ""),
        retry_after=find_retry_after(exception),
        retryable=False if needs_operator(exception) else None,
        provider=find_provider(exception),
        cause=find_cause(exception),
        **extra,
    )
    for name, value in getattr(exception, "headers", {}).items():
        response[name] = value
    return response


def build_problem_response(
    status: int,
    operation: str,
    *,
    detail: str = "",
    code: str = "",
    retry_after: int | None = None,
    retryable: bool | None = None,
    provider: str = "",
    cause: str = "",
    **extra: Any,
) -> HttpResponse:
    """Return a problem document with the headers of its status. Fields of `extra` without a value are left out.

    `retryable` None: with a time to retry after, or 503."""
    if retryable is None:
        retryable = bool(retry_after) or status == HTTPStatus.SERVICE_UNAVAILABLE
    code = code if isinstance(code, str) and code else CODE_BY_STATUS.get(status, "error")
    body = {
        "type": f"urn:leasehold:problem:{code}",
        "title": code.replace("_", " ").capitalize(),
        "status": status,
        "detail": redact(omit_answers(detail)) or f"{HTTPStatus(status).phrase}.",
        "code": code,
        "retryable": retryable,
        "operation": operation,
        "provider": provider or None,
        "cause": cause or None,
        **{name: value for name, value in extra.items() if value not in (None, "", []) or name in NULLABLE_FIELDS},
    }
    response = HttpResponse(json.dumps(body, default=format_timestamp), status=status, content_type=CONTENT_TYPE)
    if status == HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = 'Bearer realm="leasehold"'
    if retryable:
        response["Retry-After"] = str(retry_after or DEFAULT_RETRY_AFTER_SECONDS)
    return response


def handle(exception: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Handle an exception of a DRF view (setting EXCEPTION_HANDLER)."""
    request, view = context["request"], context["view"]
    operation = schema.find_operation_id(view, request.method) or request.method
    response = build_error_response(exception, request.path, operation)
    if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response["Allow"] = ", ".join(view.allowed_methods)
    return response


def _build_validation_response(exception: drf.ValidationError, operation: str) -> HttpResponse:
    errors = [{"field": field, "detail": detail} for field, detail in _flatten_detail(exception.detail)]
    summary = "; ".join(f"{each['field']}: {each['detail']}" if each["field"] else each["detail"] for each in errors)
    return build_problem_response(400, operation, detail=summary, field=errors[0]["field"] if errors else "", errors=errors)


def _flatten_detail(detail: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield DRF's nested error detail as pairs of dotted field path and message."""
    if isinstance(detail, Mapping):
        for name, inner in detail.items():
            yield from _flatten_detail(inner, path if name == "non_field_errors" else f"{path}.{name}".strip("."))
    elif isinstance(detail, list | tuple):
        for index, inner in enumerate(detail):
            yield from _flatten_detail(inner, f"{path}.{index}" if isinstance(inner, Mapping) and inner else path)
    else:
        yield path, str(detail)
