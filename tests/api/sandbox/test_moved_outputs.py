"""Answers with the output of a run that was moved to the object store."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from leases.models import EnvironmentType, IdempotentRequest, Turn
from leases.queue import attempts, queue
from sandboxes.models import Pool, Run
from sandboxes.state import run_outputs
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from tests.api.conftest import ADA, ApiClient
from tests.support.event_stream import Event, join_output, parse_events

pytestmark = pytest.mark.django_db
STDOUT, STDERR = json.dumps({"action": "x" * 20_000}), "e" * 9_000
BODY: dict[str, Any] = {"argv": ["sh", "-c", f"cat; echo {STDERR} >&2"], "stdin": STDOUT}
ANSWER = (STDOUT, f"{STDERR}\n")
CrashAt = Callable[[str], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def store(memory_store: MemoryStore) -> MemoryStore:
    return memory_store


@pytest.fixture
def lease_url(lease) -> str:
    return f"leases/{lease['id']}"


def move_outputs() -> None:
    later = timezone.now() + 2 * run_outputs.MOVE_AFTER
    assert run_outputs.move_large_outputs(now=later).counts == {"outputs moved": 1}
    assert not Run.objects.filter(stdout__isnull=False).exists()


def add_run(ada: ApiClient, lease_url: str) -> str:
    run_id = ada.post(f"{lease_url}/exec", BODY).json()["run_id"]
    return f"{lease_url}/runs/{run_id}"


def add_queued_run(ada: ApiClient, lease_url: str) -> str:
    queued = ada.post("runs", BODY | {"agent_did": ADA, "lease_id": lease_url.rpartition("/")[2], "queued": True}).json()
    row = queue.claim("r1", now=timezone.now())
    assert row
    attempts.execute(row, now=timezone.now())
    return f"runs/queued/{queued['queued_run_id']}"


def add_one_shot_run(ada: ApiClient, lease_url: str) -> str:
    result = ada.post("runs", BODY | {"agent_did": ADA, "pool": Pool.objects.latest("pk").name}).json()
    return f"runs/{result['run_id']}"


@pytest.mark.parametrize("add", [add_run, add_queued_run, add_one_shot_run])
def test_document_has_the_moved_output(
    ada: ApiClient, lease_url: str, store: MemoryStore, add: Callable[[ApiClient, str], str]
) -> None:
    path = add(ada, lease_url)
    before = ada.get(path).json()
    assert (before["stdout"], before["stderr"]) == ANSWER
    move_outputs()
    assert ada.get(path).json() == before
    with store.fail("download", StoreError("memory", "download", "away")):
        response = ada.get(path)
    assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")


def read_events(ada: ApiClient, path: str, **headers: str) -> list[Event]:
    response = ada.get(f"{path}/stream", **headers)
    return list(parse_events(b"".join(response.streaming_content).splitlines(keepends=True)))


def test_stream_replays_the_moved_output(ada: ApiClient, lease_url: str, store: MemoryStore) -> None:
    path = add_run(ada, lease_url)
    before = read_events(ada, path)
    move_outputs()
    assert read_events(ada, path) == before and (join_output(before, "stdout"), join_output(before, "stderr")) == ANSWER
    assert [event.name for event in read_events(ada, path, last_event_id=before[1].id)] == ["stderr", "exit"]


def test_stream_is_interrupted_while_the_store_does_not_respond(ada: ApiClient, lease_url: str, store: MemoryStore) -> None:
    path = add_run(ada, lease_url)
    before = read_events(ada, path)
    move_outputs()
    with store.fail("download", StoreError("memory", "download", "away")):
        assert read_events(ada, path) == before[:1]
        assert read_events(ada, path, last_event_id=before[-2].id) == before[-1:]  # needs no output
    assert read_events(ada, path) == before


def test_exec_whose_process_died_is_answered_with_the_moved_output(
    ada: ApiClient, lease_url: str, store: MemoryStore, crash_at: CrashAt
) -> None:
    with crash_at("acted"):
        ada.post(f"{lease_url}/exec", BODY, idempotency_key="k1")
    move_outputs()
    IdempotentRequest.objects.update(deadline_at=F("deadline_at") - timedelta(hours=3))
    with store.fail("download", StoreError("memory", "download", "away")):
        assert ada.post(f"{lease_url}/exec", BODY, idempotency_key="k1").status_code == 503
    result = ada.post(f"{lease_url}/exec", BODY, idempotency_key="k1").json()
    assert (result["stdout"], result["stderr"]) == ANSWER
    assert Run.objects.count() == 1


def test_turn_whose_process_died_has_the_action_of_the_moved_output(ada: ApiClient, lease_url: str, crash_at: CrashAt) -> None:
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["cat"])
    body = {"turn_number": 1, "state": json.loads(STDOUT)}
    with crash_at("turn answered"):
        ada.post(f"{lease_url}/turns", body)
    move_outputs()
    Turn.objects.update(deadline_at=F("started_at") + timedelta(microseconds=1))
    assert ada.post(f"{lease_url}/turns", body).json()["action"] == json.loads(STDOUT)
