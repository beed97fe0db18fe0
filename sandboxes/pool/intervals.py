"""Vendor intervals: the times after which a vendor stops an idle sandbox and deletes a stopped one, if no control plane does.

Rule: a vendor deletes no sandbox before its lease can have ended and its last state can be stored. `auto_delete` therefore
reaches from the last use of the sandbox to the latest end of its lease, renewals included, and RECLAIM_PERIOD beyond.
`auto_stop` may be shorter than the lease where a stopped sandbox keeps its files, because the next use starts the sandbox;
elsewhere the rule applies to `auto_stop`, too. An interval counts from a stop, which is never before the last use, so an
interval that is long enough stays long enough.

The row has the intervals that are set at the vendor. They are stated when the sandbox is created, and raised after a claim and
by a sweep, which finds the rows whose intervals are too short: after a move of the lease's end, after a call whose outcome is
not known, and after a crash between the call and the row. No renewal waits for a vendor."""

from datetime import datetime, timedelta
from functools import partial

import structlog
from django.db.models import DateTimeField, ExpressionWrapper, F, Q, QuerySet, Value
from django.db.models.lookups import LessThan

from sandboxes import providers
from sandboxes.db.clock import clock_from
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.engine_turns import EngineTurns, list_by_engine
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.models import ALIVE_STATES, Sandbox
from sandboxes.providers.base import Provider, VendorIntervals
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
RECLAIM_PERIOD = timedelta(days=1)  # after the latest end of a lease, to store the last state of its sandbox
CLAIM_TTL = timedelta(minutes=3)  # of the worker that sets intervals: longer than its two requests of a minute each
NEVER = timedelta(0)  # in columns; VendorIntervals has None


def compute_intervals(sandbox: Sandbox, provider: Provider) -> VendorIntervals:
    """Return the intervals of a sandbox: its own, else those of the provider's configuration, raised as the rule requires."""
    default, required = provider.default_intervals(), _compute_required(sandbox)
    auto_stop = _choose(sandbox.auto_stop, default.auto_stop) if provider.has_auto_stop else None
    auto_delete = _choose(sandbox.auto_delete, default.auto_delete) if provider.has_auto_delete else None
    if auto_stop and not provider.stop_keeps_files:
        auto_stop = max(auto_stop, required)
    return VendorIntervals(auto_stop, max(auto_delete, required) if auto_delete else None)


def _choose(own: timedelta | None, default: timedelta | None) -> timedelta | None:
    return default if own is None else own or None


def _compute_required(sandbox: Sandbox) -> timedelta:
    return sandbox.held_until + RECLAIM_PERIOD - sandbox.last_used_at if sandbox.held_until else NEVER


def to_columns(intervals: VendorIntervals) -> dict[str, timedelta]:
    """Return the columns of a row whose intervals were set at the vendor."""
    return {"vendor_auto_stop": intervals.auto_stop or NEVER, "vendor_auto_delete": intervals.auto_delete or NEVER}


def find_short(*, now: datetime) -> QuerySet[Sandbox]:
    """Select the alive sandboxes of this process's hosts whose intervals at the vendor are too short or not known."""
    alive = Sandbox.objects.filter(registry.filter_local(), state__in=ALIVE_STATES, lost_at__isnull=True)
    short = Q(pk__in=[])
    for name in find_settable_providers():
        short |= Q(provider=name) & _build_short_filter(providers.get_provider(name))
    return alive.filter(short, _build_unclaimed_filter(now)).order_by("last_used_at")


def find_settable_providers() -> list[str]:
    """Return the providers of alive sandboxes that can set the intervals of an existing sandbox."""
    alive = Sandbox.objects.filter(registry.filter_local(), state__in=ALIVE_STATES)
    names = alive.values_list("provider", flat=True).distinct().order_by()
    return [name for name in names if providers.get_provider(name).can_set_intervals]


def _build_unclaimed_filter(now: datetime) -> Q:
    return Q(intervals_claimed_until__isnull=True) | Q(intervals_claimed_until__lt=now)


