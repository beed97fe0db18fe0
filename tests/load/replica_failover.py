"""Kills of replicas in the middle of execs on Kubernetes: `python -m tests.load.replica_failover --execs 200`.

Runs the processes of the Kubernetes base by the commands of its manifests: two web servers, three gateways and one worker, on
a private PostgreSQL cluster, with Pods on the emulator. Clients execute commands through the HTTP API. A request without an
answer is repeated with the same idempotency key, as the client library does. By SIGKILL end: the gateway of the first
sandbox's agent after a quarter of the commands, the web server of half of the clients after half, and the next gateway of that
agent after five eighths. Afterwards each command was executed once and has one run with its result, and its client got the
result or the answer that the outcome is unknown. Needs root, Docker and the sandbox image. Exit code 1 if a check fails."""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import django
import psycopg
import yaml

SANDBOXES, THREADS = 4, 8
COMMAND_SECONDS = 0.3
PATIENCE_SECONDS = 120.0
SETTLE_SECONDS = 240.0  # a run whose web server was killed is closed by a sweep
LOG = "/workspace/log"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load.replica_failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--execs", type=int, default=200, help="default: %(default)s")
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    with tempfile.TemporaryDirectory(prefix="lh-failover-") as directory:
        Path(directory).chmod(0o755)  # PostgreSQL runs as a user of its own
        with run_replicas(Path(directory)) as replicas:
            return run_load(replicas, arguments.execs)


@dataclass
class Replicas:
    """The running processes. `clients` has the ports of the web servers as clients see them: each has another one first."""

    database_url: str
    key: str
    clients: list[int]
    web: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    gateways: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)  # by internal address

    def select(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database_url, connect_timeout=30) as connection:
            return connection.execute(query, parameters).fetchall()

    def kill_gateway_of(self, lease: str) -> str:
        """Kill the gateway that has the agent of a lease's sandbox. Return its internal address."""
        query = "SELECT address FROM sandboxes_agentroute r JOIN sandboxes_sandbox s ON s.id = r.sandbox_id WHERE s.holder = %s"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (address := self.select(query, lease)[0][0]):
            assert time.monotonic() < deadline, "the agent is connected to no gateway"
            time.sleep(0.05)
        _kill(self.gateways.pop(address))
        return str(address)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


