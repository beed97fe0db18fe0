"""Agent runs through the API. The agent CLI is `cat`, which prints its prompt: the prompt is the output of the agent."""

import json
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import LazySettings, settings
from django.db import OperationalError, connections
from django.utils import timezone

from leases import execution, leasing, sweeps
from leases.agent_runs import lifecycle, recorder
from leases.agent_runs.models import AgentRun
from leases.agent_runs.results import load_result
from leases.api import command_threads
from leases.models import EnvironmentType
from sandboxes.db import connection_errors, database_time
from sandboxes.models import Event as OutboxEvent
from sandboxes.models import Host, LlmCall, Policy, Run, Sandbox, SandboxState, Transition
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import retention
from sandboxes.storage.base import StoreError
from sandboxes.stores import lease_stores
from sandboxes.streams import reader
from sandboxes.streams.registry import OPEN_STREAMS
from sandboxes.webhooks import outbox
from tests.api.conftest import ApiClient, assert_refused
from tests.support.billing import ADA
from tests.support.event_stream import Event, parse_events
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
WAIT_SECONDS = 10.0
MESSAGES = (
    {"type": "system", "session_id": "s-1"},
    {"type": "assistant", "turn_id": "t1", "text": "Looking.", "tool_calls": [{"name": "shell", "command": "ls"}]},
    {"type": "tool", "output": "a.txt"},
    {"type": "assistant", "turn_id": "t2", "text": "There is a.txt."},
    {"type": "result", "cost_usd": "0.25"},
)


@pytest.fixture
def url(lease: dict[str, Any]) -> Iterator[str]:
    yield f"leases/{lease['id']}/agent-runs"
    command_threads.join_all()
    connections.close_all()


def print_lines(*documents: Any) -> str:
    return "".join(f"{document if isinstance(document, str) else json.dumps(document)}\n" for document in documents)


def run_agent(client: ApiClient, url: str, *documents: Any, **fields: Any) -> dict[str, Any]:
    """Run an agent that prints documents, and return the agent run once it is closed."""
    body = {"cli": "program", "argv": ["cat"], "prompt": print_lines(*documents)} | fields
    response = client.post(url, body)
    assert response.status_code == 201, response.content
    return wait_for_end(client, f"{url}/{response.json()['run_id']}")


def wait_for_end(client: ApiClient, run_url: str) -> dict[str, Any]:
    wait_until(lambda: client.get(run_url).json()["ended_at"], "the agent run is closed", within=WAIT_SECONDS)
    document: dict[str, Any] = client.get(run_url).json()
    return document


def read_events(client: ApiClient, run_url: str, last_event_id: str = "") -> list[Event]:
    response = client.get(f"{run_url}/stream", **({"last_event_id": last_event_id} if last_event_id else {}))
    assert (response.status_code, response.headers["Content-Type"]) == (200, "text/event-stream")
    return list(parse_events(b"".join(response.streaming_content).splitlines(keepends=True)))


def read_chat(client: ApiClient, url: str) -> list[dict[str, Any]]:
    page = client.get(f"{url.removesuffix('/agent-runs')}/chat?order=oldest&limit=100").json()
    return [event["message"] for event in page["results"]]


def test_messages_are_recorded_and_summed_up(ada: ApiClient, url: str) -> None:
    row = run_agent(ada, url, *MESSAGES)
    assert (row["state"], row["exit_code"], row["session_id"], row["is_error"]) == ("completed", 0, "s-1", False)
    assert (row["message_count"], row["turn_count"], row["malformed_count"], row["lost_bytes"]) == (5, 2, 0, 0)
    assert (row["result"], row["reported_cost_usd"]) == ("There is a.txt.", "0.250000000")
    prompt, *chat = read_chat(ada, url)
    assert (prompt["role"], prompt["content"], prompt["sequence"]) == ("user", print_lines(*MESSAGES), 0)
    assert [message["content"] for message in chat] == [*MESSAGES]
    assert [message["role"] for message in chat] == ["system", "assistant", "tool", "assistant", "result"]
    assert [message["sequence"] for message in chat] == [1, 2, 3, 4, 5]
    audit = ada.get(f"{url.removesuffix('/agent-runs')}/audit?order=oldest").json()["results"]
    assert [event["entry"]["action"] for event in audit] == ["agent_run.requested", "agent_run.ended"]
    assert ada.get(url).json()["results"] == [row]
    event = OutboxEvent.objects.get(kind="agent_run.ended").payload
    assert (event["run_id"], event["state"], event["turn_count"]) == (row["run_id"], "completed", 2)


