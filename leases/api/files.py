"""Files of a lease: read, write, list, archive.

Writes are runs of kind "file", which keep the sandbox running. Reads wake no sandbox: for a cold sandbox they return stored
state. The header Leasehold-Source names the origin."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, BinaryIO, TypeVar
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse, StreamingHttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import execution
from leases.api.base import schema
from leases.api.base.parsers import StreamParser
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.errors import InvalidRequest, RangeNotSatisfiable
from leases.errors import RequestTooLarge as BodyTooLarge
from sandboxes import files
from sandboxes.claims import track_transfer
from sandboxes.db import database_time
from sandboxes.db.clock import clock_from, format_timestamp
from sandboxes.models import Sandbox
from sandboxes.providers import tar_validation
from sandboxes.providers.arguments import check_directory_path, split_sandbox_path
from sandboxes.providers.base import DATA, WORKSPACE, FileStat, Provider, Rejected, TooLarge
from sandboxes.runs import workspace_limit
from sandboxes.runs.operations import Command
from sandboxes.state.file_tree import FileTree
from sandboxes.state.spool import open_spool
from sandboxes.storage.base import StoreError

MAX_TIMESTAMP = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())
FILE_KINDS = ("file", "directory", "link", "other")
MAX_FILE_BYTES = 64 << 20  # of one response, and of one file written
MAX_ARCHIVE_BYTES = 1 << 30
MAX_LISTING_ENTRIES = 10_000
ARCHIVE_TIMEOUT = timedelta(minutes=10)
CHUNK_BYTES = 1 << 18
ROOTS = {"workspace": WORKSPACE, "data": DATA}
RANGE_RE = re.compile(r"bytes *= *([0-9]{0,18})-([0-9]{0,18})", re.ASCII | re.IGNORECASE)
SOURCE_HEADER_NAME = "Leasehold-Source"


ByteRange = tuple[int | None, int | None]  # first and last byte; a first of None: the last n bytes


T = TypeVar("T")


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


class FileApiView(LeaseApiView):
    def read_tree(self, pk: UUID, root: str, command: Command, act: Callable[[FileTree], T]) -> tuple[T, dict[str, str]]:
        """Return the result of `act` on the file tree, and the headers of the response."""
        clock = clock_from(self.now)
        with execution.use_lease(pk, now=self.now) as sandbox_request:
            result, source = files.read_files(sandbox_request, root, command, act, now=clock(), actor=self.actor)
        return result, {SOURCE_HEADER_NAME: source, "X-Content-Type-Options": "nosniff"}

    def change_tree(self, pk: UUID, root: str, command: Command, act: Callable[[Provider, Sandbox], None]) -> HttpResponse:
        """Call `act` in the sandbox, which is started or woken first. Called after the body was read."""
        self.now = database_time.now()
        clock = clock_from(self.now)

        def check_space_and_act(provider: Provider, sandbox: Sandbox) -> None:
            if command.argv[0] in ("write", "unpack"):
                workspace_limit.require_workspace_space(provider, sandbox, now=clock())
            act(provider, sandbox)

        execution.call_in_sandbox(pk, command, check_space_and_act, now=self.now, actor=self.actor)
        return HttpResponse(status=204)


class FileView(FileApiView):
    parser_classes = [StreamParser]
    max_body_bytes = MAX_FILE_BYTES

    @extend_schema(
        operation_id="leases_files_get",
        summary="Download a file",
        parameters=[schema.ROOT_PARAMETER, *schema.FILE_HEADERS],
        responses=schema.build_responses(schema.BINARY_BODY, 402, 404, 409, 410, 413, 416, 429, ok=(200, 206)),
    )
    def get(self, request: ApiRequest, pk: UUID, path: str) -> HttpResponse:
        """Return the content of one file, or one range of it (`Range: bytes=0-999`, `bytes=1000-` or `bytes=-1000`).

        A response has at most 64 MiB. A larger file without a range is answered 413; a larger range is truncated, as
        Content-Range shows. HEAD returns the size. A cold sandbox is not woken."""
        root, full_path = self._resolve_path(request, path)
        byte_range = _parse_range(request)
        act = partial(_read_range, path=path, byte_range=byte_range)
        (content, start, size), headers = self.read_tree(pk, root, _build_command("read", full_path, root), act)
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(len(content)), "Content-Disposition": "attachment"}
        if byte_range:
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{size}"
        return HttpResponse(content, status=206 if byte_range else 200, content_type=schema.OCTET_STREAM, headers=headers)

    def head(self, request: ApiRequest, pk: UUID, path: str) -> HttpResponse:
        root, full_path = self._resolve_path(request, path)
        size, headers = self.read_tree(
            pk, root, _build_command("size", full_path, root), lambda tree: tree.read_range(path, start=0, length=0)[1]
        )
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(size)}
        return HttpResponse(content_type=schema.OCTET_STREAM, headers=headers)

    @extend_schema(
        operation_id="leases_files_put",
        summary="Upload a file",
        parameters=[schema.ROOT_PARAMETER],
        request=schema.BINARY_BODY,
        responses=schema.build_responses(None, 402, 404, 409, 410, 411, 413, 429, ok=(204,)),
    )
    def put(self, request: ApiRequest, pk: UUID, path: str) -> HttpResponse:
        """Create or replace one file of at most 64 MiB. Missing parent directories are created."""
        root, full_path = self._resolve_path(request, path)
        self.require_active()
        content = b"".join(request.data)

        def write(provider: Provider, sandbox: Sandbox) -> None:
            provider.write_file(sandbox.ref, full_path, content)

        return self.change_tree(pk, root, _build_command("write", full_path, root), write)

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

        return self.change_tree(pk, root, _build_command("remove", full_path, root), remove)

    def _resolve_path(self, request: ApiRequest, path: str) -> tuple[str, str]:
        root = _parse_root(request)
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
        root, under = _parse_root(request), _parse_directory(request)
        deep = request.GET.get("deep", "0")
        if deep not in ("0", "1"):
            raise InvalidRequest("deep", "Must be 0 or 1.")
        act = partial(_list_entries, under=under, deep=deep == "1")
        entries, headers = self.read_tree(pk, root, _build_command("list", f"{root}/{under}", root), act)
        return Response(serialize_listing(root.removeprefix("/"), under, entries), headers=headers)


class ArchiveView(FileApiView):
    parser_classes = [StreamParser]
    max_body_bytes = MAX_ARCHIVE_BYTES

    @extend_schema(
        operation_id="leases_archive_get",
        summary="Download a directory as tar",
        parameters=[schema.ROOT_PARAMETER, schema.DIRECTORY_PARAMETER, schema.SOURCE_HEADER],
        responses=schema.build_responses(schema.TAR_BODY, 402, 404, 409, 410, 413, 429),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponseBase:
        """Return a directory and its descendants as an uncompressed tar. A cold sandbox is not woken.

        Names in the tar are relative to the root, even with a `path`."""
        root, under = _parse_root(request), _parse_directory(request)
        # Spooled to disk before the first byte is sent: a slow client does not keep the sandbox running, and a failure is
        # answered with a problem document instead of a truncated tar.
        spool = open_spool(for_request=True)
        try:
            command = _build_command("pack", f"{root}/{under}", root, timeout=ARCHIVE_TIMEOUT)
            _, headers = self.read_tree(pk, root, command, partial(_pack_directory, under=under, out=spool))
            size = spool.tell()
            spool.seek(0)
        except BaseException:
            spool.close()
            raise
        name = (under or root).rpartition("/")[2]
        response = StreamingHttpResponse(_stream_and_close(spool), content_type=schema.TAR_MEDIA_TYPE, headers=headers)
        response["Content-Length"] = str(size)
        response["Content-Disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "_", name)}.tar"'
        return response

    @extend_schema(
        operation_id="leases_archive_put",
        summary="Upload a directory as tar",
        parameters=[schema.ROOT_PARAMETER],
        request=schema.TAR_BODY,
        responses=schema.build_responses(None, 402, 404, 409, 410, 411, 413, 429, ok=(204,)),
    )
    def put(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Unpack an uncompressed tar over /workspace or /data. Existing files under other names stay.

        At most 1 GiB and 100000 files, directories and links. Names in the tar are relative to the root and must not lead
        outside it."""
        root = _parse_root(request)
        if "path" in request.GET:
            raise InvalidRequest("path", "Not accepted here: the names in the tar are relative to the root.")
        self.require_active()
        with open_spool(for_request=True) as tar:
            with _translate_disk_errors():
                for chunk in request.data:
                    tar.write(chunk)
            try:
                tar_validation.validate_tar(tar)
            except TooLarge as error:
                raise BodyTooLarge(str(error), field="body") from None
            except Rejected as error:
                raise InvalidRequest("body", str(error)) from None

            def unpack(provider: Provider, sandbox: Sandbox) -> None:
                provider.put_files(sandbox.ref, root, track_transfer(tar))

            return self.change_tree(pk, root, _build_command("unpack", root, root, timeout=ARCHIVE_TIMEOUT), unpack)


