"""Database checks of terminals and previews. Runs in the stream server's database threads."""

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db.models import F

from leases import execution, leasing
from leases.errors import GrantEnded, LeaseEnded, PreviewsForbidden, TerminalNotFound
from leases.grants import issuers
from leases.grants.issuers import Right
from leases.models import Lease, LeaseStatus
from leases.stream_server.grants import EXPIRED, PreviewGrant, TerminalGrant, has_expired
from sandboxes import processes, suspension
from sandboxes.errors import ProcessEnded, ProviderCallFailed, SandboxAsleep, SandboxError
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

    Raise GrantEnded, TerminalNotFound, ProcessEnded, LeaseEnded, BudgetExhausted, ProviderCallFailed."""
    require_alive(grant, now=now)
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

    Raise GrantEnded, LeaseEnded, PreviewsForbidden, SandboxAsleep without a running sandbox, ProviderCallFailed."""
    require_alive(grant, now=now)
    lease = leasing.require_active(grant.lease, now=now)
    require_previews(lease)
    sandbox = Sandbox.objects.filter(holder=lease.pk, state__in=ALIVE_STATES, lost_at__isnull=True).first()
    if sandbox is None:
        raise SandboxAsleep
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


def require_alive(grant: TerminalGrant | PreviewGrant, *, now: datetime) -> None:
    """Raise GrantEnded if the URL has expired, or its issuer has lost the right to it. Raise Lease.DoesNotExist."""
    if has_expired(grant, now=now):
        raise GrantEnded(EXPIRED)
    agent_did = Lease.objects.values_list("agent_did", flat=True).get(pk=grant.lease)
    issuers.require_alive(Right(grant.issuer, agent_did=agent_did), now=now)


def find_ended(
    grants: Collection[TerminalGrant | PreviewGrant], *, now: datetime
) -> dict[TerminalGrant | PreviewGrant, SandboxError]:
    """Return those of these grants that permit nothing any more, with the error of a new connection.

    Two queries for all leases and issuers, another one if there are console users, and one if there are terminals."""
    agents = dict(
        Lease.objects.filter(pk__in={grant.lease for grant in grants}, status=LeaseStatus.ACTIVE, expires_at__gt=now)
        .values_list("pk", "agent_did")
    )  # fmt: skip
    rights = {grant: Right(grant.issuer, agent_did=agents[grant.lease]) for grant in grants if grant.lease in agents}
    alive = issuers.find_alive({*rights.values()}, now=now)
    running = _filter_running({grant.process for grant in grants if isinstance(grant, TerminalGrant)})
    ended = dict[TerminalGrant | PreviewGrant, SandboxError]()
    for grant in grants:
        if grant not in rights:
            ended[grant] = LeaseEnded("The lease has ended.")
        elif rights[grant] not in alive:
            ended[grant] = GrantEnded()
        elif isinstance(grant, TerminalGrant) and grant.process not in running:
            ended[grant] = ProcessEnded("The terminal has ended.")
    return ended


def _filter_running(pks: Collection[UUID]) -> set[UUID]:
    """Return those of these processes that run in a sandbox of their lease."""
    if not pks:
        return set()
    running = Process.objects.filter(pk__in=pks, ended_at__isnull=True, sandbox__holder=F("holder"))
    return {*running.values_list("pk", flat=True)}
