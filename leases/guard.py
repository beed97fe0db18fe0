"""Guard of a lease's sandbox requests: fence, terms and budget checks."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from billing import budgets
from leases import leasing
from leases.models import Lease, LeaseEvent, LeaseStatus
from leases.resources import get_sandbox_size
from sandboxes.call_limits import CallLimits
from sandboxes.db import sql
from sandboxes.db.clock import Clock
from sandboxes.db.sql import Statement
from sandboxes.guard import HolderTerms
from sandboxes.models import Pool

RECOVERED_EVENT = "recovered"  # LeaseEvent.kind


@dataclass(frozen=True)
class LeaseGuard:
    """sandboxes.guard.Guard for one lease. Each check reads the clock, and raises LeaseEnded or BudgetExhausted."""

    lease_id: UUID
    clock: Clock
    check_budget: bool = False  # False: the budget was checked before the operation began, and need not be before its run

    def fence(self) -> HolderTerms:
        """Lock the lease until the transaction ends, and return the terms of its sandbox. Raise LeaseEnded.

        The lock is held until the sandbox's row is written. An operation that ends the lease therefore either finds that
        row or makes this call fail. The lock is not a key lock: a transaction that holds a sandbox's lock and inserts an
        event of the lease must not wait for a transaction that takes the two locks in the opposite order."""
        leases = Lease.objects.select_for_update(no_key=True, of=("self",)).select_related("environment_type__policy")
        lease = leases.get(pk=self.lease_id)
        return build_terms(leasing.check_active(lease, now=self.clock()))

    def build_condition(self) -> Statement:
        active = "SELECT 1 FROM leases_lease WHERE leases_lease.id = %s AND status = %s AND expires_at > %s"
        return Statement(f"EXISTS ({active})", (self.lease_id, LeaseStatus.ACTIVE.value, self.clock()))

    def note_run_opened(self, *, now: datetime) -> None:
        pass

    def note_recovery(self, note: str, *, now: datetime) -> None:
        LeaseEvent.objects.create(lease_id=self.lease_id, at=now, kind=RECOVERED_EVENT, actor="provider", reason=note)

    def check_active(self) -> None:
        leasing.require_active(self.lease_id, now=self.clock())

    def check_affordable(self, pool: Pool) -> None:
        lease, _, budget_flags = sql.find_joined(
            Lease, [], [budgets.ANY_EXHAUSTED_SQL, budgets.ANY_HARD_SQL], "leases_lease.id = %s", self.lease_id
        )
        lease = leasing.check_active(lease, now=self.clock())
        if any(budget_flags):
            budgets.require_budget(self.lease_id, now=self.clock())
            budgets.require_room(self.lease_id, size=get_sandbox_size(pool, lease), now=self.clock())

    def check_proceed(self) -> None:
        """Raise BudgetExhausted once a spent budget's grace period is over."""
        if self.check_budget:
            budgets.require_budget(self.lease_id, now=self.clock(), after_grace=True)


def build_terms(lease: Lease) -> HolderTerms:
    """Build the terms of a lease for its sandbox."""
    environment_type = lease.environment_type
    return HolderTerms(
        excludes=environment_type.snapshot_excludes,
        call_limits=CallLimits.of(lease),
        llm_enabled=lease.llm_enabled,
        policy=environment_type.policy,
        suspend_after=environment_type.suspend_after,
        held_until=lease.max_expires_at,
        auto_stop=lease.auto_stop,
        auto_delete=lease.auto_delete,
    )
