"""Streaming downloads of stored files: byte for byte, as attachments, never held in memory."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.utils.http import content_disposition_header

from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin
from sandboxes.state.workspace import CorruptSnapshot
from sandboxes.storage.base import CHUNK_BYTES, StoreError

Download = tuple[Any, int, str]  # open file, length in bytes, file name

# Path separators and reserved characters of any system, terminal controls, bidirectional controls.
UNSAFE_FILENAME_CHARS = re.compile(r'[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069/\\:*?"<>|]')


class ReadableStream(Protocol):
    def read(self, most: int = -1, /) -> bytes: ...


class DownloadStream:
    """Iterator over a source in chunks. Closes its ExitStack when the response ends, also when it ends early."""

    def __init__(self, source: ReadableStream, stack: ExitStack) -> None:
        self._source, self._stack = source, stack

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self._source.read(CHUNK_BYTES):
            yield chunk

    def close(self) -> None:
        self._stack.close()


def build_attachment_response(source: ReadableStream, size: int, name: str, stack: ExitStack) -> StreamingHttpResponse:
    """Build a response that browsers save and do not open. The response closes the stack."""
    response = StreamingHttpResponse(
        DownloadStream(source, stack),
        content_type="application/octet-stream",
        headers={"Content-Length": str(size), "X-Content-Type-Options": "nosniff"},
    )
    response.headers["Content-Disposition"] = (
        content_disposition_header(as_attachment=True, filename=sanitize_filename(name)) or "attachment"
    )
    return response


def sanitize_filename(name: str) -> str:
    """Return a file name that is safe on every system, made from a name that an agent chose."""
    return UNSAFE_FILENAME_CHARS.sub("_", name).strip(". ")[:150] or "file"


class DownloadModelAdmin(ReadOnlyModelAdmin):
    """Pages with downloads of agents' files. Downloading needs a permission beyond viewing the page."""

    def has_read_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.read_agent_data")

    def get_readable_row(self, request: HttpRequest, pk: Any) -> Any:
        """Return the row if the user may download its files. Raise PermissionDenied or Http404 otherwise."""
        if not self.has_read_permission(request):
            raise PermissionDenied
        return get_object_or_404(self.model, pk=pk)

    def send_download(
        self, request: HttpRequest, row: Model, label: str, back: str, read: Callable[[ExitStack], Download]
    ) -> HttpResponseBase:
        """Send the result of `read` and log the download, or redirect to `back` with a message if it cannot be read."""
        with ExitStack() as stack:
            try:
                source, length, name = read(stack)
            except (StoreError, CorruptSnapshot) as error:
                messages.error(request, f"Download failed: {error}")
                return HttpResponseRedirect(back)
            open_resources = stack.pop_all()
        LogEntry.objects.log_actions(request.user.pk, [row], CHANGE, f"Download: {label}")  # type: ignore[arg-type]
        return build_attachment_response(source, length, name, open_resources)
