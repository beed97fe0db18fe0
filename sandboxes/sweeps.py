"""Scheduled passes over rows. Each takes the time and says what it did; each may run twice, and beside any other."""

import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import Count, F, Q, QuerySet

from sandboxes import destruction, eviction, pool, providers, runs
from sandboxes.db.clock import clock_from, compute_backoff
from sandboxes.egress import nginx
from sandboxes.errors import SandboxError
from sandboxes.lifecycle import COLD, DESTROYED, DESTROYING, EVICTING, WAITING, WARM, WARMING, advance, advance_many
from sandboxes.models import ALIVE_STATES, IN_FLIGHT_STATES, Pool, Quota, Run, Sandbox, SandboxState, Snapshot, TransitionReason
from sandboxes.providers.base import Missing, ProviderError, ProviderSandbox
from sandboxes.state import workspace
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult
from sandboxes.usage import readings

log = structlog.get_logger(__name__)
COUNTERS_CORRECTED = "counters set right"  # what a recount notes, and health reads
MAX_WARM_FAILURES = 3  # in a row, before a pool stops warming up for a while


def destroy_due(*, now: datetime, limit: int = 200) -> SweepResult:
    """Destroy what was given up. A row that fails waits longer each time and does not hold up the others."""
    result, clock = SweepResult(), clock_from(now)
    for pk in find_due_for_destroy(now=now).values_list("pk", flat=True)[:limit]:
        if clock() > now + PASS_TIME_LIMIT:
            break
        try:
            if destruction.destroy(pk, now=clock(), actor="sweep"):
                result.note("destroyed")
            elif Sandbox.objects.filter(pk=pk, state=DESTROYING).exclude(last_error="").exists():
                result.failures.append(str(pk))
            else:
                result.note("lost race")
        except Exception as failed:  # a bug in one provider must not stop the destroys of the others
            log.exception("reclaim failed", sandbox=str(pk))
            result.failures.append(f"{pk}: {failed}")
    return result


def find_due_for_destroy(*, now: datetime) -> QuerySet[Sandbox]:
    """What reclaim would destroy now."""
    due = Sandbox.objects.filter(state=DESTROYING, deadline_at__lte=now, quarantined_at__isnull=True)
    return due.order_by("deadline_at")


def evict_idle(*, now: datetime, limit: int = 500, batch_size: int = 4) -> SweepResult:
    """Put to sleep what was not used for its idle time. Few are claimed at a time: a claimed one makes its caller wait."""
    result, clock = SweepResult(), clock_from(now)
    for was in (WAITING, WARM):
        while sum(result.counts.values()) + len(result.failures) < limit and clock() <= now + PASS_TIME_LIMIT:
            token = uuid.uuid4()
            if not claim_idle(was, token, now=now, limit=batch_size):
                break
            for pk in Sandbox.objects.filter(claim=token, state=EVICTING).values_list("pk", flat=True):
                _evict_one(pk, token, result, now=clock())
    return result


def claim_idle(was: SandboxState, token: uuid.UUID, *, now: datetime, limit: int) -> int:
    """Decide which idle sandboxes go to sleep: up to `limit` of them are `evicting` now, under this claim; how many."""
    return advance_many(
        find_idle(now=now).filter(state=was).order_by("idle_at")[:limit],
        was, EVICTING, now=now, code=TransitionReason.IDLE, actor="sweep", claim=token,
        claimed_by=settings.INSTANCE, deadline_at=now + eviction.EVICTION_TIMEOUT, idle_at=None,
    )  # fmt: skip


def _evict_one(pk: uuid.UUID, token: uuid.UUID, result: SweepResult, *, now: datetime) -> None:
    try:
        if eviction.finish_eviction(pk, token, now=now, actor="sweep"):
            result.note("put to sleep")
        else:
            result.failures.append(f"{pk}: {Sandbox.objects.values_list('last_error', flat=True).get(pk=pk)}")
    except Exception as failed:  # one sandbox must not keep the others awake
        log.exception("eviction failed", sandbox=str(pk))
        result.failures.append(f"{pk}: {failed}")


