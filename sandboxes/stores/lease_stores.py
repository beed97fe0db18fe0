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
from sandboxes.stores.artifacts import Artifacts, JournalIndex, KeyIndex
from sandboxes.stores.events import Events, JournalLog, KeyLog
from sandboxes.stores.journal import Journal
from sandboxes.stores.limits import LIMITS, NAME, NAME_ACCEPTS, Bounds, Limits, Pruned, check_size, written

log = structlog.get_logger(__name__)
ROOT = "stores/"
OWNER = re.compile(rf"{ROOT}([^/]+)/([0-9a-f]{{32}})/")
SMALL, FEW = 1 << 20, 64  # bytes and keys: a lease with less is not looked at more closely by `prune`
AT_ONCE = 100  # leases to ask about


@dataclass(frozen=True)
class Session:
    id: str
    at: datetime  # of its last change
    actor: str
    said: dict[str, Any]


class Sessions:
    """A small document for each session, by id. The last writer wins."""

    def __init__(self, store: KeyValueStore, prefix: str, limits: Limits = LIMITS) -> None:
        self.store, self.prefix, self.limits = store, prefix, limits

    def put(self, session_id: str, said: Mapping[str, Any], *, now: datetime, actor: str = "") -> Session:
        """StoreRefused: the id or the size."""
        if not re.fullmatch(NAME, session_id, re.ASCII):
            raise StoreRefused("stores", "put", f"a session's id has {NAME_ACCEPTS}", key=session_id)
        check_size("put", "session", len(written(said)), self.limits.session_bytes)
        row = {"at": now.isoformat(), "actor": actor, "said": said}
        self.store.set(f"{self.prefix}/{session_id}", written(row))
        return Session(session_id, now, actor, dict(said))

    def read(self, session_id: str) -> Session | None:
        row = self.store.get(f"{self.prefix}/{session_id}") if re.fullmatch(NAME, session_id, re.ASCII) else None
        if row is None:
            return None
        known = json.loads(row)
        return Session(session_id, datetime.fromisoformat(known["at"]), known["actor"], known["said"])

    def page(self, *, behind: str = "", limit: int = 50) -> tuple[list[Session], bool]:
        """Some sessions in the order of their ids, those behind this one, and whether there are more."""
        ids = [found for found in self._ids() if found > behind]
        found = (self.read(one) for one in ids[:limit])
        return [session for session in found if session], len(ids) > limit

    def prune(self, bounds: Bounds) -> Pruned:
        """Those whose last change is oldest go until the rest is within bounds."""
        every = sorted(
            (session.at, len(written(session.said)), session.id) for one in self._ids() if (session := self.read(one))
        )
        doomed = every[: bounds.surplus([(at, size) for at, size, _ in every])]
        self.store.remove_many([f"{self.prefix}/{one}" for _, _, one in doomed])
        return Pruned.of(size for _, size, _ in doomed)

    def _ids(self) -> Iterator[str]:
        return (key.rpartition("/")[2] for key in self.store.list(f"{self.prefix}/"))


class Stores:
    """The stores of one lease."""

    def __init__(
        self, store: KeyValueStore, did: str, lease: UUID, *, journaled: bool, sync: bool = True, limits: Limits = LIMITS
    ) -> None:
        root = f"{ROOT}{did}/{lease.hex}"

        def journal(name: str) -> Journal:
            return Journal(store, f"{root}/{name}/journal", sync=sync)

        def events(name: str) -> Events:
            return Events(JournalLog(journal(name)) if journaled else KeyLog(store, f"{root}/{name}"), limits)

        index = JournalIndex(journal("artifacts")) if journaled else KeyIndex(store, f"{root}/artifacts")
        self.chat, self.audit = events("chat"), events("audit")
        self.artifacts = Artifacts(store, f"{root}/artifacts", index, limits)
        self.sessions = Sessions(store, f"{root}/sessions", limits)
        self.limits = limits

    def prune(self, *, now: datetime) -> Pruned:
        """Each of them is within its limits."""
        limits = self.limits
        events = Bounds(most=limits.most_events, most_bytes=limits.most_event_bytes)
        artifacts = Bounds(most=limits.most_artifacts, most_bytes=limits.most_artifact_bytes)
        pruned = self.chat.prune(events) + self.audit.prune(events)
        return pruned + self.artifacts.prune(artifacts, now=now) + self.sessions.prune(Bounds(most=limits.most_sessions))


def of(did: str, lease: UUID) -> Stores:
    """The stores of a lease, where and how the settings say."""
    return _stores(storage.store(), did, lease)


def prune(*, now: datetime, over: Callable[[Sequence[UUID]], Collection[UUID]]) -> Pruned:
    """Everything is gone that was kept for leases which are over for long enough, and of the others the oldest of what is
    more than the limits allow. `over` picks from some leases those of the first kind; it is asked in batches.

    It lists the whole store. A lease that fails is noted, and does not hold up the others."""
    store, pruned = storage.store(), Pruned()
    for (did, lease), entries, is_over in _asked(_by_lease(store), over):
        try:
            if is_over:
                store.remove_many([entry.key for entry in entries])
                pruned += Pruned.of(_size(entry) for entry in entries)
            elif len(entries) > FEW or sum(_size(entry) for entry in entries) > SMALL:
                pruned += _stores(store, did, lease).prune(now=now)
        except StoreError as failed:
            log.warning("prune failed", lease=str(lease), error=str(failed))
            pruned.failures.append(f"{lease}: {failed}")
    return pruned


def _stores(store: KeyValueStore, did: str, lease: UUID) -> Stores:
    return Stores(store, did, lease, journaled=settings.STORAGE_MODE == "journaled", sync=settings.STORAGE_SYNC)


Owner = tuple[str, UUID]  # agent and lease


def _by_lease(store: KeyValueStore) -> Iterator[tuple[Owner, list[Entry]]]:
    for owner, entries in groupby(store.entries(ROOT), _owner):
        if owner:  # else it is not ours
            yield owner, [*entries]


def _owner(entry: Entry) -> Owner | None:
    found = OWNER.match(entry.key)
    return (found[1], UUID(found[2])) if found else None


def _asked(
    found: Iterator[tuple[Owner, list[Entry]]], over: Callable[[Sequence[UUID]], Collection[UUID]]
) -> Iterator[tuple[Owner, list[Entry], bool]]:
    for _, batch in groupby(enumerate(found), lambda numbered: numbered[0] // AT_ONCE):
        some = [one for _, one in batch]
        ended = {*over([lease for (_, lease), _ in some])}
        yield from ((owner, entries, owner[1] in ended) for owner, entries in some)


def _size(entry: Entry) -> int:
    """Its bytes; for a store that does not tell, what the key says."""
    said = re.search(r"\.([0-9]+)\Z", entry.key)
    return entry.size if entry.size is not None else int(said[1]) if said else 0
