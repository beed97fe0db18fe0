"""Artifacts of a lease: files with a name and a media type.

Write order: claim of the content's key, new content, index entry, end of the claim, removal of the old content. A crash leaves
at worst content that is not in the index, which `prune` removes unless its key is claimed."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, BinaryIO, Protocol

from sandboxes.storage.base import CHUNK_BYTES, KeyValueStore, StoreError, StoreRefused
from sandboxes.storage.observed import DeleteRefused
from sandboxes.stores.journal import Journal, Record, Stamp, create_stamp
from sandboxes.stores.limits import (
    COMPACTION_MIN_SEGMENTS,
    DEFAULT_LIMITS,
    MEDIA_TYPE_PATTERN,
    NAME_PATTERN,
    NAME_RULES,
    ORPHAN_GRACE_PERIOD,
    PruneResult,
    RetentionBounds,
    StoreLimits,
    check_size,
    compact_journal,
    count_segments,
    encode_json,
    parse_stamped_key,
)

# A replacement during a read can remove the listed version. It can also hide both versions: a directory listing that runs while
# one file is added and another is removed may contain neither.
MAX_READ_ATTEMPTS = 3


class ContentClaims(Protocol):
    """Claims on the keys of content that is being stored, however long that takes."""

    def claim(self, key: str, source: BinaryIO) -> AbstractContextManager[BinaryIO]:
        """Claim a key while the body stores the yielded file, whose reads extend the claim, and the index entry."""

    def end(self, key: str) -> None:
        """End a claim of this process. Raise StoreError if the claim was lost: the content may have been removed."""

    def find(self, keys: Collection[str]) -> set[str]:
        """Return those of the keys that are claimed."""


@dataclass(frozen=True)
class ArtifactVersion:
    """An index entry: the current version of an artifact, or a replaced version that is not removed yet."""

    name: str
    stamp: Stamp
    size: int  # bytes

    @property
    def at(self) -> datetime:
        return self.stamp.at


@dataclass(frozen=True)
class Artifact(ArtifactVersion):
    """A file with a name and a media type. Storing another artifact under the same name replaces it."""

    media_type: str
    sha256: str
    actor: str = ""


class ArtifactIndex(ABC):
    """Index of a lease's artifacts."""

    @abstractmethod
    def put(self, artifact: Artifact) -> None: ...

    @abstractmethod
    def versions(self, name: str = "") -> Sequence[ArtifactVersion]:
        """Return the versions of one name or of all, oldest first. The last version of a name is current."""

    @abstractmethod
    def load(self, version: ArtifactVersion) -> Artifact | None:
        """Return the artifact of a version; None if the version was removed since."""

    @abstractmethod
    def remove(self, versions: Sequence[ArtifactVersion], *, now: datetime) -> None: ...

    @abstractmethod
    def compact_if_needed(self, *, now: datetime) -> None:
        """Release the space of removed entries."""


class KeyArtifactIndex(ArtifactIndex):
    """Index with one key per version."""

    def __init__(self, store: KeyValueStore, prefix: str) -> None:
        self.store, self.prefix = store, f"{prefix}/named"

    def put(self, artifact: Artifact) -> None:
        self.store.set(self._key(artifact), _encode_artifact(artifact))

    def versions(self, name: str = "") -> Sequence[ArtifactVersion]:
        keys = self.store.list(f"{self.prefix}/{name}/" if name else f"{self.prefix}/")
        versions = [ArtifactVersion(key.split("/")[-2], *parse_stamped_key(key)) for key in keys]
        return sorted(versions, key=lambda version: version.stamp)

    def load(self, version: ArtifactVersion) -> Artifact | None:
        row = self.store.get(self._key(version))
        return None if row is None else _decode_artifact(json.loads(row))

    def remove(self, versions: Sequence[ArtifactVersion], *, now: datetime) -> None:
        self.store.remove_many([self._key(version) for version in versions])

    def compact_if_needed(self, *, now: datetime) -> None:
        pass

    def _key(self, version: ArtifactVersion) -> str:
        return f"{self.prefix}/{version.name}/{version.stamp}.{version.size}"


