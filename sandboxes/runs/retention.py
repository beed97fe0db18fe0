"""Acknowledgement of recorded results, which lets their sandboxes drop them.

The Run's row has the beginning of the output only. A client that reads a stream and is behind, or comes back, finds the rest
with the agent for REPLAY_SECONDS. The output of a Run with a recorder stays until the recorder has acknowledged the result. If
a process dies before, the agent drops the result itself when it needs the room."""

import threading
import time
from collections import deque
from contextlib import suppress
from datetime import datetime, timedelta
from typing import NamedTuple

import structlog
from django.core.exceptions import ImproperlyConfigured

from sandboxes.background import OnDemandThread
from sandboxes.errors import SandboxError
from sandboxes.hosts import registry
from sandboxes.models import GONE_STATES, Run
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import ProviderError

log = structlog.get_logger(__name__)
REPLAY_SECONDS = 30.0
# Of one sandbox; the oldest is acknowledged early. The agent retains at most 256 results and 32 MiB, and drops output beyond.
MAX_RETAINED_RESULTS, MAX_RETAINED_BYTES = 16, 8 << 20


class RetainedResult(NamedTuple):
    """Result to acknowledge at `due` (monotonic seconds)."""

    due: float
    provider: Provider
    ref: str
    mark: str
    size: int  # bytes

    def acknowledge(self) -> None:
        with suppress(ProviderError):
            self.provider.acknowledge_exec(self.ref, self.mark)


class Acknowledger:
    """Queue of retained results, and the thread that acknowledges each one after REPLAY_SECONDS."""

    def __init__(self) -> None:
        self._results = deque[RetainedResult]()
        self._changed, self._flushing = threading.Condition(), False
        self._thread = OnDemandThread("acknowledgements", self._run)

    def put(self, result: RetainedResult) -> None:
        """Retain a result, and acknowledge older ones of the same sandbox above the limits."""
        with self._changed:
            self._results.append(result)
            excess = self._take_excess(result.ref)
            self._changed.notify()
            self._thread.start()
        for old in excess:
            old.acknowledge()

    def flush(self) -> None:
        """Acknowledge all results now, and further ones without delay."""
        with self._changed:
            self._flushing = True
            results, self._results = self._results, deque()
            self._changed.notify()
        for result in results:
            result.acknowledge()

    def _take_excess(self, ref: str) -> list[RetainedResult]:
        own = [result for result in self._results if result.ref == ref]
        size, excess = sum(result.size for result in own), list[RetainedResult]()
        while len(own) > MAX_RETAINED_RESULTS or size > MAX_RETAINED_BYTES:
            excess.append(own.pop(0))
            size -= excess[-1].size
            self._results.remove(excess[-1])
        return excess

    def _run(self) -> None:
        while result := self._take():
            try:
                result.acknowledge()
            except Exception:  # the sandbox drops it after its own limits
                log.exception("result not acknowledged", ref=result.ref)

    def _take(self) -> RetainedResult | None:
        """Wait for the oldest result to be due. None if there is no result left: the thread ends."""
        with self._changed:
            while self._results:
                pause = self._results[0].due - time.monotonic()
                if pause <= 0 or self._flushing:
                    return self._results.popleft()
                self._changed.wait(pause)
            self._thread.release()
            return None


ACKNOWLEDGER = Acknowledger()


def has_sandbox(run: Run) -> bool:
    """Return whether the sandbox of a Run still exists as it was when the command began."""
    return run.sandbox.state not in GONE_STATES and run.sandbox.incarnation == run.incarnation


def release(run: Run, *, now: datetime) -> None:
    """Let the sandbox drop the result of an ended Run whose recorder has recorded it. Idempotent.

    Clients that follow the stream of the Run have REPLAY_SECONDS from its end at least."""
    assert run.ended_at is not None
    if not has_sandbox(run):
        return
    with suppress(ProviderError, SandboxError, ImproperlyConfigured):
        provider = registry.get_sandbox_provider(run.sandbox)
        if now - run.ended_at < timedelta(seconds=REPLAY_SECONDS):
            acknowledge_later(provider, run.sandbox.ref, str(run.pk), size=run.stdout_bytes + run.stderr_bytes)
        else:
            provider.acknowledge_exec(run.sandbox.ref, str(run.pk))


def acknowledge_later(provider: Provider, ref: str, mark: str, *, size: int) -> None:
    """Let the sandbox drop a recorded result of `size` bytes after REPLAY_SECONDS."""
    ACKNOWLEDGER.put(RetainedResult(time.monotonic() + REPLAY_SECONDS, provider, ref, mark, size))
