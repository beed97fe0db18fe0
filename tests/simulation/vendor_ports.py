"""Provider of one host that is a vendor's client on the vendor's emulator, in place of the memory provider.

Each host has an account of its own. The faults of the simulation become faults of the emulator: connections that are cut before
or after the request is carried out, responses 429, 500 and 503, and listings without new sandboxes. The vendor's client runs in
threads outside of the history, which see the real clock. The order of the events of a history is therefore reproducible only as
far as the vendor's client and the processes of the sandboxes are."""

import atexit
import tempfile
import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings

from sandboxes.providers.base import ProviderSandbox, SandboxSpec
from sandboxes.providers.memory import Entry, ProgramCall, ProgramResult
from tests.emulators.base import CUT_AFTER, CUT_BEFORE, Emulator, Fault
from tests.emulators.registry import serve
from tests.simulation.ports import PROGRAM, Work, Works
from tests.support.remote import configure
from tests.support.suites import TEST_PROVIDER
from tests.support.suites.programs import open_disk
from tests.support.suites.provider import ANY_REQUEST, UNLIMITED, SuiteProvider, connect, find_subject

if TYPE_CHECKING:
    from tests.simulation.world import Host, World

FAILED_BEFORE = (CUT_BEFORE, CUT_BEFORE, 429, 500, 503)
FAILED_REQUESTS = (1, 2, 8, 40)  # of one fault; the provider repeats a call up to three times
CHANGING_REQUEST = "^(?!GET )"
LISTINGS = ("list", "list_all")  # which do not change anything: new sandboxes are missing in place of a lost response


@dataclass(frozen=True)
class VendorSandbox:
    """Sandbox that exists at the vendor."""

    spec: SandboxSpec
    files: MutableMapping[str, Entry]
    suspended: bool


@cache
def start_emulator(number: int) -> Emulator:
    """Start the emulator of one account, which serves all histories of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-vendor-"))
    return stack.enter_context(serve(TEST_PROVIDER, Path(directory)))


def connect_account(world: "World", host: "Host", number: int) -> "SimulatedVendor":
    """Return the provider of a host, whose account is empty."""
    emulator = start_emulator(number)
    settings.__dict__["REMOTE_PROVIDERS"] = {**settings.REMOTE_PROVIDERS, TEST_PROVIDER: configure(TEST_PROVIDER, emulator)}
    provider: SimulatedVendor = connect(TEST_PROVIDER, emulator, SimulatedVendor, world=world, host=host)
    return provider


def run_aside(act: Callable[[], Any]) -> Any:
    """Run a call of the vendor's client in a thread outside of the history, and wait for it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((act(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error:
        raise error
    return result


class SimulatedVendor(Works, SuiteProvider):
    """Mixin of the vendor's provider of one host."""

    def __init__(self, *arguments: Any) -> None:
        self._reset_works()
        super().__init__(*arguments)
        self.programs[PROGRAM] = self._work

    @property
    def _sandboxes(self) -> dict[str, VendorSandbox]:
        found = {name: self.find_existing(name) for name in self.created}
        return {name: sandbox for name, sandbox in found.items() if sandbox}

    def find_existing(self, name: str) -> VendorSandbox | None:
        """Return a sandbox of this history that exists at the vendor."""
        machine = self.find_machine(name)
        return VendorSandbox(self.created[name], open_disk(machine), not machine.is_running) if machine else None

    def engine_id(self) -> str:
        self.world.point("provider engine_id")
        return self.host.name

    def call(self, verb: str, arguments: Sequence[Any], act: Callable[[], Any]) -> Any:
        """Call a verb under the faults of the history, with the checks around it."""
        subject = find_subject(arguments)
        world, is_observed = self.world, self.world.scheduler.current is not None and not self.world.quiet
        fault = None
        if is_observed:
            world.point(f"provider {verb} {subject}")
            if world.occurs("provider slow"):
                world.stall()
            fault = self._draw_fault()
        if verb == "create" and subject not in self._sandboxes:
            world.promises.check_slot(self, self.created[subject])
        if verb == "destroy":
            world.promises.check_destroy(self, subject)
        if verb == "kill":
            world.promises.check_kill(self, arguments[1])
        self.emulator.is_listing_late = verb in LISTINGS and fault is not None and fault.outcome == CUT_AFTER
        try:
            with self.failing_emulator(fault):
                result = act()
        finally:
            self.emulator.is_listing_late = False
            self._note_existence(subject)
            if verb in ("suspend", "restart"):
                self._stop_works([work for work in self.works if work.ref == subject])
            if verb == "kill":
                self._stop_works([work for work in self.works if (work.ref, work.run_id) == (subject, arguments[1])])
        if is_observed:
            if world.occurs("provider late"):
                world.stall()
            world.point(f"provider {verb} answered")
        return self._set_virtual_time(result)

    def call_vendor(self, act: Callable[[], Any]) -> Any:
        return run_aside(lambda: super(SimulatedVendor, self).call_vendor(act))

    def _draw_fault(self) -> Fault | None:
        world, random = self.world, self.world.random
        if self.down and world.faults.enabled:
            return Fault(ANY_REQUEST, CUT_BEFORE, UNLIMITED)
        if world.occurs("provider before"):
            return Fault(ANY_REQUEST, random.choice(FAILED_BEFORE), random.choice(FAILED_REQUESTS))
        if world.occurs("provider after"):
            return Fault(CHANGING_REQUEST, CUT_AFTER, random.choice(FAILED_REQUESTS))
        return None

    def _note_existence(self, ref: str) -> None:
        """Record since when or until when a sandbox exists. No virtual time passes in a call of the vendor."""
        if ref not in self.created:
            return
        exists = self.find_existing(ref) is not None
        if exists and ref not in self.existence.since:
            self.existence.since[ref] = self.world.scheduler.time
        elif not exists and ref in self.existence.since:
            self.existence.ranges[ref] = (self.existence.since.pop(ref), self.world.scheduler.time)
            self._stop_works([work for work in self.works if work.ref == ref])

    def _set_virtual_time(self, result: Any) -> Any:
        """Replace the real times of creation by the virtual ones."""
        if isinstance(result, list):
            return [self._set_virtual_time(found) for found in result]
        if isinstance(result, ProviderSandbox):
            return replace(result, created_at=self.existence.since.get(result.name, self.world.scheduler.time))
        return result

    def vanish(self, ref: str) -> None:
        self.existence.vanished.add(ref)
        run_aside(lambda: super(SimulatedVendor, self).vanish(ref))
        self._note_existence(ref)

    def _find_ref(self, call: ProgramCall) -> str:
        return self.server.get_ref(call.env["LEASEHOLD_RUN"])

    def _end_abandoned(self, work: Work) -> None:
        self.server.end_abandoned(work.run_id, ProgramResult())
