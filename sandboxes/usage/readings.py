"""CPU and memory readings of sandboxes, for providers that report use: periodic, and a final one before destroy.

The provider's counter is cumulative, so the next reading includes the use of a late or missing one. The use after the last
reading is lost, and not billed, if the provider loses the sandbox or does not respond at destroy."""

from datetime import datetime, timedelta

import structlog
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from sandboxes.db import dialect
from sandboxes.db.clock import Clock, clock_from
from sandboxes.lifecycle import SUSPENDED, WARM, WARMING, checkpoint
from sandboxes.models import AWAKE_STATES, Reading, Sandbox, Transition
from sandboxes.providers.base import Provider, ResourceUsage
from sandboxes.providers.errors import Missing, ProviderError

log = structlog.get_logger(__name__)
MIN_CPU_MICROSECONDS = 100_000  # CPU use below which no reading is stored for a live sandbox
MICROSECOND = timedelta(microseconds=1)
MIB_BYTES = 1 << 20
UNKNOWN_USE = "gone; its use since the last reading is unknown, because the provider did not state it"
MAX_INSERT_ATTEMPTS = 5  # against concurrent readings of one sandbox


def record_reading(
    sandbox: Sandbox, provider: Provider, *, now: datetime, min_cpu_micros: int = MIN_CPU_MICROSECONDS
) -> Reading | None:
    """Store the use since the previous reading. Safe to repeat and to run concurrently.

    Return None if the CPU time is below `min_cpu_micros`, the provider does not report use, or the sandbox was never ready.
    Raise ProviderError."""
    if not sandbox.measured:
        return None
    clock = clock_from(now)
    used = provider.stats(sandbox.ref)
    checkpoint("use asked", sandbox)
    if used is None:
        return None
    for _ in range(MAX_INSERT_ATTEMPTS):
        previous = Reading.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation).order_by("-number").first()
        reading = _build_reading(sandbox, previous, used, requested_at=now, clock=clock)
        if reading is None or (previous and reading.cpu_micros < min_cpu_micros):
            return None
        before = _split_at_claim(reading, previous)
        checkpoint("reading made", sandbox)
        try:
            with transaction.atomic():
                if before:
                    before.save(force_insert=True)
                reading.save(force_insert=True)
        except IntegrityError as error:  # a concurrent reading was stored first: compute the difference to that one
            dialect.raise_unless_unique(error)
            continue
        return reading
    return None


def _build_reading(
    sandbox: Sandbox, previous: Reading | None, used: ResourceUsage, *, requested_at: datetime, clock: Clock
) -> Reading | None:
    """Build the reading after `previous`. Return None if the sandbox was never ready, or a later reading includes this use."""
    counter = used.cpu_micros
    if previous is None:
        since, cpu_micros = _find_ready_time(sandbox), counter
    elif counter >= previous.counted:
        since, cpu_micros = previous.at, counter - previous.counted
    elif requested_at > previous.at:  # the container was restarted in between, and its counter started at 0
        since, cpu_micros = previous.at, counter
    else:
        return None
    if since is None:
        return None
    since = max(since, _find_last_resume(sandbox) or since)
    return Reading(
        sandbox=sandbox, incarnation=sandbox.incarnation, number=previous.number + 1 if previous else 1, holder=sandbox.holder,
        since=since, at=max(clock(), since + MICROSECOND), counted=counter, cpu_micros=cpu_micros,
        memory_mib=-(-used.memory_bytes // MIB_BYTES),
    )  # fmt: skip


def _split_at_claim(reading: Reading, previous: Reading | None) -> Reading | None:
    """Split a reading at the claim of its sandbox, and return the part before the claim, which is not charged to a lease.

    The part before the claim has the memory of the previous reading and no CPU time. CPU time that was used before the claim
    and not read stays with the holder, because its amount is unknown."""
    if reading.holder is None or (previous and previous.holder):
        return None
    by_holder = Transition.objects.filter(sandbox=reading.sandbox, holder=reading.holder).order_by("pk")
    claimed_at = by_holder.values_list("at", flat=True).first()
    if claimed_at is None or not reading.since < claimed_at < reading.at:
        return None
    before = Reading(
        sandbox=reading.sandbox, incarnation=reading.incarnation, number=reading.number, since=reading.since, at=claimed_at,
        counted=previous.counted if previous else 0, cpu_micros=0, memory_mib=previous.memory_mib if previous else 0,
    )  # fmt: skip
    reading.number, reading.since = reading.number + 1, claimed_at
    return before


def _find_ready_time(sandbox: Sandbox) -> datetime | None:
    """Return the time at which the current incarnation became ready, or None for a failed start, which is not charged."""
    transitions = Transition.objects.filter(sandbox=sandbox).order_by("-pk")
    latest_start = transitions.filter(to=WARMING).values_list("pk", flat=True)[:1]
    return transitions.filter(to=WARM, was=WARMING, pk__gt=latest_start).values_list("at", flat=True).first()


def _find_last_resume(sandbox: Sandbox) -> datetime | None:
    """Return the end of the last suspension. A reading before each suspension has the use until then."""
    resumed = Transition.objects.filter(sandbox=sandbox, was=SUSPENDED).order_by("-pk")
    return resumed.values_list("at", flat=True).first()


def record_final_reading(sandbox: Sandbox, provider: Provider, *, now: datetime) -> str:
    """Store a reading of any size before the sandbox is destroyed. A failure does not stop the destroy.

    Return the reason to record with the transition that ends the sandbox: UNKNOWN_USE after a failure, else empty."""
    try:
        record_reading(sandbox, provider, now=now, min_cpu_micros=1)
    except Missing:
        pass  # the use since the last reading is unknown, as of each sandbox that was lost
    except ProviderError as failed:
        log.warning("final usage reading failed", sandbox=str(sandbox.pk), error=str(failed))
        return UNKNOWN_USE
    return ""


def find_readable() -> QuerySet[Sandbox]:
    """Return the sandboxes with readable usage, most recently used first. The next pass includes the use of a skipped one.

    A suspended sandbox uses no CPU time, and the price of its memory is another."""
    return Sandbox.objects.filter(measured=True, state__in=AWAKE_STATES, lost_at__isnull=True).order_by("-last_used_at", "pk")
