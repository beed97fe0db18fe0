"""Database checks of terminals and previews. Runs in the stream server's database threads."""

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db.models import F

from leases import execution, leasing
from leases.errors import PreviewsForbidden, TerminalNotFound
from leases.models import Lease, LeaseStatus
from leases.stream_server.grants import PreviewGrant, TerminalGrant
from sandboxes import processes, suspension
from sandboxes.errors import ProviderCallFailed, SandboxNotHeld
from sandboxes.hosts import registry
from sandboxes.models import ALIVE_STATES, Process, Sandbox
from sandboxes.providers.errors import ProviderError


def find_terminal(lease: UUID, process: UUID) -> Process:
    """Return the process of a terminal. Raise TerminalNotFound."""
    found = processes.find_by_holder(lease).filter(pk=process, is_terminal=True).select_related("sandbox").first()
    if found is None:
        raise TerminalNotFound()
    return found


def open_terminal(grant: TerminalGrant, *, now: datetime) -> str:
    """Return the gateway's id of the agent that runs a terminal, and renew the lease unless the grant is read-only.

    Raise TerminalNotFound, ProcessEnded, LeaseEnded, BudgetExhausted, ProviderCallFailed."""
    process = find_terminal(grant.lease, grant.process)
    if grant.read_only:
        leasing.require_active(grant.lease, now=now)
        return processes.find_terminal_agent(process, now=now)
    with execution.use_lease(grant.lease, now=now, spends=True):
        return processes.find_terminal_agent(process, now=now)


def use_terminal(grant: TerminalGrant, *, now: datetime) -> None:
    """Renew the lease, and postpone the eviction and suspension of its sandbox, because of input to a terminal.

    Raise the errors of `open_terminal`."""
    open_terminal(grant, now=now)
    processes.postpone_eviction(grant.process, now=now)


def find_preview_agent(grant: PreviewGrant, *, now: datetime) -> str:
    """Return the gateway's id of the agent of a lease's sandbox. The lease is not renewed.

    Raise LeaseEnded, PreviewsForbidden, SandboxNotHeld without a running sandbox, ProviderCallFailed."""
    lease = leasing.require_active(grant.lease, now=now)
    require_previews(lease)
    sandbox = Sandbox.objects.filter(holder=lease.pk, state__in=ALIVE_STATES, lost_at__isnull=True).first()
    if sandbox is None:
        raise SandboxNotHeld("The sandbox is not running.")
    registry.require_local(sandbox)
    provider = registry.get_sandbox_provider(sandbox)
    try:
        suspension.ensure_awake(sandbox, provider, now=now)
        agent_id = provider.find_agent_id(sandbox.ref)
    except ProviderError as failed:
        raise ProviderCallFailed(f"The sandbox could not be reached: {failed}") from failed
    if agent_id is None:
        raise ProviderCallFailed("The agent of the sandbox cannot be reached.")
    return agent_id


def require_previews(lease: Lease) -> None:
    """Raise PreviewsForbidden unless the policy of the lease's environment type allows previews."""
    policy = lease.environment_type.policy
    if policy is None or not policy.previews:
        raise PreviewsForbidden()


def filter_active_leases(leases: Collection[UUID], *, now: datetime) -> set[UUID]:
    """Return those of these leases that are active."""
    return {*Lease.objects.filter(pk__in=leases, status=LeaseStatus.ACTIVE, expires_at__gt=now).values_list("pk", flat=True)}


def filter_open_terminals(pks: Collection[UUID]) -> set[UUID]:
    """Return those of these processes that run in a sandbox of their lease."""
    running = Process.objects.filter(pk__in=pks, ended_at__isnull=True, sandbox__holder=F("holder"))
    return {*running.values_list("pk", flat=True)}
