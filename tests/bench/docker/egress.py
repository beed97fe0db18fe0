"""Benchmark of the egress proxy: latency, CPU and memory per model call, and its share of a sandbox's start.

The same program makes the same calls to the same upstream, alternately: on the host directly, and in a sandbox through the
bridge, nginx and the egress server. The upstream is a server without latency, and LiteLLM if TEST_LITELLM_URL is set. nginx
admits 20 requests per second of one sandbox, so several sandboxes take turns. A call immediately after another waits until the
first is settled; programs that process a response first do not wait."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.utils import timezone

from leases import execution, leasing
from leases.models import EnvironmentType
from sandboxes.egress import slots
from sandboxes.egress.nginx import NginxProxy
from sandboxes.models import LlmCall, Policy, Pool, Run, Sandbox
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker import provider as docker_provider
from sandboxes.providers.docker.engine import Engine
from tests.bench.cases import adapt_datetime, list_database_pids, open_driver
from tests.bench.measure import BenchCase, Timing, interleave, list_process_tree, print_report, read_cpu_seconds
from tests.bench.server import REPO_DIR, call_engine
from tests.support.servers.ports import find_free_ports

CALL_COUNT = int(os.environ.get("BENCH_MODEL_CALLS", "300"))
START_COUNT = int(os.environ.get("BENCH_STARTS", "12"))
SANDBOX_COUNT = int(os.environ.get("BENCH_BOXES", "8"))
DID = "did:web:bench.invalid"
CALLS_PER_BLOCK, CALLS_PER_SECOND = 10, 18  # of one sandbox; nginx admits bursts of 40 and 20 per second
SANDBOX_PROXY_PORT = 4010
CALL_PATTERNS: dict[str, dict[str, Any]] = {
    "kept connection, back to back": {"stream": False, "keep": True},
    "kept connection, 20 ms between calls": {"stream": False, "keep": True, "pause": 0.02},
    "new connection each": {"stream": False, "keep": False},
    "stream, kept connection": {"stream": True, "keep": True},
}
LISTENING_SOCKET_ENTRY = f"{SANDBOX_PROXY_PORT:04X} 00000000:0000 0A"  # entry of a listening socket in /proc/net/tcp
# Reads one job per line from stdin. Prints (seconds to the first byte, total seconds) of each call.
CLIENT_SCRIPT = """
import http.client, json, select, socket, sys, time
idle = {}
for line in sys.stdin:
    job, timings = json.loads(line), []
    request, port = job["request"].encode(), job["port"]
    if port in idle and select.select([idle[port]], [], [], 0)[0]:
        idle.pop(port).close()  # closed by the server meanwhile
    for _ in range(job["calls"]):
        began = time.perf_counter()
        connection = idle.pop(port, None) if job["keep"] else None
        if connection is None:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        response.begin()
        content = response.read(1)
        first = time.perf_counter()
        content += response.read()
        timings.append((first - began, time.perf_counter() - began))
        if response.status != 200:
            raise SystemExit(f"{response.status} {content[:300]!r}")
        if job["keep"] and not response.will_close:
            idle[port] = connection
        else:
            connection.close()
        time.sleep(job["pause"])
    print(json.dumps(timings), flush=True)
"""


def main() -> None:
    with run_bare_upstream() as port:
        bench_calls("upstream without latency", port, "", measure_memory=True)
    if url := os.environ.get("TEST_LITELLM_URL"):
        bench_calls("LiteLLM", int(url.rpartition(":")[2]), os.environ["TEST_LITELLM_KEY"])
    bench_starts()


@contextmanager
def run_bare_upstream() -> Iterator[int]:
    [port] = find_free_ports()
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.upstream", str(port)], cwd=REPO_DIR)
    try:
        time.sleep(1)
        yield port
    finally:
        process.terminate()
        process.wait(20)


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass
class CallRoute(Timing):
    """One route of calls. `parts` are the processes involved, by name. `first` has the seconds to the first byte."""

    ask: Callable[[], list[list[float]]]
    parts: dict[str, Callable[[], set[int]]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    cpu_by_part: Counter[str] = field(default_factory=Counter)

    def block(self) -> None:
        pids = {part: find() for part, find in self.parts.items()}
        before = {part: read_cpu_seconds(found) for part, found in pids.items()}
        for first, whole in self.ask():
            self.first.append(first)
            self.seconds.append(whole)
        self.cpu_by_part.update({part: read_cpu_seconds(found) - before[part] for part, found in pids.items()})
        self.cpu = self.cpu_by_part.total()


class Client:
    """Process that makes calls, on the host or in a sandbox."""

    def __init__(self, *argv: str) -> None:
        argv = (*argv, "-I", "-c", CLIENT_SCRIPT)
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.next_block_at = 0.0

    def ask(self, port: int, key: str, *, stream: bool, keep: bool, pause: float = 0.0) -> list[list[float]]:
        body = json.dumps({"model": "gpt", "stream": stream, "messages": [{"role": "user", "content": "Hello. " * 100}]})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key or 'none'}\r\n"
        request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        assert self.process.stdin and self.process.stdout
        job = {"request": request, "port": port, "keep": keep, "calls": CALLS_PER_BLOCK, "pause": pause}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        timings: list[list[float]] = json.loads(self.process.stdout.readline() or "0") or []
        if len(timings) != CALLS_PER_BLOCK:
            raise SystemExit(f"The client has ended ({self.process.wait(20)}).")
        return timings

    def rest(self) -> None:
        """Wait until nginx's rate limit admits another block."""
        time.sleep(max(0.0, self.next_block_at - time.monotonic()))
        self.next_block_at = time.monotonic() + CALLS_PER_BLOCK / CALLS_PER_SECOND

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(20)


