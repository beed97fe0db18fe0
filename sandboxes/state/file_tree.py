"""Readable file trees below /workspace and /data: of a live sandbox, or from the store while the sandbox sleeps.

Reading from the store wakes no sandbox. Results and errors equal those of the live sandbox."""

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import BinaryIO, NamedTuple, Protocol
from uuid import UUID

from sandboxes.image.files import UNLIMITED, list_path_prefixes
from sandboxes.models.state import AgentData, DataFile, DataStorageMode
from sandboxes.providers.arguments import check_directory_path, split_sandbox_path
from sandboxes.providers.base import DATA, WORKSPACE, FileStat, Provider
from sandboxes.providers.errors import BadPath, NoSuchFile, TooLarge
from sandboxes.state import disk_space, pull, workspace
from sandboxes.state.exact_tars import is_exact_tar
from sandboxes.state.spool import FileSlice, SparseSlice

MAX_ENTRIES = 100_000  # entries of a stored copy, all held in memory
CHUNK_BYTES = 1 << 20
IMPLICIT_DIRECTORY = FileStat("directory", 0o755, 0, 0, "")  # a directory without an entry of its own


class Unreadable(Exception):
    """The stored copy cannot be read outside a sandbox. The caller has to wake the sandbox to read it."""


class Reader(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class FileTree(ABC):
    """Files below /workspace or /data. Paths are relative to that directory; errors are those of the provider port."""

    @abstractmethod
    def read_range(self, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        """Return at most `length` bytes of a regular file from offset `start`, and the file's size."""

    @abstractmethod
    def list_entries(self, under: str, *, deep: bool, limit: int) -> dict[str, FileStat]:
        """Return the entries below a directory by path; "" is the root. Raise TooLarge above `limit` entries.

        Without `deep` only the directory's own entries are returned."""

    @abstractmethod
    def pack(self, under: str, out: BinaryIO) -> None:
        """Write a tar of a directory and everything below it. Raise TooLarge if it exceeds the limit of its root."""


class LiveFiles(FileTree):
    """Files of a running sandbox. A tar of them has at most `max_tar_bytes`."""

    def __init__(self, provider: Provider, ref: str, root: str, *, max_tar_bytes: int) -> None:
        self.provider, self.ref, self.root, self.max_tar_bytes = provider, ref, root, max_tar_bytes

    def read_range(self, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        return self.provider.read_range(self.ref, f"{self.root}/{path}", start=start, length=length)

    def list_entries(self, under: str, *, deep: bool, limit: int) -> dict[str, FileStat]:
        return self.provider.manifest(self.ref, self.root, under=under, deep=deep, max_entries=limit)

    def pack(self, under: str, out: BinaryIO) -> None:
        only = [under, *self.list_entries(under, deep=True, limit=MAX_ENTRIES)] if under else None
        chunks = self.provider.get_files(self.ref, self.root, only=only, max_bytes=self.max_tar_bytes)
        for chunk in disk_space.check_while_writing(chunks):
            out.write(chunk)


class StoredFiles(FileTree):
    """Files in the store, with their entries held in memory."""

    def __init__(self, root: str, entries: Mapping[str, FileStat]) -> None:
        self.root, self.entries = root, dict(entries)
        for path in entries:
            for directory in [*list_path_prefixes(path)][:-1]:
                self.entries.setdefault(directory, IMPLICIT_DIRECTORY)

    @abstractmethod
    def content(self, path: str, start: int, stack: ExitStack) -> Reader:
        """Open a regular file at offset `start`. `stack` closes it."""

    def read_range(self, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        split_sandbox_path(f"{self.root}/{path}")
        entry = self._find(path)
        if entry.kind != "file":
            raise BadPath(f"{path} is not a regular file")
        if not length or start >= entry.size:
            return b"", entry.size
        with ExitStack() as stack:
            return self.content(path, start, stack).read(length), entry.size

    def list_entries(self, under: str, *, deep: bool, limit: int) -> dict[str, FileStat]:
        depth = under.count("/") + bool(under)
        entries = {path: stat for path, stat in self._below(under).items() if deep or path.count("/") == depth}
        if len(entries) > limit:
            raise TooLarge(f"there are more than {limit} entries")
        return entries

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
                tar.members = []  # type: ignore[attr-defined]  # else tarfile keeps every member in memory

    def _below(self, under: str) -> dict[str, FileStat]:
        if check_directory_path(self.root, under) and self._find(under).kind != "directory":
            raise BadPath(f"{under} is not a directory")
        start = f"{under}/" if under else ""
        return {path: stat for path, stat in self.entries.items() if path.startswith(start)}

    def _find(self, path: str) -> FileStat:
        for parent in [*list_path_prefixes(path)][:-1]:
            if self.entries.get(parent, IMPLICIT_DIRECTORY).kind != "directory":
                raise BadPath(f"an ancestor of {path} is a link or not a directory")
        if path not in self.entries:
            raise NoSuchFile(f"there is no file {path}")
        return self.entries[path]


class StoredContent(NamedTuple):
    """Position of a file's content in a tar. The data of a sparse file's extents, as (offset, length), follow each other."""

    offset: int
    extents: list[tuple[int, int]] | None


class StoredWorkspace(StoredFiles):
    """The newest snapshot, overlaid with the files that the next use of the sandbox would write first."""

    def __init__(self, tar: BinaryIO | None, overlay: Mapping[str, bytes], *, max_tar_bytes: int, now: datetime) -> None:
        self.tar, self.overlay, self.max_tar_bytes = tar, overlay, max_tar_bytes
        self.contents = dict[str, StoredContent]()
        entries = self._index(tar) if tar else {}
        mtime = int(now.timestamp())
        entries |= {path: FileStat("file", 0o644, len(content), mtime, "") for path, content in overlay.items()}
        super().__init__(WORKSPACE, entries)

    def content(self, path: str, start: int, stack: ExitStack) -> Reader:
        if path in self.overlay:
            return io.BytesIO(self.overlay[path][start:])
        assert self.tar is not None  # without a snapshot there are no other files
        offset, extents = self.contents[path]
        if extents is None:
            return FileSlice(self.tar, offset + start, self.entries[path].size - start)
        return SparseSlice(self.tar, offset, extents, start, self.entries[path].size)

    def pack(self, under: str, out: BinaryIO) -> None:
        size = sum(stat.size for stat in self._below(under).values())
        if size > self.max_tar_bytes:  # holes of sparse files are written as zeros
            raise TooLarge(f"the files have {size} bytes in all; an archive has at most {self.max_tar_bytes}")
        super().pack(under, out)

    def _index(self, tar: BinaryIO) -> dict[str, FileStat]:
        if not is_exact_tar(tar):
            raise Unreadable("the snapshot has unsupported members or headers")
        entries: dict[str, FileStat] = {}
        with tarfile.open(fileobj=tar, mode="r:") as members:
            for member in members:
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if ".." in parts or len(entries) > MAX_ENTRIES:
                    raise Unreadable("the snapshot has paths outside of its root, or too many members")
                path = "/".join(parts)
                if member.islnk():
                    if member.linkname not in self.contents:
                        raise Unreadable("the snapshot has a hard link to something that is not a file")
                    entries[path], self.contents[path] = entries[member.linkname], self.contents[member.linkname]
                elif path:
                    kind = "file" if member.isreg() else "directory" if member.isdir() else "link"
                    mode, size, mtime = member.mode & 0o777, member.size if kind == "file" else 0, max(int(member.mtime), 0)
                    entries[path] = FileStat(kind, mode, size, mtime, "", member.linkname)
                    if kind == "file":
                        self.contents[path] = StoredContent(member.offset_data, getattr(member, "sparse", None))
                members.members = []  # type: ignore[attr-defined]  # else tarfile keeps every member in memory
        return entries


class StoredData(StoredFiles):
    """An agent's data as last stored."""

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
        reader = pull.fetch_contents([self.rows[path]], stack, now=self.now)[path]
        reader.position += start
        return reader

    def pack(self, under: str, out: BinaryIO) -> None:
        chosen = self._below(under) | ({under: IMPLICIT_DIRECTORY} if under else {})
        pull.write_tar([self.rows[path] for path in chosen if path in self.rows], out, now=self.now)


@contextmanager
def open_workspace(holder: UUID, initial_files: Mapping[str, bytes], *, now: datetime) -> Iterator[FileTree]:
    """Open the files that a wake would restore to /workspace. Raise Unreadable or StoreError.

    `initial_files` are written before the first use, by absolute path. They overlay the snapshot of another lease (a fork), or
    stand alone without a snapshot: the lease's own snapshots contain them."""
    newest = workspace.find_latest(holder)
    overlay = {path.removeprefix(f"{WORKSPACE}/"): content for path, content in initial_files.items()}
    with ExitStack() as stack:
        if newest is None:
            yield StoredWorkspace(None, overlay, max_tar_bytes=UNLIMITED, now=now)
            return
        try:
            tar, _ = stack.enter_context(workspace.open_snapshot(newest, now=now))
        except workspace.CorruptSnapshot as error:
            raise Unreadable(str(error)) from error
        max_tar_bytes = workspace.compute_max_tar_bytes(newest.sandbox.pool.workspace_limit_mib << 20)
        yield StoredWorkspace(tar, {} if workspace.is_own(newest) else overlay, max_tar_bytes=max_tar_bytes, now=now)


@contextmanager
def open_data(agent_did: str, *, now: datetime) -> Iterator[FileTree]:
    """Open an agent's /data as last stored. Raise Unreadable if the data is mounted, StoreError if the store fails."""
    data = AgentData.objects.filter(agent_did=agent_did).first()
    if data and data.keeping != DataStorageMode.SYNC:
        raise Unreadable("the data is mounted")
    rows = DataFile.objects.filter(data=data, removed=False).select_related("stored_in", "data") if data else ()
    yield StoredData({row.path: row for row in rows}, now=now)
