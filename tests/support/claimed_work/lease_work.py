"""Work on turns, queued runs, agent runs, records, coding tasks and idempotent requests."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.test import RequestFactory
from rest_framework.request import Request

from leases import api_keys, execution, turns
from leases.agent_runs import lifecycle
from leases.agent_runs.clis.base import AgentOptions
from leases.agent_runs.lifecycle import AgentRequest, AgentRunGuard
from leases.agent_runs.models import AgentRun
from leases.api.base import idempotency
from leases.atproto import records
from leases.atproto.models import AtprotoRecord
from leases.coding import pull_requests, repositories, submissions, tasks
from leases.coding.models import CodingTask
from leases.models import EnvironmentType, IdempotentRequest, Turn
from leases.queue import queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from leases.queue.runner import Runner
from sandboxes.db.clock import clock_from
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.claimed_work import Context, Work, crash

HOUR = timedelta(hours=1)


def begin_turn(context: Context) -> Work:
    EnvironmentType.objects.update(turn_argv=["echo", '{"action": "roll"}'])
    lease = context.write()
    return Work(
        partial(turns.take_turn, lease.pk, 1, {}), Turn, "deadline_at",
        Turn.objects.filter(ended_at__isnull=False, skipped=False).exists,
    )  # fmt: skip


def enqueue(context: Context) -> None:
    request = {"kind": "exec", "argv": ["true"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}
    lease = context.write()
    queue.enqueue(
        lease.pk, agent_did=lease.agent_did, lease=lease, pool=context.pool, request=request, secrets={"env": {}},
        options=QueueOptions(pending_timeout=HOUR), now=NOW,
    )  # fmt: skip


def look_at_queue(*, now: datetime) -> None:
    Runner(1, now=lambda: now, start_thread=lambda name, act: act()).run_pending()


def begin_queued_run(context: Context) -> Work:
    enqueue(context)
    return Work(look_at_queue, QueuedRun, "runner_deadline", QueuedRun.objects.filter(state="completed").exists)


def begin_takeover(context: Context) -> Work:
    """A queued run whose runner has died after its claim."""
    enqueue(context)
    assert queue.claim("dead", now=NOW)
    return Work(look_at_queue, QueuedRun, "runner_deadline", QueuedRun.objects.filter(state="completed").exists)


def begin_abandoned_recording(context: Context) -> Work:
    """An agent run whose recorder has died after the command has ended."""
    lease = context.write()
    request = AgentRequest("program", AgentOptions("", argv=("true",)), {}, "/workspace", MINUTE)
    row = lifecycle.create(lease.pk, request, run_id=lease.pk, now=NOW)
    command = Command(["true"], MINUTE, run_id=row.pk, has_recorder=True, needs_data=False)
    execution.exec_command(lease.pk, command, now=NOW, wrap_guard=lambda guard: AgentRunGuard(guard, row))
    return Work(
        lifecycle.record_abandoned, AgentRun, "recorder_deadline", AgentRun.objects.filter(ended_at__isnull=False).exists
    )


def begin_record(context: Context) -> Work:
    lease = context.write()
    AtprotoRecord.objects.create(
        lease=lease, agent_did=lease.agent_did, collection="org.example.roll", record_key="k", value_text="{}", created_at=NOW,
        next_attempt_at=NOW, give_up_at=NOW + HOUR,
    )  # fmt: skip
    # Refused: the environment type permits no collection.
    return Work(
        records.create_due_records, AtprotoRecord, "next_attempt_at", AtprotoRecord.objects.filter(status="failed").exists
    )


def create_coding_task(context: Context, **changes: Any) -> CodingTask:
    """A task at a forge that does not respond."""
    repositories.save(
        "calc", now=NOW, clone_url="http://127.0.0.1:1/calc.git", forge="github", api_url="http://127.0.0.1:1",
        forge_project="o/calc",
    )  # fmt: skip
    lease = context.write()
    tasks.create(lease.environment_id, repository="calc", title="Fix", environment_type="catan", now=NOW)
    CodingTask.objects.update(**changes)
    return CodingTask.objects.get()


def begin_poll(context: Context) -> Work:
    create_coding_task(context, status="pushed", head_commit="a" * 40, next_poll_at=NOW)
    return Work(pull_requests.poll_pull_requests, CodingTask, "next_poll_at", CodingTask.objects.exclude(poll_error="").exists)


def begin_submission(context: Context) -> Work:
    task = create_coding_task(context)

    def submit(*, now: datetime) -> None:
        with submissions._claim(task, clock_from(now)):
            pass

    return Work(submit, CodingTask, "busy_until")


def begin_request(context: Context) -> Work:
    """A request with an Idempotency-Key."""
    holder, _ = api_keys.issue_key(["did:plc:ada"], now=NOW)

    def post(*, now: datetime) -> object:
        request = Request(RequestFactory().post("/", headers={"Idempotency-Key": "k"}))
        return idempotency.execute_once(request, holder, lambda run_id: (200, {}), now=now)

    return Work(post, IdempotentRequest, "deadline_at", IdempotentRequest.objects.filter(status_code=200).exists)


def begin_repeated_request(context: Context) -> Work:
    """A repetition of a request whose process has died."""
    work = begin_request(context)
    with context.patch.context() as patch, suppress(SimulatedCrash):
        patch.setattr(idempotency, "_build_response", crash)
        work.act(now=NOW)
    assert IdempotentRequest.objects.get().status_code is None
    return work


WORK: dict[str, Callable[[Context], Work]] = {
    "turn": begin_turn,
    "queued run": begin_queued_run,
    "takeover": begin_takeover,
    "abandoned recording": begin_abandoned_recording,
    "record": begin_record,
    "poll": begin_poll,
    "submission": begin_submission,
    "request": begin_request,
    "repeated request": begin_repeated_request,
}
