"""What an agent leaves behind besides files, kept for each of its leases: chat history, artifacts, audit log, session index.

Everything is under `stores/<did>/<lease>/`, and below that:

    chat, audit      events in the order of their stamps (see journal); an event is never changed
        standard:    events/<stamp>.<size>
        journaled:   journal/…
    artifacts        content/<stamp>.<size>, and an index that names the current one. New content first, then the index, the
                     old content last: a crash leaves only what nothing names, which `prune` removes
        standard:    named/<name>/<stamp>.<size>
        journaled:   journal/…
    sessions         <session id>: one small document each, rewritten in its place

Standard mode is one key for each event and artifact; nothing is read in order to be changed, and no key but a session's is
written twice, so that a store which takes one write a second for a key is never asked for more. Journaled mode appends.
What was stored in one mode is not shown in the other, and goes with its lease.

Every read asks the store, so several control planes on one store see what the others wrote. Cloudflare KV is the exception,
by up to a minute: a list may miss what is new and a session may be shown as it was; it also refuses a second write of a
session within a second, which is a StoreError here."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings

from sandboxes import storage
from sandboxes.storage.base import Entry, KeyValueStore, StoreError, StoreRefused
from sandboxes.stores.artifacts import ArtifactStore, JournalArtifactIndex, KeyArtifactIndex
from sandboxes.stores.events import EventStore, JournalEventLog, KeyEventLog
from sandboxes.stores.journal import Journal
from sandboxes.stores.limits import (
    DEFAULT_LIMITS,
    NAME_PATTERN,
    NAME_RULES,
    PruneResult,
    RetentionBounds,
    StoreLimits,
    check_size,
    encode_json,
)

log = structlog.get_logger(__name__)
KEY_PREFIX = "stores/"
OWNER_PATTERN = re.compile(rf"{KEY_PREFIX}([^/]+)/([0-9a-f]{{32}})/")
PRUNE_MIN_BYTES, PRUNE_MIN_KEYS = 1 << 20, 64  # bytes and keys: a lease with less is not looked at more closely by `prune`
LEASE_BATCH_SIZE = 100  # leases to ask about


@dataclass(frozen=True)
class Session:
    id: str
    at: datetime  # of its last change
    actor: str
    said: dict[str, Any]


class SessionStore:
    """A small document for each session, by id. The last writer wins."""

    def __init__(self, store: KeyValueStore, prefix: str, limits: StoreLimits = DEFAULT_LIMITS) -> None:
        self.store, self.prefix, self.limits = store, prefix, limits

    def put(self, session_id: str, said: Mapping[str, Any], *, now: datetime, actor: str = "") -> Session:
        """StoreRefused: the id or the size."""
        if not re.fullmatch(NAME_PATTERN, session_id, re.ASCII):
            raise StoreRefused("stores", "put", f"a session's id has {NAME_RULES}", key=session_id)
        check_size("put", "session", len(encode_json(said)), self.limits.max_session_bytes)
        row = {"at": now.isoformat(), "actor": actor, "said": said}
        self.store.set(f"{self.prefix}/{session_id}", encode_json(row))
        return Session(session_id, now, actor, dict(said))

    def read(self, session_id: str) -> Session | None:
        row = self.store.get(f"{self.prefix}/{session_id}") if re.fullmatch(NAME_PATTERN, session_id, re.ASCII) else None
        if row is None:
            return None
        known = json.loads(row)
        return Session(session_id, datetime.fromisoformat(known["at"]), known["actor"], known["said"])

    def page(self, *, behind: str = "", limit: int = 50) -> tuple[list[Session], bool]:
        """Some sessions in the order of their ids, those behind this one, and whether there are more."""
        ids = [found for found in self._ids() if found > behind]
        found = (self.read(one) for one in ids[:limit])
        return [session for session in found if session], len(ids) > limit

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        """Those whose last change is oldest go until the rest is within bounds."""
        every = sorted(
            (session.at, len(encode_json(session.said)), session.id) for one in self._ids() if (session := self.read(one))
        )
        doomed = every[: bounds.surplus([(at, size) for at, size, _ in every])]
        self.store.remove_many([f"{self.prefix}/{one}" for _, _, one in doomed])
        return PruneResult.of(size for _, size, _ in doomed)

    def _ids(self) -> Iterator[str]:
        return (key.rpartition("/")[2] for key in self.store.list(f"{self.prefix}/"))


class LeaseStores:
    """The stores of one lease."""

    def __init__(
        self,
        store: KeyValueStore,
        did: str,
        lease: UUID,
        *,
        journaled: bool,
        sync: bool = True,
        limits: StoreLimits = DEFAULT_LIMITS,
    ) -> None:
        root = f"{KEY_PREFIX}{did}/{lease.hex}"

        def journal(name: str) -> Journal:
            return Journal(store, f"{root}/{name}/journal", sync=sync)

        def events(name: str) -> EventStore:
            return EventStore(JournalEventLog(journal(name)) if journaled else KeyEventLog(store, f"{root}/{name}"), limits)

        index = JournalArtifactIndex(journal("artifacts")) if journaled else KeyArtifactIndex(store, f"{root}/artifacts")
        self.chat, self.audit = events("chat"), events("audit")
        self.artifacts = ArtifactStore(store, f"{root}/artifacts", index, limits)
        self.sessions = SessionStore(store, f"{root}/sessions", limits)
        self.limits = limits

    def prune(self, *, now: datetime) -> PruneResult:
        """Each of them is within its limits."""
        limits = self.limits
        events = RetentionBounds(most=limits.max_events, max_total_bytes=limits.max_total_event_bytes)
        artifacts = RetentionBounds(most=limits.max_artifacts, max_total_bytes=limits.max_total_artifact_bytes)
        pruned = self.chat.prune(events) + self.audit.prune(events)
        return (
            pruned + self.artifacts.prune(artifacts, now=now) + self.sessions.prune(RetentionBounds(most=limits.max_sessions))
        )


def open_stores(did: str, lease: UUID) -> LeaseStores:
    """The stores of a lease, where and how the settings say."""
    return _open_stores(storage.get_store(), did, lease)


def prune_stores(*, now: datetime, over: Callable[[Sequence[UUID]], Collection[UUID]]) -> PruneResult:
    """Everything is gone that was kept for leases which are over for long enough, and of the others the oldest of what is
    more than the limits allow. `over` picks from some leases those of the first kind; it is asked in batches.

    It lists the whole store. A lease that fails is noted, and does not hold up the others."""
    store, pruned = storage.get_store(), PruneResult()
    for (did, lease), entries, is_over in _mark_ended(_group_by_lease(store), over):
        try:
            if is_over:
                store.remove_many([entry.key for entry in entries])
                pruned += PruneResult.of(_entry_size(entry) for entry in entries)
            elif len(entries) > PRUNE_MIN_KEYS or sum(_entry_size(entry) for entry in entries) > PRUNE_MIN_BYTES:
                pruned += _open_stores(store, did, lease).prune(now=now)
        except StoreError as failed:
            log.warning("prune failed", lease=str(lease), error=str(failed))
            pruned.failures.append(f"{lease}: {failed}")
    return pruned


def _open_stores(store: KeyValueStore, did: str, lease: UUID) -> LeaseStores:
    return LeaseStores(store, did, lease, journaled=settings.STORAGE_MODE == "journaled", sync=settings.STORAGE_SYNC)


StoreOwner = tuple[str, UUID]  # agent and lease


def _group_by_lease(store: KeyValueStore) -> Iterator[tuple[StoreOwner, list[Entry]]]:
    for owner, entries in groupby(store.entries(KEY_PREFIX), _parse_owner):
        if owner:  # else it is not ours
            yield owner, [*entries]


def _parse_owner(entry: Entry) -> StoreOwner | None:
    found = OWNER_PATTERN.match(entry.key)
    return (found[1], UUID(found[2])) if found else None


def _mark_ended(
    found: Iterator[tuple[StoreOwner, list[Entry]]], over: Callable[[Sequence[UUID]], Collection[UUID]]
) -> Iterator[tuple[StoreOwner, list[Entry], bool]]:
    for _, batch in groupby(enumerate(found), lambda numbered: numbered[0] // LEASE_BATCH_SIZE):
        some = [one for _, one in batch]
        ended = {*over([lease for (_, lease), _ in some])}
        yield from ((owner, entries, owner[1] in ended) for owner, entries in some)


def _entry_size(entry: Entry) -> int:
    """Its bytes; for a store that does not tell, what the key says."""
    said = re.search(r"\.([0-9]+)\Z", entry.key)
    return entry.size if entry.size is not None else int(said[1]) if said else 0
