"""Placement: the choice of the pool in which a holder's next sandbox is started, from an ordered list.

The pools are tried in order when a sandbox is needed. A pool that cannot start one is passed over. The layer above `sandboxes`
implements Placement and records the reason, in the transaction that takes a place in the next pool. The constraint
sandbox_one_live_per_holder applies across pools: concurrent requests of a holder never have two sandboxes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from sandboxes import providers
from sandboxes.errors import (
    CapacityExhausted,
    EngineDiskFull,
    HostLost,
    NoPoolAvailable,
    NotIsolated,
    PoolDraining,
    SandboxNotReady,
    StartsPaused,
    TooManyStarts,
)
from sandboxes.hosts import registry
from sandboxes.models import Pool, SkipReason, Transition, TransitionReason
from sandboxes.pool import start_breaker
from sandboxes.providers.errors import ProviderError, Rejected

SKIP_REASON_BY_ERROR: dict[type[Exception], SkipReason] = {
    PoolDraining: SkipReason.DRAINING,
    CapacityExhausted: SkipReason.FULL,
    TooManyStarts: SkipReason.STARTING_LIMIT,
    StartsPaused: SkipReason.CIRCUIT_OPEN,
    HostLost: SkipReason.UNAVAILABLE,
    NotIsolated: SkipReason.UNAVAILABLE,
    EngineDiskFull: SkipReason.UNAVAILABLE,
    ImproperlyConfigured: SkipReason.NOT_CONFIGURED,
    Rejected: SkipReason.REJECTED,
    ProviderError: SkipReason.UNAVAILABLE,  # after Rejected, its subclass
}
START_ERRORS: tuple[type[Exception], ...] = (*SKIP_REASON_BY_ERROR, SandboxNotReady)
FAILED_START_CODES = (TransitionReason.START_FAILED, TransitionReason.START_STALLED)
# A cold sandbox is woken in another pool for these reasons. The others pass, or need no provider.
MOVE_REASONS = (SkipReason.CIRCUIT_OPEN, SkipReason.UNAVAILABLE, SkipReason.NOT_CONFIGURED, SkipReason.REJECTED)


@dataclass(frozen=True)
class Skip:
    """A pool that was passed over. `detail` is the message of the error, if there was one."""

    pool: Pool
    reason: SkipReason
    detail: str = ""


@dataclass(frozen=True)
class Candidates:
    """Pools in the order in which they are tried, and those that are passed over before any is tried."""

    pools: Sequence[Pool]
    skips: Sequence[Skip] = ()


class Placement(Protocol):
    """Ordered pools of one holder, and the record of its placements. Implemented by the layer above `sandboxes`."""

    def find_candidates(self, *, now: datetime) -> Candidates:
        """Return the pools in which the holder's next sandbox may be started."""
        ...

    def place(self, pool: Pool, skips: Sequence[Skip], *, now: datetime) -> None:
        """Record the pool of the holder's new sandbox, and the pools that were passed over.

        Called in the transaction that takes the place, after the guard has locked the holder."""
        ...

    def note_skips(self, skips: Sequence[Skip], *, now: datetime) -> None:
        """Record pools that were passed over while none could start a sandbox."""
        ...


@dataclass
class PoolSearch:
    """Progress of one request through the pools of its holder. It is not shared by requests, and decides nothing alone."""

    first: Pool
    began_at: datetime
    placement: Placement | None = None
    skips: list[Skip] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    _pools: Sequence[Pool] | None = None
    _listed: int = 0

    def find_next(self, *, now: datetime) -> Pool | None:
        """Return the first pool that was not passed over, or None."""
        skipped = {skip.pool.pk for skip in self.skips}
        return next((pool for pool in self._load(now) if pool.pk not in skipped), None)

    def has_alternatives(self, *, now: datetime) -> bool:
        """Return whether the holder has more than one pool, those that are always passed over included."""
        self._load(now)
        return self._listed > 1

    def find_promising(self, besides: Pool, *, now: datetime) -> Pool | None:
        """Return a pool, not passed over and other than `besides`, that seems able to start a sandbox. Starts nothing."""
        skipped = {besides.pk, *(skip.pool.pk for skip in self.skips)}
        return next((pool for pool in self._load(now) if pool.pk not in skipped and _is_promising(pool, now=now)), None)

    def skip(self, pool: Pool, error: Exception) -> None:
        """Pass a pool over because of an error of START_ERRORS. Raise any other error again."""
        reason = find_skip_reason(error)
        if reason is None:
            raise error
        self.skips.append(Skip(pool, reason, str(error)))
        self.errors.append(error)

    def note_failed_starts(self, holder: UUID) -> None:
        """Pass over the pools in which another request has failed to start this holder's sandbox since this one began.

        Concurrent requests of a holder therefore do not try a failed pool once each."""
        failed = Transition.objects.filter(holder=holder, code__in=FAILED_START_CODES, at__gte=self.began_at)
        skipped = {skip.pool.pk for skip in self.skips}
        for moved in failed.exclude(sandbox__pool__in=skipped).select_related("sandbox__pool").order_by("pk"):
            if moved.sandbox.pool_id not in skipped:
                skipped.add(moved.sandbox.pool_id)
                self.skips.append(Skip(moved.sandbox.pool, SkipReason.START_FAILED, moved.reason))
                self.errors.append(SandboxNotReady())

    def build_error(self) -> Exception:
        """Build the error of a holder none of whose pools can start a sandbox: that of its only pool, or one for all.

        It is CapacityExhausted if the place in a full pool is worth waiting for, with the pool to wait for."""
        if len(self.skips) == 1 and self.errors:
            return self.errors[0]
        described: dict[str, Any] = {
            "pools": [{"pool": skip.pool.name, "reason": skip.reason.value, "detail": skip.detail} for skip in self.skips]
        }
        names = ", ".join(f'"{skip.pool}" {skip.reason.label}' for skip in self.skips)
        full = next((skip.pool for skip in self.skips if skip.reason == SkipReason.FULL), None)
        message = f"No pool can start a sandbox now: {names}."
        error = CapacityExhausted(message, **described) if full else NoPoolAvailable(message, **described)
        if isinstance(error, CapacityExhausted):
            error.pool_id = full.pk if full else None
        waits = [wait for each in self.errors if (wait := getattr(each, "retry_after", None))]
        error.retry_after = min(waits, default=error.retry_after)
        return error

    def _load(self, now: datetime) -> Sequence[Pool]:
        if self._pools is None:
            candidates = self.placement.find_candidates(now=now) if self.placement else Candidates([self.first])
            self._pools, self._listed = candidates.pools, len(candidates.pools) + len(candidates.skips)
            self.skips.extend(candidates.skips)
        return self._pools


def find_skip_reason(error: Exception) -> SkipReason | None:
    """Return the reason to pass a pool over after an error, or None if the error concerns other pools as well."""
    cause = error.__cause__ if isinstance(error, SandboxNotReady) else error
    return next((reason for kind, reason in SKIP_REASON_BY_ERROR.items() if isinstance(cause, kind)), None)


def _is_promising(pool: Pool, *, now: datetime) -> bool:
    if pool.draining:
        return False
    try:
        host = registry.get_placement_host(pool.provider or providers.get_default_provider_name(), now=now)
    except (HostLost, NotIsolated, ProviderError, ImproperlyConfigured):
        return False
    return not start_breaker.is_open(host, now=now)
