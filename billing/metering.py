"""How long things lasted, what was used and what was called, read off the facts: Transitions, Readings, Runs, Snapshots and
LlmCalls.

Usage records are what the facts amount to by day. Nobody pushes a charge: whatever was not derived yet will be, and all of
it can be derived again."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Count, Exists, F, Max, Min, OuterRef, Q, Subquery, Sum, Window
from django.db.models.functions import Lead

from billing.dates import EPOCH, start_of_day, to_utc_date
from billing.intervals import MICROSECOND, StateInterval, build_intervals, prorate, split_by_day
from billing.models import Meter, UsageKind, UsageRecord, Watermark
from billing.money_sums import nanos_to_decimal, sum_exact
from sandboxes.lifecycle import checkpoint
from sandboxes.models import DataSize, LlmCall, Reading, Run, Sandbox, SandboxState, Snapshot, Transition

STATES_WITHOUT_PROCESS = (SandboxState.COLD, SandboxState.DESTROYED)
SANDBOX_BATCH_SIZE, CALL_BATCH_SIZE, INSERT_BATCH_SIZE = (
    400,
    500,
    500,
)  # in one batch: SQLite takes so many values in a statement
BatchFunction = Callable[
    [Any, datetime], tuple[Any, int]
]  # after which key, up to when -> the last key or None, records written
SANDBOX_COLUMNS = ("id", "agent_did", "environment_id", "provider", "memory_mib", "millicpus", "measured")
WATERMARK_NAMES = ("time", "use", "runs", "snapshots", "data", "tokens")  # of watermarks
STORE_PROVIDER = "store"  # what stores agents' data, in the place of a provider


def get_alive_time(holder: UUID, *, now: datetime) -> timedelta:
    """How long this holder's sandboxes have had a process, all of them together, up to `now`.

    From the moment a start was asked for until the provider confirmed the end: what it may have charged for."""
    return get_alive_times([holder], now=now)[holder]


def get_alive_times(holders: Iterable[UUID], *, now: datetime) -> dict[UUID, timedelta]:
    """`alive` for many holders, in one query; zero for those that never had a sandbox."""
    total: dict[UUID, timedelta] = defaultdict(timedelta)
    since: dict[UUID, tuple[UUID, datetime]] = {}  # sandbox -> its holder, and when its present process began
    latest: dict[UUID, datetime] = {}
    rows = Transition.objects.filter(holder__in=list(holders)).order_by("pk").values_list("sandbox", "holder", "to", "at")
    for sandbox, holder, to, at in rows:
        if holder is None:
            continue
        at = latest[sandbox] = max(at, latest.get(sandbox, at))  # a clock may have jumped back, as in `intervals`
        if to not in STATES_WITHOUT_PROCESS:
            since.setdefault(sandbox, (holder, at))
        elif sandbox in since:
            owner, began = since.pop(sandbox)
            total[owner] += at - began
    for owner, began in since.values():
        total[owner] += max(now - began, timedelta(0))
    return total


# --- usage records ----------------------------------------------------------------------------------------------------


def meter_usage(*, now: datetime) -> Counter[str]:
    """Bring the usage records up to now: what was done, by what it was.

    It may stop at any step, run twice, or beside itself: each batch is one transaction, under the lock of its watermark,
    and writes what the facts say, whatever was there before."""
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
            counts[name] += written
            if after is None:
                break
    return +counts


def reset_usage() -> None:
    """Throw the usage records away. The next `meter` derives them all again."""
    with transaction.atomic(durable=True):
        for name in WATERMARK_NAMES:
            Watermark.hold(name, EPOCH)
        UsageRecord.objects.all().delete()
        Meter.objects.all().delete()
        Sandbox.objects.filter(metered=True).update(metered=False)
        Reading.objects.filter(metered=True).update(metered=False)
        Run.objects.filter(metered=True).update(metered=False)
        Snapshot.objects.filter(metered=True).update(metered=False)
        DataSize.objects.filter(metered=True).update(metered=False)
        LlmCall.objects.filter(counted=True).update(counted=False)


def _meter_time(after: UUID | None, until: datetime) -> tuple[UUID | None, int]:
    """Sandboxes whose time is not all in yet, some of them, after this id; the last id, None once there are no more."""
    some = Sandbox.objects.filter(metered=False, **({"pk__gt": after} if after else {})).order_by("pk")[:SANDBOX_BATCH_SIZE]
    boxes = {box.pk: box for box in some.only(*SANDBOX_COLUMNS)}
    if not boxes:
        return None, 0
    meters = {each.pk: each for each in Meter.objects.filter(pk__in=boxes)}
    unread = Q(sandbox__meter__isnull=True) | Q(pk__gte=F("sandbox__meter__transition"))
    found: dict[UUID, list[tuple[int, str, UUID | None, datetime]]] = {pk: [] for pk in boxes}
    rows = Transition.objects.filter(unread, sandbox__in=boxes).order_by("sandbox", "pk")
    for number, sandbox, to, holder, at in rows.values_list("pk", "sandbox", "to", "holder", "at"):
        known = meters.get(sandbox)
        found[sandbox].append((number, to, holder, known.began_at if known and known.transition == number else at))
    records: list[UsageRecord] = []
    cursors, over, outdated = [], [], Q(pk__in=[])
    for pk, read in found.items():
        if not read:
            continue  # its row is there, its first transition not yet
        life, known = [*build_intervals(read, until=until)], meters.get(pk)
        same = known is not None and known.transition == read[-1][0]
        since = start_of_day(to_utc_date(known.read_at)) if known and same else None  # days before are written
        if known:
            written = Q(source=_format_transition_source(known.transition))
            outdated |= written & Q(day__gte=since.date()) if since else written
        for each in life:
            records += _build_time_records(boxes[pk], each, since)
        end = life[-1] if life else None
        if end is None or not end.open:
            over.append(pk)
        elif not same or known is None or until > known.read_at:
            cursors.append(Meter(sandbox_id=pk, transition=end.transition, began_at=end.began_at, read_at=until))
    UsageRecord.objects.filter(outdated, item=UsageKind.TIME).delete()
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    Meter.objects.bulk_create(
        cursors, update_conflicts=True, unique_fields=["sandbox"], update_fields=["transition", "began_at", "read_at"]
    )
    Meter.objects.filter(pk__in=over).delete()
    Sandbox.objects.filter(pk__in=over).update(metered=True)
    return max(boxes), len(records)


def _build_time_records(box: Sandbox, each: StateInterval, since: datetime | None) -> Iterator[UsageRecord]:
    for day, began, ended in split_by_day(max(each.began_at, since) if since else each.began_at, each.ended_at):
        yield UsageRecord(
            item=UsageKind.TIME,
            source=_format_transition_source(each.transition),
            day=day,
            began_at=began,
            ended_at=ended,
            state=each.state,
            memory_mib=box.memory_mib,
            millicpus=box.millicpus,
            measured=box.measured,
            **_get_owner_fields(box, each.holder),
        )


def _get_owner_fields(box: Sandbox, holder: UUID | None) -> dict[str, Any]:
    """Whose usage it is of a sandbox: nobody's before somebody held it."""
    held = {"agent_did": box.agent_did, "environment_id": box.environment_id} if holder else {}
    return {"sandbox": box, "holder": holder, "provider": box.provider, **held}