def _parse_root(request: ApiRequest) -> str:
    root = ROOTS.get(request.GET.get("root", "workspace"))
    if root is None:
        raise InvalidRequest("root", f"Must be one of {', '.join(ROOTS)}.")
    return root


def _parse_directory(request: ApiRequest) -> str:
    return check_directory_path(WORKSPACE, request.GET.get("path", ""))


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


def _build_command(verb: str, path: str, root: str, *, timeout: timedelta | None = None) -> Command:
    """Build the run of a file operation. /data is attached to the sandbox only for operations on it."""
    return Command(
        argv=[verb, path.removesuffix("/")], kind="file", timeout=timeout or settings.EXEC_TIMEOUT, needs_data=root == DATA
    )


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


def _list_entries(tree: FileTree, *, under: str, deep: bool) -> dict[str, Any]:
    try:
        return dict(tree.list_entries(under, deep=deep, limit=MAX_LISTING_ENTRIES))
    except TooLarge:
        raise TooLarge(f"There are more than {MAX_LISTING_ENTRIES} entries. Request a subdirectory, or use deep=0.") from None


def _pack_directory(tree: FileTree, *, under: str, out: BinaryIO) -> None:
    with _translate_disk_errors():
        tree.pack(under, out)


@contextmanager
def _translate_disk_errors() -> Iterator[None]:
    """Report a full or failing local disk as StoreError, not as an internal error."""
    try:
        yield
    except UnreadablePostError:
        raise
    except OSError as error:
        raise StoreError("spool", "write", str(error)) from error


def _stream_and_close(spool: BinaryIO) -> Iterator[bytes]:
    with closing(spool):
        while chunk := spool.read(CHUNK_BYTES):
            yield chunk


def serialize_listing(root: str, under: str, stats: Mapping[str, FileStat]) -> dict[str, Any]:
    start = len(under) + bool(under)
    entries = [_serialize_entry(path[start:], stat) for path, stat in sorted(stats.items())]
    return {"root": root, "path": under, "entries": entries}


def _serialize_entry(name: str, stat: FileStat) -> dict[str, Any]:
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
