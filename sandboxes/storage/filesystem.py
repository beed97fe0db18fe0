"""A directory as a store: one file a key. For one machine, or for many on a file system they share."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO
from urllib.parse import quote, unquote

from sandboxes.storage.base import CHUNK, KeyValueStore, StoreError, check_key

SUFFIX = ".value"  # a key may be another one's beginning, a/b and a/b/c: directories and values must not collide
LONGEST_NAME = 200  # bytes of one path element, with room for a temporary suffix under the usual 255


class FilesystemStore(KeyValueStore):
    name = "filesystem"

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as failed:
            raise StoreError(str(failed)) from failed

    def set(self, key: str, value: bytes) -> None:
        self._write(key, lambda out: out.write(value))

    def upload(self, key: str, source: BinaryIO) -> None:
        self._write(key, lambda out: copyfileobj(source, out, CHUNK))

    def download(self, key: str, target: BinaryIO) -> bool:
        try:
            with self._path(key).open("rb") as source:
                copyfileobj(source, target, CHUNK)
        except FileNotFoundError:
            return False
        except OSError as failed:
            raise StoreError(str(failed)) from failed
        return True

    def has(self, key: str) -> bool:
        return self._path(key).is_file()

    def remove(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as failed:
            raise StoreError(str(failed)) from failed
        for parent in path.parents:
            if parent == self.root:
                break
            with suppress(OSError):  # not empty: somebody else's keys are in it
                parent.rmdir()

    def list(self, prefix: str = "") -> Iterator[str]:
        found = []
        for directory, _, names in os.walk(self.root):
            inside = Path(directory).relative_to(self.root)
            found += [_key(inside / name) for name in names if name.endswith(SUFFIX)]
        return iter(sorted(key for key in found if key.startswith(prefix)))

    def _path(self, key: str) -> Path:
        parts = [part for name in check_key(key).split("/") for part in _elements(name)]
        return self.root.joinpath(*parts[:-1], parts[-1] + SUFFIX)

    def _write(self, key: str, fill: Callable[[BinaryIO], object]) -> None:
        path = self._path(key)
        for attempt in (1, 2, 3):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            except FileNotFoundError:  # a rival's remove took the empty directory from under us
                if attempt == 3:
                    raise StoreError(f"{path.parent} does not stay") from None
                continue
            except OSError as failed:
                raise StoreError(str(failed)) from failed
            break
        try:
            with open(descriptor, "wb") as out:
                fill(out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
            _sync(path.parent)
        except OSError as failed:
            Path(temporary).unlink(missing_ok=True)
            raise StoreError(str(failed)) from failed


def _elements(name: str) -> list[str]:
    """One part of a key as path elements: nothing hidden, no `..`, none too long. `=` opens a continued element."""
    quoted = quote(name, safe="").replace(".", "%2E") or "%"
    return [("=" if at else "") + quoted[at : at + LONGEST_NAME] for at in range(0, len(quoted), LONGEST_NAME)]


def _key(path: Path) -> str:
    """The key that `_path` made this relative path of."""
    text = path.as_posix()[: -len(SUFFIX)].replace("/=", "")
    return "/".join("" if part == "%" else unquote(part) for part in text.split("/"))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
