"""Metering: derivation of usage records by day from Transitions, Readings, Runs, Snapshots, DataSizes and LlmCalls.

The writers of these facts push no usage: a pass reads the facts that are not metered yet. All usage records can be deleted
and derived again."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, F, Max, OuterRef, Q, Subquery

from billing import horizon, rollup
from billing.call_measures import TOKENS
from billing.dates import EPOCH, start_of_day, start_of_hour, to_utc_date
from billing.intervals import MICROSECOND, StateInterval, build_intervals, prorate, split_by_day
from billing.models import Meter, UsageKind, UsageRecord, Watermark
from billing.token_records import build_tokens_record, is_billable_call
from sandboxes.claims import note_progress
from sandboxes.lifecycle import checkpoint
from sandboxes.models import DataSize, LlmCall, Reading, Run, Sandbox, SandboxState, Snapshot, Transition

# Rows per batch. SQLite limits the number of values in a statement.
SANDBOX_BATCH_SIZE = 400
CALL_BATCH_SIZE = INSERT_BATCH_SIZE = 500
# (last key of the previous batch, end of metering) -> (last key of this batch or None if done, number of records written)
BatchFunction = Callable[[Any, datetime], tuple[Any, int]]
SANDBOX_COLUMNS = ("id", "agent_did", "environment_id", "provider", "memory_mib", "millicpus", "measured")
WATERMARK_NAMES = ("time", "use", "runs", "snapshots", "data", "tokens")
STORE_PROVIDER = "store"  # provider of usage records about agents' data, which is kept in no sandbox


def meter_usage(*, now: datetime) -> Counter[str]:
    """Derive usage records up to `now`. Return the number of records written by watermark name.

    Safe to interrupt, repeat and run concurrently: each batch is one transaction under the lock of its watermark, in which its
    facts are marked as metered. Facts of one lease within one hour share a record (billing.rollup)."""
    counts: Counter[str] = Counter()
    batches: tuple[BatchFunction, ...] = (
        _meter_time,
        _meter_resource_use,
        _meter_runs,
        _meter_snapshots,
        _meter_agent_data,
        _meter_llm_calls,
    )
    for name, batch in zip(WATERMARK_NAMES, batches, strict=True):
        after: Any = None
        while True:
            with transaction.atomic(durable=True):
                until = Watermark.hold(name, now)
                after, written = batch(after, until)
                checkpoint("metered", name)
            note_progress()
            counts[name] += written
            if after is None:
                break
    return +counts


def reset_usage() -> None:
    """Delete the usage records from the horizon on. The next `meter_usage` derives them again."""
    with transaction.atomic(durable=True):
        for name in WATERMARK_NAMES:
            Watermark.hold(name, EPOCH)
        since = horizon.hold_horizon()
        UsageRecord.objects.filter(day__gte=since.date()).delete()
        Meter.objects.all().delete()
        Sandbox.objects.filter(~Q(destroyed_at__lt=since), metered=True).update(metered=False)
        Reading.objects.filter(metered=True, at__gt=since).update(metered=False)
        Run.objects.filter(metered=True, started_at__gte=since).update(metered=False)
        metered = Q(metered=True) | Q(metered_until__isnull=False)
        Snapshot.objects.filter(metered).update(metered=False, metered_until=None)
        DataSize.objects.filter(metered).update(metered=False, metered_until=None)
        metered = Q(counted=True) | Q(metered_cost__isnull=False) | Q(metered_tokens__isnull=False)
        LlmCall.objects.filter(metered, started_at__gte=since).update(counted=False, metered_cost=None, metered_tokens=None)


def _meter_time(after: UUID | None, until: datetime) -> tuple[UUID | None, int]:
    """Write the time records of a batch of sandboxes that are not completely metered.

    Intervals that have ended are rolled up: each is added once, because the sandbox's meter advances in the same transaction.
    An open interval has records of its own, which are replaced. Cold sandboxes whose records would not change are left out:
    those metered up to the last full hour, in the state that they have now. If two transitions have the same time, their end
    may be found an hour later."""
    hour = start_of_hour(until)
    unchanged = Q(state=SandboxState.COLD, meter__began_at=F("state_since"), meter__read_at__gte=hour)
    remaining = Sandbox.objects.filter(~unchanged, metered=False, **({"pk__gt": after} if after else {}))
    batch = remaining.order_by("pk")[:SANDBOX_BATCH_SIZE]
    sandboxes_by_id = {sandbox.pk: sandbox for sandbox in batch.only(*SANDBOX_COLUMNS)}
    if not sandboxes_by_id:
        return None, 0
    meters, final = {each.pk: each for each in Meter.objects.filter(pk__in=sandboxes_by_id)}, horizon.get_horizon()
    ended: list[UsageRecord] = []
    opened: list[UsageRecord] = []
    advanced, finished, outdated = [], [], Q(pk__in=[])
    for pk, transitions in _load_unread_transitions(sandboxes_by_id, meters).items():
        if not transitions:
            continue  # the row exists before its first transition
        intervals, meter = [*build_intervals(transitions, until=until)], meters.get(pk)
        same_state = meter is not None and meter.transition == transitions[-1][0]
        since = start_of_day(to_utc_date(meter.read_at)) if meter and same_state else final  # earlier days are complete
        if meter:
            previous = Q(source=_format_transition_source(meter.transition))
            outdated |= previous & Q(day__gte=since.date()) if since else previous
        for interval in intervals:
            (opened if interval.open else ended).extend(_build_time_records(sandboxes_by_id[pk], interval, since))
        last = intervals[-1] if intervals else None
        if last is None or not last.open:
            finished.append(pk)
        elif not same_state or meter is None or until > meter.read_at:
            advanced.append(Meter(sandbox_id=pk, transition=last.transition, began_at=last.began_at, read_at=until))
    UsageRecord.objects.filter(outdated, item=UsageKind.TIME).delete()
    written = rollup.add_usage(ended, rollup.HourParts()) if ended else 0
    UsageRecord.objects.bulk_create(opened, batch_size=INSERT_BATCH_SIZE)
    Meter.objects.bulk_create(
        advanced, update_conflicts=True, unique_fields=["sandbox"], update_fields=["transition", "began_at", "read_at"]
    )
    Meter.objects.filter(pk__in=finished).delete()
    Sandbox.objects.filter(pk__in=finished).update(metered=True)
    return max(sandboxes_by_id), written + len(opened)


def _load_unread_transitions(
    sandbox_ids: Iterable[UUID], meters: Mapping[UUID, Meter]
) -> dict[UUID, list[tuple[int, str, UUID | None, datetime]]]:
    """Return each sandbox's transitions (id, to, holder, at), from the last metered one on, which has the time in the meter."""
    transitions: dict[UUID, list[tuple[int, str, UUID | None, datetime]]] = {pk: [] for pk in sandbox_ids}
    unread = Q(sandbox__meter__isnull=True) | Q(pk__gte=F("sandbox__meter__transition"))
    rows = Transition.objects.filter(unread, sandbox__in=transitions).order_by("sandbox", "pk")
    for number, sandbox, to, holder, at in rows.values_list("pk", "sandbox", "to", "holder", "at"):
        meter = meters.get(sandbox)
        transitions[sandbox].append((number, to, holder, meter.began_at if meter and meter.transition == number else at))
    return transitions


