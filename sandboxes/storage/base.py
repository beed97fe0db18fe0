"""The port to where state is kept: keys are text, values are bytes. One suite checks every backend.

A key is 1 to 512 bytes of UTF-8 with no NUL; `/` groups keys for `list`, nothing more. `set` is atomic: a reader sees
the old value or the new one, and after it returns the value survives a crash of this process and, where the backend
can promise it, of the machine."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import BinaryIO

CHUNK = 1 << 20  # bytes


class StoreError(Exception):
    """The store did not do what it was asked; whether it acted is unknown. The same call may be repeated."""

    code = "store_unavailable"


class KeyValueStore(ABC):
    """See the module's docstring for what holds for every method. StoreError when the backend does not answer."""

    name: str

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
    def list(self, prefix: str = "") -> Iterator[str]:
        """Every key that starts with `prefix`, in order."""

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def size(self) -> int:
        """How many keys there are."""
        return sum(1 for _ in self.list())

    def is_empty(self) -> bool:
        return next(iter(self.list()), None) is None

    def clear(self, prefix: str = "") -> None:
        """Remove every key that starts with `prefix`."""
        for key in [*self.list(prefix)]:
            self.remove(key)

    def upload(self, key: str, source: BinaryIO) -> None:
        """`set` from a file. Backends that can, do it without holding all of it in memory."""
        self.set(key, source.read())

    def download(self, key: str, target: BinaryIO) -> bool:
        """`get` into a file; False if there is no such key."""
        value = self.get(key)
        if value is None:
            return False
        target.write(value)
        return True


def check_key(key: str) -> str:
    """The key itself, or ValueError: a wrong key is a bug of the caller's."""
    if not 0 < len(key.encode()) <= 512 or "\0" in key:
        raise ValueError(f"not a key: {key[:80]!r}")
    return key
