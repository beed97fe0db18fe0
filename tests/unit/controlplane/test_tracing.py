"""Traces of runs, received over HTTP as a collector receives them."""

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from leases import api_keys, execution
from leases.models import Lease
from leases.queue import attempts, queue
from leases.queue.queue import QueueOptions
from sandboxes.db import tracing
from sandboxes.egress import authorization, settlement
from sandboxes.egress.settlement import CallResult
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import LlmCall, Run, Sandbox
from sandboxes.providers.memory import MemoryProvider, ProgramResult
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import NOW
from tests.support.servers.receiver import WebhookReceiver, run_receiver

pytestmark = pytest.mark.django_db
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
COMMAND = {"kind": "exec", "argv": ["true"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}


@pytest.fixture
def collector(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookReceiver]:
    with run_receiver() as receiver:
        settings.OTLP_ENDPOINT = receiver.url.removesuffix("/events")
        monkeypatch.setattr(tracing, "_processor", None)
        yield receiver
        if tracing._processor is not None:
            tracing._processor.shutdown()


def collect(collector: WebhookReceiver) -> dict[str, Any]:
    """Return the spans so far, by name."""
    tracing.flush()
    spans = {}
    for request in collector.received:
        assert request.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "leasehold"
            spans |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    return spans


def read_attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_exec_is_a_trace_with_the_id_of_its_run_and_a_link_to_its_caller(
    collector: WebhookReceiver, grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    lease = grant(now=timezone.now())
    key = api_keys.issue_key([lease.agent_did], now=timezone.now())[1]
    memory.programs["false"] = lambda call: ProgramResult(1)
    # The middleware reads the setting when it is loaded: the client loads the middleware at its first request.
    response = Client().post(
        f"/api/v1/leases/{lease.pk}/exec", {"argv": ["false"]}, "application/json",
        headers={"Authorization": f"Bearer {key}", "traceparent": CALLER},
    )  # fmt: skip
    run_id = uuid.UUID(response.json()["run_id"])
    span = collect(collector)["run exec"]
    assert span.trace_id == run_id.bytes
    assert (span.span_id, span.parent_span_id) == (run_id.bytes[8:], b"")
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in span.links] == [tuple(CALLER.split("-")[1:3])]
    attributes = read_attributes(span)
    assert attributes["leasehold.lease_id"] == str(lease.pk)
    assert (attributes["leasehold.outcome"], attributes["process.exit.code"]) == ("failed", 1)
    assert (span.status.code, span.status.message) == (2, "failed")
    run = Run.objects.get()
    assert run.ended_at is not None
    duration = timedelta(microseconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1000)
    assert duration == run.ended_at - run.started_at
    assert tracing.caller_trace.get() == ""


def test_queued_run_shows_its_wait_its_attempt_and_its_caller(collector: WebhookReceiver, lease: Lease) -> None:
    token = tracing.caller_trace.set(CALLER)
    row = queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did, lease=lease, pool=lease.pool, request=COMMAND, secrets={"env": {}},
        options=QueueOptions(), now=NOW,
    )  # fmt: skip
    tracing.caller_trace.reset(token)
    claimed = queue.claim("runner", now=NOW + timedelta(seconds=3))
    assert claimed is not None
    attempts.execute(claimed, now=NOW + timedelta(seconds=3))
    row.refresh_from_db()
    spans = collect(collector)
    wait, run = spans["queue"], spans["run exec"]
    assert wait.trace_id == run.trace_id == row.run_id.bytes
    assert wait.parent_span_id == run.span_id
    assert wait.end_time_unix_nano - wait.start_time_unix_nano == 3 * 10**9
    assert [link.span_id.hex() for link in run.links] == [CALLER.split("-")[2]]
    assert read_attributes(run)["leasehold.attempt"] == Run.objects.get().attempt == 1


def test_model_call_is_part_of_the_trace_of_its_run(collector: WebhookReceiver, lease: Lease) -> None:
    with execution.use_lease(lease.pk, now=NOW) as request:
        command = Command(["true"], timedelta(minutes=1))
        with operations.operation(request, command, now=NOW) as opened:
            sandbox = Sandbox.objects.get()
            Sandbox.objects.update(slot=0, slot_since=NOW)
            caller = authorization.identify_caller(0, now=NOW)
            assert (caller.run, caller.attempt) == (opened.run.pk, 1)
            call = LlmCall.objects.create(
                call_id="c1", sandbox=sandbox, run=opened.run, holder=lease.pk, agent_did=lease.agent_did, kind="chat",
                model="gpt", started_at=NOW, deadline_at=NOW + timedelta(minutes=1),
            )  # fmt: skip
            usage = TokenUsage(input_tokens=3, output_tokens=5)
            result = CallResult(LlmCall.Outcome.FAILED, status=500, code="upstream_failed", usage=usage)
            settlement.settle_call(call, result, now=NOW + timedelta(seconds=2))
    spans = collect(collector)
    span, root = spans["call chat"], spans["run exec"]
    assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
    attributes = read_attributes(span)
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.usage.output_tokens"]) == ("gpt", 5)
    assert span.status.message == "upstream_failed"


@pytest.mark.parametrize("header", ["", "x", "00-" + "0" * 32 + "-b7ad6b7169203331-01", CALLER + "-x"])
def test_invalid_trace_of_a_caller_is_ignored(collector: WebhookReceiver, header: str) -> None:
    token = tracing.caller_trace.set(header)
    tracing.record_run_span("run exec", uuid.uuid4(), NOW, NOW, {})
    tracing.caller_trace.reset(token)
    assert not collect(collector)["run exec"].links
