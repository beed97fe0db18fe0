"""Egress proxy with real sandboxes and nginx: SDK traffic, crashes of each component, and identity of calls."""

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import web
from django.conf import settings as django_settings

from controlplane.env import ENV_VARIABLES
from leases import leasing, sweeps
from leases.one_shot import OneShotOutcome, OneShotRequest, run_once
from sandboxes import pool as pools
from sandboxes.egress import authorization, slots
from sandboxes.egress.logs import collection
from sandboxes.egress.nginx import INSTALLATION_LABEL, NginxProxy, get_installation_id, get_server_socket_path
from sandboxes.errors import CapacityExhausted
from sandboxes.models import LlmCall, Pool, Sandbox
from sandboxes.providers.docker.engine import Engine
from tests.conftest import MINUTE, NOW
from tests.egress.stack import (
    CLIENT_SCRIPT,
    UPSTREAM_API_KEY,
    EgressStack,
    LeasedSandbox,
    run_egress_command,
    run_in_thread,
    run_python_in_sandbox,
)
from tests.support.egress import CHAT_PATH, COMPLETION_RESPONSE, post
from tests.support.waiting import run_with_growing_timeouts, wait_until
from tests.unit.sandboxes.egress.test_egress_server import PIECE, TOKENS, events, streaming

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
Enter = Callable[..., LeasedSandbox]
CURL = "curl -sS -N -d @- -H 'Content-Type: application/json' -w '\\n%{http_code}' \"$@\""
CHAT_BODY = {"model": "default", "messages": [{"role": "user", "content": "{}"}]}
ASK_ONCE = "print(json.dumps([*map(str, ask())]))"


def curl(leased: LeasedSandbox, url: str, body: Any, *more: str) -> tuple[int, str]:
    done = leased.run("sh", "-c", CURL, "sh", url, *more, stdin=json.dumps(body).encode())
    assert done.exit_code == 0, done.stderr
    reply, _, status = done.stdout.decode().rpartition("\n")
    return int(status), reply


class HeldResponse:
    """Upstream response that is held back until released."""

    def __init__(self, egress: EgressStack) -> None:
        self.egress, self.arrived, self.released = egress, threading.Event(), asyncio.Event()
        egress.upstream.answer = self.answer

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.arrived.set()
        await self.released.wait()
        return web.json_response(COMPLETION_RESPONSE)

    def wait_until_arrived(self) -> None:
        assert self.arrived.wait(60), "no call arrives"

    def release(self) -> None:
        self.egress.loop.loop.call_soon_threadsafe(self.released.set)


# --- SDK traffic -----------------------------------------------------------------------------------------------------


def test_openai_call_with_curl_matches_row_and_log(leased: LeasedSandbox, egress: EgressStack) -> None:
    status, reply = curl(leased, f"http://127.0.0.1:4010{CHAT_PATH}", CHAT_BODY)
    assert (status, json.loads(reply)) == (200, COMPLETION_RESPONSE)
    [row], [line], [(_, sent, body)] = egress.settled(1), egress.logged(1), egress.upstream.requests
    assert line["id"] == row.call_id == sent["x-litellm-call-id"]
    assert (line["slot"], line["status"], line["upstream"], line["uri"]) == (leased.box.slot, 200, "200", CHAT_PATH)
    assert (row.holder, row.outcome, row.input_tokens, row.output_tokens) == (leased.lease.pk, "ok", 120, 7)
    assert (sent["authorization"], body["model"]) == (f"Bearer {UPSTREAM_API_KEY}", django_settings.LLM_MODEL)


def test_stream_with_curl_over_the_socket(leased: LeasedSandbox, egress: EgressStack) -> None:
    egress.upstream.answer = streaming(events(PIECE, PIECE, TOKENS, b"[DONE]"))
    reply = curl(leased, f"http://x{CHAT_PATH}", {**CHAT_BODY, "stream": True}, "--unix-socket", "/run/leasehold/llm.sock")
    assert reply == (200, events(PIECE, PIECE, b"[DONE]").decode())
    assert [(row.streamed, row.output_tokens, row.outcome) for row in egress.settled(1)] == [(True, 4, "ok")]


