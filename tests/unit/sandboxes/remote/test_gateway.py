"""Model calls of remote sandboxes through the gateway: identity by token, the same rows and limits as on this host."""

import base64
import json
import socketserver
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings

from controlplane.checks import check_internal_address, check_internal_tls
from leases import execution, leasing, turns
from leases.agent_runs import lifecycle
from leases.agent_runs.clis.base import AgentOptions
from leases.models import Lease, Turn
from sandboxes.egress import gateway_tokens
from sandboxes.egress.server import EgressServer, GatewayListener
from sandboxes.errors import NoGateway
from sandboxes.management.commands.egress import read_gateway_listener
from sandboxes.models import GatewayToken, LlmCall, Pool, Run, Sandbox
from sandboxes.providers.daytona.provider import DaytonaProvider
from sandboxes.providers.remote import channel
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.egress.stack import run_in_thread
from tests.support.leases import evict
from tests.support.remote import GetEmulator
from tests.support.servers import ports
from tests.support.servers.egress import CHAT_PATH, COMPLETION_REQUEST, COMPLETION_RESPONSE, EventLoopThread, FakeUpstream
from tests.support.servers.tls import create_certificates
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
CALL = f"""
import json, os, urllib.request
body = json.dumps({COMPLETION_REQUEST!r}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
print(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20).read().decode())
"""


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture
def upstream(settings: Any, loop: EventLoopThread) -> Iterator[FakeUpstream]:
    with loop.run_context(FakeUpstream().listening()) as upstream:
        settings.LLM_URL, settings.LLM_API_KEY = upstream.url, "sk-secret"
        yield upstream


@pytest.fixture
def gateway(settings: Any, loop: EventLoopThread, upstream: FakeUpstream) -> Iterator[int]:
    """Port of the gateway, which sandboxes are told."""
    [port] = ports.find_free_ports()
    settings.GATEWAY_URL = f"http://127.0.0.1:{port}"
    server = EgressServer(now=lambda: NOW)
    with loop.run_context(server.listening({}, GatewayListener("127.0.0.1", port))):
        yield port


@pytest.fixture
def remote_pool(move_pool: Callable[[str], Pool]) -> Pool:
    return move_pool("daytona")


def run(lease: Lease, *argv: str) -> Run:
    found, _ = execution.exec_command(lease.pk, Command(argv=list(argv), timeout=MINUTE), now=NOW)
    return found


def post(port: int, token: str, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **headers}
    connection.request("POST", CHAT_PATH, json.dumps(COMPLETION_REQUEST), headers)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def post_results(port: int, token: str, results: Any) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/runner/result", json.dumps({"results": results}), {"Authorization": f"Bearer {token}"})
    status = connection.getresponse().status
    connection.close()
    return status


def read_token(lease: Lease) -> str:
    done = run(lease, "cat", "/opt/leasehold/gateway.json")
    return str(json.loads(bytes(done.stdout))["token"])


def test_program_in_a_remote_sandbox_calls_the_model_on_the_bill_of_its_lease(
    remote_pool: Pool, grant: Callable[..., Lease], gateway: int, upstream: FakeUpstream
) -> None:
    lease = grant()
    done = run(lease, "python3", "-c", CALL)
    assert (done.exit_code, bytes(done.stderr)) == (0, b"")
    assert json.loads(bytes(done.stdout)) == COMPLETION_RESPONSE
    wait_until(lambda: not LlmCall.objects.filter(outcome="open").exists(), "the call is settled")
    [call] = LlmCall.objects.all()
    assert (call.holder, call.run_id, call.outcome, call.agent_did) == (lease.pk, done.pk, "ok", lease.agent_did)
    assert bytes(run(lease, "stat", "-c", "%a", "/opt/leasehold/gateway.json").stdout) == b"600\n"


def test_token_is_replaced_at_a_wake_and_dies_with_the_lease(
    remote_pool: Pool, grant: Callable[..., Lease], gateway: int
) -> None:
    lease = grant()
    first = read_token(lease)
    assert post(gateway, first)[0] == 200
    evict(lease)
    assert post(gateway, first)[0] == 401  # no sandbox has it
    second = read_token(lease)
    assert second != first and post(gateway, first)[0] == 401 and post(gateway, second)[0] == 200
    assert not GatewayToken.objects.filter(sha256__in=[first, second]).exists()  # only hashes are stored
    leasing.release(lease.pk, now=NOW + timedelta(seconds=1))
    assert post(gateway, second)[0] == 401


