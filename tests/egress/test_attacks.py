"""Attacks on the egress proxy from a sandbox: impersonation, forbidden destinations, theft of credentials, exhaustion.

Each attack is looked at from scene sides: what it was answered, and what the upstream, the rows and nginx's log saw. Beside it
the ordinary calls of its sandbox and of another one go on, so that nothing here is refused only because nothing works."""

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from django.conf import settings

from sandboxes.egress import slots
from sandboxes.egress.logs import access_log
from sandboxes.egress.nginx_config import MAX_SOCKETS_PER_SLOT
from sandboxes.egress.request_filter import FIELDS_BY_PATH
from sandboxes.identity import signing
from sandboxes.models import LlmCall
from tests.conftest import MINUTE
from tests.egress.relay import AUD, RelaySwitch
from tests.egress.stack import UPSTREAM_API_KEY, EgressStack, LeasedSandbox, run_in_thread
from tests.support import tokens
from tests.support.servers.egress import CHAT_PATH, post
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
Enter = Callable[..., LeasedSandbox]
# Name of an attack -> its responses, status of eve's ordinary call, agents of forwarded calls, status of ada's call, and more.
Observations = dict[str, tuple[str, int, list[str], int, Any]]
EVE, ADA, VICTIM = "did:plc:eve", "did:plc:ada", "did:plc:victim"

# exchange(content, count) -> all bytes received in response to `content`. Waits long for `count` responses, and briefly for
# more, which also keeps the attacks below nginx's request rate.
EXCHANGE = """
import base64, select
def exchange(content, count, address=("127.0.0.1", 4010)):
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as out:
        out.connect(address)
        try: out.sendall(content)
        except OSError: pass
        reply = b""
        while select.select([out], [], [], 0.15 if count and reply.count(b"HTTP/1.1 ") >= count else 10)[0]:
            try: chunk = out.recv(1 << 16)
            except OSError: break
            if not chunk: break
            reply += chunk
        return reply.decode("latin-1")
def attack(name, content, count):
    reply = exchange(base64.b64decode(content), count)
    return reply, ask({**BODY, "messages": [{"role": "user", "content": name}]})[0]
"""
SLOT_ZERO = rb"([-_ \0]Slot ?: )0"  # in attacks: replaced by the slot of the other sandbox
# Body fields that would bill another user or no user.
BODY = json.dumps({
    "model": "default", "messages": [{"role": "user", "content": "{}"}], "user": VICTIM, "metadata": {"user_id": VICTIM},
    "litellm_metadata": {"user_api_key_user_id": VICTIM}, "spend_logs_metadata": {"agent": VICTIM}, "api_base": "http://1.1.1.1",
    "api_key": VICTIM, "extra_headers": {"x-litellm-end-user-id": VICTIM}, "mock_response": VICTIM, "custom_llm_provider": "x",
    "safety_identifier": VICTIM, "service_tier": "priority", "store": True,
}).encode()  # fmt: skip


def request(
    *lines: str | bytes, first: str | bytes = f"POST {CHAT_PATH} HTTP/1.1", body: bytes = BODY, length: bool = True
) -> bytes:
    """Build an HTTP request with these header lines: a valid model call unless they invalidate it."""
    reply = [first, "Host: x", "Content-Type: application/json", *lines]
    reply += [f"Content-Length: {len(body)}"] if length else []
    return b"\r\n".join(one if isinstance(one, bytes) else one.encode("latin-1") for one in reply) + b"\r\n\r\n" + body


def get(*lines: str | bytes, path: str = "/v1/models", method: str = "GET") -> bytes:
    return request(*lines, first=f"{method} {path} HTTP/1.1", body=b"", length=False)


def chunked(*lines: str | bytes, body: bytes) -> bytes:
    return request("Transfer-Encoding: chunked", *lines, body=body, length=False)


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


@dataclass(frozen=True)
class Attack:
    """Bytes to send, the expected statuses, and the number of calls forwarded in the sender's name."""

    sent: bytes
    answered: tuple[int, ...]
    leave: int = 0


