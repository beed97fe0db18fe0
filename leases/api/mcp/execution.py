"""Execution of a tool at /mcp: a request of the HTTP API in the thread of the outer request."""

from io import BytesIO
from typing import Any
from urllib.parse import urlencode

from django.core.handlers.wsgi import WSGIRequest
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve

from leases.api.base.views import ApiView
from leases.api.mcp.api_tool import ApiTool, Subrequest
from leases.errors import InvalidRequest
from sandboxes.mcp.arguments import find_argument_error, omit_nulls
from sandboxes.mcp.tools import Tool, ToolResult

SHARED_VARIABLES = (
    "SERVER_NAME", "SERVER_PORT", "SERVER_PROTOCOL", "REMOTE_ADDR", "HTTP_HOST", "HTTP_AUTHORIZATION", "HTTP_X_FORWARDED_FOR",
    "HTTP_X_FORWARDED_PROTO", "SCRIPT_NAME", "wsgi.url_scheme", "wsgi.errors",
)  # fmt: skip


def execute_tool(view: ApiView, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """Execute a tool with the key of the view's request. An error of the arguments is a problem document as well."""
    assert isinstance(tool, ApiTool)
    try:
        arguments = omit_nulls(tool, arguments)
        if error := find_argument_error(tool, arguments):
            raise InvalidRequest(*error)
        subrequest = tool.build_request(arguments, view.caller)
        return tool.read_response(arguments, send_subrequest(view.request._request, subrequest))
    except (InvalidRequest, Http404) as failed:
        handle = view.get_exception_handler()
        return tool.read_response(arguments, handle(failed, view.get_exception_handler_context()))


def send_subrequest(outer: HttpRequest, subrequest: Subrequest) -> HttpResponseBase:
    """Send a request to the HTTP API in this thread, with the key of the outer request. Raises Http404 for an unknown path."""
    path = f"/api/v1/{subrequest.path}"
    environ: dict[str, Any] = {name: outer.META[name] for name in SHARED_VARIABLES if name in outer.META}
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in subrequest.headers.items()}
    environ |= {
        "REQUEST_METHOD": subrequest.method, "PATH_INFO": path.encode().decode("latin-1"),
        "QUERY_STRING": urlencode(subrequest.query), "CONTENT_TYPE": subrequest.content_type,
        "CONTENT_LENGTH": str(len(subrequest.body)), "wsgi.input": BytesIO(subrequest.body), "wsgi.input_terminated": True,
    }  # fmt: skip
    try:
        view, args, kwargs = resolve(path)
    except Resolver404:
        raise Http404 from None
    response: HttpResponseBase = view(WSGIRequest(environ), *args, **kwargs)
    render = getattr(response, "render", None)
    return render() if render else response
