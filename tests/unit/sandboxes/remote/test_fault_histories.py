"""Random histories of leases on remote sandboxes, with faults of the vendor, crashes of the control plane and lost listings.

After each history the faults end and the sweeps run. Then no command has run twice, every acknowledged write is there, each row
that has a sandbox has one, and the vendor has no other. REMOTE_HISTORIES is the number of seeds; a failure names its seed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest

from leases import execution, leasing, sweeps
from leases.models import Lease
from sandboxes import eviction, lifecycle
from sandboxes.errors import (
    ClaimLost,
    OutcomeUnknown,
    ProviderCallFailed,
    SandboxBusy,
    SandboxLost,
    SandboxNotHeld,
    SandboxNotReady,
)
from sandboxes.models import Sandbox
from sandboxes.pool import allocation
from sandboxes.providers import load_class
from sandboxes.providers.errors import ProviderError
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.emulators.base import CUT_AFTER, CUT_BEFORE, Fault
from tests.unit.sandboxes.remote.conftest import CREATE, DESTROY, EXECUTE, LIST, Account

SEEDS = range(1, 1 + int(os.environ.get("REMOTE_HISTORIES", "1")))
VENDORS = ["daytona", "runloop", *(["langsmith", "modal"] if "REMOTE_HISTORIES" in os.environ else [])]  # slower clients
STEPS = 16
FAULT_PROBABILITY, CRASH_PROBABILITY = 0.5, 0.04  # of an operation, of a checkpoint
AGENTS = ("did:plc:ada", "did:plc:bob")
ANY_REQUEST = "^[A-Z]+ /"
FAILURES = (
    ClaimLost, OutcomeUnknown, ProviderCallFailed, ProviderError, SandboxBusy, SandboxLost, SandboxNotHeld, SandboxNotReady,
    SimulatedCrash,
)  # fmt: skip
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("random histories of seconds each: test_faults.py and test_reconcile.py have a case of each fault"),
]


@dataclass
class History:
    """One history. Each agent appends lines to a file of its /data, which outlives its leases."""

    account: Account
    vendor: str
    random: Random
    acquire: Callable[..., Lease]
    now: datetime = NOW
    started: dict[str, list[str]] = field(default_factory=lambda: {agent: [] for agent in AGENTS})
    acknowledged: set[str] = field(default_factory=set)

    def get_lease(self, agent: str) -> Lease:
        return self.acquire(agent, now=self.now, ttl=timedelta(days=1))

    def append(self, agent: str) -> None:
        line = f"{agent}-{len(self.started[agent])}"
        self.started[agent].append(line)
        if self.run(agent, f"echo {line} >>/data/lines") == b"":
            self.acknowledged.add(line)

    def read(self, agent: str) -> list[str]:
        """Return the lines of an agent. Each was started by it, stands once, and none that was acknowledged is missing."""
        lines = self.run(agent, "cat /data/lines 2>/dev/null || true").decode().split()
        assert sorted(lines) == sorted({*lines} & {*self.started[agent]})
        assert {*lines} >= self.acknowledged & {*self.started[agent]}
        return lines

    def run(self, agent: str, script: str) -> bytes:
        command = Command(argv=["sh", "-c", script], timeout=MINUTE)
        result = execution.exec_command(self.get_lease(agent).pk, command, now=self.now)[1]
        assert result.exit_code == 0, result
        return bytes(result.stdout)

    def sleep(self, agent: str) -> None:
        if sandbox := allocation.find_by_holder(self.get_lease(agent).pk):
            eviction.evict(sandbox.pk, now=self.now, reason="test")

    def stop_at_vendor(self, agent: str) -> None:
        """Let the vendor stop the sandbox, unless that loses what was not stored, which ends the lease."""
        keeps_files = load_class(self.vendor).stop_keeps_files
        if keeps_files and (sandbox := allocation.find_by_holder(self.get_lease(agent).pk)):
            self.account.emulator.stop_idle(sandbox.name)

    def release(self, agent: str) -> None:
        leasing.release(self.get_lease(agent).pk, now=self.now)

    def sweep(self, agent: str) -> None:
        sweeps.expire_due_leases(now=self.now)
        sweeps.recover_stalled(now=self.now)
        sweeps.reclaim(now=self.now)
        sweeps.reconcile(now=self.now, grace=timedelta(minutes=10))

    def fail(self) -> None:
        """Let some of the next requests fail."""
        pattern = self.random.choice([CREATE[self.vendor], EXECUTE[self.vendor], LIST[self.vendor], DESTROY, ANY_REQUEST])
        outcome = self.random.choice([CUT_BEFORE, CUT_AFTER, CUT_AFTER, 429, 500, 503])
        self.account.emulator.faults.append(Fault(pattern, outcome, self.random.choice([1, 1, 3, 8])))

    @contextmanager
    def crashing(self) -> Iterator[None]:
        """Let the process die at random checkpoints."""

        def hook(name: str, subject: Any) -> None:
            if self.random.random() < CRASH_PROBABILITY:
                raise SimulatedCrash

        lifecycle.CHECKPOINT_HOOKS.append(hook)
        try:
            yield
        except FAILURES:
            pass  # the operation failed; what it left is for the sweeps
        finally:
            lifecycle.CHECKPOINT_HOOKS.remove(hook)

    def step(self) -> None:
        emulator = self.account.emulator
        emulator.is_listing_late = self.random.random() < 0.1
        if self.random.random() < FAULT_PROBABILITY:
            self.fail()
        operations = [self.append] * 4 + [
            self.read,
            self.sleep,
            self.sleep,
            self.stop_at_vendor,
            self.release,
            self.sweep,
            self.sweep,
        ]
        with self.crashing():
            self.random.choice(operations)(self.random.choice(AGENTS))
        emulator.faults.clear()
        self.now += timedelta(minutes=self.random.choice([0, 1, 5, 20]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("vendor", VENDORS)
def test_history_with_faults_and_crashes_keeps_the_promises(
    vendor: str, seed: int, account: Account, grant: Callable[..., Lease], settings: Any
) -> None:
    settings.SANDBOX_START_TIMEOUT = timedelta(seconds=3)  # also the wait for a start whose process has died
    history = History(account, vendor, Random(seed), grant)
    for _ in range(STEPS):
        history.step()
    account.emulator.is_listing_late = False
    for _ in range(3):
        history.now += timedelta(hours=2)
        account.sweep(history.now)
    for agent in AGENTS:
        history.append(agent)
        assert history.read(agent)
    account.assert_converged()
    assert not Sandbox.objects.filter(lost_at__isnull=False).exists()
    assert {*Lease.objects.values_list("end_reason", flat=True)} <= {"", "released"}
