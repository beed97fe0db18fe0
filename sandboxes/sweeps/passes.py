"""Scheduled passes over sandboxes and pools.

Each sweep takes the time as an argument and returns a SweepResult. A sweep that calls providers handles the sandboxes of the
hosts that this process reaches. A sweep is safe to repeat, and to run concurrently with itself and with any other. The outcome
"lost race" means that another process moved the row first."""

import uuid
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import Count, F, Q, QuerySet, Window
from django.db.models.functions import RowNumber

from sandboxes import agent_shares, destruction, eviction, providers, suspension, sweep_log
from sandboxes.claims import CLAIM_TTL
from sandboxes.db.clock import Clock, clock_from, compute_backoff
from sandboxes.deferred_writes import end_if_unanswered, end_on_connection_error
from sandboxes.engine_turns import Engine, EngineTurns, alternate, list_by_engine
from sandboxes.errors import CapacityPending, SandboxError, SandboxNotReady, WorkspaceFull
from sandboxes.hosts import capacity, registry
from sandboxes.lifecycle import COLD, DESTROYED, DESTROYING, EVICTING, SUSPENDED, WAITING, WARM, WARMING, advance_many
from sandboxes.models import IN_FLIGHT_STATES, Pool, Quota, Run, Sandbox, SandboxState, Snapshot, TransitionReason
from sandboxes.pool import admission_queue, start_failures, starts
from sandboxes.pool.allocation import start_warm
from sandboxes.pool.prewarmed import find_local_unclaimed
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.runs import abandoned
from sandboxes.state import workspace
from sandboxes.storage.base import StoreError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
COUNTERS_CORRECTED = "counters corrected"  # outcome of recount; the health check reads it
NO_GUARD = Q()
MAX_WARM_FAILURES = 3  # in a row, before the circuit breaker of a pool opens


def destroy_due(*, now: datetime, limit: int = 200) -> SweepResult:
    """Destroy the sandboxes in `destroying` that are due. A failed row is retried with backoff and blocks no other.

    Those of an agent whose share of the threads is in use are left to the passes that use it, which look for them again."""
    result, clock = SweepResult(), clock_from(now)
    rank = Window(RowNumber(), partition_by=["agent_did"], order_by=["deadline_at", "pk"])  # agents take turns within the limit
    due = find_due_for_destroy(now=now)
    until = now + PASS_TIME_LIMIT
    while agents := _destroy_listed(due.annotate(rank=rank).order_by("rank", "deadline_at"), result, clock, until, limit):
        due = find_due_for_destroy(now=clock()).filter(agent_did__in=agents)
    return result


def _destroy_listed(due: QuerySet[Sandbox], result: SweepResult, clock: Clock, until: datetime, limit: int) -> set[str]:
    """Destroy up to `limit` of the given sandboxes of each engine. Return the agents of which other passes have left some."""
    agents = set[str]()
    for sandbox in (turns := EngineTurns(list_by_engine(due, limit=limit), clock=clock, until=until)):
        try:
            with agent_shares.DESTROYS.entering(sandbox.agent_did) as admitted:
                destroyed = admitted and destruction.destroy(sandbox.pk, now=clock(), actor="sweep")
            if admitted and agent_shares.DESTROYS.claim_left(sandbox.agent_did):
                agents.add(sandbox.agent_did)
            if not admitted:
                result.note("left for others of the agent")
            elif destroyed:
                result.note("destroyed")
            elif Sandbox.objects.filter(pk=sandbox.pk, state=DESTROYING).exclude(last_error="").exists():
                turns.note_failure()
                result.failures.append(str(sandbox.pk))
            else:
                result.note("lost race")
        except Exception as failed:  # a bug in one provider must not block the others
            log.exception("destroy sweep failed", sandbox=str(sandbox.pk))
            result.failures.append(f"{sandbox.pk}: {failed}")
    return agents


def find_due_for_destroy(*, now: datetime) -> QuerySet[Sandbox]:
    """Select the sandboxes that destroy_due would destroy now."""
    due = Sandbox.objects.filter(registry.filter_local(), state=DESTROYING, deadline_at__lte=now, quarantined_at__isnull=True)
    return due.order_by("deadline_at")


