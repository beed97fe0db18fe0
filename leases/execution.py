"""Operations of a lease in its sandbox: commands, file access, service tokens. Use of the sandbox renews the lease."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import Model

from billing import budgets
from leases import leasing
from leases.errors import LeaseEnded
from leases.guard import LeaseGuard
from leases.models import Lease
from leases.placement import LEASE_HAS_ALTERNATIVES_SQL, LeasePlacement
from sandboxes import files, restarts
from sandboxes.claims import CLAIM_TTL, KILL_GRACE, Claim, hold
from sandboxes.db import sql
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import log_connection_errors
from sandboxes.errors import SandboxError, SandboxLost
from sandboxes.guard import Guard, HolderRenewal
from sandboxes.hosts import registry
from sandboxes.identity import signing
from sandboxes.lifecycle import checkpoint
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import AWAKE_STATES, MintedToken, Pool, Run, Sandbox
from sandboxes.pool import allocation
from sandboxes.pool.allocation import SandboxRequest
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import ProviderError
from sandboxes.runs import operations, workspace_limit
from sandboxes.runs.operations import Command
from sandboxes.state import disk_space
from sandboxes.state.file_tree import FileTree

T = TypeVar("T")
WrapGuard = Callable[[Guard], Guard]
ADDING_VERBS = ("write", "unpack", "mkdir")  # first word of a file operation that adds files
PING_TIMEOUT = timedelta(seconds=1)
# The pool of a lease and its sandbox, of which there is at most one (sandbox_one_live_per_holder). Plan: primary keys of the
# lease and the pool, and the index of that constraint.
LEASE_JOINS: list[tuple[type[Model], str]] = [
    (Pool, "sandboxes_pool.id = leases_lease.pool_id"),
    (Sandbox, f"sandboxes_sandbox.holder = leases_lease.id AND {allocation.HELD_SQL}"),
]


def build_sandbox_request(
    lease: Lease, *, now: datetime, check_budget: bool = False, has_alternatives: bool = False
) -> SandboxRequest:
    """Build the request of a lease for its sandbox. `check_budget` is passed to the lease's guard.

    With `has_alternatives` the environment type lists further pools than that of the lease."""
    config = {
        "leaseId": str(lease.pk),
        "agentDid": lease.agent_did,
        "environmentId": lease.environment_id,
        "environmentType": lease.environment_type_id,
        "summarization": {
            "fallbackTriggerTokens": settings.FALLBACK_TRIGGER_TOKENS,
            "fallbackKeepMessages": settings.FALLBACK_KEEP_MESSAGES,
        },
    }
    return SandboxRequest(
        holder=lease.pk,
        agent_did=lease.agent_did,
        environment_id=lease.environment_id,
        pool=lease.pool,
        idle_after=lease.sleep_after,
        files={f"{WORKSPACE}/config.json": json.dumps(config, indent=2).encode()},
        skill=lease.environment_type_id,
        guard=LeaseGuard(lease.pk, clock_from(now), check_budget=check_budget),
        memory_mib=lease.memory_mib,
        millicpus=lease.millicpus,
        disk_mib=lease.disk_mib,
        gpus=lease.gpus,
        gpu_type=lease.gpu_type,
        image=lease.image,
        placement=LeasePlacement(lease) if has_alternatives else None,
    )


def exec_command(
    pk: UUID, command: Command, *, now: datetime, actor: str = "", wrap_guard: WrapGuard | None = None
) -> tuple[Run, ExecResult]:
    """Run a command in the sandbox of a lease, which is started or woken first. Renew the lease before and afterwards.

    `wrap_guard` adds conditions to the guard of the lease. Raise LeaseEnded if the lease has ended, also if it ended while the
    command ran."""
    clock = clock_from(now)
    with use_lease(pk, now=now, spends=True, lasts=command.timeout, ends_with_run=True) as request:
        if wrap_guard:
            request = replace(request, guard=wrap_guard(request.guard))
        return operations.exec_in_sandbox(request, command, now=clock(), actor=actor)


def call_in_sandbox(
    pk: UUID, command: Command, operation: Callable[[Provider, Sandbox], T], *, now: datetime, actor: str = ""
) -> tuple[Run, T]:
    """Like exec_command, for an operation other than a command, such as a change of files. Return its Run and result."""
    clock = clock_from(now)
    with (
        use_lease(pk, now=now, spends=command.kind != "file", lasts=command.timeout, ends_with_run=True) as request,
        operations.operation(request, command, now=clock(), actor=actor) as opened,
    ):
        result = operation(opened.provider, opened.sandbox)
        opened.result = result if isinstance(result, ExecResult) else None
    return opened.run, result


def read_files(
    pk: UUID, root: str, command: Command, act: Callable[[FileTree], T], *, now: datetime, actor: str = ""
) -> tuple[T, str]:
    """Call `act` with the files of a lease below `root`. Return its result and the source, as sandboxes.files.read_files."""
    clock = clock_from(now)
    with use_lease(pk, now=now) as request:
        return files.read_files(request, root, command, act, now=clock(), actor=actor)


def change_files(
    pk: UUID, command: Command, act: Callable[[Provider, Sandbox], None], *, now: datetime, actor: str = ""
) -> None:
    """Call `act`, which changes files, in the sandbox of a lease.

    Raise WorkspaceFull if it adds to a full workspace, and EngineDiskFull if it adds to a full disk."""
    clock = clock_from(now)

    def check_space_and_act(provider: Provider, sandbox: Sandbox) -> None:
        if command.argv[0] in ADDING_VERBS:
            disk_space.require_engine_reserve(sandbox.provider, "write a file")
            workspace_limit.require_workspace_space(provider, sandbox, now=clock())
        act(provider, sandbox)

    call_in_sandbox(pk, command, check_space_and_act, now=now, actor=actor)


def ensure_sandbox_ready(pk: UUID, *, now: datetime, actor: str = "") -> Sandbox:
    """Start or wake the sandbox of a lease and return it, ready to run commands. Idempotent."""
    clock = clock_from(now)
    with LONG_CALLS.admit(), use_lease(pk, now=now, spends=True) as request:
        return allocation.ensure_running(request, now=clock(), actor=actor)


def restart_sandbox(pk: UUID, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Kill all processes in the sandbox of a lease and start it again with its files. Return it, or None if there is none.

    Renew the lease. Raise the errors of use_lease and restarts.restart_held."""
    clock = clock_from(now)
    with use_lease(pk, now=now):
        return restarts.restart_held(pk, now=clock(), actor=actor)