def find_idle(*, now: datetime) -> QuerySet[Sandbox]:
    """Sandboxes that nothing has used for their idle time."""
    return Sandbox.objects.filter(idle_at__lte=now, holder__isnull=False, lost_at__isnull=True)


def expire_cold(*, now: datetime, limit: int = 500) -> SweepResult:
    """What sleeps for longer than the cold TTL gives up its place and its local files. The store keeps its copy, and
    the next use by the same holder makes a new sandbox from it."""
    result = SweepResult()
    for sandbox in find_expired_cold(now=now)[:limit]:
        same = Q(state_since=sandbox.state_since)
        if eviction.release_cold(sandbox.pk, now=now, actor="sweep", guard=same):
            result.note("cold dropped")
        else:
            result.note("lost race")
    for snapshot in find_leftover_local_copies()[:limit]:
        workspace.forget_local(snapshot)
        result.note("local copies removed")
    return result


def find_expired_cold(*, now: datetime) -> QuerySet[Sandbox]:
    """Sandboxes that have slept for longer than the cold TTL."""
    return Sandbox.objects.filter(state=COLD, state_since__lte=now - settings.COLD_TTL).order_by("state_since")


def find_leftover_local_copies() -> QuerySet[Snapshot]:
    """Local copies of sandboxes that are gone."""
    return Snapshot.objects.filter(local=True, forgotten_at__isnull=True, sandbox__state=DESTROYED).order_by("at")


def warm_pools(*, now: datetime) -> SweepResult:
    """Start what pools request to have ready ahead of demand. Three failures in a row and a pool warms nothing for a while."""
    result, clock = SweepResult(), clock_from(now)
    for pk in find_surplus():
        free = Q(state=WARM, holder__isnull=True)
        result.note(
            "not wanted any more",
            destruction.schedule_destroy(pk, now=now, code=TransitionReason.SURPLUS, actor="sweep", guard=free),
        )
    for one in Pool.objects.filter(warm_target__gt=0, draining=False):
        while clock() <= now + PASS_TIME_LIMIT:
            if one.warm_paused_until and one.warm_paused_until > clock():
                result.failures.append(f'pool "{one}": warms nothing until {one.warm_paused_until:%H:%M:%S}: {one.warm_error}')
                break
            try:
                if pool.start_warm(one, now=clock()) is None:
                    break
                result.note("warmed up")
                Pool.objects.filter(pk=one.pk).update(warm_failures=0, warm_paused_until=None, warm_error="")
            except (SandboxError, ProviderError, ImproperlyConfigured) as failed:
                _count_warm_failure(one, failed, now=clock())
                result.failures.append(f'pool "{one}": {failed}')
            one.refresh_from_db()
    return result


def find_surplus() -> list[uuid.UUID]:
    """Sandboxes that nobody holds and their pool does not request: more than its target, or started as it wants none now."""
    unwanted: list[uuid.UUID] = []
    for one in Pool.objects.filter(sandboxes__holder__isnull=True, sandboxes__state=WARM).distinct():
        # Read first, so one that becomes ready between the two is not taken for one too many.
        free = [*Sandbox.objects.filter(pool=one, state=WARM, holder__isnull=True).values_list("pk", flat=True)]
        wanted = pool.find_unclaimed(one).filter(state=WARM).order_by("-created_at").values_list("pk", flat=True)
        kept = set() if one.draining else {*wanted[: one.warm_target]}
        unwanted += [pk for pk in free if pk not in kept]
    return unwanted


def find_pools_below_target(*, now: datetime) -> list[Pool]:
    """Pools that have fewer sandboxes ready than they request, and may warm some up."""
    wanting = Pool.objects.filter(warm_target__gt=0, draining=False).exclude(warm_paused_until__gt=now)
    return [one for one in wanting if pool.find_unclaimed(one).filter(state__in=(WARMING, WARM)).count() < one.warm_target]


