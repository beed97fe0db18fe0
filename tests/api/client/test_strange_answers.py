"""Answers that are not those of the HTTP API: each method returns, or raises an error of the client."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from leasehold import AsyncSandbox, LeaseholdError, Operator, OutcomeUnknown, RetryPolicy, Sandbox
from leasehold.sandbox import Agent, Files, Processes

LEASE = {"id": "1", "ttl_seconds": 3600, "is_new": True}
AGENT_RUN = {"run_id": "1"}
Answer = tuple[int, dict[str, str], bytes]
ANSWERS: dict[str, Answer] = {
    "page": (200, {"Content-Type": "text/html"}, b"<html>Sign in</html>"),
    "nothing": (200, {}, b""),
    "bytes": (200, {}, b"\xff\xfe\x00"),
    "list": (200, {}, b"[]"),
    "null": (200, {}, b"null"),
    "object": (200, {}, b"{}"),
    "deep": (200, {}, b"[" * 100_000),
    "wrong types": (200, {}, json.dumps({"results": 5, "entries": 5, "stdout": 5, "duration_seconds": "x"}).encode()),
    "overflow": (200, {}, json.dumps({"stdout": "", "stderr": "", "duration_seconds": 1e300}).encode()),
    "not base64": (200, {}, json.dumps({"stdout": "a", "stderr": ""}).encode()),
    "not gzip": (200, {"Content-Encoding": "gzip"}, b"text"),
    "event without fields": (200, {"Content-Type": "text/event-stream"}, b"event: exit\ndata: {}\n\nevent: end\ndata: 5\n\n"),
    "event without JSON": (200, {"Content-Type": "text/event-stream"}, b"event: stdout\ndata: {\n\n"),
    "error event": (200, {"Content-Type": "text/event-stream"}, b"event: error\ndata: []\n\n"),
    "redirect": (302, {"Location": "http://[::1"}, b""),
    "refused page": (403, {"Content-Type": "text/html"}, b"<html>No</html>"),
    "refused list": (400, {}, b"[]"),
    "strange problem": (400, {}, json.dumps({"code": 5, "detail": [], "errors": 5, "field": {}}).encode()),
    "strange pause": (503, {"Retry-After": "\u00b2"}, b"{}"),
    "failed page": (500, {}, b"<html>"),
}


class StrangeServer(ThreadingHTTPServer):
    """Grants a lease, and gives all other requests the same answer. With `refuses_joins` it gives it to joins as well."""

    daemon_threads = True
    answer: Answer = ANSWERS["nothing"]
    refuses_joins = False
    starts_agents = False


class _Handler(BaseHTTPRequestHandler):
    server: StrangeServer

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, headers, body = self.server.answer
        if self.path.endswith("/join") and not self.server.refuses_joins:
            status, headers, body = 200, {}, json.dumps(LEASE).encode()
        elif self.path.endswith("/release"):
            status, headers, body = 200, {}, b"{}"
        elif self.path.endswith("/agent-runs") and self.server.starts_agents:
            status, headers, body = 201, {}, json.dumps(AGENT_RUN).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def strange_server() -> Iterator[StrangeServer]:
    server = StrangeServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def options(strange_server: StrangeServer) -> dict[str, Any]:
    strange_server.refuses_joins = strange_server.starts_agents = False
    retries = RetryPolicy(period_seconds=0.02, first_pause_seconds=0.001)
    return {"url": f"http://127.0.0.1:{strange_server.server_address[1]}", "api_key": "key", "retries": retries}


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "Sandbox.exec": lambda box, path: box.exec("true", check=True),
    "Sandbox.stream": lambda box, path: box.stream("true"),
    "Sandbox.agent": lambda box, path: box.agent("hello"),
    "Agent.wait": lambda box, path: box.agent("hello"),
    "Agent.messages": lambda box, path: box.agent("hello"),
    "Agent.interrupt": lambda box, path: box.agent("hello"),
    "Files.read": lambda box, path: box.files.read("x"),
    "Files.read_text": lambda box, path: box.files.read_text("x"),
    "Files.write": lambda box, path: box.files.write("x", b""),
    "Files.list": lambda box, path: box.files.list("x"),
    "Files.remove": lambda box, path: box.files.remove("x"),
    "Files.make_directory": lambda box, path: box.files.make_directory("x"),
    "Files.upload": lambda box, path: box.files.upload(path, "x"),
    "Files.download": lambda box, path: box.files.download("x", path),
    "Processes.start": lambda box, path: box.processes.start("true"),
    "Processes.list": lambda box, path: box.processes.list(),
    "Processes.get": lambda box, path: box.processes.get("1"),
    "Processes.logs": lambda box, path: box.processes.logs("1"),
    "Processes.signal": lambda box, path: box.processes.signal("1", "INT"),
    "Processes.kill": lambda box, path: box.processes.kill("1"),
}
OPENS_AND_CLOSES = {"Sandbox.open", "Sandbox.release"}


def test_the_table_has_all_methods() -> None:
    methods = {
        f"{each.__name__}.{name}"
        for each in (Sandbox, Files, Processes, Agent)
        for name, value in vars(each).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }
    assert methods == CALLS.keys() | OPENS_AND_CLOSES


def call_one(box: Sandbox, name: str, path: Path) -> None:
    result = CALLS[name](box, path)
    if name == "Sandbox.stream":
        for _ in result:
            pass
    elif name == "Agent.messages":
        for _ in result.messages():
            pass
    elif name.startswith("Agent."):
        getattr(result, name.removeprefix("Agent."))()


async def call_one_async(box: AsyncSandbox, name: str, path: Path) -> None:
    result = CALLS[name](box, path)
    if name == "Sandbox.stream":
        async for _ in result:
            pass
        return
    agent = await result
    if name == "Agent.messages":
        async for _ in agent.messages():
            pass
    elif name.startswith("Agent."):
        await getattr(agent, name.removeprefix("Agent."))()


@pytest.fixture(params=ANSWERS)
def answering(request: pytest.FixtureRequest, strange_server: StrangeServer) -> StrangeServer:
    strange_server.answer = ANSWERS[request.param]
    return strange_server


# Text of a file that is not UTF-8 is no answer of the server.
PERMITTED = {"Files.read_text": (LeaseholdError, UnicodeDecodeError)}


def test_strange_answers_raise_errors_of_the_client_alone(
    options: dict[str, Any], answering: StrangeServer, tmp_path: Path
) -> None:
    with Sandbox(agent="did:web:ada", **options) as box:
        for name in CALLS:
            answering.starts_agents = name.startswith("Agent.")
            with suppress(*PERMITTED.get(name, (LeaseholdError,))):
                call_one(box, name, tmp_path)


def test_strange_answers_to_async_calls_raise_errors_of_the_client_alone(
    options: dict[str, Any], answering: StrangeServer, tmp_path: Path
) -> None:
    async def call_all() -> None:
        async with AsyncSandbox(agent="did:web:ada", **options) as box:
            for name in CALLS:
                answering.starts_agents = name.startswith("Agent.")
                with suppress(*PERMITTED.get(name, (LeaseholdError,))):
                    await call_one_async(box, name, tmp_path)

    asyncio.run(call_all())


def test_strange_answers_to_a_join_and_to_an_operator(options: dict[str, Any], answering: StrangeServer) -> None:
    answering.refuses_joins = True
    for agent in ("did:web:ada", None):
        with pytest.raises(LeaseholdError):
            Sandbox(agent=agent, **options).open()
    with Operator(**options) as operator:
        for stop in (operator.stop_all, lambda: operator.stop_agent("a"), lambda: operator.stop_environment("e")):
            with suppress(LeaseholdError):
                stop()


def test_a_strange_problem_document_is_an_error_with_its_status(options: dict[str, Any], strange_server: StrangeServer) -> None:
    strange_server.answer = ANSWERS["strange problem"]
    with Sandbox(agent="did:web:ada", **options) as box, pytest.raises(LeaseholdError) as refused:
        box.files.list()
    assert (refused.value.status, refused.value.field_errors, refused.value.retryable) == (400, {}, False)


def test_a_command_whose_answer_cannot_be_read_has_an_unknown_outcome(
    options: dict[str, Any], strange_server: StrangeServer
) -> None:
    strange_server.answer = ANSWERS["page"]
    with Sandbox(agent="did:web:ada", **options) as box, pytest.raises(OutcomeUnknown, match="may have been executed"):
        box.exec("true")


@pytest.mark.parametrize(
    "wrong", [{"url": "http://[::1"}, {"url": "http://a b"}, {"url": "ftp://a"}, {"api_key": "k\u00e9y"}, {"api_key": "a\nb"}]
)
def test_an_address_or_a_key_that_cannot_be_sent_is_an_error_of_the_client(
    options: dict[str, Any], wrong: dict[str, str]
) -> None:
    with pytest.raises(LeaseholdError):
        Sandbox(agent="did:web:ada", **options | wrong).open()


def test_arguments_of_the_caller_stay_errors_of_python(options: dict[str, Any]) -> None:
    with Sandbox(agent="did:web:ada", **options) as box, pytest.raises(ValueError, match="not below"):
        box.files.read("/etc/passwd")
