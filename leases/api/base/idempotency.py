"""Idempotency keys: a repeated POST gets the stored response.

The process that inserts the row of a key executes the request. Only successful responses are stored. A refusal frees the key.
After any other error, such as a lost connection to the database, the operation may have been committed: the row stays, and the
same request takes it over. What the operation creates has an id that is derived from the row, and is found by it. If the
process dies, its deadline lets the same request take over, or the release of its instance (leases.sweeps.release_instance).
An operation that must not happen twice keeps its key in all these cases if it may have started, and the error names the run
with the known part of the outcome.

The id that a caller chooses for its run takes the place of the key. It belongs to one key holder, and stays in use as long as
the run is stored."""

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.http import Http404, HttpResponse
from rest_framework.exceptions import APIException
from rest_framework.request import Request

from leases import run_ids
from leases.api.base.renderers import JsonRenderer, encode_json
from leases.errors import Conflict, InvalidRequest
from leases.models import AgentKey, IdempotentRequest
from sandboxes import deferred_writes
from sandboxes.claims import Claim, hold
from sandboxes.db import dialect
from sandboxes.db.clock import Clock, clock_from
from sandboxes.errors import OutcomeUnknown, ResultPending, RunExists, SandboxError
from sandboxes.lifecycle import checkpoint
from sandboxes.models import NEVER_STARTED, Run, RunOutcome
from sandboxes.providers.errors import ProviderError
from sandboxes.runs import abandoned
from sandboxes.storage.base import StoreError

HEADER_NAME = "Idempotency-Key"
StatusAndBody = tuple[int, Mapping[str, Any]]
RUN_CLOSE_GRACE_PERIOD = timedelta(minutes=5)  # between the deadline of an open run and its end by a sweep
REPLAY_HEADERS = {"Idempotent-Replayed": "true"}
INTERRUPTED = "The first request with this {} was interrupted and may have had an effect. It is not repeated."
REFUSALS = (SandboxError, ProviderError, StoreError, APIException, Http404, PermissionDenied)
RequestHandler = Callable[[uuid.UUID], StatusAndBody]  # receives the id of the run that it may open
RunAnswer = Callable[[Run], StatusAndBody | None]  # answer of a request whose run has ended, None if the row does not suffice


class KeyReused(Conflict):
    """This Idempotency-Key was sent with another request."""

    code = "idempotency_key_reused"


class InProgress(Conflict):
    """The first request with this Idempotency-Key is still being served."""

    code = "idempotency_in_progress"
    retry_after = 1


@dataclass(frozen=True)
class ChosenRunId:
    """Id that a caller chose for its run. `own_runs` are the runs that the caller may read."""

    run_id: uuid.UUID
    own_runs: QuerySet[Run]


