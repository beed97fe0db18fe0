"""Projects and their agents: create, find, register agents, move agents with their keys."""

from collections.abc import Sequence
from datetime import datetime

import structlog
from django.db import transaction

from leases.errors import Conflict, InvalidRequest
from leases.models import Agent, AgentKey, Lease, LeaseStatus
from leases.projects.models import DEFAULT_PROJECT_ID, Project
from sandboxes import audit

log = structlog.get_logger(__name__)


def create(name: str, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> tuple[Project, bool]:
    """Create a project, and return whether it is new. Idempotent. The caller has validated the name."""
    with transaction.atomic():
        project, is_new = Project.objects.get_or_create(name=name, defaults={"created_at": now})
        if is_new:
            audit.record(project, "Create project", actor=actor, now=now)
    if is_new:
        log.info("project created", project=name, actor=actor)
    return project, is_new


def find(name: str) -> Project:
    """Return a project, the default one for an empty name. Raise InvalidRequest naming the field `project`."""
    row = Project.objects.filter(name=name).first() if name else Project.objects.filter(pk=DEFAULT_PROJECT_ID).first()
    if row is None:
        raise InvalidRequest("project", "There is no such project.")
    return row


def register_agents(project_id: int | None, dids: Sequence[str], *, field: str, now: datetime) -> None:
    """Insert the agents that are not known yet into a project. Raise InvalidRequest if one belongs to another project.

    The agents stay locked until the caller's transaction ends, so that none moves before that."""
    for did in sorted({*dids}):
        Agent.objects.get_or_create(did=did, defaults={"project_id": project_id, "created_at": now})
    agents = Agent.objects.select_for_update(no_key=True).filter(did__in=dids).order_by("did")
    if foreign := next((agent for agent in agents if agent.project_id != project_id), None):
        raise InvalidRequest(field, f"{foreign.did} belongs to another project.")


def move_agents(name: str, dids: Sequence[str], *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> int:
    """Move agents, with the keys that list them, to a project. Return the number of agents that moved. Idempotent.

    Raise InvalidRequest for an unknown project or agent, and Conflict if one of the agents has an active lease, or shares a key
    that is not revoked with an agent that stays: a key and all its agents belong to one project."""
    project = find(name)
    with transaction.atomic(durable=True):
        agents = {row.did: row for row in Agent.objects.select_for_update().filter(did__in=dids).order_by("did")}
        if unknown := [did for did in dids if did not in agents]:
            raise InvalidRequest("agent", f"No agent {unknown[0]} is known.")
        moving = [did for did, row in agents.items() if row.project_id != project.pk]
        held = Lease.objects.filter(agent_did__in=moving, status=LeaseStatus.ACTIVE).first()
        if held:
            raise Conflict(f"{held.agent_did} holds the lease {held.pk} in {held.environment_id}.", field="agent")
        for key in AgentKey.objects.select_for_update().filter(operator=False, revoked_at__isnull=True).order_by("pk"):
            _move_key(key, set(dids), project)
        former = {did: agents[did].project_id for did in moving}
        moved = Agent.objects.filter(did__in=moving).update(project=project)
        details = ((agents[did], f"project id {former[did]} → {project.pk} ({project})") for did in moving)
        audit.record_each(details, "Move agent", actor=actor, now=now)
    if moved:
        log.info("agents moved", project=project.name, agents=moving, actor=actor)
    return moved


def _move_key(key: AgentKey, dids: set[str], project: Project) -> None:
    listed = set(key.dids)
    if key.project_id == project.pk or not listed & dids:
        return
    if staying := sorted(listed - dids):
        raise Conflict(f"The key {key} also lists {staying[0]}. Move both, or revoke the key.", field="agent")
    AgentKey.objects.filter(pk=key.pk).update(project=project)
