"""Total time of file operations in a sandbox: bounded for a guest that drips, without a bound for a long transfer."""

import io
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import BinaryIO

import pytest

from sandboxes.providers.base import DATA, GET_FILES_TIMEOUT, WORKSPACE
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import FailureCause, SandboxUnreadable
from sandboxes.providers.file_verbs import VERB_TIMEOUT, FileVerbsProvider

MIB = 1 << 20
PAUSE_SECONDS = 59.0  # shorter than the idle timeout
FILE = f"{WORKSPACE}/f"
VERBS: dict[str, Callable[[FileVerbsProvider], object]] = {
    "read_file": lambda p: p.read_file("box", FILE, limit=MIB),
    "read_range": lambda p: p.read_range("box", FILE, start=0, length=MIB),
    "write_file": lambda p: p.write_file("box", FILE, b"x"),
    "remove_file": lambda p: p.remove_file("box", FILE),
    "make_directory": lambda p: p.make_directory("box", FILE),
    "move_file": lambda p: p.move_file("box", FILE, f"{FILE}2", overwrite=False),
    "manifest": lambda p: p.manifest("box", DATA),
    "get_files": lambda p: [*p.get_files("box", DATA)],
    "put_files": lambda p: p.put_files("box", DATA, Zeros(MIB)),
    "put_and_list_files": lambda p: p.put_and_list_files("box", DATA, Zeros(MIB)),
    "remove_files": lambda p: p.remove_files("box", DATA, ["f"]),
    "clear": lambda p: p.clear("box", DATA),
    "size": lambda p: p.size("box", WORKSPACE),
    "seed": lambda p: p.seed("box", "catan", Zeros(MIB)),
}
INPUT_VERBS = ("put_files", "put_and_list_files", "seed")


class Zeros(io.RawIOBase):
    """Input of `size` bytes. Each read takes `seconds` of the given clock."""

    def __init__(self, size: int, clock: "Clock | None" = None, seconds: float = 0.0) -> None:
        self.left, self.clock, self.seconds = size, clock, seconds

    def read(self, size: int = -1, /) -> bytes:
        if self.clock:
            self.clock.now += self.seconds
        taken = min(size, self.left)
        self.left -= taken
        return bytes(taken)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Guest(DockerProvider):
    """Guest that takes its input, then sends `count` chunks, each part in `seconds`."""

    def __init__(self, *, chunk: bytes, seconds: float, count: int = 1000, input_bytes: int = MIB) -> None:
        super().__init__()
        self.clock = self.time = Clock()
        self.chunk, self.seconds, self.count, self.input_bytes, self.closed = chunk, seconds, count, input_bytes, False

    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        try:
            while stdin and stdin.read(self.input_bytes):
                self.time.now += self.seconds
            for _ in range(self.count):
                self.time.now += self.seconds
                yield self.chunk
        finally:
            self.closed = True


def test_each_file_verb_is_tested() -> None:
    assert {*VERBS} == {name for name in vars(FileVerbsProvider) if not name.startswith("_")} - {"clock"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_guest_that_sends_a_byte_before_each_idle_timeout_is_given_up(verb: str) -> None:
    guest = Guest(chunk=b"x", seconds=PAUSE_SECONDS)
    with pytest.raises(SandboxUnreadable, match="too slow") as raised:
        VERBS[verb](guest)
    limit = GET_FILES_TIMEOUT if verb == "get_files" else VERB_TIMEOUT
    assert guest.time.now <= limit.total_seconds() + 2 * PAUSE_SECONDS and guest.closed
    assert raised.value.cause == FailureCause.TIMEOUT


@pytest.mark.parametrize("verb", INPUT_VERBS)
def test_a_guest_that_takes_a_byte_before_each_idle_timeout_is_given_up(verb: str) -> None:
    guest = Guest(chunk=b"", seconds=PAUSE_SECONDS, input_bytes=1)
    with pytest.raises(SandboxUnreadable, match="too slow"):
        VERBS[verb](guest)
    assert guest.time.now <= (VERB_TIMEOUT + timedelta(seconds=2 * PAUSE_SECONDS)).total_seconds()


def test_a_transfer_of_hours_at_the_minimum_rate_passes_in_both_directions() -> None:
    guest = Guest(chunk=bytes(MIB), seconds=1.0, count=3 * 3600)
    assert sum(map(len, guest.get_files("box", WORKSPACE))) == 3 * 3600 * MIB
    guest = Guest(chunk=b"", seconds=1.0, count=1)
    guest.put_files("box", WORKSPACE, Zeros(3 * 3600 * MIB))
    assert guest.time.now > 3 * 3600


def test_the_time_of_a_slow_store_or_consumer_does_not_count() -> None:
    guest = Guest(chunk=b"", seconds=0.5, count=1)
    guest.put_files("box", WORKSPACE, Zeros(20 * MIB, guest.time, seconds=600.0))
    guest = Guest(chunk=b"x", seconds=1.0, count=20)
    for _ in guest.get_files("box", WORKSPACE):
        guest.time.now += 600
