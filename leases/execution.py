"""What a lease lets its agent do: run commands and touch files in its sandbox. Each act renews the lease."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from django.db import transaction

from billing import budgets
from leases import leasing
from leases.guard import LeaseGuard
from leases.models import Lease
from sandboxes import pool as pools
from sandboxes import runs
from sandboxes.db import sql
from sandboxes.db.clock import clock_from
from sandboxes.errors import SandboxError, SandboxLost
from sandboxes.identity import signing
from sandboxes.lifecycle import checkpoint
from sandboxes.models import MintedToken, Pool, Run, Sandbox
from sandboxes.pool import SandboxRequest
from sandboxes.providers.base import WORKSPACE, ExecResult, Provider
from sandboxes.runs import Command

T = TypeVar("T")


def build_sandbox_request(lease: Lease, *, now: datetime, check_budget: bool = False) -> SandboxRequest:
    """Build the request of a lease for its sandbox. `check_budget` is passed to the lease's guard."""
    pool = sql.find_first(Pool, "id = %s", lease.pool_id)
    assert pool is not None  # leases protect their pool
    config = {
        "leaseId": str(lease.pk),
        "agentDid": lease.agent_did,
        "environmentId": lease.environment_id,
        "environmentType": lease.environment_type_id,
    }
    return SandboxRequest(
        holder=lease.pk,
        agent_did=lease.agent_did,
        environment_id=lease.environment_id,
        pool=pool,
        idle_after=lease.sleep_after,
        files={f"{WORKSPACE}/config.json": json.dumps(config, indent=2).encode()},
        skill=lease.environment_type_id,
        guard=LeaseGuard(lease.pk, now, check_budget=check_budget),
    )


def exec_command(pk: UUID, command: Command, *, now: datetime, actor: str = "") -> tuple[Run, ExecResult]:
    """Run a command for a lease: its sandbox is started or woken first, and the lease renewed after.

    LeaseEnded when the lease is over, also when it ended while the command ran."""

    def act(want: SandboxRequest, at: datetime) -> tuple[Run, ExecResult]:
        return runs.exec_in_sandbox(want, command, now=at, actor=actor)

    return call_with_lease(pk, act, now=now, actor=actor, spends=True)


def call_in_sandbox(
    pk: UUID, command: Command, act: Callable[[Provider, Sandbox], T], *, now: datetime, actor: str = ""
) -> tuple[Run, T]:
    """Like exec_in, for an act that is no command: a file is read, a turn is played."""

    def within(want: SandboxRequest, at: datetime) -> tuple[Run, T]:
        return runs.run_operation(want, command, act, now=at, actor=actor)

    return call_with_lease(pk, within, now=now, actor=actor, spends=command.kind != "file")


def ensure_sandbox_ready(pk: UUID, *, now: datetime, actor: str = "") -> Sandbox:
    """The lease's sandbox, ready to run in."""
    return call_with_lease(
        pk, lambda want, at: pools.ensure_running(want, now=at, actor=actor), now=now, actor=actor, spends=True
    )


def mint_service_token(
    pk: UUID, *, aud: str, lxm: str, lifetime: timedelta = signing.DEFAULT_TOKEN_LIFETIME, now: datetime, actor: str = ""
) -> tuple[str, MintedToken]:
    """A token by which the lease's agent calls one method of one service. LeaseEnded, also if it ended before the token
    was written down. The sandbox is not touched, and so the lease is not renewed."""
    lease = leasing.require_active(pk, now=now)
    checkpoint("may mint", lease)
    return signing.mint_service_token(
        lease.agent_did, aud=aud, lxm=lxm, lifetime=lifetime, now=now, holder=pk, actor=actor, fence=LeaseGuard(pk, now).fence
    )


def call_with_lease(
    pk: UUID, act: Callable[[SandboxRequest, datetime], T], *, now: datetime, actor: str, spends: bool = False
) -> T:
    """What `act` answers for an active lease, which is renewed after. LeaseEnded, also if it ended meanwhile.

    BudgetExhausted for what would start a sandbox while a budget of the lease is spent; where it `spends`, also for what
    would run in the one that it has. What does not spend and runs in it, as whatever touches its files does, may until the
    end of the grace: else it would never sleep while somebody looks at them over and over."""
    later = clock_from(now)
    lease = leasing.require_active(pk, now=now)
    if spends:
        budgets.require_budget(pk, now=now)
    want = build_sandbox_request(lease, now=now, check_budget=not spends)
    try:
        answer = act(want, now)
    except SandboxLost:
        leasing.require_active(pk, now=later())  # it may be gone because the lease ended: then that is the answer
        with transaction.atomic():
            leasing.end(pk, reason="lost", now=later(), actor="provider")
        raise leasing.build_ended_error(Lease.objects.get(pk=pk), "lost") from None
    except SandboxError:
        leasing.require_active(pk, now=later())
        raise
    leasing.renew(lease, now=later())
    return answer
