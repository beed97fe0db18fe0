"""The one table: domain error -> status. Every error leaves as a problem document (RFC 9457):
{type, title, status, detail, code} and, where one is at fault, {field} or {errors: [{field, detail}]}."""

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
from sandboxes import errors as sandboxes
from sandboxes.db.clock import iso
from sandboxes.providers import base as provider
from sandboxes.storage import base as store

log = structlog.get_logger(__name__)
CONTENT_TYPE = "application/problem+json"

STATUS: dict[type[Exception], int] = {
    leases.Invalid: 400,
    leases.LeaseEnded: 410,
    leases.Conflict: 409,
    leases.TurnOpen: 409,
    billing.BudgetExhausted: 402,
    leases.TooMany: 429,
    leases.TooLarge: 413,
    leases.LengthRequired: 411,
    leases.RangeNotSatisfiable: 416,
    sandboxes.Busy: 409,
    sandboxes.NotHeld: 409,
    sandboxes.IllegalTransition: 409,
    sandboxes.CapacityExhausted: 503,
    sandboxes.QuotaExceeded: 429,
    sandboxes.PoolDraining: 503,
    sandboxes.WorkspaceFull: 409,
    sandboxes.DataFull: 409,
    sandboxes.TooManyProcesses: 409,
    sandboxes.OutputGone: 404,
    sandboxes.StoreFailed: 503,
    sandboxes.NoSnapshot: 404,
    sandboxes.NoSigningKey: 409,
    sandboxes.KeyRevoked: 409,
    sandboxes.SigningKeyExists: 409,
    sandboxes.KeyUnopened: 503,
    sandboxes.NotReady: 503,
    sandboxes.ProviderFailed: 503,
    sandboxes.Lost: 410,
    provider.NoFile: 404,
    provider.BadPath: 400,
    provider.TooLarge: 413,
    provider.Rejected: 400,
    provider.Unavailable: 503,
    provider.Missing: 410,
    store.StoreRefused: 400,
    store.StoreError: 503,
    Http404: 404,
    PermissionDenied: 403,
    RequestDataTooBig: 413,
    UnreadablePostError: 400,
    OperationalError: 503,  # the database is gone, or was locked for too long
    InterfaceError: 503,
}
SAID = {  # where the exception's own words are for us, not for a client
    Http404: "There is nothing here.",
    PermissionDenied: "This is not allowed.",
    RequestDataTooBig: "The body is too large.",
    UnreadablePostError: "The body could not be read to its end.",
    OperationalError: "The database did not answer.",
    InterfaceError: "The database did not answer.",
    store.StoreError: "The store of files and logs did not do what it was asked. Try again.",
}
NULLABLE = ("resets_at",)  # what it says by being null
RETRY_AFTER = 5  # seconds, with a 503 that does not know better
CODES = {
    400: "invalid", 401: "unauthenticated", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    406: "not_acceptable", 409: "conflict", 413: "too_large", 415: "unsupported_media_type", 429: "rate_limited",
    500: "internal", 503: "unavailable",
}  # fmt: skip


def respond(exception: Exception, path: str) -> HttpResponse:
    """The problem document for whatever a view raised. Of a bug, a client sees only that there was one."""
    if isinstance(exception, drf.ValidationError):
        return _invalid(exception)
    if isinstance(exception, drf.APIException):
        wait = getattr(exception, "wait", None)
        return plain(exception.status_code, detail=str(exception.detail), retry_after=int(wait) if wait else None)
    kind = next((kind for kind in STATUS if isinstance(exception, kind)), None)
    if kind is None:
        log.exception("unexpected", path=path, exc_info=exception)
        return plain(500, detail="This is a bug in the control plane. It was logged.")
    if isinstance(exception, OperationalError | InterfaceError):
        log.error("database", path=path, error=str(exception))
    if kind is store.StoreError:
        log.error("store", path=path, error=str(exception))
    extra = dict(getattr(exception, "extra", {}))
    if isinstance(exception, provider.NoFile | provider.BadPath | provider.TooLarge):
        extra["field"] = "path"
    response = plain(
        STATUS[kind],
        detail=SAID.get(kind) or str(exception),
        code=getattr(exception, "code", ""),
        retry_after=getattr(exception, "retry_after", None),
        **extra,
    )
    for name, value in getattr(exception, "headers", {}).items():
        response[name] = value
    return response


def plain(status: int, *, detail: str = "", code: str = "", retry_after: int | None = None, **extra: Any) -> HttpResponse:
    """A problem document, with the headers that belong to its status. Fields without a value are left out."""
    code = code if isinstance(code, str) and code else CODES.get(status, "error")
    body = {
        "type": f"urn:leasehold:problem:{code}",
        "title": code.replace("_", " ").capitalize(),
        "status": status,
        "detail": detail or f"{HTTPStatus(status).phrase}.",
        "code": code,
        **{name: value for name, value in extra.items() if value not in (None, "", []) or name in NULLABLE},
    }
    response = HttpResponse(json.dumps(body, default=iso), status=status, content_type=CONTENT_TYPE)
    if status == HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = 'Bearer realm="leasehold"'
    if retry_after or status == HTTPStatus.SERVICE_UNAVAILABLE:
        response["Retry-After"] = str(retry_after or RETRY_AFTER)
    return response


def handle(exception: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """DRF's exception handler, for views that go through all of DRF."""
    return respond(exception, context["request"].path)


def _invalid(exception: drf.ValidationError) -> HttpResponse:
    wrong = [{"field": field, "detail": detail} for field, detail in _flat(exception.detail)]
    said = "; ".join(f"{each['field']}: {each['detail']}" if each["field"] else each["detail"] for each in wrong)
    return plain(400, detail=said, field=wrong[0]["field"] if wrong else "", errors=wrong)


def _flat(detail: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """DRF's nested error detail as (dotted field, sentence)."""
    if isinstance(detail, Mapping):
        for name, inner in detail.items():
            yield from _flat(inner, path if name == "non_field_errors" else f"{path}.{name}".strip("."))
    elif isinstance(detail, list | tuple):
        for index, inner in enumerate(detail):
            yield from _flat(inner, f"{path}.{index}" if isinstance(inner, Mapping) and inner else path)
    else:
        yield path, str(detail)
