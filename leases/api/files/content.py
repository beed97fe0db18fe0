"""Content of a lease's files: download, upload, deletion, listings."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.parsers import StreamParser
from leases.api.base.views import ApiRequest
from leases.api.files.base import FileApiView, build_command, parse_directory, parse_root
from leases.errors import InvalidRequest, RangeNotSatisfiable
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Sandbox
from sandboxes.providers.arguments import split_sandbox_path
from sandboxes.providers.base import FileStat, Provider
from sandboxes.providers.errors import TooLarge
from sandboxes.state.file_tree import FileTree

MAX_TIMESTAMP = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())
FILE_KINDS = ("file", "directory", "link", "other")
MAX_FILE_BYTES = 64 << 20  # of one response, and of one file written
MAX_LISTING_ENTRIES = 10_000
RANGE_RE = re.compile(r"bytes *= *([0-9]{0,18})-([0-9]{0,18})", re.ASCII | re.IGNORECASE)
ByteRange = tuple[int | None, int | None]  # first and last byte; a first of None: the last n bytes


class FileEntrySerializer(serializers.Serializer):
    name = serializers.CharField(help_text="Path relative to the listed directory. Invalid UTF-8 is replaced.")
    kind = serializers.ChoiceField(FILE_KINDS)
    size = serializers.IntegerField(help_text="Size of a file in bytes; 0 for other kinds.")
    mode = serializers.CharField(help_text="Permission bits, octal.")
    mtime = serializers.DateTimeField()
    target = serializers.CharField(help_text="Target of a link, otherwise empty.")


class FileListingSerializer(serializers.Serializer):
    root = serializers.CharField()  # type: ignore[assignment]
    path = serializers.CharField(help_text="Listed directory; empty for the root.")
    entries = FileEntrySerializer(many=True)


class FileView(FileApiView):
    parser_classes = [StreamParser]
    max_body_bytes = MAX_FILE_BYTES

    @extend_schema(
        operation_id="leases_files_get",
        summary="Download a file",
        parameters=[schema.ROOT_PARAMETER, *schema.FILE_HEADERS],
        responses=schema.build_responses(schema.BINARY_BODY, 402, 404, 409, 410, 413, 416, 429, ok=(200, 206)),
    )
    def get(self, request: ApiRequest, pk: UUID, path: str) -> HttpResponseBase:
        """Return the content of one file, or one range of it (`Range: bytes=0-999`, `bytes=1000-` or `bytes=-1000`).

        A response has at most 64 MiB. A larger file without a range is answered 413; a larger range is truncated, as
        Content-Range shows. HEAD returns the size. A cold sandbox is not woken."""
        root, _ = self._resolve_path(request, path)
        return self.send_file(request, pk, root, path)

    def send_file(self, request: ApiRequest, pk: UUID, root: str, path: str) -> HttpResponse:
        byte_range = _parse_range(request)
        act = partial(_read_range, path=path, byte_range=byte_range)
        (content, start, size), headers = self.read_tree(pk, root, build_command("read", f"{root}/{path}", root=root), act)
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(len(content)), "Content-Disposition": "attachment"}
        if byte_range:
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{size}"
        return HttpResponse(content, status=206 if byte_range else 200, content_type=schema.OCTET_STREAM, headers=headers)

    def head(self, request: ApiRequest, pk: UUID, path: str) -> HttpResponse:
        root, _ = self._resolve_path(request, path)
        return self.send_size(pk, root, path)

    def send_size(self, pk: UUID, root: str, path: str) -> HttpResponse:
        command = build_command("size", f"{root}/{path}", root=root)
        size, headers = self.read_tree(pk, root, command, lambda tree: tree.read_range(path, start=0, length=0)[1])
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(size)}
        return HttpResponse(content_type=schema.OCTET_STREAM, headers=headers)

    @extend_schema(
        operation_id="leases_files_put",
        summary="Upload a file",
        parameters=[schema.ROOT_PARAMETER],
        request=schema.BINARY_BODY,
        responses=schema.build_responses(None, 402, 404, 409, 410, 411, 413, 415, 429, ok=(204,)),
    )
    def put(self, request: ApiRequest, pk: UUID, path: str) -> HttpResponse:
        """Create or replace one file of at most 64 MiB. Missing parent directories are created."""
        root, _ = self._resolve_path(request, path)
        return self.receive_file(request, pk, root, path)

    def receive_file(self, request: ApiRequest, pk: UUID, root: str, path: str) -> HttpResponse:
        self.require_active()
        full_path = f"{root}/{path}"
        content = b"".join(request.data)

        def write(provider: Provider, sandbox: Sandbox) -> None:
            provider.write_file(sandbox.ref, full_path, content)

        return self.change_tree(pk, root, build_command("write", full_path, root=root), write)

    @extend_schema(
        operation_id="leases_files_delete",
        summary="Delete a file",
        parameters=[schema.ROOT_PARAMETER],
        responses=schema.build_responses(None, 402, 404, 409, 410, 429, ok=(204,)),
    )
    def delete(self, request: ApiRequest, pk: UUID, path: str) -> HttpResponse:
        """Delete one file."""
        root, full_path = self._resolve_path(request, path)

        def remove(provider: Provider, sandbox: Sandbox) -> None:
            provider.remove_file(sandbox.ref, full_path)

        return self.change_tree(pk, root, build_command("remove", full_path, root=root), remove)

    def _resolve_path(self, request: ApiRequest, path: str) -> tuple[str, str]:
        root = parse_root(request)
        split_sandbox_path(f"{root}/{path}")  # validate before a sandbox is started
        return root, f"{root}/{path}"


class FileListView(FileApiView):
    @extend_schema(
        operation_id="leases_files_list",
        summary="List files",
        parameters=[schema.ROOT_PARAMETER, schema.DIRECTORY_PARAMETER, schema.DEEP_PARAMETER, schema.SOURCE_HEADER],
        responses=schema.build_responses(FileListingSerializer, 402, 404, 409, 410, 413, 429),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return at most 10000 entries of a directory, by name; 413 if it has more. A cold sandbox is not woken.

        Before the first use of a lease, the listing shows the initial content of its sandbox: config.json in /workspace, the
        agent's files in /data."""
        root, under = parse_root(request), parse_directory(request)
        deep = request.GET.get("deep", "0")
        if deep not in ("0", "1"):
            raise InvalidRequest("deep", "Must be 0 or 1.")
        act = partial(list_entries, under=under, deep=deep == "1")
        entries, headers = self.read_tree(pk, root, build_command("list", f"{root}/{under}", root=root), act)
        return Response(serialize_listing(root.removeprefix("/"), under, entries), headers=headers)


