"""Tools that are requests of the HTTP API, with the same validation, permissions and errors."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from leases.api.base.authentication import Caller
from leases.errors import InvalidRequest
from sandboxes.mcp.tools import Tool, ToolResult

PATH_ARGUMENT_RE = re.compile(r"\{(\w+)\}")

Arguments = dict[str, Any]


@dataclass
class Subrequest:
    """Request of the HTTP API below /api/v1/."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    content_type: str = ""


@dataclass(frozen=True)
class ApiTool(Tool):
    """Tool that sends one request.

    Arguments named in `path` and `query` go there, `idempotency_key` into its header, and all others into the JSON body.
    `adapt` replaces arguments before that, and `read` makes the result of a successful response."""

    method: str = field(default="GET", kw_only=True)
    path: str = field(default="", kw_only=True)  # with names of arguments in braces
    query: tuple[str, ...] = field(default=(), kw_only=True)
    adapt: Callable[[Arguments, Caller], Arguments] = field(default=lambda arguments, caller: arguments, kw_only=True)
    build: Callable[["ApiTool", Arguments], Subrequest] = field(default=lambda tool, rest: tool.build_json(rest), kw_only=True)
    read: Callable[[Arguments, HttpResponse], Mapping[str, Any]] = field(
        default=lambda arguments, response: read_json(response), kw_only=True
    )

    @property
    def path_arguments(self) -> list[str]:
        return PATH_ARGUMENT_RE.findall(self.path)

    @property
    def body_arguments(self) -> set[str]:
        return self.arguments.keys() - {*self.path_arguments, *self.query, "idempotency_key"}

    def build_request(self, arguments: Arguments, caller: Caller) -> Subrequest:
        """Return the request of a call whose arguments match the schema. Raises InvalidRequest."""
        return self.build(self, self.adapt(dict(arguments), caller))

    def build_json(self, rest: Arguments) -> Subrequest:
        request = Subrequest(self.method, self.fill_path(rest))
        request.query = {name: _format_query_value(rest.pop(name)) for name in self.query if name in rest}
        if key := rest.pop("idempotency_key", ""):
            request.headers["Idempotency-Key"] = key
        if self.method == "POST":
            request.body, request.content_type = json.dumps(rest).encode(), "application/json"
        return request

    def fill_path(self, rest: Arguments) -> str:
        """Return the path, and remove its arguments from `rest`. Only the last one, a path of a file, may contain slashes."""
        values = {name: rest.pop(name) for name in self.path_arguments}
        for name, value in values.items():
            if not value or (name != "path" and "/" in value):
                raise InvalidRequest(name, "Must be neither empty nor contain a slash.")
        return self.path.format(**values)

    def read_response(self, arguments: Arguments, response: HttpResponseBase) -> ToolResult:
        assert isinstance(response, HttpResponse)
        if response.status_code >= 400:
            return ToolResult(json.loads(response.content), is_error=True)
        return ToolResult(self.read(arguments, response))


def read_json(response: HttpResponse) -> dict[str, Any]:
    """Return the JSON object of a response, with the cursor of the next page in place of its URL."""
    body: dict[str, Any] = json.loads(response.content)
    if "next" in body and "results" in body:
        url = body.pop("next")
        body["next_cursor"] = parse_qs(urlsplit(url).query)["cursor"][0] if url else None
    return body


def _format_query_value(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