def build_chosen_id(data: Mapping[str, Any], own_runs: QuerySet[Run]) -> ChosenRunId | None:
    """Return the `run_id` of a validated body."""
    run_id = data.get("run_id")
    return ChosenRunId(run_id, own_runs) if run_id else None


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
    chosen: ChosenRunId | None = None,
) -> HttpResponse:
    """Call `act` and build the response; with an Idempotency-Key, once per key holder, and with a chosen id, once at all.

    After `max_duration`, without a transfer of state in between, an unfinished `act` counts as abandoned, and a repeated
    request is executed if the operation is `repeatable`. Otherwise its run may end the wait earlier: with the answer that
    `rebuild` makes of the ended run, or at once if the run shows that its process is dead. An ended run alone does not: the
    process may wait for the output of a background process, or destroy a sandbox. With `rebuild` the answer is InProgress
    while the run is open, until RUN_CLOSE_GRACE_PERIOD after its deadline; a run that its process has abandoned is closed with
    the result that its sandbox retained, if there is one. Raises KeyReused, InProgress, and OutcomeUnknown for an interrupted
    operation that is not repeatable. A chosen id of a run of others raises RunExists; one of an own run whose response is not
    stored any more does so, too, unless `rebuild` makes the answer."""
    key = request.META.get("HTTP_IDEMPOTENCY_KEY")
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        raise InvalidRequest(HEADER_NAME, f"The header {HEADER_NAME} has 1 to 255 visible ASCII characters.")
    if chosen is not None:
        key = f"run {chosen.run_id}"  # the space sets it apart from keys of clients
        if not IdempotentRequest.objects.filter(key_holder=holder, key=key, expires_at__gt=now).exists():
            run = chosen.own_runs.filter(pk=chosen.run_id).first()
            if run is not None:
                return _answer_stored_run(run, rebuild)
            run_ids.require_unused(chosen.run_id)
    if key is None:
        return _build_response(*act(uuid.uuid4()))
    clock = clock_from(now)
    fingerprint = hashlib.sha256(f"{request.method} {request.get_full_path()}\n".encode() + body).hexdigest()
    run_id = chosen.run_id if chosen else None
    own_claim = IdempotentRequest.objects.filter(
        key_holder=holder, key=key, claimed_by=settings.INSTANCE, started_at=now, status_code=None
    )
    with deferred_writes.end_if_unanswered(own_claim.delete, "idempotency key"):
        row, claimed = _claim_key(holder, key, fingerprint, run_id, now=now, until=now + max_duration, repeatable=repeatable)
    own_runs = chosen.own_runs if chosen else Run.objects.all()
    own_run = own_runs.filter(pk=_derive_run_id(holder, row))
    if not claimed:
        return _replay_response(row, fingerprint, None if repeatable else own_run, rebuild, clock=clock)
    checkpoint("key claimed", row)
    # After the deadline another process may have taken over with a new started_at. Its row must not be overwritten.
    own_row = IdempotentRequest.objects.filter(pk=row.pk, started_at=row.started_at, status_code=None)
    try:
        with hold(Claim(own_row, deadline=row.deadline_at, clock=clock, ttl=max_duration)):
            status, data = act(_derive_run_id(holder, row))
    except Exception as failed:
        is_refusal = isinstance(failed, REFUSALS)
        _settle(
            row, lambda: _record_failure(own_row, None if repeatable else own_run, is_refusal=is_refusal, now=clock()), clock
        )
        if isinstance(failed, ResultPending) and rebuild is not None:
            detail = "The operation has ended, and its result is not recorded yet."
            raise InProgress(detail, run_id=failed.extra["run_id"]) from failed
        raise
    checkpoint("acted", row)
    response = _build_response(status, data)
    _settle(row, lambda: own_row.update(status_code=status, body=response.content.decode()), clock)
    return response


def _answer_stored_run(run: Run, rebuild: RunAnswer | None) -> HttpResponse:
    """Answer a request whose run is stored, and whose response is not. Raise RunExists if the answer is not known."""
    if run.ended_at is not None and rebuild is not None and (answer := rebuild(run)):
        return _build_response(*answer, headers=REPLAY_HEADERS)
    detail = ""
    if run.outcome == RunOutcome.FAILED and run.exit_code is None:
        detail = f"The run with this run_id ended before its command began. Choose another run_id to try again. {run.note}"
    raise RunExists(detail, run_id=str(run.pk), outcome=run.outcome, exit_code=run.exit_code)


def _record_failure(
    own_row: QuerySet[IdempotentRequest], own_run: QuerySet[Run] | None, *, is_refusal: bool, now: datetime
) -> None:
    """Free the key of a failed request, or end its wait if the operation may have had an effect.

    `own_run` is that of an operation that must not be repeated."""
    may_have_acted = not is_refusal if own_run is None else own_run.exclude(NEVER_STARTED).exists()
    if may_have_acted:
        own_row.update(deadline_at=now)
    else:
        own_row.delete()


