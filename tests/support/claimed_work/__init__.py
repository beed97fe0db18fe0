"""Work that claims rows, for tests of lost claims. It is arranged at NOW, and makes its claim at IDLE."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.db.models import Model

from leases.models import Lease
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.leases import write

IDLE = NOW + 10 * MINUTE


@dataclass(frozen=True)
class Work:
    """Work whose claim is made by `act`, which is called with `now`, and is stored in a column of a row.

    `is_done` tells whether the work took effect, once `act` was called again."""

    act: Callable[..., object]
    model: type[Model]
    column: str
    is_done: Callable[[], object] = lambda: True

    def is_claimed(self) -> bool:
        """Return whether any row is claimed for longer than until now."""
        return self.model._base_manager.filter(**{f"{self.column}__gt": IDLE + timedelta(seconds=5)}).exists()


@dataclass
class Context:
    """Leases and switches of a test."""

    grant: Callable[..., Lease]
    pool: Pool
    memory: MemoryProvider
    patch: pytest.MonkeyPatch

    def write(self) -> Lease:
        lease = self.grant(environment="e")
        write(lease)
        return lease

    def sleep(self) -> Lease:
        lease = self.write()
        passes.evict_idle(now=IDLE)
        return lease


def crash(*args: object) -> None:
    raise SimulatedCrash