FORGED = {
    "Authorization": f"Bearer {VICTIM}", "x-api-key": VICTIM, "api-key": VICTIM, "Cookie": f"token={VICTIM}",
    "Proxy-Authorization": f"Basic {VICTIM}", "x-litellm-api-key": f"Bearer {VICTIM}", "x-litellm-end-user-id": VICTIM,
    "x-litellm-customer-id": VICTIM, "x-litellm-call-id": "f" * 32, "x-litellm-tags": VICTIM, "x-litellm-trace-id": VICTIM,
    "x-litellm-spend-logs-metadata": json.dumps({"agent": VICTIM}), "x-litellm-timeout": "0", "X-Leasehold-Slot": "0",
    "X-Leasehold-Agent": VICTIM, "X-Leasehold-Code": VICTIM, "X-Request-Id": "f" * 32, "OpenAI-Organization": VICTIM,
    "OpenAI-Project": VICTIM, "anthropic-beta": VICTIM, "X-Forwarded-For": "1.1.1.1", "X-Real-IP": "1.1.1.1",
    "Forwarded": f"for={VICTIM}", "X-Original-URL": "/key/generate", "X-HTTP-Method-Override": "GET", "X-Accel-Redirect": "/x",
    "Connection": "close, X-Leasehold-Slot, X-Request-Id, Content-Length", "Expect": "nothing", "Via": "1.1 x",
    "Content-Encoding": "identity", "Accept-Encoding": "gzip", "Referer": VICTIM, "User-Agent": VICTIM,
}  # fmt: skip
INNER = request("X-Leasehold-Slot: 0", "X-Request-Id: " + "e" * 32, f"Authorization: Bearer {VICTIM}", "Connection: close")
COVERED = b"0\r\n\r\n" + INNER  # for a parser of chunks, another request begins here
TRAILER = b"0\r\nX-Leasehold-Slot: 0\r\nAuthorization: x\r\n\r\n"
HANDSHAKE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: " + "A" * 22 + "==")
LENGTH = f"Content-Length: {len(BODY)}"