def test_stream_is_replayed_and_continued_after_any_event(ada: ApiClient, url: str) -> None:
    row = run_agent(ada, url, MESSAGES[0], "no json", *MESSAGES[1:])
    run_url = f"{url}/{row['run_id']}"
    events = read_events(ada, run_url)
    assert [event.name for event in events] == ["start", "message", "malformed", *["message"] * 4, "end"]
    assert [event.data["message"] for event in events if event.name == "message"] == [*MESSAGES]
    assert [event.data["sequence"] for event in events[1:-1]] == [1, 2, 3, 4, 5, 6]
    assert events[-1].data == row
    for number, event in enumerate(events[:-1]):
        assert read_events(ada, run_url, event.id) == events[number + 1 :]
    assert ada.get(f"{run_url}/stream", last_event_id=events[-1].id).status_code == 204
    assert ada.get(f"{run_url}/stream", last_event_id="1-2").json()["field"] == "Last-Event-ID"
    assert OPEN_STREAMS.count() == 0


def test_session_that_could_be_an_option_is_ignored(ada: ApiClient, url: str) -> None:
    ids = ("--dangerously-skip-permissions", "../x", "a b", "x" * 129, "*")
    assert run_agent(ada, url, *({"type": "system", "session_id": each} for each in ids))["session_id"] == ""


def test_failed_agent_is_a_result(ada: ApiClient, url: str) -> None:
    assert run_agent(ada, url, {"type": "result", "text": "No.", "is_error": True})["state"] == "failed"
    row = run_agent(ada, url, "x", argv=["missing-program"])
    assert (row["state"], row["exit_code"], row["is_error"], row["result"]) == ("failed", 127, None, "")
    events = read_events(ada, f"{url}/{row['run_id']}")
    assert [(event.name, event.data.get("data")) for event in events[1:-1]] == [("stderr", "missing-program: not found\n")]


def test_output_that_is_not_available_is_counted_as_lost(ada: ApiClient, url: str, memory: MemoryProvider) -> None:
    """The agent in the sandbox has dropped the result, and the row has the beginning of the output only."""
    memory.after("exec", memory.drop_results)
    row = run_agent(ada, url, MESSAGES[0], {"output": "x" * settings.RUN_OUTPUT_KEPT}, MESSAGES[1])
    assert (row["state"], row["message_count"], row["malformed_count"]) == ("completed", 1, 0)
    lost = row["lost_bytes"]
    assert lost == Run.objects.get(kind="exec").stdout_bytes - settings.RUN_OUTPUT_KEPT
    events = read_events(ada, f"{url}/{row['run_id']}")
    assert [(event.name, event.data.get("lost_bytes")) for event in events[1:-1]] == [("message", None), ("gap", lost)]


LONG_MESSAGES = (MESSAGES[0], {"type": "tool", "output": "x" * 200_000}, *MESSAGES[1:])


def find_retained(memory: MemoryProvider) -> bool:
    """Return whether the sandbox still has the result of the agent run."""
    run = Run.objects.select_related("sandbox").get(kind="exec")
    return memory.find_exec(run.sandbox.ref, str(run.pk)) is not None


