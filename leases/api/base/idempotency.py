"""Idempotency keys: a repeated POST gets the stored response.

The process that inserts the row of a key executes the request. Only successful responses are stored. An error frees the key;
if the process dies, its deadline frees the key, or the release of its instance (leases.sweeps.release_instance). An operation
that must not happen twice keeps its key in both cases if it may have started, and the error names the run with the known part
of the outcome."""

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.http import HttpResponse
from rest_framework.request import Request

from leases.api.base.renderers import JsonRenderer, encode_json
from leases.errors import Conflict, InvalidRequest
from leases.models import AgentKey, IdempotentRequest
from sandboxes.claims import Claim, hold
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import RetriesExhausted, retry_connection_errors
from sandboxes.errors import OutcomeUnknown
from sandboxes.lifecycle import checkpoint
from sandboxes.models import NEVER_STARTED, Run, RunOutcome

HEADER_NAME = "Idempotency-Key"
StatusAndBody = tuple[int, Mapping[str, Any]]
RUN_CLOSE_GRACE_PERIOD = timedelta(minutes=5)  # between the deadline of an open run and its end by a sweep
REPLAY_HEADERS = {"Idempotent-Replayed": "true"}
INTERRUPTED = "The first request with this Idempotency-Key was interrupted and may have had an effect. It is not repeated."
RequestHandler = Callable[[uuid.UUID], StatusAndBody]  # receives the id of the run that it may open
RunAnswer = Callable[[Run], StatusAndBody | None]  # answer of a request whose run has ended, None if the row does not suffice


class KeyReused(Conflict):
    """This Idempotency-Key was sent with another request."""

    code = "idempotency_key_reused"


class InProgress(Conflict):
    """The first request with this Idempotency-Key is still being served."""

    code = "idempotency_in_progress"
    retry_after = 1


def execute_once(
    request: Request,
    holder: AgentKey,
    act: RequestHandler,
    *,
    now: datetime,
    body: bytes = b"",
    max_duration: timedelta = timedelta(minutes=1),
    repeatable: bool = True,
    rebuild: RunAnswer | None = None,
) -> HttpResponse:
    """Call `act` and build the response; with an Idempotency-Key, once per key holder.

    After `max_duration`, without a transfer of state in between, an unfinished `act` counts as abandoned, and a repeated
    request is executed if the operation is `repeatable`. Otherwise its run may end the wait earlier: with the answer that
    `rebuild` makes of the ended run, or at once if the run shows that its process is dead. An ended run alone does not: the
    process may wait for the output of a background process, or destroy a sandbox. With `rebuild` the answer is InProgress
    while the run is open, until RUN_CLOSE_GRACE_PERIOD after its deadline. Raises KeyReused, InProgress, and OutcomeUnknown
    for an interrupted operation that is not repeatable."""
    key = request.META.get("HTTP_IDEMPOTENCY_KEY")
    if key is None:
        return _build_response(*act(uuid.uuid4()))
    if not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        raise InvalidRequest(HEADER_NAME, f"The header {HEADER_NAME} has 1 to 255 visible ASCII characters.")
    clock = clock_from(now)
    fingerprint = hashlib.sha256(f"{request.method} {request.get_full_path()}\n".encode() + body).hexdigest()
    row, claimed = _claim_key(holder, key, fingerprint, now=now, until=now + max_duration, repeatable=repeatable)
    if not claimed:
        return _replay_response(row, fingerprint, None if repeatable else _derive_run_id(holder, row), rebuild, now=now)
    checkpoint("key claimed", row)
    # After the deadline another process may have taken over with a new started_at. Its row must not be overwritten.
    own_row = IdempotentRequest.objects.filter(pk=row.pk, started_at=row.started_at, status_code=None)
    run_id = _derive_run_id(holder, row)
    try:
        with hold(Claim(own_row, deadline=row.deadline_at, clock=clock, ttl=max_duration)):
            status, data = act(run_id)
    except Exception:
        _settle(row, lambda: _record_failure(own_row, None if repeatable else run_id, now=clock()), clock)
        raise
    checkpoint("acted", row)
    response = _build_response(status, data)
    _settle(row, lambda: own_row.update(status_code=status, body=response.content.decode()), clock)
    return response