ATTACKS: dict[str, dict[str, Attack]] = {
    "headers that say who it is": {
        **{name: Attack(request(f"{name}: {value}"), (200,), 1) for name, value in FORGED.items()},
        "all at once": Attack(request(*(f"{name}: {value}" for name, value in FORGED.items())), (200,), 1),
        "with underscores": Attack(request("X_Leasehold_Slot: 0", "x_litellm_end_user_id: " + VICTIM), (200,), 1),
        "twice": Attack(request("X-Leasehold-Slot: 0", "X-Leasehold-Slot: 1"), (200,), 1),
        "in a value": Attack(request("Content-Type: a/b\tX-Leasehold-Slot: 0", "Content-Type: \x01"), (200,), 1),
        "a control character": Attack(request("X: \x01", "User-Agent: \x7f\x1b"), (200,), 1),
        "a dialect": Attack(
            request("anthropic-version: 1\x01", f"anthropic-version: {VICTIM}", first="POST /v1/messages HTTP/1.1"), (200,), 1
        ),
        "folded": Attack(request("X: a\r\n X-Leasehold-Slot: 0"), (400,)),
        "a space before the colon": Attack(request("X-Leasehold-Slot : 0"), (400,)),
        "a space in a name": Attack(request("X Leasehold-Slot: 0"), (400,)),
        "a NUL in a name": Attack(request(b"X-Leasehold\x00-Slot: 0"), (400,)),
        "a NUL in a value": Attack(request(b"X-Leasehold-Slot: 0\x00"), (400,)),
        "no name": Attack(request(": 0"), (400,)),
        "a bare CR": Attack(request(b"X: a\rX-Leasehold-Slot: 0"), (400,)),
        "bare LFs": Attack(request("X-Leasehold-Slot: 0").replace(b"\r\n", b"\n"), (200,), 1),
    },
    "requests within requests": {
        "two, one after the other": Attack(request() + INNER, (200, 200), 2),
        "after one without a body": Attack(get() + INNER, (200, 200), 1),
        "after one that is refused": Attack(get(path="/x") + INNER, (403, 200), 1),
        "a length and chunks": Attack(request("Transfer-Encoding: chunked", LENGTH, body=COVERED, length=False), (400,)),
        "chunks and a length": Attack(request(LENGTH, "Transfer-Encoding: chunked", body=COVERED, length=False), (400,)),
        "two lengths": Attack(request("Content-Length: 0", LENGTH, length=False), (400,)),
        "the same length twice": Attack(request(LENGTH, LENGTH, length=False), (400,)),
        "two lengths in one": Attack(request(f"Content-Length: {len(BODY)}, 0", length=False), (400,)),
        "a length with a sign": Attack(request(f"Content-Length: +{len(BODY)}", length=False), (400,)),
        "a length below zero": Attack(request("Content-Length: -1", length=False), (400,)),
        "a length in hexadecimal": Attack(request("Content-Length: 0x10", length=False), (400,)),
        "a length beyond all bounds": Attack(request(f"Content-Length: {1 << 64}", length=False), (400,)),
        "two hosts": Attack(request("Host: y"), (400,)),
        "no host": Attack(request().replace(b"Host: x\r\n", b""), (400,)),
        "two encodings": Attack(chunked("Transfer-Encoding: identity", body=COVERED), (400,)),
        "chunked twice": Attack(chunked("Transfer-Encoding: chunked", body=COVERED), (400,)),
        "an unknown encoding": Attack(request("Transfer-Encoding: xchunked", length=False), (501,)),
        "a list of encodings": Attack(request("Transfer-Encoding: gzip, chunked", body=COVERED, length=False), (501,)),
        "an encoding of old": Attack(request("Transfer-Encoding: identity", length=False), (501,)),
        "an encoding with a tab": Attack(request("Transfer-Encoding:\tchunked", LENGTH, length=False), (501,)),
        "an encoding with a form feed": Attack(request("Transfer-Encoding: \x0bchunked", LENGTH, length=False), (501,)),
        "an encoding after a space": Attack(request("Transfer-Encoding : chunked", body=COVERED, length=False), (400,)),
        "an encoding that is folded": Attack(request("Transfer-Encoding:\r\n chunked", body=COVERED, length=False), (400,)),
        "an encoding with an underscore": Attack(request("Transfer_Encoding: chunked", LENGTH, length=False), (200,), 1),
        "chunks of HTTP 1.0": Attack(
            request("Transfer-Encoding: chunked", first=f"POST {CHAT_PATH} HTTP/1.0", body=COVERED, length=False), (400,)
        ),
    },
    "chunks": {
        "as they should be": Attack(chunked(body=chunk(BODY[:9]) + chunk(BODY[9:]) + b"0\r\n\r\n"), (200,), 1),
        "with headers at the end": Attack(chunked("Trailer: X-Leasehold-Slot", body=chunk(BODY) + TRAILER), (200,), 1),
        "with a request at the end": Attack(chunked(body=chunk(BODY) + COVERED), (200, 200), 2),
        "with an extension": Attack(chunked(body=b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)), (200,), 1),
        "of a size with a sign": Attack(chunked(body=b"-1\r\n" + BODY), (400,)),
        "of a size with 0x": Attack(chunked(body=b"0x%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)), (400,)),
        "of no size": Attack(chunked(body=b"\r\n" + BODY), (400,)),
        "of a size beyond all bounds": Attack(chunked(body=b"f" * 17 + b"\r\n" + BODY), (400,)),
        "that are larger than they say": Attack(chunked(body=b"5\r\n" + BODY + b"\r\n0\r\n\r\n"), (400,)),
    },
    "other paths": {
        **{
            path: Attack(request(first=f"POST {path} HTTP/1.1"), (status,))
            for status, paths in {
                403: [
                    "/", "/key/generate", "/v1/files", "/v1", "/healthz", f"{CHAT_PATH}/", f"{CHAT_PATH}/x",
                    f"{CHAT_PATH}/../../key/generate", f"{CHAT_PATH}/%2e%2e/%2e%2e/key", f"{CHAT_PATH}/..%2f..%2f..%2fkey",
                    f"{CHAT_PATH};x", f"{CHAT_PATH}%3bx", f"{CHAT_PATH}\\..\\key", f"/{CHAT_PATH}",
                    f"{CHAT_PATH.replace('chat/', 'chat//')}", "/v1/CHAT/completions", "/v1/models", "/relay/x",
                    "/relay/../key", "/nginx_status", "/v1%2Fmodels/x", "/v1/engines/gpt-4/chat/completions",
                    "http://1.1.1.1/key/generate", "http://169.254.169.254/latest/api/token",
                    "https://api.example.com:443/v1/files", "ftp://1.1.1.1/", "//1.1.1.1/v1/files",
                ],
                400: [f"{CHAT_PATH}%00", "/../v1/chat/completions", "/%2e%2e/key", "key", "*", "/relay/../.."],
                404: ["/leasehold-error-403"],
            }.items()
            for path in paths
        },
        "the address of another machine": Attack(request(first=f"POST http://1.1.1.1{CHAT_PATH} HTTP/1.1"), (200,), 1),
        "by a query": Attack(request(first=f"POST {CHAT_PATH}?user={VICTIM}&api_base=http://1.1.1.1/ HTTP/1.1"), (200,), 1),
        "in another spelling": Attack(request(first="POST /v1/./chat/x/../%63ompletions HTTP/1.1"), (200,), 1),
        "of a fragment": Attack(request(first=f"POST {CHAT_PATH}#/../key HTTP/1.1"), (200,), 1),
        "metadata of a cloud": Attack(get("Metadata: true", path="http://169.254.169.254/latest/meta-data/"), (403,)),
    },
    "other methods and protocols": {
        **{
            method: Attack(get(path=CHAT_PATH, method=method), (status,))
            for status, methods in {
                403: ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "PRI", "X-Y"),
                405: ("TRACE",),
                400: ("POST\tX", "post"),
            }.items()
            for method in methods
        },
        "CONNECT": Attack(request(first="CONNECT 1.1.1.1:443 HTTP/1.1", body=b"", length=False), (400,)),
        "CONNECT to the cloud": Attack(request(first="CONNECT 169.254.169.254:80 HTTP/1.1", body=b"", length=False), (400,)),
        "OPTIONS *": Attack(get(path="*", method="OPTIONS"), (400,)),
        "HTTP 0.9": Attack(b"GET /key/generate\r\n", ()),
        "HTTP 1.0": Attack(request(first=f"POST {CHAT_PATH} HTTP/1.0"), (200,), 1),
        "HTTP 1.9": Attack(request(first=f"POST {CHAT_PATH} HTTP/1.9"), (200,), 1),
        "HTTP 2": Attack(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), (400,)),
        "HTTP 3.0": Attack(request(first=f"POST {CHAT_PATH} HTTP/3.0"), (505,)),
        "HTTP 2 by an upgrade": Attack(
            request("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"), (200,), 1
        ),
        "a WebSocket to a model": Attack(get(*HANDSHAKE), (200,)),
        "a WebSocket to a call": Attack(request(*HANDSHAKE) + INNER, (200, 200), 2),
        "TLS": Attack(bytes.fromhex("1603010200010001fc0303") + bytes(500), (400,)),
        "SOCKS": Attack(b"\x05\x01\x00\x05\x01\x00\x01\x01\x01\x01\x01\x01\xbb", (400,)),
        "no words at all": Attack(b"\r\n\r\n\x00\xff\n\n", (400,)),
        "a proxy's own greeting": Attack(b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + request(), (400,)),
        "a header without end": Attack(request("X: " + "a" * 70_000), (400,)),
        "headers without end": Attack(request(*(f"X-{number}: {'a' * 500}" for number in range(200))), (400,)),
        "a path without end": Attack(get(path="/" + "a" * 70_000), (414,)),
        "a body declared to be large": Attack(request(f"Content-Length: {1 << 30}", length=False), (413,)),
    },
}  # fmt: skip
MAY_LEAVE = {
    "host", "authorization", "x-api-key", "anthropic-version", "x-litellm-call-id", "x-litellm-end-user-id",
    "x-litellm-spend-logs-metadata", "accept-encoding", "accept", "user-agent", "content-length", "content-type",
}  # fmt: skip


