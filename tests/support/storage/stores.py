"""Calls of a key-value store that a test repeats for each method."""

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import BinaryIO

from sandboxes.storage.base import KeyValueStore, StoreError


def keep_none(keys: Collection[str]) -> set[str]:
    """Return the keys whose unfinished writes a sweep keeps."""
    return set()


class MemoryClaims:
    """Claims on content in the memory of the test."""

    def __init__(self) -> None:
        self.keys = set[str]()

    @contextmanager
    def claim(self, key: str, source: BinaryIO) -> Iterator[BinaryIO]:
        self.keys.add(key)
        try:
            yield source
        finally:
            self.keys.discard(key)

    def end(self, key: str) -> None:
        if key not in self.keys:
            raise StoreError("memory", "upload", "the claim is lost", key=key)
        self.keys.remove(key)

    def find(self, keys: Collection[str]) -> set[str]:
        return self.keys & {*keys}


CLAIMS = MemoryClaims()
Call = Callable[[KeyValueStore, str], object]
KEY_METHODS: dict[str, Call] = {
    "get": lambda store, key: store.get(key),
    "set": lambda store, key: store.set(key, b"value"),
    "has": lambda store, key: store.has(key),
    "remove": lambda store, key: store.remove(key),
    "remove_many": lambda store, key: store.remove_many([key]),
    "upload": lambda store, key: store.upload(key, io.BytesIO(b"value")),
    "download": lambda store, key: store.download(key, io.BytesIO()),
}
METHODS: dict[str, Call] = KEY_METHODS | {
    "page": lambda store, prefix: store.page(prefix),
    "sweep_leftovers": lambda store, key: store.sweep_leftovers(datetime.now(UTC), find_kept=keep_none),
}