def _format_transition_source(pk: int) -> str:
    return f"transition {pk}"


def _meter_resource_use(after: int | None, until: datetime) -> tuple[int | None, int]:
    """Readings that are in no usage record yet, some of them."""
    unmetered = Reading.objects.filter(metered=False, **({"pk__gt": after} if after else {}))
    some = [*unmetered.select_related("sandbox").order_by("pk")[:SANDBOX_BATCH_SIZE]]
    if not some:
        return None, 0
    records = [record for each in some for record in _build_use_records(each)]
    UsageRecord.objects.filter(item=UsageKind.USE, source__in=[f"reading {each.pk}" for each in some]).delete()
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    Reading.objects.filter(pk__in=[each.pk for each in some]).update(metered=True)
    return some[-1].pk, len(records)


def _build_use_records(each: Reading) -> Iterator[UsageRecord]:
    """A record for each day that it is about: of its CPU as large a part as of its time. The parts are whole microseconds,
    and together all of it."""
    for day, began, ended in split_by_day(each.since, each.at):
        yield UsageRecord(
            item=UsageKind.USE,
            source=f"reading {each.pk}",
            day=day,
            began_at=began,
            ended_at=ended,
            memory_mib=each.memory_mib,
            cpu_micros=prorate(each.cpu_micros, each.since, each.at, began, ended),
            mib_micros=(ended - began) // MICROSECOND * each.memory_mib,
            **_get_owner_fields(each.sandbox, each.holder),
        )


