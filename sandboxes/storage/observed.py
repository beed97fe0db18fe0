"""Store of observe mode (LEASEHOLD_OBSERVE): it refuses to remove keys, and is otherwise the store behind it."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Never, cast

from sandboxes.storage.base import FindKept, KeyValueStore, StoreError


class DeleteRefused(StoreError):
    """Observe mode (LEASEHOLD_OBSERVE): nothing is deleted from the store."""

    code = "observe_mode"


class ObservedStore:
    """Proxy of a store without its methods that remove keys. get_store returns this proxy, so the refusal holds for every
    caller."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def remove(self, key: str) -> None:
        self._refuse("remove", key)

    def remove_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._refuse("remove_many", key)

    def clear(self, prefix: str = "") -> None:
        for key in self._store.list(prefix):
            self._refuse("clear", key)

    def sweep_leftovers(self, older_than: datetime, *, find_kept: FindKept) -> int:
        self._refuse("sweep_leftovers")

    def _refuse(self, method: str, key: str = "") -> Never:
        raise DeleteRefused(self._store.name, method, "observe mode (LEASEHOLD_OBSERVE): nothing is deleted", key=key)


def refuse_deletes(store: KeyValueStore) -> KeyValueStore:
    return cast(KeyValueStore, ObservedStore(store))
