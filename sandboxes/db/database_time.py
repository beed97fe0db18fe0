"""Current time by the clock of the database, which all hosts of an installation share.

A claim or deadline that one host writes is compared with the current time by another host. With the hosts' own clocks, a host
whose clock is ahead would close the live runs of the others."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock

import structlog
from django.db import Error as DatabaseError
from django.db import connection
from django.utils import timezone

from sandboxes.db import dialect
from sandboxes.db.clock import read_uptime

log = structlog.get_logger(__name__)
CHECK_INTERVAL_SECONDS = 60.0
TOLERATED_SKEW = timedelta(seconds=1)  # not corrected: the grace periods cover it, and a measurement includes a round trip
MAX_MEASUREMENTS = 3  # of one look, while the clock of this host is being set


@dataclass(frozen=True)
class HostTime:
    """Readings of this host's two clocks at one moment."""

    uptime: float
    wall: datetime

    @classmethod
    def read(cls) -> "HostTime":
        return cls(read_uptime(), timezone.now())

    def was_clock_set(self, later: "HostTime") -> bool:
        """Return whether the clock of this host was set between the two readings."""
        elapsed = timedelta(seconds=later.uptime - self.uptime)
        return abs(later.wall - self.wall - elapsed) > TOLERATED_SKEW


@dataclass(frozen=True)
class Measurement:
    """Difference between the database's clock and this host's at one moment."""

    at: HostTime
    skew: timedelta  # database minus host

    def tell(self) -> datetime:
        """Return the present time. The time since the measurement is that of a clock that is never set."""
        correction = self.skew if abs(self.skew) > TOLERATED_SKEW else timedelta(0)
        return self.at.wall + correction + timedelta(seconds=read_uptime() - self.at.uptime)


@dataclass
class SkewMeter:
    """The database's clock, continued by this host's uptime, and its difference from this host's clock.

    Measured once in CHECK_INTERVAL_SECONDS, and at once after this host's clock was set. A use that makes no measurement is
    right all the same: the uptime is not set."""

    lock: Lock = field(default_factory=Lock)
    last: Measurement | None = None
    tried: HostTime | None = None

    @property
    def skew(self) -> timedelta:
        """The last measured skew, database minus host."""
        return self.last.skew if self.last else timedelta(0)

    def update(self) -> None:
        """Measure if it is due. Leave the last measurement inside a transaction, during a measurement by another thread, and
        while the database does not respond."""
        if not self._is_due() or connection.in_atomic_block or not self.lock.acquire(blocking=False):
            return
        try:
            self.tried = HostTime.read()
            self.last = _measure()
            if abs(self.skew) > TOLERATED_SKEW:
                log.warning("clock skew", seconds=round(self.skew.total_seconds(), 1))
        except DatabaseError as error:
            log.warning("clock skew not measured", error=str(error))
        finally:
            self.lock.release()

    def now(self) -> datetime:
        """Return the database's time by the last measurement, and this host's before the first one."""
        return self.last.tell() if self.last else timezone.now()

    def _is_due(self) -> bool:
        if self.last is None or self.tried is None:
            return True
        at = HostTime.read()
        return self.tried.was_clock_set(at) or at.uptime - self.tried.uptime > CHECK_INTERVAL_SECONDS


meter = SkewMeter()


def _measure() -> Measurement:
    """Measure the skew while this host's clock is not set."""
    for _ in range(MAX_MEASUREMENTS):
        at = HostTime.read()
        measured = Measurement(at, measure_skew())
        if not at.was_clock_set(HostTime.read()):
            break
    return measured


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
    """Return the skew of this host, database minus host. Makes a query when it is due to be measured."""
    meter.update()
    return meter.skew


def now() -> datetime:
    """Return the current time by the database's clock. Makes a query when the skew is due to be measured."""
    meter.update()
    return meter.now()


def now_without_query() -> datetime:
    """Like `now`, but by the last measurement of any thread: an event loop must not wait for the database."""
    return meter.now()