def _build_time_records(sandbox: Sandbox, interval: StateInterval, since: datetime | None) -> Iterator[UsageRecord]:
    """Yield a record for each day of an interval, from `since` on if given."""
    for day, began, ended in split_by_day(max(interval.began_at, since) if since else interval.began_at, interval.ended_at):
        yield UsageRecord(
            item=UsageKind.TIME,
            source=_format_transition_source(interval.transition),
            day=day,
            began_at=began,
            ended_at=ended,
            state=interval.state,
            memory_mib=sandbox.memory_mib,
            millicpus=sandbox.millicpus,
            measured=sandbox.measured,
            **_get_owner_fields(sandbox, interval.holder),
        )


def _get_owner_fields(sandbox: Sandbox, holder: UUID | None) -> dict[str, Any]:
    """Return the owner columns of a sandbox's usage. Usage without a lease has no agent and no environment."""
    lease_fields = {"agent_did": sandbox.agent_did, "environment_id": sandbox.environment_id} if holder else {}
    return {"sandbox": sandbox, "holder": holder, "provider": sandbox.provider, **lease_fields}


def _format_transition_source(pk: int) -> str:
    return f"transition {pk}"


def _meter_resource_use(after: int | None, until: datetime) -> tuple[int | None, int]:
    """Write the records of measured CPU and memory use of a batch of readings."""
    unmetered = Reading.objects.filter(metered=False, **({"pk__gt": after} if after else {}))
    readings = [*unmetered.select_related("sandbox").order_by("pk")[:SANDBOX_BATCH_SIZE]]
    if not readings:
        return None, 0
    final = horizon.get_horizon()
    records = [record for reading in readings for record in _build_use_records(reading) if record.day >= final.date()]
    written = rollup.add_usage(records, rollup.HourParts())
    Reading.objects.filter(pk__in=[reading.pk for reading in readings]).update(metered=True)
    return readings[-1].pk, written


