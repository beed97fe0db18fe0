"""MCP endpoint /mcp: streamable HTTP, authenticated by an API key."""

from typing import Any

from django.core.exceptions import DisallowedHost
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import CsrfViewMiddleware
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from leases.api.base.authentication import Caller
from leases.api.base.parsers import read_body
from leases.api.base.views import ApiRequest, ApiView
from leases.errors import HostNotAllowed, McpNotInstalled, OriginNotAllowed

PACKAGES_OF_EXTRA = ("mcp", "mcp_types", "jsonschema")
MAX_BODY_BYTES = 16 << 20  # as an exec: stdin, or a file in base64


class HasAnyKey(BasePermission):
    """The request carries a valid API key. The scopes count for each tool: its request checks them."""

    def has_permission(self, request: Request, view: Any) -> bool:
        return isinstance(request.user, Caller)


class OriginCheck(CsrfViewMiddleware):
    """Origins from which a browser may send requests, as for the admin: that of this server and CSRF_TRUSTED_ORIGINS."""

    def accepts(self, request: HttpRequest) -> bool:
        return bool(self._origin_verified(request))  # type: ignore[attr-defined]


class McpView(ApiView):
    """Model Context Protocol without sessions: each POST is one message, and its answer is JSON."""

    schema = None  # not in the OpenAPI document: the protocol has its own descriptions
    permission_classes = [HasAnyKey]
    key_scope = ""
    http_method_names = ["post"]
    max_body_bytes = MAX_BODY_BYTES

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse requests that a page of another site makes a browser send (DNS rebinding), before authentication."""
        self.require_method(request)
        require_known_host_and_origin(request._request)
        super().initial(request, *args, **kwargs)

    def post(self, request: ApiRequest) -> HttpResponse:
        """Answer one message."""
        try:
            from leases.api.mcp import server  # the package takes 38 MiB: only processes that serve MCP have it
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in PACKAGES_OF_EXTRA:
                raise
            raise McpNotInstalled() from None
        body = read_body(request._request, self.max_body_bytes)
        return server.respond(self, body)


def require_known_host_and_origin(request: HttpRequest) -> None:
    """Raise HostNotAllowed or OriginNotAllowed. A client that is no browser sends no Origin."""
    try:
        request.get_host()
    except DisallowedHost:
        raise HostNotAllowed() from None
    if "HTTP_ORIGIN" in request.META and not OriginCheck(lambda request: HttpResponse()).accepts(request):
        raise OriginNotAllowed()
