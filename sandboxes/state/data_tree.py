"""An agent's data as a tree: what lies in a directory, what lies below it, and what paths may be in it."""

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
    """A name in a directory; of another directory, with everything that is below it."""

    name: str
    path: str
    files: int  # regular ones, at and below it
    size_bytes: int
    changed_at: datetime
    row: DataFile | None  # its own version; none if only what is below it was stored

    @property
    def kind(self) -> str:
        return self.row.kind if self.row else DIRECTORY

    @property
    def holder(self) -> uuid.UUID | None:
        """The lease that wrote it; of a directory, none: others have written what is in it."""
        return self.row.holder if self.row and self.kind != DIRECTORY else None


def find_live_files(data: AgentData) -> QuerySet[DataFile]:
    return DataFile.objects.filter(data=data, removed=False)


def find_files_below(data: AgentData, path: str) -> QuerySet[DataFile]:
    """Everything under a directory; "" is the topmost. Compared by character: databases fold case, or skip signs, when
    they look for a beginning."""
    start = f"{path}/" if path else ""
    return (
        find_live_files(data).annotate(start=Substr("path", 1, len(start))).filter(start=start)
        if start
        else find_live_files(data)
    )


def list_directory(data: AgentData, path: str, *, after: str = "", most: int | None = None) -> list[DirectoryEntry]:
    """The names in a directory, in order, those that come later than `after`, and not more than `most`.

    Two queries, whatever it holds: one adds up what is below each name, one reads what those names themselves are."""
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
    found = list((names.filter(name__gt=after) if after else names)[:most])
    own = DataFile.objects.in_bulk([each["own"] for each in found if each["own"]])
    above = f"{path}/" if path else ""
    return [
        DirectoryEntry(each["name"], above + each["name"], each["files"], each["size"], each["changed"], own.get(each["own"]))
        for each in found
    ]


def list_single_file(row: DataFile | None) -> list[DirectoryEntry]:
    """A file or link as the only line of a listing; nothing for a directory."""
    if row is None or row.kind == DIRECTORY:
        return []
    return [DirectoryEntry(row.path.rpartition("/")[2], row.path, int(row.kind == "file"), row.size_bytes, row.at, row)]


def describe_path_error(path: str) -> str:
    """Why an agent's data can have no such path; "" if it can."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        return 'a path is relative to /data, and has no empty part, no "." and no ".."'
    if why := describe_text_error(path):
        return why
    return f"a path has at most {MAX_PATH_BYTES} bytes" if len(path.encode()) > MAX_PATH_BYTES else ""


def describe_text_error(text: str) -> str:
    """Why a path, or what a link points to, cannot be kept; "" if it can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "names are UTF-8"
    return "names have no NUL" if "\0" in text else ""