def test_recorder_acknowledges_the_output_however_long_it_takes(
    ada: ApiClient, url: str, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time after which the output of a stream is dropped has passed when the recorder begins to read."""
    monkeypatch.setattr(retention, "acknowledge_later", lambda provider, ref, mark, **_: provider.acknowledge_exec(ref, mark))
    monkeypatch.setattr(reader, "REPLAY_PERIOD", timedelta(0))
    store, execute, has_ended = lease_stores.EventStore.append, execution.exec_command, threading.Event()

    def execute_command(*args: Any, **options: Any) -> Any:
        result = execute(*args, **options)
        has_ended.set()
        return result

    def store_after_the_end(self: Any, document: Any, **options: Any) -> Any:
        if document.get("sequence") == 1:
            assert has_ended.wait(WAIT_SECONDS)
        return store(self, document, **options)

    monkeypatch.setattr(execution, "exec_command", execute_command)
    monkeypatch.setattr(lease_stores.EventStore, "append", store_after_the_end)
    row = run_agent(ada, url, *LONG_MESSAGES)
    assert (row["message_count"], row["lost_bytes"], row["result"]) == (6, 0, "There is a.txt.")
    command_threads.join_all()
    assert not find_retained(memory)


@pytest.mark.parametrize("is_lost", [False, True])
def test_output_of_a_dead_recorder_is_recorded_by_a_sweep(
    ada: ApiClient, url: str, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Neither the process that waited for the command nor a sweep that closes its Run drops the output."""

    def fail(*args: Any) -> None:
        raise OperationalError("the connection is closed")

    monkeypatch.setattr(retention, "REPLAY_SECONDS", 0.0)  # for clients, once the output is recorded
    with monkeypatch.context() as patch:
        patch.setattr(recorder.Recorder, "record", fail)
        if is_lost:
            memory.after("exec", fail)
        ada.post(url, {"cli": "program", "argv": ["cat"], "prompt": print_lines(*LONG_MESSAGES)})
        command_threads.join_all()
    later = timezone.now() + timedelta(hours=2)
    with memory.fail("open_output", Unavailable("no answer")), memory.fail("find_exec", Unavailable("no answer")):
        failed = sweeps.recover_stalled(now=later)
    assert len(failed.failures) == 1 and AgentRun.objects.get().ended_at is None
    sweeps.recover_stalled(now=later + timedelta(hours=1))
    sweeps.recover_stalled(now=later + timedelta(hours=2))
    row = AgentRun.objects.get()
    assert (row.state, row.message_count, row.lost_bytes, row.result) == ("completed", 6, 0, "There is a.txt.")
    assert not find_retained(memory)


def test_outage_of_the_store_delays_the_record(ada: ApiClient, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = lease_stores.EventStore.append, iter(range(30))

    def fail(self: Any, document: Any, **options: Any) -> Any:
        if document.get("sequence") == 3 and next(failures, None) is not None:
            raise StoreError("stores", "append", "no")
        return store(self, document, **options)

    monkeypatch.setattr(lease_stores.EventStore, "append", fail)
    monkeypatch.setattr(recorder, "time", SimpleNamespace(sleep=lambda seconds: None))
    row = run_agent(ada, url, *MESSAGES)
    assert (row["state"], row["message_count"], row["lost_bytes"]) == ("completed", 5, 0)


def test_longer_outage_of_the_store_is_waited_for_once(ada: ApiClient, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, pauses = lease_stores.EventStore.append, list[float]()

    def fail(self: Any, document: Any, **options: Any) -> Any:
        if document.get("sequence"):  # not the prompt
            raise StoreError("stores", "append", "no")
        return store(self, document, **options)

    monkeypatch.setattr(lease_stores.EventStore, "append", fail)
    monkeypatch.setattr(recorder, "time", SimpleNamespace(sleep=pauses.append))
    row = run_agent(ada, url, *MESSAGES)
    assert (row["state"], row["message_count"]) == ("completed", 5)
    assert row["lost_bytes"] == sum(len(json.dumps(message)) for message in MESSAGES)
    assert pauses == [*recorder.STORE_RETRY_PAUSES_SECONDS]


def test_large_message_becomes_an_artifact(ada: ApiClient, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_INLINE_BYTES", 1000)
    message = {"type": "tool", "output": "x" * 1000}
    row = run_agent(ada, url, MESSAGES[0], message)
    content = read_chat(ada, url)[2]["content"]
    assert (content["type"], content["artifact"]) == ("tool", f"agent-run-{row['run_id']}-2.json")
    artifact = ada.get(f"{url.removesuffix('/agent-runs')}/artifacts/{content['artifact']}")
    assert json.loads(b"".join(artifact.streaming_content) if artifact.streaming else artifact.content) == message


@pytest.mark.parametrize(
    ("limits", "violation"),
    [
        ({"allowed_tools": ["Read"]}, "Tool not allowed: shell"),
        ({"denied_commands": ["l*"]}, "Command denied by 'l*': ls"),
        ({"max_turns": 1}, "Turn limit exceeded: 2 of 1"),
    ],
)
def test_violation_of_the_policy_interrupts_the_run(ada: ApiClient, url: str, limits: dict[str, Any], violation: str) -> None:
    row = run_agent(ada, url, *MESSAGES, **limits)
    assert (row["state"], row["violation"]) == ("interrupted", violation)
    assert row["interrupted_at"]


def test_operators_limits_apply_and_a_request_can_only_narrow_them(ada: ApiClient, url: str) -> None:
    policy = Policy.objects.create(name="agents", agent_tools=["Read", "shell"], agent_max_turns=1)
    EnvironmentType.objects.filter(name="catan").update(policy=policy)
    row = run_agent(ada, url, *MESSAGES, max_turns=9, allowed_tools=["shell", "Write"])
    assert (row["policy"]["max_turns"], row["policy"]["allowed_tools"]) == (1, ["shell"])
    assert row["violation"] == "Turn limit exceeded: 2 of 1"


def test_cost_limit_is_that_of_the_metered_calls(ada: ApiClient, url: str, lease: dict[str, Any]) -> None:
    def charge(**times: Any) -> None:
        LlmCall.objects.create(
            call_id=uuid.uuid4().hex,
            holder=lease["id"],
            outcome="ok",
            cost=Decimal("0.03"),
            deadline_at=timezone.now(),
            **times,
        )

    earlier = timezone.now() - timedelta(minutes=1)
    charge(started_at=earlier, ended_at=earlier)  # before the run
    assert run_agent(ada, url, *MESSAGES, max_cost_usd="0.02")["state"] == "completed"
    later = timezone.now() + timedelta(milliseconds=1)
    charge(started_at=later, ended_at=later)
    wait_until(lambda: timezone.now() > later, "the call has started")
    row = AgentRun.objects.get()
    AgentRun.objects.filter(pk=row.pk).update(started_at=earlier + timedelta(seconds=1))
    assert load_result(row.pk, now=timezone.now()).cost == 0  # the call began after the end of the run
    AgentRun.objects.update(ended_at=timezone.now())
    assert ada.get(url).json()["results"][0]["cost_usd"] == "0.030000000"


def hold_command(memory: MemoryProvider) -> tuple[threading.Event, threading.Event]:
    """Make the next command wait. Return an event that is set when it begins, and one that lets it continue."""
    reached, proceed = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        reached.set()
        assert proceed.wait(20)

    memory.before("exec", wait)
    return reached, proceed


def test_interrupted_run_is_closed_as_interrupted(ada: ApiClient, url: str, memory: MemoryProvider) -> None:
    reached, proceed = hold_command(memory)
    run_url = f"{url}/{ada.post(url, {'cli': 'program', 'argv': ['cat'], 'prompt': 'x'}).json()['run_id']}"
    assert reached.wait(20)
    shown = ada.post(f"{run_url}/interrupt").json()
    assert (shown["state"], bool(shown["interrupted_at"])) == ("running", True)
    assert ("kill", Run.objects.get(kind="exec").sandbox.ref) in memory.calls
    proceed.set()
    row = wait_for_end(ada, run_url)
    assert (row["state"], row["interrupted_at"]) == ("interrupted", shown["interrupted_at"])
    assert ada.post(f"{run_url}/interrupt").json() == row


def test_run_takes_a_place_is_counted_and_is_interrupted_with_queued_runs(
    ada: ApiClient, bob: ApiClient, url: str, memory: MemoryProvider, settings: LazySettings
) -> None:
    settings.QUEUE_MAX_RUNNING_PER_AGENT = 1
    reached, proceed = hold_command(memory)
    body = {"cli": "program", "argv": ["cat"], "prompt": "x"}
    run_url = f"{url}/{ada.post(url, body).json()['run_id']}"
    assert reached.wait(20)
    refused = ada.post(url, body)
    assert (refused.status_code, refused.json()["code"], refused.json()["limit"]) == (429, "too_many_runs", 1)
    assert refused.headers["Retry-After"] == "5"
    assert [client.get("runs/stats").json()["direct_agent_runs"] for client in (ada, bob)] == [1, 0]
    assert ada.get("runs/stats").json()["running"] == 1
    lease_id = url.split("/")[1]
    assert ada.post("runs/queued/interrupt", {"agent_did": ADA, "states": ["queued"]}).json() == {"interrupted": 0}
    assert ada.post("runs/queued/interrupt", {"agent_did": ADA, "lease_id": lease_id}).json() == {"interrupted": 1}
    assert ada.post("runs/queued/interrupt", {"agent_did": ADA}).json() == {"interrupted": 0}
    proceed.set()
    assert wait_for_end(ada, run_url)["state"] == "interrupted"


def test_repeated_request_returns_the_first_run(ada: ApiClient, url: str) -> None:
    body = {"cli": "program", "argv": ["cat"], "prompt": "{}"}
    first, again = (ada.post(url, body, idempotency_key="k1").json() for _ in range(2))
    assert first["run_id"] == again["run_id"]
    assert AgentRun.objects.count() == 1


def test_agent_that_cannot_start_leaves_no_row(ada: ApiClient, url: str, lease: dict[str, Any], memory: MemoryProvider) -> None:
    memory.fail("create", Rejected("no"), times=1)
    assert ada.post(url, {"cli": "program", "argv": ["cat"], "prompt": "x"}).status_code == 503
    leasing.release(uuid.UUID(lease["id"]), now=timezone.now())
    assert_refused(ada, "POST", url, {"cli": "program", "argv": ["cat"], "prompt": "x"}, 410)
    assert not AgentRun.objects.exists()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"hooks": {}}, "hooks"),
        ({"canUseTool": "x"}, "canUseTool"),
        ({"mcpServers": {}}, "mcpServers"),
        ({"abortController": {}}, "abortController"),
        ({"argv": None}, "argv"),
        ({"model": "m"}, "model"),
        ({"session_id": "s"}, "session_id"),
        ({"cli": "codex", "system_prompt": "x", "argv": None}, "system_prompt"),
        ({"cli": "codex", "permission_mode": "plan", "argv": None}, "permission_mode"),
        ({"cli": "codex", "permission_mode": "acceptEdits", "argv": None}, "permission_mode"),
        ({"cli": "claude-code"}, "argv"),
        ({"resume": True, "session_id": "s", "cli": "codex", "argv": None}, "resume"),
    ],
)
def test_invalid_options_are_refused_by_name(ada: ApiClient, url: str, fields: dict[str, Any], field: str) -> None:
    assert_refused(ada, "POST", url, {"cli": "program", "argv": ["cat"], "prompt": "x"} | fields, 400, field)


