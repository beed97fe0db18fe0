"""Timeline of one lease: its events, turns and runs, transitions of its sandbox and data events."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any

from django.db.models import QuerySet
from django.urls import reverse

from leases.models import Lease, LeaseEvent, Turn
from sandboxes.admin.base.formatting import format_command, format_duration, render_badge, truncate_text
from sandboxes.admin.data_events import render_data_event
from sandboxes.admin.runs import format_run_duration, render_run_outcome
from sandboxes.admin.sandboxes import RUN_TRANSITIONS_FILTER, format_transition_reason
from sandboxes.formatting import format_path
from sandboxes.models import DataEvent, Run, Transition

SOURCE_LABELS = {"lease": "Lease", "sandbox": "Sandbox", "turn": "Turns", "run": "Runs", "state": "Data"}
PAGE_SIZE = 60


@dataclass(frozen=True)
class TimelineEntry:
    """Entry of the timeline. `source` is a key of SOURCE_LABELS."""

    at: datetime
    source: str
    title: str
    href: str = ""
    state: Any = ""
    detail: str = ""
    actor: str = ""
    duration: str = ""


def load_timeline(
    lease: Lease, *, before: datetime | None = None, only: str = ""
) -> tuple[list[TimelineEntry], datetime | None]:
    """Load the newest entries before a moment, newest first, and the moment to pass as `before` for the next page.

    `only` restricts the timeline to one source. Five queries, regardless of the lease's age: the newest rows
    of each source are read by its own index and merged."""
    sources = {
        "lease": _iter_event_entries(_select_newest(LeaseEvent.objects.filter(lease=lease), "at", before)),
        "sandbox": _iter_transition_entries(
            _select_newest(Transition.objects.filter(holder=lease.pk).exclude(RUN_TRANSITIONS_FILTER), "at", before)
        ),
        "turn": _iter_turn_entries(
            _select_newest(Turn.objects.filter(lease=lease).select_related("run"), "started_at", before)
        ),
        "run": _iter_run_entries(_select_newest(Run.objects.filter(holder=lease.pk, turn__isnull=True), "started_at", before)),
        "state": _iter_data_event_entries(_select_newest(DataEvent.objects.filter(holder=lease.pk), "at", before)),
    }
    chosen = [sources[only]] if only in sources else sources.values()
    merged = heapq.nlargest(PAGE_SIZE + 1, (entry for source in chosen for entry in source), key=attrgetter("at"))
    if len(merged) <= PAGE_SIZE:
        return merged, None
    first_of_next = merged.pop().at
    # The next page begins strictly before a moment, so entries of one instant must stay on one page.
    page = [entry for entry in merged if entry.at > first_of_next] or merged
    return page, page[-1].at


def _select_newest(rows: QuerySet[Any], column: str, before: datetime | None) -> QuerySet[Any]:
    if before:
        rows = rows.filter(**{f"{column}__lt": before})
    if rows.model is Run:
        rows = rows.defer("stdout", "stderr")
    elif rows.model is Turn:
        rows = rows.defer("run__stdout", "run__stderr")
    return rows.order_by(f"-{column}", "-pk")[: PAGE_SIZE + 1]


def _iter_event_entries(events: Iterable[LeaseEvent]) -> Iterator[TimelineEntry]:
    for event in events:
        yield TimelineEntry(
            event.at, "lease", event.kind.replace("_", " ").capitalize(), detail=event.reason, actor=event.actor
        )


def _iter_transition_entries(transitions: Iterable[Transition]) -> Iterator[TimelineEntry]:
    for row in transitions:
        href = reverse("admin:sandboxes_sandbox_change", args=[row.sandbox_id])
        yield TimelineEntry(row.at, "sandbox", "Sandbox", href, render_badge(row.to), format_transition_reason(row), row.actor)


def _iter_turn_entries(turns: Iterable[Turn]) -> Iterator[TimelineEntry]:
    for turn in turns:
        href = reverse("admin:leases_turn_change", args=[turn.pk])
        length = format_duration(turn.ended_at - turn.started_at) if turn.ended_at else ""
        yield TimelineEntry(
            turn.started_at,
            "turn",
            f"Turn {turn.number}",
            href,
            render_turn_status(turn),
            truncate_text(turn.answer, 160),
            duration=length,
        )


def _iter_run_entries(runs: Iterable[Run]) -> Iterator[TimelineEntry]:
    for run in runs:
        href = reverse("admin:sandboxes_run_change", args=[run.pk])
        yield TimelineEntry(
            run.started_at,
            "run",
            "Run",
            href,
            render_run_outcome(run),
            truncate_text(format_command(run.argv), 160),
            duration=format_run_duration(run),
        )


def _iter_data_event_entries(events: Iterable[DataEvent]) -> Iterator[TimelineEntry]:
    for row in events:
        href = reverse("admin:sandboxes_dataevent_change", args=[row.pk])
        detail = ": ".join(filter(None, [format_path(row.path), format_path(row.detail)]))
        yield TimelineEntry(row.at, "state", "Data", href, render_data_event(row), truncate_text(detail, 300))


def render_turn_status(turn: Turn) -> Any:
    if turn.ended_at is None:
        return render_badge("open", "in progress")
    return render_badge("skipped") if turn.skipped else render_badge("ok", "played")
