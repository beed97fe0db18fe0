"""Guard of a sandbox request: permission checks that the layer above `sandboxes` implements for a holder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from sandboxes.call_limits import UNLIMITED, CallLimits
from sandboxes.db.sql import ALWAYS, Statement
from sandboxes.models import Policy, Pool


@dataclass(frozen=True)
class HolderTerms:
    """Values of a holder that the row of its sandbox copies. Valid as long as the holder is locked."""

    excludes: Sequence[str] = ()  # patterns of paths that workspace snapshots exclude
    call_limits: CallLimits = UNLIMITED  # on the cost and the tokens of model calls
    llm_enabled: bool = True  # False: every model call is refused
    policy: Policy | None = None  # None: the built-in policy "sealed"
    suspend_after: timedelta | None = None  # time in `waiting` after which the sandbox is suspended; None: never
    held_until: datetime | None = None  # latest end of the holder, renewals included; None: not known
    auto_stop: timedelta | None = None  # after this idle time the vendor stops the sandbox; zero: never; None: its setting
    auto_delete: timedelta | None = None  # after this time since a stop the vendor deletes it; zero: never; None: its setting


@dataclass
class HolderRenewal:
    """Renewal of a holder in the statement that closes its run."""

    build: Callable[[datetime], Statement]  # UPDATE that renews the holder at this time, if it may be renewed
    done: bool = False  # the last run that was closed renewed the holder


class Guard(Protocol):
    """Permission checks of one holder. A refusing method raises an error of the implementing layer."""

    def fence(self) -> HolderTerms:
        """Lock the holder until the surrounding transaction ends, and return its terms. Raise if the holder has ended."""
        ...

    def build_condition(self) -> Statement:
        """Return the condition in SQL that the holder has not ended, at the time of this call."""
        ...

    def note_run_opened(self, *, now: datetime) -> None:
        """Record that a Run of this request was opened, in the transaction that opens the Run."""
        ...

    def note_recovery(self, note: str, *, now: datetime) -> None:
        """Record that the sandbox was found stopped, and was started with its files."""
        ...

    def check_active(self) -> None:
        """Raise if the holder has ended."""
        ...

    def check_affordable(self, pool: Pool) -> None:
        """Raise if the holder has ended, or may not start or wake a sandbox of this pool now.

        The pool calls it before a start or wake, and again after it, because both may take minutes."""
        ...

    def check_proceed(self) -> None:
        """Raise if the holder may not run anything in its sandbox now."""
        ...


class OpenGuard:
    """Guard that permits everything, for holders without a lease."""

    def fence(self) -> HolderTerms:
        return HolderTerms()

    def build_condition(self) -> Statement:
        return ALWAYS

    def note_run_opened(self, *, now: datetime) -> None:
        pass

    def note_recovery(self, note: str, *, now: datetime) -> None:
        pass

    def check_active(self) -> None:
        pass

    def check_affordable(self, pool: Pool) -> None:
        pass

    def check_proceed(self) -> None:
        pass


@dataclass(frozen=True)
class WrappedGuard:
    """Guard with the checks of another one. Subclasses add their own."""

    inner: Guard

    def fence(self) -> HolderTerms:
        return self.inner.fence()

    def build_condition(self) -> Statement:
        return self.inner.build_condition()

    def note_run_opened(self, *, now: datetime) -> None:
        self.inner.note_run_opened(now=now)

    def note_recovery(self, note: str, *, now: datetime) -> None:
        self.inner.note_recovery(note, now=now)

    def check_active(self) -> None:
        self.inner.check_active()

    def check_affordable(self, pool: Pool) -> None:
        self.inner.check_affordable(pool)

    def check_proceed(self) -> None:
        self.inner.check_proceed()


OPEN_GUARD = OpenGuard()