def test_anthropic_call_with_python(leased: LeasedSandbox, egress: EgressStack) -> None:
    start = {"type": "message_start", "message": {"model": "c", "usage": {"input_tokens": 5, "output_tokens": 1}}}
    whole = events(start, {"type": "message_delta", "usage": {"output_tokens": 9}}, {"type": "message_stop"})
    egress.upstream.answer = streaming(whole)
    script = """
BODY |= {"max_tokens": 9, "stream": True}
status, reply = ask(BODY, "/v1/messages", **{"anthropic-version": "2024-01-01", "x-api-key": os.environ["ANTHROPIC_API_KEY"]})
print(json.dumps([status, reply.decode()]))"""
    assert leased.python(script) == [200, whole.decode()]
    egress.upstream.answer = egress.upstream._answer
    egress.upstream.body = json.dumps({"model": "c", "usage": {"input_tokens": 2, "output_tokens": 3}}).encode()
    assert leased.python('print(json.dumps(ask({**BODY, "max_tokens": 9}, "/v1/messages")[0]))') == 200
    assert [(row.model, row.input_tokens, row.output_tokens) for row in egress.settled(2)] == [("c", 5, 9), ("c", 2, 3)]
    sent = egress.upstream.requests[0][1]
    assert (sent["x-api-key"], sent["anthropic-version"]) == (UPSTREAM_API_KEY, "2024-01-01")


def test_stream_events_are_not_buffered(leased: LeasedSandbox, egress: EgressStack) -> None:
    """The upstream sends the rest only after the program has read the beginning and made another call."""
    read = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            read.set()
            return web.json_response(COMPLETION_RESPONSE)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events(PIECE))
        await asyncio.wait_for(read.wait(), 60)
        await response.write(events(b"[DONE]"))
        return response

    egress.upstream.answer = answer
    script = """
request = urllib.request.Request("http://127.0.0.1:4010/v1/chat/completions", json.dumps({**BODY, "stream": True}).encode())
with urllib.request.urlopen(request, timeout=20) as answer:
    first = answer.readline()
    print(json.dumps([ask()[0], first.decode(), answer.read().decode()]))"""
    status, first, rest = leased.python(script)
    assert (status, first + rest) == (200, events(PIECE, b"[DONE]").decode())
    assert [row.outcome for row in egress.settled(2)] == ["ok", "ok"]


def test_calls_of_a_one_shot_run_are_recorded_and_billed(docker_pool: Pool, egress: EgressStack) -> None:
    request = OneShotRequest(
        "did:plc:ada", ("python3", "-I", "-"), MINUTE, pool=docker_pool.name, stdin=(CLIENT_SCRIPT + ASK_ONCE).encode()
    )
    result = run_once(request, now=NOW)
    assert (result.outcome, json.loads(result.stdout)[0], result.cleaned_up) == (OneShotOutcome.OK, "200", True)
    [row] = egress.settled(1)
    assert (row.holder, row.run_id, row.agent_did, row.outcome) == (result.lease_id, result.run_id, "did:plc:ada", "ok")


# --- crashes ----------------------------------------------------------------------------------------------


def pid_of(nginx: NginxProxy) -> int:
    return int(nginx.engine.client.inspect_container(nginx.name)["State"]["Pid"])


def assert_calls_work(leased: LeasedSandbox) -> None:
    wait_until(lambda: leased.call_model() == [200], "calls work again, in the same sandbox")


def assert_cut_once(egress: EgressStack, code: str) -> None:
    """Assert that the call in flight was made once and is closed as cut."""
    first, *rest = [row for row in egress.settled(LlmCall.objects.count()) if row.outcome != "ok"]
    assert (first.outcome, first.code, rest) == ("cut", code, [])
    assert len({sent["x-litellm-call-id"] for _, sent, _ in egress.upstream.requests}) == len(egress.upstream.requests)
    assert {sent["x-litellm-call-id"] for _, sent, _ in egress.upstream.requests} == {
        *LlmCall.objects.values_list("call_id", flat=True)
    }


@pytest.mark.parametrize("after", ["start", "reopened log"])
def test_crashed_nginx_is_restarted_by_the_engine(after: str, leased: LeasedSandbox, egress: EgressStack) -> None:
    if after == "reopened log":
        egress.log.rename(egress.log.with_suffix(".old"))
        egress.proxy.reopen_log()
        wait_until(egress.log.exists, "nginx opens a new log")
    held = HeldResponse(egress)
    with run_in_thread(lambda: leased.call_model()) as asking:
        held.wait_until_arrived()
        os.kill(pid_of(egress.proxy), signal.SIGKILL)
        assert asking.result(30) == [0]
    held.release()
    assert_calls_work(leased)
    assert_cut_once(egress, "not_read_to_its_end")


