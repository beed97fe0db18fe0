"""Shells of a lease through the API."""

from typing import Any

import pytest

from sandboxes.models import Sandbox
from tests.api.conftest import ApiClient, assert_refused

pytestmark = pytest.mark.django_db


@pytest.fixture
def url(lease: dict[str, Any]) -> str:
    return f"leases/{lease['id']}"


def look(client: ApiClient, url: str, **fields: object) -> tuple[str, str]:
    """Return the variable TOKEN and the working directory of a command."""
    token, cwd = (client.post(f"{url}/exec", {"argv": argv} | fields).json() for argv in (["printenv", "TOKEN"], ["pwd"]))
    return token["stdout"].strip(), cwd["stdout"].strip()


def test_two_shells_never_see_the_variables_of_each_other(ada: ApiClient, url: str) -> None:
    first = ada.post(f"{url}/shells", {"name": "one", "env": {"TOKEN": "first"}, "cwd": "/data"})
    assert (first.status_code, first.json()["env_names"]) == (201, ["TOKEN"])
    ada.post(f"{url}/shells", {"name": "two", "env": {"OTHER": "second"}})
    assert not Sandbox.objects.exists()
    assert [look(ada, url, shell=name) for name in ("one", "two")] == [("first", "/data"), ("", "/workspace")]
    assert look(ada, url) == ("", "/workspace")
    assert look(ada, url, shell="one", cwd="/workspace", env={"TOKEN": "own"}) == ("own", "/workspace")


def test_shells_are_listed_and_deleted_without_their_values(ada: ApiClient, url: str) -> None:
    shown = ada.post(f"{url}/shells", {"name": "one", "env": {"TOKEN": "s3cret"}}).json()
    assert ada.get(f"{url}/shells/one").json() == shown
    assert ada.get(f"{url}/shells").json() == {"results": [shown]}
    assert "s3cret" not in str(shown)
    for _ in range(2):
        assert ada.delete(f"{url}/shells/one").status_code == 204
    assert ada.get(f"{url}/shells").json() == {"results": []}


def test_background_process_runs_in_a_shell(ada: ApiClient, url: str) -> None:
    ada.post(f"{url}/shells", {"name": "one", "env": {"TOKEN": "first"}, "cwd": "/data"})
    process = ada.post(f"{url}/processes", {"argv": ["printenv", "TOKEN"], "shell": "one"}).json()
    assert (process["cwd"], process["env_names"]) == ("/data", ["TOKEN"])
    assert ada.get(f"{url}/processes/{process['process_id']}/logs").json()["content"] == "first\n"


def test_unknown_and_repeated_names_are_refused(ada: ApiClient, bob: ApiClient, url: str, lease: dict[str, Any]) -> None:
    assert ada.post(f"{url}/exec", {"argv": ["true"], "shell": "none"}).json()["code"] == "shell_not_found"
    assert ada.get(f"{url}/shells/none").status_code == 404
    assert ada.post(f"{url}/shells", {"name": "one"}, idempotency_key="k").status_code == 201
    assert ada.post(f"{url}/shells", {"name": "one"}, idempotency_key="k").status_code == 201
    again = ada.post(f"{url}/shells", {"name": "one"})
    assert (again.status_code, again.json()["code"], again.json()["field"]) == (409, "shell_exists", "name")
    assert_refused(ada, "GET", f"{url}/shells/a%20b", None, 400, "name")
    assert bob.get(f"{url}/shells/one").status_code in (403, 404)
    ada.post(f"{url}/release")
    assert ada.delete(f"{url}/shells/one").status_code == 410
