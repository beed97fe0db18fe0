"""Latency of an exec through the agent in a sandbox, without HTTP and database.

python -m tests.bench.agent_exec [IMAGE]    IMAGE: run the agent as process 1 of a container (mounted, not rebuilt)"""

import io
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from sandboxes.agent.operations import FileOperation
from tests.support.sandbox_agent import SANDBOX, Gateway, make_run, running_container, start_agent

ROUNDS = 500


def measure(name: str, call: Callable[[], object]) -> None:
    durations = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        durations.append((time.perf_counter() - began) * 1000)
    durations.sort()
    print(f"{name:32} p50 {durations[ROUNDS // 2]:7.2f} ms   p95 {durations[int(ROUNDS * 0.95)]:7.2f} ms", flush=True)


def read_memory(pid: str) -> str:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = {line.split(":")[0]: int(line.split()[1]) for line in file if line.startswith(("Rss", "Pss:"))}
    return f"RSS {fields['Rss'] / 1024:.1f} MiB, PSS {fields['Pss'] / 1024:.1f} MiB"


def measure_agent(gateway: Gateway, pid: str) -> None:
    with gateway.client.open(5) as connection:
        measure("ping on one connection", lambda: connection.request({"verb": "ping"}, timeout=5))
    print(f"idle agent: {read_memory(pid)}")
    client, ids = gateway.client, itertools.count()

    def run(*argv: str, cap: int = 1 << 20) -> None:
        run_id = str(next(ids))
        assert client.run(make_run(run_id, *argv, cap=cap)).exit_code == 0
        client.acknowledge(run_id)

    def operate(*words: str, stdin: bytes = b"") -> None:
        operation = FileOperation(client, words, idle_timeout=20, check=lambda: None)
        assert sum(map(len, operation.run(io.BytesIO(stdin)))) >= 0

    measure("exec true and acknowledge", lambda: run("true"))
    measure("exec with 1 MB of output", lambda: run("head", "-c", "1000000", "/dev/zero"))
    operate("write", "/dev/shm", stdin=b"leasehold-bench/file\0" + bytes(4096))
    print(f"after the first file operation: {read_memory(pid)}")
    measure("read a file of 4 KiB", lambda: operate("read", "/dev/shm", "5000", stdin=b"leasehold-bench/file"))
    measure("write a file of 4 KiB", lambda: operate("write", "/dev/shm", stdin=b"leasehold-bench/file\0" + bytes(4096)))
    measure("list its directory", lambda: operate("look", "/dev/shm", "deep", "1000", stdin=b"leasehold-bench\0"))
    operate("write", "/dev/shm", stdin=b"leasehold-bench/file\0" + bytes(10_000_000))
    measure("read a file of 10 MB", lambda: operate("read", "/dev/shm", str(1 << 30), stdin=b"leasehold-bench/file"))
    operate("clear", "/dev/shm/leasehold-bench")
    began, threads = time.perf_counter(), [threading.Thread(target=lambda: [run("true") for _ in range(100)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"8 at once: {800 / (time.perf_counter() - began):.0f} execs/s; afterwards {read_memory(pid)}")


def run_in_container(gateway: Gateway, image: str) -> None:
    with running_container(gateway, image) as name:
        inspected = subprocess.run(
            ["docker", "inspect", "-f", "{{.State.Pid}}", name], check=True, capture_output=True, text=True
        )
        measure_agent(gateway, inspected.stdout.strip())


def main() -> None:
    gateway = Gateway("" if sys.argv[1:] else SANDBOX)
    if sys.argv[1:]:
        run_in_container(gateway, sys.argv[1])
    else:
        agent = start_agent(gateway.path)
        try:
            measure_agent(gateway, str(agent.pid))
        finally:
            agent.kill()
    gateway.close()


if __name__ == "__main__":
    main()
