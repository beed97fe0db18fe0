"""Background processes through the API."""

import base64
import uuid
from typing import Any
from urllib.parse import quote

import pytest
from django.utils import timezone

from leases import leasing
from leases.models import IdempotentRequest, Lease
from sandboxes import process_restarts
from sandboxes.models import Run, Sandbox
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider, ProgramResult
from sandboxes.sweeps import passes
from tests.api.conftest import ApiClient, assert_refused
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db
WATCH = {"argv": ["sh", "-c", "echo Connected to relay; sleep 300"], "env": {"TOKEN": "s3cret"}, "name": "watcher"}


@pytest.fixture
def processes_url(lease: dict[str, Any]) -> str:
    return f"leases/{lease['id']}/processes"


def test_a_process_is_started_listed_and_returned(ada: ApiClient, processes_url: str) -> None:
    started = ada.post(processes_url, WATCH | {"keep_awake": True})
    result = started.json()
    assert result["keep_awake"] is True
    assert (started.status_code, result["state"], result["exit_code"], result["found"]) == (201, "running", None, None)
    assert (result["name"], result["argv"], result["env_names"]) == ("watcher", WATCH["argv"], ["TOKEN"])
    shown = ada.get(f"{processes_url}/{result['process_id']}").json()
    assert shown == {name: value for name, value in result.items() if name != "found"}
    assert ada.get(processes_url).json() == {"results": [shown], "next": None}
    assert "s3cret" not in str(ada.get(processes_url).json())


def test_restart_ends_the_processes(ada: ApiClient, lease: dict[str, Any], processes_url: str) -> None:
    url = f"leases/{lease['id']}/restart"
    assert ada.post(url).json() == {"sandbox": None, "agent_outdated": False}
    process = ada.post(processes_url, WATCH).json()
    restarted = ada.post(url, idempotency_key="k")
    assert (restarted.status_code, restarted.json()["sandbox"]["state"]) == (200, "waiting")
    assert ada.post(url, idempotency_key="k").json() == restarted.json()
    assert ada.get(f"{processes_url}/{process['process_id']}").json()["state"] == "gone"


def test_restart_says_that_the_agent_is_still_of_another_version(
    ada: ApiClient, lease: dict[str, Any], processes_url: str, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada.post(processes_url, WATCH)
    url = f"leases/{lease['id']}/restart"
    assert ada.post(url).json()["agent_outdated"] is False
    monkeypatch.setattr(memory, "has_outdated_agent", lambda ref: True)
    assert ada.post(url).json()["agent_outdated"] is True


def test_a_restart_policy_is_returned_and_each_restart_counted(ada: ApiClient, processes_url: str) -> None:
    plain = ada.post(processes_url, WATCH).json()
    assert (plain["restart"], plain["restart_after_wake"], plain["restarts"], plain["next_restart_at"]) == (
        "never",
        False,
        0,
        None,
    )
    fields = {"restart": "on_failure", "max_restarts": 2, "restart_window_seconds": 3600, "restart_after_wake": True}
    started = ada.post(processes_url, WATCH | fields).json()
    assert {name: started[name] for name in fields} == fields
    url = f"{processes_url}/{started['process_id']}"
    ended = ada.post(f"{url}/signal", {"signal": "TERM"}).json()
    assert (ended["state"], ended["exit_code"], ended["restarts"]) == ("exited", 143, 0)
    assert ended["next_restart_at"] > ended["ended_at"]
    assert process_restarts.restart_due(now=timezone.now() + MINUTE).counts == {"processes restarted": 1}
    restarted = ada.get(url).json()
    assert (restarted["state"], restarted["restarts"], restarted["exit_code"], restarted["next_restart_at"]) == (
        "running", 1, None, None,
    )  # fmt: skip
    assert restarted["restarted_at"] > restarted["started_at"] == started["started_at"]
    assert ada.get(f"{url}/logs").json()["content"] == "Connected to relay\n"
    assert "s3cret" not in str(ada.get(processes_url).json())


def test_a_deleted_process_is_not_restarted(ada: ApiClient, processes_url: str) -> None:
    url = f"{processes_url}/{ada.post(processes_url, WATCH | {'restart': 'always'}).json()['process_id']}"
    assert ada.post(f"{url}/signal", {"signal": "TERM"}).json()["next_restart_at"]
    killed = ada.delete(url).json()
    assert (killed["state"], killed["exit_code"], killed["next_restart_at"]) == ("exited", 143, None)
    assert process_restarts.restart_due(now=timezone.now() + 60 * MINUTE).counts == {}


def test_signal_ends_a_process_and_is_refused_afterwards(ada: ApiClient, processes_url: str) -> None:
    url = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}"
    assert ada.post(f"{url}/signal", {"signal": "USR1"}).json()["state"] == "running"
    assert_refused(ada, "POST", f"{url}/signal", {"signal": "SIGTERM"}, 400, "signal")
    stopped = ada.post(f"{url}/signal", {"signal": "TERM"}).json()
    assert (stopped["state"], stopped["exit_code"]) == ("exited", 143)
    again = ada.post(f"{url}/signal", {"signal": "TERM"})
    assert (again.status_code, again.json()["code"]) == (409, "process_ended")


