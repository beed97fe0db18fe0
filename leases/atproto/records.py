"""Records of agents in their AT Protocol repositories: one for each action of a turn, and those that agents create.

A record is stored as a row with its key before the first request, for a turn in the transaction that stores its answer. A sweep
repeats the request until the record exists. The key makes each repetition harmless: a record is created once, wherever the
control plane died."""

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import structlog
from django.db.models import F, OuterRef, QuerySet, Subquery

from leases.atproto import accounts
from leases.atproto.models import AtprotoAccount, AtprotoRecord, RecordStatus
from leases.atproto.service import RecordReference, RepositoryService, ServiceError
from leases.errors import InvalidRequest
from leases.models import Lease, Turn
from leases.patterns import require_match
from sandboxes.db.clock import clock_from, format_timestamp
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.errors import SandboxError
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Policy
from sandboxes.server_calls import Attempt, Server, ServerCalls, list_due, run_here
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
KEY_PATTERN = r"(?!\.\.?\Z)[A-Za-z0-9._:~-]{1,320}"  # https://atproto.com/specs/record-key
KEY_DESCRIPTION = "a record key: 1 to 320 letters, digits and . _ : ~ -, neither . nor .."
MAX_RECORD_BYTES = 64 << 10
MAX_SAFE_INTEGER = (1 << 53) - 1  # https://atproto.com/specs/data-model
TID_ALPHABET = "234567abcdefghijklmnopqrstuvwxyz"
TID_CLOCK_BITS = 10
ATTEMPT_CLAIM = timedelta(minutes=3)  # longer than the requests of one attempt take
MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL = timedelta(seconds=30), timedelta(hours=1)
GIVE_UP_AFTER = timedelta(hours=24)
# At which the agent of a record has an account; None without an account.
SERVER_URL = Subquery(AtprotoAccount.objects.filter(agent_did=OuterRef("agent_did")).values("service_url")[:1])
NOT_PERMITTED = "The policy of the environment type does not permit this collection."


class RecordRefused(Exception):
    """The record will not be created, however often the request is repeated."""


# --- rows ---------------------------------------------------------------------------------------------------------


def insert_for_turn(turn: Turn, action: Mapping[str, Any], *, now: datetime) -> None:
    """Insert the record of a turn's action. Call it in the transaction that stores the answer."""
    lease = turn.lease
    collection = lease.environment_type.turn_collection
    value = {
        "$type": collection,
        "environment": lease.environment_id,
        "environmentType": lease.environment_type_id,
        "turn": turn.number,
        "action": to_record_value(action),
        "createdAt": format_timestamp(now),
    }
    key = build_tid(turn.started_at, f"{lease.pk}/{turn.number}")
    row = _build_row(lease, collection, key, json.dumps(value), turn_number=turn.number, now=now)
    # A conflict does not prevent the turn from ending: an agent that took the key before loses its own record.
    AtprotoRecord.objects.bulk_create([row], ignore_conflicts=True)


def _build_row(
    lease: Lease, collection: str, key: str, text: str, *, turn_number: int | None = None, now: datetime
) -> AtprotoRecord:
    return AtprotoRecord(
        lease=lease, turn_number=turn_number, agent_did=lease.agent_did, collection=collection, record_key=key,
        value_text=text, created_at=now, next_attempt_at=now, give_up_at=now + GIVE_UP_AFTER,
    )  # fmt: skip


def create_for_agent(
    lease: Lease, collection: str, value: Mapping[str, Any], *, key: str = "", now: datetime, actor: str = ""
) -> AtprotoRecord:
    """Create a record for the agent of a lease, and return its row, which is pending if the server does not answer.

    Idempotent for a key and content. Raise InvalidRequest that names the field."""
    if collection not in _list_collections(lease):
        raise InvalidRequest("collection", NOT_PERMITTED)
    if value.get("$type", collection) != collection:
        raise InvalidRequest("record", "$type is not the collection.")
    value = {"$type": collection, **value}
    text = json.dumps(value)
    if json.dumps(to_record_value(value)) != text:
        raise InvalidRequest("record", "AT Protocol has integers of at most 53 bits, and no floating-point numbers.")
    if len(text) > MAX_RECORD_BYTES:
        raise InvalidRequest("record", f"More than {MAX_RECORD_BYTES} bytes.")
    key = key or build_tid(now, f"{lease.pk} {collection} {text}")
    require_match("key", key, KEY_PATTERN, KEY_DESCRIPTION)
    AtprotoRecord.objects.bulk_create([_build_row(lease, collection, key, text, now=now)], ignore_conflicts=True)
    row = AtprotoRecord.objects.get(agent_did=lease.agent_did, collection=collection, record_key=key)
    if row.value != value:
        raise InvalidRequest("key", "Another record was created with this key.")
    if row.status == RecordStatus.PENDING:
        attempt(row.pk, now=now, actor=actor)
        row.refresh_from_db()
    return row


def retry(row: AtprotoRecord, *, now: datetime, actor: str = "") -> bool:
    """Let the sweep repeat the request of a failed record, for another GIVE_UP_AFTER. Return False if it has not failed."""
    failed = AtprotoRecord.objects.filter(pk=row.pk, status=RecordStatus.FAILED)
    repeated = failed.update(status=RecordStatus.PENDING, ended_at=None, next_attempt_at=now, give_up_at=now + GIVE_UP_AFTER)
    return bool(repeated)


# --- requests -----------------------------------------------------------------------------------------------------


def create_due_records(*, now: datetime, limit: int = 500) -> SweepResult:
    """Request the creation of the records that are due, up to `limit` at each server, and at different servers in parallel."""
    result = SweepResult()
    CALLS.run(list_due(find_due(now=now), SERVER_URL, "next_attempt_at", limit=limit), clock=clock_from(now), result=result)
    return result