def test_agent_runs_of_other_leases_are_not_found(ada: ApiClient, bob: ApiClient, url: str) -> None:
    row = run_agent(ada, url, *MESSAGES)
    assert ada.get(f"{url}/{uuid.uuid4()}").json()["code"] == "agent_run_not_found"
    assert bob.get(f"{url}/{row['run_id']}").status_code in (403, 404)


def test_recorder_that_died_is_replaced_after_its_last_message(ada: ApiClient, url: str) -> None:
    run_id = run_agent(ada, url, *MESSAGES)["run_id"]
    first = AgentRun.objects.get()
    size = len(print_lines(*MESSAGES[:2]))
    later = timezone.now() + timedelta(hours=2)
    AgentRun.objects.update(
        state="running", ended_at=None, stdout_offset=size, message_count=2, turn_count=1, result="Looking."
    )
    assert sweeps.recover_stalled(now=first.recorder_deadline).counts.get("agent runs recorded", 0) == 0
    assert sweeps.recover_stalled(now=later).counts["agent runs recorded"] == 1
    row = AgentRun.objects.get()
    assert (row.state, row.message_count, row.turn_count, row.result) == ("completed", 5, 2, "There is a.txt.")
    repeated = [message["sequence"] for message in read_chat(ada, url)]
    assert sorted(repeated) == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    assert ada.get(f"{url}/{run_id}").json()["ended_at"]


