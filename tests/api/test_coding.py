"""Coding tasks over HTTP, as far as no sandbox is used."""

from pathlib import Path

import pytest
from django.utils import timezone

from leases.coding import repositories
from leases.coding.models import CodingTask
from leases.environments.models import Environment
from tests.api.conftest import ApiClient

pytestmark = pytest.mark.django_db
URL = "environments/task-1/coding-task"
BODY = {"repository": "calc", "title": "Fix add", "test_command": "pytest -q"}


@pytest.fixture(autouse=True)
def repository(db: None, tmp_path: Path) -> None:
    repositories.save("calc", clone_url=str(tmp_path), now=timezone.now())


def test_task_is_created_once_with_its_environment(operator: ApiClient) -> None:
    created = operator.post(URL, BODY)
    assert created.status_code == 201
    task = created.json()
    assert (task["status"], task["base_branch"], task["path"], task["base_commit"]) == ("open", "main", "/workspace/repo", "")
    assert task["branch"].startswith("leasehold/task-1-")
    assert Environment.objects.get().type_id == "coding"
    again = operator.post(URL, BODY)
    assert (again.status_code, again.json()) == (200, task)
    assert operator.get(URL).json() == task
    other = operator.post(URL, BODY | {"title": "Other"})
    assert (other.status_code, other.json()["field"]) == (409, "environment_id")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"repository": "none"}, "repository"), ({"repository": None}, "repository"), ({"title": ""}, "title"),
        ({"base_branch": "../x"}, "base_branch"), ({"completes_on": "never"}, "completes_on"),
        ({"environment_type": "none"}, "type"), ({"test_command": "x" * 501}, "test_command"),
    ],
)  # fmt: skip
def test_invalid_task_is_refused_and_changes_nothing(operator: ApiClient, changes: dict[str, str], field: str) -> None:
    response = operator.post(URL, BODY | changes)
    assert (response.status_code, response.json()["field"]) == (400, field)
    assert not CodingTask.objects.exists() and not Environment.objects.exists()


def test_disabled_repository_takes_no_task(operator: ApiClient) -> None:
    repositories.save("calc", enabled=False, now=timezone.now())
    assert operator.post(URL, BODY).json()["field"] == "repository"


def test_agent_reads_the_task_of_its_environment_and_creates_none(
    operator: ApiClient, ada: ApiClient, lease: dict[str, str]
) -> None:
    url = f"environments/{lease['environment_id']}/coding-task"
    assert ada.post(url, BODY).status_code == 403
    assert ada.get(url).json()["code"] == "coding_task_not_found"
    operator.post(url, BODY | {"environment_type": "catan"})
    assert ada.get(url).json()["title"] == "Fix add"
    operator.post(URL, BODY)
    assert ada.get(URL).json()["code"] == "environment_not_found"


def test_submission_without_a_task_or_a_checkout_is_refused(operator: ApiClient, ada: ApiClient, lease: dict[str, str]) -> None:
    submission = f"leases/{lease['id']}/submissions"
    assert ada.post(submission, {"title": "x"}).json()["code"] == "coding_task_not_found"
    operator.post(f"environments/{lease['environment_id']}/coding-task", BODY | {"environment_type": "catan"})
    assert ada.post(submission, {"title": "x"}).json()["code"] == "conflict"