class AttackScene:
    """An attacking sandbox and a bystander."""

    def __init__(self, egress: EgressStack, enter: Enter) -> None:
        self.egress, self.eve, self.ada = egress, enter(EVE), enter(ADA)
        self.boxes = {each.lease.pk: each.box for each in (self.eve, self.ada)}
        self.checked = 0  # requests at the upstream before the current attack
        self.ada_socket = slots.ensure_slot_directory(self.ada.box.slot or 0) / slots.SOCKET_NAME  # as its sandbox sees it

    def probe(
        self, attacks: dict[str, "Attack | Upgrade"], observe: Callable[[], Awaitable[Any]] | None = None
    ) -> Observations:
        """Make attacks in the name of eve, each followed by ordinary calls of eve and ada. Return the observations by name.

        The content of eve's ordinary call is the attack's name, by which the upstream knows that the attack is over. `observe`
        runs in the upstream's loop at that moment."""
        upstream, seen = self.egress.upstream, dict[str, Any]()

        async def answer(request: web.Request) -> web.StreamResponse:
            name = (await request.json())["messages"][0]["content"]
            if name in attacks:
                agents = [sent["x-litellm-end-user-id"] for _, sent, _ in upstream.requests[self.checked :]]
                status, _ = await asyncio.to_thread(post, self.ada_socket, BODY)
                seen[name] = (agents, status, await observe() if observe else None)
                self.checked = len(upstream.requests)
                self.egress.clock.at += 2 * MINUTE  # keeps the rate limit from stopping the next attack
            return await upstream._answer(request)

        upstream.answer = answer
        slot = rb"\g<1>%d" % (self.ada.box.slot or 0)
        sent = [(name, re.sub(SLOT_ZERO, slot, attack.sent), len(attack.answered)) for name, attack in attacks.items()]
        answers = self.eve.python(build_probe(sent), seconds=300)
        return {name: (*answer, *seen[name]) for name, answer in zip(attacks, answers, strict=True)}

    def left(self, *agents: str) -> None:
        """Assert the calls since the last check: each sandbox in its own name, and no others."""
        rows = self.egress.wait_for_new_closed_calls()
        self._require_own(rows)
        assert [(row.agent_did, row.outcome) for row in rows] == [(agent, "ok") for agent in agents]
        sent = [headers["x-litellm-call-id"] for _, headers, _ in self.egress.upstream.requests]
        assert sent == [row.call_id for row in rows]
        self.forget()

    def forget(self) -> None:
        self.egress.wait_for_new_closed_calls()
        self.egress.upstream.requests.clear()
        self.checked = 0

    def _require_own(self, rows: list[LlmCall]) -> None:
        """Assert that forwarded calls have their own sandbox's identity, our credentials and none of the sandbox's headers."""
        of = {row.call_id: row for row in rows}
        for row in rows:
            assert row.holder and (row.sandbox, row.agent_did) == (box := self.boxes[row.holder], box.agent_did)
        for path, headers, body in self.egress.upstream.requests:
            row = of[headers["x-litellm-call-id"]]
            reply = json.loads(headers["x-litellm-spend-logs-metadata"])
            assert (reply["agent"], reply["lease"]) == (row.agent_did, str(row.holder))
            assert headers["x-litellm-end-user-id"] == row.agent_did
            assert headers["authorization"] == f"Bearer {UPSTREAM_API_KEY}" and path in FIELDS_BY_PATH
            assert headers.keys() <= MAY_LEAVE and body.keys() <= {"messages", "model"}
            assert VICTIM not in json.dumps([path, headers, body]) and "ffffffff" not in row.call_id

    def logged(self) -> None:
        """Assert that each line of nginx's log is one request through one of the two slots."""
        lines = self.egress.log.read_bytes().splitlines()
        found = [access_log.parse_line(line) for line in lines]
        assert None not in found, [line for line in lines if access_log.parse_line(line) is None]
        assert {line.slot for line in found[self.egress.lines :] if line} <= {box.slot for box in self.boxes.values()}


