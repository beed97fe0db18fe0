"""Egress proxy with real sandboxes and nginx: SDK traffic, crashes of each component, and identity of calls."""

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from django.conf import settings as django_settings

from leases import leasing
from leases.one_shot import OneShotOutcome, OneShotRequest, run_once
from sandboxes.egress.nginx import INSTALLATION_LABEL, NginxProxy, get_installation_id, get_server_socket_path
from sandboxes.models import LlmCall, Pool
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
from tests.support.servers.egress import CHAT_PATH, COMPLETION_RESPONSE
from tests.support.waiting import wait_until
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


def test_calls_with_curl_match_rows_and_log(leased: LeasedSandbox, egress: EgressStack) -> None:
    status, reply = curl(leased, f"http://127.0.0.1:4010{CHAT_PATH}", CHAT_BODY)
    assert (status, json.loads(reply)) == (200, COMPLETION_RESPONSE)
    egress.upstream.answer = streaming(events(PIECE, PIECE, TOKENS, b"[DONE]"))
    reply = curl(leased, f"http://x{CHAT_PATH}", {**CHAT_BODY, "stream": True}, "--unix-socket", "/run/leasehold/llm.sock")
    assert reply == (200, events(PIECE, PIECE, b"[DONE]").decode())
    start = {"type": "message_start", "message": {"model": "c", "usage": {"input_tokens": 5, "output_tokens": 1}}}
    whole = events(start, {"type": "message_delta", "usage": {"output_tokens": 9}}, {"type": "message_stop"})
    egress.upstream.answer = streaming(whole)
    body, version = {**CHAT_BODY, "max_tokens": 9, "stream": True}, "anthropic-version: 2024-01-01"
    reply = curl(leased, "http://127.0.0.1:4010/v1/messages", body, "-H", version, "-H", "x-api-key: x")
    assert reply == (200, whole.decode())

    rows, lines, sent = egress.settled(3), egress.logged(3), egress.upstream.requests
    assert {row.call_id for row in rows} == {line["id"] for line in lines}
    assert [row.call_id for row in rows] == [headers["x-litellm-call-id"] for _, headers, _ in sent]
    assert {(line["slot"], line["status"], line["upstream"]) for line in lines} == {(leased.box.slot, 200, "200")}
    assert sorted(line["uri"] for line in lines) == [CHAT_PATH, CHAT_PATH, "/v1/messages"]
    assert {(row.holder, row.outcome) for row in rows} == {(leased.lease.pk, "ok")}
    assert [row.streamed for row in rows] == [False, True, True]
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(120, 7), (3, 4), (5, 9)]
    assert (sent[0][1]["authorization"], sent[0][2]["model"]) == (f"Bearer {UPSTREAM_API_KEY}", django_settings.LLM_MODEL)
    assert (sent[2][1]["x-api-key"], sent[2][1]["anthropic-version"]) == (UPSTREAM_API_KEY, "2024-01-01")


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


def assert_cut(egress: EgressStack, count: int = 1) -> None:
    """Assert that the calls in flight were made once and are closed as cut."""
    rows = egress.settled(LlmCall.objects.count())
    cut = [(row.outcome, row.code) for row in rows if row.outcome != "ok"]
    assert cut == [("cut", "not_read_to_its_end")] * count
    assert sorted(sent["x-litellm-call-id"] for _, sent, _ in egress.upstream.requests) == sorted(row.call_id for row in rows)


def break_call(leased: LeasedSandbox, egress: EgressStack, act: Callable[[], object]) -> list[int]:
    """Call `act` during a model call. Return the status seen by the sandbox."""
    held = HeldResponse(egress)
    with run_in_thread(lambda: leased.call_model()) as asking:
        held.wait_until_arrived()
        act()
        statuses: list[int] = asking.result(30)
    held.release()
    return statuses


