"""Measurement of one phase: CPU time by part, size of the database, connections, lateness of the sweeps."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psycopg

from tests.bench.footprint import read_sizes
from tests.bench.measure import read_cpu_seconds
from tests.scale.clients import Outcomes
from tests.scale.installation import Installation

SAMPLE_SECONDS = 5.0
LATENESS = (
    "SELECT coalesce(max(extract(epoch FROM now() - succeeded_at - every)), 0)::float, "
    "count(*) FILTER (WHERE now() - succeeded_at > 2 * every) FROM sandboxes_sweep WHERE succeeded_at IS NOT NULL"
)
CONNECTIONS = "SELECT count(*), count(*) FILTER (WHERE state = 'active') FROM pg_stat_activity WHERE datname IS NOT NULL"
TABLE_SIZES = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables"  # with indexes and TOAST
AWAKE = "SELECT count(*) FROM sandboxes_sandbox WHERE state IN ('warm', 'running', 'waiting')"


@dataclass
class Phase:
    """Result of one phase. Times in seconds."""

    name: str
    outcomes: dict[str, Outcomes] = field(default_factory=dict)
    elapsed: float = 0.0
    cpu_hosts: float = 0.0
    cpu_database: float = 0.0
    cpu_clients: float = 0.0
    transactions: int = 0
    database_bytes: int = 0  # growth
    table_bytes: dict[str, int] = field(default_factory=dict)  # growth, by table
    wal_bytes: int = 0
    max_connections: int = 0
    max_active: int = 0
    max_awake: int = 0
    max_lateness: float = 0.0  # of a sweep, beyond its interval
    max_late: int = 0  # sweeps that had missed a whole interval

    def get_outcomes(self, kind: str) -> Outcomes:
        return self.outcomes.setdefault(kind, Outcomes())

    def count_requests(self) -> int:
        return sum(len(each.seconds) for each in self.outcomes.values())

    def count_failures(self) -> int:
        return sum(sum(each.failures.values()) for each in self.outcomes.values())


@contextmanager
def measure(name: str, installation: Installation) -> Iterator[Phase]:
    """Measure the block as one phase."""
    phase, stop = Phase(name), threading.Event()
    sampler = threading.Thread(target=_sample, args=(phase, installation, stop))
    sizes = dict(installation.select(TABLE_SIZES))
    before, began, own = _read(installation), time.perf_counter(), time.process_time()
    sampler.start()
    try:
        yield phase
    finally:
        stop.set()
        sampler.join()
    phase.elapsed, phase.cpu_clients = time.perf_counter() - began, time.process_time() - own
    after = _read(installation)
    deltas = [new - old for new, old in zip(after, before, strict=True)]
    phase.cpu_hosts, phase.cpu_database = deltas[:2]
    phase.transactions, phase.database_bytes, phase.wal_bytes = map(int, deltas[2:])
    phase.table_bytes = {table: size - sizes.get(table, 0) for table, size in installation.select(TABLE_SIZES)}


def _read(installation: Installation) -> tuple[float, float, int, int, int]:
    [(transactions, size, wal)] = installation.select(
        "SELECT xact_commit, pg_database_size(datname), pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0') "
        "FROM pg_stat_database WHERE datname = current_database()"
    )
    cpu = [read_cpu_seconds(pids) for pids in (installation.list_host_pids(), installation.list_database_pids())]
    return cpu[0], cpu[1], transactions, size, int(wal)


def _sample(phase: Phase, installation: Installation, stop: threading.Event) -> None:
    with psycopg.connect(installation.postgres.url, autocommit=True) as connection:
        while not stop.wait(SAMPLE_SECONDS):
            with suppress(psycopg.Error):
                lateness, late = connection.execute(LATENESS).fetchone() or (0.0, 0)
                connections, active = connection.execute(CONNECTIONS).fetchone() or (0, 0)
                [awake] = connection.execute(AWAKE).fetchone() or (0,)
                phase.max_lateness, phase.max_late = max(phase.max_lateness, lateness), max(phase.max_late, late)
                phase.max_connections, phase.max_active = max(phase.max_connections, connections), max(phase.max_active, active)
                phase.max_awake = max(phase.max_awake, awake)


def read_memory_mib(pids: set[int]) -> float:
    """Return the sum of the PSS of these processes in MiB."""
    return sum(read_sizes(pid)["Pss"] for pid in pids) / 1024


def describe_machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return f"{os.cpu_count()} cores, {memory} GiB, load average {os.getloadavg()[0]:.1f}"