@pytest.fixture
def scene(egress: EgressStack, enter: Enter) -> AttackScene:
    return AttackScene(egress, enter)


def build_probe(requests: Iterable[tuple[str, bytes, int]]) -> str:
    """Build a script that sends (name, bytes, count of responses) and makes an ordinary call after each.

    It prints the responses and the status of the ordinary call."""
    encoded = json.dumps([(name, base64.b64encode(content).decode(), count) for name, content, count in requests])
    return f"{EXCHANGE}\nprint(json.dumps([attack(*each) for each in json.loads({encoded!r})]))"


def statuses(reply: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"HTTP/1\.1 (\d{3}) ", reply)))


def test_attack_by_request_fails(scene: AttackScene) -> None:
    wrong = []
    for kind, attacks in ATTACKS.items():
        for name, (reply, own, agents, bystander, _) in scene.probe(attacks).items():
            expected = (attacks[name].answered, 200, [EVE] * (attacks[name].leave + 1), 200)
            found = (statuses(reply), own, agents, bystander)
            if found != expected or UPSTREAM_API_KEY in reply or "leasehold-egress" in reply:
                wrong.append(f"{kind}, {name}: {found}\n{reply[:300]}")
        assert not wrong, "\n".join(wrong)
        scene.left(*(agent for attack in attacks.values() for agent in [EVE] * (attack.leave + 1) + [ADA]))
    scene.logged()


# --- exhaustion -------------------------------------------------------------------------------------------

LARGE = r"""
head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
body = json.dumps({**BODY, "pad": "a" * (5 << 20)}).encode()
reply = [exchange(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, 1)]
reply += [exchange(head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + bytes(1 << 16) + b"\r\n") * 80, 1)]
reply += [exchange(head + b"Content-Length: %d\r\n\r\n" % (1 << 62), 1)]
print(json.dumps([*reply, ask()[0]]))
"""


def test_too_large_request_is_refused_for_any_framing(scene: AttackScene) -> None:
    *reply, own = scene.eve.python(EXCHANGE + LARGE)
    assert ([*map(statuses, reply)], own) == ([(413,)] * 3, 200)
    assert all("too_large" in each for each in reply)
    assert scene.ada.call_model() == [200]
    scene.left(EVE, ADA)


HELD = r"""
def held(content):
    out = socket.socket(socket.AF_UNIX)
    out.connect("/run/leasehold/llm.sock")
    out.send(content)
    return out
begun = [held(b"POST /v1/chat/completions HTTP/1.1\r\nX: ") for _ in range(60)]
body = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
begun += [held(body) for _ in range(36)]  # more than the limit
while (status := ask()[0]) == 200:
    begun.append(held(body))  # in place of one that has ended, or was not read yet
    time.sleep(0.1)  # below nginx's request rate
open("/workspace/held", "w").close()
while os.path.exists("/workspace/held"): time.sleep(0.05)
print(status)
"""


def test_unfinished_requests_block_only_their_own_sandbox(scene: AttackScene) -> None:
    def is_held() -> bool:
        return holding.done() or scene.eve.run("test", "-e", "held").exit_code == 0

    with run_in_thread(lambda: scene.eve.python(HELD, seconds=240)) as holding:
        wait_until(is_held, "all connections are held", within=180)  # a busy engine may start a command late
        assert not holding.done(), holding.result()
        scene.forget()
        assert scene.ada.call_model(3) == [200] * 3
        scene.left(ADA, ADA, ADA)
        scene.eve.run("rm", "held")
        assert holding.result(60) == 429
    wait_until(lambda: scene.eve.call_model() == [200], "its own calls succeed again")
    scene.left(EVE)


