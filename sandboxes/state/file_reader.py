"""Files to look at, wherever they lie: what a sandbox that sleeps would have in it, read from what is stored.

Nothing is woken for that, and every answer is the one that the sandbox would give."""

import io
import shutil
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import BinaryIO, Protocol
from uuid import UUID

from sandboxes.image.files import list_path_prefixes
from sandboxes.models.state import AgentData, DataFile, DataStorageMode
from sandboxes.providers.base import (
    DATA,
    WORKSPACE,
    BadPath,
    FileStat,
    NoSuchFile,
    Provider,
    TooLarge,
    check_directory_path,
    split_sandbox_path,
)
from sandboxes.providers.docker.host_files import is_plain_tar
from sandboxes.state import pull, workspace
from sandboxes.state.spool import FileSlice

MAX_ENTRIES = 100_000  # entries of a stored copy that are held in memory
CHUNK_BYTES = 1 << 20
IMPLICIT_DIRECTORY = FileStat("directory", 0o755, 0, 0, "")  # one of which only what is in it was stored


class Unreadable(Exception):
    """What is stored cannot be read from outside. Whoever wants to know what is in it has to wake the sandbox."""


class Reader(Protocol):
    def read(self, most: int = -1, /) -> bytes: ...


class FileTree(ABC):
    """What is below /workspace or /data. Paths are relative to that, and errors are those of the port to providers."""

    @abstractmethod
    def read_range(self, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        """At most `length` bytes of one regular file from `start`, and the size of all of it."""

    @abstractmethod
    def look(self, under: str, *, deep: bool, most: int) -> dict[str, FileStat]:
        """What is below a directory, "" being the topmost, by its path."""

    @abstractmethod
    def pack(self, under: str, out: BinaryIO) -> None:
        """Write a tar of a directory, with all that is below it."""


class LiveFiles(FileTree):
    """In a sandbox, as it is now."""

    def __init__(self, provider: Provider, ref: str, root: str) -> None:
        self.provider, self.ref, self.root = provider, ref, root

    def read_range(self, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        return self.provider.read_range(self.ref, f"{self.root}/{path}", start=start, length=length)

    def look(self, under: str, *, deep: bool, most: int) -> dict[str, FileStat]:
        return self.provider.manifest(self.ref, self.root, under=under, deep=deep, max_entries=most)

    def pack(self, under: str, out: BinaryIO) -> None:
        only = [under, *self.look(under, deep=True, most=MAX_ENTRIES)] if under else None
        for chunk in self.provider.get_files(self.ref, self.root, only=only):
            out.write(chunk)


class StoredFiles(FileTree):
    """In the store, known by its entries."""

    def __init__(self, root: str, entries: Mapping[str, FileStat]) -> None:
        self.root, self.entries = root, dict(entries)
        for path in entries:
            for directory in [*list_path_prefixes(path)][:-1]:
                self.entries.setdefault(directory, IMPLICIT_DIRECTORY)

    @abstractmethod
    def content(self, path: str, start: int, stack: ExitStack) -> Reader:
        """The bytes of a regular file that is there, from `start` on."""

    def read_range(self, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        split_sandbox_path(f"{self.root}/{path}")
        found = self._found(path)
        if found.kind != "file":
            raise BadPath(f"{path} is no regular file")
        if not length or start >= found.size:
            return b"", found.size
        with ExitStack() as stack:
            return self.content(path, start, stack).read(length), found.size

    def look(self, under: str, *, deep: bool, most: int) -> dict[str, FileStat]:
        depth = under.count("/") + bool(under)
        found = {path: stat for path, stat in self._below(under).items() if deep or path.count("/") == depth}
        if len(found) > most:
            raise TooLarge(f"there are more than {most} files here")
        return found

    def pack(self, under: str, out: BinaryIO) -> None:
        chosen = self._below(under) | ({under: self.entries[under]} if under else {})
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK_BYTES) as tar:
            for path in sorted(chosen):
                stat, member = chosen[path], tarfile.TarInfo(path)
                member.mode, member.mtime = stat.mode, stat.mtime
                with ExitStack() as stack:
                    if stat.kind == "file":
                        member.size = stat.size
                        tar.addfile(member, self.content(path, 0, stack))
                    else:
                        member.type = tarfile.DIRTYPE if stat.kind == "directory" else tarfile.SYMTYPE
                        member.linkname = stat.target
                        tar.addfile(member)
                tar.members = []  # type: ignore[attr-defined]  # else it remembers every one

    def _below(self, under: str) -> dict[str, FileStat]:
        if check_directory_path(self.root, under) and self._found(under).kind != "directory":
            raise BadPath(f"{under} is no directory")
        start = f"{under}/" if under else ""
        return {path: stat for path, stat in self.entries.items() if path.startswith(start)}

    def _found(self, path: str) -> FileStat:
        for above in [*list_path_prefixes(path)][:-1]:
            if self.entries.get(above, IMPLICIT_DIRECTORY).kind != "directory":
                raise BadPath(f"on the way to {path} is a link or no directory")
        if path not in self.entries:
            raise NoSuchFile(f"there is no file {path}")
        return self.entries[path]


class StoredWorkspace(StoredFiles):
    """The newest snapshot, and over it what the next use writes before it does anything else."""

    def __init__(self, tar: BinaryIO | None, written: Mapping[str, bytes], *, now: datetime) -> None:
        self.tar, self.written, self.content_offsets = tar, written, dict[str, int]()
        entries = self._index(tar) if tar else {}
        moment = int(now.timestamp())
        entries |= {path: FileStat("file", 0o644, len(content), moment, "") for path, content in written.items()}
        super().__init__(WORKSPACE, entries)

    def content(self, path: str, start: int, stack: ExitStack) -> Reader:
        if path in self.written:
            return io.BytesIO(self.written[path][start:])
        assert self.tar is not None  # else nothing else is there
        return FileSlice(self.tar, self.content_offsets[path] + start, self.entries[path].size - start)

    def pack(self, under: str, out: BinaryIO) -> None:
        if self.tar and not under and not self.written:
            self.tar.seek(0)
            shutil.copyfileobj(self.tar, out, CHUNK_BYTES)
        else:
            super().pack(under, out)

    def _index(self, tar: BinaryIO) -> dict[str, FileStat]:
        if not is_plain_tar(tar):
            raise Unreadable("it is no plain tar")
        entries: dict[str, FileStat] = {}
        with tarfile.open(fileobj=tar, mode="r:") as members:
            for member in members:
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if ".." in parts or len(entries) > MAX_ENTRIES:
                    raise Unreadable("it has names that lead out of it, or too many")
                path = "/".join(parts)
                kind = "file" if member.isreg() else "directory" if member.isdir() else "link"
                if path:
                    mode, size = member.mode & 0o777, member.size if kind == "file" else 0
                    entries[path] = FileStat(kind, mode, size, int(member.mtime), "", member.linkname)
                    self.content_offsets[path] = member.offset_data
                members.members = []  # type: ignore[attr-defined]  # else it remembers every one
        return entries


class StoredData(StoredFiles):
    """An agent's data, as it was last stored."""

    def __init__(self, rows: Mapping[str, DataFile], *, now: datetime) -> None:
        self.rows, self.now = rows, now
        super().__init__(
            DATA,
            {
                path: FileStat(row.kind, row.mode, row.size_bytes, row.mtime, str(row.revision), row.target)
                for path, row in rows.items()
            },
        )

    def content(self, path: str, start: int, stack: ExitStack) -> Reader:
        found = pull.fetch_contents([self.rows[path]], stack, now=self.now)[path]
        found.at += start
        return found

    def pack(self, under: str, out: BinaryIO) -> None:
        chosen = self._below(under) | ({under: IMPLICIT_DIRECTORY} if under else {})
        pull.write_tar([self.rows[path] for path in chosen if path in self.rows], out, now=self.now)


@contextmanager
def open_workspace(holder: UUID, first: Mapping[str, bytes], *, now: datetime) -> Iterator[FileTree]:
    """What a wake would find in /workspace. `first` is what is written before the first use, by absolute path: it is there
    already unless the newest copy is another lease's, or there is none."""
    newest = workspace.find_latest(holder)
    written = {path.removeprefix(f"{WORKSPACE}/"): content for path, content in first.items()}
    with ExitStack() as stack:
        if newest is None:
            yield StoredWorkspace(None, written, now=now)
            return
        try:
            tar, _ = stack.enter_context(workspace.open_snapshot(newest, now=now))
        except workspace.CorruptSnapshot as bad:
            raise Unreadable(str(bad)) from bad
        yield StoredWorkspace(tar, {} if workspace.is_own(newest) else written, now=now)


@contextmanager
def open_data(agent_did: str, *, now: datetime) -> Iterator[FileTree]:
    """What is stored of an agent's /data."""
    data = AgentData.objects.filter(agent_did=agent_did).first()
    if data and data.keeping != DataStorageMode.SYNC:
        raise Unreadable("it is not kept in the store")
    rows = DataFile.objects.filter(data=data, removed=False).select_related("stored_in", "data") if data else ()
    yield StoredData({row.path: row for row in rows}, now=now)
