"""Clients built on urllib3 against a server that answers byte by byte or without end."""

import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import requests
import urllib3
from langsmith.sandbox import SandboxClientError
from runloop_api_client import APIError

from sandboxes.answer_limits import limit_answers, limit_session
from sandboxes.providers.cloudflare import provider as cloudflare
from sandboxes.providers.daytona import provider as daytona
from sandboxes.providers.langsmith import provider as langsmith
from sandboxes.providers.remote.configuration import RemoteConfiguration
from sandboxes.providers.runloop import provider as runloop
from sandboxes.storage.base import StoreError
from sandboxes.storage.cloudflare_kv import CloudflareKVStore
from sandboxes.storage.s3 import S3Store
from tests.support.servers.loopback import Handler, ScriptedServer, respond, run_scripted_server

TIMEOUT_SECONDS = 0.4
LIMIT_SECONDS = 20  # of a test on a busy machine; the server trickles for longer
INTERVAL_SECONDS = 0.05  # below the timeout of a read


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with run_scripted_server() as server:
        yield server


def trickle_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    trickle(handler)


def trickle_body(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    trickle(handler)


def trickle(handler: Handler) -> None:
    deadline = time.monotonic() + 2 * LIMIT_SECONDS
    while time.monotonic() < deadline and not handler.loopback.closing.wait(INTERVAL_SECONDS):
        handler.wfile.write(b"a")
    handler.hang_up()


def create_kv(url: str) -> CloudflareKVStore:
    return CloudflareKVStore(
        "ns", account_id="a", api_token="t", api=url, timeout=(20, TIMEOUT_SECONDS), sleep=lambda seconds: None
    )


def call_langsmith(url: str) -> object:
    client = langsmith._create_client(configure(url))
    client._http.timeout = httpx2.Timeout(TIMEOUT_SECONDS)
    return client.get_sandbox("x")


def create_s3(url: str) -> S3Store:
    return S3Store("b", endpoint=url, access_key_id="k", secret_access_key="s", read_timeout=TIMEOUT_SECONDS, attempts=1)


CALLS: dict[str, Callable[[str], object]] = {
    "KV get": lambda url: create_kv(url).get("k"),
    "KV list": lambda url: create_kv(url).page(),
    "S3 get": lambda url: create_s3(url).get("k"),
    "S3 download": lambda url: create_s3(url).download("k", io.BytesIO()),
    "S3 list": lambda url: create_s3(url).page(),
    "Cloudflare": lambda url: cloudflare._create_session(configure(url)).get(url, timeout=TIMEOUT_SECONDS),
    "Daytona API": lambda url: daytona._Clients(configure(url)).api.get_sandbox("x", _request_timeout=TIMEOUT_SECONDS),
    "Daytona toolbox": lambda url: (
        daytona._Clients(configure(url)).toolbox_connections.request("GET", url, _request_timeout=TIMEOUT_SECONDS).read()
    ),
    "LangSmith": lambda url: call_langsmith(url),
    "Runloop": lambda url: runloop._create_client(configure(url)).devboxes.retrieve("x", timeout=TIMEOUT_SECONDS),
}
ERRORS = (
    StoreError, requests.RequestException, urllib3.exceptions.HTTPError, daytona.ApiException, daytona.ToolboxException,
    httpx2.HTTPError, SandboxClientError, APIError,
)  # fmt: skip


def configure(url: str) -> RemoteConfiguration:
    return RemoteConfiguration(api_key="key", api_url=url, image="", options={})


@pytest.mark.parametrize("answer", [trickle_headers, trickle_body])
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_byte_by_byte_is_given_up(server: ScriptedServer, call: str, answer: Any) -> None:
    server.script = [answer]
    start = time.monotonic()
    with pytest.raises(ERRORS, match=r"(?i)tim(ed|eout)|not complete"):
        CALLS[call](server.url)
    assert time.monotonic() - start < LIMIT_SECONDS


def test_a_long_answer_that_makes_progress_is_read_to_its_end(server: ScriptedServer) -> None:
    chunks = 12

    def send_slowly(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(chunks << 16))
        handler.end_headers()
        for _ in range(chunks):
            handler.loopback.closing.wait(INTERVAL_SECONDS)
            handler.wfile.write(bytes(1 << 16))

    server.script = [send_slowly, respond(200, b"next")]
    session = limit_session(requests.Session())
    start = time.monotonic()
    assert len(session.get(server.url, timeout=TIMEOUT_SECONDS).content) == chunks << 16
    assert time.monotonic() - start > TIMEOUT_SECONDS
    assert session.get(server.url, timeout=TIMEOUT_SECONDS).content == b"next"


def test_an_answer_above_the_size_limit_is_given_up(server: ScriptedServer) -> None:
    server.script = [respond(200, bytes(4 << 20))]
    manager = urllib3.PoolManager()
    limit_answers(manager, max_bytes=1 << 20)
    with pytest.raises(urllib3.exceptions.ProtocolError, match="larger than"):
        manager.request("GET", server.url, retries=False)
