"""The phases of a measurement, and its report."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.measure import list_process_tree, read_cpu_seconds
from tests.bench.server import REPO_DIR
from tests.commands.manage import build_environment
from tests.scale.clients import Clients, Lease
from tests.scale.installation import Installation, run_installation
from tests.scale.measurement import Phase, describe_machine, measure, read_memory_mib
from tests.scale.plan import Plan
from tests.support.servers.ports import find_free_ports
from tests.support.waiting import wait_until

REPLICA_SECONDS = 60.0  # for which an additional web process is idle
MINUTES_PER_DAY = 24 * 60
MIN_EXTRAPOLATED_SECONDS = 60
RECLAIM_SECONDS = 900.0  # after the last release
MAX_LISTED_TABLES = 8
REMAINING = "SELECT count(*) FROM sandboxes_sandbox WHERE state NOT IN ('destroyed', 'lost', 'failed')"


def run(plan: Plan, directory: Path) -> int:
    print(f"{plan.hosts} hosts, {plan.sandboxes:,} sandboxes; {describe_machine()}", flush=True)
    began = time.monotonic()
    with run_installation(plan, directory) as installation:
        memory = read_memory_mib(installation.list_host_pids())
        print(
            f"{plan.hosts} hosts ready after {time.monotonic() - began:.0f} s, {memory / plan.hosts:.0f} MiB PSS each",
            flush=True,
        )
        phases = list(_run_phases(plan, installation))
        _report_replica(installation, plan)
        [(lost,)] = installation.select("SELECT count(*) FROM leases_lease WHERE end_reason = 'lost'")
        restarts = installation.count_restarts()
        failures = sum(phase.count_failures() for phase in phases)
    print(f"\n{failures} failed requests, {lost} leases ended as lost, {restarts} restarts of a control plane")
    return 1 if failures or lost or restarts else 0


def _run_phases(plan: Plan, installation: Installation) -> Iterator[Phase]:
    clients = Clients([home.port for home in installation.homes], installation.create_operator_key(), plan.clients)
    leases = [Lease(number, number % plan.hosts) for number in range(plan.sandboxes)]

    def run_phase(name: str, act: Callable[[Phase], object]) -> Phase:
        with measure(name, installation) as phase:
            act(phase)
        _report(phase, plan)
        return phase

    yield run_phase("idle", lambda phase: time.sleep(60 * plan.idle_minutes))
    yield run_phase(
        "claims", lambda phase: clients.for_each(leases, lambda lease: clients.acquire(phase.get_outcomes("acquire"), lease))
    )
    yield run_phase(
        "renewals", lambda phase: clients.for_each(leases, lambda lease: clients.renew(phase.get_outcomes("renew"), lease))
    )
    yield run_phase(
        "renewals, 1000 in one request",
        lambda phase: clients.renew_many(phase.get_outcomes("renew many"), leases, hosts=plan.hosts),
    )
    yield run_phase("starts", lambda phase: _start(plan, clients, leases, phase))
    yield run_phase("life cycles", lambda phase: _run_cycles(plan, clients, leases, phase))
    yield run_phase("idle, with cold sandboxes", lambda phase: time.sleep(60 * plan.idle_minutes))
    yield run_phase("releases", lambda phase: _release(clients, leases, phase, installation))


@contextmanager
def _renew_regularly(plan: Plan, clients: Clients, leases: list[Lease], phase: Phase) -> Iterator[None]:
    """Renew all leases every `renew_every` seconds while the block runs."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(plan.renew_every):
            clients.renew_many(phase.get_outcomes("renew many"), leases, hosts=plan.hosts)

    renewer = threading.Thread(target=renew)
    renewer.start()
    try:
        yield
    finally:
        stop.set()
        renewer.join()


def _start(plan: Plan, clients: Clients, leases: list[Lease], phase: Phase) -> None:
    """Execute the first command of each sandbox to start. Sandboxes that are idle meanwhile go to sleep."""
    with _renew_regularly(plan, clients, leases, phase):
        clients.for_each(leases[: plan.started], lambda lease: clients.execute(phase.get_outcomes("start and exec"), lease))


def _run_cycles(plan: Plan, clients: Clients, leases: list[Lease], phase: Phase) -> None:
    """Execute a command in each started sandbox every `exec_every` seconds."""
    started = leases[: plan.started]
    interval = plan.exec_every / len(started)
    count = int(60 * plan.minutes / interval)
    began = time.monotonic()

    def execute(number: int) -> None:
        time.sleep(max(began + number * interval - time.monotonic(), 0))
        clients.execute(phase.get_outcomes("wake and exec"), started[number % len(started)])

    with _renew_regularly(plan, clients, leases, phase):
        clients.for_each(range(count), execute)  # type: ignore[arg-type]


