"""Stops from outside during a call: the outcome is unknown, no sandbox is missing, and the next call has its files."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from sandboxes.providers.base import DATA
from sandboxes.providers.errors import Stopped, Unavailable
from sandboxes.providers.memory import MemoryProvider, ProgramResult
from tests.conformance.conftest import ProviderBench, SandboxHandle
from tests.support.storage.tars import file, pack
from tests.support.waiting import wait_until


@pytest.fixture
def box(stopping_bench: ProviderBench) -> SandboxHandle:
    """Sandbox with a file in each of its directories."""
    box = stopping_bench.box()
    box.write("kept", b"kept")
    box.provider.write_file(box.ref, f"{DATA}/kept", b"kept")
    return box


def assert_usable_with_its_files(box: SandboxHandle) -> None:
    assert box.run("cat", "kept").stdout == b"kept"
    assert box.provider.read_file(box.ref, f"{DATA}/kept", limit=10) == b"kept"
    assert box.provider.inspect(box.ref).running


def run_until_stop(bench: ProviderBench, box: SandboxHandle) -> None:
    """Run a command that ends by a stop of its sandbox."""
    assert bench.stop
    if isinstance(box.provider, MemoryProvider):
        stop = bench.stop
        box.provider.programs["work"] = lambda call: (stop(box.ref), ProgramResult())[1]
        box.run("work")
        return
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(box.run, "sh", "-c", "touch begun; sleep 300", seconds=250)
        wait_until(lambda: "begun" in box.names(), "the command runs")
        bench.stop(box.ref)
        running.result()


def test_stop_during_a_command_is_no_loss(stopping_bench: ProviderBench, box: SandboxHandle) -> None:
    with pytest.raises(Stopped):
        run_until_stop(stopping_bench, box)
    assert_usable_with_its_files(box)


class StoppingArchive(io.BytesIO):
    """Archive whose sandbox stops once its first part was read."""

    def __init__(self, stop: Callable[[], object]) -> None:
        super().__init__(pack(file("big", bytes(3_000_000))).getvalue())
        self._stop: Callable[[], object] | None = stop

    def read(self, size: int | None = -1) -> bytes:
        stop, self._stop = (self._stop, None) if self.tell() else (None, self._stop)
        if stop:
            stop()
        return super().read(size)


@pytest.mark.parametrize("direction", ["get", "put"])
def test_stop_during_a_transfer_of_files_is_no_loss(stopping_bench: ProviderBench, box: SandboxHandle, direction: str) -> None:
    """A transfer that is buffered may succeed."""
    stop = stopping_bench.stop
    assert stop
    with suppress(Unavailable):
        if direction == "put":
            box.provider.put_files(box.ref, box.root, StoppingArchive(lambda: stop(box.ref)))
        else:
            box.write("big", bytes(3_000_000))
            chunks = iter(box.provider.get_files(box.ref, box.root))
            next(chunks)
            stop(box.ref)
            b"".join(chunks)
    assert_usable_with_its_files(box)


@pytest.mark.parametrize("verb", ["read", "run", "look"])
def test_sandbox_that_was_stopped_between_two_calls_is_started(
    stopping_bench: ProviderBench, box: SandboxHandle, verb: str
) -> None:
    assert stopping_bench.stop
    stopping_bench.stop(box.ref)
    assert not box.provider.inspect(box.ref).running
    arguments = {"read": ["kept"], "run": ["true"], "look": []}[verb]
    getattr(box, verb)(*arguments)
    assert_usable_with_its_files(box)