def _build_use_records(reading: Reading) -> Iterator[UsageRecord]:
    """Yield a record for each day of a reading's interval, with CPU time in proportion to the time.

    The parts are whole microseconds and add up to the reading."""
    for day, began, ended in split_by_day(reading.since, reading.at):
        yield UsageRecord(
            item=UsageKind.USE,
            source=f"reading {reading.pk}",
            day=day,
            began_at=began,
            ended_at=ended,
            memory_mib=reading.memory_mib,
            cpu_micros=prorate(reading.cpu_micros, reading.since, reading.at, began, ended),
            mib_micros=(ended - began) // MICROSECOND * reading.memory_mib,
            **_get_owner_fields(reading.sandbox, reading.holder),
        )


def _meter_runs(after: tuple[UUID, UUID] | None, until: datetime) -> tuple[tuple[UUID, UUID] | None, int]:
    """Add a batch of uncounted runs, ordered by sandbox, to the run counts of their days."""
    # The planner needs the first condition, which follows from the second, to start an index scan.
    further = Q(sandbox__gte=after[0]) & (Q(sandbox__gt=after[0]) | Q(pk__gt=after[1])) if after else Q()
    batch = Run.objects.filter(further, metered=False).order_by("sandbox", "pk")[:CALL_BATCH_SIZE]
    runs = [*batch.values_list("pk", "sandbox", "holder", "started_at")]
    if not runs:
        return None, 0
    began: dict[tuple[UUID, UUID | None, date], list[datetime]] = defaultdict(list)
    for _, sandbox, holder, started_at in runs:
        began[sandbox, holder, to_utc_date(started_at)].append(started_at)
    sandboxes = Sandbox.objects.filter(pk__in={pk for pk, *_ in began}).only(*SANDBOX_COLUMNS)
    sandboxes_by_id = {sandbox.pk: sandbox for sandbox in sandboxes}
    records = [_build_runs_record(sandboxes_by_id[pk], holder, day, moments) for (pk, holder, day), moments in began.items()]
    candidates = UsageRecord.objects.filter(item=UsageKind.RUNS, source__in={each.source for each in records})
    existing = {(each.source, each.day): each for each in candidates.filter(day__in={each.day for each in records})}
    for each in records:
        if before := existing.get((each.source, each.day)):
            each.calls += before.calls
            each.began_at, each.ended_at = min(each.began_at, before.began_at), max(each.ended_at, before.ended_at)
    outdated = [existing[each.source, each.day].pk for each in records if (each.source, each.day) in existing]
    UsageRecord.objects.filter(pk__in=outdated).delete()
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    Run.objects.filter(pk__in=[pk for pk, *_ in runs]).update(metered=True)
    return (runs[-1][1], runs[-1][0]), len(records)


def _build_runs_record(sandbox: Sandbox, holder: UUID | None, day: date, began: Sequence[datetime]) -> UsageRecord:
    return UsageRecord(
        item=UsageKind.RUNS,
        source=f"runs in {sandbox.pk} for {holder or 'no lease'}",
        day=day,
        began_at=min(began),
        ended_at=max(began),
        calls=len(began),
        memory_mib=sandbox.memory_mib,
        millicpus=sandbox.millicpus,
        **_get_owner_fields(sandbox, holder),
    )


@dataclass(frozen=True)
class StoredObject:
    """An object that occupies storage. `ended_at` is None while the object exists."""

    source: str
    size_bytes: int
    began_at: datetime
    ended_at: datetime | None
    owner: Mapping[str, Any]  # columns of its usage records


def _meter_snapshots(after: UUID | None, until: datetime) -> tuple[UUID | None, int]:
    """Write the storage records of a batch of snapshots that are not completely metered.

    Stored objects count from their own snapshot until the last snapshot that references them is forgotten. Other snapshots
    of the same objects (restored, forked, or named while the sandbox was cold) count nothing. Objects that still exist are
    metered once an hour: a pass within the hour reads only new snapshots and those whose objects have been removed."""
    hour = start_of_hour(until)
    due = Q(metered_until__isnull=True) | Q(metered_until__lt=hour) | Q(forgotten_at__isnull=False) & ~is_referenced()
    unmetered = Snapshot.objects.filter(due, metered=False, **({"pk__gt": after} if after else {}))
    same = Snapshot.objects.filter(key=OuterRef("key")).order_by("-forgotten_at")
    last = Subquery(same.values("forgotten_at")[:1])
    unmetered = unmetered.annotate(referenced=is_referenced(), last=last).select_related("sandbox")
    snapshots = [*unmetered.order_by("pk")[:SANDBOX_BATCH_SIZE]]
    if not snapshots:
        return None, 0
    ends = {each.pk: each.at if not each.own else None if each.referenced else each.last for each in snapshots}
    written = _write_storage_records(
        [
            StoredObject(
                f"snapshot {each.pk}", each.size_bytes, each.at, ends[each.pk],
                {"sandbox": each.sandbox, "holder": each.holder, "agent_did": each.sandbox.agent_did,
                 "environment_id": each.sandbox.environment_id, "provider": each.sandbox.provider},
            )
            for each in snapshots
        ],
        until,
    )  # fmt: skip
    finished = [pk for pk, end in ends.items() if end]  # by the values read above: a snapshot may be forgotten meanwhile
    Snapshot.objects.filter(pk__in=finished).update(metered=True)
    Snapshot.objects.filter(pk__in=[pk for pk, end in ends.items() if not end]).update(metered_until=hour)
    return snapshots[-1].pk, written


