"""WSGI application around Django's: renewals without Django's request handling, and complete bodies in one piece."""

import re
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import UUID

from django.conf import settings
from django.core.handlers.wsgi import WSGIRequest
from django.db import Error as DatabaseError
from django.db import close_old_connections
from django.http import HttpResponse
from django.middleware.security import SecurityMiddleware

from controlplane.middleware import ContentSecurityPolicyMiddleware
from leases.api.base.renderers import JsonRenderer
from leases.api.base.views import GIVEN_PATH
from leases.api.leases import renew_plainly

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

RENEW_PATH = re.compile(r"/api/v1/leases/([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/renew")


class Application:
    """Application of the web server.

    Renewals are the most frequent requests. One that a single statement can answer takes none of the steps of Django's handler:
    signals, middleware, URL resolver, request and response objects. They cost as much as the statement. Every other request,
    and every refusal, is Django's. Measured by tests/bench/rates.py.

    A complete body is returned as a list, which granian sends at once, with its length. granian iterates over any other body in
    further calls, and sends chunks."""

    def __init__(self, django_application: Callable[..., Any]) -> None:
        self._django_application = django_application
        self._renewal_headers = _build_headers("/api/v1/leases")

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if renewal := _renew(environ):
            start_response("200 OK", self._renewal_headers)
            return [renewal]
        environ[GIVEN_PATH] = environ["PATH_INFO"]
        response = self._django_application(environ, start_response)
        if response.streaming:
            return response
        body = [response.content]
        response.close()
        return body


def _renew(environ: "WSGIEnvironment") -> bytes | None:
    """Return the body of the answer to a renewal; None if Django has to answer, also after an error of the database."""
    match = RENEW_PATH.fullmatch(environ["PATH_INFO"])
    if match is None:
        return None
    close_old_connections()  # Django does so at the start of each request
    try:
        return renew_plainly(environ, UUID(match[1]))
    except DatabaseError:
        return None


def _build_headers(path: str) -> list[tuple[str, str]]:
    """Return the headers that the middleware gives every successful JSON response under a path."""
    scheme = urlsplit(settings.PUBLIC_URL).scheme or "http"
    request = WSGIRequest({"REQUEST_METHOD": "GET", "PATH_INFO": path, "wsgi.input": BytesIO(), "wsgi.url_scheme": scheme})
    respond = ContentSecurityPolicyMiddleware(lambda request: HttpResponse(content_type=JsonRenderer.media_type))
    response: Any = SecurityMiddleware(respond)(request)
    return list(response.items())
