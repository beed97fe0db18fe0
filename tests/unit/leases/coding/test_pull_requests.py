"""Pull requests of pushed branches on an emulated forge, whose branches and merges are real."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from leases.coding import pull_requests, repositories, tasks
from leases.coding.checkout import fetch_base
from leases.coding.git import Git
from leases.coding.models import CodingTask, Repository
from leases.coding.submissions import _push
from leases.environments.models import Environment
from leases.errors import InvalidRequest, RepositoryUnavailable
from leases.models import Lease
from sandboxes import server_calls
from tests.conftest import MINUTE, NOW
from tests.emulators.forge import PROJECT, TOKEN, Forge, serve_forge
from tests.support.repositories import create_project, git
from tests.support.servers.receiver import run_held_servers

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture(params=["github", "gitea"])
def forge(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Forge]:
    bare = create_project(tmp_path)
    git(bare, "config", "http.receivepack", "true")
    with serve_forge(bare, is_gitea=request.param == "gitea") as forge:
        save(forge, token=TOKEN)
        yield forge


def save(forge: Forge, **fields: str) -> Repository:
    fields = {"clone_url": forge.clone_url, "forge": "github", "api_url": forge.api_url, "forge_project": PROJECT} | fields
    return repositories.save("calc", now=NOW, **fields)[0]


def create_task(forge: Forge, lease: Lease, *, completes_on: str = "pull_request") -> CodingTask:
    """Create the task of the lease's environment, with a commit that was pushed."""
    Lease.objects.update(expiry_conditions=["task.complete", "pr.merged", "pr.closed"])
    task, _ = tasks.create(
        lease.environment_id, repository="calc", title="Fix add", environment_type="catan", completes_on=completes_on, now=NOW
    )
    commit = git(forge.bare, "commit-tree", "main^{tree}", "-p", "main", "-m", "Fix")
    git(forge.bare, "update-ref", f"refs/heads/{task.branch}", commit)
    CodingTask.objects.update(
        status="pushed", head_commit=commit, proposal_title="Fix add", proposal_body="It subtracted.", next_poll_at=NOW
    )
    return task


def poll(now: datetime = NOW) -> dict[str, int]:
    return pull_requests.poll_pull_requests(now=now).counts


def test_pull_request_is_opened_and_its_merge_ends_the_lease(forge: Forge, lease: Lease) -> None:
    task = create_task(forge, lease, completes_on="merge")
    assert poll() == {"proposed": 1}
    [pull] = forge.pulls
    assert (pull["title"], pull["body"], pull["head"]["ref"], pull["base"]["ref"]) == (
        "Fix add", "It subtracted.", task.branch, "main",
    )  # fmt: skip
    assert poll() == {}  # not due
    assert poll(NOW + 2 * MINUTE) == {"proposed": 1}
    lease.refresh_from_db()
    assert lease.end_reason == ""
    forge.merge(1)
    assert poll(NOW + 60 * MINUTE) == {"merged": 1}
    lease.refresh_from_db()
    task.refresh_from_db()
    assert (lease.end_reason, task.status, task.pull_request_number) == ("condition:pr.merged", "merged", 1)
    assert Environment.objects.get().outcome == {"pull_request": pull["html_url"], "state": "merged"}
    assert poll(NOW + 120 * MINUTE) == {}


def test_pull_request_that_is_closed_ends_the_task(forge: Forge, lease: Lease) -> None:
    create_task(forge, lease, completes_on="merge")
    poll()
    forge.pulls[0]["state"] = "closed"
    assert poll(NOW + 60 * MINUTE) == {"closed": 1}
    lease.refresh_from_db()
    assert lease.end_reason == "condition:pr.closed"


def test_lost_answer_of_the_creation_leaves_one_pull_request(forge: Forge, lease: Lease) -> None:
    task = create_task(forge, lease)
    forge.faults = [0, 0]  # the HTTP client repeats a GET once
    assert poll() == {"failed": 1}
    task.refresh_from_db()
    assert task.status == "pushed" and task.poll_error.startswith(f"GET pulls of {PROJECT} at 127.0.0.1")
    forge.pulls.clear()
    create = forge.create({"head": task.branch, "base": "main", "title": "x", "body": ""})  # was served, the answer is lost
    assert create[0] == 201
    assert poll(NOW + 2 * MINUTE) == {"proposed": 1}
    assert len(forge.pulls) == 1
    lease.refresh_from_db()
    assert lease.end_reason == "condition:task.complete"


