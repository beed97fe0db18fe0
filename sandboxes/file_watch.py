"""Watch of a directory in a sandbox by repeated listings.

A listing costs the sandbox one `lstat` for each entry. The number of entries is limited, and the pause between two listings is
a multiple of the duration of the last one, so a watch uses at most a twentieth of one CPU. Listings work with every provider
and see changes by every program. inotify would need a resident process in the sandbox, loses events when its queue is full, and
has to list each new directory nevertheless.

A watch opens no run: it neither delays an eviction or a suspension nor wakes a sandbox. Nothing changes in a cold or suspended
sandbox, and the first listing after a wake shows the changes since the last one."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import structlog

from sandboxes.models import AWAKE_STATES, Sandbox, SandboxState
from sandboxes.providers.base import FileStat, Provider
from sandboxes.providers.errors import BadPath, Missing, NoSuchFile, Unavailable

log = structlog.get_logger(__name__)
MAX_ENTRIES = 10_000  # watched at once; the listing of one directory has the same limit
INTERVAL_SECONDS = 1.0  # between listings of less than 50 ms
SLEEPING_STATES = (SandboxState.COLD, SandboxState.SUSPENDED)
PAUSE_FACTOR = 20  # duration of the pause after a listing, in durations of that listing


@dataclass(frozen=True)
class FileChange:
    """Change of one entry between two listings. A rename is a deletion and a creation."""

    kind: Literal["created", "modified", "deleted"]
    path: str  # relative to the root
    stat: FileStat  # new metadata; of a deleted entry the last known metadata


@dataclass(frozen=True)
class WatchGap:
    """Changes may have been missed: the sandbox was replaced after the last listing."""


@dataclass(frozen=True)
class WatchSleep:
    """The sandbox fell asleep, in this state, or is awake again, with state None. No file changes in between."""

    state: str | None


@dataclass
class FileWatch:
    """Entries below a directory as last listed. `incarnation` is None for entries of a stored copy."""

    root: str
    under: str
    entries: Mapping[str, FileStat]
    incarnation: int | None = None
    pause_seconds: float = field(default=INTERVAL_SECONDS, init=False)
    sleep: WatchSleep = field(default=WatchSleep(None), init=False)

    def poll(self, sandbox: Sandbox | None, provider: Provider | None) -> Iterator[FileChange | WatchGap | WatchSleep]:
        """List the directory if the sandbox is awake, and yield the changes since the last listing.

        A directory that was removed has no entries. Raise TooLarge above MAX_ENTRIES entries."""
        if sandbox is not None and sandbox.state in SLEEPING_STATES and self.sleep.state != sandbox.state:
            self.sleep = WatchSleep(sandbox.state)
            yield self.sleep
        if sandbox is None or provider is None or sandbox.state not in AWAKE_STATES or sandbox.frozen or not sandbox.prepared:
            return
        started = time.monotonic()
        try:
            entries = dict(provider.manifest(sandbox.ref, self.root, under=self.under, max_entries=MAX_ENTRIES))
        except (NoSuchFile, BadPath):
            entries = {}
        except (Missing, Unavailable) as error:  # evicted, suspended or restarted meanwhile: the next listing decides
            log.info("watched directory not listed", sandbox=str(sandbox.pk), error=str(error))
            return
        self.pause_seconds = max(INTERVAL_SECONDS, PAUSE_FACTOR * (time.monotonic() - started))
        if self.sleep.state:
            self.sleep = WatchSleep(None)
            yield self.sleep
        is_same_sandbox = sandbox.incarnation == self.incarnation
        if self.incarnation is not None and not is_same_sandbox:
            yield WatchGap()
        yield from compare(self.entries, entries, by_stamp=is_same_sandbox)
        self.entries, self.incarnation = entries, sandbox.incarnation


def compare(old: Mapping[str, FileStat], new: Mapping[str, FileStat], *, by_stamp: bool) -> Iterator[FileChange]:
    """Yield the differences of two listings: deletions from the deepest entry, then creations from the top, then changes.

    An entry whose kind has changed is deleted and created. Without `by_stamp` stamps are ignored: a wake restores files with
    other inodes. A change that leaves size, mode and modification time equal is then not seen."""
    replaced = {path for path in old.keys() & new.keys() if old[path].kind != new[path].kind}
    for path in sorted((old.keys() - new.keys()) | replaced, reverse=True):
        yield FileChange("deleted", path, old[path])
    for path in sorted((new.keys() - old.keys()) | replaced):
        yield FileChange("created", path, new[path])
    for path in sorted((old.keys() & new.keys()) - replaced):
        if _is_modified(old[path], new[path], by_stamp=by_stamp):
            yield FileChange("modified", path, new[path])


def _is_modified(old: FileStat, new: FileStat, *, by_stamp: bool) -> bool:
    if by_stamp:
        return old.stamp != new.stamp
    if new.kind == "directory":
        return old.mode != new.mode  # the time of a directory also changes with its entries, which have changes of their own
    return old._replace(stamp="") != new._replace(stamp="")