def test_a_wait_for_a_pattern_returns_the_match_or_says_why_not(ada: ApiClient, processes_url: str) -> None:
    url = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}/wait"
    found = ada.post(url, {"pattern": "to (?P<name>[a-z]+)\\n"}, idempotency_key="k")
    assert found.json() == {"outcome": "matched", "match": "to relay\n", "start": 10, "end": 19, "next": 19}
    assert ada.post(url, {"pattern": "to (?P<name>[a-z]+)\\n"}, idempotency_key="k").json() == found.json()
    encoded = ada.post(f"{url}?encoding=base64", {"pattern": "relay"}).json()
    assert base64.b64decode(encoded["match"]) == b"relay"
    late = ada.post(url, {"pattern": "^Connected", "start": 1, "wait_seconds": 1}).json()
    assert late == {"outcome": "timed_out", "match": None, "start": None, "end": None, "next": 1}
    ended = f"{processes_url}/{ada.post(processes_url, {'argv': ['echo', 'bye']}).json()['process_id']}/wait"
    assert ada.post(ended, {"pattern": "hello", "wait_seconds": 300}).json()["outcome"] == "process_ended"
    assert ada.post(ended, {"pattern": "(?i)BYE"}).json()["match"] == "bye"


def test_a_wait_for_a_bad_pattern_names_the_field(ada: ApiClient, processes_url: str) -> None:
    url = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}/wait"
    problem = assert_refused(ada, "POST", url, {"pattern": "(a"}, 400, "pattern")
    assert "missing )" in problem["detail"]
    assert ada.post(f"{processes_url}/{uuid.uuid4()}/wait", {"pattern": "a"}).status_code == 404


def test_start_waits_for_a_port(ada: ApiClient, processes_url: str, memory: MemoryProvider) -> None:
    listening = b"sl local rem st\n0: 0100007F:1F90 00000000:0000 0A\n"
    memory.programs["cat"] = lambda call: ProgramResult(stdout=listening)
    assert ada.post(processes_url, WATCH | {"wait_for_port": 8080, "wait_seconds": 5}).json()["found"] is True
    assert ada.post(processes_url, {"argv": ["echo"], "wait_for_port": 8080}).json()["found"] is False
    assert_refused(ada, "POST", processes_url, WATCH | {"wait_for_port": 80, "wait_for": "x"}, 400, "wait_for_port")


def test_stdin_is_written_by_offset(ada: ApiClient, processes_url: str) -> None:
    url = f"{processes_url}/{ada.post(processes_url, WATCH | {'stdin': True}).json()['process_id']}"
    assert ada.post(f"{url}/stdin", {"content": "h\u00e9", "offset": 0}).json() == {"next": 3}
    content = base64.b64encode(b"\xff").decode()
    assert ada.post(f"{url}/stdin?encoding=base64", {"content": content, "offset": 3, "last": True}).json() == {"next": 4}
    refused = ada.post(f"{url}/stdin", {"content": "x", "offset": 9})
    assert (refused.status_code, refused.json()["code"]) == (400, "provider_rejected")
    other = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}"
    assert ada.post(f"{other}/stdin", {"content": "x", "offset": 0}).status_code == 400


def test_start_waits_for_the_text(ada: ApiClient, processes_url: str) -> None:
    result = ada.post(processes_url, WATCH | {"wait_for": "Connected to", "wait_seconds": 5}).json()
    assert (result["found"], result["state"]) == (True, "running")
    result = ada.post(processes_url, {"argv": ["echo", "bye"], "wait_for": "Connected"}).json()
    assert (result["found"], result["state"], result["exit_code"]) == (False, "exited", 0)


def test_a_log_is_read_from_an_offset_and_waited_for(ada: ApiClient, processes_url: str) -> None:
    logs = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}/logs"
    assert ada.get(logs).json() == {"content": "Connected to relay\n", "start": 0, "next": 19, "found": None}
    assert ada.get(f"{logs}?start=10&length=2").json() == {"content": "to", "start": 10, "next": 12, "found": None}
    assert ada.get(f"{logs}?wait_for={quote('to relay')}").json()["found"] is True
    assert ada.get(f"{logs}?start=19&wait_for=relay&wait_seconds=1").json()["found"] is False


