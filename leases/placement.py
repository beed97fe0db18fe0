"""Placement of a lease's sandboxes: the ordered pools of its environment type, and their record on the lease's timeline.

The pool is chosen when a sandbox is needed. `Lease.pool` is the pool of the lease's sandbox, or of its last one; before the
first one it is the first pool of the list."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import transaction

from billing import prices
from leases.allow_lists import require_known
from leases.errors import InvalidRequest
from leases.models import AlternativePool, EnvironmentType, Lease, LeaseEvent, LeaseStatus
from leases.resources import Resources, fits, get_sandbox_size
from sandboxes import audit, providers
from sandboxes.lifecycle import WARM
from sandboxes.models import Pool, SkipReason, Transition, TransitionReason
from sandboxes.pool.placement import Candidates, Skip

POOL_SKIPPED_EVENT = "pool_skipped"  # LeaseEvent.kind
DEFAULT_POOL = "default"
# Conditions in SQL, for queries of an environment type and of a lease: whether the type lists further pools.
TYPE_HAS_ALTERNATIVES_SQL = (
    "SELECT EXISTS (SELECT 1 FROM leases_alternativepool WHERE environment_type_id = leases_environmenttype.id)"
)
LEASE_HAS_ALTERNATIVES_SQL = (
    "SELECT EXISTS (SELECT 1 FROM leases_alternativepool JOIN leases_environmenttype ON leases_environmenttype.id = "
    "leases_alternativepool.environment_type_id WHERE leases_environmenttype.name = leases_lease.environment_type_id)"
)


@dataclass(frozen=True)
class LeasePlacement:
    """sandboxes.pool.placement.Placement of one lease, which need not be granted yet."""

    lease: Lease

    def find_candidates(self, *, now: datetime) -> Candidates:
        """Return the pools of the environment type that the lease may use, in their order or by price.

        A lease that was restricted to other pools, or whose pool is no longer listed, keeps its pool."""
        environment_type = EnvironmentType.objects.select_related("pool").get(name=self.lease.environment_type_id)
        listed = list_pools(environment_type)
        pools = [pool for pool in listed if not self.lease.pools or pool.name in self.lease.pools]
        if self.lease.pool_id not in {pool.pk for pool in pools}:
            return Candidates([self.lease.pool])
        if environment_type.cheapest_pool:
            pools = order_by_price(pools, self.lease, now=now)
        needs_models, requested = has_models(listed[0]), Resources.of_lease(self.lease)
        skips = [Skip(pool, SkipReason.TOO_SMALL) for pool in pools if not fits(pool, requested)]
        if needs_models:
            skips += [Skip(pool, SkipReason.NO_MODELS) for pool in pools if fits(pool, requested) and not has_models(pool)]
        skipped = {skip.pool.pk for skip in skips}
        return Candidates([pool for pool in pools if pool.pk not in skipped], skips)

    def place(self, pool: Pool, skips: Sequence[Skip], *, now: datetime) -> None:
        """Set the pool of the lease, and record the skipped pools. The lease is locked by the caller's transaction."""
        # Not only if `self.lease` has another pool: a concurrent request may have moved the lease since it was read.
        Lease.objects.filter(pk=self.lease.pk).exclude(pool=pool).update(pool=pool)
        _record_skips(self.lease, skips, now=now)

    def note_skips(self, skips: Sequence[Skip], *, now: datetime) -> None:
        """Record the skipped pools of an active lease. A lease that is not granted has no timeline."""
        with transaction.atomic():
            active = Lease.objects.select_for_update(no_key=True).filter(pk=self.lease.pk, status=LeaseStatus.ACTIVE)
            if active.first():
                _record_skips(self.lease, skips, now=now)


def list_pools(environment_type: EnvironmentType) -> list[Pool]:
    """Return the pools of an environment type in the order in which they are tried, without duplicates."""
    first = environment_type.pool or Pool.objects.filter(name=DEFAULT_POOL).first()
    alternatives = environment_type.alternative_pools.select_related("pool")
    pools = {pool.pk: pool for pool in [first, *(row.pool for row in alternatives)] if pool}
    return [*pools.values()]


