"""Virtual hosts and processes, their clocks, and the injection of faults into their calls."""

import itertools
import os
import random as global_random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from django.conf import settings
from django.utils import timezone

from leases.admission import acquire_with_place
from sandboxes import lifecycle, providers
from sandboxes.db import database_time
from sandboxes.db.connection_errors import FAILOVER_PERIOD
from sandboxes.providers.memory import file_tree as memory_file_tree
from sandboxes.providers.memory import provider as memory_provider
from sandboxes.state import changes, pull, storage_mode
from sandboxes.storage import memory as memory_store
from tests.simulation import heartbeats, threads
from tests.simulation.database import Database, OperationalError
from tests.simulation.faults import MAX_CHUNK_SECONDS, SLOW_SECONDS, Faults
from tests.simulation.ports import SimulatedProvider, SimulatedStore
from tests.simulation.process_state import ProcessState, list_patches
from tests.simulation.promises import Promises
from tests.simulation.scheduler import HISTORY_THREAD, Actor, Scheduler, is_history_thread
from tests.support.suites import TEST_PROVIDER


def create_provider(world: "World", host: "Host", number: int) -> Any:
    """Return the provider of a host: the memory provider, or another one with an account or a cluster of this host."""
    if TEST_PROVIDER == "memory":
        return SimulatedProvider(world, host)
    if TEST_PROVIDER == "kubernetes":
        from tests.simulation.cluster_ports import connect_cluster

        return connect_cluster(world, host, number)
    from tests.simulation.vendor_ports import connect_account

    return connect_account(world, host, number)


def close_providers() -> None:
    """End what the providers of all histories have started in this process."""
    if TEST_PROVIDER == "kubernetes":
        from tests.simulation.cluster_ports import CLUSTERS

        CLUSTERS.close()