def test_killed_or_removed_nginx_can_be_restarted_without_affecting_sandboxes(
    leased: LeasedSandbox, egress: EgressStack
) -> None:
    held = HeldResponse(egress)
    with run_in_thread(lambda: leased.call_model()) as asking:
        held.wait_until_arrived()
        subprocess.run(["docker", "kill", egress.proxy.name], check=True, capture_output=True)
        assert asking.result(30) == [0]
    assert leased.call_model() == [0]
    held.release()
    if egress.proxy.get_state() != "running":  # the engine does not restart a container killed by an operator; the command does
        egress.proxy.start()
    assert_calls_work(leased)
    subprocess.run(["docker", "rm", "-f", egress.proxy.name], check=True, capture_output=True)
    assert egress.proxy.get_state() == ""
    egress.proxy.start()
    assert leased.call_model() == [200]
    assert_cut_once(egress, "not_read_to_its_end")


def test_calls_fail_without_a_server_and_succeed_after_its_restart(leased: LeasedSandbox, egress: EgressStack) -> None:
    held = HeldResponse(egress)
    with run_in_thread(lambda: leased.call_model()) as asking:
        held.wait_until_arrived()
        egress.serving.close()
        assert asking.result(30)[0] in (0, 502)
    assert_cut_once(egress, "not_read_to_its_end")
    status, reply = leased.python(ASK_ONCE)
    assert status == "502" and "way_out_closed" in reply
    held.release()
    egress.serve()
    assert leased.call_model() == [200]


def test_call_of_a_killed_server_is_closed_as_lost(leased: LeasedSandbox, egress: EgressStack) -> None:
    """Runs the command in its own process. The next server takes over its sockets and container."""
    egress.serving.close()
    held = HeldResponse(egress)
    with run_egress_command(egress) as process:
        with run_in_thread(lambda: leased.call_model()) as asking:
            held.wait_until_arrived()
            process.kill()
            assert asking.result(30)[0] in (0, 502)
        process.wait(20)
    held.release()
    row = LlmCall.objects.get(outcome="open")
    assert row.ended_at is None
    egress.serve()
    assert leased.call_model() == [200]
    late = row.deadline_at + timedelta(seconds=1)
    assert authorization.close_abandoned(now=late) == 1 == len(egress.upstream.requests) - 1
    row.refresh_from_db()
    assert (row.outcome, row.ended_at, row.cost) == ("lost", late, None)


def test_command_restarts_nginx_and_removes_it_at_exit(leased: LeasedSandbox, egress: EgressStack) -> None:
    egress.serving.close()
    with run_egress_command(egress) as process:
        assert leased.call_model() == [200]
        subprocess.run(["docker", "kill", egress.proxy.name], check=True, capture_output=True)
        assert_calls_work(leased)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert list_own_containers(egress) == []
    assert not get_server_socket_path().exists()
    egress.proxy.start()


def list_own_containers(egress: EgressStack) -> list[str]:
    label = {"label": f"{INSTALLATION_LABEL}={get_installation_id()}"}
    return [each["Id"] for each in egress.proxy.engine.client.containers(all=True, filters=label)]


def test_start_and_stop_of_nginx_are_idempotent(leased: LeasedSandbox, egress: EgressStack) -> None:
    egress.proxy.start()
    egress.proxy.start()
    assert len(list_own_containers(egress)) == 1 and leased.call_model() == [200]
    egress.proxy.stop()
    egress.proxy.stop()
    assert list_own_containers(egress) == []
    assert leased.call_model() == [0]
    egress.proxy.start()
    assert leased.call_model() == [200]