def _count_warm_failure(one: Pool, failed: Exception, *, now: datetime) -> None:
    Pool.objects.filter(pk=one.pk).update(warm_failures=F("warm_failures") + 1, warm_error=str(failed)[:2000])
    one.refresh_from_db()
    if one.warm_failures >= MAX_WARM_FAILURES:
        pause = compute_backoff(
            one.warm_failures - MAX_WARM_FAILURES + 1, initial=timedelta(minutes=1), maximum=timedelta(hours=1)
        )
        Pool.objects.filter(pk=one.pk).update(warm_paused_until=now + pause)
        log.error("warming paused", pool=one.name, failures=one.warm_failures, seconds=pause.total_seconds(), error=str(failed))


def recover_stalled(*, now: datetime, limit: int = 200) -> SweepResult:
    """Take the next step for whatever is past its deadline: whoever was at it has died.

    A Run is closed as lost, and what it left running is killed. A sandbox that never became ready is given up; one that
    was falling asleep goes on from where it was."""
    result = SweepResult()
    for run in runs.find_overdue(now=now)[:limit]:
        try:
            result.note("runs closed" if runs.close_abandoned_run(run, now=now) else "lost race")
        except ProviderError as failed:
            result.failures.append(f"run {run.pk}: {failed}")
    for sandbox in find_overdue_starts(now=now)[:limit]:
        same = {"claim": sandbox.claim, "deadline_at": sandbox.deadline_at}
        gone = destruction.schedule_destroy(
            sandbox.pk, now=now, code=TransitionReason.START_STALLED, actor="sweep", guard=Q(**same)
        )
        result.note("starts given up" if gone else "lost race")
    for sandbox in find_overdue_evictions(now=now)[:limit]:
        _resume_eviction(sandbox, result, now=now)
    return result


def _resume_eviction(sandbox: Sandbox, result: SweepResult, *, now: datetime) -> None:
    same = Q(claim=sandbox.claim, deadline_at=sandbox.deadline_at)
    if sandbox.tries >= settings.DESTROY_TRIES:  # its state is stored; what does not go is a matter for the quarantine
        destruction.schedule_destroy(
            sandbox.pk,
            now=now,
            code=TransitionReason.EVICTION_STALLED,
            reason=f"process could not be destroyed: {sandbox.last_error}",
            actor="sweep",
            guard=same,
        )
        result.note("evictions given up")
        return
    token = uuid.uuid4()
    taken = Sandbox.objects.filter(same, pk=sandbox.pk, state=EVICTING).update(
        claim=token, claimed_by=settings.INSTANCE, deadline_at=now + eviction.EVICTION_TIMEOUT
    )
    done = taken and eviction.finish_eviction(sandbox.pk, token, now=now, actor="sweep")
    result.note("evictions finished" if done else "evictions postponed" if taken else "lost race")


def find_overdue_starts(*, now: datetime) -> QuerySet[Sandbox]:
    """Sandboxes that should have been ready by now."""
    return Sandbox.objects.filter(state=WARMING, deadline_at__lt=now).order_by("deadline_at")


def find_overdue_evictions(*, now: datetime) -> QuerySet[Sandbox]:
    """Sandboxes that should have been asleep by now."""
    late = Sandbox.objects.filter(state=EVICTING, deadline_at__lt=now, lost_at__isnull=True)
    return late.order_by("deadline_at")


def reconcile(*, now: datetime, grace: timedelta) -> SweepResult:
    """Compare the rows with what providers list, pool by pool.

    Listed and wanted by a row: kept as it is. Listed, and no row wants it (an earlier incarnation is not wanted):
    destroyed once it is older than `grace`; younger, its row may be on its way. A row that should be alive and is not
    there, neither listed nor when asked for by name: cold if nothing unsaved was in it, else lost. A listing that fails
    or is empty kills nothing. A proxy that no server stands behind any more goes too."""
    result = SweepResult()
    for one, name in iter_pool_providers():
        try:
            alive = find_alive(one, name)  # before the listing: what is made after this line is not missed in it
            listed = providers.get_provider(name).list(str(one.owner))
            _destroy_orphans(one, name, listed, result, now=now, grace=grace)
            if listed:
                _handle_missing(alive, listed, result, now=now)
            elif alive:
                result.failures.append(f'pool "{one}", {name}: lists nothing, but {len(alive)} rows are alive; left alone')
        except (ProviderError, ImproperlyConfigured) as failed:
            result.failures.append(f'pool "{one}", {name}: {failed}')
    if nginx.get_proxy_kind() == "nginx":
        try:
            if gone := nginx.remove_orphans(now=now, grace=grace):
                result.note("egress proxies removed", gone)
        except ProviderError as failed:
            result.failures.append(f"egress proxies: {failed}")
    return result


