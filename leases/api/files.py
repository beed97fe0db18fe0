"""The door to the files of a lease. What changes them is a Run of kind "file", so nothing takes the sandbox away meanwhile.

What only looks at them wakes nothing: of a sandbox that sleeps it is answered from what is stored, and the header
Leasehold-Source says which it was."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO, TypeVar
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase
from drf_spectacular.utils import extend_schema

from leases import execution
from leases.api import request_body, schema
from leases.api import serializers_state as state
from leases.api.leases import AgentApiView
from leases.errors import InvalidRequest, RangeNotSatisfiable
from leases.errors import RequestTooLarge as BodyTooLarge
from sandboxes import files, runs
from sandboxes.models import Sandbox
from sandboxes.providers import tar_validation
from sandboxes.providers.base import DATA, WORKSPACE, Provider, Rejected, TooLarge, check_directory_path, split_sandbox_path
from sandboxes.runs import Command
from sandboxes.state.file_tree import FileTree as Tree
from sandboxes.state.spool import open_spool
from sandboxes.storage.base import StoreError

MAX_FILE_BYTES = 64 << 20  # bytes of one answer, and of one file that is written
MAX_ARCHIVE_BYTES = 1 << 30
MAX_LISTING_ENTRIES = 10_000  # of a listing
ARCHIVE_TIMEOUT = timedelta(minutes=10)
CHUNK_BYTES = 1 << 18
ROOTS = {"workspace": WORKSPACE, "data": DATA}
RANGE_RE = re.compile(r"bytes *= *([0-9]{0,18})-([0-9]{0,18})", re.ASCII | re.IGNORECASE)
SOURCE_HEADER_NAME = "Leasehold-Source"

ByteRange = tuple[int | None, int | None]  # first and last byte; without a first, the last so many
T = TypeVar("T")


class FileApiView(AgentApiView):
    def look(self, pk: UUID, root: str, command: Command, act: Callable[[Tree], T]) -> tuple[T, dict[str, str]]:
        """What `act` finds, and the header that says where."""
        with execution.use_lease(pk, now=self.now) as wanted:
            found, source = files.read_files(wanted, root, command, act, now=self.now, actor=self.actor)
        return found, {SOURCE_HEADER_NAME: source, "X-Content-Type-Options": "nosniff"}

    def change(self, pk: UUID, root: str, command: Command, act: Callable[[Provider, Sandbox], None]) -> HttpResponse:
        """Act in the sandbox, which is woken if it sleeps."""

        def within(provider: Provider, sandbox: Sandbox) -> None:
            if command.argv[0] in ("write", "unpack"):
                runs.require_workspace_space(provider, sandbox, now=self.now)
            act(provider, sandbox)

        execution.call_in_sandbox(pk, command, within, now=self.now, actor=self.actor)
        return HttpResponse(status=204)


class FileView(FileApiView):
    @extend_schema(
        operation_id="leases_files_get",
        parameters=[schema.ROOT_PARAMETER, *schema.FILE_HEADERS],
        responses=schema.build_responses(schema.BINARY_BODY, 402, 404, 409, 410, 413, 416, 429, ok=(200, 206)),
    )
    def get(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        """The content of one file, or of one range of its bytes (`Range: bytes=0-999`, `bytes=1000-` or `bytes=-1000`).
        An answer has at most 64 MiB: a larger file is 413 without a range, and of a larger range the beginning is sent,
        as Content-Range says. A sandbox that sleeps is not woken. HEAD answers the size."""
        root, place = self._place(request, pk, path)
        asked = _parse_range(request)
        act = partial(_read_range, path=path, asked=asked)
        (content, start, size), headers = self.look(pk, root, _build_command("read", place, root), act)
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(len(content)), "Content-Disposition": "attachment"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{size}"
        return HttpResponse(content, status=206 if asked else 200, content_type=schema.OCTET_STREAM, headers=headers)

    def head(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        root, place = self._place(request, pk, path)
        size, headers = self.look(
            pk, root, _build_command("size", place, root), lambda tree: tree.read_range(path, start=0, length=0)[1]
        )
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(size)}
        return HttpResponse(content_type=schema.OCTET_STREAM, headers=headers)

    @extend_schema(
        operation_id="leases_files_put",
        parameters=[schema.ROOT_PARAMETER],
        request=schema.BINARY_BODY,
        responses=schema.build_responses(None, 402, 404, 409, 410, 411, 413, 429, ok=(204,)),
    )
    def put(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        """Replace or make one file, with the directories above it. At most 64 MiB."""
        root, place = self._place(request, pk, path)
        content = request_body.read_body(request, MAX_FILE_BYTES)

        def write(provider: Provider, sandbox: Sandbox) -> None:
            provider.write_file(sandbox.ref, place, content)

        return self.change(pk, root, _build_command("write", place, root), write)

    @extend_schema(
        operation_id="leases_files_delete",
        parameters=[schema.ROOT_PARAMETER],
        responses=schema.build_responses(None, 402, 404, 409, 410, 429, ok=(204,)),
    )
    def delete(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        """Remove one file."""
        root, place = self._place(request, pk, path)

        def remove(provider: Provider, sandbox: Sandbox) -> None:
            provider.remove_file(sandbox.ref, place)

        return self.change(pk, root, _build_command("remove", place, root), remove)

    def _place(self, request: HttpRequest, pk: UUID, path: str) -> tuple[str, str]:
        self.caller.lease(pk)
        root = _parse_root(request)
        split_sandbox_path(f"{root}/{path}")  # before anything is started for it
        return root, f"{root}/{path}"


class FileListView(FileApiView):
    @extend_schema(
        operation_id="leases_files_list",
        parameters=[schema.ROOT_PARAMETER, schema.DIRECTORY_PARAMETER, schema.DEEP_PARAMETER, schema.SOURCE_HEADER],
        responses=schema.build_responses(state.FileListingSerializer, 402, 404, 409, 410, 413, 429),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What is in a directory, by name; at most 10000 entries, and 413 if there are more. A sandbox that sleeps is not
        woken. Of a lease that has had no sandbox yet it is what its first one will begin with: in the workspace
        config.json, in data what the agent has."""
        self.caller.lease(pk)
        root, under = _parse_root(request), _parse_directory(request)
        deep = request.GET.get("deep", "0")
        if deep not in ("0", "1"):
            raise InvalidRequest("deep", "0 or 1.")
        act = partial(_list_entries, under=under, deep=deep == "1")
        found, headers = self.look(pk, root, _build_command("list", f"{root}/{under}", root), act)
        return JsonResponse(state.serialize_listing(root.removeprefix("/"), under, found), headers=headers)


