"""The way out of real sandboxes through a real nginx: ordinary use, whoever dies on the way, and whose a call is."""

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
from sandboxes.egress import authorization, reconciliation, slots
from sandboxes.egress.nginx import INSTALLATION_LABEL, NginxProxy, get_installation_id, get_server_socket_path
from sandboxes.errors import CapacityExhausted
from sandboxes.models import LlmCall, Pool, Sandbox
from sandboxes.providers.docker.engine import Engine
from tests.conftest import MINUTE, NOW
from tests.egress.whole import (
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
from tests.unit.sandboxes.test_egress_server import PIECE, TOKENS, events, streaming

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
Enter = Callable[..., LeasedSandbox]
CURL = "curl -sS -N -d @- -H 'Content-Type: application/json' -w '\\n%{http_code}' \"$@\""
CHAT_BODY = {"model": "default", "messages": [{"role": "user", "content": "{}"}]}
ASK_ONCE = "print(json.dumps([*map(str, ask())]))"


def curl(inside: LeasedSandbox, url: str, body: Any, *more: str) -> tuple[int, str]:
    done = inside.run("sh", "-c", CURL, "sh", url, *more, stdin=json.dumps(body).encode())
    assert done.exit_code == 0, done.stderr
    said, _, status = done.stdout.decode().rpartition("\n")
    return int(status), said


class Held:
    """An upstream's answer that does not come until it is let go."""

    def __init__(self, egress: EgressStack) -> None:
        self.way, self.come, self.go = egress, threading.Event(), asyncio.Event()
        egress.upstream.answer = self.answer

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.come.set()
        await self.go.wait()
        return web.json_response(COMPLETION_RESPONSE)

    def has_come(self) -> None:
        assert self.come.wait(60), "no call comes"

    def let_go(self) -> None:
        self.egress.loop.loop.call_soon_threadsafe(self.go.set)


# --- ordinary use -----------------------------------------------------------------------------------------------------


def test_curl_speaks_to_a_model_in_openais_words_and_row_and_log_agree(inside: LeasedSandbox, egress: EgressStack) -> None:
    status, said = curl(inside, f"http://127.0.0.1:4010{CHAT_PATH}", CHAT_BODY)
    assert (status, json.loads(said)) == (200, COMPLETION_RESPONSE)
    [row], [line], [(_, sent, body)] = egress.settled(1), egress.logged(1), egress.upstream.asked
    assert line["id"] == row.call_id == sent["x-litellm-call-id"]
    assert (line["slot"], line["status"], line["upstream"], line["uri"]) == (inside.box.slot, 200, "200", CHAT_PATH)
    assert (row.holder, row.outcome, row.input_tokens, row.output_tokens) == (inside.lease.pk, "ok", 120, 7)
    assert (sent["authorization"], body["model"]) == (f"Bearer {UPSTREAM_API_KEY}", django_settings.LLM_MODEL)


def test_curl_streams_by_the_socket_too(inside: LeasedSandbox, egress: EgressStack) -> None:
    egress.upstream.answer = streaming(events(PIECE, PIECE, TOKENS, b"[DONE]"))
    said = curl(inside, f"http://x{CHAT_PATH}", {**CHAT_BODY, "stream": True}, "--unix-socket", "/run/leasehold/llm.sock")
    assert said == (200, events(PIECE, PIECE, b"[DONE]").decode())
    assert [(row.streamed, row.output_tokens, row.outcome) for row in egress.settled(1)] == [(True, 4, "ok")]


def test_python_speaks_to_a_model_in_anthropics_words(inside: LeasedSandbox, egress: EgressStack) -> None:
    start = {"type": "message_start", "message": {"model": "c", "usage": {"input_tokens": 5, "output_tokens": 1}}}
    whole = events(start, {"type": "message_delta", "usage": {"output_tokens": 9}}, {"type": "message_stop"})
    egress.upstream.answer = streaming(whole)
    script = """
BODY |= {"max_tokens": 9, "stream": True}
status, said = ask(BODY, "/v1/messages", **{"anthropic-version": "2024-01-01", "x-api-key": os.environ["ANTHROPIC_API_KEY"]})
print(json.dumps([status, said.decode()]))"""
    assert inside.python(script) == [200, whole.decode()]
    egress.upstream.answer = egress.upstream._answer
    egress.upstream.body = json.dumps({"model": "c", "usage": {"input_tokens": 2, "output_tokens": 3}}).encode()
    assert inside.python('print(json.dumps(ask({**BODY, "max_tokens": 9}, "/v1/messages")[0]))') == 200
    assert [(row.model, row.input_tokens, row.output_tokens) for row in egress.settled(2)] == [("c", 5, 9), ("c", 2, 3)]
    sent = egress.upstream.asked[0][1]
    assert (sent["x-api-key"], sent["anthropic-version"]) == (UPSTREAM_API_KEY, "2024-01-01")


def test_a_first_event_arrives_before_the_last_is_sent(inside: LeasedSandbox, egress: EgressStack) -> None:
    """The rest of the stream is not sent before the program, which has read its beginning, asks for something else."""
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
    status, first, rest = inside.python(script)
    assert (status, first + rest) == (200, events(PIECE, b"[DONE]").decode())
    assert [row.outcome for row in egress.settled(2)] == ["ok", "ok"]


def test_a_one_shot_run_has_the_same_way_out_and_is_billed_for_it(docker_pool: Pool, egress: EgressStack) -> None:
    wish = OneShotRequest(
        "did:plc:ada", ("python3", "-I", "-"), MINUTE, pool=docker_pool.name, stdin=(CLIENT_SCRIPT + ASK_ONCE).encode()
    )
    result = run_once(wish, now=NOW)
    assert (result.outcome, json.loads(result.stdout)[0], result.cleaned_up) == (OneShotOutcome.OK, "200", True)
    [row] = egress.settled(1)
    assert (row.holder, row.run_id, row.agent_did, row.outcome) == (result.lease_id, result.run_id, "did:plc:ada", "ok")


# --- who dies on the way ----------------------------------------------------------------------------------------------


def pid_of(nginx: NginxProxy) -> int:
    return int(nginx.engine.client.inspect_container(nginx.name)["State"]["Pid"])


def works_again(inside: LeasedSandbox) -> None:
    wait_until(lambda: inside.asks() == [200], "calls work again, in the same sandbox")


def cut_and_once(egress: EgressStack, code: str) -> None:
    """The call that was under way is closed as cut, and was made once."""
    first, *rest = [row for row in egress.settled(LlmCall.objects.count()) if row.outcome != "ok"]
    assert (first.outcome, first.code, rest) == ("cut", code, [])
    assert len({sent["x-litellm-call-id"] for _, sent, _ in egress.upstream.asked}) == len(egress.upstream.asked)
    assert {sent["x-litellm-call-id"] for _, sent, _ in egress.upstream.asked} == {
        *LlmCall.objects.values_list("call_id", flat=True)
    }


@pytest.mark.parametrize("after", ["start", "reopened log"])
def test_nginx_that_dies_in_a_call_is_started_again_by_the_engine(
    after: str, inside: LeasedSandbox, egress: EgressStack
) -> None:
    if after == "reopened log":
        egress.log.rename(egress.log.with_suffix(".old"))
        egress.proxy.reopen_log()
        wait_until(egress.log.exists, "a new log is there")
    held = Held(egress)
    with run_in_thread(lambda: inside.asks()) as asking:
        held.has_come()
        os.kill(pid_of(egress.proxy), signal.SIGKILL)
        assert asking.result(30) == [0]
    held.let_go()
    works_again(inside)
    cut_and_once(egress, "not_read_to_its_end")


def test_nginx_that_somebody_killed_or_removed_is_started_again_without_touching_sandboxes(
    inside: LeasedSandbox, egress: EgressStack
) -> None:
    held = Held(egress)
    with run_in_thread(lambda: inside.asks()) as asking:
        held.has_come()
        subprocess.run(["docker", "kill", egress.proxy.name], check=True, capture_output=True)
        assert asking.result(30) == [0]
    assert inside.asks() == [0]
    held.let_go()
    if egress.proxy.get_state() != "running":  # an operator's kill is no crash: what the command does every few seconds
        egress.proxy.start()
    works_again(inside)
    subprocess.run(["docker", "rm", "-f", egress.proxy.name], check=True, capture_output=True)
    assert egress.proxy.get_state() == ""
    egress.proxy.start()
    assert inside.asks() == [200]
    cut_and_once(egress, "not_read_to_its_end")


def test_without_a_server_it_is_said_and_with_one_it_works_again(inside: LeasedSandbox, egress: EgressStack) -> None:
    held = Held(egress)
    with run_in_thread(lambda: inside.asks()) as asking:
        held.has_come()
        egress.serving.close()
        assert asking.result(30)[0] in (0, 502)
    cut_and_once(egress, "not_read_to_its_end")
    status, said = inside.python(ASK_ONCE)
    assert status == "502" and "way_out_closed" in said
    held.let_go()
    egress.serve()
    assert inside.asks() == [200]


def test_a_server_killed_in_a_call_leaves_a_row_that_is_closed_as_lost(inside: LeasedSandbox, egress: EgressStack) -> None:
    """The command itself, in a process of its own. What it leaves behind, the next server takes over."""
    egress.serving.close()
    held = Held(egress)
    with run_egress_command(egress) as process:
        with run_in_thread(lambda: inside.asks()) as asking:
            held.has_come()
            process.kill()
            assert asking.result(30)[0] in (0, 502)
        process.wait(20)
    held.let_go()
    row = LlmCall.objects.get(outcome="open")
    assert row.ended_at is None
    egress.serve()
    assert inside.asks() == [200]
    late = row.deadline_at + timedelta(seconds=1)
    assert authorization.close_abandoned(now=late) == 1 == len(egress.upstream.asked) - 1
    row.refresh_from_db()
    assert (row.outcome, row.ended_at, row.cost) == ("lost", late, None)


def test_the_command_looks_after_nginx_and_leaves_nothing(inside: LeasedSandbox, egress: EgressStack) -> None:
    egress.serving.close()
    with run_egress_command(egress) as process:
        assert inside.asks() == [200]
        subprocess.run(["docker", "kill", egress.proxy.name], check=True, capture_output=True)
        works_again(inside)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert of_this_installation(egress) == []
    assert not get_server_socket_path().exists()
    egress.proxy.start()


def of_this_installation(egress: EgressStack) -> list[str]:
    label = {"label": f"{INSTALLATION_LABEL}={get_installation_id()}"}
    return [each["Id"] for each in egress.proxy.engine.client.containers(all=True, filters=label)]


def test_starting_twice_leaves_one_and_stopping_twice_none(inside: LeasedSandbox, egress: EgressStack) -> None:
    egress.proxy.start()
    egress.proxy.start()
    assert len(of_this_installation(egress)) == 1 and inside.asks() == [200]
    egress.proxy.stop()
    egress.proxy.stop()
    assert of_this_installation(egress) == []
    assert inside.asks() == [0]
    egress.proxy.start()
    assert inside.asks() == [200]


def test_as_many_slots_as_there_are_by_default_are_listened_on_and_told_apart(
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
        log = reconciliation.access_log_path()
        wait_until(lambda: len(log.read_text().splitlines()) == 3, "nginx has written of them")
        assert {json.loads(line)["slot"] for line in log.read_text().splitlines()} == {0, 17, last}
        assert many.engine.client.inspect_container(many.name)["RestartCount"] == 0
    finally:
        many.stop()


# --- whose a call is --------------------------------------------------------------------------------------------------


def test_an_ended_lease_has_no_way_out_although_its_sandbox_still_runs(inside: LeasedSandbox, egress: EgressStack) -> None:
    assert inside.asks() == [200]
    box = inside.box
    leasing.release(inside.lease.pk, now=NOW)
    status, said = run_python_in_sandbox(box, ASK_ONCE)
    assert status == "403" and "no_lease" in said
    assert len(egress.upstream.asked) == 1 == len(egress.settled(1))


def test_a_prewarmed_sandbox_has_no_way_out_before_somebody_holds_it(
    docker_pool: Pool, enter: Enter, egress: EgressStack
) -> None:
    Pool.objects.filter(pk=docker_pool.pk).update(warm_target=1)
    box = pools.start_warm(docker_pool, now=NOW)
    assert box is not None
    status, said = run_python_in_sandbox(box, ASK_ONCE)
    assert status == "403" and "no_lease" in said and not egress.upstream.asked
    inside = enter()
    assert inside.box.pk == box.pk and inside.asks() == [200]
    [row] = egress.settled(1)
    assert (row.holder, row.agent_did) == (inside.lease.pk, "did:plc:ada")


def test_a_slot_that_somebody_else_had_is_billed_to_who_has_it_now(settings: Any, enter: Enter, egress: EgressStack) -> None:
    settings.EGRESS_SLOTS = 1
    first = enter("did:plc:ada")
    assert first.asks() == [200]
    with pytest.raises(CapacityExhausted):
        enter("did:plc:eve")
    leasing.release(first.lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get(holder=first.lease.pk).state == "destroyed"
    second = enter("did:plc:bob")
    assert second.box.slot == Sandbox.objects.get(holder=first.lease.pk).slot == 0
    assert second.asks(2) == [200, 200]
    assert [row.agent_did for row in egress.settled(3)] == ["did:plc:ada", "did:plc:bob", "did:plc:bob"]
    assert [sent["x-litellm-end-user-id"] for _, sent, _ in egress.upstream.asked][1:] == ["did:plc:bob"] * 2


# --- what a sandbox does to itself ------------------------------------------------------------------------------------

DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            ask(); time.sleep(0.4)
time.sleep(60)
"""


def test_a_daemon_is_killed_with_the_exec_that_timed_out_and_calls_no_more(inside: LeasedSandbox, egress: EgressStack) -> None:
    done = run_with_growing_timeouts(
        lambda seconds: inside.run("python3", "-I", "-c", CLIENT_SCRIPT + DAEMON, seconds=seconds),
        lambda done: len(egress.upstream.asked) > 1,
    )
    assert done.timed_out and len(egress.upstream.asked) > 1
    before = len(egress.settled(LlmCall.objects.count()))
    assert inside.python("print(json.dumps([(ask()[0], time.sleep(0.1))[0] for _ in range(12)]))") == [200] * 12
    assert len(egress.settled(before + 12)) == len(egress.upstream.asked)


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
    try: one.send(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" * 9999)  # and reads no answer
    except OSError: pass
time.sleep(60)""",
}


def test_what_a_sandbox_does_to_itself_stops_neither_its_bridge_for_long_nor_others(enter: Enter, egress: EgressStack) -> None:
    one, other = enter("did:plc:eve"), enter("did:plc:ada")
    for name, attack in ATTACKS.items():
        with run_in_thread(
            lambda script=CLIENT_SCRIPT + attack: one.run("python3", "-I", "-c", script, seconds=2)
        ) as attacking:
            assert other.asks(3) == [200] * 3, name
            assert attacking.result(60).timed_out, name
        wait_until(lambda: one.asks() == [200], f"calls leave again after {name}")
        one.run("find", "/tmp", "/run", "/dev/shm", "/var/tmp", "-xdev", "-type", "f", "-delete")
        egress.clock.at += 2 * MINUTE