def test_crashed_nginx_is_restarted_by_the_engine(leased: LeasedSandbox, egress: EgressStack) -> None:
    assert break_call(leased, egress, lambda: os.kill(pid_of(egress.proxy), signal.SIGKILL)) == [0]
    assert_calls_work(leased)
    egress.log.rename(egress.log.with_suffix(".old"))
    egress.proxy.reopen_log()
    wait_until(egress.log.exists, "nginx opens a new log")
    assert break_call(leased, egress, lambda: os.kill(pid_of(egress.proxy), signal.SIGKILL)) == [0]
    assert_calls_work(leased)
    assert_cut(egress, 2)


def test_start_and_stop_of_nginx_are_idempotent_and_do_not_affect_sandboxes(leased: LeasedSandbox, egress: EgressStack) -> None:
    assert break_call(leased, egress, lambda: docker("kill", egress.proxy.name)) == [0]
    assert leased.call_model() == [0]
    if egress.proxy.get_state() != "running":  # the engine does not restart a container killed by an operator; the command does
        egress.proxy.start()
    assert_calls_work(leased)
    docker("rm", "-f", egress.proxy.name)
    assert egress.proxy.get_state() == ""
    egress.proxy.start()
    egress.proxy.start()
    assert len(list_own_containers(egress)) == 1 and leased.call_model() == [200]
    egress.proxy.stop()
    egress.proxy.stop()
    assert list_own_containers(egress) == [] and leased.call_model() == [0]
    egress.proxy.start()
    assert leased.call_model() == [200]
    assert_cut(egress)


def test_calls_fail_without_a_server_and_succeed_after_its_restart(leased: LeasedSandbox, egress: EgressStack) -> None:
    assert break_call(leased, egress, egress.serving.close)[0] in (0, 502)
    assert_cut(egress)
    status, reply = leased.python(ASK_ONCE)
    assert status == "502" and "way_out_closed" in reply
    egress.serve()
    assert leased.call_model() == [200]


def test_command_restarts_nginx_and_removes_it_at_exit(leased: LeasedSandbox, egress: EgressStack) -> None:
    egress.serving.close()
    with run_egress_command(egress) as process:
        assert leased.call_model() == [200]
        docker("kill", egress.proxy.name)
        assert_calls_work(leased)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert list_own_containers(egress) == []
    assert not get_server_socket_path().exists()
    egress.proxy.start()


def docker(*argv: str) -> None:
    subprocess.run(["docker", *argv], check=True, capture_output=True)


def list_own_containers(egress: EgressStack) -> list[str]:
    label = {"label": f"{INSTALLATION_LABEL}={get_installation_id()}"}
    return [each["Id"] for each in egress.proxy.engine.client.containers(all=True, filters=label)]


# --- identity --------------------------------------------------------------------------------------------------


def test_calls_of_an_ended_lease_are_refused_while_its_sandbox_runs(leased: LeasedSandbox, egress: EgressStack) -> None:
    assert leased.call_model() == [200]
    box = leased.box
    leasing.release(leased.lease.pk, now=NOW)
    status, reply = run_python_in_sandbox(box, ASK_ONCE)
    assert status == "403" and "no_lease" in reply
    assert len(egress.upstream.requests) == 1 == len(egress.settled(1))


# --- sandboxes that harm themselves ------------------------------------------------------------------------------------

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


@pytest.mark.matrix("20 s of exhaustion")
def test_resource_exhaustion_in_a_sandbox_affects_neither_its_bridge_permanently_nor_others(
    enter: Enter, egress: EgressStack
) -> None:
    one, other = enter("did:plc:eve"), enter("did:plc:ada")
    for name, attack in ATTACKS.items():
        argv = ("python3", "-I", "-c", CLIENT_SCRIPT + attack)
        with run_in_thread(lambda argv=argv: one.run(*argv, seconds=2)) as attacking:
            assert other.call_model(3) == [200] * 3, name
            assert attacking.result(60).timed_out, name
        wait_until(lambda: one.call_model() == [200], f"calls leave again after {name}")
        one.run("find", "/tmp", "/run", "/dev/shm", "/var/tmp", "-xdev", "-type", "f", "-delete")
        egress.clock.at += 2 * MINUTE