def _parse_range(request: ApiRequest) -> ByteRange | None:
    """Return the requested byte range, or None for the whole file.

    Several ranges, other units, invalid ranges and conditional ranges (If-Range) are ignored: responses carry no version of
    the file."""
    match = RANGE_RE.fullmatch(request.META.get("HTTP_RANGE", "").strip())
    if match is None or "HTTP_IF_RANGE" in request.META:
        return None
    first, last = (int(number) if number else None for number in match.groups())
    if (first is None and last is None) or (first is not None and last is not None and first > last):
        return None
    return first, last


def _read_range(tree: FileTree, *, path: str, byte_range: ByteRange | None) -> tuple[bytes, int, int]:
    """Return the bytes of the response, their offset, and the size of the file."""
    if byte_range is None:
        content, size = tree.read_range(path, start=0, length=MAX_FILE_BYTES)
        if size > MAX_FILE_BYTES:
            raise TooLarge(f"The file has {size} bytes, a response at most {MAX_FILE_BYTES}: request a range.")
        return content, 0, size
    first, last = byte_range
    if first is None:
        assert last is not None  # _parse_range returns at least one of them
        size = tree.read_range(path, start=0, length=0)[1]
        first, length = max(size - last, 0), last
    else:
        length = MAX_FILE_BYTES if last is None else last - first + 1
    content, size = tree.read_range(path, start=first, length=min(length, MAX_FILE_BYTES))
    if not content:
        raise RangeNotSatisfiable(size)
    return content, first, size


def list_entries(tree: FileTree, *, under: str, deep: bool) -> dict[str, Any]:
    try:
        return dict(tree.list_entries(under, deep=deep, limit=MAX_LISTING_ENTRIES))
    except TooLarge:
        raise TooLarge(f"There are more than {MAX_LISTING_ENTRIES} entries. Request a subdirectory, or use deep=0.") from None


def serialize_listing(root: str, under: str, stats: Mapping[str, FileStat]) -> dict[str, Any]:
    start = len(under) + bool(under)
    entries = [serialize_entry(path[start:], stat) for path, stat in sorted(stats.items())]
    return {"root": root, "path": under, "entries": entries}


def serialize_entry(name: str, stat: FileStat) -> dict[str, Any]:
    return {
        "name": _decode_name(name),
        "kind": stat.kind,
        "size": stat.size,
        "mode": f"{stat.mode:04o}",
        "mtime": format_timestamp(datetime.fromtimestamp(min(max(stat.mtime, 0), MAX_TIMESTAMP), UTC)),
        "target": _decode_name(stat.target),
    }


def _decode_name(name: str) -> str:
    """Return a file name as valid Unicode: file names are arbitrary bytes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
