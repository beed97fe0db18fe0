"""A pooler in transaction mode that the settings do not state."""

import time

from django.conf import settings

UNDECLARED = "A pooler in transaction mode is before the database, and LEASEHOLD_DATABASE_POOLER is session."
PROBE_SECONDS = 60.0  # maximum age of a reused answer


class PoolerProbe:
    """Answer of `is_undeclared`, reused for PROBE_SECONDS."""

    def __init__(self) -> None:
        self._answer, self._until = False, 0.0

    def is_undeclared(self) -> bool:
        if time.monotonic() >= self._until:
            self._answer, self._until = is_undeclared(), time.monotonic() + PROBE_SECONDS
        return self._answer


PROBE = PoolerProbe()


def is_undeclared() -> bool:
    """Return whether a pooler in transaction mode is found, and the settings state none."""
    if not settings.ON_POSTGRES or settings.DATABASE_POOLER != "session":
        return False
    from sandboxes.db.postgresql.pooler import is_pooled_by_transaction  # with SQLite the driver is not loaded

    return is_pooled_by_transaction()