def _record_failure(own_row: QuerySet[IdempotentRequest], run_id: uuid.UUID | None, *, now: datetime) -> None:
    """Free the key of a failed request, or end its wait if the operation must not be repeated and may have started."""
    if run_id is None or not Run.objects.filter(pk=run_id).exclude(NEVER_STARTED).exists():
        own_row.delete()
    else:
        own_row.update(deadline_at=now)


def _settle(row: IdempotentRequest, record: Callable[[], object], clock: Clock) -> None:
    """Record the end of a request, with retries while the database does not respond.

    The client gets the outcome even if the key cannot be settled. The deadline of the key then ends the wait of repeated
    requests."""
    with suppress(RetriesExhausted):
        retry_connection_errors(record, "idempotency key not settled", clock=clock, key_row=row.pk)


def _claim_key(
    holder: AgentKey, key: str, fingerprint: str, *, now: datetime, until: datetime, repeatable: bool
) -> tuple[IdempotentRequest, bool]:
    """Return the row of this key, and whether the caller may execute the request."""
    columns = {
        "started_at": now,
        "deadline_at": until,
        "claimed_by": settings.INSTANCE,
        "expires_at": max(until, now + settings.IDEMPOTENCY_TTL),
    }
    for _ in range(5):
        try:
            with transaction.atomic():
                return IdempotentRequest.objects.create(key_holder=holder, key=key, fingerprint=fingerprint, **columns), True
        except IntegrityError:
            row = IdempotentRequest.objects.filter(key_holder=holder, key=key).first()
        if row is None:
            continue  # deleted by a concurrent request
        same_row = IdempotentRequest.objects.filter(pk=row.pk, started_at=row.started_at)
        if row.expires_at <= now:
            same_row.delete()
            continue
        abandoned = row.status_code is None and row.deadline_at <= now and row.fingerprint == fingerprint
        if not (abandoned and repeatable):
            return row, False
        if same_row.filter(status_code=None, deadline_at=row.deadline_at).update(**columns):
            row.started_at, row.deadline_at = now, until
            return row, True
    raise InProgress()


def _replay_response(
    row: IdempotentRequest, fingerprint: str, run_id: uuid.UUID | None, rebuild: RunAnswer | None, *, now: datetime
) -> HttpResponse:
    if row.fingerprint != fingerprint:
        raise KeyReused()
    if row.status_code is not None:
        return HttpResponse(row.body, status=row.status_code, content_type="application/json", headers=REPLAY_HEADERS)
    run = Run.objects.filter(pk=run_id).defer("stdout", "stderr").first() if run_id else None
    if run is not None and run.ended_at is not None and rebuild is not None and (answer := rebuild(run)):
        return _build_response(*answer, headers=REPLAY_HEADERS)
    is_awaited = rebuild is not None and run is not None and _is_close_awaited(run, now=now)
    if run_id is None or is_awaited or (row.deadline_at > now and not _is_process_dead(run)):
        raise InProgress()
    if run is None:
        raise OutcomeUnknown(INTERRUPTED)
    raise OutcomeUnknown(INTERRUPTED, run_id=str(run.pk), outcome=run.outcome, exit_code=run.exit_code)


def _is_close_awaited(run: Run, *, now: datetime) -> bool:
    """Return whether a sweep is to close an open run: with the result of its command, or at its deadline."""
    return run.ended_at is None and now < run.deadline_at + RUN_CLOSE_GRACE_PERIOD


def _is_process_dead(run: Run | None) -> bool:
    """Return whether the ended run of an unfinished request shows that its process will not respond."""
    return run is not None and run.ended_at is not None and (run.outcome == RunOutcome.LOST or run.released)


def _derive_run_id(holder: AgentKey, row: IdempotentRequest) -> uuid.UUID:
    """Return the id of the run that this request may open.

    The id is derived from the row, so that it is known after the process has died. The random digest makes it unique across
    installations. The first one stays when the key is rotated."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{holder.first_digest} {row.pk}")


def _build_response(status: int, data: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Render at once: the body that is stored and replayed is then the body that was sent."""
    return HttpResponse(encode_json(data), status=status, content_type=JsonRenderer.media_type, headers=headers)
