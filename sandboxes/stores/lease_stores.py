"""Chat history, artifacts, audit log and session index of a lease.

All keys are under `stores/<did>/<lease>/`. `<stamp>` is `journal.Stamp`:

    chat, audit      events in the order of their stamps; an event is never changed
        standard:    events/<stamp>.<size>
        journaled:   journal/…
    artifacts        content/<stamp>.<size>, and an index of the current versions. Write order: new content, index, removal of
                     the old content. A crash leaves at worst content outside the index, which `prune` removes
        standard:    named/<name>/<stamp>.<size>
        journaled:   journal/…
    sessions         <session id>: one small document each, overwritten in place

Standard mode has one key per event and per version of an artifact. No value is read in order to be modified, and only session
keys are written more than once. Journaled mode appends records to journals. An entry is visible in the mode in which it was
stored; entries of both modes are removed with their lease.

Nothing is cached: processes on one store see each other's writes at once. The exception is Cloudflare KV, with a delay of up to
a minute: a listing may lack new keys, and a session may be outdated. Cloudflare KV also accepts one write per second of a key,
so a second write of a session within a second raises StoreError."""

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
from sandboxes.stores.artifacts import ArtifactStore, ContentClaims, JournalArtifactIndex, KeyArtifactIndex
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
PRUNE_MIN_BYTES, PRUNE_MIN_KEYS = 1 << 20, 64  # the sweep skips a live lease that exceeds neither
LEASE_BATCH_SIZE = 100  # leases per call of `prune_stores(find_ended=…)`


@dataclass(frozen=True)
class Session:
    """An entry of a lease's session index."""

    id: str
    at: datetime  # last change
    actor: str
    document: dict[str, Any]


class SessionStore:
    """Session index of a lease: one small JSON document per session id. The last writer wins."""

    def __init__(self, store: KeyValueStore, prefix: str, limits: StoreLimits = DEFAULT_LIMITS) -> None:
        self.store, self.prefix, self.limits = store, prefix, limits

    def put(self, session_id: str, document: Mapping[str, Any], *, now: datetime, actor: str = "") -> Session:
        """Create or replace a session's document. Raise StoreRefused for an invalid id or size."""
        if not re.fullmatch(NAME_PATTERN, session_id, re.ASCII):
            raise StoreRefused("stores", "put", f"a session's id has {NAME_RULES}", key=session_id)
        check_size("put", "session", len(encode_json(document)), self.limits.max_session_bytes)
        row = {"at": now.isoformat(), "actor": actor, "said": document}
        self.store.set(f"{self.prefix}/{session_id}", encode_json(row))
        return Session(session_id, now, actor, dict(document))

    def read(self, session_id: str) -> Session | None:
        row = self.store.get(f"{self.prefix}/{session_id}") if re.fullmatch(NAME_PATTERN, session_id, re.ASCII) else None
        if row is None:
            return None
        session = json.loads(row)
        return Session(session_id, datetime.fromisoformat(session["at"]), session["actor"], session["said"])

    def page(self, *, after: str = "", limit: int = 50) -> tuple[list[Session], bool]:
        """Return up to `limit` sessions whose ids sort after `after`, in order, and whether there are more."""
        ids = [session_id for session_id in self._ids() if session_id > after]
        sessions = (self.read(session_id) for session_id in ids[:limit])
        return [session for session in sessions if session], len(ids) > limit

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        """Remove the sessions beyond the bounds, least recently changed first."""
        sessions = sorted(
            (session.at, len(encode_json(session.document)), session.id)
            for session_id in self._ids()
            if (session := self.read(session_id))
        )
        removable = sessions[: bounds.count_surplus([(at, size) for at, size, _ in sessions])]
        self.store.remove_many([f"{self.prefix}/{session_id}" for _, _, session_id in removable])
        return PruneResult.from_sizes(size for _, size, _ in removable)

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

    def prune(self, *, claims: ContentClaims, now: datetime) -> PruneResult:
        """Remove the oldest entries above the limits of each store."""
        limits = self.limits
        events = RetentionBounds(max_count=limits.max_events, max_total_bytes=limits.max_total_event_bytes)
        artifacts = RetentionBounds(max_count=limits.max_artifacts, max_total_bytes=limits.max_total_artifact_bytes)
        pruned = self.chat.prune(events) + self.audit.prune(events)
        return (
            pruned
            + self.artifacts.prune(artifacts, claims=claims, now=now)
            + self.sessions.prune(RetentionBounds(max_count=limits.max_sessions))
        )


def open_stores(did: str, lease: UUID) -> LeaseStores:
    """Open the stores of a lease, in the configured storage mode."""
    return _open_stores(storage.get_store(), did, lease)


def prune_stores(
    *, now: datetime, find_ended: Callable[[Sequence[UUID]], Collection[UUID]], claims: ContentClaims
) -> PruneResult:
    """Remove the stores of ended leases, and the oldest entries above the limits from the stores of other leases.

    Lists all stores. `find_ended` takes a batch of leases and returns those whose stores are to be removed. A failure is
    recorded in the result and does not stop the sweep."""
    store, pruned = storage.get_store(), PruneResult()
    for (did, lease), entries, is_ended in _mark_ended(_group_by_lease(store), find_ended):
        try:
            if is_ended:
                store.remove_many([entry.key for entry in entries])
                pruned += PruneResult.from_sizes(_entry_size(entry) for entry in entries)
            elif len(entries) > PRUNE_MIN_KEYS or sum(_entry_size(entry) for entry in entries) > PRUNE_MIN_BYTES:
                pruned += _open_stores(store, did, lease).prune(claims=claims, now=now)
        except StoreError as error:
            log.warning("prune failed", lease=str(lease), error=str(error))
            pruned.failures.append(f"{lease}: {error}")
    return pruned


def _open_stores(store: KeyValueStore, did: str, lease: UUID) -> LeaseStores:
    return LeaseStores(store, did, lease, journaled=settings.STORAGE_MODE == "journaled", sync=settings.STORAGE_SYNC)


StoreOwner = tuple[str, UUID]  # agent and lease


def _group_by_lease(store: KeyValueStore) -> Iterator[tuple[StoreOwner, list[Entry]]]:
    for owner, entries in groupby(store.entries(KEY_PREFIX), _parse_owner):
        if owner:  # keys of another format are ignored
            yield owner, [*entries]


def _parse_owner(entry: Entry) -> StoreOwner | None:
    match = OWNER_PATTERN.match(entry.key)
    return (match[1], UUID(match[2])) if match else None


def _mark_ended(
    grouped: Iterator[tuple[StoreOwner, list[Entry]]], find_ended: Callable[[Sequence[UUID]], Collection[UUID]]
) -> Iterator[tuple[StoreOwner, list[Entry], bool]]:
    for _, batch in groupby(enumerate(grouped), lambda numbered: numbered[0] // LEASE_BATCH_SIZE):
        owners = [numbered[1] for numbered in batch]
        ended = {*find_ended([lease for (_, lease), _ in owners])}
        yield from ((owner, entries, owner[1] in ended) for owner, entries in owners)


def _entry_size(entry: Entry) -> int:
    """Return the size in bytes of an entry: as listed by the store, else as in the entry's key, else 0."""
    match = re.search(r"\.([0-9]+)\Z", entry.key)
    return entry.size if entry.size is not None else int(match[1]) if match else 0
