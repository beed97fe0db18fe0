"""A POST with an Idempotency-Key is acted on once: whoever sends it again is answered from the stored row.

Inserting the row is the right to act. Only answers that are a success are stored: an error frees the key, and so does
the death of whoever acted, once its deadline has passed. For what must not happen twice neither is so: when it may have
begun, the key stays taken and says which Run to look at."""

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.http import HttpResponse
from rest_framework.request import Request

from leases.api.renderers import JsonRenderer, encode_json
from leases.errors import Conflict, InvalidRequest
from leases.models import AgentKey, IdempotentRequest
from sandboxes.db.clock import clock_from
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Run, RunOutcome

HEADER_NAME = "Idempotency-Key"
StatusAndBody = tuple[int, Mapping[str, Any]]  # status and body
RequestHandler = Callable[[uuid.UUID], StatusAndBody]  # given the id for a Run, if it opens one


class KeyReused(Conflict):
    """This Idempotency-Key was sent with another request."""

    code = "idempotency_key_reused"


class InProgress(Conflict):
    """The first request with this Idempotency-Key is still being served."""

    code = "idempotency_in_progress"
    retry_after = 1


class OutcomeUnknown(Conflict):
    """The first request with this Idempotency-Key was interrupted. It may have had an effect; it is not repeated."""

    code = "outcome_unknown"


def execute_once(
    request: Request,
    holder: AgentKey,
    act: RequestHandler,
    *,
    now: datetime,
    body: bytes = b"",
    patience: timedelta = timedelta(minutes=1),
    repeatable: bool = True,
) -> HttpResponse:
    """Act and answer; with an Idempotency-Key, once for this key holder. `patience` is the longest that acting takes.

    KeyReused, InProgress; OutcomeUnknown if it is not repeatable and was interrupted."""
    key = request.META.get("HTTP_IDEMPOTENCY_KEY")
    if key is None:
        return _build_response(*act(uuid.uuid4()))
    if not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        raise InvalidRequest(HEADER_NAME, f"The header {HEADER_NAME} has 1 to 255 visible ASCII characters.")
    later = clock_from(now)
    asked = hashlib.sha256(f"{request.method} {request.get_full_path()}\n".encode() + body).hexdigest()
    row, mine = _claim_key(holder, key, asked, now=now, until=now + patience, repeatable=repeatable)
    if not mine:
        return _replay_response(row, asked, None if repeatable else _derive_run_id(holder, row), now=now)
    checkpoint("key claimed", row)
    # Whoever takes over after our deadline starts anew: what we would still write is then not ours to write.
    ours = IdempotentRequest.objects.filter(pk=row.pk, started_at=row.started_at, status_code=None)
    run_id = _derive_run_id(holder, row)
    try:
        status, said = act(run_id)
    except Exception:
        if repeatable or not _may_have_started(run_id):
            ours.delete()
        else:
            ours.update(deadline_at=later())
        raise
    checkpoint("acted", row)
    response = _build_response(status, said)
    ours.update(status_code=status, body=response.content.decode())
    return response


def _claim_key(
    holder: AgentKey, key: str, asked: str, *, now: datetime, until: datetime, repeatable: bool
) -> tuple[IdempotentRequest, bool]:
    """The row of this key, and whether it is ours to act on."""
    terms = {"started_at": now, "deadline_at": until, "expires_at": max(until, now + settings.IDEMPOTENCY_TTL)}
    for _ in range(5):
        try:
            with transaction.atomic():
                return IdempotentRequest.objects.create(key_holder=holder, key=key, fingerprint=asked, **terms), True
        except IntegrityError:
            row = IdempotentRequest.objects.filter(key_holder=holder, key=key).first()
        if row is None:
            continue  # freed since
        same = IdempotentRequest.objects.filter(pk=row.pk, started_at=row.started_at)
        if row.expires_at <= now:
            same.delete()
            continue
        abandoned = row.status_code is None and row.deadline_at <= now and row.fingerprint == asked
        if not (abandoned and repeatable):
            return row, False
        if same.filter(status_code=None, deadline_at=row.deadline_at).update(**terms):
            row.started_at = now
            return row, True
    raise InProgress()


def _replay_response(row: IdempotentRequest, asked: str, run_id: uuid.UUID | None, *, now: datetime) -> HttpResponse:
    if row.fingerprint != asked:
        raise KeyReused()
    if row.status_code is not None:
        return HttpResponse(
            row.body, status=row.status_code, content_type="application/json", headers={"Idempotent-Replayed": "true"}
        )
    if run_id is None or row.deadline_at > now:
        raise InProgress()
    raise OutcomeUnknown(run_id=str(run_id) if Run.objects.filter(pk=run_id).exists() else None)


def _derive_run_id(holder: AgentKey, row: IdempotentRequest) -> uuid.UUID:
    """The id of the Run that this request opens, if any: known also to those who come after its process died. With the
    random digest in it, no other installation has the same."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{holder.digest} {row.pk}")


def _may_have_started(run_id: uuid.UUID) -> bool:
    # A Run that failed without an exit code was refused by the provider: nothing was executed.
    return Run.objects.filter(pk=run_id).exclude(outcome=RunOutcome.FAILED, exit_code=None).exists()


def _build_response(status: int, data: Mapping[str, Any]) -> HttpResponse:
    """Render at once: the body that is stored and replayed is then the body that was sent."""
    return HttpResponse(encode_json(data), status=status, content_type=JsonRenderer.media_type)