HOARDED = r"""
import select
kept = []
for _ in range(1000):
    out = socket.socket(socket.AF_UNIX)
    out.connect("/run/leasehold/llm.sock")
    try: out.send(b"POST /v1/chat/completions HTTP/1.1\r\nX: ")
    except OSError: continue
    kept.append(out)
def closed(out):
    try: return bool(select.select([out], [], [], 0)[0]) and not out.recv(1)
    except OSError: return True
until = time.monotonic() + 30
while len(kept) > MOST and time.monotonic() < until:
    kept = [out for out in kept if not closed(out)]
count = len(kept)
for out in kept: out.close()
print(count)
"""


def test_connections_per_sandbox_are_limited_before_any_request(scene: AttackScene) -> None:
    """Limits on requests count complete requests only, so idle connections need their own limit."""
    assert scene.eve.python(f"MOST = {MAX_SOCKETS_PER_SLOT}\n{HOARDED}") == MAX_SOCKETS_PER_SLOT
    wait_until(lambda: scene.eve.call_model() == [200], "its own calls succeed again")
    scene.forget()
    assert scene.ada.call_model() == [200]
    scene.left(ADA)


# --- credentials ----------------------------------------------------------------------------------------------------------


QUOTED = {200: 200, 302: 502, 400: 502, 401: 502, 429: 502, 500: 502}  # upstream's status -> status seen by the sandbox
QUOTED_TYPES = ("application/json", "text/event-stream", f"text/plain; key={UPSTREAM_API_KEY}")