@contextmanager
def run_replicas(directory: Path) -> Iterator[Replicas]:
    from tests.commands.manage import build_environment, get_runtime_dir, run_manage
    from tests.emulators.kubernetes.emulator import GATEWAY
    from tests.emulators.registry import serve_kubernetes
    from tests.load.postgres import Postgres
    from tests.support import remote_agent
    from tests.support.cluster import Cluster
    from tests.support.servers.engines import SANDBOX_IMAGE
    from tests.support.servers.ports import find_free_ports
    from tests.support.servers.tls import create_certificates
    from tests.support.waiting import wait_until

    manifests = read_commands()
    files = create_certificates(directory, GATEWAY)
    ports = iter(find_free_ports(8))
    web_ports, gateway_ports, internal_ports = ([next(ports) for _ in range(count)] for count in (2, 3, 3))
    balancers = [remote_agent.Balancer(*ports) for ports in (gateway_ports, web_ports, web_ports[::-1])]
    postgres = Postgres(directory / "postgres")
    with ExitStack() as stack:
        for balancer in balancers:
            stack.callback(balancer.close)
        stack.callback(postgres.stop)
        postgres.create()
        (directory / "emulator").mkdir()
        emulator = stack.enter_context(serve_kubernetes(directory / "emulator"))
        cluster = Cluster(emulator, SimpleNamespace(port=balancers[0].port))  # type: ignore[arg-type]
        settings = {
            "DATABASE_URL": postgres.url, "SANDBOX_PROVIDER": "kubernetes", "KUBECONFIG": str(cluster.kubeconfig),
            "LEASEHOLD_SANDBOX_IMAGE": SANDBOX_IMAGE, "LEASEHOLD_MAX_SANDBOXES": "8", "LEASEHOLD_LOG_LEVEL": "WARNING",
            "LEASEHOLD_KUBERNETES_GATEWAY_ADDRESS": cluster.configuration.gateway_address,
            "LEASEHOLD_GATEWAY_URL": f"https://{GATEWAY}:8443", "LEASEHOLD_GATEWAY_AUTHORITY": str(files.authority),
            "LEASEHOLD_STORAGE_DIR": str(directory / "store"), "LEASEHOLD_EGRESS_SLOTS": "64",
        }  # fmt: skip

        def start(name: str, component: str, **more: str) -> "subprocess.Popen[bytes]":
            """Start a process with a state directory of its own, as in a Pod."""
            home = directory / name
            home.mkdir()
            environment = build_environment(home, **settings, **more)
            environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
            argv = [more.get("PORT", part) if part == "8000" else "127.0.0.1" if part == "0.0.0.0" else part
                    for part in manifests[component]]  # fmt: skip
            with (directory / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
            stack.callback(shutil.rmtree, get_runtime_dir(home), ignore_errors=True)
            stack.callback(process.wait, 10)
            stack.callback(_kill_if_running, process)
            return process

        for arguments in (("migrate", "--verbosity", "0"), ("sync_schedules",)):
            done = run_manage(directory, *arguments, **settings)
            assert done.returncode == 0, done.stderr
        created = run_manage(directory, "create_key", "--operator", "--json", **settings)
        replicas = Replicas(postgres.url, yaml.safe_load(created.stdout)["key"], [each.port for each in balancers[1:]])
        for number, (port, internal) in enumerate(zip(gateway_ports, internal_ports, strict=True)):
            address = f"127.0.0.1:{internal}"
            replicas.gateways[address] = start(
                f"gateway{number}", "gateway",
                LEASEHOLD_GATEWAY_LISTEN=f"127.0.0.1:{port}", LEASEHOLD_GATEWAY_INTERNAL_LISTEN=address,
                LEASEHOLD_GATEWAY_INTERNAL_ADDRESS=address, LEASEHOLD_GATEWAY_CERTIFICATE=str(files.certificate),
                LEASEHOLD_GATEWAY_CERTIFICATE_KEY=str(files.key),
            )  # fmt: skip
        replicas.web = [start(f"web{number}", "web", PORT=str(port)) for number, port in enumerate(web_ports)]
        start("worker", "worker")
        for port in (*web_ports, *gateway_ports):
            wait_until(lambda port=port: remote_agent.is_listening(port), f"port {port} is open", within=PATIENCE_SECONDS)  # type: ignore[misc]
        print("2 web servers, 3 gateways and a worker run", flush=True)
        yield replicas


def _kill_if_running(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        _kill(process)


def read_commands() -> dict[str, list[str]]:
    """Return the command of each Deployment of the base by component."""
    from tests.support.cluster import MANIFESTS

    commands = {}
    for name in ("web", "worker", "gateway"):
        deployment, *_ = yaml.safe_load_all((MANIFESTS.parent / f"{name}.yaml").read_text())
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        commands[name] = [str(part) for part in container["command"]]
    return commands


def run_load(replicas: Replicas, execs: int) -> int:
    from tests.load.client import Answer, AttemptLog, Client

    log = AttemptLog()

    def build_client(number: int) -> Client:
        return Client(replicas.clients[number % 2], replicas.key, log, random.Random(uuid.uuid4().int))

    leases = [acquire(build_client(0), number) for number in range(SANDBOXES)]
    print(f"{SANDBOXES} sandboxes run", flush=True)
    answers: dict[str, Answer] = {}

    def execute(number: int) -> None:
        mark, lease = f"mark-{number}", leases[number % SANDBOXES]
        script = f"echo {mark} >>{LOG}; sleep {COMMAND_SECONDS}; echo {mark}"
        body = {"argv": ["sh", "-c", script], "timeout_seconds": 60}
        answers[mark] = build_client(number).post("exec", f"/leases/{lease}/exec", body)

    with ThreadPoolExecutor(THREADS) as threads:
        futures = [threads.submit(execute, number) for number in range(execs)]
        kill_after(execs // 4, answers, lambda: replicas.kill_gateway_of(leases[0]), "gateway of the first sandbox")
        kill_after(execs // 2, answers, lambda: _kill(replicas.web[0]), "web server of half of the clients")
        kill_after(execs * 5 // 8, answers, lambda: replicas.kill_gateway_of(leases[0]), "next gateway of the first sandbox")
        for future in futures:
            future.result()
    lines = Counter[str]()
    for lease in leases:
        read = build_client(1).post("read", f"/leases/{lease}/exec", {"argv": ["cat", LOG]})
        lines.update(read.body["stdout"].split())
    return report(replicas, answers, lines, Counter(attempt.status for attempt in log.attempts if attempt.kind == "exec"))


def acquire(client: Any, number: int) -> str:
    """Acquire a lease and start its sandbox. The first start waits for the check of the seal."""
    body = {"agent_did": f"did:web:agent{number}.example", "environment_id": "game", "environment_type": "coding"}
    lease = str(client.post("acquire", "/leases", body).body["id"])
    started = client.post("start", f"/leases/{lease}/exec", {"argv": ["true"]})
    assert started.ok, started
    return lease


def kill_after(count: int, answers: dict[str, Any], kill: Callable[[], object], name: str) -> None:
    """Kill when `count` commands have been answered."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(answers) < count:
        assert time.monotonic() < deadline, f"not {count} commands were answered"
        time.sleep(0.02)
    kill()
    print(f"{count} commands answered: {name} killed", flush=True)


def report(replicas: Replicas, answers: dict[str, Any], lines: Counter[str], statuses: Counter[int]) -> int:
    """Compare what clients were told with the files of the sandboxes and with the runs. Return the exit code."""
    told = {mark for mark, answer in answers.items() if answer.ok and answer.body["stdout"] == f"{mark}\n"}
    unknown = {mark for mark, answer in answers.items() if answer.code == "outcome_unknown"}
    deadline = time.monotonic() + SETTLE_SECONDS
    while replicas.select("SELECT 1 FROM sandboxes_run WHERE ended_at IS NULL LIMIT 1") and time.monotonic() < deadline:
        time.sleep(1)
    runs = Counter[str]()
    for outcome, stdout, argv in replicas.select("SELECT outcome, stdout, argv FROM sandboxes_run WHERE kind = 'exec'"):
        mark = argv[-1].split()[1] if argv[0] == "sh" else ""
        runs[mark] += bool(mark) and outcome == "ok" and bytes(stdout).decode() == f"{mark}\n"
    faults = {
        "lost: not executed, or without a run that has the result": [
            mark for mark in answers if lines[mark] < 1 or runs[mark] < 1
        ],
        "doubled: executed or recorded more than once": [mark for mark in answers if lines[mark] > 1 or runs[mark] > 1],
        "answered with neither the result nor 'outcome unknown'": sorted({*answers} - told - unknown),
    }
    print(f"{len(answers)} commands: {len(told)} answered with their result, {len(unknown)} with an unknown outcome")
    print(f"answers by status, 0 for a broken connection: {dict(sorted(statuses.items()))}")
    for name, marks in faults.items():
        print(f"{name}: {len(marks)} {[(mark, str(answers[mark])[:300]) for mark in marks[:3]] if marks else ''}")
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
