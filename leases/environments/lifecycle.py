"""Lifecycle of an environment: create, start, change the phase, end, close when the last lease has ended.

Lock order: the environment, then its leases. A grant locks the environment (leases.environments.entry), so that the end finds
the lease, or the grant finds the end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from leases import leasing
from leases.coding.models import CodingTask
from leases.environments.entry import UNUSED, add_participants
from leases.environments.models import Environment, EnvironmentOutcome
from leases.errors import Conflict, EnvironmentEnded, EnvironmentNotFound, InvalidRequest
from leases.models import EnvironmentType, Lease, LeaseStatus
from leases.patterns import require_fits
from leases.projects import registry
from sandboxes import audit

log = structlog.get_logger(__name__)
ENDED_CONDITION = "condition:environment.ended"  # end reason of the leases
UNUSED_AFTER = timedelta(hours=1)  # since the last lease ended; an agent may come back after a crash of the game server
REOPEN_HINT = " End it, then create it with `reopen`, or choose another name."
NOTHING: Any = object()  # no outcome is given; None is an outcome


def find(environment_id: str) -> Environment:
    """Return an environment. Raise EnvironmentNotFound."""
    environment = Environment.objects.filter(pk=environment_id).first()
    if environment is None:
        raise EnvironmentNotFound()
    return environment


@dataclass(frozen=True)
class NewEnvironment:
    """Parameters of an environment that an operator creates."""

    id: str
    type: str
    phase: str = ""
    project: str = ""  # name; empty: the default project
    agents: Sequence[str] = ()  # participants
    open_to_project: bool | None = None  # to every agent of the project; None: as the type says
    reopen: bool = False  # an ended environment of this id is opened again


def create(request: NewEnvironment, *, now: datetime, actor: str = "") -> tuple[Environment, bool]:
    """Create an environment that has not started, and return whether this call created it or opened it again. Idempotent.

    Raise InvalidRequest for an unknown type, project or agent of another project. Raise Conflict if the environment exists
    with other parameters, or was created by an agent that is not named here: a name that an agent has chosen gives it no access
    to what an operator puts there."""
    environment_type = EnvironmentType.objects.filter(name=request.type).first()
    if environment_type is None:
        raise InvalidRequest("type", "There is no such environment type.")
    require_fits(Environment, phase=request.phase)
    project = registry.find(request.project)
    open_to_project = environment_type.open_to_project if request.open_to_project is None else request.open_to_project
    columns: dict[str, Any] = {
        "type": environment_type,
        "project": project,
        "open_to_project": open_to_project,
        "phase": request.phase,
    }
    with transaction.atomic():
        environment, is_new = Environment.objects.get_or_create(pk=request.id, defaults={**columns, "created_at": now})
        if not is_new and environment.ended_at and request.reopen:
            is_new = _reopen(environment, columns)
        if is_new:
            registry.register_agents(project.pk, request.agents, field="agents", now=now)
            add_participants(request.id, request.agents, now=now, actor=actor)
            environment.refresh_from_db()
        else:
            _require_same(environment, request, columns)
    if is_new:
        log.info("environment created", environment=request.id, project=project.name, actor=actor)
    return environment, is_new


def _reopen(environment: Environment, columns: dict[str, Any]) -> bool:
    """Open an ended environment again, without its former participants. Return False if a concurrent call has opened it.

    Secrets of the game server stay with the project. Raise Conflict for a coding task of another project."""
    moves = environment.project_id != columns["project"].pk
    if moves and CodingTask.objects.filter(environment=environment).exists():
        raise Conflict("This environment has a coding task of another project.", field="environment_id")
    ended = Environment.objects.filter(pk=environment.pk, ended_at__isnull=False, project=environment.project_id)
    if not ended.update(**columns, created_by_agent=False, started_at=None, ended_at=None, end_reason=""):
        environment.refresh_from_db()
        return False
    environment.participants.all().delete()
    if moves:
        environment.secrets.all().delete()
    return True


def _require_same(environment: Environment, request: NewEnvironment, columns: dict[str, Any]) -> None:
    if environment.project_id != columns["project"].pk:
        raise Conflict("This environment belongs to another project.", field="project")
    if environment.type_id != request.type:
        raise Conflict(f'This environment exists with the type "{environment.type_id}".{REOPEN_HINT}', field="type")
    if request.open_to_project is not None and environment.open_to_project != request.open_to_project:
        raise Conflict("This environment exists with other access.", field="open_to_project")
    known = set(environment.participants.values_list("agent_did", flat=True))
    is_open = environment.open_to_project and columns["open_to_project"]
    if environment.created_by_agent and not is_open and known - {*request.agents}:
        raise Conflict(f"An agent that is not named has created this environment.{REOPEN_HINT}", field="environment_id")
    if missing := [did for did in request.agents if did not in known]:
        raise Conflict(f"{missing[0]} is no participant of this environment, which exists.", field="agents")


def start(environment_id: str, *, now: datetime, actor: str = "") -> bool:
    """Record the start. Return False if it was recorded before. Raise EnvironmentNotFound or EnvironmentEnded."""
    unstarted = Environment.objects.filter(pk=environment_id, started_at__isnull=True, ended_at__isnull=True)
    if unstarted.update(started_at=now):
        log.info("environment started", environment=environment_id, actor=actor)
        return True
    _require_open(environment_id)
    return False


def set_phase(environment_id: str, phase: str, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Set the phase. Return False if it is the current one. Raise InvalidRequest, EnvironmentNotFound or EnvironmentEnded."""
    require_fits(Environment, phase=phase)
    with transaction.atomic():
        changed = Environment.objects.filter(~Q(phase=phase), pk=environment_id, ended_at__isnull=True).update(phase=phase)
        if changed:
            audit.record(find(environment_id), "Set phase", phase, actor=actor, now=now)
    if changed:
        log.info("environment phase set", environment=environment_id, phase=phase, actor=actor)
        return True
    _require_open(environment_id)
    return False