def is_referenced() -> Exists:
    """Build a condition: the snapshot, or another that references the same objects, is not forgotten."""
    return Exists(Snapshot.objects.filter(key=OuterRef("key"), forgotten_at__isnull=True))


def _meter_agent_data(after: int | None, until: datetime) -> tuple[int | None, int]:
    """Write the storage records of a batch of sizes of agents' data that are not completely metered.

    Each size lasts until the agent's next one. The last size of each agent is metered once an hour."""
    hour = start_of_hour(until)
    following = DataSize.objects.filter(agent_did=OuterRef("agent_did"), pk__gt=OuterRef("pk")).order_by("pk")
    unmetered = DataSize.objects.filter(metered=False, **({"pk__gt": after} if after else {}))
    unmetered = unmetered.annotate(until=Subquery(following.values("at")[:1]))
    due = Q(metered_until__isnull=True) | Q(metered_until__lt=hour) | Q(until__isnull=False)
    sizes = [*unmetered.filter(due).order_by("pk")[:SANDBOX_BATCH_SIZE]]
    if not sizes:
        return None, 0
    stored = [
        StoredObject(
            f"data {each.pk}", each.size_bytes, each.at, each.until, {"agent_did": each.agent_did, "provider": STORE_PROVIDER}
        )
        for each in sizes
    ]
    written = _write_storage_records(stored, until)
    DataSize.objects.filter(pk__in=[each.pk for each in sizes if each.until]).update(metered=True)
    DataSize.objects.filter(pk__in=[each.pk for each in sizes if not each.until]).update(metered_until=hour)
    return sizes[-1].pk, written


def _write_storage_records(stored: Sequence[StoredObject], until: datetime) -> int:
    """Write the storage records of these objects. Return the number of records written.

    Records of objects that still exist extend to the last full hour, so they are rewritten once an hour."""
    until = start_of_hour(until)
    existing = UsageRecord.objects.filter(item=UsageKind.STORAGE, source__in=[each.source for each in stored]).order_by()
    last = existing.values_list("source").annotate(last=Max("day"), end=Max("ended_at"))  # storage has a record for each day
    latest = {source: (day, end) for source, day, end in last}
    records: list[UsageRecord] = []
    outdated = Q(pk__in=[])
    for each in stored:
        day, end = latest.get(each.source, (None, None))
        since = start_of_day(day) if day and each.ended_at is None else None  # earlier days are complete
        if since and end == until:
            continue
        outdated |= Q(source=each.source, day__gte=since.date()) if since else Q(source=each.source)
        began = max(each.began_at, since) if since else each.began_at
        records += [
            UsageRecord(
                item=UsageKind.STORAGE, source=each.source, day=day, began_at=start, ended_at=end, size_bytes=each.size_bytes,
                **each.owner,
            )
            for day, start, end in split_by_day(began, each.ended_at or until)
            if each.size_bytes
        ]  # fmt: skip
    UsageRecord.objects.filter(outdated, item=UsageKind.STORAGE).delete()
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    return len(records)


def _meter_llm_calls(after: int | None, until: datetime) -> tuple[int | None, int]:
    """Recompute the token records of a batch of ended calls that are uncounted, or changed since.

    Each record is the sum of all calls of one lease to one model on one day. A record of more calls than exist stays as it is:
    the others have expired."""
    uncounted = LlmCall.objects.select_for_update(no_key=True).filter(counted=False, ended_at__isnull=False)
    calls = [*uncounted.filter(**({"pk__gt": after} if after else {})).order_by("pk")[:CALL_BATCH_SIZE]]
    if not calls:
        return None, 0
    groups = {(each.holder, each.model, to_utc_date(each.started_at)) for each in calls if is_billable_call(each)}
    records = []
    for holder, model, day in groups:
        previous = UsageRecord.objects.filter(item=UsageKind.TOKENS, holder=holder, model=model, day=day)
        record = build_tokens_record(holder, model, day)
        if not previous.filter(calls__gt=record.calls).exists():
            previous.delete()
            records.append(record)
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    LlmCall.objects.filter(pk__in=[each.pk for each in calls]).update(
        counted=True, metered_cost=F("cost"), metered_tokens=TOKENS.build_owed()
    )
    return calls[-1].pk, len(records)
