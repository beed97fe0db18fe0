"""CPU and memory readings of sandboxes, for providers that report use: periodic, and a final one before destroy.

The provider's counter is cumulative, so a late or missing reading loses nothing: the next one includes it. Use after the
last reading is lost only if the provider loses the sandbox or does not answer at destroy; that use is not billed."""

from datetime import datetime, timedelta

import structlog
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from sandboxes.db.clock import Clock, clock_from
from sandboxes.lifecycle import WARM, WARMING, checkpoint
from sandboxes.models import ALIVE_STATES, Reading, Sandbox, Transition
from sandboxes.providers.base import Missing, Provider, ProviderError, ResourceUsage

log = structlog.get_logger(__name__)
MIN_CPU_MICROSECONDS = 100_000  # CPU use below which no reading is stored for a live sandbox
MICROSECOND = timedelta(microseconds=1)
MIB_BYTES = 1 << 20
MAX_INSERT_ATTEMPTS = 5  # against concurrent readings of one sandbox


def record_reading(
    sandbox: Sandbox, provider: Provider, *, now: datetime, min_cpu_micros: int = MIN_CPU_MICROSECONDS
) -> Reading | None:
    """Store the use since the previous reading. Return None if the CPU time is below `min_cpu_micros`, the provider does not
    report use, or the sandbox was never ready. Raise ProviderError. Safe to repeat and to run concurrently."""
    if not sandbox.measured:
        return None
    clock = clock_from(now)
    used = provider.stats(sandbox.ref)
    checkpoint("use asked", sandbox)
    if used is None:
        return None
    for _ in range(MAX_INSERT_ATTEMPTS):
        last = Reading.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation).order_by("-number").first()
        reading = _build_reading(sandbox, last, used, requested_at=now, clock=clock)
        if reading is None or (last and reading.cpu_micros < min_cpu_micros):
            return None
        before = _split_at_claim(reading, last)
        checkpoint("reading made", sandbox)
        try:
            with transaction.atomic():
                if before:
                    before.save(force_insert=True)
                reading.save(force_insert=True)
        except IntegrityError:  # a concurrent reading was stored first: compute the difference to that one
            continue
        return reading
    return None


def _build_reading(
    sandbox: Sandbox, last: Reading | None, used: ResourceUsage, *, requested_at: datetime, clock: Clock
) -> Reading | None:
    """Build the reading after `last`. Return None if the sandbox was never ready, or a later reading includes this use."""
    counted = used.cpu_micros
    if last is None:
        since, new = _find_ready_time(sandbox), counted
    elif counted >= last.counted:
        since, new = last.at, counted - last.counted
    elif requested_at > last.at:  # the container was restarted in between, so the counter began again
        since, new = last.at, counted
    else:
        return None
    if since is None:
        return None
    return Reading(
        sandbox=sandbox, incarnation=sandbox.incarnation, number=last.number + 1 if last else 1, holder=sandbox.holder,
        since=since, at=max(clock(), since + MICROSECOND), counted=counted, cpu_micros=new,
        memory_mib=-(-used.memory_bytes // MIB_BYTES),
    )  # fmt: skip


def _split_at_claim(reading: Reading, last: Reading | None) -> Reading | None:
    """Split a reading at the claim of its sandbox and return the part before the claim, which no lease pays: the memory of the
    previous reading. CPU time used before the claim but not read yet stays with the holder, because it is unknown."""
    if reading.holder is None or (last and last.holder):
        return None
    held = Transition.objects.filter(sandbox=reading.sandbox, holder=reading.holder).order_by("pk")
    claimed = held.values_list("at", flat=True).first()
    if claimed is None or not reading.since < claimed < reading.at:
        return None
    before = Reading(
        sandbox=reading.sandbox, incarnation=reading.incarnation, number=reading.number, since=reading.since, at=claimed,
        counted=last.counted if last else 0, cpu_micros=0, memory_mib=last.memory_mib if last else 0,
    )  # fmt: skip
    reading.number, reading.since = reading.number + 1, claimed
    return before


def _find_ready_time(sandbox: Sandbox) -> datetime | None:
    """Return the time at which the current incarnation became ready, or None for a failed start, which costs nothing."""
    transitions = Transition.objects.filter(sandbox=sandbox).order_by("-pk")
    started = transitions.filter(to=WARMING).values_list("pk", flat=True)[:1]
    return transitions.filter(to=WARM, was=WARMING, pk__gt=started).values_list("at", flat=True).first()


def record_final_reading(sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """Store a reading of any size before the sandbox is destroyed. A failure is logged and does not stop the destroy."""
    try:
        record_reading(sandbox, provider, now=now, min_cpu_micros=1)
    except Missing:
        pass  # the use since the last reading is unknown
    except ProviderError as failed:
        log.warning("final usage reading failed", sandbox=str(sandbox.pk), error=str(failed))


def find_readable() -> QuerySet[Sandbox]:
    """Return the sandboxes with readable usage, most recently used first. A skipped one is covered by its next reading."""
    return Sandbox.objects.filter(measured=True, state__in=ALIVE_STATES, lost_at__isnull=True).order_by("-last_used_at", "pk")
