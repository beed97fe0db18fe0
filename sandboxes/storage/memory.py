"""Key-value store in a dict, for tests: the complete port, with hooks for fault injection.

memory.before("set", fn)    fn(key) runs before the method acts, outside every lock: it may raise a StoreError, simulate
memory.after("set", fn)     the death of this process, block at a barrier or run a concurrent writer
memory.fail("upload", StoreError("memory", "upload", "disk full"), times=3)
with memory.fail(...):      the same for a block; without `with` the hook stays until reset()
memory.calls                [(method, key), ...]; for page (method, prefix)
memory.values               {key: value}, to inspect or modify"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import BinaryIO

from sandboxes.storage.base import MAX_PAGE_SIZE, Entry, KeyValueStore, ListingPage, RemainderReader


class MemoryStore(KeyValueStore):
    name = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Remove all values, hooks and recorded calls."""
        self.values: dict[str, bytes] = {}
        self._set_at: dict[str, datetime] = {}
        self._hooks: defaultdict[tuple[str, str], list[Callable[[str], None]]] = defaultdict(list)
        self.calls: list[tuple[str, str]] = []

    # --- fault injection --------------------------------------------------------------------------------------------------

    def before(self, method: str, fn: Callable[[str], None]) -> ExitStack:
        """Call fn(key) before each call of this method. Stays until reset, or until the returned stack is closed (also by
        `with`)."""
        return self._hook("before", method, fn)

    def after(self, method: str, fn: Callable[[str], None]) -> ExitStack:
        """Call fn(key) after each successful call of this method, before the caller gets the result. Stays as `before` does."""
        return self._hook("after", method, fn)

    def fail(self, method: str, error: BaseException, *, times: int | None = None) -> ExitStack:
        """Make the next `times` calls of this method (None: all) raise `error` without acting. Stays as `before` does."""
        remaining = itertools.repeat(None) if times is None else itertools.repeat(None, times)

        def raise_error(key: str) -> None:
            for _ in remaining:
                raise error

        return self._hook("before", method, raise_error)

    def _hook(self, when: str, method: str, fn: Callable[[str], None]) -> ExitStack:
        if method not in KeyValueStore.__abstractmethods__:
            raise ValueError(f"{method} is not an abstract method of the port")
        hooks, unhook = self._hooks[when, method], ExitStack()
        hooks.append(fn)

        @unhook.callback
        def remove() -> None:
            with suppress(ValueError):
                hooks.remove(fn)

        return unhook

    @contextmanager
    def _method(self, method: str, key: str) -> Iterator[None]:
        self.calls.append((method, key))
        for fn in [*self._hooks["before", method]]:
            fn(key)
        yield
        for fn in [*self._hooks["after", method]]:
            fn(key)

    # --- the port -----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        with self._method("get", self.check_key(key, "get")):
            return self.values.get(key)

    def set(self, key: str, value: bytes) -> None:
        with self._method("set", self.check_key(key, "set")):
            self._put(key, value)

    def remove(self, key: str) -> None:
        with self._method("remove", self.check_key(key, "remove")), self._lock:
            self.values.pop(key, None)

    def has(self, key: str) -> bool:
        with self._method("has", self.check_key(key, "has")):
            return key in self.values

    def page(self, prefix: str = "", *, cursor: str = "", limit: int = MAX_PAGE_SIZE) -> ListingPage:
        self.check_page(prefix, limit)
        with self._method("page", prefix), self._lock:
            keys = sorted(key for key in self.values if key.startswith(prefix) and key > cursor)
            entries = [Entry(key, len(self.values[key]), self._set_at.get(key)) for key in keys[:limit]]
        return ListingPage(entries, entries[-1].key if len(keys) > limit else "")

    def upload(self, key: str, source: BinaryIO) -> None:
        with self._method("upload", self.check_key(key, "upload")):
            with self.translate_errors("upload", key):
                value = RemainderReader(source).read()
            self._put(key, value)

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        self.check_range(key, start, length)
        with self._method("download", self.check_key(key, "download")):
            value = self.values.get(key)
            if value is None:
                return False
            with self.translate_errors("download", key):
                target.write(value[start : None if length is None else start + length])
            return True

    def _put(self, key: str, value: bytes) -> None:
        with self._lock:
            self.values[key], self._set_at[key] = bytes(value), datetime.now(UTC)