def _meter_runs(after: tuple[UUID, UUID] | None, until: datetime) -> tuple[tuple[UUID, UUID] | None, int]:
    """Runs that were not counted yet, sandbox by sandbox, are added to those of their days that were."""
    # The first of these conditions follows from the second, and is one that an index can begin at.
    further = Q(sandbox__gte=after[0]) & (Q(sandbox__gt=after[0]) | Q(pk__gt=after[1])) if after else Q()
    some = Run.objects.filter(further, metered=False).order_by("sandbox", "pk")[:CALL_BATCH_SIZE]
    runs = [*some.values_list("pk", "sandbox", "holder", "started_at")]
    if not runs:
        return None, 0
    began: dict[tuple[UUID, UUID | None, date], list[datetime]] = defaultdict(list)
    for _, sandbox, holder, started_at in runs:
        began[sandbox, holder, to_utc_date(started_at)].append(started_at)
    boxes = {box.pk: box for box in Sandbox.objects.filter(pk__in={sandbox for sandbox, *_ in began}).only(*SANDBOX_COLUMNS)}
    records = [_build_runs_record(boxes[sandbox], holder, day, moments) for (sandbox, holder, day), moments in began.items()]
    known = UsageRecord.objects.filter(item=UsageKind.RUNS, source__in={each.source for each in records})
    there = {(each.source, each.day): each for each in known.filter(day__in={each.day for each in records})}
    for each in records:
        if before := there.get((each.source, each.day)):
            each.calls += before.calls
            each.began_at, each.ended_at = min(each.began_at, before.began_at), max(each.ended_at, before.ended_at)
    outdated = [there[each.source, each.day].pk for each in records if (each.source, each.day) in there]
    UsageRecord.objects.filter(pk__in=outdated).delete()
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    Run.objects.filter(pk__in=[pk for pk, *_ in runs]).update(metered=True)
    return (runs[-1][1], runs[-1][0]), len(records)


def _build_runs_record(box: Sandbox, holder: UUID | None, day: date, began: Sequence[datetime]) -> UsageRecord:
    return UsageRecord(
        item=UsageKind.RUNS,
        source=f"runs in {box.pk} for {holder or 'nobody'}",
        day=day,
        began_at=min(began),
        ended_at=max(began),
        calls=len(began),
        memory_mib=box.memory_mib,
        millicpus=box.millicpus,
        **_get_owner_fields(box, holder),
    )


@dataclass(frozen=True)
class StoredObject:
    """Something that takes room. Without an end it does still."""

    source: str
    size_bytes: int
    began_at: datetime
    ended_at: datetime | None
    whose: Mapping[str, Any]  # fields of its usage records


def _meter_snapshots(after: UUID | None, until: datetime) -> tuple[UUID | None, int]:
    """Snapshots whose time is not all in yet. Objects take room until the last that points to them is forgotten, and are of
    the one that they were stored for; the others (restored, forked, named while it slept) take none."""
    unmetered = Snapshot.objects.filter(metered=False, **({"pk__gt": after} if after else {}))
    same = Snapshot.objects.filter(key=OuterRef("key")).order_by("-forgotten_at")
    last = Subquery(same.values("forgotten_at")[:1])
    some = [*unmetered.annotate(kept=is_referenced(), last=last).select_related("sandbox").order_by("pk")[:SANDBOX_BATCH_SIZE]]
    if not some:
        return None, 0
    ends = {each.pk: each.at if not each.own else None if each.kept else each.last for each in some}
    written = _write_storage_records(
        [
            StoredObject(
                f"snapshot {each.pk}", each.size_bytes, each.at, ends[each.pk],
                {"sandbox": each.sandbox, "holder": each.holder, "agent_did": each.sandbox.agent_did,
                 "environment_id": each.sandbox.environment_id, "provider": each.sandbox.provider},
            )
            for each in some
        ],
        until,
    )  # fmt: skip
    over = [pk for pk, end in ends.items() if end]  # as it was read: one may go meanwhile
    Snapshot.objects.filter(pk__in=over).update(metered=True)
    return some[-1].pk, written


def is_referenced() -> Exists:
    """Is a snapshot, or another that points to the same objects, not forgotten?"""
    return Exists(Snapshot.objects.filter(key=OuterRef("key"), forgotten_at__isnull=True))


