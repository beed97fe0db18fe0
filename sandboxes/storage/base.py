"""The port to where state is kept: keys are text, values are bytes. One suite checks every backend.

A key is UTF-8 without NUL, of as many bytes as `longest_key` says; `/` groups keys for listing, nothing more. `set` and
`upload` are atomic: a reader sees the old value or the new one, and after they return the value survives a crash of this
process and, where the backend can promise it, of the machine. Whatever goes wrong is a StoreError; a key or value that
the backend would never take is a StoreRefused, raised before anything is sent. Every method may be called by many
threads at once, and in a child of a fork."""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from threading import Lock
from typing import BinaryIO, Generic, TypeVar

CHUNK_BYTES = 1 << 20  # bytes
MAX_PAGE_SIZE = 1000  # keys of one listing
T = TypeVar("T")


class StoreError(Exception):
    """The store did not do what it was asked; whether it acted is unknown. The same call may be repeated."""

    code = "store_unavailable"

    def __init__(self, backend: str, method: str, why: str, *, key: str = "") -> None:
        self.backend, self.method, self.why, self.key = backend, method, why, key
        super().__init__(f"{backend}: {method}{f' of {key[:200]!r}' if key else ''}: {why}")


class StoreRefused(StoreError):
    """The key or the value is outside what this backend takes; repeating it does not help."""

    code = "store_refused"


@dataclass(frozen=True)
class Entry:
    """One key as a listing shows it. What the backend does not tell in a listing is None."""

    key: str
    size: int | None = None  # bytes
    modified_at: datetime | None = None


@dataclass(frozen=True)
class Page:
    """Some entries, and the cursor that gives the following ones; "" at the end."""

    entries: list[Entry]
    following: str = ""


class KeyValueStore(ABC):
    """See the module's docstring for what holds for every method."""

    name: str
    max_key_bytes = 512  # bytes
    max_value_bytes: int | None = None  # bytes; None: no limit worth checking
    supports_append = False  # there is `append`, too

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store a value, in the place of an older one if there is any."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Forget a key. Removing what is not there is success."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Is there a value? The value is not fetched."""

    @abstractmethod
    def page(self, prefix: str = "", *, following: str = "", limit: int = MAX_PAGE_SIZE) -> Page:
        """Up to `limit` (1 to 1000) of the keys that start with `prefix`, in the order of their UTF-8 bytes. `following`
        is what the page before said; what is set or removed between two pages may or may not be seen."""

    @abstractmethod
    def upload(self, key: str, source: BinaryIO) -> None:
        """`set` from the rest of a seekable file, without holding all of it in memory where the backend allows."""

    @abstractmethod
    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        """`get` into a file; False if there is no such key. With `start` and `length` only these bytes, fewer where the
        value ends. A body that ends early is a StoreError, never a short file."""

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Every entry whose key starts with `prefix`, page after page."""
        following = ""
        while True:
            page = self.page(prefix, following=following)
            yield from page.entries
            if not page.following:
                return
            following = page.following

    def list(self, prefix: str = "") -> Iterator[str]:
        """Every key that starts with `prefix`, in order."""
        return (entry.key for entry in self.entries(prefix))

    def size(self, prefix: str = "") -> int:
        """How many keys start with `prefix`."""
        return sum(1 for _ in self.entries(prefix))

    def is_empty(self, prefix: str = "") -> bool:
        return not self.page(prefix, limit=1).entries

    def remove_many(self, keys: Iterable[str]) -> None:
        """`remove` for each; backends that can take many at once do."""
        for key in keys:
            self.remove(key)

    def clear(self, prefix: str = "") -> None:
        """Remove every key that starts with `prefix`."""
        found = self.list(prefix)
        while some := [*islice(found, MAX_PAGE_SIZE)]:
            self.remove_many(some)

    def append(self, key: str, data: bytes, *, sync: bool = True) -> None:
        """Add to the end of a value, which is made if it is not there. Not atomic: after a crash any beginning of the data
        may be there. One key is appended to by one caller at a time. With `sync` it then survives what `set` survives."""
        raise StoreRefused(self.name, "append", "nothing can be appended to a value here", key=key)

    def sweep_leftovers(self, older_than: datetime) -> int:
        """Remove what crashed writes have left where no listing shows it, if it was begun before then; how much it was."""
        return 0

    @contextmanager
    def asking(self, method: str, key: str = "") -> Iterator[None]:
        """An OSError in here, also one of the caller's file, is a StoreError."""
        try:
            yield
        except OSError as failed:
            raise StoreError(self.name, method, failed.strerror or str(failed), key=key) from failed

    def check_key(self, key: str, method: str) -> str:
        """The key itself, or StoreRefused."""
        if not key:
            raise StoreRefused(self.name, method, "a key is not empty")
        return self.check_text(key, method)

    def check_value(self, size: int, method: str, key: str) -> None:
        if self.max_value_bytes is not None and size > self.max_value_bytes:
            raise StoreRefused(self.name, method, f"a value has at most {self.max_value_bytes} bytes, not {size}", key=key)

    def check_page(self, prefix: str, limit: int) -> None:
        self.check_text(prefix, "page")  # also a whole key is a prefix
        if not 1 <= limit <= MAX_PAGE_SIZE:
            raise StoreRefused(self.name, "page", f"a page has 1 to {MAX_PAGE_SIZE} keys, not {limit}")

    def check_range(self, key: str, start: int, length: int | None) -> None:
        if start < 0 or (length is not None and length < 0):
            raise StoreRefused(self.name, "download", "a range begins at a byte of the value and has a length", key=key)

    def check_text(self, text: str, method: str) -> str:
        """A key, or the beginning of one, or StoreRefused."""
        try:
            length = len(text.encode())
        except UnicodeEncodeError:
            raise StoreRefused(self.name, method, "a key is text without lone surrogates", key=repr(text)) from None
        if length > self.max_key_bytes or "\0" in text:
            raise StoreRefused(self.name, method, f"a key has at most {self.max_key_bytes} bytes of UTF-8 and no NUL", key=text)
        return text


class OncePerProcess(Generic[T]):
    """Something made when it is first asked for, and made anew in a child of a fork: two processes on one connection
    would read each other's answers."""

    _made: T | None

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._forget()
        mine = weakref.ref(self)  # for what is registered stays registered

        def in_child() -> None:
            if here := mine():
                here._forget()

        os.register_at_fork(after_in_child=in_child)

    def __call__(self) -> T:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _forget(self) -> None:
        self._lock = Lock()  # also this: another thread may have held it in the parent
        self._made = None


class RemainderReader:
    """What is still to be read of a seekable file: all of it or an OSError, however short its reads are. Closing it does
    nothing, for the file is the caller's."""

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
        left = max(0, self._end - self.tell())
        left = left if size is None or size < 0 else min(left, size)
        found: list[bytes] = []
        while left:
            found.append(self._source.read(left))
            if not found[-1]:
                raise OSError("the file has become shorter while it was read")
            left -= len(found[-1])
        return b"".join(found)

    def close(self) -> None:
        pass