def outside_vendor(virtual: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is virtual in the threads of a history, and real in those of a vendor's client and emulator."""
    if TEST_PROVIDER == "memory":
        return virtual
    return lambda *arguments: (virtual if is_history_thread() else real)(*arguments)


class Host:
    """Machine with a clock, a state directory and a sandbox engine of its own."""

    def __init__(self, world: "World", number: int, *, drift: timedelta) -> None:
        self.world, self.name, self.drift = world, f"host{number}", drift
        self.provider = create_provider(world, self, number)
        self.state_dir = world.directory / self.name
        self.shift = timedelta(0)  # by which the clock is set wrong for some time
        self.parted_until = 0.0  # no connection to the database before this virtual time
        self.gone = False  # the machine is destroyed

    @property
    def now(self) -> datetime:
        return self.world.scheduler.time + self.drift + self.shift


class Process:
    """Process of the control plane on one host. Killing the process stops all its actors."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name
        self.actors: list[Actor] = []
        self.alive = True
        self.state = ProcessState()
        self.skew_meter = database_time.SkewMeter()

    def enter(self) -> None:
        self.state.install()
        settings.__dict__["INSTANCE"] = self.name
        settings.__dict__["STATE_DIR"] = self.host.state_dir


class World:
    """State of one history besides the database."""

    def __init__(self, seed: int, faults: Faults, *, hosts: int, drifts: bool) -> None:
        self.scheduler = Scheduler(seed)
        self.random: Random = self.scheduler.random
        self.faults = faults
        self.directory = Path(tempfile.mkdtemp(prefix="lh-sim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.promises = Promises(self)
        self.on_transfer_pause: Callable[[], object] = lambda: None
        self.store = SimulatedStore(self)
        self.hosts = [Host(self, number, drift=self._draw_drift(drifts)) for number in range(1, hosts + 1)]
        self.main_process = Process(self.hosts[0], f"{self.hosts[0].name}.main")
        self.processes: list[Process] = []
        self.started = self.kills = 0
        self.quiet = 0  # depth of blocks without faults and yields
        self.database = Database(self)
        self.capacity = 0
        self.max_skew = timedelta(seconds=3) if drifts else timedelta(0)
        self.on_kill: Callable[[Process], None] = lambda process: None

    def _draw_drift(self, drifts: bool) -> timedelta:
        return timedelta(seconds=self.random.uniform(-300, 300)) if drifts else timedelta(0)

    @property
    def host(self) -> Host:
        """Host of the current actor, or the one that the main thread has entered."""
        return (self.current_process or self.main_process).host

    @property
    def hosts_in_service(self) -> list[Host]:
        return [host for host in self.hosts if not host.gone]

    @property
    def current_process(self) -> "Process | None":
        """Process of the current actor, None in the main thread."""
        actor = self.scheduler.current
        return actor.context if actor and isinstance(actor.context, Process) else None

    def enter_host(self, host: Host) -> None:
        """Let the main thread act on this host."""
        self.main_process = Process(host, f"{host.name}.main")
        self.main_process.enter()

    # --- processes and actors ---------------------------------------------------------------------------------------

    def start_process(self, host: Host, kind: str) -> Process:
        self.started += 1
        process = Process(host, f"{host.name}.{kind}{self.started}")
        self.processes.append(process)
        return process

    def spawn(self, process: Process, name: str, act: Callable[[], object]) -> Actor:
        def run() -> None:
            self.database.use_in_thread()
            act()

        actor = self.scheduler.spawn(f"{process.name}/{name}", run, process)
        process.actors.append(actor)
        return actor

    def kill(self, process: Process) -> None:
        """Kill a process by SIGKILL: its threads stop where they are."""
        self.scheduler.record("killed", process.name)
        process.alive = False
        self.kills += 1
        self.processes.remove(process)
        self.on_kill(process)
        self.scheduler.kill([actor for actor in process.actors if not actor.done])

    # --- yield points -----------------------------------------------------------------------------------------------

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def point(self, label: str, *, switch: bool = True) -> None:
        """Yield point: the scheduler may let another actor go on, pause this one, or kill its process."""
        scheduler = self.scheduler
        actor = scheduler.current
        if actor is None or self.quiet:
            return
        if scheduler.detached:
            scheduler.pause()
        scheduler.record(label)
        scheduler.seconds += self.random.random() * 0.004
        if not switch:
            return
        if self.faults.occurs("kill at checkpoint" if label.startswith("checkpoint ") else "kill", self.random):
            assert isinstance(actor.context, Process)
            self.kill(actor.context)
        if self.faults.occurs("pause", self.random):
            self.stall()
        elif self.faults.occurs("switch", self.random):
            scheduler.pause()

    def enter_call(self, port: str, method: str, subject: str, build_error: Callable[[str], Exception]) -> None:
        if self.scheduler.current is None or self.quiet:
            return
        self.point(f"{port} {method} {subject}")
        if self.occurs(f"{port} slow"):
            self.stall()
        down = self.store.down if port == "store" else self.host.provider.down
        if (down and self.faults.enabled) or self.occurs(f"{port} before"):
            raise build_error(f"{method} refused")

    def leave_call(self, port: str, method: str, subject: str, build_error: Callable[[str], Exception]) -> None:
        if self.scheduler.current is None or self.quiet:
            return
        if self.occurs(f"{port} late"):
            self.stall()
        self.point(f"{port} {method} answered")
        if self.occurs(f"{port} after"):
            raise build_error(f"{method}: answer lost")

    def pause_transfer(self) -> None:
        """Let some seconds pass between two chunks of a transfer, which makes progress all the time."""
        if self.scheduler.current and not self.scheduler.detached and self.faults.enabled:
            self.on_transfer_pause()
            self.scheduler.sleep(self.random.uniform(1.0, MAX_CHUNK_SECONDS))

    def stall(self) -> None:
        """Let the current actor do nothing for a long time, as if its machine or its peer had stopped."""
        seconds = self.random.choice(SLOW_SECONDS)
        if self.scheduler.current:
            self.scheduler.current.slowed = True
            self.scheduler.current.stalled |= seconds > MAX_CHUNK_SECONDS
        self.scheduler.sleep(seconds)

    def occurs(self, kind: str) -> bool:
        """Return whether a fault occurs now."""
        if self.faults.occurs(kind, self.random):
            self.scheduler.record("fault", kind)
            return True
        return False

    def before_statement(self, sql: str) -> None:
        """Yield point before a statement outside a transaction, and before a transaction begins."""
        if self.scheduler.current is None or self.quiet:
            return
        self.point(sql[:60])
        self._require_connection()

    def within_transaction(self, sql: str) -> None:
        if self.scheduler.current is None or self.quiet:
            return
        self.point(sql.partition(' "s')[0][:60], switch=False)  # the name of a savepoint has the id of a thread
        self._require_connection()

    def _require_connection(self) -> None:
        assert self.scheduler.current
        if self.scheduler.seconds < self.scheduler.current.cut_off_until and self.faults.enabled:
            raise OperationalError("The database does not respond.")
        if self.scheduler.seconds < self.host.parted_until and self.faults.enabled:
            self.scheduler.current.stalled = True
            self.scheduler.sleep(1.0)
            raise OperationalError("The host is parted from the database.")
        if self.occurs("statement"):
            raise OperationalError("The connection was lost.")

    def decide_commit(self) -> str:
        if self.scheduler.current is None or self.quiet:
            return "commit"
        if self.scheduler.detached:
            return "die before"
        for kind in ("commit before", "commit after"):
            if self.occurs(kind):
                return f"{self.random.choice(('fail', 'die'))} {kind.split()[1]}"
        return "commit"

    def after_commit(self, outcome: str) -> None:
        actor = self.scheduler.current
        if actor:
            actor.committed_at = self.scheduler.seconds
        if actor and outcome.startswith("die"):
            if self.scheduler.detached:
                self.scheduler.pause()
            assert isinstance(actor.context, Process)
            self.kill(actor.context)
        self.point(outcome)

    def at_checkpoint(self, name: str, subject: Any) -> None:
        if self.database.connection.in_atomic_block:
            return
        self.promises.check_checkpoint(name, subject)
        actor = self.scheduler.current
        if actor and name == "attempt executed" and self.occurs("end unrecorded"):
            actor.cut_off_until = self.scheduler.seconds + 2 * FAILOVER_PERIOD.total_seconds()
        if name == "agent run created" and self.occurs("late start"):
            self.stall()
        self.point(f"checkpoint {name}")

    # --- replacements of the product's clocks and ports -------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace clocks, identifiers, provider, store and database of the product by those of this world."""
        scheduler = self.scheduler

        class EngineDatetime(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return self.host.now

        class StoreDatetime(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return scheduler.time

        identifiers = Random(self.random.random())
        patches: list[tuple[Any, str, Any]] = [
            (os, "urandom", outside_vendor(identifiers.randbytes, os.urandom)),
            (global_random, "_urandom", outside_vendor(identifiers.randbytes, os.urandom)),  # of the module secrets
            (time, "monotonic", outside_vendor(lambda: scheduler.seconds, time.monotonic)),
            (time, "time", outside_vendor(lambda: self.host.now.timestamp(), time.time)),
            (time, "sleep", outside_vendor(scheduler.poll, time.sleep)),
            (acquire_with_place, "__kwdefaults__", (acquire_with_place.__kwdefaults__ or {}) | {"sleep": scheduler.poll}),
            (timezone, "now", lambda: self.host.now),
            (database_time, "measure_skew", lambda: scheduler.time - self.host.now),
            (database_time, "read_uptime", lambda: scheduler.seconds),
            (providers, "get_provider", lambda name: self.host.provider),
            (memory_provider, "datetime", EngineDatetime),
            (memory_file_tree, "_stamps", itertools.count(1)),  # part of manifests
            (memory_store, "datetime", StoreDatetime),
        ]
        for module in (changes, pull, storage_mode):
            patches.append((module, "run_parallel", lambda function, jobs: [function(job) for job in jobs]))
        patches += [(module, "get_store", lambda: self.store) for module in find_store_users()]
        patches += threads.list_patches(self)
        patches += list_patches()  # see Process.enter
        saved = [(target, name, getattr(target, name)) for target, name, _ in patches]
        HISTORY_THREAD.is_current = True
        global_random.seed(self.random.random())
        for target, name, value in patches:
            setattr(target, name, value)
        meter_type = type(database_time.meter)
        database_time.meter = _ProcessMeter(self)  # type: ignore[assignment]
        lifecycle.CHECKPOINT_HOOKS.append(self.at_checkpoint)
        self.database.install()
        try:
            with heartbeats.replaced(self):
                yield
                scheduler.detach()
        finally:
            scheduler.detach()
            self.database.uninstall()
            lifecycle.CHECKPOINT_HOOKS.remove(self.at_checkpoint)
            database_time.meter = meter_type()
            for target, name, value in saved:
                setattr(target, name, value)
            shutil.rmtree(self.directory, ignore_errors=True)


class _ProcessMeter:
    """Skew meter of the current virtual process, in place of the one of this process."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def _meter(self) -> database_time.SkewMeter:
        return (self.world.current_process or self.world.main_process).skew_meter

    def update(self) -> None:
        self._meter.update()

    def now(self) -> datetime:
        return self._meter.now()

    @property
    def skew(self) -> timedelta:
        return self._meter.skew


def find_store_users() -> list[Any]:
    """Return the modules of the product that have imported get_store."""
    return [module for name, module in sys.modules.items() if name.startswith("sandboxes.") and hasattr(module, "get_store")]
