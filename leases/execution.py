"""What a lease lets its agent do: run commands and touch files in its sandbox. Each act renews the lease."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar
from uuid import UUID

from django.db import transaction

from billing import budgets
from leases import leasing
from leases.models import Lease
from sandboxes import pool as pools
from sandboxes import runs
from sandboxes.db import sql
from sandboxes.db.clock import ticking
from sandboxes.errors import Lost, SandboxError
from sandboxes.identity import signing
from sandboxes.lifecycle import step
from sandboxes.models import MintedToken, Pool, Run, Sandbox
from sandboxes.pool import Want
from sandboxes.providers.base import WORKSPACE, ExecResult, Provider
from sandboxes.runs import Command

T = TypeVar("T")


def want_for(lease: Lease, *, now: datetime) -> Want:
    """What this lease asks of the pool, the fence included."""
    pool = sql.first(Pool, "id = %s", lease.pool_id)
    assert pool is not None  # leases protect their pool
    config = {
        "leaseId": str(lease.pk),
        "agentDid": lease.agent_did,
        "environmentId": lease.environment_id,
        "environmentType": lease.environment_type_id,
    }
    return Want(
        holder=lease.pk,
        agent_did=lease.agent_did,
        environment_id=lease.environment_id,
        pool=pool,
        idle_after=lease.sleep_after,
        files={f"{WORKSPACE}/config.json": json.dumps(config, indent=2).encode()},
        skill=lease.environment_type_id,
        policy=lambda: lease.environment_type.policy,
        excludes=lambda: lease.environment_type.snapshot_excludes,
        llm_limit=lambda: Lease.objects.values_list("llm_limit", flat=True).get(pk=lease.pk),
        fence=partial(_fence, lease.pk, now),
    )


def _fence(pk: UUID, now: datetime) -> None:
    # Locked until the sandbox's row is there: whoever ends the lease then finds it, or else we find the lease ended. A lease is
    # locked without its key: whoever writes an event of it, with its sandbox locked, must not wait for whoever wants both.
    Lease.objects.select_for_update(no_key=True, of=("self",)).get(pk=pk)
    leasing.require(pk, now=now)


def exec_in(pk: UUID, command: Command, *, now: datetime, actor: str = "") -> tuple[Run, ExecResult]:
    """Run a command for a lease: its sandbox is started or woken first, and the lease renewed after.

    LeaseEnded when the lease is over, also when it ended while the command ran."""

    def act(want: Want, at: datetime) -> tuple[Run, ExecResult]:
        return runs.exec_in(want, command, now=at, actor=actor)

    return for_lease(pk, act, now=now, actor=actor, spends=True)


def act_in(
    pk: UUID, command: Command, act: Callable[[Provider, Sandbox], T], *, now: datetime, actor: str = ""
) -> tuple[Run, T]:
    """Like exec_in, for an act that is no command: a file is read, a turn is played."""

    def within(want: Want, at: datetime) -> tuple[Run, T]:
        return runs.act_in(want, command, act, now=at, actor=actor)

    return for_lease(pk, within, now=now, actor=actor, spends=command.kind != "file")


def sandbox_for(pk: UUID, *, now: datetime, actor: str = "") -> Sandbox:
    """The lease's sandbox, ready to run in."""
    return for_lease(pk, lambda want, at: pools.ready(want, now=at, actor=actor), now=now, actor=actor, spends=True)


def service_token(
    pk: UUID, *, aud: str, lxm: str, lifetime: timedelta = signing.LIFETIME, now: datetime, actor: str = ""
) -> tuple[str, MintedToken]:
    """A token by which the lease's agent calls one method of one service. LeaseEnded, also if it ended before the token
    was written down. The sandbox is not touched, and so the lease is not renewed."""
    lease = leasing.require(pk, now=now)
    step("may mint", lease)
    fence = partial(_fence, pk, now)
    return signing.mint(lease.agent_did, aud=aud, lxm=lxm, lifetime=lifetime, now=now, holder=pk, actor=actor, fence=fence)


def for_lease(pk: UUID, act: Callable[[Want, datetime], T], *, now: datetime, actor: str, spends: bool = False) -> T:
    """What `act` answers for an active lease, which is renewed after. LeaseEnded, also if it ended meanwhile.

    BudgetExhausted for what would start a sandbox while a budget of the lease is spent; where it `spends`, also for what
    would run in the one that it has. What does not spend and runs in it, as whatever touches its files does, may until the
    end of the grace: else it would never sleep while somebody looks at them over and over."""
    later = ticking(now)
    lease = leasing.require(pk, now=now)
    want, afford = want_for(lease, now=now), partial(budgets.require, pk, now=now)
    if spends:
        afford()
    else:
        want = replace(want, afford=afford, proceed=partial(afford, graceful=True))
    try:
        answer = act(want, now)
    except Lost:
        leasing.require(pk, now=later())  # it may be gone because the lease ended: then that is the answer
        with transaction.atomic():
            leasing.end(pk, reason="lost", now=later(), actor="provider")
        raise leasing.ended(Lease.objects.get(pk=pk), "lost") from None
    except SandboxError:
        leasing.require(pk, now=later())
        raise
    leasing.renew(lease, now=later())
    return answer
