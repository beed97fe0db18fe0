"""Coding tasks: create, find, abandon."""

import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Q, QuerySet

from leases.coding.models import ENDED_TASK_STATUSES, CodingTask, CodingTaskStatus, CompletesOn, Repository
from leases.environments import lifecycle
from leases.errors import CodingTaskEnded, CodingTaskNotFound, Conflict, InvalidRequest

log = structlog.get_logger(__name__)
BRANCH_PREFIX = "leasehold/"


def create(
    environment_id: str,
    *,
    repository: str,
    title: str,
    environment_type: str = "coding",
    description: str = "",
    test_command: str = "",
    base_branch: str = "",
    completes_on: str = CompletesOn.PULL_REQUEST,
    agents: Sequence[str] = (),
    open_to_project: bool | None = None,
    now: datetime,
    actor: str = "",
) -> tuple[CodingTask, bool]:
    """Create the task of an environment, and the environment unless it exists. Return whether this call created the task.

    The environment belongs to the project of the repository; `agents` and `open_to_project` say who may enter it, as in
    lifecycle.create. Idempotent. Raise InvalidRequest for an unknown or disabled repository and the errors of
    lifecycle.create, and Conflict if the environment has another task."""
    row = Repository.objects.select_related("project").filter(name=repository, enabled=True).first()
    if row is None:
        raise InvalidRequest("repository", "There is no such repository, or it is disabled.")
    fields: dict[str, Any] = {
        "repository": row, "title": title, "description": description, "test_command": test_command,
        "base_branch": base_branch or row.base_branch, "completes_on": completes_on,
    }  # fmt: skip
    environment = lifecycle.NewEnvironment(
        environment_id, environment_type, project=row.project.name, agents=agents, open_to_project=open_to_project
    )
    with transaction.atomic():
        lifecycle.create(environment, now=now, actor=actor)
        task, is_new = CodingTask.objects.get_or_create(
            environment_id=environment_id,
            defaults={**fields, "branch": _name_branch(environment_id), "created_at": now, "created_by": actor},
        )
    if any(getattr(task, name) != value for name, value in fields.items()):
        raise Conflict("This environment has another coding task.", field="environment_id")
    if is_new:
        log.info("coding task created", environment=environment_id, repository=row.name, actor=actor)
    return task, is_new


def find(environment_id: str) -> CodingTask:
    """Return the task of an environment with its repository. Raise CodingTaskNotFound."""
    task = CodingTask.objects.select_related("repository").filter(environment=environment_id).first()
    if task is None:
        raise CodingTaskNotFound()
    return task


def require_open(environment_id: str) -> CodingTask:
    """Return the task of an environment. Raise CodingTaskNotFound, or CodingTaskEnded once its outcome is known."""
    task = find(environment_id)
    if task.status in ENDED_TASK_STATUSES:
        raise CodingTaskEnded()
    return task


def abandon_unsubmitted(*, now: datetime, limit: int = 500) -> int:
    """End the tasks without a pushed commit whose environment has ended, and return how many."""
    pks = list(find_unsubmitted(now=now).values_list("pk", flat=True)[:limit])
    return find_unsubmitted(now=now).filter(pk__in=pks).update(status=CodingTaskStatus.ABANDONED, ended_at=now)


def find_unsubmitted(*, now: datetime) -> QuerySet[CodingTask]:
    """Tasks without a pushed commit whose environment has ended, the oldest first."""
    idle = Q(busy_until__isnull=True) | Q(busy_until__lt=now)
    unsubmitted = Q(status=CodingTaskStatus.OPEN, environment__ended_at__isnull=False)
    return CodingTask.objects.filter(idle, unsubmitted).order_by("created_at")


def _name_branch(environment_id: str) -> str:
    """Name the branch after the environment. The digest keeps names apart that differ in other characters only."""
    words = re.sub(r"[^A-Za-z0-9_]+", "-", environment_id)[:100].strip("-")
    return f"{BRANCH_PREFIX}{words}-{hashlib.sha256(environment_id.encode()).hexdigest()[:8]}"
