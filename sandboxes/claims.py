"""Claims on rows in flight: the worker extends the deadline of its row while the work makes progress.

A claim ends at its deadline unless `keep` extends the deadline, between two steps or in the heartbeat of this process. The
heartbeat extends only claims whose work has made progress since its last look: a transfer of any length keeps its claim, and a
transfer that has stopped loses it. `track` and `track_transfer` count chunks, in any thread and without the database.
Correctness does not depend on the heartbeat: without it a long transfer loses its claim and stops without effect."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, BinaryIO, TypeVar, cast

import structlog
from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from django.db.models import QuerySet

from sandboxes.background import OnDemandThread
from sandboxes.db.clock import Clock
from sandboxes.errors import ClaimLost

log = structlog.get_logger(__name__)
# Longer than the longest silence of a store or an engine that responds in the end: three attempts of 65 seconds each.
CLAIM_TTL = timedelta(minutes=4)
RENEWAL_INTERVAL = timedelta(minutes=1)  # between two UPDATEs of the heartbeat for one claim
HEARTBEAT_SECONDS = 3.0
KILL_GRACE = timedelta(seconds=30)  # after a command's timeout, for the provider to kill the command and report the timeout
P = TypeVar("P", bound="Progress")


class Progress:
    """Count of the steps of some work, such as the chunks of a transfer."""

    def __init__(self) -> None:
        self.steps = 0
        self.lock = threading.RLock()  # the worker and the heartbeat must not change a deadline that the other is replacing

    def note_progress(self) -> None:
        """Count one more step. Thread-safe."""
        self.steps += 1  # a lost increment of concurrent threads does not matter: only a change is looked for

    def beat(self) -> None:
        """Act on the progress since the last call. The heartbeat calls this method."""


class Claim(Progress):
    """Claim on the rows of a query, which must select them only while they are claimed: by a token, for instance."""

    def __init__(
        self, rows: QuerySet[Any], *, deadline: datetime, clock: Clock, column: str = "deadline_at", ttl: timedelta = CLAIM_TTL
    ) -> None:
        self._rows, self._column, self.deadline, self.clock, self.ttl = rows, column, deadline, clock, ttl
        super().__init__()
        self._seen_steps = 0
        self.lost = False

    def keep(self) -> None:
        """Extend the deadline to at least `ttl` from now, by one guarded UPDATE. Raises ClaimLost if no row is claimed."""
        if not self.update():
            raise ClaimLost()

    def update(self, **changes: Any) -> bool:
        """Change columns of the claimed rows, and extend the deadline as `keep` does. Returns False if the claim is lost.

        In a transaction, acquire `lock` before the transaction begins."""
        with self.lock:
            return self._write(max(self.deadline, self.clock() + self.ttl), **changes)

    def end(self) -> None:
        """End the claim now, so that a sweep takes the next step."""
        self._get_rows().update(**{self._column: self.clock()})

    def _write(self, deadline: datetime, **changes: Any) -> bool:
        if not self._get_rows().update(**{self._column: deadline}, **changes):
            self.lost = True
            return False
        self.deadline = deadline
        return True

    def _get_rows(self) -> QuerySet[Any]:
        return self._rows

    def __str__(self) -> str:
        return f"{self._rows.model.__name__} until {self.deadline}"

    def note_progress(self) -> None:
        """Count one more step. Raises ClaimLost once the heartbeat has found the claim lost. Thread-safe."""
        if self.lost:
            raise ClaimLost()
        super().note_progress()

    def forget_progress(self) -> None:
        """Have the heartbeat extend the deadline only for later progress. Call before work with a time limit of its own."""
        self._seen_steps = self.steps

    def beat(self) -> None:
        """Extend the deadline if there was progress since the last call."""
        with self.lock:
            steps = self.steps
            if steps == self._seen_steps or self.lost:
                return
            if self.clock() + self.ttl >= self.deadline + RENEWAL_INTERVAL:
                self.keep()
            self._seen_steps = steps


class SelfGuardedClaim(Claim):
    """Claim on a row without a token: the deadline that this worker wrote last identifies its claim."""

    def _get_rows(self) -> QuerySet[Any]:
        return self._rows.filter(**{self._column: self.deadline})


class Heartbeat:
    """Thread of this process that extends the claims in progress. It runs while there are claims."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a child has no threads, and its parent's claims are not its own

    def _reset(self) -> None:
        self._lock, self._held, self._thread = threading.Lock(), set[Progress](), OnDemandThread("heartbeat", self._run)

    def add(self, progress: Progress) -> None:
        with self._lock:
            self._held.add(progress)
            self._thread.start()

    def remove(self, progress: Progress) -> None:
        with self._lock:
            self._held.discard(progress)

    def beat(self) -> None:
        """Extend each claim whose work made progress. A lost claim, or any error, affects no other claim."""
        for progress in [*self._held]:
            if progress not in self._held:  # its work has ended during this beat
                continue
            try:
                progress.beat()
            except ClaimLost:
                if progress in self._held:
                    log.warning("claim lost", claim=str(progress))
            except DatabaseError as error:  # tried again at the next beat
                log.warning("claim not extended", error=str(error))
            except Exception:
                log.exception("claim not extended", claim=str(progress))

    def _run(self) -> None:
        pause = threading.Event()
        try:
            while True:
                pause.wait(HEARTBEAT_SECONDS)
                with self._lock:
                    if not self._held:
                        self._thread.release()
                        return
                try:
                    close_old_connections()
                    self.beat()
                except Exception:  # the next beat must not be lost with this one
                    log.exception("heartbeat failed")
        finally:
            connections.close_all()


HEARTBEAT = Heartbeat()
_held: ContextVar[tuple[Progress, ...]] = ContextVar("held_claims", default=())


@contextmanager
def hold(claim: P) -> Iterator[P]:
    """Have the heartbeat extend a claim while the body of the `with` makes progress, that of nested claims included."""
    previous = _held.get()
    for outer in previous:
        Progress.note_progress(outer)  # a lost claim is found at the next chunk, where the caller expects it
    _held.set((*previous, claim))
    HEARTBEAT.add(claim)
    try:
        yield claim
    finally:
        HEARTBEAT.remove(claim)
        _held.set(previous)


def get_held_claims() -> tuple[Progress, ...]:
    """Return the claims that this context holds, the outermost first."""
    return _held.get()


def note_progress() -> None:
    """Count one more step of the work of every claim that this context holds. Raises ClaimLost if one of them is lost."""
    for claim in _held.get():
        claim.note_progress()


def track(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `chunks`, and count each as progress of the claims held by this context."""
    for chunk in chunks:
        note_progress()
        yield chunk


def track_transfer(file: BinaryIO) -> BinaryIO:
    """Wrap a file: reads and writes in any thread count as progress of the claims that this context holds now."""
    claims = _held.get()
    return cast(BinaryIO, _TrackedFile(file, claims)) if claims else file


class _TrackedFile:
    """File whose reads and writes count as progress of `claims`. Everything else is passed on."""

    def __init__(self, file: BinaryIO, claims: tuple[Progress, ...]) -> None:
        self._file, self._claims = file, claims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1, /) -> bytes:
        self._note_progress()
        return self._file.read(size)

    def write(self, content: bytes, /) -> int:
        self._note_progress()
        return self._file.write(content)

    def _note_progress(self) -> None:
        for claim in self._claims:
            claim.note_progress()
