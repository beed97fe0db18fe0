"""Exec, turns and files of a lease through the API."""

import base64
import uuid
from collections import Counter
from threading import BoundedSemaphore

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from leases import leasing
from leases.models import EnvironmentType
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Run
from tests.api.conftest import ApiClient

pytestmark = pytest.mark.django_db


@pytest.fixture
def lease_url(lease) -> str:
    return f"leases/{lease['id']}"


def test_exec_returns_exit_code_and_output_and_renews_the_lease(ada: ApiClient, lease_url: str) -> None:
    before = ada.get(lease_url).json()["expires_at"]
    response = ada.post(f"{lease_url}/exec", {"argv": ["sh", "-c", "echo hello; echo oops >&2; exit 3"]})
    result = response.json()
    assert (response.status_code, result["exit_code"], result["stdout"], result["stderr"]) == (200, 3, "hello\n", "oops\n")
    assert (result["timed_out"], result["oom"], result["truncated"]) == (False, False, False)
    assert Run.objects.get(pk=result["run_id"]).exit_code == 3
    assert ada.get(lease_url).json()["expires_at"] > before


@pytest.mark.django_db(transaction=True)
def test_exec_in_an_awake_sandbox_takes_few_statements_and_two_commits(ada: ApiClient, lease_url: str) -> None:
    """SQLite executes the steps of one PostgreSQL statement in turn, without round trips."""
    ada.post(f"{lease_url}/exec", {"argv": ["true"]})
    with CaptureQueriesContext(connection) as statements:
        assert ada.post(f"{lease_url}/exec", {"argv": ["true"]}).status_code == 200
    verbs = Counter(statement["sql"].partition(" ")[0] for statement in statements)
    if connection.vendor == "postgresql":
        assert (len(statements), verbs["COMMIT"], verbs["WITH"]) == (8, 1, 2)  # the second chain commits itself
    else:
        assert (len(statements), verbs["COMMIT"]) == (14, 2)


def test_exec_passes_env_cwd_and_stdin_and_base64_is_exact(ada: ApiClient, lease_url: str) -> None:
    def run(query: str = "", **payload: object) -> str:
        stdout: str = ada.post(f"{lease_url}/exec{query}", payload).json()["stdout"]
        return stdout

    assert run(argv=["cat"], stdin="héllo\u0000") == "héllo\0"
    assert run(argv=["pwd"], cwd="/data") == "/data\n"
    assert run(argv=["printenv", "WORD"], env={"WORD": "x y"}) == "x y\n"
    assert run(argv=["printf", r"a\377b"]) == "a\N{REPLACEMENT CHARACTER}b"
    raw = bytes(range(256))
    assert base64.b64decode(run("?encoding=base64", argv=["cat"], stdin=base64.b64encode(raw).decode())) == raw


def test_timeout_and_oom_are_results(ada: ApiClient, lease_url: str) -> None:
    response = ada.post(f"{lease_url}/exec", {"argv": ["sleep", "600"], "timeout_seconds": 5})
    assert (response.status_code, response.json()["timed_out"], response.json()["duration_seconds"]) == (200, True, 5.0)
    assert ada.post(f"{lease_url}/exec", {"argv": ["oom"]}).json()["oom"] is True


@pytest.mark.parametrize("verb", ["create", "exec"])
def test_a_lease_that_ends_during_a_start_or_an_exec_is_gone(ada: ApiClient, lease_url: str, lease, memory, verb: str) -> None:
    memory.before(verb, lambda ref: leasing.release(uuid.UUID(lease["id"]), now=timezone.now()))
    response = ada.post(f"{lease_url}/exec", {"argv": ["true"]})
    assert (response.status_code, response.json()["end_reason"]) == (410, "released")
    run_ids = [str(pk) for pk in Run.objects.values_list("pk", flat=True)]  # the run has begun, or is not opened at all
    assert [response.json()["run_id"]] == run_ids if verb == "exec" else (response.json().get("run_id"), run_ids) == (None, [])


@pytest.mark.parametrize(("status", "code"), [(429, "too_many_runs"), (503, "server_busy")])
def test_too_many_runs_are_refused_and_the_same_request_can_be_repeated(
    ada: ApiClient, lease_url: str, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    body, key = {"argv": ["true"]}, {"idempotency_key": "k1"}
    ada.post(f"{lease_url}/exec", body)
    with override_settings(MAX_RUNS_PER_AGENT=0 if status == 429 else 1), monkeypatch.context() as patch:
        if status == 503:
            full = BoundedSemaphore(1)
            full.acquire()
            patch.setattr(LONG_CALLS, "_permits", full)
        refused = ada.post(f"{lease_url}/exec", body, **key)
    assert (refused.status_code, refused.json()["code"], refused["Retry-After"]) == (status, code, "5")
    assert (Run.objects.count(), ada.post(f"{lease_url}/exec", body, **key).status_code) == (1, 200)


def test_runs_are_listed_without_output_and_returned_with_it(ada: ApiClient, lease_url: str) -> None:
    run_id = ada.post(f"{lease_url}/exec", {"argv": ["echo", "hi"], "env": {"TOKEN": "s3cret"}}).json()["run_id"]
    (listed,) = ada.get(f"{lease_url}/runs").json()["results"]
    assert (listed["run_id"], listed["argv"], listed["env_names"]) == (run_id, ["echo", "hi"], ["TOKEN"])
    assert "stdout" not in listed
    assert "s3cret" not in str(listed)
    assert ada.get(f"{lease_url}/runs/{run_id}").json()["stdout"] == "hi\n"
    assert ada.get(f"{lease_url}/runs/{uuid.uuid4()}").status_code == 404


# --- turns --------------------------------------------------------------------------------------------------------


def test_a_turn_returns_its_action_and_repeated_the_stored_result(ada: ApiClient, lease_url: str) -> None:
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["cat"])
    first = ada.post(f"{lease_url}/turns", {"turn_number": 1, "state": {"action": "roll"}})
    result = first.json()
    assert (first.status_code, result["turn_number"], result["skipped"]) == (200, 1, False)
    assert result["action"] == {"action": "roll"}
    assert Run.objects.get(pk=result["run_id"]).kind == "turn"
    again = ada.post(f"{lease_url}/turns", {"turn_number": 1, "state": {"action": "other"}})
    assert (again.json(), Run.objects.count()) == (result, 1)
    assert ada.get(f"{lease_url}/turns").json()["results"] == [result]
    largest_state = {"board": "x" * ((1 << 20) - 100)}
    assert ada.post(f"{lease_url}/turns", {"turn_number": 2, "state": largest_state}).status_code == 200


def test_a_turn_that_fails_is_skipped(ada: ApiClient, lease_url: str) -> None:
    EnvironmentType.objects.update(turn_argv=["false"])
    result = ada.post(f"{lease_url}/turns", {"turn_number": 0, "state": {}}).json()
    assert (result["skipped"], result["action"]["action"]) == (True, "skip_turn")
