"""Port of the key-value stores that hold state: text keys, byte values. One conformance suite tests every backend.

A key is UTF-8 without NUL, of at most `max_key_bytes` bytes. `/` groups keys for listings and has no other meaning. `set` and
`upload` are atomic: a reader sees the old value or the new one. Once they return, the value survives a crash of this process
and, where the backend can promise it, of the machine. Errors raise StoreError; a key or value that the backend never accepts
raises StoreRefused before anything is sent. All methods are safe to call from several threads, and in the child of a fork."""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from threading import Lock
from typing import BinaryIO, Generic, TypeVar

from sandboxes.redaction.texts import quote_answer, redact
from sandboxes.unreadable_answers import guard_reads

CHUNK_BYTES = 1 << 20
MAX_PAGE_SIZE = 1000  # keys per listing
T = TypeVar("T")
Store = TypeVar("Store", bound="KeyValueStore")
GUARDED_METHODS = ("get", "set", "remove", "has", "page", "remove_many")


FindKept = Callable[[Collection[str]], set[str]]


class StoreError(Exception):
    """A call to the store failed. It may or may not have had an effect; the same call may be repeated."""

    code = "store_unavailable"

    def __init__(self, backend: str, method: str, reason: str, *, key: str = "") -> None:
        self.backend, self.method, self.reason, self.key = backend, method, reason, key
        super().__init__(f"{backend}: {method}{f' of {key[:200]!r}' if key else ''}: {redact(reason)}")


class DiskFull(StoreError):
    """A disk of the control plane has too little free space. Nothing was written."""

    code = "disk_full"
    retry_after = 60  # seconds


class StoreRefused(StoreError):
    """The key or value violates a limit of this backend; repeating the call does not help."""

    code = "store_refused"


def guard_answers(store_class: type[Store]) -> type[Store]:
    """Let a store raise StoreError for an answer of its server that cannot be read. For the class of each remote store.

    `upload` and `download` are not guarded: they also raise exceptions of the file that the caller has passed."""

    def build_error(subject: str, error: Exception) -> StoreError:
        method, _, key = subject.partition(" of ")
        reason = f"unexpected answer of the server: {type(error).__name__}: {quote_answer(error)}"
        return StoreError(store_class.name, method, reason, key=key)

    guard_reads(store_class, GUARDED_METHODS, known=(StoreError,), build_error=build_error)
    return store_class


@dataclass(frozen=True)
class Entry:
    """A key in a listing. Fields that the backend does not list are None."""

    key: str
    size: int | None = None  # bytes
    modified_at: datetime | None = None


@dataclass(frozen=True)
class ListingPage:
    """One page of a listing, and the cursor of the next page; "" at the end."""

    entries: list[Entry]
    next_cursor: str = ""