def evict_idle(*, now: datetime, limit: int = 500, batch_size: int = 4) -> SweepResult:
    """Evict sandboxes that were not used for their idle time, up to `limit` of each engine. Engines take turns.

    Only `batch_size` sandboxes are claimed at a time, because a request for a claimed sandbox waits until its eviction ends.
    Those of an agent whose share of the threads is in use are left to later passes."""
    result, clock = SweepResult(), clock_from(now)
    engines = find_idle(now=now).order_by().values_list("provider", "host").distinct()
    batches = [(engine, engine) for engine in sorted(engines, key=str) for _ in range(-(-limit // batch_size))]
    for provider, host in (turns := EngineTurns(batches, clock=clock, until=now + PASS_TIME_LIMIT)):
        failures, on_engine = len(result.failures), Q(provider=provider, host=host)
        evicted = _evict_batch(on_engine, batch_size, result, now=now, clock=clock)
        if not evicted:
            turns.leave()
        elif len(result.failures) - failures == evicted:
            turns.note_failure()
    return result


def _evict_batch(on_engine: Q, size: int, result: SweepResult, *, now: datetime, clock: Clock) -> int:
    """Evict up to `size` idle sandboxes in one state. Return their number."""
    for was in (WAITING, SUSPENDED, WARM):
        token = uuid.uuid4()
        claim = eviction.build_claim(token, clock=clock)
        with end_if_unanswered(claim.end, claim):
            claimed = claim_idle(was, token, now=now, limit=size, guard=on_engine)
        if claimed:
            with end_on_connection_error(claim):
                agents = list(Sandbox.objects.filter(claim=token, state=EVICTING).values_list("pk", "agent_did"))
            for pk, agent_did in agents:
                with agent_shares.EVICTIONS.entering(agent_did):  # a claimed sandbox is evicted in any case
                    _evict_one(pk, token, result, now=clock())
            return claimed
    return 0


def claim_idle(was: SandboxState, token: uuid.UUID, *, now: datetime, limit: int, guard: Q = NO_GUARD) -> int:
    """Move up to `limit` idle sandboxes to `evicting` under the claim `token`. Returns the number moved."""
    return advance_many(
        find_idle(now=now)
        .exclude(agent_did__in=agent_shares.EVICTIONS.list_exhausted())
        .filter(guard, state=was)
        .order_by("idle_at")[:limit],
        was, EVICTING, now=now, code=TransitionReason.IDLE, actor="sweep", claim=token,
        claimed_by=settings.INSTANCE, deadline_at=now + CLAIM_TTL, tries=1, idle_at=None,
    )  # fmt: skip


def _evict_one(pk: uuid.UUID, token: uuid.UUID, result: SweepResult, *, now: datetime) -> None:
    try:
        if eviction.finish_eviction(pk, token, now=now, actor="sweep"):
            result.note("put to sleep")
        elif not Sandbox.objects.filter(pk=pk).exclude(last_error="").exists():
            result.note("lost race")  # another sweep took over while earlier sandboxes were stored
        else:
            result.failures.append(f"{pk}: {Sandbox.objects.values_list('last_error', flat=True).get(pk=pk)}")
    except Exception as failed:  # one sandbox must not block the eviction of the others
        log.exception("eviction failed", sandbox=str(pk))
        result.failures.append(f"{pk}: {failed}")


def suspend_waiting(*, now: datetime, limit: int = 500) -> SweepResult:
    """Suspend the sandboxes that have waited for the time that their environment type sets, in random order."""
    result, clock = SweepResult(), clock_from(now)
    due = list_by_engine(suspension.find_due(now=now).order_by("?"), limit=limit)
    for sandbox in (turns := EngineTurns(due, clock=clock, until=now + PASS_TIME_LIMIT)):
        try:
            result.note("suspended" if suspension.suspend(sandbox, now=clock(), actor="sweep") else "lost race")
        except Missing:
            result.note("gone")  # reconcile handles missing sandboxes
        except (ProviderError, StoreError, WorkspaceFull) as failed:
            turns.note_failure()
            result.failures.append(f"{sandbox.pk}: {failed}")
        except Exception as failed:  # one row must not delay the others
            log.exception("suspension failed", sandbox=str(sandbox.pk))
            result.failures.append(f"{sandbox.pk}: {failed}")
    return result


def find_idle(*, now: datetime) -> QuerySet[Sandbox]:
    """Select held sandboxes that were not used for their idle time."""
    idle = suspension.filter_unclaimed(now) & Q(idle_at__lte=now, holder__isnull=False, lost_at__isnull=True)
    return Sandbox.objects.filter(idle, registry.filter_local())


def expire_cold(*, now: datetime, limit: int = 500) -> SweepResult:
    """Release the places of sandboxes that are cold for longer than the cold TTL, and local snapshot files of destroyed ones.

    The copy in the store remains. The next use by the same holder starts a new sandbox from that copy."""
    result = SweepResult()
    for sandbox in find_expired_cold(now=now)[:limit]:
        with result.catching(sandbox.pk):
            unchanged = Q(state_since=sandbox.state_since)
            released = eviction.release_cold(sandbox.pk, now=now, actor="sweep", guard=unchanged)
            result.note("cold dropped" if released else "lost race")
    for snapshot in find_leftover_local_copies()[:limit]:
        with result.catching(f"snapshot {snapshot.pk}"):
            workspace.forget_local(snapshot)
            result.note("local copies removed")
    return result


def find_expired_cold(*, now: datetime) -> QuerySet[Sandbox]:
    """Select sandboxes that are cold for longer than the cold TTL."""
    return Sandbox.objects.filter(state=COLD, state_since__lte=now - settings.COLD_TTL).order_by("state_since")


def find_leftover_local_copies() -> QuerySet[Snapshot]:
    """Select snapshots with files in this state directory whose sandbox is destroyed. Each host finds its own."""
    is_local = Q(host__isnull=True) | Q(host__in=registry.find_local_host_ids())
    return Snapshot.objects.filter(is_local, local=True, forgotten_at__isnull=True, sandbox__state=DESTROYED).order_by("at")


def warm_pools(*, now: datetime) -> SweepResult:
    """Destroy surplus pre-warmed sandboxes, and start sandboxes in pools below their warm target. Prepare further starts.

    After MAX_WARM_FAILURES failed starts in a row a pool's circuit breaker opens, with exponential backoff."""
    result, clock = SweepResult(), clock_from(now)
    for pk in find_surplus():
        is_unheld = Q(state=WARM, holder__isnull=True)
        destroyed = destruction.schedule_destroy(pk, now=now, code=TransitionReason.SURPLUS, actor="sweep", guard=is_unheld)
        result.note("surplus destroyed", destroyed)
    _continue_pending(result, now=clock())
    for pool in Pool.objects.filter(warm_target__gt=0, draining=False):
        while clock() <= now + PASS_TIME_LIMIT:
            if pool.warm_paused_until and pool.warm_paused_until > clock():
                result.failures.append(f'pool "{pool}": paused until {pool.warm_paused_until:%H:%M:%S}: {pool.warm_error}')
                break
            try:
                if start_warm(pool, now=clock()) is None:
                    break
                result.note("warmed up")
                Pool.objects.filter(pk=pool.pk).update(warm_failures=0, warm_paused_until=None, warm_error="")
            except CapacityPending:
                result.note("pending")
                break
            except (SandboxError, ProviderError, ImproperlyConfigured) as failed:
                _count_warm_failure(pool, failed, now=clock())
                result.failures.append(f'pool "{pool}": {failed}')
            pool.refresh_from_db()
    _prepare_starts(result)
    return result


def _continue_pending(result: SweepResult, *, now: datetime, limit: int = 50) -> None:
    """Wait again for pre-warmed sandboxes for which their engine had no room. No request asks for them."""
    clock, rows = clock_from(now), Sandbox.objects.filter(registry.filter_local(), state=WARMING, holder__isnull=True)
    pending = rows.filter(pending_since__isnull=False, claim__isnull=True, deadline_at__gt=now)
    for sandbox in pending.order_by("?")[:limit]:  # each has its turn, although some may wait for long
        if clock() > now + PASS_TIME_LIMIT:
            break
        try:
            result.note("warmed up" if starts.continue_pending(sandbox, now=clock(), actor="sweep") else "lost race")
        except CapacityPending:
            result.note("pending")
        except (SandboxError, ProviderError, ImproperlyConfigured) as failed:
            _count_warm_failure(sandbox.pool, failed, now=clock())
            result.failures.append(f'pool "{sandbox.pool}": {failed}')


def _prepare_starts(result: SweepResult) -> None:
    pools = Pool.objects.filter(draining=False).values_list("provider", flat=True).distinct()
    for name in sorted({pool or providers.get_default_provider_name() for pool in pools}):
        try:
            for key, count in providers.get_provider(name).prepare_starts().items():
                if count:
                    result.note(key, count)
        except (ProviderError, ImproperlyConfigured) as failed:
            result.failures.append(f"{name}: {failed}")


def find_surplus() -> list[uuid.UUID]:
    """Return pre-warmed sandboxes of this host above their pool's warm target, or started with outdated pool settings."""
    surplus: list[uuid.UUID] = []
    for pool in Pool.objects.filter(sandboxes__holder__isnull=True, sandboxes__state=WARM).distinct():
        # Read before the second query: a sandbox that becomes ready between the two must not count as surplus.
        unheld = [
            *Sandbox.objects.filter(registry.filter_local(), pool=pool, state=WARM, holder__isnull=True).values_list(
                "pk", flat=True
            )
        ]
        usable = find_local_unclaimed(pool).filter(state=WARM).order_by("-created_at").values_list("pk", flat=True)
        retained = set() if pool.draining else {*usable[: pool.warm_target]}
        surplus += [pk for pk in unheld if pk not in retained]
    return surplus


def find_pools_below_target(*, now: datetime) -> list[Pool]:
    """Return pools below their warm target whose circuit breaker is closed."""
    warming = Pool.objects.filter(warm_target__gt=0, draining=False).exclude(warm_paused_until__gt=now)
    return [pool for pool in warming if find_local_unclaimed(pool).filter(state__in=(WARMING, WARM)).count() < pool.warm_target]


def _count_warm_failure(pool: Pool, failed: Exception, *, now: datetime) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_failures=F("warm_failures") + 1, warm_error=str(failed))
    pool.refresh_from_db()
    if pool.warm_failures >= MAX_WARM_FAILURES:
        pause = compute_backoff(
            pool.warm_failures - MAX_WARM_FAILURES + 1, initial=timedelta(minutes=1), maximum=timedelta(hours=1)
        )
        Pool.objects.filter(pk=pool.pk).update(warm_paused_until=now + pause)
        log.error(
            "warming paused", pool=pool.name, failures=pool.warm_failures, seconds=pause.total_seconds(), error=str(failed)
        )


def recover_stalled(*, now: datetime, limit: int = 200) -> SweepResult:
    """Take the next step for Runs and sandboxes past their deadline, whose worker is assumed dead.

    1. Close a Run with the result that its sandbox retained. Otherwise kill its command, and close the Run as lost.
    2. Schedule the destruction of a sandbox that did not become ready.
    3. Continue an eviction or a suspension at the step where it stopped.

    Engines take turns, and so do the steps of an engine, for PASS_TIME_LIMIT. `limit` is the number of rows of each kind and
    engine. A Run that could not be closed is tried again with a backoff, and other rows after their claim has passed."""
    result, clock = SweepResult(), clock_from(now)
    for sandbox in find_overdue_starts(now=now)[:limit]:  # without a call of the engine
        unchanged = Q(claim=sandbox.claim, deadline_at=sandbox.deadline_at)
        destroyed = destruction.schedule_destroy(
            sandbox.pk, now=now, code=TransitionReason.START_STALLED, actor="sweep", guard=unchanged
        )
        if destroyed:
            start_failures.note_failure(sandbox.pool, SandboxNotReady(), code="start_stalled", now=now)
        result.note("stalled starts destroyed" if destroyed else "lost race")
    rows: list[tuple[Engine, Run | Sandbox]] = alternate(
        list_by_engine(abandoned.find_abandoned(now=now), limit=limit, prefix="sandbox__"),
        list_by_engine(find_overdue_evictions(now=now), limit=limit),
        list_by_engine(find_overdue_suspensions(now=now), limit=limit),
    )
    for row in (turns := EngineTurns(rows, clock=clock, until=now + PASS_TIME_LIMIT)):
        name = f"run {row.pk}" if isinstance(row, Run) else str(row.pk)
        try:
            result.note(_recover_row(row, now=clock()))
        except (ProviderError, StoreError, WorkspaceFull) as failed:
            turns.note_failure()
            result.failures.append(f"{name}: {failed}")
        except Exception as failed:  # one row must not delay the others
            log.exception("stalled work not recovered", row=name)
            result.failures.append(f"{name}: {failed}")
    result.note("abandoned requests for a place deleted", admission_queue.purge_abandoned(now=now))
    return result


def _recover_row(row: Run | Sandbox, *, now: datetime) -> str:
    """Take the next step for a Run or a sandbox, and return the outcome. Raises the errors of its engine or store."""
    if isinstance(row, Run):
        abandoned.postpone(row, now=now)
        return abandoned.close_abandoned_run(row, now=now)
    if row.state == EVICTING:
        return _resume_eviction(row, now=now)
    return "suspensions finished" if suspension.continue_suspension(row, now=now, actor="sweep") else "lost race"


def _resume_eviction(sandbox: Sandbox, *, now: datetime) -> str:
    unchanged = Q(claim=sandbox.claim, deadline_at=sandbox.deadline_at)
    if sandbox.tries >= settings.DESTROY_TRIES and not workspace.has_unsaved_state(sandbox):
        destroyed = destruction.schedule_destroy(  # destroy_due retries the destroy, then quarantines the sandbox
            sandbox.pk, now=now, code=TransitionReason.EVICTION_STALLED, actor="sweep", guard=unchanged,
            reason=f"process could not be destroyed: {sandbox.last_error}",
        )  # fmt: skip
        return "stalled evictions destroyed" if destroyed else "lost race"
    token = uuid.uuid4()
    claim = eviction.build_claim(token, clock=clock_from(now))
    with end_if_unanswered(claim.end, claim):
        claimed = Sandbox.objects.filter(unchanged, pk=sandbox.pk, state=EVICTING).update(
            claim=token, claimed_by=settings.INSTANCE, deadline_at=claim.deadline, tries=F("tries") + 1
        )
    finished = claimed and eviction.finish_eviction(sandbox.pk, token, now=now, actor="sweep")
    return "evictions finished" if finished else "evictions postponed" if claimed else "lost race"


def find_overdue_starts(*, now: datetime) -> QuerySet[Sandbox]:
    """Select sandboxes in `warming` past their deadline."""
    return Sandbox.objects.filter(registry.filter_local(), state=WARMING, deadline_at__lt=now).order_by("deadline_at")


def find_overdue_evictions(*, now: datetime) -> QuerySet[Sandbox]:
    """Select sandboxes in `evicting` past their deadline."""
    overdue = Sandbox.objects.filter(registry.filter_local(), state=EVICTING, deadline_at__lt=now, lost_at__isnull=True)
    return overdue.order_by("deadline_at")


def find_overdue_suspensions(*, now: datetime) -> QuerySet[Sandbox]:
    """Select sandboxes in `suspended` past the deadline of the worker that suspends them."""
    overdue = Sandbox.objects.filter(registry.filter_local(), state=SUSPENDED, deadline_at__lt=now, lost_at__isnull=True)
    return overdue.order_by("deadline_at")


def recount(*, now: datetime) -> SweepResult:
    """Set the counters of pools and quotas to the counts of rows. Each difference is a bug and reported as a failure.

    Also updates automatic capacities, because no event reports a change of the setting or of an engine's memory."""
    result = SweepResult()
    if changed := capacity.update_automatic_capacities(now=now):
        result.note("capacities changed", changed)
    for pk in Pool.objects.values_list("pk", flat=True):
        with transaction.atomic():
            # Taking or releasing a place locks the quota, then the pool, until the sandbox's row is committed. The same order
            # prevents a deadlock. So does no_key, because the INSERT of a sandbox takes a key lock on the pool.
            quotas = list(Quota.objects.select_for_update(no_key=True).filter(pool=pk).order_by("pk"))
            pool = Pool.objects.select_for_update(no_key=True).get(pk=pk)
            live = Sandbox.objects.filter(pool=pool).exclude(state=DESTROYED)
            counted = live.count()
            if counted != pool.used:
                Pool.objects.filter(pk=pk).update(used=counted)
                result.note(COUNTERS_CORRECTED)
                result.failures.append(f'pool "{pool}": the counter was {pool.used}, but it has {counted} rows')
            rows_by_agent = dict(live.exclude(agent_did="").values_list("agent_did").annotate(n=Count("pk")).order_by())
            for quota in quotas:
                rows = rows_by_agent.get(quota.agent_did, 0)
                if rows != quota.used:
                    Quota.objects.filter(pk=quota.pk).update(used=rows)
                    result.note(COUNTERS_CORRECTED)
                    difference = f"the counter was {quota.used}, but it has {rows} rows"
                    result.failures.append(f'pool "{pool}", {quota.agent_did}: {difference}')
    return result


def release_instance(instance: str, *, now: datetime) -> int:
    """Make the work of a dead instance of the control plane due now, so that the next sweep takes over.

    `instance` is a value of LEASEHOLD_INSTANCE, or the common part of several values before a dot. Returns the number of rows.
    Call this function only if no process of the instance is alive. Without this call the rows wait for their
    deadlines. Raises ValueError for an empty instance."""
    if not instance:
        raise ValueError("An instance is required: rows without one may belong to any process.")
    claimed = Q(claimed_by=instance) | Q(claimed_by__startswith=f"{instance}.")
    not_due = Q(deadline_at__gt=now)
    sandboxes = Sandbox.objects.filter(claimed, not_due, state__in=IN_FLIGHT_STATES).update(deadline_at=now)
    runs = Run.objects.filter(claimed, ended_at__isnull=True, released=False).update(released=True)
    return sandboxes + runs + sweep_log.release_instance(claimed, now=now)
