"""Outgoing HTTP calls: time limit and size limit of a whole call, and the clients of services that use them."""

import json
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from leases.atproto import service as atproto
from leases.coding.forges import github
from leases.coding.forges.base import ForgeError
from sandboxes import http_calls, http_transport
from sandboxes.http_calls import CallFailed
from tests.emulators.base import UNREADABLE_ANSWERS
from tests.support.servers.receiver import (
    WebhookReceiver,
    never_respond,
    stream_endlessly,
    trickle_body,
    trickle_headers,
)


def send(url: str, method: str = "GET", **options: Any) -> http_calls.HttpAnswer:
    return http_calls.send(method, url, headers={"Authorization": "Bearer x"}, **{"timeout": 30.0} | options)


def answer(status: int, body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return respond


def test_request_and_answer_are_complete(receiver: WebhookReceiver) -> None:
    receiver.answer = answer(429, b"x" * 200_000, RateLimit_Reset="5")
    found = send(receiver.url, "POST", json={"a": 1}, params={"q": "b c"})
    assert (found.status, found.headers["ratelimit-reset"], found.content) == (429, "5", b"x" * 200_000)
    [request] = receiver.received
    assert (request.path, request.payload, request.headers["authorization"]) == ("/events?q=b+c", {"a": 1}, "Bearer x")


@pytest.mark.parametrize("respond", [never_respond, trickle_headers, trickle_body])
def test_a_server_that_answers_byte_by_byte_is_given_up(receiver: WebhookReceiver, respond: Any) -> None:
    receiver.answer = respond
    with pytest.raises(CallFailed, match="TimeoutError"):
        send(receiver.url, timeout=0.5)


def test_an_answer_without_end_is_given_up_at_its_limit(receiver: WebhookReceiver) -> None:
    receiver.answer = stream_endlessly
    with pytest.raises(CallFailed, match="AnswerTooLarge"):
        send(receiver.url, max_bytes=1 << 20)


def test_a_redirect_is_an_answer(receiver: WebhookReceiver) -> None:
    receiver.status, receiver.headers = 302, {"Location": receiver.url}
    assert send(receiver.url).status == 302
    assert len(receiver.received) == 1


def test_a_resolver_that_does_not_answer_and_an_unknown_name_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: released.wait(30) or [])
    with pytest.raises(CallFailed, match="TimeoutError"):
        send("https://slow.example/", timeout=0.2)
    released.set()

    def fail(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(CallFailed, match="Connector"):
        send("https://nowhere.invalid/")


def test_the_proxy_and_the_authorities_of_the_environment_are_used(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    host, port = receiver.server_address[:2]
    monkeypatch.setenv("http_proxy", f"http://{host}:{port}")
    monkeypatch.setenv("no_proxy", "direct.example")
    assert send("http://forge.example/path").status == 204
    assert receiver.received[0].path == "http://forge.example/path"
    assert http_transport._find_proxy("http://direct.example/") is None
    bundle = tmp_path / "none.pem"
    bundle.write_text("")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    with pytest.raises(ssl.SSLError):
        http_transport._load_service_context()


def call_repository_server(url: str) -> object:
    return atproto.RepositoryService(url).call("x.y.z", params={"a": "b"})


def call_forge(url: str) -> object:
    return github.GitHubForge(url, "a/b", "").pull_request(head="h", base="b", number=1)


@pytest.mark.parametrize(("module", "call"), [(atproto, call_repository_server), (github, call_forge)])
def test_a_slow_service_is_asked_again_later(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, module: Any, call: Callable[[str], object]
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.5)
    receiver.answer = trickle_body
    with pytest.raises((atproto.ServiceError, ForgeError), match="TimeoutError") as raised:
        call(receiver.url)
    assert raised.value.retryable  # type: ignore[attr-defined]
    receiver.answer = answer(200, b"<html>")
    with pytest.raises((atproto.ServiceError, ForgeError)):
        call(receiver.url)


OVERLONG_URL = b'{"number": 1, "state": "open", "html_url": "https://forge.example/%s"}' % (b"x" * 1000)


@pytest.mark.parametrize(
    "body",
    [*(each.body for each in UNREADABLE_ANSWERS.values()), b'[{"head": 1}]', b'{"number": true}', OVERLONG_URL],
)
def test_an_answer_that_cannot_be_read_is_asked_for_again_later(receiver: WebhookReceiver, body: bytes) -> None:
    receiver.answer = answer(200, body)
    forge, server = github.GitHubForge(receiver.url, "a/b", ""), atproto.RepositoryService(receiver.url)
    names = {"head": "h", "base": "b"}
    calls: list[Callable[[], object]] = [
        lambda: forge.pull_request(**names, number=1),
        lambda: forge.pull_request(**names, number=None),
        lambda: forge.open_pull_request(**names, title="t", body="b"),
        lambda: server.create_record("did:x", "x.y.z", "key", {}, authorization=""),
    ]
    for call in calls:
        with pytest.raises((atproto.ServiceError, ForgeError)) as raised:
            call()
        assert raised.value.retryable  # type: ignore[attr-defined]


def test_the_pages_of_a_list_share_a_time_limit(receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"head": {"ref": "other"}, "base": {"ref": "b"}}
    receiver.answer = answer(200, json.dumps([row] * github.PAGE_SIZE).encode())
    monkeypatch.setattr(github, "LIST_SECONDS", -1.0)
    with pytest.raises(ForgeError, match="TimeoutError"):
        github.GitHubForge(receiver.url, "a/b", "").pull_request(head="h", base="b", number=None)
    assert not receiver.received