def _release(clients: Clients, leases: list[Lease], phase: Phase, installation: Installation) -> None:
    """Release all leases and wait until their sandboxes are destroyed."""
    clients.for_each(leases, lambda lease: clients.release(phase.get_outcomes("release"), lease))
    wait_until(
        lambda: installation.select(REMAINING) == [(0,)], "all sandboxes are destroyed", within=RECLAIM_SECONDS, every=2.0
    )


def _report(phase: Phase, plan: Plan) -> None:
    requests = phase.count_requests()
    print(f"\n{phase.name}: {phase.elapsed:.0f} s", flush=True)
    for kind, outcomes in phase.outcomes.items():
        rate = len(outcomes.seconds) / phase.elapsed
        times = ", ".join(f"p{100 * share:.0f} {1e3 * outcomes.get_percentile(share):.0f} ms" for share in (0.5, 0.99))
        print(f"  {kind}: {len(outcomes.seconds):,}, {rate:.1f} a second, {times}")
        for title, counts in (("repeated after", outcomes.refusals), ("failed", outcomes.failures)):
            if counts:
                print(f"    {title} {dict(counts)}")
    parts = {"hosts": phase.cpu_hosts, "PostgreSQL": phase.cpu_database, "clients": phase.cpu_clients}
    if requests:
        print("  CPU a request: " + ", ".join(f"{name} {1e3 * seconds / requests:.2f} ms" for name, seconds in parts.items()))
    print(
        "  CPU: " + ", ".join(f"{name} {100 * seconds / phase.elapsed:.0f} %" for name, seconds in parts.items()) + " of a core"
    )
    daily = f" ({phase.database_bytes * MINUTES_PER_DAY / (phase.elapsed / 60) / 1e9:.2f} GB a day at this rate)"
    print(
        f"  {phase.transactions / phase.elapsed:.0f} transactions a second; at most {phase.max_connections} connections, "
        f"{phase.max_active} active; at most {phase.max_awake} sandboxes awake"
    )
    print(
        f"  database +{phase.database_bytes / 1e6:.1f} MB{daily if phase.elapsed > MIN_EXTRAPOLATED_SECONDS else ''}, "
        f"log {phase.wal_bytes / 1e6:.1f} MB"
    )
    largest = sorted(phase.table_bytes.items(), key=lambda item: -item[1])[:MAX_LISTED_TABLES]
    print("  tables: " + ", ".join(f"{table} {size / 1e6:+.1f} MB" for table, size in largest if size > 0))
    print(f"  sweeps: at most {phase.max_lateness:.0f} s late, {phase.max_late} had missed an interval", flush=True)


def _report_replica(installation: Installation, plan: Plan) -> None:
    """Start one more web process of the first host, and print what it costs."""
    [(before,)] = installation.select("SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL")
    with _run_web_process(installation) as process:
        pids = list_process_tree(process.pid)
        cpu = read_cpu_seconds(pids)
        time.sleep(REPLICA_SECONDS)
        used = read_cpu_seconds(pids) - cpu
        [(after,)] = installation.select("SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL")
        share = 100 * used / REPLICA_SECONDS
        memory, more = read_memory_mib(pids), after - before
        print(f"\none more web process, idle: {memory:.0f} MiB PSS, {share:.1f} % of a core, {more:+d} connections", flush=True)


@contextmanager
def _run_web_process(installation: Installation) -> Iterator["subprocess.Popen[bytes]"]:
    home, [port] = installation.homes[0], find_free_ports()
    argv = [
        sys.executable, "-m", "granian", "controlplane.wsgi:application", "--interface", "wsgi", "--host", "127.0.0.1",
        "--port", str(port), "--http", "1", "--no-ws", "--workers", "1", "--blocking-threads", "8", "--log-level", "error",
    ]  # fmt: skip
    process = subprocess.Popen(
        argv, cwd=REPO_DIR, env=build_environment(home.path, **home.env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        connect = [sys.executable, "-c", f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/livez', timeout=5)"]
        wait_until(
            lambda: subprocess.run(connect, stderr=subprocess.DEVNULL, env=dict(os.environ)).returncode == 0,
            "the web process responds", within=60, every=1.0,
        )  # fmt: skip
        yield process
    finally:
        process.terminate()
        process.wait(60)
