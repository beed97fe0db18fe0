"""Submission of an agent's commits: taken from the sandbox, checked, pushed as a branch, proposed as a pull request.

One submission of a task runs at a time; its claim has a deadline. The commits that are pushed depend only on those of the
agent, so a repetition after a crash pushes the same. Order: the commit is recorded, pushed, recorded as pushed, proposed. From
then on the sweep `pull_requests` continues what a crash interrupted."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

import structlog
from django.db.models import F, Q

from leases import execution, leasing
from leases.coding import patches, pull_requests, repositories, tasks
from leases.coding.checkout import REPOSITORY_PATH, fetch_base
from leases.coding.git import Git, GitError
from leases.coding.models import CodingTask, CodingTaskStatus, Repository
from leases.coding.patches import SubmissionRefused
from leases.coding.protected_paths import ProtectedPaths
from leases.errors import CodingTaskBusy, Conflict, RepositoryUnavailable
from leases.models import Lease
from sandboxes.db.clock import Clock, clock_from
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.providers.errors import NoSuchFile, TooLarge
from sandboxes.runs.operations import Command

log = structlog.get_logger(__name__)
MAX_SUBMISSION = timedelta(minutes=10)  # deadline of the claim
PACK_TIMEOUT = timedelta(minutes=2)
SCRIPT = f"""cd {REPOSITORY_PATH} || exit 41
git rev-parse --verify --quiet 'HEAD^{{commit}}' >/dev/null || exit 41
[ -z "$(git status --porcelain --untracked-files=no)" ] || exit 42
[ "$(git rev-parse HEAD)" != "$1" ] || exit 43
printf '%s\\n^%s\\n' HEAD "$1" | git pack-objects --quiet --revs --thin --stdout > "$2" && git rev-parse HEAD"""
REFUSAL_BY_EXIT_CODE = {
    41: f"{REPOSITORY_PATH} is not a Git repository with a commit. Check it out again.",
    42: "There are changes that are not committed. Commit or revert them.",
    43: "Nothing was committed.",
}


def submit(pk: UUID, *, title: str, summary: str = "", now: datetime, actor: str = "") -> CodingTask:
    """Propose the commits in the sandbox of a lease as a pull request, and return the task.

    Refused commits are a result: the task has the `refusals`. If the forge does not respond, its status is `pushed`, and the
    pull request is opened later. Raise LeaseEnded, CodingTaskNotFound, CodingTaskEnded, CodingTaskBusy, RepositoryUnavailable
    and the errors of exec_command."""
    clock = clock_from(now)
    lease = leasing.require_active(pk, now=now)
    task = tasks.require_open(lease.environment_id)
    if not task.base_commit:
        raise Conflict("The repository was not checked out.")
    with _claim(task, clock) as claim:
        try:
            patches.check_texts(title=title, summary=summary)
            pack, agents_head = _take_pack(lease, task, clock, actor)
            with repositories.open_repository_git(task.repository) as git:
                fetch_base(git, task.repository, task.base_branch, commit=task.base_commit, depth=1)
                head = _check_and_rebuild(git, task, pack, agents_head, author=lease.agent_did)
                checkpoint("submission checked", lease)
                leasing.require_active(pk, now=clock())
                _record(claim, refusals=[], pushing_commit=head, proposal_title=title, proposal_body=summary)
                _push(git, task, head)
        except SubmissionRefused as refused:
            _record(claim, refusals=refused.refusals, submissions=F("submissions") + 1, submitted_at=clock())
            log.info("submission refused", task=str(task.pk), refusals=len(refused.refusals), actor=actor)
        else:
            checkpoint("submission pushed", lease)
            _record(
                claim, status=CodingTaskStatus.PUSHED, head_commit=head, submissions=F("submissions") + 1,
                submitted_at=clock(), next_poll_at=clock(),
            )  # fmt: skip
            log.info("commits pushed", task=str(task.pk), branch=task.branch, commit=head, actor=actor)
    checkpoint("submission recorded", lease)
    pull_requests.propose_or_poll(task.pk, now=clock(), actor=actor)
    return tasks.find(lease.environment_id)


@contextmanager
def _claim(task: CodingTask, clock: Clock) -> Iterator[Q]:
    """Claim the task, and yield the condition of the claim. Raise CodingTaskBusy."""
    now, until = clock(), clock() + MAX_SUBMISSION
    free = Q(busy_until__isnull=True) | Q(busy_until__lte=now)
    claim = Q(pk=task.pk, busy_until=until)
    with end_if_unanswered(partial(CodingTask.objects.filter(claim).update, busy_until=None), task):
        if not CodingTask.objects.filter(free, pk=task.pk, ended_at__isnull=True).update(busy_until=until):
            raise CodingTaskBusy()
    try:
        yield claim
    finally:
        CodingTask.objects.filter(claim).update(busy_until=None)


def _record(claim: Q, **changes: object) -> None:
    """Change the task if the claim still holds. Raise CodingTaskBusy otherwise: another submission goes on."""
    if not CodingTask.objects.filter(claim).update(**changes):
        raise CodingTaskBusy()


def _take_pack(lease: Lease, task: CodingTask, clock: Clock, actor: str) -> tuple[bytes, str]:
    """Return the objects after the base as a thin pack, and the last commit. Raise SubmissionRefused."""
    name = f".submission-{task.pk}.pack"
    command = Command(argv=["sh", "-c", SCRIPT, "submission", task.base_commit, f"{WORKSPACE}/{name}"], timeout=PACK_TIMEOUT)
    _, result = execution.exec_command(lease.pk, command, now=clock(), actor=actor)
    if result.exit_code:
        error = result.stderr.decode(errors="replace").strip()[-300:]
        raise SubmissionRefused(REFUSAL_BY_EXIT_CODE.get(result.exit_code, f"Git could not pack the commits: {error}"))
    limit = task.repository.max_change_mib << 20

    def read(provider: Provider, sandbox: Sandbox) -> bytes:
        content = provider.read_file(sandbox.ref, f"{WORKSPACE}/{name}", limit=limit)
        provider.remove_files(sandbox.ref, WORKSPACE, [name])
        return content

    try:
        transfer = Command(argv=["submission", task.repository.name], timeout=PACK_TIMEOUT, kind="file")
        _, pack = execution.call_in_sandbox(lease.pk, transfer, read, now=clock(), actor=actor)
    except TooLarge:
        raise SubmissionRefused(f"The commits exceed {limit >> 20} MiB.") from None
    except NoSuchFile:
        raise SubmissionRefused("Git made no pack of the commits.") from None
    return pack, result.stdout.decode(errors="replace").strip()


def _check_and_rebuild(git: Git, task: CodingTask, pack: bytes, head: str, *, author: str) -> str:
    limits = _build_limits(task.repository)
    try:
        patches.read_pack(git, pack, head, task.base_commit, max_bytes=limits.max_bytes)
        commits = patches.list_commits(git, task.base_commit, head)
        patches.check_commits(git, task.base_commit, commits, limits)
        return patches.rebuild_commits(git, task.base_commit, commits, author=author, email="agent@leasehold.invalid")
    except GitError as error:
        raise SubmissionRefused(f"The commits could not be checked: {error}") from None


def _build_limits(repository: Repository) -> patches.Limits:
    protected = ProtectedPaths(repository.protected_paths, repository.allowed_paths)
    return patches.Limits(repository.max_change_mib << 20, protected)


def _push(git: Git, task: CodingTask, head: str) -> None:
    """Push the branch, unless it is there. Raise RepositoryUnavailable, also if the branch has commits of another author."""
    ref, url = f"refs/heads/{task.branch}", task.repository.clone_url
    try:
        current = git.read("ls-remote", "--", url, ref).split("\t")[0]
        if current == head:
            return
        if current and current not in (task.head_commit, task.pushing_commit):
            raise RepositoryUnavailable(f"The branch {task.branch} has commits of another author.")
        git.run("push", "--quiet", "--no-verify", f"--force-with-lease={ref}:{current}", "--", url, f"{head}:{ref}")
    except GitError as error:
        raise RepositoryUnavailable(f"{task.repository.name} cannot be pushed to: {error}") from None
