"""Current time by the clock of the database, which all hosts of an installation share.

A claim or deadline that one host writes is compared with the current time by another host. With the hosts' own clocks, a host
whose clock is ahead would close the live runs of the others."""

import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock

import structlog
from django.db import Error as DatabaseError
from django.db import connection
from django.utils import timezone

from sandboxes.db import dialect

log = structlog.get_logger(__name__)
CHECK_INTERVAL_SECONDS = 60.0
TOLERATED_SKEW = timedelta(seconds=1)  # not corrected: the grace periods cover it, and a measurement includes a round trip


@dataclass
class SkewMeter:
    """Difference between the database's clock and this host's.

    Measured once in CHECK_INTERVAL_SECONDS, and at once after this host's clock was set."""

    lock: Lock = field(default_factory=Lock)
    skew: timedelta = timedelta(0)  # database minus host
    checked_at: float | None = None  # monotonic clock
    checked_at_host_time: datetime = field(default_factory=timezone.now)

    def get(self) -> timedelta:
        """Return the skew, measured again if it is due. Return the last value inside a transaction, during a measurement by
        another thread, and while the database does not respond."""
        if not self._is_due() or connection.in_atomic_block or not self.lock.acquire(blocking=False):
            return self.skew
        try:
            self.checked_at, self.checked_at_host_time = time.monotonic(), timezone.now()
            self.skew = measure_skew()
            if abs(self.skew) > TOLERATED_SKEW:
                log.warning("clock skew", seconds=round(self.skew.total_seconds(), 1))
        except DatabaseError as error:
            log.warning("clock skew not measured", error=str(error))
        finally:
            self.lock.release()
        return self.skew

    def _is_due(self) -> bool:
        if self.checked_at is None:
            return True
        elapsed = time.monotonic() - self.checked_at
        host_elapsed = timezone.now() - self.checked_at_host_time
        was_set = abs(host_elapsed - timedelta(seconds=elapsed)) > TOLERATED_SKEW  # or the machine was suspended
        return was_set or elapsed > CHECK_INTERVAL_SECONDS


meter = SkewMeter()


def measure_skew() -> timedelta:
    """Return the database's time minus this host's, with an error of up to half a round trip. SQLite has no clock: 0."""
    query = dialect.clock_query()
    if not query:
        return timedelta(0)
    before = timezone.now()
    with connection.cursor() as cursor:
        cursor.execute(query)
        [database_time] = cursor.fetchone()
    after = timezone.now()
    midpoint: datetime = before + (after - before) / 2
    return database_time - midpoint


def get_skew() -> timedelta:
    """Return the last measured skew of this host, database minus host."""
    return meter.get()


def now() -> datetime:
    """Return the current time by the database's clock. Makes a query when the skew is due to be measured."""
    return _correct(meter.get())


def now_without_query() -> datetime:
    """Like `now`, but with the skew that another thread measured last: an event loop must not wait for the database."""
    return _correct(meter.skew)


def _correct(skew: timedelta) -> datetime:
    return timezone.now() + skew if abs(skew) > TOLERATED_SKEW else timezone.now()
