"""Failures of a pool's starts, from the first one until a start succeeds. Health, metrics and the pool's page show them.

The circuit breaker (sandboxes.pool.start_breaker) concerns the engine of a host. These columns concern the pool: a missing
image, a rejected size or stored state that cannot be read fails every start, and the engine responds."""

from datetime import datetime

import structlog
from django.db.models.functions import Coalesce

from sandboxes.failures import find_cause
from sandboxes.models import Pool

log = structlog.get_logger(__name__)
CLEARED = {"starts_failing_since": None, "start_error": "", "start_error_code": ""}


def note_failure(pool: Pool, failed: Exception, *, now: datetime, code: str = "") -> None:
    """Record a start that failed, with the code of its cause by default. The first time since a success stays."""
    code = code or find_cause(failed) or getattr(failed, "code", "")
    Pool.objects.filter(pk=pool.pk).update(
        starts_failing_since=Coalesce("starts_failing_since", now), start_error=str(failed),
        start_error_code=code,
    )  # fmt: skip
    if pool.starts_failing_since is None:
        log.error("starts of a pool fail", pool=pool.name, error=str(failed), code=code)


def note_success(pool: Pool) -> None:
    """Record a start that succeeded. No query is made if the pool had no failures when the start began."""
    if pool.starts_failing_since and Pool.objects.filter(pk=pool.pk, starts_failing_since__isnull=False).update(**CLEARED):
        log.info("starts of a pool succeed again", pool=pool.name)
