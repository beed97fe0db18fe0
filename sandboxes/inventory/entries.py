"""Join of the engines' listings with the rows of sandboxes."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from sandboxes.inventory.listings import EngineListing, ListingState, list_engines
from sandboxes.lifecycle import COLD, DESTROYED
from sandboxes.models import ALIVE_STATES, Pool, Sandbox
from sandboxes.models.names import parse_name
from sandboxes.providers.base import ProviderSandbox


class Finding(StrEnum):
    """Difference between an engine's listing and the rows. In the order of their importance to an operator."""

    UNKNOWN_OWNER = "unknown_owner"  # no pool has its owner label: another installation's, or of a pool that is gone
    NO_ROW = "no_row"  # its owner label is of a pool, and no row names it: reconcile destroys it after the grace period
    MISSING = "missing"  # its row is alive, and its engine does not list it
    UNCONFIRMED = "unconfirmed"  # its row is alive, and its engine does not respond or lists nothing at all
    STARTING = "starting"  # no row names it yet, and it is younger than the grace period
    NONE = "none"


WITHOUT_OWNER = (Finding.UNKNOWN_OWNER, Finding.NO_ROW)
FINDING_ORDER = {finding: number for number, finding in enumerate(Finding)}


@dataclass(frozen=True)
class Entry:
    """Sandbox that an engine lists, a row of this installation, or both."""

    engine: EngineListing
    name: str  # at the engine
    finding: Finding
    listed: ProviderSandbox | None
    row: Sandbox | None
    pool: Pool | None  # of the row, or with the owner label
    former: Sandbox | None = None  # row of another incarnation, or cold or destroyed, that the name states

    @property
    def created_at(self) -> datetime:
        """Time of creation at the engine; without a listing, of the current state of the row."""
        if self.listed:
            return self.listed.created_at
        assert self.row
        return self.row.state_since

    @property
    def sandbox_id(self) -> str:
        """`<agent did>::<environment>` of the row or of the former one; "" if there is none or no lease has held it."""
        row = self.row or self.former
        return row.sandbox_id if row and row.agent_did else ""

    @property
    def process_state(self) -> str:
        """State of its processes at the engine: running, suspended, stopped, or volumes; "" if the engine does not list it."""
        if self.listed is None:
            return ""
        if self.listed.is_remnant:
            return "volumes"
        return "suspended" if self.listed.suspended else "running" if self.listed.running else "stopped"

    @property
    def size(self) -> tuple[int, int] | None:
        """Memory in MiB and CPU in millicpus, of the row or as the engine states it; None if neither is known."""
        if self.row:
            return self.row.memory_mib, self.row.millicpus
        if self.listed and self.listed.memory_mib is not None and self.listed.millicpus is not None:
            return self.listed.memory_mib, self.listed.millicpus
        return None


@dataclass(frozen=True)
class Inventory:
    """Everything that exists at the engines, and all rows with a process. Entries with findings come first."""

    at: datetime
    engines: list[EngineListing]
    entries: list[Entry]
    cold: int  # rows without a process


def collect_inventory(*, now: datetime, grace: timedelta) -> Inventory:
    """List all engines and join their listings with the rows. The listings take most of the time.

    The rows are read after the listings: the row of a sandbox is inserted before the sandbox is created, so the row of each
    listed sandbox is visible. Only a row that was alive before the listings is expected in them."""
    expected = set(Sandbox.objects.filter(state__in=ALIVE_STATES, lost_at__isnull=True).values_list("pk", "incarnation"))
    engines = list_engines(now=now)
    rows = [*Sandbox.objects.exclude(state__in=(COLD, DESTROYED)).select_related("pool", "host")]
    rows_by_place = {(row.host_id, row.name): row for row in rows}
    pools = {str(pool.owner): pool for pool in Pool.objects.all()}
    entries, matched = list[Entry](), set[UUID]()
    for engine in engines:
        host_id = engine.host.pk if engine.host else None
        for listed in engine.sandboxes:
            row = rows_by_place.get((host_id, listed.name)) or rows_by_place.get((None, listed.name))
            if row:
                matched.add(row.pk)
            entries.append(_build_listed(engine, listed, row, pools, now - grace))
    engines_by_host = {engine.host.pk: engine for engine in engines if engine.host}
    for row in rows:
        if row.pk not in matched:
            place = engines_by_host.get(row.host_id) if row.host_id else None
            entries.append(_build_unlisted(row, place, (row.pk, row.incarnation) in expected))
    cold = Sandbox.objects.filter(state=COLD).count()
    ordered = sorted(_attach_former(entries), key=lambda each: (FINDING_ORDER[each.finding], each.created_at, each.name))
    return Inventory(now, engines, ordered, cold)


def _build_listed(
    engine: EngineListing, listed: ProviderSandbox, row: Sandbox | None, pools: dict[str, Pool], settled_before: datetime
) -> Entry:
    pool = row.pool if row else pools.get(listed.owner)
    finding = Finding.NONE
    if row is None and listed.created_at > settled_before:
        finding = Finding.STARTING
    elif row is None:
        finding = Finding.NO_ROW if pool else Finding.UNKNOWN_OWNER
    elif listed.is_remnant and row.state in ALIVE_STATES:
        finding = Finding.MISSING
    return Entry(engine, listed.name, finding, listed, row, pool)


def _build_unlisted(row: Sandbox, engine: EngineListing | None, is_expected: bool) -> Entry:
    """Build the entry of a row that no engine lists. A start, an eviction and a destroy are listed or not."""
    place = engine or EngineListing(row.provider, row.host, ListingState.OTHER_HOST)
    finding = Finding.NONE
    if is_expected and row.state in ALIVE_STATES:
        if place.sandboxes:
            finding = Finding.MISSING
        elif _should_answer(place):
            finding = Finding.UNCONFIRMED
    return Entry(place, row.name, finding, None, row, row.pool)


def _should_answer(engine: EngineListing) -> bool:
    """Return whether the absence of a listing is unusual. An empty listing proves nothing."""
    if engine.state == ListingState.OTHER_HOST:
        return engine.host_state != "live"
    return engine.state != ListingState.NOT_SUPPORTED


def _attach_former(entries: list[Entry]) -> Iterable[Entry]:
    """Add to entries without a row the row that their name states, by one query."""
    parts = {each.name: parsed.pk for each in entries if each.row is None and (parsed := parse_name(each.name))}
    former = Sandbox.objects.select_related("pool").in_bulk(set(parts.values())) if parts else {}
    for each in entries:
        found = former.get(parts[each.name]) if each.name in parts else None
        yield Entry(each.engine, each.name, each.finding, each.listed, each.row, each.pool, found) if found else each
