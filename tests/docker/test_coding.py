"""Coding tasks in sealed containers: checkout, commits, submission, pull request, and crashes between the steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

import pytest
from django.utils import timezone

from leases import leasing
from leases.coding import checkout, pull_requests, repositories, submissions, tasks
from leases.coding.models import CodingTask, CompletesOn
from leases.environments import lifecycle
from leases.errors import CodingTaskBusy, CodingTaskEnded, LeaseEnded, RepositoryUnavailable
from leases.models import Environment, Lease, LeaseStatus
from sandboxes.models import Pool
from tests.conftest import MINUTE
from tests.support.leases import evict, run
from tests.support.repositories import create_project, git, merge

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
FIX = "cd repo && sed -i 's/a - b/a + b/' calc.py && git commit --quiet -am 'Fix add'"
CrashAt = Callable[[str], AbstractContextManager[None]]
KEY = "AKIA" + "IOSFODNN7EXAMPLE"


@pytest.fixture
def bare(tmp_path: Path, db: None) -> Path:
    path = create_project(tmp_path)
    repositories.save("calc", now=timezone.now(), clone_url=str(path))
    return path


def start_task(pool: Pool, agent: str = "did:plc:ada", **fields: str) -> Lease:
    tasks.create("task-1", repository="calc", title="Fix add", now=timezone.now(), **fields)
    wanted = leasing.LeaseRequest(agent, "task-1", "coding", pool=pool.name)
    return leasing.acquire(wanted, now=timezone.now())[0]


def check_out(lease: Lease) -> CodingTask:
    return checkout.check_out(lease.pk, now=timezone.now())[0]


def commit(lease: Lease, script: str = FIX) -> None:
    result = run(lease, "sh", "-c", script, now=timezone.now())
    assert result.exit_code == 0, result


def submit(lease: Lease, *, now: datetime | None = None) -> CodingTask:
    return submissions.submit(lease.pk, title="Fix add", summary="It subtracted.", now=now or timezone.now())


def read_head(lease: Lease) -> str:
    return run(lease, "git", "-C", "repo", "rev-parse", "HEAD", now=timezone.now()).stdout.decode().strip()


def read_branch(bare: Path, task: CodingTask) -> str:
    return git(bare, "log", "-1", "--format=%an %s", task.branch)


def test_a_task_is_done_over_a_sleep_and_ends_with_its_pull_request(docker_pool: Pool, bare: Path) -> None:
    lease = start_task(docker_pool)
    task = check_out(lease)
    assert run(lease, "git", "-C", "repo", "remote", now=timezone.now()).stdout == b""
    assert (
        run(lease, "git", "-C", "repo", "log", "-1", "--format=%H", now=timezone.now()).stdout.decode().strip()
        == task.base_commit
    )
    run(lease, "sh", "-c", "echo draft > repo/notes.txt", now=timezone.now())
    evict(lease, now=timezone.now())
    assert checkout.check_out(lease.pk, now=timezone.now()) == (task, False)  # the working copy was kept, as it was
    assert run(lease, "cat", "repo/notes.txt", now=timezone.now()).stdout == b"draft\n"

    nothing = submit(lease)
    assert (nothing.status, nothing.refusals) == ("open", ["Nothing was committed."])
    run(lease, "sh", "-c", "echo '# x' >> repo/calc.py", now=timezone.now())
    assert submit(lease).refusals == ["There are changes that are not committed. Commit or revert them."]
    commit(lease)
    commit(lease, "cd repo && mkdir -p .github && echo x > .github/x && git add . && git commit -qm 'Change CI'")
    refused = submit(lease)
    assert refused.status == "open" and "protected" in refused.refusals[0]
    assert git(bare, "branch", "--list", refused.branch) == ""
    commit(lease, "cd repo && git reset --quiet --hard HEAD~1")
    for texts in ({"title": f"Use {KEY}"}, {"title": "Fix add", "summary": f"It needs {KEY}."}):
        revealing = submissions.submit(lease.pk, now=timezone.now(), **texts)
        assert revealing.status == "open" and "contains a secret" in revealing.refusals[0]

    done = submit(lease)
    assert (done.status, done.refusals, done.submissions) == ("proposed", [], 6)
    assert done.pull_request_url == f"{bare}#{done.branch}"
    assert read_branch(bare, done) == "did:plc:ada Fix add"
    lease.refresh_from_db()
    assert lease.end_reason == "condition:task.complete"
    assert Environment.objects.get().outcome == {"pull_request": done.pull_request_url, "state": "open"}

    merge(bare, done.branch)
    assert pull_requests.poll_pull_requests(now=timezone.now() + 2 * MINUTE).counts == {"merged": 1}
    done.refresh_from_db()
    assert (done.status, done.next_poll_at) == ("merged", None)


@pytest.mark.matrix("git in containers; the first test has one whole task, tests/api/test_coding.py the rules")
def test_a_task_that_completes_on_its_merge_takes_further_commits(docker_pool: Pool, bare: Path) -> None:
    lease = start_task(docker_pool, completes_on=CompletesOn.MERGE)
    check_out(lease)
    commit(lease)
    first = submit(lease)
    commit(lease, "cd repo && echo '# checked' >> calc.py && git commit --quiet -am 'Comment'")
    second = submit(lease)
    assert first.head_commit != second.head_commit
    assert git(bare, "rev-parse", second.branch) == second.head_commit
    lease.refresh_from_db()
    assert lease.status == LeaseStatus.ACTIVE
    merge(bare, second.branch)
    pull_requests.poll_pull_requests(now=timezone.now() + 2 * MINUTE)
    lease.refresh_from_db()
    assert lease.end_reason == "condition:pr.merged"


@pytest.mark.matrix("git in containers; the first test has one whole task, tests/api/test_coding.py the rules")
@pytest.mark.parametrize("step", ["submission checked", "submission pushed", "submission recorded"])
def test_a_submission_that_crashed_is_repeated_with_the_same_commit(
    docker_pool: Pool, bare: Path, crash_at: CrashAt, step: str
) -> None:
    lease = start_task(docker_pool)
    check_out(lease)
    commit(lease)
    with crash_at(step):
        submit(lease)
    CodingTask.objects.filter(busy_until=None).update(busy_until=timezone.now() + MINUTE)  # a killed process leaves its claim
    with pytest.raises(CodingTaskBusy):
        submit(lease)
    task = submit(lease, now=timezone.now() + 2 * MINUTE)
    assert (task.status, git(bare, "rev-parse", task.branch)) == ("proposed", task.head_commit)
    assert git(bare, "rev-list", "--count", f"main..{task.branch}") == "1"


@pytest.mark.matrix("git in containers; the first test has one whole task, tests/api/test_coding.py the rules")
@pytest.mark.parametrize("step", ["pull request known", "conditions posted"])
def test_the_sweep_continues_after_a_crash_behind_the_push(docker_pool: Pool, bare: Path, crash_at: CrashAt, step: str) -> None:
    lease = start_task(docker_pool)
    check_out(lease)
    commit(lease)
    with crash_at(step):
        submit(lease)
    assert pull_requests.poll_pull_requests(now=timezone.now() + 6 * MINUTE).counts == {"proposed": 1}
    lease.refresh_from_db()
    assert lease.end_reason == "condition:task.complete"
    with pytest.raises(LeaseEnded):
        submit(lease)


@pytest.mark.matrix("git in containers; the first test has one whole task, tests/api/test_coding.py the rules")
def test_commits_of_another_author_on_the_branch_stay(docker_pool: Pool, bare: Path) -> None:
    lease = start_task(docker_pool)
    task = check_out(lease)
    commit(lease)
    foreign = git(bare, "commit-tree", "main^{tree}", "-p", "main", "-m", "Foreign")
    git(bare, "update-ref", f"refs/heads/{task.branch}", foreign)
    with pytest.raises(RepositoryUnavailable, match="another author"):
        submit(lease)
    assert git(bare, "rev-parse", task.branch) == foreign


@pytest.mark.matrix("git in containers; the first test has one whole task, tests/api/test_coding.py the rules")
def test_a_second_sandbox_gets_the_same_base_and_a_repository_above_its_limit_none(docker_pool: Pool, bare: Path) -> None:
    lease = start_task(docker_pool)
    base = check_out(lease).base_commit
    git(bare, "update-ref", "refs/heads/main", git(bare, "commit-tree", "main^{tree}", "-p", "main", "-m", "Later"))
    other = start_task(docker_pool, agent="did:plc:brook")
    assert check_out(other).base_commit == base
    assert read_head(other) == base
    leasing.release(lease.pk, now=timezone.now())
    leasing.release(other.pk, now=timezone.now())


@pytest.mark.matrix("git in containers; the first test has one whole task, tests/api/test_coding.py the rules")
def test_a_task_without_a_submission_is_abandoned_with_its_environment(docker_pool: Pool, bare: Path) -> None:
    lease = start_task(docker_pool)
    lifecycle.end("task-1", now=timezone.now())
    assert pull_requests.poll_pull_requests(now=timezone.now()).counts == {"abandoned": 1}
    assert CodingTask.objects.get().status == "abandoned"
    with pytest.raises(CodingTaskEnded):
        tasks.require_open(lease.environment_id)
