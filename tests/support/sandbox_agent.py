"""The sandbox agent as a process, and its listening socket on the control plane's side."""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from functools import cache
from pathlib import Path

from sandboxes.agent.protocol import HEADER
from sandboxes.agent.runs import AgentClient, AgentRun
from sandboxes.agent.session import AgentSession, SessionRegistry

AGENT = Path(__file__).resolve().parents[2] / "sandboxes" / "image" / "agent.py"
SHIM_SOURCE = AGENT.with_name("shim.c")
SANDBOX = "sandbox"


class Gateway:
    """Control plane's side: accepts agents and registers their sessions. May be stopped and started again."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(dir="/tmp")  # the path of a unix socket is short
        self.path = f"{self.directory.name}/agent.sock"
        self.registry = SessionRegistry()
        self.client = AgentClient(self.registry, SANDBOX)
        self.start()

    def start(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        os.chmod(self.path, 0o666)
        self.listener.listen()
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.registry.add(SANDBOX, AgentSession(connection))

    def crash(self) -> None:
        """Lose the connection and all memory of it, as at the end of the control plane's process."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        Path(self.path).unlink()
        session = self.registry.find(SANDBOX)
        assert session is not None
        session.close()
        self.registry = SessionRegistry()
        self.client = AgentClient(self.registry, SANDBOX)

    def session(self) -> AgentSession:
        session = self.registry.find(SANDBOX, timeout=20)
        assert session is not None
        return session

    def close(self) -> None:
        self.listener.close()
        self.directory.cleanup()


@cache
def build_shim() -> str:
    """Compile shim.c as the image does. Return the program's path."""
    path = f"{tempfile.mkdtemp(dir='/tmp')}/shim"
    atexit.register(shutil.rmtree, Path(path).parent, ignore_errors=True)
    subprocess.run(["cc", "-Os", "-static", "-Wall", "-Wextra", "-Werror", "-o", path, SHIM_SOURCE], check=True)
    Path(path).parent.chmod(0o755)
    return path


def start_agent(path: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-I", "-S", AGENT, path, build_shim()], start_new_session=True)


def start_container(gateway: Gateway, image: str) -> str:
    """Start a container with the agent as process 1. Return its name."""
    name, directory = f"leasehold-agent-test-{uuid.uuid4().hex[:8]}", gateway.directory.name
    os.chmod(directory, 0o755)
    command = ["docker", "run", "-d", "--name", name, "--network", "none", "--cap-drop", "ALL", "--read-only"]
    command += ["--security-opt", "no-new-privileges", "-u", "10001:10001", "-v", f"{directory}:/run/leasehold:ro"]
    command += ["-v", f"{AGENT}:/opt/leasehold/agent.py:ro", "-v", f"{build_shim()}:/opt/leasehold/shim:ro"]
    command += ["--entrypoint", "python3", image, "-I", "-S", "/opt/leasehold/agent.py"]
    command += ["/run/leasehold/agent.sock", "/opt/leasehold/shim"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return name


def make_run(run_id: str, *argv: str, timeout: float = 30.0, stdin: bytes = b"", cap: int = 1 << 20, **env: str) -> AgentRun:
    return AgentRun(run_id, argv, env, "/", timeout, stdin, cap)


def frame(request_id: int, head: bytes, body: bytes = b"") -> bytes:
    """Encode a frame without any check."""
    return HEADER.pack(request_id, len(head), len(body)) + head + body
