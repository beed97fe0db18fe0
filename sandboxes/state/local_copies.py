"""Files of the local copies of snapshots: durable writes and digests."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from sandboxes.claims import note_progress
from sandboxes.storage.base import CHUNK_BYTES, StoreError

TEMPORARY_PREFIX = ".new-"  # of incomplete local copies; the prune sweep removes those that a crash has left
SYNC_INTERVAL_BYTES = 256 << 20  # a single sync of all of a large file may be silent for longer than its claim lasts


def write_file(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
    """Write a file, which appears complete or not at all. Return its size in bytes and its SHA-256. Raise StoreError."""
    size, synced, digest = 0, 0, hashlib.sha256()
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    try:
        with temporary.open("wb") as out:
            for chunk in chunks:
                size += len(chunk)
                digest.update(chunk)
                out.write(chunk)
                if size - synced >= SYNC_INTERVAL_BYTES:
                    os.fdatasync(out.fileno())
                    synced = size
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError("local copy", "persist", str(error)) from error
    return size, digest.hexdigest()


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            note_progress()
            digest.update(chunk)
    return digest.hexdigest()
