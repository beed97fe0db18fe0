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
from sandboxes.admin.formatting import badge, command, path, shortened, span
from sandboxes.admin.sandboxes import AROUND_RUNS, outcome, took
from sandboxes.admin.state import told
from sandboxes.models import DataEvent, Run, Transition

SOURCES = {"lease": "Lease", "sandbox": "Sandbox", "turn": "Turns", "run": "Runs", "state": "State"}
LENGTH = 60


@dataclass(frozen=True)
class Entry:
    """One line: when, what (and where to look), how it went, who and why."""

    at: datetime
    source: str
    what: str
    href: str = ""
    state: Any = ""
    detail: str = ""
    who: str = ""
    took: str = ""


def timeline(lease: Lease, *, before: datetime | None = None, only: str = "") -> tuple[list[Entry], datetime | None]:
    """The newest entries before a moment, newest first, and the moment to ask for the ones before them.

    Five queries however long the lease lived: each source gives its newest by its own index, and they are merged."""
    sources = {
        "lease": _events(_newest(LeaseEvent.objects.filter(lease=lease), "at", before)),
        "sandbox": _transitions(_newest(Transition.objects.filter(holder=lease.pk).exclude(AROUND_RUNS), "at", before)),
        "turn": _turns(_newest(Turn.objects.filter(lease=lease).select_related("run"), "started_at", before)),
        "run": _runs(_newest(Run.objects.filter(holder=lease.pk, turn__isnull=True), "started_at", before)),
        "state": _told(_newest(DataEvent.objects.filter(holder=lease.pk), "at", before)),
    }
    chosen = [sources[only]] if only in sources else sources.values()
    merged = heapq.nlargest(LENGTH + 1, (entry for source in chosen for entry in source), key=attrgetter("at"))
    if len(merged) <= LENGTH:
        return _without_repeats(merged), None
    rest = merged.pop().at
    # Entries of one instant stay on one page: the next one begins strictly before a moment.
    page = [entry for entry in merged if entry.at > rest] or merged
    return _without_repeats(page), page[-1].at


def _newest(rows: QuerySet[Any], column: str, before: datetime | None) -> QuerySet[Any]:
    if before:
        rows = rows.filter(**{f"{column}__lt": before})
    if rows.model is Run:
        rows = rows.defer("stdout", "stderr")
    elif rows.model is Turn:
        rows = rows.defer("run__stdout", "run__stderr")
    return rows.order_by(f"-{column}", "-pk")[: LENGTH + 1]


def _events(events: Iterable[LeaseEvent]) -> Iterator[Entry]:
    for event in events:
        yield Entry(event.at, "lease", event.kind.replace("_", " ").capitalize(), detail=event.reason, who=event.actor)


def _transitions(transitions: Iterable[Transition]) -> Iterator[Entry]:
    for row in transitions:
        href = reverse("admin:sandboxes_sandbox_change", args=[row.sandbox_id])
        yield Entry(row.at, "sandbox", "Sandbox", href, badge(row.to), row.reason, row.actor)


def _turns(turns: Iterable[Turn]) -> Iterator[Entry]:
    for turn in turns:
        href = reverse("admin:leases_turn_change", args=[turn.pk])
        length = span(turn.ended_at - turn.started_at) if turn.ended_at else ""
        yield Entry(
            turn.started_at, "turn", f"Turn {turn.number}", href, played(turn), shortened(turn.answer, 160), took=length
        )


def _runs(runs: Iterable[Run]) -> Iterator[Entry]:
    for run in runs:
        href = reverse("admin:sandboxes_run_change", args=[run.pk])
        yield Entry(run.started_at, "run", "Run", href, outcome(run), shortened(command(run.argv), 160), took=took(run))


def _told(events: Iterable[DataEvent]) -> Iterator[Entry]:
    for row in events:
        href = reverse("admin:sandboxes_dataevent_change", args=[row.pk])
        said = ": ".join(filter(None, [path(row.path), path(row.detail)]))
        yield Entry(row.at, "state", "State", href, told(row), shortened(said, 300))


def played(turn: Turn) -> Any:
    if turn.ended_at is None:
        return badge("open", "playing")
    return badge("skipped") if turn.skipped else badge("ok", "played")


def _without_repeats(entries: list[Entry]) -> list[Entry]:
    """Forty runs of one command name it once, at the first of them."""
    said, kept = "", []
    for entry in reversed(entries):
        if entry.source == "run":
            kept.append(replace(entry, detail="" if entry.detail == said else entry.detail))
            said = entry.detail
        else:
            kept.append(entry)
    return kept[::-1]
