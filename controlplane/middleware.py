"""HTTP middleware: sessions and CSRF for the admin only, problem documents, content security policy."""

from collections.abc import Callable
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth.middleware import AuthenticationMiddleware
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.exceptions import DisallowedHost, MiddlewareNotUsed
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.middleware.common import CommonMiddleware
from django.middleware.csrf import CsrfViewMiddleware

from controlplane import errors
from leases.api.base import schema
from leases.errors import InvalidRequest
from sandboxes.db import tracing

GetResponse = Callable[[HttpRequest], HttpResponseBase]
API_PATH_PREFIXES = ("/api/", "/mcp")
API_DOCUMENT_PATHS = ("/api/schema", "/api/docs")
STATELESS_PATH_PREFIXES = (*API_PATH_PREFIXES, "/healthz", "/readyz", "/livez", "/metrics")

ADMIN_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)  # unsafe-eval: the admin uses Alpine.js, which evaluates attributes
API_POLICY = "default-src 'none'; frame-ancestors 'none'"
DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # unsafe-inline: Swagger UI sets style attributes


class _SkipStatelessPaths:
    """Mixin before a Django middleware: requests under STATELESS_PATH_PREFIXES bypass it."""

    get_response: Any

    def __call__(self, request: HttpRequest) -> Any:
        if request.path_info.startswith(STATELESS_PATH_PREFIXES):
            return self.get_response(request)
        return super().__call__(request)  # type: ignore[misc]


class AdminSessionMiddleware(_SkipStatelessPaths, SessionMiddleware):
    pass


class AdminCommonMiddleware(_SkipStatelessPaths, CommonMiddleware):
    pass


class AdminCsrfMiddleware(_SkipStatelessPaths, CsrfViewMiddleware):
    def process_view(self, request: HttpRequest, *args: Any) -> Any:
        return None if request.path_info.startswith(STATELESS_PATH_PREFIXES) else super().process_view(request, *args)


class AdminAuthenticationMiddleware(_SkipStatelessPaths, AuthenticationMiddleware):
    pass


class AdminMessageMiddleware(_SkipStatelessPaths, MessageMiddleware):
    pass


class ProblemDocumentMiddleware:
    """Turn every response under /api/ with status 400 or above into a problem document, unknown URLs and crashes included.

    The errors of the protocol at /mcp are JSON-RPC messages, which stay."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        if not request.path_info.startswith("/api/") or response.status_code < 400:
            return response
        if response.headers.get("Content-Type", "").startswith(errors.CONTENT_TYPE):
            return response
        problem = errors.build_problem_response(response.status_code, find_operation(request))
        for name in response.headers.keys() - {"Content-Length"}:
            problem.headers.setdefault(name, response.headers[name])
        return problem

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Build the response before Django's debug page can show a stack trace to an agent."""
        if not request.path_info.startswith(API_PATH_PREFIXES):
            return None
        return errors.build_error_response(exception, request.path_info, find_operation(request))


class PublicAddressMiddleware:
    """Give every request the scheme and host of LEASEHOLD_PUBLIC_URL, in place of those of its headers.

    Signed URLs, redirects, Secure cookies, HSTS and the check of Origin and Referer then follow the setting. Before, a host
    name that is not this server's is refused under /api/, as Django does for pages. /mcp and pages refuse it themselves."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        public = urlsplit(settings.PUBLIC_URL)
        if public.scheme:
            request.META["wsgi.url_scheme"] = public.scheme
        try:
            request.get_host()
        except DisallowedHost:
            if request.path_info.startswith("/api/"):
                refused = InvalidRequest("Host", "This host name is not one of the server (ALLOWED_HOSTS).")
                return errors.build_error_response(refused, request.path_info, request.method or "")
        else:
            if public.netloc:
                request.META["HTTP_HOST"] = public.netloc
        return self.get_response(request)


def find_operation(request: HttpRequest) -> str:
    """Return the id of the operation that serves a request, else the HTTP method. For errors outside of a view."""
    method, match = request.method or "", request.resolver_match
    view_class = getattr(match.func, "view_class", None) if match else None
    if match is None or view_class is None:
        return method
    view = view_class()
    view.setup(request, *match.args, **match.kwargs)
    return schema.find_operation_id(view, method) or method


class TraceContextMiddleware:
    """Pass the trace of the client (`traceparent`) to the spans of this request. Active only if traces are sent."""

    def __init__(self, get_response: GetResponse) -> None:
        if not settings.OTLP_ENDPOINT:
            raise MiddlewareNotUsed
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        token = tracing.caller_trace.set(request.headers.get("traceparent", "")[:100])
        try:
            return self.get_response(request)
        finally:
            tracing.caller_trace.reset(token)


class AnonymousRequestLimitMiddleware:
    """Limit the requests in progress whose sender has proved no identity to a quarter of the threads of a process.

    The operations of the API check a key or a signature first, and answer at once without one. /livez always answers."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response
        self.places = BoundedSemaphore(max(1, settings.WEB_THREADS // 4))

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if is_identified(request):
            return self.get_response(request)
        if not self.places.acquire(blocking=False):
            text = "Too many requests without a sign-in or a key are in progress. Try again in a moment.\n"
            return HttpResponse(text, status=503, content_type="text/plain", headers={"Retry-After": "1"})
        try:
            return self.get_response(request)
        finally:
            self.places.release()


def is_identified(request: HttpRequest) -> bool:
    """Return whether a request is of a user who is signed in, or checks its sender's identity by itself."""
    path = request.path_info
    if path == "/livez" or (path.startswith(API_PATH_PREFIXES) and path not in API_DOCUMENT_PATHS):
        return True
    has_session = settings.SESSION_COOKIE_NAME in request.COOKIES and not path.startswith(STATELESS_PATH_PREFIXES)
    return has_session and request.user.is_authenticated


class ContentSecurityPolicyMiddleware:
    """Set the Content-Security-Policy: an admin page loads from its own origin only, an API response loads nothing."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        path = request.path_info
        policy = DOCS_POLICY if path == "/api/docs" else API_POLICY if path.startswith(API_PATH_PREFIXES) else ADMIN_POLICY
        response.headers.setdefault("Content-Security-Policy", policy)
        return response