def test_credential_quoted_by_the_upstream_is_redacted(scene: AttackScene, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []

    async def quote(request: web.Request) -> web.StreamResponse:
        """Quote request headers wherever possible. The call's content selects status and content type."""
        heard.append(request.headers["Authorization"])
        status, _, kind = (await request.json())["messages"][0]["content"].partition(" ")
        headers = {f"X-{name}": value for name, value in request.headers.items()} | {
            "Location": f"http://{UPSTREAM_API_KEY}/", "WWW-Authenticate": f"Bearer {UPSTREAM_API_KEY}", "Content-Type": kind,
            **dict.fromkeys(("Set-Cookie", "Retry-After", "x-litellm-response-cost"), UPSTREAM_API_KEY),
        }  # fmt: skip
        response = web.StreamResponse(status=int(status), reason=f"No {UPSTREAM_API_KEY}", headers=headers)
        await response.prepare(request)
        quoted, pad = f"before {dict(request.headers)} after", "x" * 70_000 + UPSTREAM_API_KEY
        whole = b"data: " + json.dumps({"model": UPSTREAM_API_KEY, "error": quoted, "pad": pad}).encode()
        for at in range(0, len(whole), 4999):
            await response.write(whole[at : at + 4999])
            await asyncio.sleep(0)
        await response.write(UPSTREAM_API_KEY[:9].encode())
        await response.write(UPSTREAM_API_KEY[9:].encode() + b"\n\n")
        return response

    scene.egress.upstream.answer = quote
    cases = [(status, f"{status} {kind}") for kind in QUOTED_TYPES for status in QUOTED]
    bodies = [json.dumps({"model": "default", "messages": [{"role": "user", "content": name}]}).encode() for _, name in cases]
    probes = zip((name for _, name in cases), (request("Connection: close", body=body) for body in bodies), strict=True)
    replies = scene.eve.python(build_probe((*probe, 1) for probe in probes))
    for (status, name), (reply, own) in zip(cases, replies, strict=True):
        assert (statuses(reply), own) == ((QUOTED[status],), QUOTED[status]), name
        assert UPSTREAM_API_KEY not in reply and UPSTREAM_API_KEY[4:] not in reply and UPSTREAM_API_KEY[:-4] not in reply
        assert ("before" in reply and "after" in reply) == (status == 200), name
    rows = scene.egress.settled(2 * len(cases))
    assert heard == [f"Bearer {UPSTREAM_API_KEY}"] * len(rows)
    # The event of the streams is an error.
    outcomes = ["ok" if status == 200 and "event-stream" not in name else "failed" for status, name in cases]
    costs = [None if status == 200 else 0 for status, _ in cases]  # refused and failed requests are free
    expected = [(EVE, *each) for each in zip(outcomes, costs, strict=True) for _ in range(2)]
    assert [(row.agent_did, row.outcome, row.cost) for row in rows] == expected
    assert UPSTREAM_API_KEY not in json.dumps([*LlmCall.objects.values()], default=str) + scene.egress.log.read_text()
    assert UPSTREAM_API_KEY not in "".join(capfd.readouterr())


# --- the relay --------------------------------------------------------------------------------------------------------

PUBLIC = {
    "host", "upgrade", "connection", "sec-websocket-version", "sec-websocket-key", "accept", "accept-encoding", "user-agent",
    "authorization", "x-leasehold-agent", "x-leasehold-call-id",
}  # fmt: skip


def upgrade(*lines: str | bytes, path: str = "/relay/x.y", method: str = "GET") -> bytes:
    return get(*HANDSHAKE, *lines, path=path, method=method)


def frame(content: bytes, first: int = 0x81) -> bytes:
    """Build a client frame with a zero mask."""
    length = bytes([0x80 | len(content)]) if len(content) < 126 else b"\xfe" + len(content).to_bytes(2)
    return bytes([first]) + length + bytes(4) + content


@dataclass(frozen=True)
class Upgrade:
    """Bytes to send, the expected statuses, and the path and messages that reach the relay."""

    sent: bytes
    answered: tuple[int, ...]
    requested: str = ""
    received: tuple[str | bytes, ...] = ()


THERE = "/xrpc/x.y"
CLOSE = frame(b"\x03\xe8", 0x88)
UPGRADES = {
    "as it should be": Upgrade(upgrade() + frame(b"hello") + CLOSE, (101,), THERE, ("hello",)),
    "in pieces": Upgrade(upgrade() + frame(b"he", 0x01) + frame(b"llo", 0x80) + CLOSE, (101,), THERE, ("hello",)),
    "forged headers": Upgrade(
        upgrade(*(f"{name}: {value}" for name, value in FORGED.items() if name not in ("Connection", "Expect"))) + CLOSE,
        (101,), THERE,
    ),
    "the relay's own headers": Upgrade(
        upgrade(f"x-leasehold-agent: {VICTIM}", "x-leasehold-call-id: 1", f"Authorization: {VICTIM}") + CLOSE, (101,), THERE
    ),
    "a subprotocol": Upgrade(upgrade(f"Sec-WebSocket-Protocol: {VICTIM}", f"Origin: http://{VICTIM}") + CLOSE, (101,), THERE),
    "an extension": Upgrade(upgrade("Sec-WebSocket-Extensions: permessage-deflate") + CLOSE, (101,), THERE),
    "a query": Upgrade(upgrade(path="/relay/x.y?cursor=7&cursor=8") + CLOSE, (101,), f"{THERE}?cursor=7&cursor=8"),
    "a query that would be more": Upgrade(
        upgrade(path="/relay/x.y?a=%0d%0aX:%20y%23") + CLOSE, (101,), f"{THERE}?a=%0D%0AX:+y%23"
    ),
    "a request instead of frames": Upgrade(upgrade() + INNER, (101,), THERE),
    "a request in a frame": Upgrade(upgrade() + frame(INNER[:77]) + CLOSE, (101,), THERE, (INNER[:77].decode(),)),
    "a frame without a mask": Upgrade(upgrade() + b"\x81\x05hello" + CLOSE, (101,), THERE, ("hello",)),
    "a frame of no kind": Upgrade(upgrade() + frame(b"x", 0x83), (101,), THERE),
    "a frame with bits of an extension": Upgrade(upgrade() + frame(b"x", 0xC1), (101,), THERE),
    "a frame that is too large": Upgrade(upgrade() + b"\x82\xff" + (1 << 40).to_bytes(8) + bytes(4) + b"x", (101,), THERE),
    "a rest without a beginning": Upgrade(upgrade() + frame(b"x", 0x80), (101,), THERE),
    "text that is none": Upgrade(upgrade() + frame(b"\xff\xfe"), (101,), THERE),
    "no upgrade": Upgrade(get(path="/relay/x.y"), (426,)),
    "another upgrade": Upgrade(get("Connection: Upgrade", "Upgrade: h2c", path="/relay/x.y"), (426,)),
    "an upgrade to several": Upgrade(get("Connection: Upgrade", "Upgrade: websocket, h2c", path="/relay/x.y"), (426,)),
    "an old version": Upgrade(
        get(*HANDSHAKE[:2], "Sec-WebSocket-Version: 8", HANDSHAKE[3], path="/relay/x.y") + CLOSE, (101,), THERE
    ),
    "no version": Upgrade(get(*HANDSHAKE[:2], HANDSHAKE[3], path="/relay/x.y"), (400,)),
    "no key": Upgrade(get(*HANDSHAKE[:3], path="/relay/x.y") + INNER, (400, 200)),
    "a key that is none": Upgrade(get(*HANDSHAKE[:3], "Sec-WebSocket-Key: \x01\x02", path="/relay/x.y"), (400,)),
    "by POST": Upgrade(upgrade(method="POST"), (403,)),
    "by HEAD": Upgrade(upgrade(method="HEAD") + CLOSE, (101,), THERE),
    "a body": Upgrade(upgrade("Content-Length: 5") + b"hello", (101,), THERE),
    **{
        path: Upgrade(upgrade(path=path), answered)
        for path, answered in {
            "/relay": (301,), "/relay/%252e%252e/admin": (403,), "/relay/x/%252E./admin": (403,), "/relay/%2e%2e/key": (403,),
            "/relay/..%2fkey": (403,), "/relay/..%252fkey": (403,), "/relay/x%3fy": (403,), "/relay/x%23y": (403,),
            "/relay/x%0d%0aX:%20y": (404,), "/relay/%00": (400,), "/relay/..;/key": (403,), "/relay/x%5c..%5cy": (403,),
            "/relay/@1.1.1.1/": (403,), "/relay/x%20y": (403,), "ws://1.1.1.1/xrpc": (403,), "//1.1.1.1/relay/x": (403,),
        }.items()
    },
}  # fmt: skip


def test_attack_by_upgrade_fails(relayed: RelaySwitch, scene: AttackScene) -> None:
    """No relay connection and no model call is made in another name."""
    key, relay, wrong = signing.create_key(EVE, now=scene.egress.clock()), relayed.relay, []

    async def observe() -> tuple[list[tuple[str, dict[str, str]]], tuple[str | bytes, ...]]:
        while relay.open:
            await asyncio.sleep(0.01)
        found = [*relay.connections], (*relay.received,)
        relay.connections.clear(), relay.received.clear()
        return found

    observations = scene.probe(UPGRADES, observe)
    rows = scene.egress.wait_for_new_closed_calls()
    assert {row.agent_did for row in rows if row.kind == "relay"} == {EVE}
    for name, (reply, own, agents, bystander, (connections, received)) in observations.items():
        expected = UPGRADES[name]
        found = (statuses(reply), own, {*agents}, bystander, [path for path, _ in connections], received)
        paths = [expected.requested] if expected.requested else []
        if found != (expected.answered, 200, {EVE}, 200, paths, expected.received):
            wrong.append(f"{name}: {found}\n{reply[:300]}")
        for _, headers in connections:
            token = headers["authorization"].removeprefix("Bearer ")
            claims = tokens.verify_token(token, key.did_key)
            assert (headers["x-leasehold-agent"], claims["iss"], claims["aud"]) == (EVE, EVE, AUD), name
            assert headers.keys() <= PUBLIC and VICTIM not in json.dumps(headers), name
            assert headers["x-leasehold-call-id"] in {row.call_id for row in rows if row.kind == "relay"}, name
            assert token not in reply, name
    assert not wrong, "\n".join(wrong)


# --- file system ------------------------------------------------------------------------------------------------

LOOK = """
places, files = json.loads(sys.argv[1])
def connects(path):
    with socket.socket(socket.AF_UNIX) as out:
        return not out.connect_ex(path)
def reads(path):
    try: return bool(open(path, "rb").read(1)) or True
    except OSError: return False
def named(name):
    try: return bool(socket.getaddrinfo(name, 80))
    except OSError: return False
print(json.dumps({
    "own": [connects("/run/leasehold/llm.sock"), reads("/etc/passwd"), named("localhost")],
    "listed": os.listdir("/run/leasehold"),
    "reached": [path for path in places if connects(path)],
    "read": [path for path in files if reads(path)],
    "named": [name for name in ("egress", "leasehold-egress", "host.docker.internal") if named(name)],
    "bound": [line.split()[7] for line in open("/proc/net/unix").readlines()[1:] if len(line.split()) > 7],
}))
"""


def test_other_slots_and_the_servers_socket_are_unreachable(scene: AttackScene) -> None:
    where = settings.EGRESS_DIR.resolve()
    other = f"{scene.ada.box.slot}/llm.sock"
    places = [str(where / "s" / other), f"/s/{other}", f"/run/leasehold/../{other}", f"/run/leasehold/../s/{other}",
              str(where / "server/server.sock"), "/server/server.sock", "/run/leasehold/../server/server.sock"]  # fmt: skip
    files = [str(where / "nginx/leasehold.conf"), "/etc/nginx/leasehold.conf", "/etc/nginx/leasehold-locations.conf",
             str(where / "logs/access.log"), "/logs/access.log", "/proc/1/environ", "/proc/1/root/etc/passwd"]  # fmt: skip
    found = scene.eve.python(LOOK, json.dumps([places, files]))
    assert {*found.pop("bound")} <= {f"/s/{scene.eve.box.slot}/llm.sock"}  # the peer name of its own socket
    assert found == {"own": [True, True, True], "listed": ["llm.sock"], "reached": [], "read": [], "named": []}
    assert (where / "s" / other).is_socket() and (where / "logs/access.log").exists()
    assert scene.eve.call_model() + scene.ada.call_model() == [200, 200]
    scene.left(EVE, ADA)
