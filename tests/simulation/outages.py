"""Losses and outages of one history: sandboxes, stores, engines, connections, clocks and whole hosts."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from leases import sweeps
from sandboxes.db import database_time
from sandboxes.hosts.bound_provider import compute_host_id
from sandboxes.models import Host as HostRow
from sandboxes.models import Sandbox
from tests.support.actors import console_user
from tests.support.suites import TEST_PROVIDER

if TYPE_CHECKING:
    from tests.simulation.workload import Workload
    from tests.simulation.world import Host

OUTAGE_SECONDS = (30.0, 200.0, 1200.0, 4000.0)
CLOCK_SHIFTS = (timedelta(hours=1), timedelta(hours=-1), timedelta(days=1), timedelta(days=-1))


class Outages:
    """Infrastructure of one history that fails, and the operator who declares a host lost."""

    def __init__(self, workload: "Workload") -> None:
        self.workload, self.world, self.random = workload, workload.world, workload.random
        self.host_loss_begun = False

    def start_vanish(self) -> None:
        """The engine loses a sandbox."""
        host = self.random.choice(self.world.hosts)
        if names := [*host.provider._sandboxes]:
            self._lose(host, self.random.choice(names))

    def _lose(self, host: "Host", ref: str) -> None:
        self.world.scheduler.record("vanished", ref)
        host.provider.vanish(ref)
        self._expect_loss(ref)

    def _expect_loss(self, ref: str) -> None:
        holder = Sandbox.objects.values_list("holder", flat=True).get(pk=UUID(ref.split("-")[1]))
        if holder and (expected := self.world.promises.expectations.leases.get(holder)):
            expected.losses += 1
            # Else nothing was changed in the sandbox: a client may also have written files without a command.
            expected.vanished |= ref in self.world.promises.users or bool(expected.workspace)

    def start_outage(self) -> None:
        """The store, an engine or the connection of one host fails for some time."""
        scheduler, seconds = self.world.scheduler, self.random.choice(OUTAGE_SECONDS)
        host = self.random.choice(self.world.hosts)
        kind = self.random.choice(("store", "engine", "database"))
        scheduler.record("outage", kind, host.name, seconds)
        if kind == "database":
            host.parted_until = scheduler.seconds + seconds
            return
        port: Any = self.world.store if kind == "store" else host.provider
        port.down = True
        scheduler.call_at(scheduler.seconds + seconds, lambda: setattr(port, "down", host.gone and kind == "engine"))

    def start_clock(self) -> None:
        """The clock of one host is set wrong under all its processes, and right after some time."""
        scheduler, host = self.world.scheduler, self.random.choice(self.world.hosts)
        shift, seconds = self.random.choice(CLOCK_SHIFTS), self.random.choice(OUTAGE_SECONDS)
        scheduler.record("clock set", host.name, shift, seconds)
        host.shift = shift
        scheduler.call_at(scheduler.seconds + seconds, lambda: self._set_clock_right(host))

    def _set_clock_right(self, host: "Host") -> None:
        self.world.scheduler.record("clock set right", host.name)
        host.shift = timedelta(0)
        self.world.promises.check_nothing_in_the_future()

    def start_host_loss(self) -> None:
        """A host is gone for good, or has no connection for some time. After a while an operator declares it lost."""
        if self.host_loss_begun or len(self.world.hosts) < 2:
            return
        self.host_loss_begun = True
        scheduler, host = self.world.scheduler, self.world.hosts[-1]
        declared_after, returns_after = (self.random.choice(OUTAGE_SECONDS) for _ in range(2))
        if self.random.random() < 0.5:
            self._destroy_host(host)
        else:
            scheduler.record("parted", host.name, declared_after + returns_after)
            host.parted_until = scheduler.seconds + declared_after + returns_after
        scheduler.call_at(scheduler.seconds + declared_after, lambda: self._start_declaration(host))

    def _destroy_host(self, host: "Host") -> None:
        self.world.scheduler.record("host destroyed", host.name)
        host.gone = host.provider.down = True
        for process in [process for process in self.world.processes if process.host is host]:
            self.world.kill(process)
        for ref in [*host.provider._sandboxes]:
            self._lose(host, ref)

    def _start_declaration(self, host: "Host") -> None:
        """An operator declares the host lost, in the console of another host."""
        if self.world.faults.enabled:
            for ref in [*host.provider._sandboxes]:
                host.provider.existence.vanished.add(ref)
                self._expect_loss(ref)
            self.workload.spawn("web", "declare-lost", lambda: self._declare_lost(host), lambda: None, self.world.hosts[0])

    def _declare_lost(self, host: "Host") -> None:
        row = HostRow.objects.get(pk=compute_host_id(TEST_PROVIDER, host.name))
        sweeps.declare_host_lost(row, now=database_time.now(), actor=console_user("operator"))

    def end(self) -> None:
        """End all outages. An operator declares a host that is gone, and not declared yet, lost."""
        self.world.store.down = False
        for host in self.world.hosts:
            host.shift = timedelta(0)
            if host.gone:
                self._declare_lost(host)
            else:
                host.parted_until, host.provider.down = 0.0, False
