"""A bystander's release beside sandboxes that resist their end, and alone, in turn.

In each sandbox that resists, a process stops the processes that read its files (tests/support/hostile.py). Each belongs to an
agent of its own. All of them are released, and then the bystander's lease, whose release is timed."""

import os
import time
import uuid

from tests.bench.cases import adapt_uuid, open_driver
from tests.bench.docker import leases as bench_leases
from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import ApiClient, run_control_plane
from tests.bench.table import Aim
from tests.support.hostile import STOPPER
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("BENCH_STARTS", "5"))
HOSTILE_COUNT = int(os.environ.get("BENCH_HOSTILE", "8"))
GONE_SQL = "SELECT 1 FROM sandboxes_sandbox WHERE holder = %s AND state = 'destroyed'"
MAX_SECONDS = 300.0
BYSTANDER = "did:web:bystander.invalid"
HOSTILE = [f"did:web:hostile-{number}.invalid" for number in range(HOSTILE_COUNT)]


def main() -> None:
    """Each round uses new sandboxes. The bystander has run a command, so its state is stored at the end."""
    with run_control_plane(with_worker=True) as (_, port):
        key, execute = bench_leases.create_key(BYSTANDER, *HOSTILE), open_driver()
        api, run = ApiClient(port, key), uuid.uuid4().hex[:8]
        leases: dict[str, str] = {}
        began: list[float] = []
        ends: list[float] = []  # seconds from the first release until all sandboxes that resist are gone

        def start_bystander(number: int) -> None:
            leases.clear()
            leases[BYSTANDER] = bench_leases.join(api, f"{run}-{number}", BYSTANDER)
            api.post(f"/leases/{leases[BYSTANDER]}/exec", {"argv": ["sh", "-c", "echo kept >f"]})

        def release_hostile(number: int) -> None:
            start_bystander(number)
            environments = {f"{run}-{number}-{at}": agent for at, agent in enumerate(HOSTILE)}
            leases.update(zip(HOSTILE, bench_leases.join_many(port, key, environments), strict=True))
            process = {"argv": ["python3", "-c", STOPPER, "0"], "wait_for": "stopping", "wait_seconds": 30}
            for agent in HOSTILE:
                assert api.post(f"/leases/{leases[agent]}/processes", process)["found"]
            began.append(time.perf_counter())
            for agent in HOSTILE:
                api.post(f"/leases/{leases[agent]}/release")

        def is_gone(agent: str) -> bool:
            return bool(execute(GONE_SQL, [adapt_uuid(leases[agent])]))

        def release_bystander(number: int) -> None:
            api.post(f"/leases/{leases[BYSTANDER]}/release")
            wait_until(lambda: is_gone(BYSTANDER), "the bystander's sandbox is destroyed", within=MAX_SECONDS, every=0.01)

        def wait_for_all(number: int) -> None:
            wait_until(lambda: all(map(is_gone, HOSTILE)), "all sandboxes are destroyed", within=MAX_SECONDS, every=0.05)
            ends.append(time.perf_counter() - began[-1])

        quiet = BenchCase("release until destroyed, alone", release_bystander, before=start_bystander)
        beside = BenchCase(
            f"the same, beside {HOSTILE_COUNT} that resist", release_bystander, before=release_hostile, after=wait_for_all
        )
        beside.aim = Aim(f"release beside {HOSTILE_COUNT} sandboxes that resist : alone", p50_ratio=2)
        interleave([quiet, beside], rounds=ROUNDS, warmup=1)
        print_report("a bystander's release until its sandbox is destroyed", [quiet, beside], raw=quiet)
        print(f"  all {HOSTILE_COUNT} that resist are destroyed after at most {max(ends):.1f} s")
