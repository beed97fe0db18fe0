"""One suite for every store."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.storage.base import KeyValueStore
from sandboxes.storage.filesystem import FilesystemStore

HARD_KEYS = ["a", "a/b", "a/b/c", "a/..", "../x", ".hidden", "did:plc:ä/ü", "sp ace", "x" * 500, "a//b", "%2F", "=", "a.value"]


@pytest.fixture(params=["filesystem"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyValueStore]:
    yield FilesystemStore(tmp_path / "store")
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}  # no key has led out of it


def test_what_is_set_is_got(store: KeyValueStore) -> None:
    store.set("k", b"\x00\xff")
    assert store.get("k") == b"\x00\xff"
    store.set("k", b"")
    assert store.get("k") == b"" and store.has("k")


def test_what_was_never_set_is_none(store: KeyValueStore) -> None:
    assert store.get("k") is None and not store.has("k")
    assert store.is_empty() and store.size() == 0


def test_keys_of_every_shape_are_kept_apart(store: KeyValueStore) -> None:
    for key in HARD_KEYS:
        store.set(key, key.encode())
    assert {key: store.get(key) for key in HARD_KEYS} == {key: key.encode() for key in HARD_KEYS}
    assert list(store.list()) == sorted(HARD_KEYS)
    assert store.size() == len(HARD_KEYS)


def test_list_takes_a_prefix(store: KeyValueStore) -> None:
    for key in ("agents/a/1", "agents/a/2", "agents/ab/1", "other"):
        store.set(key, b"x")
    assert list(store.list("agents/a/")) == ["agents/a/1", "agents/a/2"]
    assert list(store.list("agents/a")) == ["agents/a/1", "agents/a/2", "agents/ab/1"]


def test_removing_twice_is_no_error(store: KeyValueStore) -> None:
    store.set("a/b", b"x")
    store.remove("a/b")
    store.remove("a/b")
    assert store.is_empty()


def test_clear_removes_what_has_the_prefix(store: KeyValueStore) -> None:
    store.set("a/1", b"x")
    store.set("b/1", b"x")
    store.clear("a/")
    assert list(store.list()) == ["b/1"]


def test_files_go_in_and_out(store: KeyValueStore) -> None:
    content = bytes(range(256)) * 20_000
    store.upload("big", io.BytesIO(content))
    target = io.BytesIO()
    assert store.download("big", target) and target.getvalue() == content
    assert not store.download("none", io.BytesIO())


@pytest.mark.parametrize("key", ["", "a\0b", "x" * 513])
def test_what_is_no_key_is_refused(store: KeyValueStore, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        store.set(key, b"x")


def test_a_write_that_fails_leaves_the_old_value(store: KeyValueStore) -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError("the disk is gone")

    store.set("k", b"old")
    with pytest.raises(Exception, match="the disk is gone"):
        store.upload("k", Broken())  # type: ignore[arg-type]
    assert store.get("k") == b"old" and list(store.list()) == ["k"]