def find_type(name: str) -> EnvironmentType:
    """Return an environment type with its first pool. Raise InvalidRequest."""
    found = EnvironmentType.objects.select_related("pool").filter(name=name).first()
    if found is None:
        raise InvalidRequest("environment_type", f"There is no environment type {name[:80]!r}.")
    return found


def set_pools(
    environment_type: EnvironmentType, names: Sequence[str] | None, *, cheapest: bool | None = None, now: datetime,
    actor: audit.Actor = audit.CONTROL_PLANE,
) -> None:  # fmt: skip
    """Replace the list of pools, which is tried in the order of `names`, and the choice by price. None keeps a value.

    Raise InvalidRequest for an unknown pool, and for one that is listed twice. Existing sandboxes stay where they are."""
    if names is not None:
        require_known("pools", names)
        if len(set(names)) < len(names):
            raise InvalidRequest("pools", "A pool may be listed once.")
    with transaction.atomic():
        if cheapest is not None:
            environment_type.cheapest_pool = cheapest
            environment_type.save(update_fields=["cheapest_pool"])
        if names:
            by_name = {pool.name: pool for pool in Pool.objects.filter(name__in=names)}
            environment_type.pool = by_name[names[0]]
            environment_type.save(update_fields=["pool"])
            environment_type.alternative_pools.all().delete()
            AlternativePool.objects.bulk_create(
                AlternativePool(environment_type=environment_type, pool=by_name[name], position=position)
                for position, name in enumerate(names[1:], start=1)
            )
        stated = [f"pools {audit.format_value([*names])}"] if names else []
        stated += [f"cheapest_pool {audit.format_value(cheapest)}"] if cheapest is not None else []
        audit.record(environment_type, "Set pools", ", ".join(stated), actor=actor, now=now)


def find_fork_pool(lease: Lease) -> str:
    """Return the pool that a fork of a lease names, or "" if the environment type chooses it for both."""
    named = lease.pools == [lease.pool.name] or lease.pool not in list_pools(lease.environment_type)
    return lease.pool.name if named else ""


def order_by_price(pools: Iterable[Pool], lease: Lease, *, now: datetime) -> list[Pool]:
    """Return the pools with the lowest hourly price of a sandbox first. Equal and unknown prices keep their order."""
    rows = [*pools]
    hourly = prices.compute_hourly_prices([get_sandbox_size(pool, lease) for pool in rows], at=now)
    return [pool for pool, _ in sorted(zip(rows, hourly, strict=True), key=lambda each: (each[1] is None, each[1] or 0))]


def has_models(pool: Pool) -> bool:
    """Return whether the sandboxes of a pool have a way to models."""
    return bool(settings.GATEWAY_URL) or get_provider_name(pool) not in settings.REMOTE_PROVIDERS


def get_provider_name(pool: Pool) -> str:
    return pool.provider or providers.get_default_provider_name()


def _record_skips(lease: Lease, skips: Sequence[Skip], *, now: datetime) -> None:
    """Insert an event for each pool and reason, once for each sandbox of the lease. The caller has locked the lease."""
    if not skips:
        return
    started = Transition.objects.filter(holder=lease.pk, to=WARM, code=TransitionReason.READY)
    events = LeaseEvent.objects.filter(lease_id=lease.pk, kind=POOL_SKIPPED_EVENT)
    if last_start := started.order_by("-at").values_list("at", flat=True).first():
        events = events.filter(at__gt=last_start)
    recorded = set(events.values_list("pool_id", "skip_reason"))
    LeaseEvent.objects.bulk_create(
        LeaseEvent(
            lease_id=lease.pk, at=now, kind=POOL_SKIPPED_EVENT, pool=skip.pool, skip_reason=skip.reason,
            reason=f'Pool "{skip.pool}" {skip.reason.label}{": " if skip.detail else ""}{skip.detail}',
        )
        for skip in {(each.pool.pk, each.reason): each for each in skips}.values()
        if (skip.pool.pk, skip.reason.value) not in recorded
    )  # fmt: skip
