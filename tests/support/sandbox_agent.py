"""The sandbox agent as a process or in a container, and the gateway."""

import asyncio
import atexit
import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sandboxes.agent.client import AgentConnection, NotConnected
from sandboxes.agent.gateway import AgentGateway
from sandboxes.agent.protocol import HEADER
from sandboxes.agent.runs import AgentClient, AgentRun
from sandboxes.providers.base import AGENT_DIRECTORY
from tests.support.waiting import wait_until

AGENT = Path(__file__).resolve().parents[2] / "sandboxes" / "image" / "agent" / "main.py"
SHIM_SOURCE = AGENT.with_name("shim.c")
SANDBOX = "sandbox"


class Gateway:
    """The gateway in a thread, and a client for the agent that connects to it. May be stopped and started again."""

    def __init__(self, container: str = SANDBOX) -> None:
        """Accept any process as the agent of `container`; with an empty one, only agents in containers."""
        self.directory = tempfile.TemporaryDirectory(dir="/tmp")  # the path of a unix socket is short
        self.mount = Path(self.directory.name, "agents")  # for SandboxSpec.agent
        self.mount.mkdir(mode=0o755)
        self.path, self.client_path = f"{self.mount}/agent.sock", Path(self.directory.name, "gateway.sock")
        self.container, self.client = container, AgentClient(self.client_path, container)
        self.start()

    def start(self) -> None:
        self.gateway = AgentGateway(lambda *_: self.container) if self.container else AgentGateway()
        self.loop, started = asyncio.new_event_loop(), threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(20)

    async def _serve(self, started: threading.Event) -> None:
        async with self.gateway.listening([Path(self.path)], self.client_path):
            started.set()
            await self._stop.wait()
        await asyncio.sleep(0)  # the ends of the sessions

    def stop(self) -> None:
        """Stop the gateway. Agents and clients lose their connections."""
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def connect(self, *, wait: float = 5.0) -> AgentConnection:
        """Open a connection to the agent."""
        return AgentConnection(self.client_path, self.client.container, wait=wait)

    def boot(self) -> str:
        """Return the boot id of the agent, waiting for its connection."""

        def find_boot() -> str:
            with contextlib.suppress(NotConnected), self.connect() as connection:
                return connection.boot
            return ""

        return wait_until(find_boot, "the agent is connected")

    def close(self) -> None:
        self.stop()
        self.directory.cleanup()


@cache
def build_shim() -> str:
    """Compile shim.c as the image does. Return the program's path."""
    path = f"{tempfile.mkdtemp(dir='/tmp')}/shim"
    atexit.register(shutil.rmtree, Path(path).parent, ignore_errors=True)
    subprocess.run(["cc", "-Os", "-static", "-Wall", "-Wextra", "-Werror", "-o", path, SHIM_SOURCE], check=True)
    Path(path).parent.chmod(0o755)
    return path


def start_agent(path: str, shim: str = "") -> "subprocess.Popen[bytes]":
    """Start the agent. `shim` is a program instead of shim.c."""
    return subprocess.Popen([sys.executable, "-I", "-S", AGENT, path, shim or build_shim()], start_new_session=True)


@contextlib.contextmanager
def running_container(gateway: Gateway, image: str) -> Iterator[str]:
    """Run a container with the image's agent as process 1, and address the gateway's client to it. Yield its name."""
    name = f"leasehold-agent-test-{uuid.uuid4().hex[:8]}"
    command = ["docker", "run", "-d", "--name", name, "--network", "none", "--cap-drop", "ALL", "--read-only"]
    command += ["--security-opt", "no-new-privileges", "-v", f"{gateway.mount}:{AGENT_DIRECTORY}:ro", image]
    try:
        container = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        gateway.client = AgentClient(gateway.client_path, container)
        yield name
    finally:
        subprocess.run(["docker", "rm", "-f", name], check=True, stdout=subprocess.DEVNULL)


def make_run(run_id: str, *argv: str, timeout: float = 30.0, stdin: bytes = b"", cap: int = 1 << 20, **env: str) -> AgentRun:
    return AgentRun(run_id, argv, env, "/", timeout, stdin, cap)


def frame(request_id: int, head: bytes, body: bytes = b"") -> bytes:
    """Encode a frame without any check."""
    return HEADER.pack(request_id, len(head), len(body)) + head + body
