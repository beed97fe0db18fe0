"""The agent as process 1 of a container: commands of the same user cannot end, trace or read it."""

import io
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from sandboxes.agent.operations import FileOperation
from tests.conftest import DOCKER_IMAGE
from tests.support.sandbox_agent import Gateway, make_run, running_container
from tests.support.waiting import wait_until

pytestmark = pytest.mark.docker
TRACE = """
import ctypes, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH = 16
helper = int(subprocess.check_output(["pgrep", "-P", "1", "-x", "python3"]))
for pid in (1, helper):
    print(libc.ptrace(PTRACE_ATTACH, pid, 0, 0))
    for name in ("environ", "mem", "fd", "maps", f"task/{pid}/mem"):
        try:
            os.listdir(f"/proc/{pid}/fd") if name == "fd" else open(f"/proc/{pid}/{name}", "rb").read(1)
            print(name, "is readable")
        except PermissionError:
            pass
os.kill(helper, 9)  # is replaced
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with closing(Gateway(container="")) as gateway, running_container(gateway, DOCKER_IMAGE):
        gateway.boot()
        yield gateway


@pytest.fixture(autouse=True)
def _agent_survives(gateway: Gateway) -> Iterator[None]:
    boot = gateway.boot()
    yield
    assert gateway.client.run(make_run(f"after-{uuid.uuid4().hex}", "echo", "alive")).stdout == b"alive\n"
    assert gateway.boot() == boot


@pytest.mark.parametrize("signal", ["KILL", "STOP", "TERM", "INT", "SEGV", "USR1", "CHLD"])
def test_signals_do_not_affect_the_agent(gateway, signal):
    assert gateway.client.run(make_run(f"signal-{signal}", "sh", "-c", f"kill -{signal} 1; echo sent")).stdout == b"sent\n"


def test_killing_every_visible_process_ends_this_run_only(gateway):
    assert gateway.client.run(make_run("kill-all", "sh", "-c", "kill -9 -1")).exit_code == 137


def test_agent_and_its_helper_cannot_be_traced_or_read(gateway):
    list(FileOperation(gateway.client, ("size", "/data"), idle_timeout=20, check=lambda: None).run(io.BytesIO()))
    assert gateway.client.run(make_run("trace", "python3", "-c", TRACE)).stdout == b"-1\n-1\n"


def test_run_cannot_read_another_runs_channel(gateway):
    """The shims hold the channels of results."""
    script = "for shim in $(pgrep -P 1); do ls /proc/$shim/fd; cat /proc/$shim/environ; done 2>/dev/null; pgrep -cP 1"
    assert gateway.client.run(make_run("channels", "sh", "-c", script)).stdout == b"1\n"


IMITATE = """
import json, os, socket, struct
connection = socket.socket(socket.AF_UNIX)
connection.connect("/run/leasehold-agent/agent.sock")
head = json.dumps({"protocol": "leasehold-agent", "version": 2, "boot": "0" * 32}).encode()
try:
    connection.sendall(struct.pack(">III", 0, len(head), 0) + head)
    print(connection.recv(1))
except ConnectionError:
    print(b"")
"""


def test_command_cannot_pass_for_the_agent(gateway):
    assert gateway.client.run(make_run("imitate", "python3", "-c", IMITATE)).stdout == b"b''\n"
    wait_until(lambda: gateway.gateway.counts["rejections"], "the connection is rejected")


def test_command_descriptors_are_its_streams_only(gateway):
    result = gateway.client.run(make_run("descriptors", "python3", "-c", "import os; print(os.listdir('/proc/self/fd'))"))
    assert result.stdout == b"['0', '1', '2', '3']\n"  # 3 is the listing's own


def test_kill_reaches_daemons_with_a_cleared_environment(gateway):
    caller = threading.Thread(target=lambda: gateway.client.run(make_run("daemon", "python3", "-c", DAEMON)))
    caller.start()
    count = iter(range(1000))

    def is_daemon_running() -> bool:
        return gateway.client.run(make_run(f"look-{next(count)}", "pgrep", "-x", "sleep")).exit_code == 0

    wait_until(is_daemon_running, "the daemon has started")
    gateway.client.kill("daemon")
    assert not is_daemon_running()
    caller.join(20)