def test_turn_that_asks_a_model_is_refused_without_a_gateway_and_other_commands_work(
    remote_pool: Pool, grant: Callable[..., Lease]
) -> None:
    lease = grant()
    with pytest.raises(NoGateway, match=r"Sandboxes of daytona have no models: LEASEHOLD_GATEWAY_URL is not set\."):
        turns.take_turn(lease.pk, 1, {}, now=NOW)
    request = lifecycle.AgentRequest("claude", AgentOptions("hello"), {}, "/workspace", MINUTE)
    with pytest.raises(NoGateway):
        lifecycle.create(lease.pk, request, run_id=uuid4(), now=NOW)
    assert not Turn.objects.exists() and not Run.objects.exists()  # nothing has started
    assert bytes(run(lease, "echo", "works").stdout) == b"works\n"
    type(lease.environment_type).objects.update(turn_argv=["sh", "-c", "echo '{}'"])
    assert turns.take_turn(lease.pk, 1, {}, now=NOW).ended_at


def test_token_is_in_no_command_line(
    remote_pool: Pool, grant: Callable[..., Lease], gateway: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    execute = DaytonaProvider._execute

    def record(provider: DaytonaProvider, ref: str, command: str, **more: Any) -> str:
        commands.append(command)
        return execute(provider, ref, command, **more)

    monkeypatch.setattr(DaytonaProvider, "_execute", record)
    token = read_token(grant())
    requests = [base64.b64decode(word) for command in commands for word in command.split() if len(word) > 100]
    assert requests and not any(token.encode() in text for text in [*requests, *map(str.encode, commands)])


def test_gateway_identifies_callers_by_their_token_alone(remote_pool: Pool, grant: Callable[..., Lease], gateway: int) -> None:
    lease = grant()
    token = read_token(lease)
    slot = Sandbox.objects.get(holder=lease.pk).slot
    for wrong in ("", "lhg_unknown", token[:-1], token.upper()):
        status, body = post(gateway, wrong, **{"X-Leasehold-Slot": str(slot)})
        assert (status, body["error"]["code"]) == (401, "invalid_token")
    assert gateway_tokens.find_slot(token) == slot


def test_relay_is_started_again_after_a_stop_by_the_vendor(
    remote_pool: Pool, grant: Callable[..., Lease], gateway: int, emulators: GetEmulator
) -> None:
    lease = grant()
    assert run(lease, "python3", "-c", CALL).exit_code == 0
    emulators("daytona").stop_idle(Sandbox.objects.get(holder=lease.pk).ref)
    done = run(lease, "python3", "-c", CALL)
    assert (done.exit_code, bytes(done.stderr)) == (0, b"")


def test_gateway_with_a_certificate_speaks_tls(tmp_path: Path, loop: EventLoopThread) -> None:
    files, [port] = create_certificates(tmp_path, "localhost"), ports.find_free_ports()
    listener = GatewayListener("127.0.0.1", port, str(files.certificate), str(files.key))
    context = ssl.create_default_context(cafile=files.authority)
    with (
        loop.run_context(EgressServer(now=lambda: NOW).listening({}, listener)),
        urllib.request.urlopen(f"https://localhost:{port}/healthz", context=context, timeout=20) as response,
    ):
        assert response.read() == b"ok\n"


def test_gateway_on_all_addresses_needs_one_for_other_machines(settings: Any) -> None:
    settings.GATEWAY_LISTEN, settings.GATEWAY_INTERNAL_LISTEN = "0.0.0.0:8443", "[::]:8444"
    [found] = check_internal_address(None)
    assert (found.id, found.hint) == ("leasehold.E010", "Set LEASEHOLD_GATEWAY_INTERNAL_ADDRESS.")
    settings.GATEWAY_INTERNAL_ADDRESS = "10.0.3.7:8444"
    assert check_internal_address(None) == []


def test_gateway_settings_reach_the_listener(settings: Any) -> None:
    assert read_gateway_listener() is None
    settings.GATEWAY_LISTEN = "[::1]:8443"
    settings.GATEWAY_CERTIFICATE, settings.GATEWAY_CERTIFICATE_KEY = "c.pem", "k.pem"
    assert read_gateway_listener() == GatewayListener("::1", 8443, "c.pem", "k.pem", "127.0.0.1", 0, "")
    settings.GATEWAY_INTERNAL_LISTEN, settings.GATEWAY_INTERNAL_ADDRESS = "0.0.0.0:8444", "10.0.3.7:8444"
    assert read_gateway_listener() == GatewayListener("::1", 8443, "c.pem", "k.pem", "0.0.0.0", 8444, "10.0.3.7:8444")
    settings.GATEWAY_INTERNAL_CERTIFICATE, settings.GATEWAY_INTERNAL_CERTIFICATE_KEY = "ic.pem", "ik.pem"
    found = read_gateway_listener()
    assert found and (found.internal_certificate, found.internal_key) == ("ic.pem", "ik.pem")


def test_internal_port_needs_tls_on_both_sides_or_a_private_network(settings: Any, tmp_path: Path) -> None:
    settings.GATEWAY_LISTEN = "0.0.0.0:8443"
    assert check_internal_tls(None) == []
    settings.GATEWAY_INTERNAL_LISTEN = "0.0.0.0:8444"
    assert [found.id for found in check_internal_tls(None)] == ["leasehold.W003"]
    files = create_certificates(tmp_path, "gateway.internal")
    settings.GATEWAY_INTERNAL_CERTIFICATE = str(files.certificate)
    [found] = check_internal_tls(None)
    assert (found.id, "INTERNAL_AUTHORITY is unset" in found.msg) == ("leasehold.E012", True)
    settings.GATEWAY_INTERNAL_AUTHORITY = str(files.authority)
    assert check_internal_tls(None) == []


def count_vendor_execs(emulators: GetEmulator) -> int:
    return sum("/process/execute" in line for line in emulators("daytona").requests)


def wait_connected(lease: Lease) -> None:
    """Wait until the runner of the lease's sandbox is connected to the gateway."""
    ref = Sandbox.objects.get(holder=lease.pk).ref
    fields = {"verb": "follow", "mark": "", "offsets": [0, 0], "wait": 0, "live": False, "live_after": 0, "limit": 0}

    def is_connected() -> bool:
        try:
            return bool(channel.call(settings.RUNNER_GATEWAY, ref, fields, wait=0.0))
        except channel.NotConnected:
            return False

    wait_until(is_connected, "the runner is connected")


def test_commands_and_files_pass_the_gateway_instead_of_the_vendor(
    remote_pool: Pool, grant: Callable[..., Lease], gateway: int, emulators: GetEmulator
) -> None:  # fmt: skip
    lease = grant()
    run(lease, "true")
    wait_connected(lease)
    before = count_vendor_execs(emulators)
    for number in range(3):
        assert bytes(run(lease, "sh", "-c", f"echo {number} | tee -a /data/lines; exit {number}").stdout) == b"%d\n" % number
    assert bytes(run(lease, "cat", "/data/lines").stdout) == b"0\n1\n2\n"
    done = run(lease, "sh", "-c", "head -c 60000 /dev/zero; sleep 0.2")  # the result comes later than the next poll
    assert (done.exit_code, bytes(done.stdout)) == (0, bytes(60000))
    assert count_vendor_execs(emulators) == before


def test_command_whose_gateway_dies_runs_once_and_goes_on_by_the_vendor(
    remote_pool: Pool, grant: Callable[..., Lease], settings: Any, loop: EventLoopThread
) -> None:
    [port] = ports.find_free_ports()
    settings.GATEWAY_URL = f"http://127.0.0.1:{port}"
    with ExitStack() as serving:
        serving.enter_context(loop.run_context(EgressServer().listening({}, GatewayListener("127.0.0.1", port))))
        lease = grant()
        run(lease, "true")
        wait_connected(lease)
        script = "echo x >>/data/x; until [ -e go ]; do sleep 0.01; done; cat /data/x"
        with run_in_thread(lambda: run(lease, "sh", "-c", script)) as done:
            wait_until(lambda: run(lease, "test", "-e", "/data/x").exit_code == 0, "the command runs")
            serving.close()
            run(lease, "touch", "go")
            assert bytes(done.result(60).stdout) == b"x\n"


def test_sandbox_gets_and_settles_only_its_own_requests(remote_pool: Pool, grant: Callable[..., Lease], gateway: int) -> None:
    ada, eve = grant("did:plc:ada"), grant("did:plc:eve")
    for lease in (ada, eve):
        run(lease, "true")
        wait_connected(lease)
    call = {"verb": "run", "mark": "forged"}
    token, seen = read_token(eve), []
    with run_in_thread(lambda: run(ada, "sh", "-c", "sleep 0.5; echo ada")) as done:
        for number in range(20):  # eve cannot know an id; an id of its own is not that of a request of ada either
            seen.append(post_results(gateway, token, [{"id": f"{number}", "response": call}, "x", {}]))
        assert bytes(done.result(60).stdout) == b"ada\n"
    assert {*seen} == {200}
    assert post_results(gateway, "lhg_unknown", []) == 401
    assert post_results(gateway, token, {"not": "a list"}) == 400


class PageHandler(BaseHTTPRequestHandler):
    """Answers each request with a page."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *arguments: object) -> None:
        pass


def test_page_in_place_of_the_gateways_answer_is_no_response(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with socketserver.UnixStreamServer(str(path), PageHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(channel.NotConnected, match="invalid response"):
            channel.call(path, "box", {"verb": "follow"}, wait=0.0)
        thread.join()
