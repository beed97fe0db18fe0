"""The one table: domain error -> status. Every error leaves as a problem document (RFC 9457):
{type, title, status, detail, code} and, where one is at fault, {field} or {errors: [{field, detail}]}."""

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import structlog
from django.core.exceptions import PermissionDenied as DjangoPermissionDenied
from django.core.exceptions import RequestDataTooBig
from django.db import OperationalError
from django.http import Http404, HttpResponse
from rest_framework import exceptions as drf
from rest_framework.response import Response

from leases import errors as leases
from sandboxes import errors as sandboxes
from sandboxes.providers import base as provider

log = structlog.get_logger(__name__)
CONTENT_TYPE = "application/problem+json"

STATUS: dict[type[Exception], int] = {
    leases.Invalid: 400,
    leases.LeaseEnded: 410,
    leases.Conflict: 409,
    leases.TurnOpen: 409,
    leases.TooMany: 429,
    sandboxes.Busy: 409,
    sandboxes.NotHeld: 409,
    sandboxes.IllegalTransition: 409,
    sandboxes.CapacityExhausted: 503,
    sandboxes.NotReady: 503,
    sandboxes.ProviderFailed: 503,
    sandboxes.Lost: 410,
    provider.NoFile: 404,
    provider.BadPath: 400,
    provider.TooLarge: 413,
    provider.Rejected: 400,
    provider.Unavailable: 503,
    provider.Missing: 410,
}
CODES = {
    400: "invalid", 401: "unauthenticated", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    406: "not_acceptable", 409: "conflict", 413: "too_large", 415: "unsupported_media_type", 429: "rate_limited",
    500: "internal", 503: "unavailable",
}  # fmt: skip


def problem(status: int, detail: str, *, code: str = "", **extra: Any) -> dict[str, Any]:
    """The body of a problem document."""
    code = code or CODES.get(status, "error")
    title = code.replace("_", " ").capitalize()
    return {"type": f"urn:leasehold:problem:{code}", "title": title, "status": status, "detail": detail, "code": code, **extra}


def plain(status: int, *, detail: str = "", headers: Mapping[str, str] | None = None, **extra: Any) -> HttpResponse:
    """A problem document outside of DRF."""
    body = problem(status, detail or f"{HTTPStatus(status).phrase}.", **extra)
    kept = {name: value for name, value in (headers or {}).items() if value}
    return HttpResponse(json.dumps(body), status=status, content_type=CONTENT_TYPE, headers=kept)


def unexpected(exception: Exception, path: str) -> HttpResponse:
    """What a client sees of a bug: that there was one."""
    if isinstance(exception, RequestDataTooBig):
        return plain(413, detail="The body is too large.")
    if isinstance(exception, OperationalError):  # the database is gone or locked for too long: not the client's fault
        log.error("database", path=path, error=str(exception))
        return plain(503, detail="The database did not answer.", code="unavailable", headers={"Retry-After": "5"})
    log.exception("unexpected", path=path, exc_info=exception)
    return plain(500, detail="This is a bug in the control plane. It was logged.")


def handle(exception: Exception, context: Mapping[str, Any]) -> Response | None:
    """DRF's exception handler. None lets Problems.process_exception answer for what is not in the table."""
    status, body, headers = _answer(exception)
    if status is None:
        return None
    response = Response(body, status=status, headers=headers)
    response.content_type = CONTENT_TYPE
    return response


def _answer(exception: Exception) -> tuple[int | None, dict[str, Any], dict[str, str]]:
    for kind, status in STATUS.items():
        if isinstance(exception, kind):
            wait = getattr(exception, "retry_after", None)
            extra = dict(getattr(exception, "extra", {}))
            if isinstance(exception, provider.ProviderError):
                extra["field"] = "path"
            code = getattr(exception, "code", "")
            headers = {"Retry-After": str(wait)} if wait else {}
            return status, problem(status, str(exception), code=code, **extra), headers
    if isinstance(exception, Http404):
        return 404, problem(404, "There is nothing here."), {}
    if isinstance(exception, DjangoPermissionDenied):
        return 403, problem(403, "This is not allowed."), {}
    if isinstance(exception, drf.ValidationError):
        wrong = [{"field": field, "detail": detail} for field, detail in _flat(exception.detail)]
        said = "; ".join(f"{each['field']}: {each['detail']}" if each["field"] else each["detail"] for each in wrong)
        return 400, problem(400, said, field=wrong[0]["field"] if wrong else "", errors=wrong), {}
    if isinstance(exception, drf.APIException):
        status = exception.status_code
        headers = {}
        if header := getattr(exception, "auth_header", None):
            headers["WWW-Authenticate"] = header
        if wait := getattr(exception, "wait", None):
            headers["Retry-After"] = str(int(wait))
        return status, problem(status, str(exception.detail)), headers
    return None, {}, {}


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
