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
from leases.api.leases import Door
from leases.errors import Invalid, RangeNotSatisfiable
from leases.errors import TooLarge as BodyTooLarge
from sandboxes import files, runs
from sandboxes.models import Sandbox
from sandboxes.providers.base import DATA, WORKSPACE, Provider, Rejected, TooLarge, directory_in, under_roots
from sandboxes.runs import Command
from sandboxes.state import archives
from sandboxes.state.file_reader import Files as Tree
from sandboxes.state.spool import spool
from sandboxes.storage.base import StoreError

LARGEST_FILE = 64 << 20  # bytes of one answer, and of one file that is written
LARGEST_ARCHIVE = 1 << 30
MOST_ENTRIES = 10_000  # of a listing
ARCHIVE_TIMEOUT = timedelta(minutes=10)
CHUNK = 1 << 18
ROOTS = {"workspace": WORKSPACE, "data": DATA}
RANGE = re.compile(r"bytes *= *([0-9]{0,18})-([0-9]{0,18})", re.ASCII | re.IGNORECASE)
SOURCE = "Leasehold-Source"

Range = tuple[int | None, int | None]  # first and last byte; without a first, the last so many
T = TypeVar("T")


class FileDoor(Door):
    def look(self, pk: UUID, root: str, command: Command, act: Callable[[Tree], T]) -> tuple[T, dict[str, str]]:
        """What `act` finds, and the header that says where."""

        def within(want: Any, at: Any) -> tuple[T, str]:
            return files.look(want, root, command, act, now=at, actor=self.actor)

        found, source = execution.for_lease(pk, within, now=self.now, actor=self.actor)
        return found, {SOURCE: source, "X-Content-Type-Options": "nosniff"}

    def change(self, pk: UUID, root: str, command: Command, act: Callable[[Provider, Sandbox], None]) -> HttpResponse:
        """Act in the sandbox, which is woken if it sleeps."""

        def within(provider: Provider, sandbox: Sandbox) -> None:
            if command.argv[0] in ("write", "unpack"):
                runs.require_room(provider, sandbox, now=self.now)
            act(provider, sandbox)

        execution.act_in(pk, command, within, now=self.now, actor=self.actor)
        return HttpResponse(status=204)


