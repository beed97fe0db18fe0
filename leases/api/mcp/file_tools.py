"""File tools: the content of a file is an argument or a result, and a body of the HTTP API."""

import re
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from leases.api.base.authentication import Caller
from leases.api.base.fields import decode_input, encode_output
from leases.api.files.base import ROOTS
from leases.api.mcp.api_tool import ApiTool, Arguments, Subrequest
from leases.errors import InvalidRequest
from sandboxes.mcp.tools import ToolResult

DEFAULT_READ_BYTES, MAX_READ_BYTES = 256 << 10, 4 << 20  # of one call: models and clients hold a result in memory
MAX_WRITE_BYTES = 8 << 20  # of one call: less than the body of a message in base64
CONTENT_RANGE_RE = re.compile(r"bytes (?:\*|\d+-\d+)/(\d+)")


def split_absolute_path(arguments: Arguments, caller: Caller) -> Arguments:
    """Replace an absolute path by its base directory and the path below. Raise InvalidRequest for one elsewhere."""
    path = arguments.get("path", "")
    if not path.startswith("/"):
        return arguments
    base, _, below = path[1:].partition("/")
    if base not in ROOTS or "root" in arguments:
        raise InvalidRequest("path", f"Must be relative to root, or, without root, below {' or '.join(ROOTS.values())}.")
    return {**arguments, "root": base, "path": below}


def build_file_read(tool: ApiTool, rest: Arguments) -> Subrequest:
    offset, length = rest.pop("offset", 0), rest.pop("length", DEFAULT_READ_BYTES)
    rest.pop("encoding", None)
    request = tool.build_json(rest)
    request.headers["Range"] = f"bytes={offset}-{offset + length - 1}"
    return request


def build_file_write(tool: ApiTool, rest: Arguments) -> Subrequest:
    content = decode_input(rest.pop("content"), rest.pop("encoding", "utf-8"), "content")
    if len(content) > MAX_WRITE_BYTES:
        raise InvalidRequest(
            "content", f"A call writes at most {MAX_WRITE_BYTES} bytes. PUT /leases/{{id}}/files accepts more."
        )
    request = tool.build_json(rest)
    request.body, request.content_type = content, "application/octet-stream"
    return request


def read_file_content(arguments: Arguments, response: HttpResponse) -> dict[str, Any]:
    """Return a part of a file. The text of a part may begin or end inside a character; those bytes are replaced."""
    match = CONTENT_RANGE_RE.fullmatch(response.headers.get("Content-Range", ""))
    offset, content = arguments.get("offset", 0), response.content
    size = int(match[1]) if match else len(content)
    end = offset + len(content)
    encoding = arguments.get("encoding", "utf-8")
    return {
        "content": encode_output(content, encoding), "encoding": encoding, "offset": offset, "size_bytes": size,
        "next_offset": end if end < size else None,
    }  # fmt: skip


@dataclass(frozen=True)
class FileReadTool(ApiTool):
    """Reading at the end of a file is an empty result, also for an empty file, where the HTTP API answers 416."""

    def read_response(self, arguments: Arguments, response: HttpResponseBase) -> ToolResult:
        assert isinstance(response, HttpResponse)
        match = CONTENT_RANGE_RE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status_code == 416 and match and arguments.get("offset", 0) == int(match[1]):
            response.content = b""
            return ToolResult(self.read(arguments, response))
        return super().read_response(arguments, response)


def read_file_written(arguments: Arguments, response: HttpResponse) -> dict[str, Any]:
    content = decode_input(arguments["content"], arguments.get("encoding", "utf-8"), "content")
    return {"path": arguments["path"], "size_bytes": len(content)}
