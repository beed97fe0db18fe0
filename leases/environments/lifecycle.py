"""Lifecycle of an environment: create, start, change the phase, end, close when the last lease has ended.

Lock order: the environment, then its leases. A grant that commits while the environment is being ended may leave one active
lease of this environment; ending the environment again ends that lease too."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from leases import leasing
from leases.environments.models import Environment
from leases.errors import Conflict, EnvironmentEnded, EnvironmentNotFound, InvalidRequest
from leases.models import EnvironmentType, Lease, LeaseStatus

log = structlog.get_logger(__name__)
ENDED_CONDITION = "condition:environment.ended"  # end reason of the leases
UNUSED_AFTER = timedelta(hours=1)  # since the last lease ended; an agent may come back after a crash of the game server
NOTHING: Any = object()  # no outcome is given; None is an outcome


def find(environment_id: str) -> Environment:
    """Return an environment. Raise EnvironmentNotFound."""
    environment = Environment.objects.filter(pk=environment_id).first()
    if environment is None:
        raise EnvironmentNotFound()
    return environment


def create(
    environment_id: str, environment_type: str, *, phase: str = "", now: datetime, actor: str = ""
) -> tuple[Environment, bool]:
    """Create an environment that has not started, and return whether this call created it. Idempotent.

    Raise InvalidRequest for an unknown type, Conflict if the environment exists with another type."""
    if not EnvironmentType.objects.filter(name=environment_type).exists():
        raise InvalidRequest("type", "There is no such environment type.")
    environment, is_new = Environment.objects.get_or_create(
        pk=environment_id, defaults={"type_id": environment_type, "phase": phase, "created_at": now}
    )
    if environment.type_id != environment_type:
        raise Conflict(f'This environment exists with the type "{environment.type_id}".', field="type")
    if is_new:
        log.info("environment created", environment=environment_id, actor=actor)
    return environment, is_new


def start(environment_id: str, *, now: datetime, actor: str = "") -> bool:
    """Record the start. Return False if it was recorded before. Raise EnvironmentNotFound or EnvironmentEnded."""
    unstarted = Environment.objects.filter(pk=environment_id, started_at__isnull=True, ended_at__isnull=True)
    if unstarted.update(started_at=now):
        log.info("environment started", environment=environment_id, actor=actor)
        return True
    _require_open(environment_id)
    return False


def set_phase(environment_id: str, phase: str, *, actor: str = "") -> bool:
    """Set the phase. Return False if it is the current one. Raise EnvironmentNotFound or EnvironmentEnded."""
    if Environment.objects.filter(~Q(phase=phase), pk=environment_id, ended_at__isnull=True).update(phase=phase):
        log.info("environment phase set", environment=environment_id, phase=phase, actor=actor)
        return True
    _require_open(environment_id)
    return False


def _require_open(environment_id: str) -> None:
    if find(environment_id).ended_at:
        raise EnvironmentEnded()


def end(environment_id: str, *, outcome: Any = NOTHING, now: datetime, actor: str = "") -> list[Lease]:
    """End an environment and its active leases in one transaction, and return these leases.

    Idempotent: the time and outcome of the first end stay. Raise EnvironmentNotFound."""
    with transaction.atomic(durable=True):
        _lock(environment_id)
        find(environment_id)
        ended = [
            lease
            for lease in select_active_leases(environment_id)
            if leasing.end(lease.pk, reason=leasing.find_elapsed_clock(lease, now) or ENDED_CONDITION, now=now, actor=actor)
        ]
        _record_end(Q(pk=environment_id), "operator", outcome=outcome, now=now)
    return ended


def select_active_leases(environment_id: str) -> QuerySet[Lease]:
    """Return the active leases of an environment, locked when they are read."""
    active = Lease.objects.select_for_update(no_key=True).filter(environment_id=environment_id, status=LeaseStatus.ACTIVE)
    return active.order_by("pk")


def lock_for_condition(environment_id: str) -> None:
    """Lock the environment: of two conditions that end its last leases at once, the second closes the environment."""
    _lock(environment_id)


def close_if_empty(environment_id: str, reason: str, *, outcome: Any = NOTHING, now: datetime) -> bool:
    """End an environment in which no lease is active any more. Return False if one is, or the environment had ended."""
    return bool(_record_end(Q(pk=environment_id) & ~Q(Exists(_find_active(now))), reason, outcome=outcome, now=now))


def end_unused(*, now: datetime, limit: int = 200) -> int:
    """End the started environments whose last lease ended UNUSED_AFTER ago, and return how many."""
    leases = Lease.objects.filter(environment_id=OuterRef("pk"))
    recent = leases.filter(Q(status=LeaseStatus.ACTIVE) | Q(ended_at__gt=now - UNUSED_AFTER))
    unused = Environment.objects.filter(
        ~Q(Exists(recent)), Q(Exists(leases)), ended_at__isnull=True, started_at__lte=now - UNUSED_AFTER
    )
    pks: Sequence[str] = list(unused.order_by("created_at").values_list("pk", flat=True)[:limit])
    return sum(_record_end(Q(pk=pk) & ~Q(Exists(recent)), "unused", now=now) for pk in pks)


def _find_active(now: datetime) -> QuerySet[Lease]:
    return Lease.objects.filter(environment_id=OuterRef("pk"), status=LeaseStatus.ACTIVE, expires_at__gt=now)


def _record_end(condition: Q, reason: str, *, outcome: Any = NOTHING, now: datetime) -> int:
    told = {} if outcome is NOTHING else {"outcome_text": json.dumps(outcome)}
    return Environment.objects.filter(condition, ended_at__isnull=True).update(ended_at=now, end_reason=reason[:80], **told)


def _lock(environment_id: str) -> None:
    list(Environment.objects.select_for_update(no_key=True).filter(pk=environment_id).values_list("pk"))