class JournalArtifactIndex(ArtifactIndex):
    """Index as a journal of additions and, by stamp, removals. The order of the records does not matter."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def put(self, artifact: Artifact) -> None:
        self.journal.append(_encode_artifact(artifact), now=artifact.at)

    def versions(self, name: str = "") -> Sequence[ArtifactVersion]:
        rows, removed = _parse_rows(self.journal.replay().records)
        current = [_decode_artifact(row) for row in rows.values() if row["stamp"] not in removed and name in ("", row["name"])]
        return sorted(current, key=lambda artifact: artifact.stamp)

    def load(self, version: ArtifactVersion) -> Artifact | None:
        assert isinstance(version, Artifact)  # `versions` returns nothing else
        return version

    def remove(self, versions: Sequence[ArtifactVersion], *, now: datetime) -> None:
        if versions:
            self.journal.append(encode_json({"gone": [str(version.stamp) for version in versions]}), now=now)

    def compact_if_needed(self, *, now: datetime) -> None:
        def keep(records: list[Record]) -> list[Record]:
            rows, removed = _parse_rows(records)
            # A recent removal is retained: the addition that it removes may reach the journal after this compaction.
            recent = [record for record in records if record not in rows and record.stamp.at > now - ORPHAN_GRACE_PERIOD]
            return [record for record, row in rows.items() if row["stamp"] not in removed] + recent

        if count_segments(self.journal) >= COMPACTION_MIN_SEGMENTS:
            compact_journal(self.journal, keep)


def _parse_rows(records: Iterable[Record]) -> tuple[dict[Record, dict[str, Any]], set[str]]:
    """Split records into additions, by record, and the stamps of removed artifacts."""
    rows = {record: json.loads(record.payload) for record in records}
    removed = set(chain.from_iterable(row.get("gone", ()) for row in rows.values()))
    return {record: row for record, row in rows.items() if "gone" not in row}, removed


class ArtifactStore:
    """Artifacts of a lease: index and content."""

    def __init__(self, store: KeyValueStore, prefix: str, index: ArtifactIndex, limits: StoreLimits = DEFAULT_LIMITS) -> None:
        self.store, self.prefix, self.index, self.limits = store, f"{prefix}/content", index, limits

    def put(
        self,
        name: str,
        source: BinaryIO,
        *,
        claims: ContentClaims,
        now: datetime,
        media_type: str = "application/octet-stream",
        actor: str = "",
    ) -> tuple[Artifact, bool]:
        """Store the rest of a seekable file. Return the artifact, and whether it replaced an older one of the same name.

        Of two concurrent calls the one with the later time wins. Raise StoreRefused for an invalid name, media type or size,
        and StoreError if the upload made no progress for so long that its claim was lost."""
        if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
            raise StoreRefused("stores", "put", f"an artifact's name has {NAME_RULES}", key=name)
        if not re.fullmatch(MEDIA_TYPE_PATTERN, media_type, re.ASCII):
            raise StoreRefused("stores", "put", f"{media_type[:80]!r} is not a media type", key=name)
        start = source.tell()
        size, digest = _measure(source)
        check_size("put", "artifact", size, self.limits.max_artifact_bytes)
        source.seek(start)
        artifact = Artifact(name, create_stamp(now), size, media_type, digest, actor)
        key = self._content_key(artifact)
        with claims.claim(key, source) as tracked:
            self.store.upload(key, tracked)
            self.index.put(artifact)
            try:
                claims.end(key)
            except StoreError:
                self.index.remove([artifact], now=now)
                raise
        older = [version for version in self.index.versions(name) if version.stamp < artifact.stamp]
        with suppress(DeleteRefused):  # raised in observe mode; `prune` removes replaced versions later
            self._remove_versions(older, now=now)
        return artifact, bool(older)

    def read(self, name: str) -> Artifact | None:
        """Return an artifact's index entry; None if there is no artifact of this name."""
        for _ in range(MAX_READ_ATTEMPTS):
            versions = self._find_versions(name)
            artifacts = (self.index.load(version) for version in reversed(versions))
            if not versions or (artifact := next(filter(None, artifacts), None)):
                return artifact if versions else None
        return None

    def fetch(self, name: str, target: BinaryIO) -> Artifact | None:
        """Write an artifact's verified content to an empty file and rewind it. Return the artifact; None if there is none.

        Raise StoreError if the content is missing or corrupt."""
        for _ in range(MAX_READ_ATTEMPTS):
            artifact = self.read(name)
            if artifact is None:
                return None
            if not self.store.download(self._content_key(artifact), target):
                continue  # replaced since the read
            target.seek(0)
            if _measure(target) != (artifact.size, artifact.sha256):
                key = self._content_key(artifact)
                raise StoreError(self.store.name, "download", "the content does not match its digest", key=key)
            target.seek(0)
            return artifact
        raise StoreError(self.store.name, "download", "the content is missing", key=f"{self.prefix}/{name}")

    def page(self, *, after: str = "", limit: int = 50) -> tuple[list[Artifact], bool]:
        """Return up to `limit` artifacts whose names sort after `after`, in order, and whether there are more."""
        current = {version.name: version for version in self.index.versions()}
        names = sorted(name for name in current if name > after)
        artifacts = (self.index.load(current[name]) or self.read(name) for name in names[:limit])
        return [artifact for artifact in artifacts if artifact], len(names) > limit

    def remove(self, name: str, *, now: datetime) -> bool:
        """Remove an artifact. Return False if there was none."""
        versions = self._find_versions(name)
        self._remove_versions(versions, now=now)
        return bool(versions)

    def prune(self, bounds: RetentionBounds, *, claims: ContentClaims, now: datetime) -> PruneResult:
        """Remove the oldest artifacts beyond the bounds, replaced versions, and content that crashes left outside the index."""
        versions = self.index.versions()
        current = {version.name: version for version in versions}
        oldest_first = sorted(current.values(), key=lambda version: version.stamp)
        surplus = oldest_first[: bounds.count_surplus([(version.stamp.at, version.size) for version in oldest_first])]
        removable = [version for version in versions if current[version.name] != version] + surplus
        unreferenced = self._find_unreferenced(versions, claims, before=now - ORPHAN_GRACE_PERIOD)
        self._remove_versions(removable, now=now)
        self.store.remove_many(unreferenced)
        self.index.compact_if_needed(now=now)
        return PruneResult.from_sizes(
            chain((version.size for version in removable), (parse_stamped_key(key)[1] for key in unreferenced))
        )

    def _find_unreferenced(self, versions: Sequence[ArtifactVersion], claims: ContentClaims, *, before: datetime) -> list[str]:
        """Return the keys of content older than `before` that is neither claimed nor in the index.

        If content is neither in `versions` nor claimed, the index is read again, so that an entry written meanwhile is seen: a
        claim ends after its entry."""
        keys = [key for key in self.store.list(f"{self.prefix}/") if parse_stamped_key(key)[0].at < before]
        candidates = _leave_out_referenced(keys, versions)
        claimed = claims.find(candidates)
        unclaimed = [key for key in candidates if key not in claimed]
        return _leave_out_referenced(unclaimed, self.index.versions()) if unclaimed else []

    def _find_versions(self, name: str) -> Sequence[ArtifactVersion]:
        if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
            return []
        return next(filter(None, (self.index.versions(name) for _ in range(MAX_READ_ATTEMPTS))), [])

    def _remove_versions(self, versions: Sequence[ArtifactVersion], *, now: datetime) -> None:
        self.index.remove(versions, now=now)
        self.store.remove_many([self._content_key(version) for version in versions])

    def _content_key(self, version: ArtifactVersion) -> str:
        return f"{self.prefix}/{version.stamp}.{version.size}"


def _leave_out_referenced(keys: Iterable[str], versions: Iterable[ArtifactVersion]) -> list[str]:
    referenced = {version.stamp for version in versions}
    return [key for key in keys if parse_stamped_key(key)[0] not in referenced]


def _measure(source: BinaryIO) -> tuple[int, str]:
    """Return the size and the SHA-256 of the rest of a file."""
    size, digest = 0, hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()


def _encode_artifact(artifact: Artifact) -> bytes:
    return encode_json({**vars(artifact), "stamp": str(artifact.stamp)})


def _decode_artifact(row: Mapping[str, Any]) -> Artifact:
    return Artifact(**{**row, "stamp": Stamp.parse(row["stamp"])})
