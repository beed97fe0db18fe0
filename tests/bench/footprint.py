"""Footprint of an idle `manage.py up`: processes, memory, time until it is ready.

Sizes are the sums of /proc/<pid>/smaps_rollup over all processes of the control plane. PSS divides a shared page by the number
of processes that map it; RSS counts the page in each. They are read after REQUEST_COUNT requests and TASK_COUNT tasks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from django.db import connections
from django.utils import timezone

from leases import api_keys
from sandboxes.models import Sweep
from tests.bench.measure import list_process_tree
from tests.bench.server import REPO_DIR, ApiClient
from tests.support.servers.ports import find_free_ports
from tests.support.waiting import wait_until

REQUEST_COUNT = int(os.environ.get("BENCH_CALLS", "200"))
SWEEP_COUNT = 10
START_TIMEOUT_SECONDS = 120.0
DID = "did:web:bench.invalid"
SIZES = ("Pss", "Rss")


def main() -> None:
    for profile in ("standard", "small"):
        measure_profile(profile)


def measure_profile(profile: str) -> None:
    os.environ["LEASEHOLD_PROFILE"] = profile
    with run_whole_control_plane() as (up, port, ready_seconds):
        _send_requests(port)
        passes = Sweep.objects.filter(succeeded_at__gt=timezone.now())
        wait_until(lambda: passes.count() >= SWEEP_COUNT, f"{SWEEP_COUNT} sweeps succeed", within=START_TIMEOUT_SECONDS)
        connections.close_all()
        rows = [(pid, describe_process(pid), read_sizes(pid)) for pid in sorted(list_process_tree(up.pid))]
    print(f"\nProfile {profile}\n{'pid':>8} {'PSS MiB':>8} {'RSS MiB':>8}  process")
    for pid, description, sizes in rows:
        print(f"{pid:>8} {sizes['Pss'] / 1024:>8.1f} {sizes['Rss'] / 1024:>8.1f}  {description}")
    totals = {name: sum(sizes[name] for _, _, sizes in rows) / 1024 for name in SIZES}
    print(
        f"{len(rows)} processes, {totals['Pss']:.0f} MiB PSS, {totals['Rss']:.0f} MiB RSS, ready after {ready_seconds:.1f} s",
        flush=True,
    )


@contextmanager
def run_whole_control_plane() -> Iterator[tuple["subprocess.Popen[str]", int, float]]:
    """Run `manage.py up` as `make run` does. Yield its process, its port, and the seconds until it was ready."""
    [port] = find_free_ports()
    began = time.monotonic()
    up = subprocess.Popen(
        [sys.executable, str(REPO_DIR / "manage.py"), "up", "--initialize", "--port", str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        if not any(line.startswith("up: ready") for line in up.stdout):
            raise SystemExit("The control plane did not start.")
        yield up, port, time.monotonic() - began
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)


def _send_requests(port: int) -> None:
    api = ApiClient(port, api_keys.issue_key([DID], now=timezone.now())[1])
    lease = api.post("/leases", {"agent_did": DID, "environment_type": "catan", "environment_id": "held"})["id"]
    renew = api.calls(f"/leases/{lease}/renew")
    for _ in range(REQUEST_COUNT):
        renew()


def read_sizes(pid: int) -> dict[str, int]:
    """Return PSS and RSS of a process in KiB; zeros if it has ended."""
    sizes = dict.fromkeys(SIZES, 0)
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in sizes:
                sizes[name] = int(value.split()[0])
    return sizes


def describe_process(pid: int) -> str:
    """Return the process's name, and its command line without the interpreter."""
    with suppress(OSError):
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()}: {' '.join(argv[1:]).replace(f'{REPO_DIR}/', '').strip()[:70]}"
    return ""
