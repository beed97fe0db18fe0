"""Key-value store in a directory: one file per key. For one machine, or for several on a shared file system.

The elements of a key become quoted directory and file names, so that no key leads outside the root or collides with another
key's file. Values are written to a directory of temporary files and renamed into place."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO
from urllib.parse import quote, unquote_to_bytes

from sandboxes.storage.base import (
    CHUNK_BYTES,
    MAX_PAGE_SIZE,
    Entry,
    FindKept,
    KeyValueStore,
    ListingPage,
    StoreError,
)

VALUE_SUFFIX = ".value"  # one key may be a prefix of another (a/b and a/b/c): directories and values must not collide
TEMPORARY_DIRECTORY = ".new"  # no quoted element of a key has this name
MAX_ELEMENT_BYTES = 64  # per file name: at most 192 bytes when quoted; file systems allow 255


class FilesystemStore(KeyValueStore):
    name = "filesystem"
    supports_append = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> bytes | None:
        path = self._path(key, "get")
        with self.translate_errors("get", key), suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    def set(self, key: str, value: bytes) -> None:
        self._write(key, "set", lambda out: out.write(value))

    def upload(self, key: str, source: BinaryIO) -> None:
        self._write(key, "upload", lambda out: copyfileobj(source, out, CHUNK_BYTES))

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        path = self._path(key, "download")
        self.check_range(key, start, length)
        with self.translate_errors("download", key):
            try:
                source = path.open("rb")
            except FileNotFoundError:
                return False
            with source:
                remaining = max(0, os.fstat(source.fileno()).st_size - start)
                remaining = remaining if length is None else min(remaining, length)
                source.seek(start)
                while remaining:
                    chunk = source.read(min(remaining, CHUNK_BYTES))
                    if not chunk:
                        raise StoreError(self.name, "download", f"the file ended {remaining} bytes early", key=key)
                    target.write(chunk)
                    remaining -= len(chunk)
        return True

    def has(self, key: str) -> bool:
        path = self._path(key, "has")
        with self.translate_errors("has", key), suppress(FileNotFoundError):
            os.stat(path)
            return True
        return False

    def remove(self, key: str) -> None:
        path = self._path(key, "remove")
        with self.translate_errors("remove", key):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: other keys are below it
            for parent in path.parents[: len(path.relative_to(self.root).parts) - 1]:
                parent.rmdir()

    def page(self, prefix: str = "", *, cursor: str = "", limit: int = MAX_PAGE_SIZE) -> ListingPage:
        self.check_page(prefix, limit)
        entries = []
        with self.translate_errors("page", prefix):
            for key, path in self._walk(prefix.encode(), self.check_text(cursor, "page").encode()):
                with suppress(FileNotFoundError):  # removed since the directory was read
                    status = os.stat(path)
                    entries.append(Entry(key.decode(), status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)))
                if len(entries) > limit:
                    break
        return ListingPage(entries[:limit], entries[limit - 1].key if len(entries) > limit else "")

    def sweep_leftovers(self, older_than: datetime, *, find_kept: FindKept) -> int:
        removed = 0
        with (
            self.translate_errors("sweep_leftovers"),
            suppress(FileNotFoundError),
            os.scandir(self.root / TEMPORARY_DIRECTORY) as entries,
        ):
            for entry in entries:
                with suppress(FileNotFoundError):  # just renamed into place, or swept by another process
                    if entry.stat().st_mtime < older_than.timestamp():
                        os.unlink(entry)
                        removed += 1
        return removed

    def append(self, key: str, data: bytes, *, sync: bool = True) -> None:
        path = self._path(key, "append")
        with self.translate_errors("append", key):
            descriptor, is_new = _open_for_append(path)
            try:
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[os.write(descriptor, unwritten) :]
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if sync and is_new:
                _sync_directory(path.parent)

    def _path(self, key: str, method: str) -> Path:
        *directories, last = _encode_key(self.check_key(key, method))
        return self.root.joinpath(*directories, last + VALUE_SUFFIX)

    def _walk(self, prefix: bytes, after: bytes) -> Iterator[tuple[bytes, Path]]:
        """Yield the keys with a prefix that sort after `after`, in order, with their paths.

        Only the directory fixed by the prefix is read, and below it only directories that may contain such keys."""
        fixed, slash, _ = prefix.rpartition(b"/")
        pending = [(b"", fixed, self.root.joinpath(*_encode_key(fixed)) if slash else self.root, False)]
        while pending:
            _, key, path, is_value = pending.pop()
            if is_value:
                yield key, path
                continue
            children = []
            for entry in _scan_directory(path):
                stem = entry.name.removesuffix(VALUE_SUFFIX)
                is_value = stem != entry.name
                suffix = _unquote_element(stem, joint=b"" if path == self.root else b"/")
                if suffix is None or not (is_value or entry.is_dir()):
                    continue
                child_key = key + suffix
                if child_key.startswith(prefix) and child_key > after if is_value else _may_contain(child_key, prefix, after):
                    # A directory sorts like the keys below it: `a.` is between `a` and `a/b`.
                    # Keys below an element of full length may continue without "/", but no sibling is longer than it.
                    children.append((child_key if is_value else child_key + b"/", child_key, path / entry.name, is_value))
            pending += sorted(children, reverse=True)

    def _write(self, key: str, method: str, fill: Callable[[BinaryIO], object]) -> None:
        path = self._path(key, method)
        with self.translate_errors(method, key):
            _make_directory(self.root / TEMPORARY_DIRECTORY)
            descriptor, temporary = tempfile.mkstemp(dir=self.root / TEMPORARY_DIRECTORY)
            try:
                with open(descriptor, "wb") as out:
                    fill(out)
                    out.flush()
                    os.fsync(out.fileno())
                _move_into_place(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise


def _encode_key(key: str | bytes) -> list[str]:
    """Return a key as path elements without `..`, hidden names or overlong names.

    `=` marks the continuation of a long element, `%` an empty element."""
    raw = key.encode() if isinstance(key, str) else key
    return [
        ("=" if start else "") + _quote_element(part[start : start + MAX_ELEMENT_BYTES])
        for part in raw.split(b"/")
        for start in range(0, len(part) or 1, MAX_ELEMENT_BYTES)
    ]


def _quote_element(part: bytes) -> str:
    return quote(part, safe="").replace(".", "%2E") or "%"


def _unquote_element(element: str, *, joint: bytes) -> bytes | None:
    """Return the part of the key that a path element encodes; None if no key produces the element (`lost+found`)."""
    part = element.removeprefix("=")
    raw = b"" if part == "%" else unquote_to_bytes(part)
    if _quote_element(raw) != part:
        return None
    return raw if part != element else joint + raw


def _may_contain(directory: bytes, prefix: bytes, after: bytes) -> bool:
    """Return whether a directory may contain keys with the prefix that sort after `after`."""
    return (directory.startswith(prefix) or prefix.startswith(directory)) and directory >= after[: len(directory)]


def _scan_directory(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return [*entries]
    except FileNotFoundError:  # the directory never existed, or its last key was just removed
        return []


def _move_into_place(temporary: str, path: Path) -> None:
    """Rename a finished file to its path, durably."""
    for is_last_attempt in (*[False] * 20, True):
        try:
            _make_directory(path.parent)
            os.replace(temporary, path)
            break
        except FileNotFoundError:  # a concurrent remove deleted the empty directory
            if is_last_attempt:
                raise
    _sync_directory(path.parent)


def _open_for_append(path: Path) -> tuple[int, bool]:
    """Open a file to append to. Return its descriptor and whether it was created."""
    for is_last_attempt in (*[False] * 20, True):
        with suppress(FileNotFoundError):
            return os.open(path, os.O_WRONLY | os.O_APPEND), False
        try:
            _make_directory(path.parent)
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), True
        except FileNotFoundError:  # a concurrent remove deleted the empty directory
            if is_last_attempt:
                raise
    raise AssertionError("unreachable")


def _make_directory(directory: Path) -> None:
    """Create a directory and its ancestors durably, so that they survive a crash of the machine."""
    try:
        directory.mkdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directory(directory.parent)
        with suppress(FileExistsError):  # created concurrently; `exist_ok` would fail if the directory is removed again
            directory.mkdir()
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # a concurrent remove deleted the directory with its last key: nothing to make durable
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