def iter_pool_providers() -> Iterator[tuple[Pool, str]]:
    """Every pool, with each provider that may have something of it."""
    for one in Pool.objects.all():
        for name in {one.provider or providers.get_default_provider_name(), *find_used_providers(one)}:
            yield one, name


def find_used_providers(one: Pool) -> set[str]:
    """Providers that still run something for this pool, also when it was moved to another since."""
    return set(Sandbox.objects.filter(pool=one).exclude(state=DESTROYED).values_list("provider", flat=True))


def find_alive(one: Pool, provider_name: str) -> list[Sandbox]:
    return list(Sandbox.objects.filter(pool=one, provider=provider_name, state__in=ALIVE_STATES, lost_at__isnull=True))


def find_orphans(one: Pool, provider_name: str, *, now: datetime, grace: timedelta) -> list[ProviderSandbox]:
    """What a provider lists for a pool and no row wants, older than `grace`; all of it, or ProviderError."""
    return _filter_orphans(one, providers.get_provider(provider_name).list(str(one.owner)), now=now, grace=grace)


def _filter_orphans(one: Pool, listed: list[ProviderSandbox], *, now: datetime, grace: timedelta) -> list[ProviderSandbox]:
    # Rows are read after the listing: whatever was created since is not in the listing, and is not missed.
    wanted = {sandbox.name for sandbox in Sandbox.objects.filter(pool=one).exclude(state__in=(DESTROYED, COLD))}
    return [found for found in listed if found.name not in wanted and found.created_at <= now - grace]


def _destroy_orphans(
    one: Pool, name: str, listed: list[ProviderSandbox], result: SweepResult, *, now: datetime, grace: timedelta
) -> None:
    for found in _filter_orphans(one, listed, now=now, grace=grace):
        log.warning("orphan destroyed", name=found.name, provider=name, created_at=found.created_at.isoformat())
        providers.get_provider(name).destroy(found.ref)
        result.note("orphans destroyed")


def _handle_missing(alive: list[Sandbox], listed: list[ProviderSandbox], result: SweepResult, *, now: datetime) -> None:
    names = {found.name for found in listed if not found.is_remnant}
    for sandbox in alive:
        if sandbox.name in names:
            result.note("kept")
            continue
        try:
            providers.get_provider(sandbox.provider).inspect(sandbox.ref)
        except Missing as gone:
            result.note(_mark_missing(sandbox, str(gone), now=now))


def _mark_missing(sandbox: Sandbox, why: str, *, now: datetime) -> str:
    """A row whose sandbox is not there: what became of it."""
    same = Q(incarnation=sandbox.incarnation)
    if sandbox.holder is None:
        gone = destruction.schedule_destroy(sandbox.pk, now=now, code=TransitionReason.PROVIDER_LOST, actor="sweep", guard=same)
        return "unclaimed dropped" if gone else "lost race"
    if sandbox.state == WARM:  # nothing unsaved was in it: the next use wakes it from what is stored, if anything is
        cold_now = advance(
            sandbox.pk, WARM, EVICTING, now=now, code=TransitionReason.PROVIDER_LOST, actor="sweep", guard=same,
            claim=uuid.uuid4(), deadline_at=now, idle_at=None,
        ) and advance(
            sandbox.pk, EVICTING, COLD, now=now, code=TransitionReason.NOTHING_UNSAVED, actor="sweep",
            claim=None, deadline_at=None,
        )  # fmt: skip
        return "found cold" if cold_now else "lost race"
    return "lost" if eviction.mark_lost(sandbox, why, now=now) else "lost race"