def responds(sandbox: Sandbox) -> bool:
    """Return whether a sandbox has just answered, without a run. False if it is suspended or that is not known."""
    if sandbox.state not in AWAKE_STATES:
        return False
    try:
        return registry.get_sandbox_provider(sandbox).responds(sandbox.ref, timeout=PING_TIMEOUT)
    except (ProviderError, ImproperlyConfigured):
        return False


def has_outdated_agent(sandbox: Sandbox) -> bool:
    """Return whether the agent in a sandbox is of a version that is not spoken. False if that is not known."""
    if sandbox.state not in AWAKE_STATES:
        return False
    try:
        return registry.get_sandbox_provider(sandbox).has_outdated_agent(sandbox.ref)
    except (ProviderError, ImproperlyConfigured):
        return False


def mint_service_token(
    pk: UUID, *, aud: str, lxm: str, lifetime: timedelta = signing.DEFAULT_TOKEN_LIFETIME, now: datetime, actor: str = ""
) -> tuple[str, MintedToken]:
    """Mint a token with which the agent of a lease calls method `lxm` of service `aud`. Return the token and its row.

    Raise LeaseEnded, also if the lease ends before the token is recorded. The sandbox is not used, so the lease is not
    renewed."""
    lease = leasing.require_active(pk, now=now)
    checkpoint("may mint", lease)
    return signing.mint_service_token(
        lease.agent_did,
        aud=aud,
        lxm=lxm,
        lifetime=lifetime,
        now=now,
        holder=pk,
        actor=actor,
        fence=LeaseGuard(pk, clock_from(now)).fence,
    )


class LeaseClaim(Claim):
    """Renewal of a lease while an operation for it transfers state. The operation itself may grant the lease."""

    def __init__(self, lease: Lease, clock: Clock, *, lasts: timedelta = timedelta(0)) -> None:
        ttl = max(lasts + KILL_GRACE, CLAIM_TTL)
        super().__init__(Lease.objects.none(), deadline=lease.expires_at, clock=clock, ttl=ttl)
        self._lease = lease

    def _write(self, deadline: datetime, **changes: object) -> bool:
        try:
            self.deadline = leasing.renew(self._lease, now=self.clock(), lasts=self.ttl)
        except LeaseEnded:
            self.lost = True
        except Lease.DoesNotExist:
            pass  # not granted yet
        return not self.lost


@contextmanager
def use_lease(
    pk: UUID, *, now: datetime, spends: bool = False, lasts: timedelta = timedelta(0), ends_with_run: bool = False
) -> Iterator[SandboxRequest]:
    """Yield the sandbox request of an active lease, and renew the lease before and after the body of the `with`.

    The first renewal covers an operation of the length `lasts` and the time in which its process is killed, so that the lease
    does not end by its TTL while the operation goes on. A transfer of state that makes progress renews the lease, too. The max
    TTL limits both. A body that `ends_with_run` ends with the close of its run, which makes the second renewal.

    Raises LeaseEnded, also if the lease ended during the body. A sandbox that was lost during the body ends the lease.
    BudgetExhausted is raised when a budget of the lease is spent: if `spends`, before the body; otherwise only when the body
    starts or wakes a sandbox, or runs something in one after the budget's grace period. Without the check after the
    grace period, repeated file operations would keep a sandbox alive indefinitely."""
    clock = clock_from(now)
    found, (pool, sandbox), flags = sql.find_joined(
        Lease, LEASE_JOINS, [budgets.ANY_EXHAUSTED_SQL, LEASE_HAS_ALTERNATIVES_SQL], "leases_lease.id = %s", pk
    )
    lease = leasing.check_active(found, now=now)
    lease.pool = pool
    is_exhausted, has_alternatives = map(bool, flags)
    if spends and is_exhausted:
        budgets.require_budget(pk, now=now)
    if now + lasts + KILL_GRACE > lease.expires_at:
        leasing.renew(lease, now=clock(), lasts=lasts + KILL_GRACE)
    renewal = HolderRenewal(lambda at: leasing.build_renewal(lease, now=at))
    try:
        with hold(LeaseClaim(lease, clock, lasts=lasts)):
            request = build_sandbox_request(lease, now=clock(), check_budget=not spends, has_alternatives=has_alternatives)
            yield replace(request, renewal=renewal if ends_with_run else None, known=sandbox)
    except SandboxLost as lost:
        leasing.require_active(pk, now=clock())  # a lost sandbox of an ended lease is reported as LeaseEnded
        with transaction.atomic():
            leasing.end(pk, reason="lost", now=clock(), actor="provider", detail=str(lost))
        raise leasing.build_ended_error(Lease.objects.get(pk=pk), "lost") from lost
    except SandboxError:
        leasing.require_active(pk, now=clock())
        raise
    if not renewal.done:
        with log_connection_errors("lease not renewed", lease=str(pk)):
            leasing.renew(lease, now=clock())
