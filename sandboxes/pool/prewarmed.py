"""Pre-warmed sandboxes: those of a pool without a holder, and the one that is claimed next."""

from datetime import datetime

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, QuerySet

from sandboxes import destruction, providers
from sandboxes.db import dialect, sql
from sandboxes.hosts import registry
from sandboxes.models import GONE_STATES, Pool, Sandbox, TransitionReason
from sandboxes.pool.runtimes import get_runtime
from sandboxes.providers.errors import ProviderError

REQUESTS_WAIT_SQL = "SELECT EXISTS (SELECT 1 FROM sandboxes_admissionrequest WHERE pool_id = %s AND expires_at > %s)"
READY_SQL = (
    "pool_id = %s AND tier = 1 AND holder IS NULL AND host_id = %s AND image = %s AND memory_mib = %s "
    "AND runtime = %s AND NOT "
    "(SELECT draining FROM sandboxes_pool WHERE sandboxes_pool.id = sandboxes_sandbox.pool_id) ORDER BY last_used_at"
)
COUNT_CLAIM_SQL = "UPDATE sandboxes_pool SET claimed_warm = claimed_warm + 1 WHERE id = %s"


def get_image(pool: Pool) -> str:
    """Return the image of the pool's new sandboxes."""
    return pool.image or providers.get_default_image(pool.provider or providers.get_default_provider_name())


def find_unclaimed(pool: Pool) -> QuerySet[Sandbox]:
    """Select sandboxes without a holder that were started with the pool's current image, memory size and runtime."""
    provider = pool.provider or providers.get_default_provider_name()
    present = {"image": get_image(pool), "memory_mib": pool.memory_mib, "runtime": get_runtime(pool, provider)}
    return Sandbox.objects.filter(pool=pool, holder__isnull=True, **present).exclude(state__in=GONE_STATES)


def find_local_unclaimed(pool: Pool) -> QuerySet[Sandbox]:
    """Like find_unclaimed, but only on the hosts that this process reaches. The warm target applies to each host."""
    return find_unclaimed(pool).filter(registry.filter_local())


def schedule_destroy_unclaimed(*, now: datetime, reason: str, actor: str = "") -> int:
    """Move the pre-warmed sandboxes of this process's hosts to `destroying`, those that start included. Return how many."""
    rows = Sandbox.objects.filter(registry.filter_local(), holder__isnull=True).exclude(state__in=GONE_STATES)
    return sum(
        destruction.schedule_destroy(
            pk, now=now, code=TransitionReason.OPERATOR, reason=reason, actor=actor, guard=Q(holder__isnull=True)
        )
        for pk in rows.values_list("pk", flat=True)
    )


def lock_ready(pool: Pool, *, now: datetime) -> tuple[Sandbox | None, bool]:
    """Lock the sandbox of this host that has been ready for longest. Return it, and whether requests wait for a place.

    A sandbox that another transaction has locked is left out. Plan: the index sandbox_eviction_order serves the filter by pool
    and tier, and the order. Tier 1 is `warm`."""
    try:
        provider = pool.provider or providers.get_default_provider_name()
        host = registry.get_local_host_id(provider)
    except (ProviderError, ImproperlyConfigured):
        return None, False
    sandbox, _, results = sql.find_joined(
        Sandbox, [], [REQUESTS_WAIT_SQL], READY_SQL, pool.pk, now, pool.pk, host, get_image(pool),
        pool.memory_mib, get_runtime(pool, provider), lock=dialect.row_lock_or_skip(),
    )  # fmt: skip
    return sandbox, any(results)


def count_claim(pool: Pool) -> None:
    """Count a claim in the pool. Locks the pool's row: call this function last in its transaction."""
    sql.execute(COUNT_CLAIM_SQL, pool.pk)
