"""Queries over an agent's data as a directory tree, and the rules for its paths."""

import uuid
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Case, Count, F, Max, Q, QuerySet, Sum, TextField, Value, When
from django.db.models.functions import Coalesce, Left, StrIndex, Substr

from sandboxes.models.state import AgentData, DataFile
from sandboxes.state.changes import MAX_PATH_BYTES

DIRECTORY = "directory"


@dataclass(frozen=True)
class DirectoryEntry:
    """A name in a directory listing. Totals of a directory include everything below it."""

    name: str
    path: str
    files: int  # regular files at and below the path
    size_bytes: int
    changed_at: datetime
    row: DataFile | None  # None if only paths below it are stored

    @property
    def kind(self) -> str:
        return self.row.kind if self.row else DIRECTORY

    @property
    def holder(self) -> uuid.UUID | None:
        """The lease that wrote the path; None for a directory, whose content may have several writers."""
        return self.row.holder if self.row and self.kind != DIRECTORY else None


def find_live_files(data: AgentData) -> QuerySet[DataFile]:
    return DataFile.objects.filter(data=data, removed=False)


def find_files_below(data: AgentData, path: str) -> QuerySet[DataFile]:
    """Return all live paths below a directory; "" is the root.

    Compares a substring instead of LIKE, which is case-insensitive on SQLite and has wildcard characters."""
    start = f"{path}/" if path else ""
    return (
        find_live_files(data).annotate(start=Substr("path", 1, len(start))).filter(start=start)
        if start
        else find_live_files(data)
    )


def list_directory(data: AgentData, path: str, *, after: str = "", limit: int | None = None) -> list[DirectoryEntry]:
    """List the names of a directory in order, at most `limit` names that sort after `after`.

    Takes two queries for any size: one aggregates the paths below each name, one reads the rows of the names themselves."""
    start = len(path) + 1 if path else 0
    rest = Substr("path", start + 1, output_field=TextField())
    slash = StrIndex(F("rest"), Value("/"))
    name = Case(When(slash=0, then=F("rest")), default=Left("rest", F("slash") - 1), output_field=TextField())
    names = (
        find_files_below(data, path)
        .annotate(rest=rest, slash=slash, name=name)
        .order_by("name")
        .values("name")
        .annotate(
            own=Max("pk", filter=Q(slash=0)),
            files=Count("pk", filter=Q(kind="file")),
            size=Coalesce(Sum("size_bytes"), 0),
            changed=Max("at"),
        )
    )
    groups = list((names.filter(name__gt=after) if after else names)[:limit])
    own = DataFile.objects.in_bulk([group["own"] for group in groups if group["own"]])
    prefix = f"{path}/" if path else ""
    return [
        DirectoryEntry(
            group["name"], prefix + group["name"], group["files"], group["size"], group["changed"], own.get(group["own"])
        )
        for group in groups
    ]


def list_single_file(row: DataFile | None) -> list[DirectoryEntry]:
    """Return a file or link as a listing of one entry; an empty list for a directory."""
    if row is None or row.kind == DIRECTORY:
        return []
    return [DirectoryEntry(row.path.rpartition("/")[2], row.path, int(row.kind == "file"), row.size_bytes, row.at, row)]


def describe_path_error(path: str) -> str:
    """Return the reason why a path is not valid in an agent's data; "" if it is."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        return 'a path must be relative to /data, without empty, "." or ".." elements'
    if reason := describe_text_error(path):
        return reason
    return f"a path has at most {MAX_PATH_BYTES} bytes" if len(path.encode()) > MAX_PATH_BYTES else ""


def describe_text_error(text: str) -> str:
    """Return the reason why a path or link target cannot be stored; "" if it can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "names must be UTF-8"
    return "names must not contain NUL" if "\0" in text else ""
