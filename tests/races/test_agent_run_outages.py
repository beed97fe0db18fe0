"""Outages of the database at every statement and commit of an agent run: each message and the result are recorded once."""

import io
import json
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError

from leases import execution
from leases.agent_runs import lifecycle, recorder
from leases.agent_runs.clis.base import AgentOptions
from leases.agent_runs.lifecycle import AgentRequest, AgentRunGuard
from leases.agent_runs.models import AgentRun
from leases.agent_runs.policy import AgentPolicy
from leases.agent_runs.recorder import Recorder
from leases.errors import LeaseError
from leases.models import Lease
from leases.queue import running
from sandboxes import claims
from sandboxes.db import connection_errors
from sandboxes.db.clock import clock_from
from sandboxes.db.connection_errors import RetriesExhausted
from sandboxes.errors import SandboxError
from sandboxes.models import Event
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.memory.programs import ProgramCall, ProgramResult
from sandboxes.runs.operations import Command
from sandboxes.stores import lease_stores
from sandboxes.streams import rows
from tests.conftest import MINUTE, NOW
from tests.support.leases import run
from tests.support.outages import Outage, Weather, any_outage_of_server_too, injected

pytestmark = pytest.mark.django_db(transaction=True)
MAX_CLAIM = timedelta(seconds=30)  # after the end of an outage
LARGE = {"type": "tool", "output": "x" * 2000}  # stored as an artifact
MESSAGES = [
    {"type": "system", "session_id": "s-1"},
    {"type": "assistant", "turn_id": "t1", "text": "Looking."},
    LARGE,
    {"type": "assistant", "turn_id": "t2", "text": "There is a.txt."},
    {"type": "result", "cost_usd": "0.25"},
]
WITHIN, VIOLATED = AgentPolicy(max_cost=Decimal(5)), AgentPolicy(max_cost=Decimal(5), max_turns=1)  # the cost takes a query


class ThisThread:
    """Executor that calls in the thread of the test, whose connection has the outages."""

    def submit(self, act: Callable[..., Any], *args: Any) -> "Future[Any]":
        future = Future[Any]()
        try:
            future.set_result(act(*args))
        except Exception as failed:
            future.set_exception(failed)
        return future


@pytest.fixture(autouse=True)
def recorded_in_this_thread(monkeypatch: pytest.MonkeyPatch, failover: Any) -> None:
    """The reader of the output queries by the connection of the test. Time passes only by the few pauses of retries."""
    monkeypatch.setattr(rows, "_thread", ThisThread())
    monkeypatch.setattr(recorder, "MAX_INLINE_BYTES", 1000)
    monkeypatch.setattr(connection_errors, "RETRY_INTERVAL_SECONDS", 5.0)


def build_request(policy: AgentPolicy) -> AgentRequest:
    prompt = "".join(f"{json.dumps(message)}\n" for message in MESSAGES)
    return AgentRequest("program", AgentOptions(prompt, argv=("cat",), policy=policy), {}, "/workspace", timedelta(minutes=1))


def run_command(lease: Lease, request: AgentRequest) -> AgentRun:
    """Execute the command of an agent run whose recorder has not begun."""
    row = lifecycle.create(lease.pk, request, run_id=uuid.uuid4(), now=NOW)
    command = Command(
        ["cat"], request.timeout, stdin=request.options.prompt.encode(), run_id=row.pk, has_recorder=True, needs_data=False
    )
    execution.exec_command(lease.pk, command, now=NOW, wrap_guard=lambda guard: AgentRunGuard(guard, row))
    return row


def start(lease: Lease, request: AgentRequest, pk: uuid.UUID) -> None:
    row = lifecycle.create(lease.pk, request, run_id=pk, now=NOW)
    lifecycle.execute(row, request, now=NOW)


def survive(act: Callable[[], object], outage: Outage, *, clock: Callable[[], datetime]) -> datetime:
    """Act during an outage. Return the end of the outage."""
    with injected(outage):
        with suppress(OperationalError, RetriesExhausted, SandboxError, LeaseError):
            act()
        outage.end()
    ended_at = clock()
    claims.HEARTBEAT.beat()
    return ended_at


