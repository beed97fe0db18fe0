"""Circuit breaker of starts: a pause of a host's starts after consecutive failures of its provider.

The state is in the host's row, and each change is one guarded UPDATE. A host is one engine of one provider, so the breaker
covers all pools of this provider on this host.

- closed: each start is let through. MAX_START_FAILURES unavailable answers in a row open the breaker.
- open: starts are refused until `starts_paused_until`. Each pause in a row is longer than the one before.
- half-open: after the pause one start is let through. Its success closes the breaker, its failure begins the next pause. If
  its process dies, another start is let through after SANDBOX_START_TIMEOUT."""

from datetime import datetime, timedelta
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q

from sandboxes import audit
from sandboxes.db.clock import compute_backoff
from sandboxes.errors import StartsPaused
from sandboxes.failures import find_cause
from sandboxes.models import Host
from sandboxes.providers.errors import FailureCause

log = structlog.get_logger(__name__)
MAX_START_FAILURES = 3
INITIAL_PAUSE, MAX_PAUSE = timedelta(seconds=30), timedelta(minutes=10)
CLOSED = {
    "start_failures": 0, "start_pauses": 0, "starts_paused_until": None, "start_probing": False, "start_error": "",
    "start_error_code": "",
}  # fmt: skip
CAUSES = {cause.value: cause for cause in FailureCause}


def is_open(host: Host, *, now: datetime) -> bool:
    """Return whether starts on this host are refused now, as the row was read."""
    return host.starts_paused_until is not None and host.starts_paused_until > now


def require_closed(host: Host, *, now: datetime) -> None:
    """Raise StartsPaused if starts on this host are refused now, as the row was read."""
    if is_open(host, now=now):
        assert host.starts_paused_until
        raise _build_error(host, host.starts_paused_until, now)


def admit(host: Host, *, now: datetime) -> None:
    """Let one start through, or raise StartsPaused. Without failures no query is made.

    Call this function in the transaction that claims the start, so that the half-open state is not used up by a start that
    gets no place."""
    require_closed(host, now=now)
    if host.start_failures < MAX_START_FAILURES:
        return
    until = now + settings.SANDBOX_START_TIMEOUT
    is_elapsed = Q(starts_paused_until__isnull=True) | Q(starts_paused_until__lte=now)
    half_open = Host.objects.filter(is_elapsed, pk=host.pk, start_failures__gte=MAX_START_FAILURES)
    if half_open.update(starts_paused_until=until, start_probing=True):
        return
    host.refresh_from_db(fields=["start_failures", "starts_paused_until", "start_error_code"])
    require_closed(host, now=now)


def end_probe(host_id: UUID, *, until: datetime, now: datetime) -> None:
    """Let another start through in place of the one that `admit` let through until this time, unless its result is known."""
    probing = Host.objects.filter(pk=host_id, start_probing=True, starts_paused_until=until)
    probing.update(starts_paused_until=now, start_probing=False)


def note_success(host: Host) -> None:
    """Close the breaker: the provider has started a sandbox, or has answered that it rejects the request.

    No query is made if the host had no failures when the start began. Failures of concurrent starts then stay counted."""
    if host.start_failures and Host.objects.filter(pk=host.pk, start_failures__gt=0).update(**CLOSED):
        log.info("starts succeed again", host=host.name, provider=host.provider)


def note_failure(host: Host, failed: Exception, *, now: datetime) -> None:
    """Count a start that failed because the provider is unavailable. Open the breaker at MAX_START_FAILURES in a row.

    A start that began before a pause and fails during it does not prolong the pause."""
    error = str(failed)
    with transaction.atomic():
        Host.objects.filter(pk=host.pk).update(
            start_failures=F("start_failures") + 1, start_error=error, start_error_code=find_cause(failed)
        )
        is_due = Q(starts_paused_until__isnull=True) | Q(starts_paused_until__lte=now) | Q(start_probing=True)
        due = Host.objects.filter(is_due, pk=host.pk, start_failures__gte=MAX_START_FAILURES)
        pauses = due.values_list("start_pauses", flat=True).first()
        if pauses is None:
            return
        pause = compute_backoff(pauses + 1, initial=INITIAL_PAUSE, maximum=MAX_PAUSE)
        opened = due.filter(start_pauses=pauses).update(
            starts_paused_until=now + pause, start_pauses=pauses + 1, start_probing=False
        )
    if opened:
        log.error("starts paused", host=host.name, provider=host.provider, seconds=pause.total_seconds(), error=error)


def reset(host: Host, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Close the breaker of a host. Return False if it was not open."""
    with transaction.atomic():
        closed = Host.objects.filter(pk=host.pk, starts_paused_until__gt=now).update(**CLOSED)
        if closed:
            audit.record(host, "Resume starts", actor=actor, now=now)
    if closed:
        log.info("starts resumed", host=host.name, actor=actor)
    return bool(closed)


def _build_error(host: Host, until: datetime, now: datetime) -> StartsPaused:
    error = StartsPaused(
        f"The provider {host.provider} starts no sandboxes on this host until {until:%H:%M:%S} UTC, after "
        f"{host.start_failures} failed starts in a row."
    )
    error.cause = CAUSES.get(host.start_error_code)
    error.retry_after = max(int((until - now).total_seconds()) + 1, 1)
    error.provider = host.provider
    return error
