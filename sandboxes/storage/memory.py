"""Key-value store in a dict, for tests: the complete port, with hooks for fault injection.

memory.before("set", fn)    fn(key) runs before the method acts, outside every lock: it may raise a StoreError, simulate
memory.after("set", fn)     the death of this process, block at a barrier or run a concurrent writer
memory.fail("upload", StoreError("memory", "upload", "disk full"), times=3)
with memory.fail(...):      the same for a block; without `with` the hook stays until reset()
memory.calls                [(method, key), ...]; for page (method, prefix)
memory.values               {key: value}, to inspect or modify"""

import threading
from datetime import UTC, datetime
from typing import BinaryIO

from sandboxes.fault_injection import HookedCalls
from sandboxes.storage.base import MAX_PAGE_SIZE, Entry, KeyValueStore, ListingPage, RemainderReader


class MemoryStore(HookedCalls, KeyValueStore):
    port = KeyValueStore
    name = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Remove all values, hooks and recorded calls."""
        self.values: dict[str, bytes] = {}
        self._set_at: dict[str, datetime] = {}
        self.clear_hooks()

    # --- the port -----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        with self.hooked_call("get", self.check_key(key, "get")):
            return self.values.get(key)

    def set(self, key: str, value: bytes) -> None:
        with self.hooked_call("set", self.check_key(key, "set")):
            self._put(key, value)

    def remove(self, key: str) -> None:
        with self.hooked_call("remove", self.check_key(key, "remove")), self._lock:
            self.values.pop(key, None)

    def has(self, key: str) -> bool:
        with self.hooked_call("has", self.check_key(key, "has")):
            return key in self.values

    def page(self, prefix: str = "", *, cursor: str = "", limit: int = MAX_PAGE_SIZE) -> ListingPage:
        self.check_page(prefix, limit)
        with self.hooked_call("page", prefix), self._lock:
            keys = sorted(key for key in self.values if key.startswith(prefix) and key > cursor)
            entries = [Entry(key, len(self.values[key]), self._set_at.get(key)) for key in keys[:limit]]
        return ListingPage(entries, entries[-1].key if len(keys) > limit else "")

    def upload(self, key: str, source: BinaryIO) -> None:
        with self.hooked_call("upload", self.check_key(key, "upload")):
            with self.translate_errors("upload", key):
                value = RemainderReader(source).read()
            self._put(key, value)

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        self.check_range(key, start, length)
        with self.hooked_call("download", self.check_key(key, "download")):
            value = self.values.get(key)
            if value is None:
                return False
            with self.translate_errors("download", key):
                target.write(value[start : None if length is None else start + length])
            return True

    def _put(self, key: str, value: bytes) -> None:
        with self._lock:
            self.values[key], self._set_at[key] = bytes(value), datetime.now(UTC)  # noqa: TID251