def read_messages(row: AgentRun) -> dict[int, list[Any]]:
    """Return the stored contents by sequence number. An artifact is read."""
    stores = lease_stores.open_stores(row.lease.agent_did, row.lease_id)
    events, more = list[Any](), True
    while more:
        page, more = stores.chat.page(after=events[-1].stamp if events else None, newest_first=False, limit=100)
        events += page
    found = dict[int, list[Any]]()
    for document in (event.document for event in events if event.document["agent_run"] == str(row.pk)):
        content = document["content"]
        if isinstance(content, dict) and "artifact" in content:
            file = io.BytesIO()
            assert stores.artifacts.fetch(content["artifact"], file)
            content = json.load(file)
        contents = found.setdefault(document["sequence"], [])
        if content not in contents:  # a message is stored at least once
            contents.append(content)
    return found


def assert_recorded(step: int, row: AgentRun, request: AgentRequest) -> None:
    row.refresh_from_db()
    is_violated = request.options.policy.max_turns is not None
    state = "interrupted" if is_violated else "completed"
    assert (step, row.state, row.message_count, row.turn_count, row.lost_bytes) == (step, state, len(MESSAGES), 2, 0)
    assert (row.malformed_count, row.session_id, row.result, str(row.reported_cost)) == (
        0, "s-1", "There is a.txt.", "0.250000000",
    )  # fmt: skip
    assert (bool(row.violation), bool(row.interrupted_at)) == (is_violated, is_violated)
    messages = read_messages(row)
    assert (step, messages.pop(0)) == (step, [request.options.prompt])
    assert (step, messages) == (step, {number: [message] for number, message in enumerate(MESSAGES, 1)})
    ends = Event.objects.filter(kind="agent_run.ended", payload__run_id=str(row.pk))
    assert [event.payload["state"] for event in ends] == [state]


@pytest.mark.parametrize(("policy", "by_sweep"), [(VIOLATED, False), (WITHIN, True)], ids=["recorder", "sweep"])
@any_outage_of_server_too
def test_record_at_any_step(lease: Lease, policy: AgentPolicy, by_sweep: bool, weather: Weather) -> None:
    request = build_request(policy)
    for step in weather.list_steps():
        row = run_command(lease, request)
        begin = row.recorder_deadline + MINUTE if by_sweep else NOW
        clock = clock_from(begin)
        act: Callable[[], object] = partial(lifecycle.record_abandoned, now=begin)
        if not by_sweep:
            act = Recorder(row, clock=clock).record
        outage = weather.begin(step)
        ended_at = survive(act, outage, clock=clock)
        if not outage.has_begun:
            break
        lifecycle.record_abandoned(now=ended_at + MAX_CLAIM)
        assert_recorded(step, row, request)
    assert step > 15


@any_outage_of_server_too
def test_start_at_any_step(lease: Lease, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch, weather: Weather) -> None:
    """Only the thread of the command has the outage: the recorder waits until the heartbeat closes the Run."""
    executions, request = Counter[str](), build_request(AgentPolicy())
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(claims, "HEARTBEAT", claims.Heartbeat())  # the thread of an earlier test still waits for an hour

    def execute(call: ProgramCall) -> ProgramResult:
        executions[call.argv[1]] += 1
        return ProgramResult(0, call.stdin)

    memory.programs["count"] = execute
    run(lease)  # starts its sandbox
    for step in weather.list_steps():
        pk = uuid.uuid4()
        request = replace(request, options=replace(request.options, argv=("count", str(pk))))

        clock, outage = clock_from(NOW), weather.begin(step)
        ended_at = survive(partial(start, lease, request, pk), outage, clock=clock)
        if not outage.has_begun:
            break
        lifecycle.record_abandoned(now=ended_at + MAX_CLAIM)
        assert (step, running.count_all()) == (step, 0)
        row = AgentRun.objects.filter(pk=pk).first()
        assert (step, row is not None) == (step, bool(executions[str(pk)]))
        if row:
            assert executions[str(pk)] == 1
            assert_recorded(step, row, request)
    assert step > 20
