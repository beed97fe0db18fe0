"""A directory as a store: one file a key. For one machine, or for many on a file system they share.

A key's elements become directories and its last one a file, every element quoted, so that no key leads out of the root
or meets another one's file. What is being written lies in a directory of its own until it is whole."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO
from urllib.parse import quote, unquote_to_bytes

from sandboxes.storage.base import CHUNK_BYTES, MAX_PAGE_SIZE, Entry, KeyValueStore, Page, StoreError

VALUE_SUFFIX = ".value"  # a key may be another one's beginning, a/b and a/b/c: directories and values must not collide
TEMPORARY_DIRECTORY = ".new"  # no element of a key is quoted like this
MAX_ELEMENT_BYTES = 64  # bytes of a key in one name: quoted at most 192, and names have 255


class FilesystemStore(KeyValueStore):
    name = "filesystem"
    supports_append = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> bytes | None:
        path = self._path(key, "get")
        with self.asking("get", key), suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    def set(self, key: str, value: bytes) -> None:
        self._write(key, "set", lambda out: out.write(value))

    def upload(self, key: str, source: BinaryIO) -> None:
        self._write(key, "upload", lambda out: copyfileobj(source, out, CHUNK_BYTES))

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        path = self._path(key, "download")
        self.check_range(key, start, length)
        with self.asking("download", key):
            try:
                source = path.open("rb")
            except FileNotFoundError:
                return False
            with source:
                left = max(0, os.fstat(source.fileno()).st_size - start)
                left = left if length is None else min(left, length)
                source.seek(start)
                while left:
                    chunk = source.read(min(left, CHUNK_BYTES))
                    if not chunk:
                        raise StoreError(self.name, "download", f"the file ends {left} bytes too early", key=key)
                    target.write(chunk)
                    left -= len(chunk)
        return True

    def has(self, key: str) -> bool:
        path = self._path(key, "has")
        with self.asking("has", key), suppress(FileNotFoundError):
            os.stat(path)
            return True
        return False

    def remove(self, key: str) -> None:
        path = self._path(key, "remove")
        with self.asking("remove", key):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: somebody else's keys are in it
            for parent in path.parents[: len(path.relative_to(self.root).parts) - 1]:
                parent.rmdir()

    def page(self, prefix: str = "", *, following: str = "", limit: int = MAX_PAGE_SIZE) -> Page:
        self.check_page(prefix, limit)
        found = []
        with self.asking("page", prefix):
            for key, path in self._walk(prefix.encode(), self.check_text(following, "page").encode()):
                with suppress(FileNotFoundError):  # removed since the directory was read
                    status = os.stat(path)
                    found.append(Entry(key.decode(), status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)))
                if len(found) > limit:
                    break
        return Page(found[:limit], found[limit - 1].key if len(found) > limit else "")

    def sweep_leftovers(self, older_than: datetime) -> int:
        swept = 0
        with self.asking("sweep_leftovers"), suppress(FileNotFoundError), os.scandir(self.root / TEMPORARY_DIRECTORY) as found:
            for entry in found:
                with suppress(FileNotFoundError):  # it has just been finished, or swept by another process
                    if entry.stat().st_mtime < older_than.timestamp():
                        os.unlink(entry)
                        swept += 1
        return swept

    def append(self, key: str, data: bytes, *, sync: bool = True) -> None:
        path = self._path(key, "append")
        with self.asking("append", key):
            descriptor, is_new = _open_for_append(path)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(descriptor, left) :]
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if sync and is_new:
                _sync_directory(path.parent)

    def _path(self, key: str, method: str) -> Path:
        *above, last = _encode_key(self.check_key(key, method))
        return self.root.joinpath(*above, last + VALUE_SUFFIX)

    def _walk(self, prefix: bytes, after: bytes) -> Iterator[tuple[bytes, Path]]:
        """The keys that start with `prefix` and come after `after`, in order. Of the tree it reads only the directory that
        the prefix fixes, and below that only what may have such keys."""
        fixed, slash, _ = prefix.rpartition(b"/")
        to_read = [(b"", fixed, self.root.joinpath(*_encode_key(fixed)) if slash else self.root, False)]
        while to_read:
            _, key, path, is_value = to_read.pop()
            if is_value:
                yield key, path
                continue
            inside = []
            for entry in _scan_directory(path):
                stem = entry.name.removesuffix(VALUE_SUFFIX)
                is_value = stem != entry.name
                below = _unquote_element(stem, joint=b"" if path == self.root else b"/")
                if below is None or not (is_value or entry.is_dir()):
                    continue
                found = key + below
                if found.startswith(prefix) and found > after if is_value else _may_contain(found, prefix, after):
                    # As its keys sort: `a.` is between `a` and `a/b`. A name of full length has no longer neighbour.
                    inside.append((found if is_value else found + b"/", found, path / entry.name, is_value))
            to_read += sorted(inside, reverse=True)

    def _write(self, key: str, method: str, fill: Callable[[BinaryIO], object]) -> None:
        path = self._path(key, method)
        with self.asking(method, key):
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
    """A key as path elements: nothing hidden, no `..`, none too long. `=` opens a continued one, `%` is an empty one."""
    raw = key.encode() if isinstance(key, str) else key
    return [
        ("=" if at else "") + _quote_element(part[at : at + MAX_ELEMENT_BYTES])
        for part in raw.split(b"/")
        for at in range(0, len(part) or 1, MAX_ELEMENT_BYTES)
    ]


def _quote_element(part: bytes) -> str:
    return quote(part, safe="").replace(".", "%2E") or "%"


def _unquote_element(element: str, *, joint: bytes) -> bytes | None:
    """What a path element adds to the key of its directory; None if no key has made it (`lost+found`)."""
    part = element.removeprefix("=")
    raw = b"" if part == "%" else unquote_to_bytes(part)
    if _quote_element(raw) != part:
        return None
    return raw if part != element else joint + raw


def _may_contain(directory: bytes, prefix: bytes, after: bytes) -> bool:
    """May there be keys below it that start with `prefix` and come after `after`?"""
    return (directory.startswith(prefix) or prefix.startswith(directory)) and directory >= after[: len(directory)]


def _scan_directory(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return [*found]
    except FileNotFoundError:  # its last key has just been removed, or there never was one
        return []


def _move_into_place(temporary: str, path: Path) -> None:
    """Put a finished file in its place, for good."""
    for last_try in (*[False] * 20, True):
        try:
            _make_directory(path.parent)
            os.replace(temporary, path)
            break
        except FileNotFoundError:  # a rival's remove took the empty directory from under us
            if last_try:
                raise
    _sync_directory(path.parent)


def _open_for_append(path: Path) -> tuple[int, bool]:
    """A file to append to, and whether it was made for that."""
    for last_try in (*[False] * 20, True):
        with suppress(FileNotFoundError):
            return os.open(path, os.O_WRONLY | os.O_APPEND), False
        try:
            _make_directory(path.parent)
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), True
        except FileNotFoundError:  # a rival's remove took the empty directory from under us
            if last_try:
                raise
    raise AssertionError("unreachable")


def _make_directory(directory: Path) -> None:
    """Make it, with those above it, so that they outlive a crash of the machine."""
    try:
        directory.mkdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directory(directory.parent)
        with suppress(FileExistsError):  # a rival's; not exist_ok, which looks again, when it may be gone
            directory.mkdir()
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # a rival has removed the directory's last key since: there is nothing left to keep
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