def _settle(row: IdempotentRequest, record: Callable[[], object], clock: Clock) -> None:
    """Record the end of a request, with retries while the database does not respond, and later if need be.

    The client gets the outcome even if the key cannot be settled. Until it is, repeated requests are told to wait."""
    deferred_writes.record_or_defer(record, "idempotency key not settled", clock=clock, key_row=row.pk)


def _claim_key(
    holder: AgentKey,
    key: str,
    fingerprint: str,
    run_id: uuid.UUID | None,
    *,
    now: datetime,
    until: datetime,
    repeatable: bool,
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
                created = IdempotentRequest.objects.create(
                    key_holder=holder, key=key, fingerprint=fingerprint, run_id=run_id, **columns
                )
            return created, True
        except IntegrityError as error:
            dialect.raise_unless_unique(error)
            same = Q(key_holder=holder, key=key)
            row = IdempotentRequest.objects.filter(same | Q(run_id=run_id) if run_id else same).first()
        if row is None:
            continue  # deleted by a concurrent request
        if row.key_holder_id != holder.pk and row.expires_at > now:
            raise RunExists()
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
    row: IdempotentRequest, fingerprint: str, own_run: QuerySet[Run] | None, rebuild: RunAnswer | None, *, clock: Clock
) -> HttpResponse:
    label = "run_id" if row.run_id else HEADER_NAME
    if row.fingerprint != fingerprint:
        raise KeyReused(f"This {label} was sent with another request.")
    if row.status_code is not None:
        return HttpResponse(row.body, status=row.status_code, content_type="application/json", headers=REPLAY_HEADERS)
    run = _find_run(own_run, adopts=rebuild is not None, clock=clock) if own_run is not None else None
    now = clock()
    if run is not None and run.ended_at is not None and rebuild is not None and (answer := rebuild(run)):
        return _build_response(*answer, headers=REPLAY_HEADERS)
    is_awaited = rebuild is not None and run is not None and _is_close_awaited(run, now=now)
    if own_run is None or is_awaited or (row.deadline_at > now and not _is_process_dead(run)):
        raise InProgress(f"The first request with this {label} is still being served.")
    if run is None:
        raise OutcomeUnknown(INTERRUPTED.format(label))
    raise OutcomeUnknown(INTERRUPTED.format(label), run_id=str(run.pk), outcome=run.outcome, exit_code=run.exit_code)


def _find_run(own_run: QuerySet[Run], *, adopts: bool, clock: Clock) -> Run | None:
    """Return the run of a request. With `adopts` an abandoned one is closed with the result that its sandbox retained."""
    rows = own_run.defer("stdout", "stderr")
    run = rows.first()
    if run is not None and run.ended_at is None and adopts and abandoned.adopt_result(run, now=clock()):
        return rows.first()
    return run


def _is_close_awaited(run: Run, *, now: datetime) -> bool:
    """Return whether a sweep is to close an open run: with the result of its command, or at its deadline."""
    return run.ended_at is None and now < run.deadline_at + RUN_CLOSE_GRACE_PERIOD


def _is_process_dead(run: Run | None) -> bool:
    """Return whether the ended run of an unfinished request shows that its process will not respond."""
    return run is not None and run.ended_at is not None and (run.outcome == RunOutcome.LOST or run.released)


def _derive_run_id(holder: AgentKey, row: IdempotentRequest) -> uuid.UUID:
    """Return the id of the run that this request may open.

    An id that the caller did not choose is derived from the row, so that it is known after the process has died. The random
    digest makes it unique across installations. The first one stays when the key is rotated."""
    return row.run_id or uuid.uuid5(uuid.NAMESPACE_OID, f"{holder.first_digest or holder.digest} {row.pk}")


def _build_response(status: int, data: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Render at once: the body that is stored and replayed is then the body that was sent."""
    return HttpResponse(encode_json(data), status=status, content_type=JsonRenderer.media_type, headers=headers)