def test_a_log_has_bytes_in_base64_and_shows_that_output_was_dropped(ada: ApiClient, processes_url: str, memory) -> None:
    memory.programs["babble"] = lambda call: ProgramResult(stdout=b"a\xff" * (3 << 19))
    logs = f"{processes_url}/{ada.post(processes_url, {'argv': ['babble']}).json()['process_id']}/logs"
    shown = {"content": "a\N{REPLACEMENT CHARACTER}", "start": 2 << 20, "next": (2 << 20) + 2, "found": None}
    assert ada.get(f"{logs}?length=2").json() == shown
    assert base64.b64decode(ada.get(f"{logs}?length=2&encoding=base64").json()["content"]) == b"a\xff"


def test_invalid_log_parameters_are_named(ada: ApiClient, processes_url: str) -> None:
    logs = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}/logs"
    for query in (
        "start=-1", "start=x", "start=9999999999999999999", "length=0", "length=2000000", "wait_seconds=301&wait_for=a",
        "encoding=utf-16", f"wait_for={'x' * 1001}",
    ):  # fmt: skip
        assert_refused(ada, "GET", f"{logs}?{query}", None, 400, query.partition("=")[0])


def test_kill_returns_the_process_and_is_idempotent(ada: ApiClient, processes_url: str) -> None:
    process_url = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}"
    for _ in range(2):
        killed = ada.delete(process_url)
        assert (killed.status_code, killed.json()["state"], killed.json()["exit_code"]) == (200, "killed", 137)
    assert ada.get(f"{process_url}/logs").json()["content"] == "Connected to relay\n"


def test_a_process_of_another_lease_is_not_found(ada: ApiClient, processes_url: str, acquire_body) -> None:
    other = ada.post("leases", acquire_body(environment_id="game-2")).json()["id"]
    other_process = ada.post(f"leases/{other}/processes", WATCH).json()["process_id"]
    for method, path in (("GET", other_process), ("GET", f"{other_process}/logs"), ("DELETE", other_process)):
        assert_refused(ada, method, f"{processes_url}/{path}", None, 404)


def test_the_number_of_processes_is_limited(ada: ApiClient, processes_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.processes.MAX_PROCESSES", 1)
    process_id = ada.post(processes_url, WATCH).json()["process_id"]
    refused = ada.post(processes_url, WATCH, idempotency_key="one-more")
    assert (refused.status_code, refused.json()["code"]) == (409, "too_many_processes")
    assert not IdempotentRequest.objects.exists()
    ada.delete(f"{processes_url}/{process_id}")
    assert ada.post(processes_url, WATCH, idempotency_key="one-more").status_code == 201


def test_an_interrupted_start_is_not_repeated_and_names_the_process(ada: ApiClient, processes_url: str, crash_at) -> None:
    with crash_at("process started"):
        ada.post(processes_url, WATCH, idempotency_key="k1")
    IdempotentRequest.objects.update(deadline_at=Lease.objects.get().leased_at)
    assert ada.post(processes_url, WATCH, idempotency_key="k1").json()["code"] == "idempotency_in_progress"
    Run.objects.update(released=True)  # as the start of the next process does
    passes.recover_stalled(now=timezone.now())
    response = ada.post(processes_url, WATCH, idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (409, "outcome_unknown")
    assert ada.get(f"{processes_url}/{response.json()['run_id']}").json()["argv"] == WATCH["argv"]


def test_a_provider_that_does_not_answer_is_unavailable(ada: ApiClient, processes_url: str, memory: MemoryProvider) -> None:
    process_url = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}"
    for verb in ("start", "processes", "log", "kill"):
        memory.fail(verb, Unavailable("engine down"))
    responses = [ada.get(processes_url), ada.get(process_url), ada.get(f"{process_url}/logs"), ada.delete(process_url)]
    responses.append(ada.post(processes_url, WATCH))
    assert {(response.status_code, response.json()["code"]) for response in responses} == {(503, "provider_unavailable")}
    assert all(int(response["Retry-After"]) > 0 for response in responses)
    assert Run.objects.get(pk=responses[-1].json()["run_id"]).outcome == "error"


def test_a_process_is_gone_after_sleep_and_after_the_lease(ada: ApiClient, processes_url: str, lease, now) -> None:
    process_url = f"{processes_url}/{ada.post(processes_url, WATCH).json()['process_id']}"
    passes.evict_idle(now=Sandbox.objects.get().idle_at + MINUTE)
    response = ada.get(f"{process_url}/logs")
    assert (response.status_code, response.json()["code"]) == (404, "output_gone")
    assert ada.delete(process_url).json()["state"] == "gone"
    assert Sandbox.objects.get().state == "cold"
    leasing.release(uuid.UUID(lease["id"]), now=now)
    assert ada.get(process_url).json()["state"] == "gone"
    assert [row["state"] for row in ada.get(processes_url).json()["results"]] == ["gone"]
    for response in (ada.get(f"{process_url}/logs"), ada.delete(process_url)):
        assert (response.status_code, response.json()["code"]) == (410, "lease_ended")
