"""Archives of a lease's files: a directory as one tar, optionally compressed by gzip."""

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import BinaryIO
from uuid import UUID

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema

from leases.api.base import schema
from leases.api.base.parsers import StreamParser
from leases.api.base.views import ApiRequest
from leases.api.files.base import FileApiView, build_command, parse_directory, parse_root, translate_disk_errors
from leases.api.files.compression import GZIP_MEDIA_TYPE, accepts_gzip, compress, decompress, is_gzip_upload
from leases.errors import InvalidRequest
from leases.errors import RequestTooLarge as BodyTooLarge
from sandboxes.claims import track_transfer
from sandboxes.models import Sandbox
from sandboxes.providers import tar_validation
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import Rejected, TooLarge
from sandboxes.state.file_tree import FileTree
from sandboxes.state.spool import open_spool

MAX_ARCHIVE_BYTES = 1 << 30
ARCHIVE_TIMEOUT = timedelta(minutes=10)
CHUNK_BYTES = 1 << 18


class ArchiveView(FileApiView):
    parser_classes = [StreamParser]
    max_body_bytes = MAX_ARCHIVE_BYTES
    decodes_bodies = True

    @extend_schema(
        operation_id="leases_archive_get",
        summary="Download a directory as tar",
        parameters=[schema.ROOT_PARAMETER, schema.DIRECTORY_PARAMETER, schema.COMPRESSION_PARAMETER, schema.SOURCE_HEADER],
        responses=schema.build_responses(schema.TAR_BODY, 402, 404, 409, 410, 413, 429)
        | {(200, GZIP_MEDIA_TYPE): OpenApiTypes.BINARY},
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponseBase:
        """Return a directory and its descendants as a tar. A cold sandbox is not woken.

        Names in the tar are relative to the root, even with a `path`. With `compression=gzip`, or `Accept: application/gzip`
        without that parameter, the answer is a gzip stream of the tar (application/gzip) without a Content-Length."""
        root, under, is_gzip = parse_root(request), parse_directory(request), accepts_gzip(request)
        # Spooled to disk before the first byte is sent: a slow client does not keep the sandbox running, and a failure is
        # answered with a problem document instead of a truncated tar.
        spool = open_spool(for_request=True)
        try:
            command = build_command("pack", f"{root}/{under}", root=root, timeout=ARCHIVE_TIMEOUT)
            _, headers = self.read_tree(pk, root, command, partial(_pack_directory, under=under, out=spool))
            size = spool.tell()
            spool.seek(0)
        except BaseException:
            spool.close()
            raise
        name = (under or root).rpartition("/")[2]
        chunks = self.iter_while_permitted(_stream_and_close(spool))
        response = StreamingHttpResponse(compress(chunks) if is_gzip else chunks, headers=headers)
        response["Content-Type"] = GZIP_MEDIA_TYPE if is_gzip else schema.TAR_MEDIA_TYPE
        response["Vary"] = "Accept"
        if not is_gzip:
            response["Content-Length"] = str(size)
        suffix = ".tar.gz" if is_gzip else ".tar"
        response["Content-Disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "_", name)}{suffix}"'
        return response

    @extend_schema(
        operation_id="leases_archive_put",
        summary="Upload a directory as tar",
        parameters=[schema.ROOT_PARAMETER],
        request=schema.TAR_BODY | {GZIP_MEDIA_TYPE: OpenApiTypes.BINARY},
        responses=schema.build_responses(None, 402, 404, 409, 410, 411, 413, 415, 429, ok=(204,)),
    )
    def put(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Unpack a tar over /workspace or /data. Existing files under other names stay.

        At most 1 GiB and 100000 files, directories and links. Names in the tar are relative to the root and must not lead
        outside it. With `Content-Type: application/gzip` or `Content-Encoding: gzip` the body is decompressed; the limit holds
        for the tar."""
        root, is_gzip = parse_root(request), is_gzip_upload(request)
        if "path" in request.GET:
            raise InvalidRequest("path", "Not accepted here: the names in the tar are relative to the root.")
        self.require_active()
        with open_spool(for_request=True) as tar:
            with translate_disk_errors():
                for chunk in decompress(request.data, max_bytes=MAX_ARCHIVE_BYTES) if is_gzip else request.data:
                    tar.write(chunk)
            try:
                tar_validation.validate_tar(tar)
            except TooLarge as error:
                raise BodyTooLarge(str(error), field="body") from None
            except Rejected as error:
                raise InvalidRequest("body", str(error)) from None

            def unpack(provider: Provider, sandbox: Sandbox) -> None:
                provider.put_files(sandbox.ref, root, track_transfer(tar))

            return self.change_tree(pk, root, build_command("unpack", root, root=root, timeout=ARCHIVE_TIMEOUT), unpack)


def _pack_directory(tree: FileTree, *, under: str, out: BinaryIO) -> None:
    with translate_disk_errors():
        tree.pack(under, out)


def _stream_and_close(spool: BinaryIO) -> Iterator[bytes]:
    with closing(spool):
        while chunk := spool.read(CHUNK_BYTES):
            yield chunk
