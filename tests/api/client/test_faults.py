"""Cut connections, refused requests, lost leases: a command is executed once, or its outcome is reported as unknown."""

import asyncio
import json
import threading
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F

from leasehold import (
    AsyncSandbox,
    ConnectionFailed,
    InvalidRequest,
    OutcomeUnknown,
    RateLimited,
    RenewalFailed,
    RetryPolicy,
    Sandbox,
    Unavailable,
    exchange,
)
from leasehold.exchange import Pause, Request, Response, build_post
from leases.models import Lease, LeaseStatus
from sandboxes.models import Run
from tests.api.client.test_sandbox import Options, list_active
from tests.api.conftest import ApiClient
from tests.support.servers.cutting_proxy import CuttingProxy
from tests.support.waiting import wait_until

live = pytest.mark.django_db(transaction=True)


@live
def test_command_whose_answer_was_cut_off_is_executed_once(options: Options, proxy: CuttingProxy) -> None:
    with Sandbox(**options) as box:
        proxy.needle, proxy.cuts = b"/exec", [0, 10]
        assert box.exec("echo x >>log; cat log").stdout == "x\n"
        keys = {
            line for request in proxy.requests for line in request.split(b"\r\n") if line.lower().startswith(b"idempotency")
        }
        assert (len(proxy.requests), len(keys)) == (3, 1)
        assert box.files.read("log") == b"x\n"
    assert Run.objects.filter(kind="exec").count() == 1


@live
def test_stream_that_was_cut_off_continues_where_it_ended(options: Options, proxy: CuttingProxy) -> None:
    script = "echo x >>log; for i in 1 2 3 4 5 6; do printf '%0200d' $i; done"
    with Sandbox(**options) as box:
        proxy.needle, proxy.cuts = b"/stream", [0, 900, 1500]
        stream = box.stream(script)
        output = "".join(part.data for part in stream if not part.lost_bytes)
        assert output == "".join(f"{number:0200d}" for number in range(1, 7))
        assert stream.result is not None
        assert stream.result.ok
        assert len(proxy.requests) > 3
        assert box.files.read("log") == b"x\n"


@live
def test_command_without_an_answer_has_an_unknown_outcome(options: Options, proxy: CuttingProxy) -> None:
    retries = RetryPolicy(period_seconds=0.2, first_pause_seconds=0.01)

    async def execute() -> None:
        async with AsyncSandbox(**options | {"retries": retries}) as box:
            proxy.needle, proxy.cuts = b"/exec", [0] * 1000
            await box.exec("echo x >>log")

    with pytest.raises(OutcomeUnknown, match="may have been executed"):
        asyncio.run(execute())
    assert Run.objects.filter(kind="exec").count() == 1


@live
def test_interrupted_join_leaves_no_lease(options: Options, proxy: CuttingProxy) -> None:
    proxy.needle, proxy.cuts = b"/join", [0] * 1000
    with pytest.raises(ConnectionFailed):
        Sandbox(**options | {"retries": RetryPolicy(period_seconds=0.1, first_pause_seconds=0.01)}).open()
    assert [lease.status for lease in Lease.objects.all()] == [LeaseStatus.EXPIRED]


@live
def test_lease_is_renewed_while_the_block_is_open_and_its_loss_is_reported(options: Options, ada: ApiClient) -> None:
    with Sandbox(ttl_seconds=2, **options) as box:
        Lease.objects.update(expires_at=F("expires_at") - timedelta(seconds=28.5))  # the start has extended it to 30 s
        first = Lease.objects.get().expires_at
        wait_until(lambda: Lease.objects.get().expires_at > first, "a renewal", within=10)
        ada.post(f"leases/{box.lease_id}/release")
        wait_until(lambda: box._held.failure, "a refused renewal", within=10)
        with pytest.raises(RenewalFailed, match="ended"):
            box.exec("true")


@live
def test_sandbox_that_is_garbage_releases_its_lease(options: Options) -> None:
    box = Sandbox(**options).open()
    agent = box.agent("{}", cli="program", argv=["cat"])
    del box
    assert list_active()
    agent.wait()
    del agent
    wait_until(lambda: not list_active(), "a release")


@live
def test_cancelled_block_releases_its_lease(options: Options) -> None:
    async def use() -> None:
        async with AsyncSandbox(**options) as box:
            ready.set()
            await box.exec("sleep 5")

    async def cancel() -> None:
        task = asyncio.create_task(use())
        while not ready.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ready = threading.Event()
    asyncio.run(cancel())
    assert list_active() == []


# --- rules of the retries, without a server --------------------------------------------------------------------------------


class Clock:
    """Clock that only pauses advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(operation: Generator[Any, Any, Any], answers: list[Any], clock: Clock) -> tuple[Any, list[float]]:
    """Answer each request by the next entry, the last one repeatedly. Return the result or the error, and the pauses."""
    pauses, remaining, reply = list[float](), [*answers], None
    try:
        while True:
            step = operation.send(reply)
            while isinstance(step, Request):
                answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
                step = operation.throw(answer) if isinstance(answer, Exception) else operation.send(answer)
            assert isinstance(step, Pause)
            pauses.append(step.seconds)
            clock.now += step.seconds
            reply = None
    except StopIteration as done:
        return done.value, pauses
    except Exception as error:
        return error, pauses


def problem(status: int, code: str, retry_after: str = "", **extra: Any) -> Response:
    body = {"status": status, "code": code, "detail": "d", **extra}
    return Response(status, {"retry-after": retry_after}, json.dumps(body).encode())


OK = Response(200, {}, b"{}")


@pytest.mark.parametrize(
    ("answers", "expected", "pauses"),
    [
        ([problem(503, "server_busy", "3"), problem(429, "rate_limited", "2"), OK], Response, [3.0, 2.0]),
        ([ConnectionFailed("x", sent=False), ConnectionFailed("x", sent=True), OK], Response, [1.0, 2.0]),
        ([problem(503, "server_busy")], Unavailable, [1.0, 2.0, 4.0, 4.0, 4.0, 4.0]),
        ([problem(503, "provider_unavailable", retryable=False), OK], Unavailable, []),
        ([problem(429, "rate_limited", "60")], RateLimited, []),
        ([ConnectionFailed("x", sent=False)], ConnectionFailed, [1.0, 2.0, 4.0, 4.0, 4.0, 4.0]),
        ([ConnectionFailed("x", sent=True), problem(409, "outcome_unknown", run_id="r")], OutcomeUnknown, [1.0]),
        ([problem(503, "provider_unavailable", run_id="r"), problem(503, "server_busy", "60")], OutcomeUnknown, [1.0]),
        ([problem(400, "invalid")], InvalidRequest, []),
        ([ConnectionFailed("x", sent=True), problem(400, "invalid")], InvalidRequest, [1.0]),
        ([Response(500, {}, b"<html>")], OutcomeUnknown, []),
        ([problem(409, "idempotency_in_progress", "1")] * 100 + [OK], Response, [1.0] * 100),
    ],
)  # fmt: skip
def test_retries_are_bounded_and_honour_retry_after(answers: list[Any], expected: type, pauses: list[float]) -> None:
    clock = Clock()
    policy = RetryPolicy(20.0, first_pause_seconds=1.0, max_pause_seconds=4.0, clock=clock, jitter=lambda: 1.0)
    result, paused = drive(exchange.send(build_post("/x", is_repeatable=False), policy), answers, clock)
    assert (type(result), paused) == (expected, pauses)