class ArchiveView(FileApiView):
    @extend_schema(
        operation_id="leases_archive_get",
        parameters=[schema.ROOT_PARAMETER, schema.DIRECTORY_PARAMETER, schema.SOURCE_HEADER],
        responses=schema.build_responses(schema.TAR_BODY, 402, 404, 409, 410, 413, 429),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        """A directory with all that is below it, as an uncompressed tar. The names in it are relative to the root, also
        when only a directory in it is asked for. A sandbox that sleeps is not woken."""
        self.caller.lease(pk)
        root, under = _parse_root(request), _parse_directory(request)
        # On disk before the first byte is sent: nothing keeps the sandbox running while a slow reader reads, and what
        # fails is a problem document rather than half a tar.
        packed = open_spool()
        try:
            command = _build_command("pack", f"{root}/{under}", root, timeout=ARCHIVE_TIMEOUT)
            _, headers = self.look(pk, root, command, partial(_pack_directory, under=under, out=packed))
            size = packed.tell()
            packed.seek(0)
        except BaseException:
            packed.close()
            raise
        name = (under or root).rpartition("/")[2]
        response = StreamingHttpResponse(_stream_and_close(packed), content_type=schema.TAR_MEDIA_TYPE, headers=headers)
        response["Content-Length"] = str(size)
        response["Content-Disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "_", name)}.tar"'
        return response

    @extend_schema(
        operation_id="leases_archive_put",
        parameters=[schema.ROOT_PARAMETER],
        request=schema.TAR_BODY,
        responses=schema.build_responses(None, 402, 404, 409, 410, 411, 413, 429, ok=(204,)),
    )
    def put(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Unpack an uncompressed tar over /workspace or /data; what is there under other names stays. At most 1 GiB, and
        100000 files, directories and links. The names in it are relative to the root, and lead nowhere else."""
        self.caller.lease(pk)
        root = _parse_root(request)
        if "path" in request.GET:
            raise InvalidRequest("path", "The names in the tar are relative to the root.")
        with open_spool() as tar:
            with _translate_disk_errors():
                for chunk in request_body.iter_body(request, MAX_ARCHIVE_BYTES):
                    tar.write(chunk)
            try:
                tar_validation.validate_tar(tar)
            except TooLarge as wrong:
                raise BodyTooLarge(str(wrong), field="body") from None
            except Rejected as wrong:
                raise InvalidRequest("body", str(wrong)) from None

            def unpack(provider: Provider, sandbox: Sandbox) -> None:
                provider.put_files(sandbox.ref, root, tar)

            return self.change(pk, root, _build_command("unpack", root, root, timeout=ARCHIVE_TIMEOUT), unpack)


# --- what requests say --------------------------------------------------------------------------------------------


def _parse_root(request: HttpRequest) -> str:
    root = ROOTS.get(request.GET.get("root", "workspace"))
    if root is None:
        raise InvalidRequest("root", f"One of {', '.join(ROOTS)}.")
    return root


def _parse_directory(request: HttpRequest) -> str:
    return check_directory_path(WORKSPACE, request.GET.get("path", ""))


def _parse_range(request: HttpRequest) -> ByteRange | None:
    """The range that is asked for. None, and so the whole, for several of them, for other units, for what is no range,
    and for one that depends on a version of the file (If-Range): we name none."""
    said = RANGE_RE.fullmatch(request.META.get("HTTP_RANGE", "").strip())
    if said is None or "HTTP_IF_RANGE" in request.META:
        return None
    first, last = (int(number) if number else None for number in said.groups())
    if (first is None and last is None) or (first is not None and last is not None and first > last):
        return None
    return first, last


def _build_command(verb: str, place: str, root: str, *, timeout: timedelta | None = None) -> Command:
    """The Run of an act. /data is brought into the sandbox only for what may see it."""
    return Command(
        argv=[verb, place.removesuffix("/")], kind="file", timeout=timeout or settings.EXEC_TIMEOUT, needs_data=root == DATA
    )


# --- what is looked at --------------------------------------------------------------------------------------------


def _read_range(tree: Tree, *, path: str, asked: ByteRange | None) -> tuple[bytes, int, int]:
    """The bytes that are answered, where they begin, and the size of the file."""
    if asked is None:
        content, size = tree.read_range(path, start=0, length=MAX_FILE_BYTES)
        if size > MAX_FILE_BYTES:
            raise TooLarge(f"The file has {size} bytes, and an answer at most {MAX_FILE_BYTES}: ask for a range of it.")
        return content, 0, size
    first, last = asked
    if first is None:
        assert last is not None  # one of them is given
        size = tree.read_range(path, start=0, length=0)[1]
        first, length = max(size - last, 0), last
    else:
        length = MAX_FILE_BYTES if last is None else last - first + 1
    content, size = tree.read_range(path, start=first, length=min(length, MAX_FILE_BYTES))
    if not content:
        raise RangeNotSatisfiable(size)
    return content, first, size


def _list_entries(tree: Tree, *, under: str, deep: bool) -> dict[str, Any]:
    try:
        return dict(tree.list_entries(under, deep=deep, limit=MAX_LISTING_ENTRIES))
    except TooLarge:
        said = f"There are more than {MAX_LISTING_ENTRIES} entries. Ask for a directory in it, or for its own with deep=0."
        raise TooLarge(said) from None


def _pack_directory(tree: Tree, *, under: str, out: BinaryIO) -> None:
    with _translate_disk_errors():
        tree.pack(under, out)


@contextmanager
def _translate_disk_errors() -> Iterator[None]:
    """A disk that is full is none of our bugs."""
    try:
        yield
    except UnreadablePostError:
        raise
    except OSError as failed:
        raise StoreError("spool", "write", str(failed)) from failed


def _stream_and_close(packed: BinaryIO) -> Iterator[bytes]:
    with closing(packed):
        while chunk := packed.read(CHUNK_BYTES):
            yield chunk
