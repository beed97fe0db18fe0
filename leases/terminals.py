"""Terminals of a lease: programs with a terminal in its sandbox, and URLs to connect to them."""

from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from leases import execution, leasing
from leases.grants.issuers import Issuer
from leases.stream_server import access, address
from leases.stream_server.grants import PreviewGrant, TerminalGrant
from sandboxes import processes
from sandboxes.agent.protocol import TerminalSize
from sandboxes.db.clock import clock_from
from sandboxes.errors import ProcessEnded
from sandboxes.models import Process
from sandboxes.processes import ProcessSpec
from sandboxes.providers import get_default_provider_name, get_provider
from sandboxes.providers.errors import Rejected

DEFAULT_COMMAND = ("/bin/bash", "-l")
DEFAULT_SIZE = TerminalSize(rows=24, columns=80)
TERMINAL_ENVIRONMENT = {"TERM": "xterm-256color"}


def open_terminal(pk: UUID, spec: ProcessSpec, *, now: datetime, actor: str = "") -> Process:
    """Start a program with a terminal in the sandbox of a lease, which is started or woken first. Return its process.

    Raise LeaseEnded, BudgetExhausted, StreamServerUnavailable, Rejected where the sandbox has no terminals, and the errors of
    start_process."""
    clock = clock_from(now)
    lease = leasing.require_active(pk, now=now)
    if not get_provider(lease.pool.provider or get_default_provider_name()).has_terminals:
        raise Rejected("Sandboxes of this provider have no terminals.")
    address.get_base_url()  # clients connect to the stream server
    spec = replace(spec, env=TERMINAL_ENVIRONMENT | dict(spec.env), terminal=spec.terminal or DEFAULT_SIZE)
    with execution.use_lease(pk, now=now, spends=True) as request:
        return processes.start_process(request, spec, now=clock(), actor=actor)


def build_terminal_url(
    pk: UUID, process_id: UUID, *, read_only: bool, lifetime: timedelta, issuer: Issuer, actor: str, now: datetime
) -> tuple[str, TerminalGrant]:
    """Return a URL to connect to a terminal, and its grant.

    Raise LeaseEnded, TerminalNotFound, ProcessEnded, StreamServerUnavailable."""
    leasing.require_active(pk, now=now)
    process = access.find_terminal(pk, process_id)
    if process.ended_at is not None:
        raise ProcessEnded()
    return grant_access(pk, process_id, read_only=read_only, lifetime=lifetime, issuer=issuer, actor=actor, now=now)


def grant_access(
    pk: UUID, process_id: UUID, *, read_only: bool, lifetime: timedelta, issuer: Issuer, actor: str, now: datetime
) -> tuple[str, TerminalGrant]:
    """Like `build_terminal_url`, for a terminal of this lease that is known to exist."""
    grant = TerminalGrant(pk, process_id, address.compute_end(now, lifetime), read_only, actor, issuer)
    return address.build_terminal_url(grant), grant


def build_preview_url(pk: UUID, port: int, *, lifetime: timedelta, key_id: int, now: datetime) -> tuple[str, PreviewGrant]:
    """Return a URL that leads to a TCP port in the sandbox of a lease, and its grant, which is issued by an API key.

    Raise LeaseEnded, PreviewsForbidden, StreamServerUnavailable."""
    access.require_previews(leasing.require_active(pk, now=now))
    grant = PreviewGrant(pk, port, address.compute_end(now, lifetime), key_id)
    return address.build_preview_url(grant), grant
