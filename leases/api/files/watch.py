"""Changes in a directory of a lease as server-sent events."""

import json
import time
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any
from uuid import UUID

from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema

from leases import leasing
from leases.api.base import schema
from leases.api.base.renderers import encode_json
from leases.api.base.views import ApiRequest
from leases.api.files.base import SOURCE_HEADER_NAME, FileApiView, build_command, parse_directory, parse_root
from leases.api.files.content import list_entries, serialize_entry
from leases.api.streams import EVENT_STREAM, RECONNECT, EventIterator, EventStreamResponse
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import file_watch
from sandboxes.db import database_time
from sandboxes.errors import SandboxError
from sandboxes.file_watch import FileChange, FileWatch, WatchSleep
from sandboxes.files import SOURCE_SANDBOX
from sandboxes.hosts import registry
from sandboxes.models import Sandbox
from sandboxes.pool import allocation
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import TooLarge, Unavailable
from sandboxes.streams import rows
from sandboxes.streams.registry import OPEN_STREAMS, StreamSlot

KEEP_ALIVE_SECONDS = 15.0
WATCH_DESCRIPTION = """Events: `start` (root, path, entries: the number of watched entries), `created` and `modified` (an \
entry as in a listing), `deleted` (name, kind), `gap` (reason: the sandbox was replaced, and changes that leave size, mode and \
time of a file equal are not shown), `asleep` (state: `cold` or `suspended`) and `awake` around a sleep, in which nothing \
changes, and at the end `end` (end_reason) when the lease has ended, or `error` (a problem \
document), such as `file_too_large` above 10000 entries. The directory is listed every second, large ones less often: several \
changes of a file in between are one event, and a file that exists for a shorter time has none. A stream that ends without \
`end` or `error` was interrupted: list the directory and watch again."""


class FileWatchView(FileApiView):
    @extend_schema(
        operation_id="leases_files_watch",
        summary="Watch a directory",
        description="Stream the changes below a directory of at most 10000 entries. The beginning reads the directory like a "
        f"listing. An open watch neither renews the lease nor keeps its sandbox awake. {WATCH_DESCRIPTION}",
        parameters=[schema.ROOT_PARAMETER, schema.WATCHED_PARAMETER],
        responses={(200, EVENT_STREAM): OpenApiTypes.STR} | schema.build_responses(None, 402, 404, 409, 410, 413, 429, ok=()),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponseBase:
        root, under = parse_root(request), parse_directory(request)
        slot = OPEN_STREAMS.open(pk)
        try:
            watch = self._start_watch(pk, root, under)
            return EventStreamResponse(FileWatchEvents(self, pk, watch, slot))
        except BaseException:
            slot.release()
            raise

    def _start_watch(self, pk: UUID, root: str, under: str) -> FileWatch:
        act = partial(list_entries, under=under, deep=True)
        entries, headers = self.read_tree(pk, root, build_command("list", f"{root}/{under}", root=root), act)
        # If the sandbox is replaced between the listing and this query, unchanged files count as modified once.
        sandbox = allocation.find_by_holder(pk) if headers[SOURCE_HEADER_NAME] == SOURCE_SANDBOX else None
        return FileWatch(root, under, entries, sandbox.incarnation if sandbox else None)


class FileWatchEvents(EventIterator):
    """Events of one watch."""

    def __init__(self, view: FileWatchView, lease_id: UUID, watch: FileWatch, slot: StreamSlot) -> None:
        self._view, self._lease_id, self._watch = view, lease_id, watch
        super().__init__(slot, view.right, self._encode_all())

    def _encode_all(self) -> Generator[bytes, None, None]:
        root, under = self._watch.root.removeprefix("/"), self._watch.under
        yield RECONNECT + encode_event("start", {"root": root, "path": under, "entries": len(self._watch.entries)})
        sent_at = time.monotonic()
        while not self._slot.must_end:
            try:
                sandbox, provider = rows.call(_find_sandbox, self._lease_id)
                for change in self._watch.poll(sandbox, provider):
                    yield self._encode_change(change)
                    sent_at = time.monotonic()
            except LeaseEnded as ended:
                yield encode_event("end", {"end_reason": ended.extra.get("end_reason", "")})
                return
            except TooLarge:
                error = TooLarge(f"There are more than {file_watch.MAX_ENTRIES} entries. Watch a subdirectory.")
                yield encode_event("error", self._build_problem(error))
                return
            except SandboxError as error:  # the sandbox is on another host
                yield encode_event("error", self._build_problem(error))
                return
            if time.monotonic() - sent_at >= KEEP_ALIVE_SECONDS:
                yield b": keep-alive\n\n"
                sent_at = time.monotonic()
            self._slot.pause(self._watch.pause_seconds)

    def _encode_change(self, change: object) -> bytes:
        if isinstance(change, WatchSleep):
            return encode_event("asleep", {"state": change.state}) if change.state else encode_event("awake", {})
        if not isinstance(change, FileChange):
            return encode_event("gap", {"reason": "sandbox_replaced"})
        under = self._watch.under
        entry = serialize_entry(change.path[len(under) + bool(under) :], change.stat)
        if change.kind == "deleted":
            entry = {"name": entry["name"], "kind": entry["kind"]}
        return encode_event(change.kind, entry)

    def _build_problem(self, error: Exception) -> dict[str, Any]:
        problem: dict[str, Any] = json.loads(self._view.handle_exception(error).content)
        return problem


def _find_sandbox(lease_id: UUID) -> tuple[Sandbox | None, Provider | None]:
    """Return the sandbox of an active lease and its provider. Raise LeaseEnded, WrongHost."""
    leasing.check_active(Lease.objects.filter(pk=lease_id).first(), now=database_time.now())
    sandbox = allocation.find_by_holder(lease_id)
    if sandbox is None:
        return None, None
    registry.require_local(sandbox)
    try:
        return sandbox, registry.get_sandbox_provider(sandbox)
    except Unavailable:  # the next listing decides
        return sandbox, None


def encode_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Encode one event without an id: a watch cannot be continued. JSON in ASCII has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode_json(data))
