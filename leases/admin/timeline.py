"""What happened to one lease: its events, its sandbox's transitions, its turns and runs, and what was worth telling of
its stored state, as one list."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from django.db.models import QuerySet
from django.urls import reverse

from leases.models import Lease, LeaseEvent, Turn
from sandboxes.admin.formatting import format_command, format_duration, format_path, render_badge, truncate_text
from sandboxes.admin.sandboxes import RUN_TRANSITIONS_FILTER, format_run_duration, render_run_outcome
from sandboxes.admin.state import render_data_event
from sandboxes.models import DataEvent, Run, Transition

SOURCE_LABELS = {"lease": "Lease", "sandbox": "Sandbox", "turn": "Turns", "run": "Runs", "state": "State"}
PAGE_SIZE = 60


@dataclass(frozen=True)
class TimelineEntry:
    """One line: when, what (and where to look), how it went, who and why."""

    at: datetime
    source: str
    what: str
    href: str = ""
    state: Any = ""
    detail: str = ""
    who: str = ""
    took: str = ""


def load_timeline(
    lease: Lease, *, before: datetime | None = None, only: str = ""
) -> tuple[list[TimelineEntry], datetime | None]:
    """The newest entries before a moment, newest first, and the moment to ask for the ones before them.

    Five queries however long the lease lived: each source gives its newest by its own index, and they are merged."""
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
        return _blank_repeated_commands(merged), None
    rest = merged.pop().at
    # Entries of one instant stay on one page: the next one begins strictly before a moment.
    page = [entry for entry in merged if entry.at > rest] or merged
    return _blank_repeated_commands(page), page[-1].at


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
        yield TimelineEntry(event.at, "lease", event.kind.replace("_", " ").capitalize(), detail=event.reason, who=event.actor)


def _iter_transition_entries(transitions: Iterable[Transition]) -> Iterator[TimelineEntry]:
    for row in transitions:
        href = reverse("admin:sandboxes_sandbox_change", args=[row.sandbox_id])
        yield TimelineEntry(row.at, "sandbox", "Sandbox", href, render_badge(row.to), row.reason, row.actor)


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
            took=length,
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
            took=format_run_duration(run),
        )


def _iter_data_event_entries(events: Iterable[DataEvent]) -> Iterator[TimelineEntry]:
    for row in events:
        href = reverse("admin:sandboxes_dataevent_change", args=[row.pk])
        said = ": ".join(filter(None, [format_path(row.path), format_path(row.detail)]))
        yield TimelineEntry(row.at, "state", "State", href, render_data_event(row), truncate_text(said, 300))


def render_turn_status(turn: Turn) -> Any:
    if turn.ended_at is None:
        return render_badge("open", "playing")
    return render_badge("skipped") if turn.skipped else render_badge("ok", "played")


def _blank_repeated_commands(entries: list[TimelineEntry]) -> list[TimelineEntry]:
    """Forty runs of one command name it once, at the first of them."""
    said, kept = "", []
    for entry in reversed(entries):
        if entry.source == "run":
            kept.append(replace(entry, detail="" if entry.detail == said else entry.detail))
            said = entry.detail
        else:
            kept.append(entry)
    return kept[::-1]