def test_a_forge_that_does_not_answer_costs_a_pass_one_request(
    forge: Forge, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tasks than a pass reads of a forge wait for it, in several repositories, before that of another forge."""
    waiting = create_task(forge, lease)
    silent = [
        repositories.save(f"silent-{number}", now=NOW, clone_url=forge.clone_url, forge="github",
                          api_url="http://127.0.0.1:1", forge_project=PROJECT)[0]
        for number in range(3)
    ]  # fmt: skip
    rows = [{field.attname: getattr(waiting, field.attname) for field in CodingTask._meta.fields} for _ in range(3)]
    for number, row in enumerate(rows):
        environment = Environment.objects.create(pk=f"silent-{number}", type=waiting.environment.type)
        CodingTask.objects.create(**row | {
            "id": uuid4(), "environment_id": environment.pk, "repository_id": silent[number].pk, "branch": f"b{number}",
            "next_poll_at": NOW - MINUTE,
        })  # fmt: skip
    monkeypatch.setattr(server_calls, "SLOW_FAILURE", timedelta(0))
    assert pull_requests.poll_pull_requests(now=NOW, limit=1).counts == {"failed": 1, "postponed": 2, "proposed": 1}
    assert poll() == {}


def test_forges_that_do_not_answer_delay_no_task_at_another(forge: Forge, lease: Lease) -> None:
    """They hold their requests until the pull request exists, which is due after theirs."""
    waiting = create_task(forge, lease)
    row = {field.attname: getattr(waiting, field.attname) for field in CodingTask._meta.fields}
    with run_held_servers(lambda: forge.pulls) as servers:
        for number in range(40):
            name, api_url = f"held-{number}", f"{servers[number % 2].url}/{number}"
            repository, _ = repositories.save(
                name, now=NOW, clone_url=forge.clone_url, forge="github", api_url=api_url, forge_project=PROJECT
            )
            environment = Environment.objects.create(pk=name, type=waiting.environment.type)
            CodingTask.objects.create(**row | {
                "id": uuid4(), "environment_id": environment.pk, "repository_id": repository.pk, "branch": name,
                "next_poll_at": NOW - MINUTE,
            })  # fmt: skip
        assert poll() == {"proposed": 1, "failed": 40}
        assert all(len({request.path for request in server.received}) == 20 for server in servers)


def test_pull_request_that_appears_between_search_and_creation_is_found(
    forge: Forge, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_task(forge, lease)
    create = forge.create

    def create_twice(body: dict[str, str]) -> tuple[int, object]:
        create(body)
        return create(body)

    monkeypatch.setattr(forge, "create", create_twice)
    assert poll() == {"proposed": 1}
    assert len(forge.pulls) == 1


@pytest.mark.parametrize("status", [403, 429, 500, 401, 302])
def test_error_of_the_forge_is_stored_without_the_token_and_retried(forge: Forge, lease: Lease, status: int) -> None:
    task = create_task(forge, lease)
    forge.faults = [status]
    assert poll() == {"failed": 1}
    task.refresh_from_db()
    assert str(status) in task.poll_error and TOKEN not in task.poll_error
    assert poll(NOW + 2 * MINUTE) == {"proposed": 1}


def test_git_over_http_needs_the_token_which_no_error_contains(forge: Forge, lease: Lease) -> None:
    task = create_task(forge, lease)
    row = Repository.objects.get()
    with repositories.open_repository_git(row) as own:
        assert fetch_base(own, row, "main", depth=1) == git(forge.bare, "rev-parse", "main")
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        head = own.read(*identity, "commit-tree", "main^{tree}", "-p", "main", "-m", "Second")
        push(own, task, head)
    assert git(forge.bare, "rev-parse", task.branch) == head
    save(forge, token="wrong-token-0123456789")
    with repositories.open_repository_git(Repository.objects.get()) as own, pytest.raises(RepositoryUnavailable) as error:
        fetch_base(own, row, "main", depth=1)
    assert "wrong-token" not in str(error.value)


def push(own: Git, task: CodingTask, head: str) -> None:
    task.refresh_from_db()
    _push(own, task, head)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"clone_url": "ext::sh"}, "clone_url"), ({"api_url": "http://example.org"}, "api_url"),
        ({"forge_project": "x"}, "forge_project"),
        ({"base_branch": "a b"}, "base_branch"), ({"forge": "svn"}, "forge"),
    ],
)  # fmt: skip
def test_settings_of_a_repository_are_checked(db: None, fields: dict[str, str], name: str) -> None:
    valid = {"clone_url": "/srv/x.git", "forge": "github", "api_url": "https://api.github.com", "forge_project": "a/b"}
    with pytest.raises(InvalidRequest) as error:
        repositories.save("calc", now=NOW, **valid | fields)
    assert error.value.extra["field"] == name
    assert not Repository.objects.exists()
