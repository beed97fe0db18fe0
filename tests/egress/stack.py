"""Complete egress proxy for tests: sandboxes and nginx in containers, the server in a thread, an upstream on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.db import connection, connections

from leases import execution
from leases.models import Lease
from sandboxes import providers
from sandboxes.egress.logs import collection
from sandboxes.egress.nginx import NginxProxy, get_server_socket_path
from sandboxes.egress.server import EgressServer
from sandboxes.models import LlmCall, Sandbox
from sandboxes.providers.command_results import ExecResult
from sandboxes.runs.operations import Command
from tests.conftest import NOW
from tests.support.servers.egress import EventLoopThread, FakeUpstream
from tests.support.waiting import wait_until

UPSTREAM_API_KEY = "sk-only-out-here"
ROOT = Path(__file__).resolve().parents[2]
# HTTP client for programs in sandboxes: ask(body, path) -> (status, bytes), over the loopback address.
CLIENT_SCRIPT = """\
import json, os, socket, sys, time, urllib.error, urllib.request
BODY = {"model": "default", "messages": [{"role": "user", "content": "{}"}]}
def ask(body=BODY, path="/v1/chat/completions", **headers):
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:4010" + path, content, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()
    except OSError as failed:
        return 0, str(failed).encode()
"""


@dataclass
class Clock:
    """Settable clock of the server."""

    at: datetime = NOW

    def __call__(self) -> datetime:
        return self.at


@dataclass
class LeasedSandbox:
    """A lease, and command execution in its sandbox."""

    lease: Lease

    @property
    def box(self) -> Sandbox:
        return Sandbox.objects.get(holder=self.lease.pk)

    def run(self, *argv: str, stdin: bytes = b"", seconds: float = 60) -> ExecResult:
        command = Command(argv=argv, timeout=timedelta(seconds=seconds), stdin=stdin)
        return execution.exec_command(self.lease.pk, command, now=NOW)[1]

    def python(self, script: str, *args: str, seconds: float = 60) -> Any:
        """Run a script that may use CLIENT_SCRIPT. Return the JSON it prints."""
        return parse_output(self.run("python3", "-I", "-", *args, stdin=(CLIENT_SCRIPT + script).encode(), seconds=seconds))

    def call_model(self, count: int = 1) -> list[int]:
        """Make model calls. Return their statuses."""
        statuses: list[int] = self.python(f"print(json.dumps([ask()[0] for _ in range({count})]))")
        return statuses


def run_python_in_sandbox(box: Sandbox, script: str) -> Any:
    """Run a script like `LeasedSandbox.python`, directly by the provider, also in a sandbox without a lease."""
    argv, stdin = ["python3", "-I", "-"], (CLIENT_SCRIPT + script).encode()
    docker = providers.get_provider("docker")
    return parse_output(docker.exec(box.ref, argv, env={}, stdin=stdin, timeout=timedelta(seconds=60), mark=uuid4().hex))


def parse_output(done: ExecResult) -> Any:
    assert done.exit_code == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout)


@dataclass
class EgressStack:
    """nginx of the test module, and the server and upstream of the test."""

    proxy: NginxProxy
    loop: EventLoopThread
    upstream: FakeUpstream
    clock: Clock = field(default_factory=Clock)
    serving: ExitStack = field(default_factory=ExitStack)
    seen: int = 0  # key of the last row returned by wait_for_new_closed_calls
    lines: int = 0  # logged by nginx before this test

    def __post_init__(self) -> None:
        self.lines = len(self.log.read_bytes().splitlines()) if self.log.exists() else 0

    def serve(self) -> EgressServer:
        server = EgressServer(now=self.clock)
        self.serving.enter_context(self.loop.run_context(server.listening({get_server_socket_path(): None})))
        return server

    def logged(self, count: int) -> list[dict[str, Any]]:
        """Wait for `count` lines in nginx's log, which are written after the end of a request. Return all lines."""
        wait_until(lambda: self.log.read_bytes().count(b"\n") >= count, f"{count} requests are logged")
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def log(self) -> Path:
        return collection.access_log_path()

    def settled(self, count: int) -> list[LlmCall]:
        """Wait until `count` calls are closed. Return their rows."""

        def closed() -> bool:
            rows = LlmCall.objects
            return rows.count() >= count and not rows.filter(ended_at__isnull=True).exists()

        wait_until(closed, f"{count} calls are closed")
        rows = [*LlmCall.objects.order_by("pk")]
        assert len(rows) == count
        return rows

    def wait_for_new_closed_calls(self) -> list[LlmCall]:
        """Wait until all calls are closed. Return the rows of calls since the last invocation."""
        wait_until(lambda: not LlmCall.objects.filter(ended_at__isnull=True).exists(), "all calls are closed")
        rows = [*LlmCall.objects.filter(pk__gt=self.seen).order_by("pk")]
        self.seen = max([self.seen, *(row.pk for row in rows)])
        return rows


@contextmanager
def run_in_thread(function: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run a function in a thread for the duration of the block."""

    def run() -> Any:
        try:
            return function()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(run)


@contextmanager
def run_egress_command(egress: EgressStack, log: Path | None = None, **variables: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `manage.py egress` on the test's database. Its log is written to the file `log`."""
    database = connection.settings_dict
    where = f"{database['USER']}@{database['HOST']}:{database['PORT']}" if connection.vendor == "postgresql" else ""
    url = f"postgres://{where}/{database['NAME']}" if where else f"sqlite:///{database['NAME']}"
    env = {
        **os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "DATABASE_URL": url, "SANDBOX_PROVIDER": "docker",
        "LEASEHOLD_RUNTIME_DIR": str(settings.RUNTIME_DIR), "LEASEHOLD_EGRESS_SLOTS": str(settings.EGRESS_SLOTS),
        "LEASEHOLD_LLM_URL": egress.upstream.url, "LEASEHOLD_LLM_API_KEY": UPSTREAM_API_KEY,
        "LEASEHOLD_EGRESS_IMAGE": settings.EGRESS_IMAGE,
        **variables,
    }  # fmt: skip
    with ExitStack() as stack:
        stderr = stack.enter_context(log.open("wb")) if log else None
        argv = [sys.executable, "manage.py", "egress"]
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"egress: 8 slots through")
        yield process
    finally:
        process.kill()
        process.wait(20)
