"""Virtual time, and a store whose transfers take hours of virtual time while other workers go on."""

import io
from collections.abc import Callable, Iterator
from contextvars import Context
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from leases import sweeps as lease_sweeps
from sandboxes import claims
from sandboxes.db import clock
from sandboxes.storage.memory import MemoryStore
from sandboxes.sweep_log import SweepResult
from sandboxes.sweeps import passes as sweeps
from tests.conftest import NOW

PIECE_BYTES = 512  # a tar has at least 20 pieces
PACE = timedelta(minutes=3)  # for one piece; shorter than a claim without progress


class VirtualTime:
    """Clock of all verbs, which advances only by `advance`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.elapsed, self._sweeping = timedelta(0), False
        monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: self.elapsed.total_seconds()))

    @property
    def now(self) -> datetime:
        return NOW + self.elapsed

    def advance(self, by: timedelta = PACE) -> None:
        """Let time pass. Then the heartbeat of this process beats, and another worker runs its sweeps. Neither takes time."""
        if self._sweeping:
            return
        claims.HEARTBEAT.beat()
        self.elapsed += by
        claims.HEARTBEAT.beat()
        Context().run(self.sweep)  # another worker does not hold the claims of this process

    def sweep(self) -> list[SweepResult]:
        """Run the sweeps that take over overdue work."""
        passes: list[Callable[..., SweepResult]] = [
            lease_sweeps.expire_due_leases, lease_sweeps.recover_stalled, sweeps.destroy_due, sweeps.evict_idle,
        ]  # fmt: skip
        self._sweeping = True
        try:
            return [sweep(now=self.now) for sweep in passes]
        finally:
            self._sweeping = False


class SlowStore(MemoryStore):
    """Memory store that calls `pace` before each piece of a transfer."""

    pace: Callable[[], object] = staticmethod(lambda: None)

    def upload(self, key: str, source: BinaryIO) -> None:
        super().upload(key, io.BytesIO(b"".join(self._read_slowly(source))))

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        content = io.BytesIO()
        exists = super().download(key, content, start=start, length=length)
        content.seek(0)
        for piece in self._read_slowly(content):
            target.write(piece)
        return exists

    def _read_slowly(self, source: BinaryIO) -> Iterator[bytes]:
        self.pace()
        while piece := source.read(PIECE_BYTES):
            yield piece
            self.pace()
