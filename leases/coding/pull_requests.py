"""Pull requests of coding tasks: opened after a push, polled until they are merged or closed.

The leases of a task end by conditions: `task.complete` with the pull request or with its merge, `pr.merged` with the merge,
`pr.closed` if it is closed without. A condition is posted before the status is recorded, and posting it again has no effect."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

import structlog
from django.db.models import Q, QuerySet, Value
from django.db.models.functions import Coalesce, NullIf

from leases import conditions
from leases.coding import repositories, tasks
from leases.coding.forges import ForgeError, PullRequest
from leases.coding.git import GitError, InvalidCloneUrl
from leases.coding.models import CodingTask, CodingTaskStatus, CompletesOn, Repository
from leases.errors import RepositoryUnavailable
from leases.models import Lease
from leases.tasks import enqueue_reclaim
from sandboxes.db.clock import clock_from
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.lifecycle import checkpoint
from sandboxes.server_calls import Attempt, Server, ServerCalls, list_due, run_here
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
TASK_COMPLETE, MERGED, CLOSED = "task.complete", "pr.merged", "pr.closed"  # conditions
# API of the forge. A bare repository has no server in common with others.
FORGE = Coalesce(NullIf("repository__api_url", Value("")), "repository__clone_url")
MIN_POLL_INTERVAL, MAX_POLL_INTERVAL = timedelta(minutes=1), timedelta(hours=1)
POLL_CLAIM = timedelta(minutes=5)  # longer than requests to a forge take


def poll_pull_requests(*, now: datetime, limit: int = 100) -> SweepResult:
    """Open the pull requests of pushed branches, and read the state of open ones: up to `limit` at each forge, and at different
    forges in parallel. Abandon tasks whose environment ended."""
    result = SweepResult()
    CALLS.run(list_due(find_due(now=now), FORGE, "next_poll_at", limit=limit), clock=clock_from(now), result=result)
    result.note("abandoned", tasks.abandon_unsubmitted(now=now))
    return result


def _postpone(forge: Server, *, now: datetime) -> int:
    """Make the due tasks at a forge that does not answer due later."""
    repositories_of_forge = Repository.objects.filter(Q(api_url=forge) | Q(api_url="", clone_url=forge))
    return find_due(now=now).filter(repository__in=repositories_of_forge).update(next_poll_at=now + MIN_POLL_INTERVAL)


def find_due(*, now: datetime) -> QuerySet[CodingTask]:
    """Tasks whose pull request is to be opened or read, the longest overdue first."""
    return CodingTask.objects.filter(next_poll_at__lte=now).order_by("next_poll_at")


def propose_or_poll(pk: UUID, *, now: datetime, actor: str = "") -> str:
    """Open the pull request of a task, or read its state, and return the result as one word.

    An error of the forge is stored in the task, and the request is repeated later."""
    return run_here(_propose_or_poll(pk, now=now, actor=actor))


def _propose_or_poll(pk: UUID, *, now: datetime, actor: str = "sweep") -> Attempt[str]:
    clock = clock_from(now)
    task = CodingTask.objects.select_related("repository").get(pk=pk)
    claimed = CodingTask.objects.filter(pk=pk, next_poll_at=now + POLL_CLAIM)
    if not _claim(task, claimed, now=now):
        return "lost race"
    try:
        pull_request = yield partial(_request_pull_request, task)
    except (ForgeError, RepositoryUnavailable, GitError, InvalidCloneUrl) as error:
        at = clock() + _choose_interval(task, clock())
        claimed.update(poll_error=str(error), next_poll_at=at)
        log.warning("forge request failed", task=str(pk), error=str(error))
        return "failed"
    checkpoint("pull request known", task)
    if _post_conditions(task, pull_request, now=clock(), actor=actor):
        enqueue_reclaim()
    checkpoint("conditions posted", task)
    return _record(task, pull_request, claimed, now=clock())


CALLS = ServerCalls(_propose_or_poll, failure="failed", postpone=_postpone)


def _claim(task: CodingTask, claimed: QuerySet[CodingTask], *, now: datetime) -> bool:
    """Claim a task whose poll is due. `claimed` selects the task while it has this claim."""
    if task.next_poll_at is None:
        return False
    with end_if_unanswered(partial(claimed.update, next_poll_at=now), task):
        due = CodingTask.objects.filter(pk=task.pk, next_poll_at=task.next_poll_at)
        return bool(due.update(next_poll_at=now + POLL_CLAIM))


def poll_soon(repository: str, branch: str, *, now: datetime) -> bool:
    """Let the next sweep read the state of the pull request from this branch. Return whether there is one."""
    found = CodingTask.objects.filter(repository__name=repository, branch=branch, next_poll_at__isnull=False)
    return bool(found.update(next_poll_at=now))


def _request_pull_request(task: CodingTask) -> PullRequest:
    with repositories.open_repository_git(task.repository) as git:
        forge = repositories.open_forge(task.repository, git)
        if task.status == CodingTaskStatus.PUSHED:
            title, body = task.proposal_title, task.proposal_body
            return forge.open_pull_request(head=task.branch, base=task.base_branch, title=title, body=body)
        return forge.pull_request(head=task.branch, base=task.base_branch, number=task.pull_request_number)


def _post_conditions(task: CodingTask, found: PullRequest, *, now: datetime, actor: str) -> Sequence[Lease]:
    names = {"open": [], "merged": [MERGED, TASK_COMPLETE], "closed": [CLOSED]}[found.state]
    if found.state == "open" and task.completes_on == CompletesOn.PULL_REQUEST:
        names = [TASK_COMPLETE]
    outcome = {"pull_request": found.url, "state": found.state}
    environment = task.environment_id
    return [
        lease
        for name in names
        for lease in conditions.post_condition(environment, name, now=now, agents=None, outcome=outcome, actor=actor)
    ]


def _record(task: CodingTask, found: PullRequest, claimed: QuerySet[CodingTask], *, now: datetime) -> str:
    status = {
        "open": CodingTaskStatus.PROPOSED, "merged": CodingTaskStatus.MERGED, "closed": CodingTaskStatus.CLOSED,
    }[found.state]  # fmt: skip
    is_open = found.state == "open"
    recorded = claimed.filter(status=task.status).update(
        status=status,
        pull_request_number=found.number,
        pull_request_url=found.url,
        poll_error="",
        next_poll_at=now + _choose_interval(task, now) if is_open else None,
        ended_at=None if is_open else now,
    )
    if recorded and status != task.status:
        log.info("pull request recorded", task=str(task.pk), status=status, url=found.url)
    return str(status) if recorded else "lost race"


def _choose_interval(task: CodingTask, now: datetime) -> timedelta:
    """Return a tenth of the time since the submission, within limits."""
    age = now - (task.submitted_at or task.created_at)
    return min(max(age / 10, MIN_POLL_INTERVAL), MAX_POLL_INTERVAL)
