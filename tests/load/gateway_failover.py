"""Kills of gateways and of a client process in the middle of execs: `python -m tests.load.gateway_failover --execs 200`.

Three gateways (`manage.py egress`) serve one agent over TLS, behind a TCP proxy. Two processes execute half of the commands
each, through the row of the gateway that holds the agent's connection. By SIGKILL end: one gateway after a quarter of the
commands, the second process after half, and another gateway after five eighths. Afterwards each command was started at most
once; each command of this process has its result, and the agent knows the result of each started command of the killed process.
Uses a test database on DATABASE_URL. Exit code 1 if a check fails."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from leases.models import Lease
    from sandboxes.agent.runs import AgentClient

THREADS = 8  # of each process
COMMAND_SECONDS = 0.3
PATIENCE_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load.gateway_failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--execs", type=int, default=200, help="commands of both processes; default: %(default)s")
    parser.add_argument("--replica", metavar="REF", help=argparse.SUPPRESS)  # the second process
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    if arguments.replica:
        execute_all(arguments.replica, "replica", arguments.execs, arguments.log)
        return 0
    from django.db import connection

    name = connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        with tempfile.TemporaryDirectory(prefix="lh-failover-") as directory:
            return run_load(Path(directory), arguments.execs)
    finally:
        connection.creation.destroy_test_db(name, verbosity=0)


def execute_all(ref: str, prefix: str, count: int, log: Path) -> dict[str, bytes]:
    """Execute commands, each of which writes its mark to the log. Return stdout by mark."""
    from django.db import connections

    from sandboxes.agent import addresses
    from sandboxes.agent.runs import AgentClient
    from tests.support.sandbox_agent import make_run

    client = AgentClient(addresses.get_routed_gateway(), ref)

    def execute(mark: str) -> tuple[str, bytes]:
        script = f"echo {mark} >>{log}; sleep {COMMAND_SECONDS}; echo {mark}"
        try:
            return mark, client.run(make_run(mark, "sh", "-c", script, timeout=60)).stdout
        finally:
            connections.close_all()  # of this thread

    with ThreadPoolExecutor(THREADS) as threads:
        return dict(threads.map(execute, [f"{prefix}-{number}" for number in range(count)]))


def run_load(directory: Path, execs: int) -> int:
    from sandboxes.agent import addresses
    from sandboxes.agent.runs import AgentClient
    from tests.support import remote_agent
    from tests.support.leases import get_sandbox
    from tests.support.servers.ports import find_free_ports
    from tests.support.servers.tls import create_certificates
    from tests.support.waiting import wait_until

    files, log, half = create_certificates(directory, "127.0.0.1"), directory / "log", execs // 2
    lease, ports = create_lease(), find_free_ports(3)
    balancer = remote_agent.Balancer(*ports)
    with ExitStack() as stack:
        gateways = []

        def start_gateway(number: int) -> "subprocess.Popen[bytes]":
            home = directory / f"{number}-{len(gateways)}"
            gateways.append(stack.enter_context(remote_agent.running_gateway(home, ports[number], files)))
            wait_until(lambda: remote_agent.is_listening(ports[number]), "the gateway listens")
            return gateways[-1]

        first, second, _ = (start_gateway(number) for number in range(3))
        token = remote_agent.issue_token(lease)
        path = remote_agent.write_gateway_file(directory, f"https://127.0.0.1:{balancer.port}", token, files.authority)
        stack.enter_context(remote_agent.running_agent(path))
        remote_agent.connect(lease)
        ref = get_sandbox(lease).ref
        replica = start_replica(ref, half, log)
        stack.callback(replica.kill)
        wait_until(lambda: count_started(log), "the second process executes commands", within=PATIENCE_SECONDS)
        with ThreadPoolExecutor(1) as thread:
            own = thread.submit(execute_all, ref, "web", execs - half, log)
            kill_after(execs // 4, log, first.kill, "a gateway")
            kill_after(execs // 2, log, replica.kill, "the second process")
            kill_after(execs * 5 // 8, log, second.kill, "another gateway")
            results = own.result(300)
        client = AgentClient(addresses.get_routed_gateway(), ref)
        started = Counter(log.read_text().split())
        found = {mark: wait_for_result(client, mark) for mark in started if mark.startswith("replica")}
    balancer.close()
    lost = [mark for mark, stdout in results.items() if stdout != mark.encode() + b"\n"]
    lost += [mark for mark, stdout in found.items() if stdout != mark.encode() + b"\n"]
    doubled = [mark for mark, count in started.items() if count > 1]
    print(f"{len(results)} commands of this process, {len(found)} started ones of the killed process")
    print(f"lost: {len(lost)}, doubled: {len(doubled)}")
    return 1 if lost or doubled or len(results) != execs - half else 0


def create_lease() -> "Lease":
    """Acquire a lease with a sandbox of the memory provider, whose row the agent gets."""
    from django.conf import settings

    from leases import leasing
    from sandboxes.models import Pool
    from tests.conftest import NOW

    settings.SANDBOX_PROVIDER = "memory"
    Pool.objects.create(name="failover", provider="memory", capacity=1)
    request = leasing.LeaseRequest(agent_did="did:plc:ada", environment_id="e", environment_type="catan", pool="failover")
    return leasing.acquire(request, now=NOW)[0]


def start_replica(ref: str, count: int, log: Path) -> "subprocess.Popen[bytes]":
    from tests.support.remote_agent import build_database_url

    command = [sys.executable, "-m", "tests.load.gateway_failover", "--replica", ref, "--execs", str(count), "--log", str(log)]
    return subprocess.Popen(command, env=os.environ | {"DATABASE_URL": build_database_url()})


def wait_for_result(client: "AgentClient", mark: str) -> bytes:
    """Return stdout of a command that was started, as the sweep of abandoned runs finds it."""
    from sandboxes.agent.client import ConnectionLost, NotConnected
    from sandboxes.agent.runs import AgentResult
    from tests.support.waiting import wait_until

    def find() -> AgentResult | None:
        try:
            found = client.find(mark, cap=100)
        except (ConnectionLost, NotConnected):  # it has just been killed
            return None
        return found if isinstance(found, AgentResult) else None

    result = wait_until(find, f"{mark} has ended")
    assert result
    return result.stdout


def count_started(log: Path) -> int:
    return len(log.read_text().split()) if log.exists() else 0


def kill_after(count: int, log: Path, kill: Callable[[], None], name: str) -> None:
    """Kill when `count` commands have been started."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while count_started(log) < count:
        assert time.monotonic() < deadline, f"not {count} commands were started"
        time.sleep(0.02)
    kill()
    print(f"{count} commands started: {name} killed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