def _build_short_filter(provider: Provider) -> Q:
    """Build the condition that an interval is not known, is not the sandbox's own, or ends before the rule permits."""
    short = Q(vendor_auto_delete__isnull=True) | Q(vendor_auto_stop__isnull=True)
    required = ExpressionWrapper(F("held_until") + Value(RECLAIM_PERIOD), output_field=DateTimeField())
    for column in ["vendor_auto_delete"] if provider.stop_keeps_files else ["vendor_auto_delete", "vendor_auto_stop"]:
        reached = ExpressionWrapper(F("last_used_at") + F(column), output_field=DateTimeField())
        short |= Q(**{f"{column}__gt": NEVER}) & Q(LessThan(reached, required))
    return short | _build_other_filter(provider)


def _build_other_filter(provider: Provider) -> Q:
    """Build the condition that the lease of a claimed sandbox has intervals of its own, which are not set yet.

    An `auto_delete` that is longer than its own was raised."""
    is_other = Q(pk__in=[])
    if provider.has_auto_stop and provider.stop_keeps_files:
        is_other |= Q(auto_stop__isnull=False) & ~Q(vendor_auto_stop=F("auto_stop"))
    if provider.has_auto_delete:
        is_off, is_never = Q(auto_delete=NEVER), Q(vendor_auto_delete=NEVER)
        is_other |= Q(auto_delete__isnull=False) & ((is_off & ~is_never) | (~is_off & is_never))
        is_other |= Q(vendor_auto_delete__lt=F("auto_delete")) & ~is_never
    return is_other


def raise_short(sandbox: Sandbox, *, now: datetime) -> bool:
    """Set the intervals of one sandbox at its vendor, if they are too short or not known. Returns whether they were set.

    1. Claim the row, so that two workers do not set different intervals in an order that neither knows.
    2. Set the intervals that the row requires now.
    3. Record them, and end the claim.

    Safe to repeat after a crash at any step. Raises ProviderError; nothing is recorded then, and the sweep repeats the call."""
    provider = registry.get_sandbox_provider(sandbox)
    if not provider.can_set_intervals:
        return False
    until = now + CLAIM_TTL
    row = Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, state__in=ALIVE_STATES)
    short = _build_short_filter(provider) & _build_unclaimed_filter(now)
    claimed = row.filter(intervals_claimed_until=until)
    with end_if_unanswered(partial(claimed.update, intervals_claimed_until=None), sandbox):
        if not row.filter(short).update(intervals_claimed_until=until):
            return False
    checkpoint("intervals claimed", sandbox)
    current = claimed.first()
    if current is None:
        return False
    intervals = compute_intervals(current, provider)
    try:
        provider.set_intervals(current.ref, intervals)
    except ProviderError:
        claimed.update(intervals_claimed_until=None)
        raise
    checkpoint("intervals set", sandbox)
    recorded = claimed.update(intervals_claimed_until=None, **to_columns(intervals))
    log.info("vendor intervals set", sandbox=str(sandbox.pk), auto_delete=str(intervals.auto_delete))
    return bool(recorded)


def raise_after_claim(sandbox: Sandbox, *, now: datetime) -> None:
    """Like raise_short, for a sandbox that a lease has just claimed. A failure is logged and left to the sweep."""
    try:
        raise_short(sandbox, now=now)
    except ProviderError as failed:
        log.warning("vendor intervals not set", sandbox=str(sandbox.pk), error=str(failed))


def raise_all_short(*, now: datetime, limit: int = 500) -> SweepResult:
    """Sweep: set the intervals at the vendor that are too short for the leases of their sandboxes, or not known."""
    result, clock = SweepResult(), clock_from(now)
    rows = list_by_engine(find_short(now=now).order_by("?"), limit=limit)  # a failure does not change the order
    for sandbox in (turns := EngineTurns(rows, clock=clock, until=now + PASS_TIME_LIMIT)):
        try:
            result.note("intervals set" if raise_short(sandbox, now=clock()) else "lost race")
        except Missing:
            result.note("gone")  # reconcile handles missing sandboxes
        except ProviderError as failed:
            turns.note_failure()
            result.failures.append(f"{sandbox.pk}: {failed}")
    return result
