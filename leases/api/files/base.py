"""Base of the views of a lease's files.

Writes are runs of kind "file", which keep the sandbox running. Reads wake no sandbox: for a cold sandbox they return stored
state. The header Leasehold-Source names the origin."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar
from uuid import UUID, uuid4

from django.conf import settings
from django.http import HttpResponse, UnreadablePostError
from rest_framework.request import Request

from leases import execution
from leases.api.base.views import LeaseApiView
from leases.errors import InvalidRequest
from sandboxes.db import database_time
from sandboxes.models import Sandbox
from sandboxes.providers.arguments import check_directory_path
from sandboxes.providers.base import DATA, WORKSPACE, Provider
from sandboxes.runs.operations import Command
from sandboxes.state.file_tree import FileTree
from sandboxes.storage.base import StoreError

ROOTS = {"workspace": WORKSPACE, "data": DATA}
SOURCE_HEADER_NAME = "Leasehold-Source"
T = TypeVar("T")


class FileApiView(LeaseApiView):
    def read_tree(self, pk: UUID, root: str, command: Command, act: Callable[[FileTree], T]) -> tuple[T, dict[str, str]]:
        """Return the result of `act` on the file tree, and the headers of the response."""
        result, source = execution.read_files(pk, root, command, act, now=self.now, actor=self.actor)
        return result, {SOURCE_HEADER_NAME: source, "X-Content-Type-Options": "nosniff"}

    def change_tree(self, pk: UUID, root: str, command: Command, act: Callable[[Provider, Sandbox], None]) -> HttpResponse:
        """Call `act` in the sandbox, which is started or woken first. Called after the body was read."""
        self.now = database_time.now()
        execution.change_files(pk, command, act, now=self.now, actor=self.actor)
        return HttpResponse(status=204)


def parse_root(request: Request) -> str:
    root = ROOTS.get(request.GET.get("root", "workspace"))
    if root is None:
        raise InvalidRequest("root", f"Must be one of {', '.join(ROOTS)}.")
    return root


def parse_directory(request: Request) -> str:
    return check_directory_path(WORKSPACE, request.GET.get("path", ""))


def build_command(verb: str, *paths: str, root: str, timeout: timedelta | None = None, run_id: UUID | None = None) -> Command:
    """Build the run of a file operation. /data is attached to the sandbox only for operations on it."""
    argv = [verb, *(path.removesuffix("/") for path in paths)]
    needs_data, timeout = root == DATA, timeout or settings.EXEC_TIMEOUT
    return Command(argv, timeout, kind="file", needs_data=needs_data, run_id=run_id or uuid4())


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    """Report a full or failing local disk as StoreError, not as an internal error."""
    try:
        yield
    except UnreadablePostError:
        raise
    except OSError as error:
        raise StoreError("spool", "write", str(error)) from error