def _meter_agent_data(after: int | None, until: datetime) -> tuple[int | None, int]:
    """Agents' data: each size it had, until the next."""
    unmetered = DataSize.objects.filter(metered=False, **({"pk__gt": after} if after else {}))
    following = Window(Lead("at"), partition_by="agent_did", order_by="pk")
    some = [*unmetered.annotate(until=following).order_by("pk")[:SANDBOX_BATCH_SIZE]]
    if not some:
        return None, 0
    stored = [
        StoredObject(
            f"data {each.pk}", each.size_bytes, each.at, each.until, {"agent_did": each.agent_did, "provider": STORE_PROVIDER}
        )
        for each in some
    ]
    written = _write_storage_records(stored, until)
    DataSize.objects.filter(pk__in=[each.pk for each in some if each.until]).update(metered=True)
    return some[-1].pk, written


def _write_storage_records(stored: Sequence[StoredObject], until: datetime) -> int:
    """Write the usage records of what takes room; how many. Of what does still, once an hour, up to its beginning."""
    until = until.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    there = UsageRecord.objects.filter(item=UsageKind.STORAGE, source__in=[each.source for each in stored]).order_by()
    last = there.values_list("source").annotate(last=Max("day"), end=Max("ended_at"))  # there is a record for each day
    latest = {source: (day, end) for source, day, end in last}
    records: list[UsageRecord] = []
    outdated = Q(pk__in=[])
    for each in stored:
        day, end = latest.get(each.source, (None, None))
        since = start_of_day(day) if day and each.ended_at is None else None  # days before are written
        if since and end == until:
            continue
        outdated |= Q(source=each.source, day__gte=since.date()) if since else Q(source=each.source)
        began = max(each.began_at, since) if since else each.began_at
        records += [
            UsageRecord(
                item=UsageKind.STORAGE, source=each.source, day=day, began_at=start, ended_at=end, size_bytes=each.size_bytes,
                **each.whose,
            )
            for day, start, end in split_by_day(began, each.ended_at or until)
            if each.size_bytes
        ]  # fmt: skip
    UsageRecord.objects.filter(outdated, item=UsageKind.STORAGE).delete()
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    return len(records)


def _meter_llm_calls(after: int | None, until: datetime) -> tuple[int | None, int]:
    """Calls that are over and were not counted, or were changed since. The day, model and lease of each are summed up anew."""
    some = LlmCall.objects.select_for_update(no_key=True).filter(counted=False, ended_at__isnull=False)
    calls = [*some.filter(**({"pk__gt": after} if after else {})).order_by("pk")[:CALL_BATCH_SIZE]]
    if not calls:
        return None, 0
    groups = {(each.holder, each.model, to_utc_date(each.started_at)) for each in calls if _is_billable_call(each)}
    records = [_build_tokens_record(*group) for group in groups]
    for each in records:
        UsageRecord.objects.filter(item=UsageKind.TOKENS, holder=each.holder, model=each.model, day=each.day).delete()
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    LlmCall.objects.filter(pk__in=[each.pk for each in calls]).update(counted=True)
    return calls[-1].pk, len(records)


def _is_billable_call(call: LlmCall) -> bool:
    return call.kind == LlmCall.Kind.LLM and call.outcome != LlmCall.Outcome.REFUSED


def _build_tokens_record(holder: UUID | None, model: str, day: date) -> UsageRecord:
    begin = start_of_day(day)
    its = LlmCall.objects.filter(
        holder=holder, model=model, kind=LlmCall.Kind.LLM, started_at__gte=begin, started_at__lt=begin + timedelta(days=1),
        ended_at__isnull=False,
    ).exclude(outcome=LlmCall.Outcome.REFUSED)  # fmt: skip
    found = its.aggregate(
        began=Min("started_at"), ended=Max("ended_at"), calls=Count("pk"), usd=sum_exact("cost"),
        unpriced=Count("pk", filter=Q(cost__isnull=True)), input=Sum("input_tokens"), cached=Sum("cached_tokens"),
        output=Sum("output_tokens"),
    )  # fmt: skip
    first = its.order_by("pk").select_related("sandbox").first()
    box = first.sandbox if first else None
    called = f"calls of {model}" if model else "calls without a model"  # a program may call one by whatever name
    return UsageRecord(
        item=UsageKind.TOKENS, source=f"{called} for {holder or 'nobody'}", day=day, began_at=found["began"],
        ended_at=max(found["began"], found["ended"]), sandbox=box, holder=holder,
        agent_did=first.agent_did if first else "", environment_id=first.environment_id if first else "",
        provider=box.provider if box else "", model=model, calls=found["calls"], unpriced=found["unpriced"],
        input_tokens=found["input"] or 0, cached_tokens=found["cached"] or 0, output_tokens=found["output"] or 0,
        usd=nanos_to_decimal(found["usd"]),
    )  # fmt: skip
