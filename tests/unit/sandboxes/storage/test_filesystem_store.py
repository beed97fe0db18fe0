"""Filesystem store: full disks, crashes during a write, and the directories that a listing reads."""

import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.storage import filesystem
from sandboxes.storage.base import StoreError
from sandboxes.storage.filesystem import FilesystemStore
from tests.support.storage.disks import small_disk
from tests.support.storage.stores import METHODS, keep_none

MIB = 1 << 20
HOUR = timedelta(hours=1)
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return FilesystemStore(tmp_path / "store")


def files(store: FilesystemStore) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())


# --- full disks ---------------------------------------------------------------------------------------------------


@contextmanager
def small_files(root: Path) -> Iterator[None]:
    """Limit the files of this process to 256 KiB."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("limit", "message"),
    [(lambda root: small_disk(root, "1m"), "No space left on device"), (small_files, "File too large")],
    ids=["disk", "file size limit"],
)
def test_full_disk_raises_store_error_and_keeps_the_old_value(
    store: FilesystemStore, limit: Callable[[Path], AbstractContextManager[object]], message: str
) -> None:
    with limit(store.root):
        store.set("k", b"old")
        for _ in range(3):  # a failed write frees its space
            with pytest.raises(StoreError, match=f"filesystem: set of 'k': {message}"):
                store.set("k", bytes(2 * MIB))
            with pytest.raises(StoreError, match=f"filesystem: upload of 'k': {message}"):
                store.upload("k", io.BytesIO(bytes(2 * MIB)))
        store.set("other", bytes(MIB // 8))
        assert store.get("k") == b"old"
        assert files(store) == ["k.value", "other.value"]


@pytest.mark.parametrize("method", METHODS)
def test_root_that_is_a_file_raises_store_error_in_every_method(tmp_path: Path, method: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="Not a directory"):
        METHODS[method](FilesystemStore(tmp_path / "file"), "k")


def test_value_truncated_during_download_raises_store_error(store: FilesystemStore) -> None:
    class TruncatingTarget(io.BytesIO):
        def write(self, content: bytes) -> int:  # type: ignore[override]
            os.truncate(store.root / "k.value", MIB)
            return len(content)

    store.set("k", bytes(3 * MIB))
    with pytest.raises(StoreError, match=r"ended \d+ bytes early"):
        store.download("k", TruncatingTarget())


# --- crashes ------------------------------------------------------------------------------------------------------

CRASHING_UPLOAD_SCRIPT = """
import io, os, sys
from pathlib import Path
from sandboxes.storage.filesystem import FilesystemStore

class Source(io.RawIOBase):
    def read(self, size=-1):
        self.reads = getattr(self, "reads", 0) + 1
        return bytes(1000) if self.reads < 3 else os.kill(os.getpid(), 9)

FilesystemStore(Path(sys.argv[1])).upload("k", Source())
"""


def test_leftover_of_a_killed_write_is_hidden_and_swept_later(store: FilesystemStore) -> None:
    assert store.sweep_leftovers(datetime.now(UTC), find_kept=keep_none) == 0
    store.set("k", b"old")
    command = [sys.executable, "-c", CRASHING_UPLOAD_SCRIPT, str(store.root)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert store.get("k") == b"old"
    assert list(store.list()) == ["k"]
    assert len(files(store)) == 2
    now = datetime.now(UTC)
    assert store.sweep_leftovers(now - HOUR, find_kept=keep_none) == 0
    assert len(files(store)) == 2
    assert store.sweep_leftovers(now + HOUR, find_kept=keep_none) == 1
    assert files(store) == ["k.value"]
    assert store.get("k") == b"old"


def test_remove_deletes_empty_directories(store: FilesystemStore) -> None:
    store.set("a/b/c", b"x")
    store.set("a/d", b"x")
    store.remove("a/b/c")
    assert sorted(path.name for path in store.root.rglob("*")) == [".new", "a", "d.value"]


def test_key_removed_right_after_its_write_is_no_error(store: FilesystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def replace_and_remove(source: Path, target: Path) -> None:
        replace(source, target)
        store.remove("a/b")  # and its directory

    monkeypatch.setattr(os, "replace", replace_and_remove)
    store.set("a/b", b"x")
    assert store.is_empty()


# --- listings -----------------------------------------------------------------------------------------------------


def test_page_reads_only_directories_that_prefix_and_cursor_allow(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a/1/x", "a/2/x", "a/2/y", "a/3/x", "b/1"):
        store.set(key, b"x")
    directories: list[str] = []
    scan = filesystem._scan_directory
    monkeypatch.setattr(
        filesystem, "_scan_directory", lambda path: directories.append(str(path.relative_to(store.root))) or scan(path)
    )
    assert list(store.list("a/2/")) == ["a/2/x", "a/2/y"]
    assert directories == ["a/2"]
    directories.clear()
    assert list(store.list("a/2/y")) == ["a/2/y"]
    assert list(store.list("a/2")) == ["a/2/x", "a/2/y"]
    assert directories == ["a/2", "a", "a/2"]
    directories.clear()
    page = store.page(limit=1)
    assert [entry.key for entry in page.entries] == ["a/1/x"]
    assert directories == [".", "a", "a/1", "a/2"]  # one directory further, to know whether there are more keys
    directories.clear()
    assert [entry.key for entry in store.page(cursor="a/2/y").entries] == ["a/3/x", "b/1"]
    assert "a/1" not in directories


def test_foreign_files_are_not_listed(store: FilesystemStore) -> None:
    store.set("k", b"x")
    for name in ("lost+found/x.value", "a b/x.value", ".snapshot/x.value", "README", "a b.value"):
        (store.root / name).parent.mkdir(exist_ok=True)
        (store.root / name).write_bytes(b"x")
    assert list(store.list()) == ["k"]


LETTERS = st.sampled_from(["/", "/", "=", ".", "%", "a", "b", "!", "ä", "\x01", "a" * 64, "a" * 63, "ä" * 32])
KEYS = st.lists(LETTERS, min_size=1, max_size=6).map("".join).filter(lambda key: len(key.encode()) <= 512)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(KEYS, max_size=8, unique=True), prefix=st.just("") | KEYS, cursor=st.just("") | KEYS)
def test_page_contains_all_keys_with_the_prefix_after_the_cursor(
    store: FilesystemStore, no_fsync: None, keys: list[str], prefix: str, cursor: str
) -> None:
    store.clear()
    for key in keys:
        store.set(key, key.encode())
    expected = sorted(key for key in keys if key.startswith(prefix) and key > cursor)
    assert [entry.key for entry in store.page(prefix, cursor=cursor).entries] == expected
    assert [store.get(key) for key in keys] == [key.encode() for key in keys]
    assert store.size() == len(keys)
