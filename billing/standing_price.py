"""Price per hour of a sandbox as it is, by the current rates. Monthly allowances of accounts are not applied."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from billing import pricing
from billing.instance_types import SandboxSize
from billing.models import Rate
from sandboxes.inventory.entries import Entry
from sandboxes.models import ALIVE_STATES, SandboxState

PRICED_STATES = ("running", "suspended")  # of processes; the rates have no price of a stopped sandbox


@dataclass(frozen=True)
class StandingPrice:
    """USD per hour. `is_maximum`: an item is charged by measured use, which may be less than the allocated resources."""

    usd: Decimal
    is_maximum: bool = False


def find_standing_price(rates: Iterable[Rate], size: SandboxSize, *, is_suspended: bool, now: datetime) -> StandingPrice | None:
    """Return the price of an hour of a sandbox of this size, or None if no rate of the provider applies.

    Placeholders of 0, for which an operator has to set a price, are not rates."""
    stated = [rate for rate in rates if not (rate.own and not rate.usd)]
    quantities = size.compute_quantities(pricing.MICROSECONDS_PER_HOUR, is_suspended=is_suspended)
    total, found = Fraction(0), list[Rate]()
    for item, base_units in quantities.items():
        if rate := pricing.find_rate(stated, size.provider, size.get_rate_type(item), item, now):
            found.append(rate)
            total += pricing.compute_cost(item, base_units, rate.usd)
    if not found:
        return None
    return StandingPrice(pricing.round_half_up(total), is_maximum=any(rate.by_use for rate in found))


def find_entry_price(entry: Entry, rates: Iterable[Rate], *, now: datetime) -> StandingPrice | None:
    """Return the price of an entry of the inventory; None without a rate, a known size or a process that runs or is suspended.

    A sandbox that is not metered, such as one without a row, has the price of its use at the engine."""
    is_alive = entry.row.state in ALIVE_STATES if entry.row and not entry.listed else entry.process_state in PRICED_STATES
    if entry.size is None or not is_alive:
        return None
    memory_mib, millicpus = entry.size
    is_suspended = entry.row.state == SandboxState.SUSPENDED if entry.row else entry.process_state == "suspended"
    row = entry.row
    requested = (row.disk_mib, row.gpus, row.gpu_type) if row else ()
    size = SandboxSize(entry.engine.provider, memory_mib, millicpus, *requested)
    return find_standing_price(rates, size, is_suspended=is_suspended, now=now)
