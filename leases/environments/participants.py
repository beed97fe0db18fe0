"""Participants of an environment: add, remove, open the environment to its project.

Lock order as in lifecycle: the environment, then its leases. `entry` locks the rows that it relies on, so a lease that is
granted at the same time is found here, or is not granted."""

from collections.abc import Sequence
from datetime import datetime

import structlog
from django.db import transaction

from leases import leasing
from leases.environments import lifecycle
from leases.environments.entry import add_participants
from leases.environments.models import Environment, Participant
from leases.errors import Conflict
from leases.models import Lease
from leases.projects import registry
from sandboxes import audit

log = structlog.get_logger(__name__)
REMOVED = "removed from the environment"  # detail of the end of a participant's lease


def add(environment_id: str, agents: Sequence[str], *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> int:
    """Let agents enter an environment, and return how many are new. Idempotent.

    Raise EnvironmentNotFound, EnvironmentEnded, or InvalidRequest for an agent of another project."""
    with transaction.atomic(durable=True):
        environment = lifecycle.lock_open(environment_id)
        registry.register_agents(environment.project_id, agents, field="agents", now=now)
        added = add_participants(environment_id, agents, now=now, actor=actor)
        if added:
            audit.record(environment, "Add participants", ", ".join(agents), actor=actor, now=now)
    if added:
        log.info("participants added", environment=environment_id, agents=list(agents), actor=actor)
    return added


def remove(environment_id: str, agent_did: str, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> list[Lease]:
    """Remove a participant, and return its active lease, which ends with the reason "operator". Idempotent.

    Raise EnvironmentNotFound, and Conflict for an open environment, which the agent could enter again."""
    with transaction.atomic(durable=True):
        environment = lifecycle.lock(environment_id)
        if environment.open_to_project:
            raise Conflict(
                "The environment is open to its project. Close it to all but its participants first.", field="open_to_project"
            )
        if Participant.objects.filter(environment=environment_id, agent_did=agent_did).delete()[0]:
            audit.record(environment, "Remove participant", agent_did, actor=actor, now=now)
        held = lifecycle.select_active_leases(environment_id).filter(agent_did=agent_did)
        ended = [lease for lease in held if leasing.end(lease.pk, reason="operator", now=now, actor=actor, detail=REMOVED)]
    log.info("participant removed", environment=environment_id, agent=agent_did, actor=actor)
    return ended


def set_access(environment_id: str, open_to_project: bool, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Open an environment to every agent of its project, or close it to all but its participants. Return whether it changed.

    The holders of active leases are participants of an environment that is closed. Raise EnvironmentNotFound or
    EnvironmentEnded."""
    with transaction.atomic(durable=True):
        environment = lifecycle.lock_open(environment_id)
        if not open_to_project:
            holders = lifecycle.select_active_leases(environment_id).values_list("agent_did", flat=True)
            add_participants(environment_id, list(holders), now=now, actor=actor)
        differing = Environment.objects.filter(pk=environment_id, open_to_project=not open_to_project)
        changed = differing.update(open_to_project=open_to_project)
        if changed:
            detail = "open to its project" if open_to_project else "closed to all but its participants"
            audit.record(environment, "Change access", detail, actor=actor, now=now)
    if changed:
        log.info("environment access set", environment=environment_id, open_to_project=open_to_project, actor=actor)
    return bool(changed)