def recount(*, now: datetime) -> SweepResult:
    """Set the counters of pools and quotas to what the rows say. Any difference is an error: it should never be."""
    result = SweepResult()
    for pk in Pool.objects.values_list("pk", flat=True):
        with transaction.atomic():
            # Whoever takes or frees a place locks its quota and then the pool, until its row is in or out. In the same
            # order here, and no_key, since inserting a sandbox refers to the pool: else the two could wait for each other.
            quotas = list(Quota.objects.select_for_update(no_key=True).filter(pool=pk).order_by("pk"))
            one = Pool.objects.select_for_update(no_key=True).get(pk=pk)
            live = Sandbox.objects.filter(pool=one).exclude(state=DESTROYED)
            counted = live.count()
            if counted != one.used:
                Pool.objects.filter(pk=pk).update(used=counted)
                result.note(COUNTERS_CORRECTED)
                result.failures.append(f'pool "{one}": its counter said {one.used}, its rows are {counted}')
            by_agent = dict(live.exclude(agent_did="").values_list("agent_did").annotate(n=Count("pk")).order_by())
            for quota in quotas:
                mine = by_agent.get(quota.agent_did, 0)
                if mine != quota.used:
                    Quota.objects.filter(pk=quota.pk).update(used=mine)
                    result.note(COUNTERS_CORRECTED)
                    said = f"its counter said {quota.used}, its rows are {mine}"
                    result.failures.append(f'pool "{one}", {quota.agent_did}: {said}')
    return result


def measure_workspaces(*, now: datetime, limit: int = 50) -> SweepResult:
    """Measure the workspaces that were used since they were last measured, the longest unmeasured first."""
    result, clock = SweepResult(), clock_from(now)
    for sandbox in find_unmeasured()[:limit]:
        if clock() > now + PASS_TIME_LIMIT:
            break
        try:
            size = runs.measure_workspace(providers.get_provider(sandbox.provider), sandbox, now=clock())
        except Missing:
            result.note("gone")  # reconcile decides what that means
        except ProviderError as failed:
            result.failures.append(f"{sandbox.pk}: {failed}")
        else:
            result.note("over the limit" if size > sandbox.pool.workspace_limit_mib << 20 else "measured")
    return result


def record_readings(*, now: datetime) -> SweepResult:
    """Read what sandboxes have used of CPU and memory."""
    result, clock = SweepResult(), clock_from(now)
    for sandbox in readings.find_readable():
        if clock() > now + PASS_TIME_LIMIT:
            break
        try:
            result.note(
                "read", readings.record_reading(sandbox, providers.get_provider(sandbox.provider), now=clock()) is not None
            )
        except Missing:
            result.note("gone")  # reconcile decides what that means
        except ProviderError as failed:
            result.failures.append(f"{sandbox.pk}: {failed}")
    return result


def find_unmeasured() -> QuerySet[Sandbox]:
    """Sandboxes in use whose workspace was not measured since they were last used."""
    stale = Q(measured_at__isnull=True) | Q(measured_at__lt=F("last_used_at"))
    used = Sandbox.objects.filter(stale, tier=2, lost_at__isnull=True).select_related("pool")
    return used.order_by(F("measured_at").asc(nulls_first=True))


def release_instance(instance: str, *, now: datetime) -> int:
    """What a dead instance of the control plane was at is due now, and the next sweep takes it over; how many rows.

    `instance` is a value of LEASEHOLD_INSTANCE, or what several of them have before a dot. Without this everything
    waits for its deadline, so nothing is lost if it is never called; call it only when no process of it is left."""
    if not instance:
        raise ValueError("rows without an instance may be anybody's")
    its = Q(claimed_by=instance) | Q(claimed_by__startswith=f"{instance}.")
    ahead = Q(deadline_at__gt=now)
    sandboxes = Sandbox.objects.filter(its, ahead, state__in=IN_FLIGHT_STATES).update(deadline_at=now)
    started = Q(ended_at__isnull=True, started_at__lt=now)  # deadline > start holds also if a clock was set back
    return sandboxes + Run.objects.filter(its, ahead, started).update(deadline_at=now)