def bench_calls(upstream: str, port: int, key: str, *, measure_memory: bool = False) -> None:
    """Measure each call pattern on all routes, interleaved."""
    with ExitStack() as stack:
        server, nginx = stack.enter_context(run_egress(port, key))
        running = [create_sandbox() for _ in range(SANDBOX_COUNT)]
        here = Client(sys.executable)
        stack.callback(here.close)
        inside = [Client("docker", "exec", "-i", sandbox.ref, "python3") for sandbox in running]
        for client in inside:
            stack.callback(client.close)
        parts: dict[str, Callable[[], set[int]]] = {
            "nginx": lambda: list_process_tree(nginx),
            "egress server": lambda: {server},
            "database": lambda: {*list_database_pids()},
            "bridge": lambda: {find_bridge_pid(sandbox.ref) for sandbox in running},
        }
        for title, kind in CALL_PATTERNS.items():
            turns = cycle(inside)

            def direct(kind: dict[str, Any] = kind) -> list[list[float]]:
                return here.ask(port, key, **kind)

            def through(kind: dict[str, Any] = kind, turns: Any = turns) -> list[list[float]]:
                client = next(turns)
                client.rest()
                timings: list[list[float]] = client.ask(SANDBOX_PROXY_PORT, "", **kind)
                return timings

            routes = [CallRoute("direct, from this host", direct), CallRoute("through the egress proxy", through, parts)]
            if measure_memory:
                routes.append(CallRoute("call row only, by the driver", make_row_writer()))
            for route in routes:
                for _ in range(SANDBOX_COUNT):  # opens the connections of all sandboxes and server threads
                    route.ask()
            for _ in range(max(CALL_COUNT // CALLS_PER_BLOCK, 1)):
                for route in routes:
                    route.block()
            print_report(f"{title}; {upstream}", routes, raw=routes[0], aim="3 ms more at p50")
            first = ", ".join(f"{route.name} {1e3 * statistics.median(route.first):.2f}" for route in routes)
            spent = {part: 1e3 * seconds / len(routes[1].seconds) for part, seconds in routes[1].cpu_by_part.items()}
            print(f"  first byte, p50 ms: {first}")
            print("  CPU ms per call: " + ", ".join(f"{part} {each:.2f}" for part, each in spent.items()), flush=True)
        if measure_memory:
            report_memory(running, nginx, server)


@contextmanager
def run_egress(port: int, key: str) -> Iterator[tuple[int, int]]:
    """Run `manage.py egress`. Yield (its pid, pid of nginx's container)."""
    env = {**os.environ, "LEASEHOLD_LLM_URL": f"http://127.0.0.1:{port}/v1", "LEASEHOLD_LLM_API_KEY": key}
    process = subprocess.Popen([sys.executable, "manage.py", "egress"], cwd=REPO_DIR, env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        if not process.stdout.readline().startswith(b"egress: "):
            raise SystemExit("The egress proxy did not start.")
        yield process.pid, get_init_pid(NginxProxy(Engine()).name)
    finally:
        process.terminate()
        process.wait(60)


def create_sandbox() -> Sandbox:
    """Create a running sandbox whose lease has no effective call limit."""
    pool, _ = Pool.objects.get_or_create(name="bench", defaults={"provider": "docker", "capacity": 1000})
    policy, _ = Policy.objects.get_or_create(name="bench", defaults={"calls_per_minute": 10**6, "models": ["gpt"]})
    EnvironmentType.objects.filter(name="coding").update(policy=policy)
    ask = leasing.LeaseRequest(DID, f"egress-{uuid.uuid4().hex[:8]}", "coding", pool=pool.name)
    sandbox = execution.ensure_sandbox_ready(leasing.acquire(ask, now=timezone.now())[0].pk, now=timezone.now())
    deadline_at = timezone.now() + timedelta(hours=1)
    Run.objects.create(sandbox=sandbox, argv=["bench"], started_at=timezone.now(), deadline_at=deadline_at)
    Sandbox.objects.filter(pk=sandbox.pk).update(open_runs=1, state="running")
    return sandbox


def make_row_writer() -> Callable[[], list[list[float]]]:
    """Return a function that writes only the rows: an insert before a call and an update after it."""
    execute, table = open_driver(), LlmCall._meta.db_table
    row = LlmCall(started_at=timezone.now(), deadline_at=timezone.now(), path="/v1/chat/completions", model="gpt")
    fields = [field for field in LlmCall._meta.concrete_fields if not field.primary_key]
    values = {field.column: field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields}
    insert = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(['%s'] * len(values))})"
    update = f"UPDATE {table} SET ended_at = %s, outcome = 'ok', output_tokens = 7 WHERE call_id = %s"

    def block() -> list[list[float]]:
        timings = []
        for _ in range(CALLS_PER_BLOCK):
            call_id, began = uuid.uuid4().hex, time.perf_counter()
            execute(insert, [*(values | {"call_id": call_id}).values()])
            first = time.perf_counter() - began
            execute(update, [adapt_datetime(timezone.now()), call_id])
            timings.append([first, time.perf_counter() - began])
        return timings

    return block


# --- memory -----------------------------------------------------------------------------------------------------------


def report_memory(running: list[Sandbox], nginx: int, server: int) -> None:
    """Print the proportional memory of the egress proxy after the calls."""
    bridge = statistics.median(read_memory_mb({find_bridge_pid(sandbox.ref)}) for sandbox in running)
    shared = {"nginx": read_memory_mb(list_process_tree(nginx)), "egress server": read_memory_mb({server})}
    print(f"\nmemory, {len(running)} sandboxes and {settings.EGRESS_SLOTS} slots  (MB; aim: 15 per sandbox)")
    print(f"  bridge, per sandbox: {bridge:.1f}; " + ", ".join(f"{name}: {size:.1f}" for name, size in shared.items()))
    each, of_hundred = (bridge + sum(shared.values()) / count for count in (len(running), 100))
    print(f"  per sandbox: {each:.1f} among {len(running)}, {of_hundred:.1f} among 100", flush=True)


def read_memory_mb(pids: set[int]) -> float:
    """Return the total memory (PSS) of these processes, in MB."""
    rollups = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(size) for size in re.findall(r"^Pss: +(\d+) kB", rollups, re.MULTILINE)) / 1024