class OneFile(FileDoor):
    @extend_schema(
        operation_id="leases_files_get",
        parameters=[schema.ROOT, *schema.FILE_HEADERS],
        responses=schema.answers(schema.BYTES, 402, 404, 409, 410, 413, 416, 429, ok=(200, 206)),
    )
    def get(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        """The content of one file, or of one range of its bytes (`Range: bytes=0-999`, `bytes=1000-` or `bytes=-1000`).
        An answer has at most 64 MiB: a larger file is 413 without a range, and of a larger range the beginning is sent,
        as Content-Range says. A sandbox that sleeps is not woken. HEAD answers the size."""
        root, place = self._place(request, pk, path)
        asked = _range(request)
        act = partial(_part, path=path, asked=asked)
        (content, start, size), headers = self.look(pk, root, _command("read", place, root), act)
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(len(content)), "Content-Disposition": "attachment"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{size}"
        return HttpResponse(content, status=206 if asked else 200, content_type=schema.OCTETS, headers=headers)

    def head(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        root, place = self._place(request, pk, path)
        size, headers = self.look(
            pk, root, _command("size", place, root), lambda tree: tree.read_range(path, start=0, length=0)[1]
        )
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(size)}
        return HttpResponse(content_type=schema.OCTETS, headers=headers)

    @extend_schema(
        operation_id="leases_files_put",
        parameters=[schema.ROOT],
        request=schema.BYTES,
        responses=schema.answers(None, 402, 404, 409, 410, 411, 413, 429, ok=(204,)),
    )
    def put(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        """Replace or make one file, with the directories above it. At most 64 MiB."""
        root, place = self._place(request, pk, path)
        content = request_body.read(request, LARGEST_FILE)

        def write(provider: Provider, sandbox: Sandbox) -> None:
            provider.write_file(sandbox.ref, place, content)

        return self.change(pk, root, _command("write", place, root), write)

    @extend_schema(
        operation_id="leases_files_delete",
        parameters=[schema.ROOT],
        responses=schema.answers(None, 402, 404, 409, 410, 429, ok=(204,)),
    )
    def delete(self, request: HttpRequest, pk: UUID, path: str) -> HttpResponse:
        """Remove one file."""
        root, place = self._place(request, pk, path)

        def remove(provider: Provider, sandbox: Sandbox) -> None:
            provider.remove_file(sandbox.ref, place)

        return self.change(pk, root, _command("remove", place, root), remove)

    def _place(self, request: HttpRequest, pk: UUID, path: str) -> tuple[str, str]:
        self.caller.lease(pk)
        root = _root(request)
        under_roots(f"{root}/{path}")  # before anything is started for it
        return root, f"{root}/{path}"


class Listing(FileDoor):
    @extend_schema(
        operation_id="leases_files_list",
        parameters=[schema.ROOT, schema.DIRECTORY, schema.DEEP, schema.SOURCE_HEADER],
        responses=schema.answers(state.ListingShown, 402, 404, 409, 410, 413, 429),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What is in a directory, by name; at most 10000 entries, and 413 if there are more. A sandbox that sleeps is not
        woken. Of a lease that has had no sandbox yet it is what its first one will begin with: in the workspace
        config.json, in data what the agent has."""
        self.caller.lease(pk)
        root, under = _root(request), _directory(request)
        deep = request.GET.get("deep", "0")
        if deep not in ("0", "1"):
            raise Invalid("deep", "0 or 1.")
        act = partial(_entries, under=under, deep=deep == "1")
        found, headers = self.look(pk, root, _command("list", f"{root}/{under}", root), act)
        return JsonResponse(state.listing_shown(root.removeprefix("/"), under, found), headers=headers)


class Archive(FileDoor):
    @extend_schema(
        operation_id="leases_archive_get",
        parameters=[schema.ROOT, schema.DIRECTORY, schema.SOURCE_HEADER],
        responses=schema.answers(schema.TAR, 402, 404, 409, 410, 413, 429),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        """A directory with all that is below it, as an uncompressed tar. The names in it are relative to the root, also
        when only a directory in it is asked for. A sandbox that sleeps is not woken."""
        self.caller.lease(pk)
        root, under = _root(request), _directory(request)
        # On disk before the first byte is sent: nothing keeps the sandbox running while a slow reader reads, and what
        # fails is a problem document rather than half a tar.
        packed = spool()
        try:
            command = _command("pack", f"{root}/{under}", root, timeout=ARCHIVE_TIMEOUT)
            _, headers = self.look(pk, root, command, partial(_pack, under=under, out=packed))
            size = packed.tell()
            packed.seek(0)
        except BaseException:
            packed.close()
            raise
        name = (under or root).rpartition("/")[2]
        response = StreamingHttpResponse(_sent(packed), content_type=schema.TARS, headers=headers)
        response["Content-Length"] = str(size)
        response["Content-Disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "_", name)}.tar"'
        return response

    @extend_schema(
        operation_id="leases_archive_put",
        parameters=[schema.ROOT],
        request=schema.TAR,
        responses=schema.answers(None, 402, 404, 409, 410, 411, 413, 429, ok=(204,)),
    )
    def put(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Unpack an uncompressed tar over /workspace or /data; what is there under other names stays. At most 1 GiB, and
        100000 files, directories and links. The names in it are relative to the root, and lead nowhere else."""
        self.caller.lease(pk)
        root = _root(request)
        if "path" in request.GET:
            raise Invalid("path", "The names in the tar are relative to the root.")
        with spool() as tar:
            with _on_disk():
                for chunk in request_body.chunks(request, LARGEST_ARCHIVE):
                    tar.write(chunk)
            try:
                archives.check(tar)
            except TooLarge as wrong:
                raise BodyTooLarge(str(wrong), field="body") from None
            except Rejected as wrong:
                raise Invalid("body", str(wrong)) from None

            def unpack(provider: Provider, sandbox: Sandbox) -> None:
                provider.put_files(sandbox.ref, root, tar)

            return self.change(pk, root, _command("unpack", root, root, timeout=ARCHIVE_TIMEOUT), unpack)


# --- what requests say --------------------------------------------------------------------------------------------


def _root(request: HttpRequest) -> str:
    root = ROOTS.get(request.GET.get("root", "workspace"))
    if root is None:
        raise Invalid("root", f"One of {', '.join(ROOTS)}.")
    return root


def _directory(request: HttpRequest) -> str:
    return directory_in(WORKSPACE, request.GET.get("path", ""))


def _range(request: HttpRequest) -> Range | None:
    """The range that is asked for. None, and so the whole, for several of them, for other units, for what is no range,
    and for one that depends on a version of the file (If-Range): we name none."""
    said = RANGE.fullmatch(request.META.get("HTTP_RANGE", "").strip())
    if said is None or "HTTP_IF_RANGE" in request.META:
        return None
    first, last = (int(number) if number else None for number in said.groups())
    if (first is None and last is None) or (first is not None and last is not None and first > last):
        return None
    return first, last


def _command(verb: str, place: str, root: str, *, timeout: timedelta | None = None) -> Command:
    """The Run of an act. /data is brought into the sandbox only for what may see it."""
    return Command(
        argv=[verb, place.removesuffix("/")], kind="file", timeout=timeout or settings.EXEC_TIMEOUT, needs_data=root == DATA
    )


# --- what is looked at --------------------------------------------------------------------------------------------


def _part(tree: Tree, *, path: str, asked: Range | None) -> tuple[bytes, int, int]:
    """The bytes that are answered, where they begin, and the size of the file."""
    if asked is None:
        content, size = tree.read_range(path, start=0, length=LARGEST_FILE)
        if size > LARGEST_FILE:
            raise TooLarge(f"The file has {size} bytes, and an answer at most {LARGEST_FILE}: ask for a range of it.")
        return content, 0, size
    first, last = asked
    if first is None:
        assert last is not None  # one of them is given
        size = tree.read_range(path, start=0, length=0)[1]
        first, length = max(size - last, 0), last
    else:
        length = LARGEST_FILE if last is None else last - first + 1
    content, size = tree.read_range(path, start=first, length=min(length, LARGEST_FILE))
    if not content:
        raise RangeNotSatisfiable(size)
    return content, first, size


def _entries(tree: Tree, *, under: str, deep: bool) -> dict[str, Any]:
    try:
        return dict(tree.look(under, deep=deep, most=MOST_ENTRIES))
    except TooLarge:
        said = f"There are more than {MOST_ENTRIES} entries. Ask for a directory in it, or for its own with deep=0."
        raise TooLarge(said) from None


def _pack(tree: Tree, *, under: str, out: BinaryIO) -> None:
    with _on_disk():
        tree.pack(under, out)


@contextmanager
def _on_disk() -> Iterator[None]:
    """A disk that is full is none of our bugs."""
    try:
        yield
    except UnreadablePostError:
        raise
    except OSError as failed:
        raise StoreError("spool", "write", str(failed)) from failed


def _sent(packed: BinaryIO) -> Iterator[bytes]:
    with closing(packed):
        while chunk := packed.read(CHUNK):
            yield chunk
