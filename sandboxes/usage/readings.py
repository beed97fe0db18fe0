"""What sandboxes use of CPU and memory, where their provider counts it: asked now and then while they are there, and for the
last time before they go.

The counter is the provider's and only grows, so a reading that is late, or was never written, loses nothing: the next one
has it. What a sandbox used after its last reading is lost with it alone if the provider loses it, or does not answer when
it is destroyed: then nobody is charged for that."""

from datetime import datetime, timedelta

import structlog
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from sandboxes.db.clock import Clock, clock_from
from sandboxes.lifecycle import WARM, WARMING, checkpoint
from sandboxes.models import ALIVE_STATES, Reading, Sandbox, Transition
from sandboxes.providers.base import Missing, Provider, ProviderError, ResourceUsage

log = structlog.get_logger(__name__)
MIN_CPU_MICROSECONDS = 100_000  # microseconds of CPU below which a sandbox that stays is read later
MICROSECOND = timedelta(microseconds=1)
MIB_BYTES = 1 << 20
MAX_INSERT_ATTEMPTS = 5  # readings of one sandbox at once


def record_reading(sandbox: Sandbox, provider: Provider, *, now: datetime, least: int = MIN_CPU_MICROSECONDS) -> Reading | None:
    """Write down what it has used since it was read last. None: less than `least`, or nothing can be said: its provider does
    not count, or it was never ready. ProviderError. Safe to repeat, and beside others."""
    if not sandbox.measured:
        return None
    later = clock_from(now)
    used = provider.stats(sandbox.ref)
    checkpoint("use asked", sandbox)
    if used is None:
        return None
    for _ in range(MAX_INSERT_ATTEMPTS):
        last = Reading.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation).order_by("-number").first()
        reading = _build_reading(sandbox, last, used, asked=now, later=later)
        if reading is None or (last and reading.cpu_micros < least):
            return None
        before = _split_at_claim(reading, last)
        checkpoint("reading made", sandbox)
        try:
            with transaction.atomic():
                if before:
                    before.save(force_insert=True)
                reading.save(force_insert=True)
        except IntegrityError:  # somebody else has read it meanwhile: what is new since then is less
            continue
        return reading
    return None


def _build_reading(
    sandbox: Sandbox, last: Reading | None, used: ResourceUsage, *, asked: datetime, later: Clock
) -> Reading | None:
    """The reading after `last`, which says what is new. None: it was never ready, or what was read after has this in it."""
    counted = used.cpu_micros
    if last is None:
        since, new = _find_ready_time(sandbox), counted
    elif counted >= last.counted:
        since, new = last.at, counted - last.counted
    elif asked > last.at:  # it stopped in between and was started anew: its counter began again
        since, new = last.at, counted
    else:
        return None
    if since is None:
        return None
    return Reading(
        sandbox=sandbox, incarnation=sandbox.incarnation, number=last.number + 1 if last else 1, holder=sandbox.holder,
        since=since, at=max(later(), since + MICROSECOND), counted=counted, cpu_micros=new,
        memory_mib=-(-used.memory_bytes // MIB_BYTES),
    )  # fmt: skip


def _split_at_claim(reading: Reading, last: Reading | None) -> Reading | None:
    """Cut a reading where its sandbox was claimed, and give what was before, which is nobody's: memory as it was read last.
    CPU that was used before and is in no reading yet stays its holder's, since nobody knows how much that is."""
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
    """When the present incarnation became ready, or None: a start that failed costs nothing."""
    own = Transition.objects.filter(sandbox=sandbox).order_by("-pk")
    started = own.filter(to=WARMING).values_list("pk", flat=True)[:1]
    return own.filter(to=WARM, was=WARMING, pk__gt=started).values_list("at", flat=True).first()


def record_final_reading(sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """`read` before its process is destroyed, whatever it has used. That it cannot be read keeps no sandbox."""
    try:
        record_reading(sandbox, provider, now=now, least=1)
    except Missing:
        pass  # whatever it used last, nobody knows
    except ProviderError as failed:
        log.warning("sandbox not read before its end", sandbox=str(sandbox.pk), error=str(failed))


def find_readable() -> QuerySet[Sandbox]:
    """What can be read, the busiest first: whoever is not reached has it in the next reading."""
    return Sandbox.objects.filter(measured=True, state__in=ALIVE_STATES, lost_at__isnull=True).order_by("-last_used_at", "pk")
