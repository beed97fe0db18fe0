"""Promises that every history keeps: checks while a history goes on.

The numbers are those of the table in docs/architecture.md. tests.simulation.final_checks has the checks after a history."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from billing.models import UsageRecord
from leases.models import Lease, LeaseEvent, LeaseStatus
from sandboxes.models import Host, Run, Sandbox, Snapshot, Sweep, Transition
from sandboxes.providers.base import SandboxSpec
from tests.simulation.expectations import Expectations
from tests.simulation.scheduler import EPOCH

if TYPE_CHECKING:
    from tests.simulation.ports import Works
    from tests.simulation.world import World

# Time for which an act may outlast the check before it: a thread that is not scheduled, not one that waits for a port.
# Faults that may stop the heartbeat actor of a process, or its connection to the database.
HEARTBEAT_FAULTS = ("pause", "kill", "kill at checkpoint", "statement", "commit before", "commit after")
CHECK_TOLERANCE = timedelta(seconds=3)
# Times of what has happened, which a host with a wrong clock must not write.
PAST_TIMES: dict[type[Any], Sequence[str]] = {
    Host: ("heartbeat_at",),
    Lease: ("leased_at", "last_activity_at", "ended_at"),
    LeaseEvent: ("at",),
    Run: ("started_at", "ended_at"),
    Sandbox: ("created_at", "last_used_at"),
    Snapshot: ("at", "forgotten_at"),
    Sweep: ("started_at", "succeeded_at"),
    Transition: ("at",),
    UsageRecord: ("began_at", "ended_at"),
}


class Promises:
    """Checks of one history, and the violations found."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.expectations = Expectations()
        self.violations: list[str] = []
        self.users: dict[str, str] = {}  # ref -> lease that has executed something in the sandbox
        self.executions: Counter[str] = Counter()
        self.operation_of: dict[str, str] = {}  # by run id
        self.messages: dict[str, list[str]] = {}  # that the program of an agent run prints, by run id
        self.interrupted = set[str]()  # operations whose commands a client may have interrupted
        self.budgets = False  # an exhausted budget kills commands

    def violate(self, promise: int, message: str) -> None:
        self.violations.append(f"promise {promise}: {message}")
        self.world.scheduler.record("VIOLATION", self.violations[-1])

    def check_execution(self, ref: str, run_id: str, order: dict[str, Any], seen: dict[str, str]) -> None:
        """Check a command at its start in the sandbox."""
        self._check_executions(run_id, order["op"], order.get("max_executions", 1))
        lease = order["lease"] or order["op"]  # a one-shot run
        if order.get("is_event"):  # for the lease that the agent has in the environment when the event arrives
            [(holder,)] = self.world.database.fetch("SELECT holder FROM sandboxes_run WHERE id = ?", UUID(run_id))
            lease = str(UUID(holder))
        if self.users.setdefault(ref, lease) != lease:
            self.violate(3, f"{ref} is used by the leases {self.users[ref]} and {lease}")
        checks_files = order["lease"] and order.get("checks_files", True)
        if checks_files and (missing := self.expectations.get(UUID(lease)).find_missing(seen)):
            self.violate(8, f"{order['op']} in {ref} of lease {lease} does not see {missing}; it sees {sorted(seen.values())}")

    def _check_executions(self, run_id: str, operation: str, maximum: int) -> None:
        """No Run is executed twice, and neither is a request with an idempotency key, unless it may be repeated."""
        self.operation_of[run_id] = operation
        self.executions[run_id] += 1
        self.expectations.operations[operation] += 1
        if self.executions[run_id] > 1:
            self.violate(11, f"run {run_id} was executed {self.executions[run_id]} times")
        if self.expectations.operations[operation] > maximum:
            self.violate(11, f"the request {operation} was executed {self.expectations.operations[operation]} times")

    def check_slot(self, provider: "Works", spec: SandboxSpec) -> None:
        """Check at a create that no used sandbox on this host has the same egress slot."""
        for name, other in provider._sandboxes.items():
            if spec.sockets is not None and other.spec.sockets == spec.sockets and name in self.users:
                self.violate(10, f"{spec.name} gets the egress slot {spec.sockets.name} of {name}, which exists")

    def check_destroy(self, provider: "Works", ref: str) -> None:
        """Check that no command of an active lease runs in a sandbox that is destroyed."""
        for work in provider.works:
            if work.ref != ref:
                continue
            rows = self.world.database.fetch(
                "SELECT lease.status FROM leases_lease lease JOIN sandboxes_run run ON run.holder = lease.id WHERE run.id = %s"
                .replace("%s", "?"), UUID(work.run_id),
            )  # fmt: skip
            if rows == [("active",)] and ref not in provider.existence.vanished:
                self.violate(6, f"{ref} is destroyed while run {work.run_id} executes in it and its lease is active")

    def check_kill(self, provider: "Works", mark: str) -> None:
        """Check that a command is not killed as abandoned while its process is alive and makes progress."""
        if self.operation_of.get(mark) in self.interrupted:
            return
        for work in provider.works:
            actor = work.actor
            if work.run_id == mark and actor and not (actor.killed or actor.done or actor.stalled) and not self.budgets:
                self.violate(6, f"run {mark} is killed as abandoned while {actor.name} waits for it")

    def check_claim_lost(self, run_id: UUID) -> None:
        """Check that no sweep has closed a run as past its deadline while its transfers of files made progress.

        Only in histories without faults that may stop the heartbeat of the claims."""
        actor, rates = self.world.scheduler.current, self.world.faults.rates
        parted = any(host.parted_until for host in self.world.hosts)
        if actor is None or actor.slowed or parted or any(rates.get(kind) for kind in HEARTBEAT_FAULTS):
            return
        with self.world.uninterrupted():
            if Run.objects.filter(pk=run_id, outcome="lost", note__startswith="Past its deadline").exists():
                self.violate(6, f"run {run_id} was closed as abandoned while the transfers of {actor.name} made progress")

    def check_refusal(self, lease: UUID) -> None:
        """Check that a command was not refused for the end of a lease that has not ended."""
        tolerance = CHECK_TOLERANCE + self.world.max_skew
        with self.world.uninterrupted():
            active = Lease.objects.filter(pk=lease, status=LeaseStatus.ACTIVE)
            if active.filter(expires_at__gt=self.world.scheduler.time + tolerance).exists():
                self.violate(3, f"a command was refused for the end of lease {lease}, which is active")

    def check_nothing_in_the_future(self) -> None:
        """Check that no row has the time of a clock that was ahead."""
        latest = self.world.scheduler.time + CHECK_TOLERANCE + self.world.max_skew
        for model, fields in PAST_TIMES.items():
            for field in fields:
                if row := model.objects.filter(**{f"{field}__gt": latest}).first():
                    self.violate(3, f"{model.__name__} {row.pk} has {field} {getattr(row, field)}, which is in the future")

    def check_checkpoint(self, name: str, subject: Any) -> None:
        """Check, when a row was committed, that its lease had not ended by its clock."""
        if name == "reserved" and isinstance(subject, Sandbox):
            self._check_fence(subject.holder, "got a place")
        elif name == "run opened" and isinstance(subject, Run):
            self._check_fence(subject.holder, "began a run")

    def _check_fence(self, lease: UUID | None, act: str) -> None:
        if lease is None:
            return
        scheduler, tolerance = self.world.scheduler, CHECK_TOLERANCE + self.world.max_skew
        committed = (
            scheduler.current.committed_at if scheduler.current else scheduler.seconds
        )  # the actor may have stalled since
        latest = (EPOCH + timedelta(seconds=committed) - tolerance).replace(tzinfo=None).isoformat(" ")
        rows = self.world.database.fetch("SELECT expires_at FROM leases_lease WHERE id = ? AND expires_at < ?", lease, latest)
        if rows:
            self.violate(3, f"lease {lease} {act} at {EPOCH + timedelta(seconds=committed)}, after its end at {rows[0][0]}")