def test_default_number_of_slots_is_served_and_distinguished(
    docker_ready: None, settings: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings.EGRESS_SLOTS = int(ENV_VARIABLES["LEASEHOLD_EGRESS_SLOTS"].default)
    settings.RUNTIME_DIR = tmp_path_factory.mktemp("many")
    settings.EGRESS_DIR = settings.RUNTIME_DIR / "egress"
    many = NginxProxy(Engine())
    many.start()
    try:
        last = settings.EGRESS_SLOTS - 1
        for slot in (0, 17, last):
            assert post(slots.ensure_slot_directory(slot) / slots.SOCKET_NAME, {}, "/x")[0] == 403
        log = collection.access_log_path()
        wait_until(lambda: len(log.read_text().splitlines()) == 3, "nginx has logged the requests")
        assert {json.loads(line)["slot"] for line in log.read_text().splitlines()} == {0, 17, last}
        assert many.engine.client.inspect_container(many.name)["RestartCount"] == 0
    finally:
        many.stop()


# --- identity --------------------------------------------------------------------------------------------------


def test_calls_of_an_ended_lease_are_refused_while_its_sandbox_runs(leased: LeasedSandbox, egress: EgressStack) -> None:
    assert leased.call_model() == [200]
    box = leased.box
    leasing.release(leased.lease.pk, now=NOW)
    status, reply = run_python_in_sandbox(box, ASK_ONCE)
    assert status == "403" and "no_lease" in reply
    assert len(egress.upstream.requests) == 1 == len(egress.settled(1))


def test_calls_of_a_pre_warmed_sandbox_are_refused_until_it_is_claimed(
    docker_pool: Pool, enter: Enter, egress: EgressStack
) -> None:
    Pool.objects.filter(pk=docker_pool.pk).update(warm_target=1)
    box = pools.start_warm(docker_pool, now=NOW)
    assert box is not None
    status, reply = run_python_in_sandbox(box, ASK_ONCE)
    assert status == "403" and "no_lease" in reply and not egress.upstream.requests
    leased = enter()
    assert leased.box.pk == box.pk and leased.call_model() == [200]
    [row] = egress.settled(1)
    assert (row.holder, row.agent_did) == (leased.lease.pk, "did:plc:ada")


def test_calls_through_a_reused_slot_are_billed_to_its_current_holder(settings: Any, enter: Enter, egress: EgressStack) -> None:
    settings.EGRESS_SLOTS = 1
    first = enter("did:plc:ada")
    assert first.call_model() == [200]
    with pytest.raises(CapacityExhausted):
        enter("did:plc:eve")
    leasing.release(first.lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get(holder=first.lease.pk).state == "destroyed"
    second = enter("did:plc:bob")
    assert second.box.slot == Sandbox.objects.get(holder=first.lease.pk).slot == 0
    assert second.call_model(2) == [200, 200]
    assert [row.agent_did for row in egress.settled(3)] == ["did:plc:ada", "did:plc:bob", "did:plc:bob"]
    assert [sent["x-litellm-end-user-id"] for _, sent, _ in egress.upstream.requests][1:] == ["did:plc:bob"] * 2


# --- sandboxes that harm themselves ------------------------------------------------------------------------------------

DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            ask(); time.sleep(0.4)
time.sleep(60)
"""


def test_daemon_of_a_timed_out_exec_is_killed_and_makes_no_further_calls(leased: LeasedSandbox, egress: EgressStack) -> None:
    done = run_with_growing_timeouts(
        lambda seconds: leased.run("python3", "-I", "-c", CLIENT_SCRIPT + DAEMON, seconds=seconds),
        lambda done: len(egress.upstream.requests) > 1,
    )
    assert done.timed_out and len(egress.upstream.requests) > 1
    before = len(egress.settled(LlmCall.objects.count()))
    assert leased.python("print(json.dumps([(ask()[0], time.sleep(0.1))[0] for _ in range(12)]))") == [200] * 12
    assert len(egress.settled(before + 12)) == len(egress.upstream.requests)


ATTACKS = {
    "fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "import subprocess\nwhile True: subprocess.run([sys.executable, '-c', 'x = bytes(1) * (1 << 30)'])",
    "disk": """
for place in ("/tmp", "/run", "/dev/shm", "/var/tmp"):
    try:
        with open(place + "/big", "wb", buffering=0) as big:
            while True: big.write(bytes(1 << 16))
    except OSError: pass
time.sleep(60)""",
    "inodes": """
for place in ("/tmp", "/run", "/dev/shm", "/var/tmp"):
    try:
        for number in range(10 ** 6): open(f"{place}/{number}", "x").close()
    except OSError: pass
time.sleep(60)""",
    "output": "while True: os.write(1, bytes(1 << 16)); os.write(2, bytes(1 << 16))",
    "connections": """
held = []
while True:
    try:
        held.append(socket.create_connection(("127.0.0.1", 4010), timeout=1)); held[-1].send(b"P")
    except OSError: time.sleep(0.05)""",
    "silence": """
for _ in range(60):
    one = socket.create_connection(("127.0.0.1", 4010), timeout=1); held = globals().setdefault("held", []); held.append(one)
    one.setblocking(False)
    try: one.send(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" * 9999)  # never reads a response
    except OSError: pass
time.sleep(60)""",
}


def test_resource_exhaustion_in_a_sandbox_affects_neither_its_bridge_permanently_nor_others(
    enter: Enter, egress: EgressStack
) -> None:
    one, other = enter("did:plc:eve"), enter("did:plc:ada")
    for name, attack in ATTACKS.items():
        with run_in_thread(
            lambda script=CLIENT_SCRIPT + attack: one.run("python3", "-I", "-c", script, seconds=2)
        ) as attacking:
            assert other.call_model(3) == [200] * 3, name
            assert attacking.result(60).timed_out, name
        wait_until(lambda: one.call_model() == [200], f"calls leave again after {name}")
        one.run("find", "/tmp", "/run", "/dev/shm", "/var/tmp", "-xdev", "-type", "f", "-delete")
        egress.clock.at += 2 * MINUTE