def _require_open(environment_id: str) -> None:
    if find(environment_id).ended_at:
        raise EnvironmentEnded()


def end(environment_id: str, *, outcome: Any = NOTHING, now: datetime, actor: str = "") -> list[Lease]:
    """End an environment and its active leases in one transaction, and return these leases.

    Idempotent: the time of an end stays, and its outcome once there is one. Raise EnvironmentNotFound."""
    with transaction.atomic(durable=True):
        lock(environment_id)
        ended = [
            lease
            for lease in select_active_leases(environment_id)
            if leasing.end(lease.pk, reason=leasing.find_elapsed_clock(lease, now) or ENDED_CONDITION, now=now, actor=actor)
        ]
        _record_end(Q(pk=environment_id), "operator", now=now)
        if outcome is not NOTHING:
            _record_outcome(environment_id, outcome, now=now, actor=actor)
    return ended


def select_active_leases(environment_id: str) -> QuerySet[Lease]:
    """Return the active leases of an environment, locked when they are read."""
    active = Lease.objects.select_for_update(no_key=True).filter(environment_id=environment_id, status=LeaseStatus.ACTIVE)
    return active.order_by("pk")


def lock_for_condition(environment_id: str) -> None:
    """Lock the environment: of two conditions that end its last leases at once, the second closes the environment."""
    list(_select_for_update(environment_id).values_list("pk"))


def lock(environment_id: str) -> Environment:
    """Lock an environment until the transaction ends, and return it. Raise EnvironmentNotFound."""
    environment = _select_for_update(environment_id).first()
    if environment is None:
        raise EnvironmentNotFound()
    return environment


def lock_open(environment_id: str) -> Environment:
    """Like lock. Raise EnvironmentEnded for an environment that has ended."""
    environment = lock(environment_id)
    if environment.ended_at:
        raise EnvironmentEnded()
    return environment


def close_if_empty(environment_id: str, reason: str, *, outcome: Any = NOTHING, now: datetime, actor: str = "") -> bool:
    """End an environment in which no lease is active any more. Return False if one is, or the environment had ended."""
    closed = bool(_record_end(Q(pk=environment_id) & ~Q(Exists(_find_active(now))), reason, now=now))
    if closed and outcome is not NOTHING:
        _record_outcome(environment_id, outcome, now=now, actor=actor)
    return closed


def end_unused(*, now: datetime, limit: int = 200) -> int:
    """End the started environments whose last lease ended UNUSED_AFTER ago, and return how many."""
    leases = Lease.objects.filter(environment_id=OuterRef("pk"))
    recent = leases.filter(Q(status=LeaseStatus.ACTIVE) | Q(ended_at__gt=now - UNUSED_AFTER))
    unused = Environment.objects.filter(
        ~Q(Exists(recent)), Q(Exists(leases)), ended_at__isnull=True, started_at__lte=now - UNUSED_AFTER
    )
    pks: Sequence[str] = list(unused.order_by("created_at").values_list("pk", flat=True)[:limit])
    return sum(_record_end(Q(pk=pk) & ~Q(Exists(recent)), UNUSED, now=now) for pk in pks)


def _find_active(now: datetime) -> QuerySet[Lease]:
    return Lease.objects.filter(environment_id=OuterRef("pk"), status=LeaseStatus.ACTIVE, expires_at__gt=now)


def _record_end(condition: Q, reason: str, *, now: datetime) -> int:
    return Environment.objects.filter(condition, ended_at__isnull=True).update(ended_at=now, end_reason=reason[:80])


def _record_outcome(environment_id: str, outcome: Any, *, now: datetime, actor: str) -> None:
    """Record the outcome of the last end, unless that end has one. The caller has locked the environment."""
    ended_at = find(environment_id).ended_at
    assert ended_at  # the caller has ended the environment, or found it ended
    EnvironmentOutcome.objects.get_or_create(
        environment_id=environment_id, ended_at=ended_at,
        defaults={"recorded_at": now, "recorded_by": actor, "text": json.dumps(outcome)},
    )  # fmt: skip


def _select_for_update(environment_id: str) -> QuerySet[Environment]:
    return Environment.objects.select_for_update(no_key=True).filter(pk=environment_id)