def test_recorder_that_was_replaced_changes_nothing(ada: ApiClient, url: str) -> None:
    run_agent(ada, url, *MESSAGES)
    AgentRun.objects.update(state="running", ended_at=None, stdout_offset=0, message_count=0)
    row, now = AgentRun.objects.select_related("lease").get(), timezone.now()
    successor_deadline = now + timedelta(hours=2)

    def be_replaced(message: dict[str, Any]) -> None:
        AgentRun.objects.update(recorder_deadline=successor_deadline)

    with pytest.raises(recorder.RecorderReplaced):
        recorder.Recorder(row, clock=lambda: now, on_message=be_replaced).record()
    row.refresh_from_db()
    assert (row.state, row.message_count, row.recorder_deadline) == ("running", 0, successor_deadline)


@pytest.mark.parametrize("error", [ValueError("bad message"), recorder.RecorderReplaced()])
def test_run_that_cannot_be_recorded_does_not_delay_others(
    ada: ApiClient, url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run_agent(ada, url, *MESSAGES)
    run_agent(ada, url, *MESSAGES)
    second, first = AgentRun.objects.all()
    AgentRun.objects.update(state="running", ended_at=None, stdout_offset=0, message_count=0)
    AgentRun.objects.filter(pk=first.pk).update(recorder_deadline=first.recorder_deadline - timedelta(hours=1))
    record = recorder.Recorder.record

    def fail_first(self: recorder.Recorder) -> None:
        if self._agent_run.pk == first.pk:
            raise error
        record(self)

    monkeypatch.setattr(recorder.Recorder, "record", fail_first)
    result = sweeps.recover_stalled(now=timezone.now() + timedelta(hours=2))
    assert result.counts["agent runs recorded"] == 1
    assert set(AgentRun.objects.filter(ended_at__isnull=False)) == {second}
    is_failure = isinstance(error, ValueError)
    assert result.failures == ([f"agent run {first.pk}: bad message"] if is_failure else [])
    assert result.counts.get("lost race", 0) == (not is_failure)


@pytest.mark.parametrize("is_running", [True, False])
def test_agent_runs_that_wait_do_not_delay_others(ada: ApiClient, url: str, acquire_body: Any, is_running: bool) -> None:
    """The first one's command runs, or its sandbox is on another host, which records it."""
    run_agent(ada, url, *MESSAGES)
    other = ada.post("leases", acquire_body(environment_id="game-2")).json()["id"]
    run_agent(ada, f"leases/{other}/agent-runs", *MESSAGES)
    second, first = AgentRun.objects.all()
    AgentRun.objects.update(state="running", ended_at=None, stdout_offset=0, message_count=0)
    AgentRun.objects.filter(pk=first.pk).update(recorder_deadline=first.recorder_deadline - timedelta(hours=1))
    if is_running:
        Run.objects.filter(pk=first.pk).update(ended_at=None, outcome="open")
    else:
        host = Host.objects.create(
            id=uuid.uuid4(), provider="memory", name="b", engine_id="b", queue="b", created_at=timezone.now()
        )
        Sandbox.objects.filter(holder=first.lease_id).update(host=host)
    later = timezone.now() + timedelta(minutes=10)
    result = lifecycle.record_abandoned(now=later, limit=1)
    assert result.counts == {"agent runs recorded": 1}
    assert set(AgentRun.objects.filter(ended_at__isnull=False)) == {second}


def test_agent_run_that_another_sweep_has_claimed_since_is_left_to_it(
    ada: ApiClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_agent(ada, url, *MESSAGES)
    run_agent(ada, url, *MESSAGES)
    later = timezone.now() + timedelta(hours=2)
    AgentRun.objects.update(state="running", ended_at=None, stdout_offset=0, message_count=0)
    recorded = list[uuid.UUID]()

    def record(self: recorder.Recorder) -> None:
        recorded.append(self._agent_run.pk)
        AgentRun.objects.exclude(pk=self._agent_run.pk).update(recorder_deadline=later + recorder.RECORDER_TTL)

    monkeypatch.setattr(recorder.Recorder, "record", record)
    assert sweeps.recover_stalled(now=later).counts["agent runs recorded"] == 1
    assert len(recorded) == 1


def test_run_that_never_began_is_closed_as_failed(ada: ApiClient, url: str) -> None:
    run_agent(ada, url, *MESSAGES)
    AgentRun.objects.update(id=uuid.uuid4(), state="running", ended_at=None)
    sweeps.recover_stalled(now=timezone.now() + timedelta(hours=2))
    row = AgentRun.objects.exclude(pk__in=Run.objects.values("pk")).get()
    assert (row.state, row.note) == ("failed", "The control plane was interrupted before the command began.")


def test_run_that_was_closed_during_its_start_executes_nothing(ada: ApiClient, url: str, at_checkpoint: Any) -> None:
    closed = []

    def sweep() -> None:
        closed.append(lifecycle.record_abandoned(now=timezone.now() + timedelta(hours=2)).counts)

    at_checkpoint("sandbox ready", sweep)
    body = {"cli": "program", "argv": ["cat"], "prompt": print_lines(*MESSAGES)}
    response = ada.post(url, body)
    assert closed == [{"agent runs recorded": 1}]
    assert (response.status_code, response.json()["code"]) == (503, "agent_run_closed")
    assert response.headers["Retry-After"] == "5"
    assert not Run.objects.exists()
    assert AgentRun.objects.get().state == "failed"
    assert run_agent(ada, url, *MESSAGES)["state"] == "completed"


def test_sweep_that_has_read_a_run_before_its_command_began_closes_nothing(
    ada: ApiClient, url: str, at_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, closed = list[AgentRun](), list[int]()

    def close() -> None:
        with monkeypatch.context() as before:
            before.setattr(lifecycle, "Run", SimpleNamespace(objects=Run.objects.none()))  # as the sweep has found it
            closed.append(lifecycle._record_abandoned_run(read[0], timezone.now))

    at_checkpoint("agent run created", lambda: read.append(AgentRun.objects.select_related("lease").get()))
    at_checkpoint("run opened", close)
    row = run_agent(ada, url, *MESSAGES)
    assert closed == [0]
    assert (row["state"], row["message_count"]) == ("completed", len(MESSAGES))


def test_start_after_a_slow_store_has_its_own_time(
    ada: ApiClient, url: str, at_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metered time of a sandbox begins when it is ready, not when the request arrived."""
    delay = timedelta(0)

    def store_slowly() -> None:
        nonlocal delay
        delay = timedelta(seconds=40)

    monkeypatch.setattr(database_time, "now", lambda: timezone.now() + delay)
    at_checkpoint("agent run created", store_slowly)
    run_agent(ada, url, *MESSAGES)
    assert delay
    began = Transition.objects.filter(to=SandboxState.WARM).get().at
    assert began - AgentRun.objects.get().started_at >= delay


def test_message_that_cannot_be_stored_is_counted_as_lost(ada: ApiClient, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = lease_stores.EventStore.append

    def fail(self: Any, document: Any, **options: Any) -> Any:
        if document.get("sequence") == 2:
            raise StoreError("stores", "append", "no")
        return original(self, document, **options)

    monkeypatch.setattr(lease_stores.EventStore, "append", fail)
    monkeypatch.setattr(recorder, "STORE_RETRY_PAUSES_SECONDS", ())
    row = run_agent(ada, url, *MESSAGES)
    assert (row["state"], row["message_count"]) == ("completed", 5)
    assert row["lost_bytes"] == len(json.dumps(MESSAGES[1]))
    assert [message["sequence"] for message in read_chat(ada, url)] == [0, 1, 3, 4, 5]


def test_database_failover_delays_the_record_of_the_end(ada: ApiClient, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, failures = outbox.enqueue_event, iter([OperationalError("closed"), OperationalError("closed")])

    def fail(*args: Any, **options: Any) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(connection_errors, "RETRY_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(outbox, "enqueue_event", fail)
    row = run_agent(ada, url, *MESSAGES)
    assert (row["state"], row["message_count"]) == ("completed", 5)
    assert OutboxEvent.objects.filter(kind="agent_run.ended").count() == 1
