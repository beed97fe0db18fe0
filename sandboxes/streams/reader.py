"""Output of one Run from a position, as long as its command runs, until the result is recorded.

A position is a pair of byte offsets of stdout and stderr, so any process can continue from any position. The bytes come from
the sandbox, which retains them for a while after the end (runs.retention), or else from the stored beginning
(state.run_outputs)."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError

from sandboxes.db import database_time
from sandboxes.errors import SandboxError
from sandboxes.hosts import registry
from sandboxes.models import Run
from sandboxes.providers.command_results import OutputReader
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.runs.retention import REPLAY_SECONDS, has_sandbox
from sandboxes.state.run_outputs import RunOutput, get_stored_sizes, load_output
from sandboxes.storage.base import StoreError
from sandboxes.streams import rows
from sandboxes.streams.registry import StreamSlot

log = structlog.get_logger(__name__)
KEEP_ALIVE_SECONDS = 15.0  # without output; a client that has gone is noticed then
# Between two looks at a sandbox that does not answer, or at a row. A command that starts is known to its sandbox within
# milliseconds: the row is read only after some looks.
MIN_PAUSE_SECONDS, ROW_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.001, 0.02, 1.0
REFRESH_SECONDS = 60.0  # between two looks at the row of a silent command: a sweep may have closed its Run
STREAMS = ("stdout", "stderr")
REPLAY_PERIOD = timedelta(seconds=2 * REPLAY_SECONDS)  # after the end of a Run, in which its sandbox is asked for the output
MAX_INTERRUPTIONS = 3  # of the output of an ended command, until a recorder gives up for now
LIVE_KINDS = ("exec", "turn")  # kinds of Runs whose output the sandbox retains from its first byte


class Position(NamedTuple):
    """Byte offsets of the output that a reader has received."""

    stdout: int = 0
    stderr: int = 0

    def advance(self, stream: str, count: int) -> "Position":
        return self._replace(**{stream: getattr(self, stream) + count})


@dataclass(frozen=True)
class Output:
    """Next bytes of a stream. `position` is the one after them."""

    stream: str
    content: bytes
    position: Position


@dataclass(frozen=True)
class Gap:
    """Bytes of a stream that are not available any more."""

    stream: str
    lost_bytes: int
    position: Position


@dataclass(frozen=True)
class KeepAlive:
    """No output for KEEP_ALIVE_SECONDS."""


@dataclass(frozen=True)
class Ended:
    """End of the Run, as recorded in its row."""

    run: Run
    position: Position


StreamItem = Output | Gap | KeepAlive | Ended


class OutputUnreachable(Exception):
    """The sandbox, or the object store, has output that cannot be read now."""


class RunReader:
    """Iterator over the output of a Run. The last item is Ended, unless the stream had to end before (`slot`), or the output is
    in the object store, which cannot be read now.

    With `whole_characters`, a character in UTF-8 is not divided between two items of a stream. A recorder (`is_recorder`) gets
    the output of an ended command as long as the sandbox retains it, and OutputUnreachable in place of a Gap if the sandbox
    does not answer."""

    def __init__(
        self, run: Run, position: Position, slot: StreamSlot, *, whole_characters: bool = False, is_recorder: bool = False
    ) -> None:
        self._run, self.position, self._slot = run, position, slot
        self._whole_characters, self._is_recorder, self._interruptions = whole_characters, is_recorder, 0
        self._incomplete = dict.fromkeys(STREAMS, b"")  # received bytes after `position`: the beginning of a character
        self._source: OutputReader | None = None
        self._pause_seconds, self._sent_at, self._refreshed_at = MIN_PAUSE_SECONDS, time.monotonic(), time.monotonic()

    def read(self) -> Iterator[StreamItem]:
        """Yield items until the end. Close the iterator or call `close` afterwards."""
        while not self._slot.must_end:
            is_retained = self._may_be_retained() and self._open_source()
            if is_retained:
                yield from self._read_source()
            if self._run.ended_at and self._is_recorder and self._is_retained():
                yield from self._wait()
                continue
            if self._run.ended_at:
                if (stored := self._load_stored()) is None:
                    return
                yield from self._read_stored(stored, is_last=True)
                yield Ended(self._run, self.position)
                return
            if self._pause_seconds >= ROW_PAUSE_SECONDS or not is_retained:
                self._refresh()
                if not self._run.ended_at and self._is_behind(self._run):
                    yield from self._read_stored(load_output(self._run), is_last=False)
            if not self._run.ended_at:
                yield from self._wait()

    def close(self) -> None:
        """Release the connection to the sandbox. Idempotent."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _may_be_retained(self) -> bool:
        run = self._run
        if run.kind not in LIVE_KINDS or not has_sandbox(run):
            return False
        if run.ended_at is None:
            return True
        return not self._is_stored() and (self._is_recorder or database_time.now_without_query() - run.ended_at < REPLAY_PERIOD)

    def _is_stored(self) -> bool:
        """Return whether all output of the ended Run after the position is stored."""
        run = self._run
        return not self._is_behind(run) or get_stored_sizes(run) == (run.stdout_bytes, run.stderr_bytes)

    def _is_retained(self) -> bool:
        """Return whether the sandbox has output of the ended Run that was not read. Raise OutputUnreachable."""
        if not self._may_be_retained():
            return False
        self._interruptions += 1
        sandbox = self._run.sandbox
        try:
            is_retained = registry.get_sandbox_provider(sandbox).find_exec(sandbox.ref, str(self._run.pk)) is not None
        except Missing:
            return False
        except (ProviderError, SandboxError, ImproperlyConfigured) as error:
            raise OutputUnreachable(str(error)) from error
        if is_retained and self._interruptions > MAX_INTERRUPTIONS:
            raise OutputUnreachable("The output was interrupted repeatedly.")
        return is_retained

    def _is_behind(self, run: Run) -> bool:
        return run.stdout_bytes > self.position.stdout or run.stderr_bytes > self.position.stderr

    def _open_source(self) -> bool:
        """Open the output in the sandbox. Return False if that is not possible now."""
        self.close()
        self._incomplete = dict.fromkeys(STREAMS, b"")
        with suppress(ProviderError, SandboxError, ImproperlyConfigured):
            provider = registry.get_sandbox_provider(self._run.sandbox)
            position = self.position
            self._source = provider.open_output(
                self._run.sandbox.ref, str(self._run.pk), stdout=position.stdout, stderr=position.stderr
            )
        self._slot.reader = self._source
        return self._source is not None

    def _read_source(self) -> Iterator[StreamItem]:
        """Yield the output in the sandbox up to its end, or until the sandbox does not answer."""
        while self._source is not None and not self._slot.must_end:
            part = self._source.read(wait=KEEP_ALIVE_SECONDS)
            if part is None:
                break
            self._pause_seconds = MIN_PAUSE_SECONDS
            if part.content:
                yield from self._take(part.stream, part.content)
            if part.ended:
                yield from self._flush()
                yield from self._await_record()
                break
            if not part.content:
                yield from self._keep_alive()
                if time.monotonic() - self._refreshed_at > REFRESH_SECONDS:
                    self._refresh()
                if self._run.ended_at:
                    break
        self.close()

    def _await_record(self) -> Iterator[StreamItem]:
        """Wait until the Run of a command that has ended is closed."""
        while not self._run.ended_at and not self._slot.must_end:
            self._refresh()
            if not self._run.ended_at:
                yield from self._wait()

    def _take(self, stream: str, content: bytes) -> Iterator[StreamItem]:
        content = self._incomplete[stream] + content
        size = _count_whole(content) if self._whole_characters else len(content)
        self._incomplete[stream] = content[size:]
        if size:
            yield self._advance(stream, content[:size])

    def _flush(self) -> Iterator[StreamItem]:
        for stream in STREAMS:
            if content := self._incomplete[stream]:
                self._incomplete[stream] = b""
                yield self._advance(stream, content)

    def _advance(self, stream: str, content: bytes) -> Output:
        self.position, self._sent_at = self.position.advance(stream, len(content)), time.monotonic()
        return Output(stream, content, self.position)

    def _load_stored(self) -> RunOutput | None:
        """Return the stored output of the ended Run, nothing of it if the position is the end.

        If the object store cannot be read now, return None, or raise OutputUnreachable to a recorder."""
        if not self._is_behind(self._run):
            return RunOutput(b"", b"")
        try:
            return load_output(self._run)
        except StoreError as error:
            if self._is_recorder:
                raise OutputUnreachable(str(error)) from error
            log.warning("stream interrupted", run=str(self._run.pk), error=str(error))
            return None

    def _read_stored(self, stored: RunOutput, *, is_last: bool) -> Iterator[StreamItem]:
        """Yield stored output after the position. If it `is_last`, also the gap between the stored and the received bytes."""
        self._incomplete = dict.fromkeys(STREAMS, b"")
        for stream in STREAMS:
            total, offset = getattr(self._run, f"{stream}_bytes"), getattr(self.position, stream)
            if total <= offset:
                continue
            content = getattr(stored, stream)[offset:]
            yield from self._take(stream, content)
            if is_last:
                yield from self._flush()
                if lost := total - getattr(self.position, stream):
                    self.position = self.position.advance(stream, lost)
                    yield Gap(stream, lost, self.position)

    def _refresh(self) -> None:
        """Read the row again; with its output only if that is needed. A database that does not respond is asked again later."""
        self._refreshed_at = time.monotonic()
        with suppress(DatabaseError):
            run = rows.fetch_run(self._run.pk, with_output=False)
            if self._is_behind(run):
                run = rows.fetch_run(self._run.pk, with_output=True)
            self._run = run

    def _wait(self) -> Iterator[StreamItem]:
        self._slot.pause(self._pause_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
        if time.monotonic() - self._sent_at >= KEEP_ALIVE_SECONDS:
            yield from self._keep_alive()

    def _keep_alive(self) -> Iterator[StreamItem]:
        self._sent_at = time.monotonic()
        yield KeepAlive()


def _count_whole(content: bytes) -> int:
    """Return the number of bytes before a character that is incomplete at the end of the content."""
    for size in range(1, min(4, len(content) + 1)):
        byte = content[-size]
        if byte >= 0xC0:  # first byte of a character of 2, 3 or 4 bytes
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(content) - size if size < length else len(content)
        if byte < 0x80:
            break
    return len(content)