def read_cgroup_mb(pid: int) -> float:
    """Read the memory charged to a process's cgroup, in MB."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return int(Path(f"/sys/fs/cgroup/memory{path}/memory.usage_in_bytes").read_text()) / (1 << 20)
        if not controllers and (current := Path(f"/sys/fs/cgroup{path}/memory.current")).exists():
            return int(current.read_text()) / (1 << 20)
    raise SystemExit(f"Process {pid} has no memory cgroup.")


@cache
def find_bridge_pid(ref: str) -> int:
    """Return the pid of process 1, which serves the bridge."""
    return get_init_pid(ref)


# --- start ------------------------------------------------------------------------------------------------------------


def bench_starts() -> None:
    """Measure the start of a container until its program runs: with the bridge, and with `sleep`."""
    docker, name = docker_provider.DockerProvider(), f"lh-bench-{uuid.uuid4().hex[:12]}"
    bridge_command, sizes = docker_provider.INIT_COMMAND, defaultdict(list)

    def make_case(title: str, command: tuple[str, ...], slot: int | None, is_ready: Callable[[int], bool]) -> BenchCase:
        def start(number: int) -> None:
            docker_provider.INIT_COMMAND = command
            sockets = None if slot is None else slots.ensure_slot_directory(slot)
            docker.create(SandboxSpec(name, owner="bench", sockets=sockets))
            while not is_ready(get_init_pid(name)):
                time.sleep(0.001)

        def destroy(number: int) -> None:
            sizes[title].append(read_cgroup_mb(get_init_pid(name)))
            docker.destroy(name)

        return BenchCase(title, start, after=destroy)

    def sleeps(pid: int) -> bool:
        return any(read_command_line(each).startswith(b"sleep") for each in list_process_tree(pid))

    def listens(pid: int) -> bool:
        return LISTENING_SOCKET_ENTRY in Path(f"/proc/{pid}/net/tcp").read_text()

    cases = [
        make_case("create, start, `sleep` runs", ("sleep", "infinity"), None, sleeps),
        make_case("create, start, bridge listens", bridge_command, 0, listens),
    ]
    try:
        interleave(cases, rounds=START_COUNT, warmup=1)
    finally:
        docker_provider.INIT_COMMAND = bridge_command
        docker.destroy(name)
    print_report("start of a sandbox", cases, raw=cases[0])
    print("  cgroup MB: " + ", ".join(f"{title} {statistics.median(size):.1f}" for title, size in sizes.items()), flush=True)


def get_init_pid(ref: str) -> int:
    return int(json.loads(call_engine("GET", f"/containers/{ref}/json"))["State"]["Pid"])


def read_command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
