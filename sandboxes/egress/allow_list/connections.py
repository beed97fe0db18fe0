"""Authorization and rows of connections to allowed domains. Runs in the proxy's database threads.

A sandbox is identified by its socket slot, as for model calls. Deadlines of open rows are extended while the proxy lives, and a
sweep closes the rows of a proxy that died."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F, QuerySet, Sum

from sandboxes.db import sql
from sandboxes.egress.allow_list import credentials
from sandboxes.egress.allow_list.domains import is_allowed
from sandboxes.egress.authorization import SLOT_CONDITION_SQL, CallerIdentity, identify_caller
from sandboxes.egress.refusals import CallRefused
from sandboxes.models import EgressConnection, Policy, Sandbox

HEARTBEAT_TIMEOUT = timedelta(minutes=3)  # a connection not seen for this long is treated as closed
MINUTE = timedelta(minutes=1)
MAX_ATTEMPTS_PER_MINUTE = 600  # per lease, including refused ones: bounds the number of rows
MAX_LOGGED_REFUSALS_PER_MINUTE = 30  # per lease; further refusals of the policy are not stored
RETENTION = timedelta(days=30)  # of the rows of ended connections
PROXY_EVENTS = ("admitted", "refused")  # counts of the proxy
Outcome = EgressConnection.Outcome


@dataclass
class ConnectionResult:
    """State of a connection, for its row. `address` is the address to which the proxy connected."""

    outcome: EgressConnection.Outcome = Outcome.CUT
    code: str = ""
    address: str | None = None
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class Admission:
    """An admitted connection: its row and caller, and the bytes that the lease's ended connections leave."""

    row: EgressConnection
    caller: CallerIdentity
    policy: Policy
    remaining_lease_bytes: int
    credential: credentials.Credential | None = None  # added to a plain-http request, which the proxy then sends over TLS


def open_connection(
    slot: int, connection_id: str, domain: str, port: int, *, is_plain: bool = False, now: datetime
) -> Admission:
    """Authorize a connection and write its row. Raise CallRefused, after recording the refusal, if the policy forbids it.

    `is_plain`: a plain-http request, to which a credential of the domain is added.

    The lock on the sandbox's row serializes the attempts of the sandbox, so that the limit of concurrent connections holds."""
    with transaction.atomic():
        sql.lock_rows(Sandbox, SLOT_CONDITION_SQL, slot)
        caller = identify_caller(slot, now=now)
        sandbox, policy = caller.sandbox, caller.sandbox.rules
        row = EgressConnection(
            connection_id=connection_id, sandbox=sandbox, holder=caller.holder, agent_did=sandbox.agent_did,
            environment_id=sandbox.environment_id, run_id=caller.run, domain=domain, port=port, started_at=now,
            deadline_at=now + HEARTBEAT_TIMEOUT,
        )  # fmt: skip
        remaining = (policy.max_lease_mib << 20) - sum_lease_bytes(row)
        try:
            _check(row, policy, remaining, now=now)
        except CallRefused as error:
            _record_refusal(row, error)
            refusal = error
        else:
            credential = credentials.find_credential(policy, domain) if is_plain else None
            row.save(force_insert=True)
            return Admission(row, caller, policy, remaining, credential)
    raise refusal  # after the commit, because an exception inside would roll the refusal's row back


def _check(row: EgressConnection, policy: Policy, remaining: int, *, now: datetime) -> None:
    if not policy.allowed_domains:
        raise CallRefused(403, "no_allow_list", "The policy of this sandbox allows no network access.")
    if not is_allowed(row.domain, row.port, policy.allowed_domains):
        message = f"{row.domain}:{row.port} is not on the allow list of this sandbox's policy."
        raise CallRefused(403, "domain_not_allowed", message)
    attempts = EgressConnection.objects.filter(holder=row.holder, started_at__gt=now - MINUTE)
    if attempts.count() >= MAX_ATTEMPTS_PER_MINUTE:
        raise CallRefused(429, "too_many_connections", f"Rate limit reached: {MAX_ATTEMPTS_PER_MINUTE} connections per minute.")
    open_rows = EgressConnection.objects.filter(holder=row.holder, ended_at__isnull=True, deadline_at__gt=now)
    if open_rows.count() >= policy.max_connections:
        message = f"Concurrency limit reached: {policy.max_connections} open connections."
        raise CallRefused(429, "too_many_at_once", message)
    if remaining <= 0:
        raise CallRefused(403, "lease_bytes_exceeded", f"This lease has transferred its limit of {policy.max_lease_mib:,} MiB.")


def sum_lease_bytes(row: EgressConnection) -> int:
    """Return the bytes of the ended connections of a row's lease."""
    ended = EgressConnection.objects.filter(holder=row.holder, ended_at__isnull=False)
    return int(ended.aggregate(total=Sum(F("sent_bytes") + F("received_bytes")))["total"] or 0)


def _record_refusal(row: EgressConnection, refusal: CallRefused) -> None:
    row.outcome, row.code, row.ended_at = Outcome.REFUSED, refusal.code, row.started_at
    recent = EgressConnection.objects.filter(holder=row.holder, outcome=row.outcome, started_at__gt=row.started_at - MINUTE)
    if recent.count() < MAX_LOGGED_REFUSALS_PER_MINUTE:
        row.save(force_insert=True)


def settle(row: EgressConnection, result: ConnectionResult, *, now: datetime) -> bool:
    """Close an open connection's row. Return whether this call closed it."""
    return bool(
        EgressConnection.objects.filter(pk=row.pk, ended_at__isnull=True).update(
            ended_at=now, outcome=result.outcome, code=result.code, address=result.address,
            sent_bytes=result.sent_bytes, received_bytes=result.received_bytes,
        )
    )  # fmt: skip


def record_progress(results: Mapping[int, ConnectionResult], *, now: datetime) -> None:
    """Record the bytes of open connections (row key -> state), and extend their deadlines."""
    for pk, result in results.items():
        EgressConnection.objects.filter(pk=pk, ended_at__isnull=True).update(
            deadline_at=now + HEARTBEAT_TIMEOUT, address=result.address,
            sent_bytes=result.sent_bytes, received_bytes=result.received_bytes,
        )  # fmt: skip


def find_overdue(*, now: datetime) -> QuerySet[EgressConnection]:
    """Return open rows past their deadline: the proxy process has died."""
    return EgressConnection.objects.filter(ended_at__isnull=True, deadline_at__lt=now).order_by("deadline_at")


def close_abandoned(*, now: datetime, limit: int = 200) -> int:
    """Close up to `limit` overdue rows as lost. Return the number closed."""
    overdue = [*find_overdue(now=now).values_list("pk", flat=True)[:limit]]
    return EgressConnection.objects.filter(pk__in=overdue, ended_at__isnull=True).update(ended_at=now, outcome=Outcome.LOST)


def find_expired(*, now: datetime) -> QuerySet[EgressConnection]:
    """Return the rows of ended connections that started before RETENTION."""
    return EgressConnection.objects.filter(started_at__lt=now - RETENTION, ended_at__isnull=False).order_by("started_at")