class KeyValueStore(ABC):
    """Key-value store. The module docstring states the contract of all methods."""

    name: str
    max_key_bytes = 512
    max_value_bytes: int | None = None  # None: no limit that needs a check
    supports_append = False

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return the value; None if the key does not exist."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store a value, replacing an existing one."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a key. Idempotent: a missing key is success."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Return whether the key exists, without fetching its value."""

    @abstractmethod
    def page(self, prefix: str = "", *, cursor: str = "", limit: int = MAX_PAGE_SIZE) -> ListingPage:
        """Return up to `limit` (1 to 1000) keys with a prefix, in the order of their UTF-8 bytes.

        `cursor` is the `next_cursor` of the previous page. Keys set or removed between two pages may or may not be seen."""

    @abstractmethod
    def upload(self, key: str, source: BinaryIO) -> None:
        """Store the rest of a seekable file like `set`, without holding all of it in memory where the backend allows."""

    @abstractmethod
    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        """Write a value to a file. Return False if the key does not exist.

        With `start` and `length` write only that byte range, cut off at the end of the value. A truncated response raises
        StoreError."""

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the entries of all keys with a prefix, in order, page by page."""
        cursor = ""
        while True:
            page = self.page(prefix, cursor=cursor)
            yield from page.entries
            if not page.next_cursor:
                return
            cursor = page.next_cursor

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield all keys with a prefix, in order."""
        return (entry.key for entry in self.entries(prefix))

    def size(self, prefix: str = "") -> int:
        """Return the number of keys with a prefix."""
        return sum(1 for _ in self.entries(prefix))

    def is_empty(self, prefix: str = "") -> bool:
        return not self.page(prefix, limit=1).entries

    def remove_many(self, keys: Iterable[str]) -> None:
        """Remove several keys, in batches where the backend supports them."""
        for key in keys:
            self.remove(key)

    def clear(self, prefix: str = "") -> None:
        """Remove all keys with a prefix."""
        keys = self.list(prefix)
        while batch := [*islice(keys, MAX_PAGE_SIZE)]:
            self.remove_many(batch)

    def append(self, key: str, data: bytes, *, sync: bool = True) -> None:
        """Append to a value, which is created if missing. Only with `supports_append`.

        Not atomic: after a crash any prefix of the data may be stored. One caller at a time may append to a key. With `sync`
        the data survives the same crashes as after `set`."""
        raise StoreRefused(self.name, "append", "this backend does not support append", key=key)

    def sweep_leftovers(self, older_than: datetime, *, find_kept: FindKept) -> int:
        """Remove invisible remains of interrupted writes that began before `older_than`. Return the number removed.

        Of a backend that lists unfinished writes by key, those of the keys that `find_kept` returns are not removed. Another
        backend removes what was not written to since `older_than`."""
        return 0

    @contextmanager
    def translate_errors(self, method: str, key: str = "") -> Iterator[None]:
        """Translate OSError, also from the caller's file, to StoreError."""
        try:
            yield
        except OSError as error:
            raise StoreError(self.name, method, error.strerror or str(error), key=key) from error

    def check_key(self, key: str, method: str) -> str:
        """Return the key. Raise StoreRefused if it is not valid."""
        if not key:
            raise StoreRefused(self.name, method, "a key must not be empty")
        return self.check_text(key, method)

    def check_value(self, size: int, method: str, key: str) -> None:
        if self.max_value_bytes is not None and size > self.max_value_bytes:
            raise StoreRefused(self.name, method, f"the value has {size} bytes; the limit is {self.max_value_bytes}", key=key)

    def check_page(self, prefix: str, limit: int) -> None:
        self.check_text(prefix, "page")  # a prefix may be as long as a key
        if not 1 <= limit <= MAX_PAGE_SIZE:
            raise StoreRefused(self.name, "page", f"limit must be 1 to {MAX_PAGE_SIZE}, not {limit}")

    def check_range(self, key: str, start: int, length: int | None) -> None:
        if start < 0 or (length is not None and length < 0):
            raise StoreRefused(self.name, "download", "start and length of a range must not be negative", key=key)

    def check_text(self, text: str, method: str) -> str:
        """Return a key or prefix. Raise StoreRefused if it is not valid."""
        try:
            length = len(text.encode())
        except UnicodeEncodeError:
            raise StoreRefused(self.name, method, "a key must not contain lone surrogates", key=repr(text)) from None
        if length > self.max_key_bytes or "\0" in text:
            raise StoreRefused(self.name, method, f"a key has at most {self.max_key_bytes} bytes of UTF-8 and no NUL", key=text)
        return text


class OncePerProcess(Generic[T]):
    """Lazily created value, created again in the child of a fork: a parent and a child must not share a connection."""

    _value: T | None

    def __init__(self, factory: Callable[[], T]) -> None:
        self._factory = factory
        self._forget()
        reference = weakref.ref(self)  # a registered hook is never removed and must not keep this object alive

        def reset_in_child() -> None:
            if instance := reference():
                instance._forget()

        os.register_at_fork(after_in_child=reset_in_child)

    def __call__(self) -> T:
        with self._lock:
            if self._value is None:
                self._value = self._factory()
            return self._value

    def _forget(self) -> None:
        self._lock = Lock()  # replaced too: at the fork another thread may have held the old lock
        self._value = None


class RemainderReader:
    """Reader of the rest of a seekable file. `read` returns all requested bytes or raises OSError if the file became shorter.

    `close` does nothing, because the file belongs to the caller."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, start = source, source.tell()
        self._end = source.seek(0, os.SEEK_END)
        self.size = max(0, self._end - start)
        source.seek(start)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._source.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._source.seek(*(self._end + offset, os.SEEK_SET) if whence == os.SEEK_END else (offset, whence))

    def read(self, size: int | None = None) -> bytes:
        remaining = max(0, self._end - self.tell())
        remaining = remaining if size is None or size < 0 else min(remaining, size)
        chunks: list[bytes] = []
        while remaining:
            chunks.append(self._source.read(remaining))
            if not chunks[-1]:
                raise OSError("the file became shorter while it was read")
            remaining -= len(chunks[-1])
        return b"".join(chunks)

    def close(self) -> None:
        pass