def _postpone(server: Server, *, now: datetime) -> int:
    """Make the due records for a server that does not answer due later."""
    others = find_due(now=now).filter(agent_did__in=AtprotoAccount.objects.filter(service_url=server).values("agent_did"))
    return others.update(next_attempt_at=now + MIN_RETRY_INTERVAL)


def find_due(*, now: datetime) -> QuerySet[AtprotoRecord]:
    """Pending records whose next attempt is due, the longest overdue first."""
    return AtprotoRecord.objects.filter(status=RecordStatus.PENDING, next_attempt_at__lte=now).order_by("next_attempt_at")


def attempt(pk: UUID, *, now: datetime, actor: str = "") -> str:
    """Request the creation of a pending record once, and return the result as one word.

    An error is stored in the row. The request is repeated later, unless the server refused the record."""
    return run_here(_attempt(pk, now=now, actor=actor))


def _attempt(pk: UUID, *, now: datetime, actor: str = "sweep") -> Attempt[str]:
    clock = clock_from(now)
    pending = AtprotoRecord.objects.filter(pk=pk, status=RecordStatus.PENDING)
    row = pending.select_related("lease__environment_type__policy").first()
    if row is None or not _claim(row, until=now + ATTEMPT_CLAIM, now=now):
        return "lost race"
    checkpoint("record claimed", row)
    try:
        reference = yield from _request_creation(row, now=clock())
    except (ServiceError, RecordRefused, SandboxError, accounts.AccountPasswordUnreadable) as error:
        return _note_error(row, error, claimed_until=now + ATTEMPT_CLAIM, now=clock())
    checkpoint("record created", row)
    created = pending.update(  # without the claim: any attempt may learn that the record exists
        status=RecordStatus.CREATED, uri=reference.uri, cid=reference.cid, ended_at=clock(), next_attempt_at=None, error=""
    )
    if created:
        log.info("record created", agent=row.agent_did, uri=reference.uri, actor=actor)
    return "created" if created else "lost race"


def _claim(row: AtprotoRecord, *, until: datetime, now: datetime) -> bool:
    pending = AtprotoRecord.objects.filter(pk=row.pk, status=RecordStatus.PENDING)
    with end_if_unanswered(partial(pending.filter(next_attempt_at=until).update, next_attempt_at=now), f"record {row.pk}"):
        due = pending.filter(next_attempt_at=row.next_attempt_at)
        return bool(due.update(next_attempt_at=until, attempts=F("attempts") + 1))


def _request_creation(row: AtprotoRecord, *, now: datetime) -> Attempt[RecordReference]:
    if row.collection not in _list_collections(row.lease):  # of the policy as it is now
        raise RecordRefused(NOT_PERMITTED)
    account = AtprotoAccount.objects.filter(agent_did=row.agent_did).first()
    if account is None:
        raise ServiceError("The agent has no AT Protocol account.", retryable=True)
    service = RepositoryService(account.service_url)
    create = partial(service.create_record, row.agent_did, row.collection, row.record_key, row.value)
    authorization = yield from accounts.authorize(account, now=now)
    try:
        return (yield partial(create, authorization=authorization))
    except ServiceError as error:
        if not error.expired:
            raise
    renewed = yield from accounts.renew_authorization(account, authorization, now=now)
    return (yield partial(create, authorization=renewed))


def _note_error(row: AtprotoRecord, error: Exception, *, claimed_until: datetime, now: datetime) -> str:
    claimed = AtprotoRecord.objects.filter(pk=row.pk, status=RecordStatus.PENDING, next_attempt_at=claimed_until)
    message = str(error)
    log.warning("record not created", record=str(row.pk), agent=row.agent_did, error=message)
    is_final = isinstance(error, RecordRefused) or (isinstance(error, ServiceError) and not error.retryable)
    if is_final or now >= row.give_up_at:
        claimed.update(status=RecordStatus.FAILED, ended_at=now, next_attempt_at=None, error=message)
        return "refused"
    interval = min(max((now - row.created_at) / 5, MIN_RETRY_INTERVAL), MAX_RETRY_INTERVAL)
    stated = error.retry_at if isinstance(error, ServiceError) else None
    next_attempt_at = min(max(stated or now, now + interval), now + MAX_RETRY_INTERVAL)
    claimed.update(next_attempt_at=next_attempt_at, error=message)
    return "postponed"


CALLS = ServerCalls(_attempt, failure="postponed", postpone=_postpone)


def _list_collections(lease: Lease) -> list[str]:
    policy: Policy | None = lease.environment_type.policy
    return policy.record_collections if policy else []


# --- values -------------------------------------------------------------------------------------------------------


def to_record_value(value: Any) -> Any:
    """Return JSON without floats and long integers, which the data model lacks: whole numbers as int, others as string."""
    if isinstance(value, Mapping):
        return {name: to_record_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [to_record_value(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) > MAX_SAFE_INTEGER):
        return str(value)
    return value


def build_tid(at: datetime, source: str) -> str:
    """Build a timestamp identifier: the same for the same time and source. Sorts by time.

    https://atproto.com/specs/tid: 53 bits of microseconds since 1970 and 10 bits that tell apart those of one microsecond, here
    from a digest of `source`, in base32 of 13 characters."""
    microseconds = round(at.timestamp() * 1_000_000)
    clock_id = int.from_bytes(hashlib.sha256(source.encode()).digest()[:2]) & ((1 << TID_CLOCK_BITS) - 1)
    number = microseconds << TID_CLOCK_BITS | clock_id
    return "".join(TID_ALPHABET[number >> 5 * place & 31] for place in reversed(range(13)))
