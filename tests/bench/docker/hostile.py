"""A bystander's release alone, beside other releases, and beside sandboxes that resist their end, in turn.

In each sandbox that resists, a process stops the processes that read its files (tests/support/hostile.py). In the others it
sleeps. Each belongs to an agent of its own, or all to one. All are released, then the bystander's lease, whose release is
timed. The destroys of one agent leave room for others; those of eight agents and the bystander's share two cores."""

import os
import time
import uuid

from tests.bench.cases import open_driver
from tests.bench.docker import leases as bench_leases
from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import ApiClient, run_control_plane
from tests.bench.table import Aim
from tests.support.hostile import STOPPER
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("BENCH_STARTS", "5"))
COUNT = int(os.environ.get("BENCH_HOSTILE", "8"))
MAX_SECONDS = 300.0
BYSTANDER = "did:web:bystander.invalid"
OTHERS = [f"did:web:other-{number}.invalid" for number in range(COUNT)]


def main() -> None:
    """Each round uses new sandboxes. The bystander has run a command, so its state is stored at the end."""
    with run_control_plane(with_worker=True) as (_, port):
        key, execute = bench_leases.create_key(BYSTANDER, *OTHERS), open_driver()
        api, run = ApiClient(port, key), uuid.uuid4().hex[:8]
        leases: list[str] = []  # the bystander's, then those of the others
        began: list[float] = []
        ordinary_ends: list[float] = []  # seconds from the first release of the others until all of them are gone
        hostile_ends: list[float] = []

        def start_bystander(number: int) -> None:
            leases[:] = [bench_leases.join(api, f"{run}-{number}", BYSTANDER)]
            api.post(f"/leases/{leases[0]}/exec", {"argv": ["sh", "-c", "echo kept >f"]})

        def release_others(number: int, program: list[str], agents: list[str]) -> None:
            """Start the bystander's sandbox and the others, with this program in each of the others. Release the others."""
            start_bystander(number)
            environments = {f"{run}-{number}-{at}": agent for at, agent in enumerate(agents)}
            leases.extend(bench_leases.join_many(port, key, environments))
            process = {"argv": program, "wait_for": "stopping", "wait_seconds": 30}
            for lease in leases[1:]:
                assert api.post(f"/leases/{lease}/processes", process)["found"]
            began.append(time.perf_counter())
            for lease in leases[1:]:
                api.post(f"/leases/{lease}/release")

        def is_gone(lease: str) -> bool:
            return bench_leases.is_gone(execute, lease)

        def release_bystander(number: int) -> None:
            api.post(f"/leases/{leases[0]}/release")
            wait_until(lambda: is_gone(leases[0]), "the bystander's sandbox is destroyed", within=MAX_SECONDS, every=0.01)

        def wait_for_others(ends: list[float]) -> None:
            wait_until(lambda: all(map(is_gone, leases[1:])), "all sandboxes are destroyed", within=MAX_SECONDS, every=0.05)
            ends.append(time.perf_counter() - began[-1])

        def build_case(name: str, program: list[str], ends: list[float], agents: list[str] = OTHERS) -> BenchCase:
            return BenchCase(
                f"the same, beside {COUNT} that {name}", release_bystander,
                before=lambda number: release_others(number, program, agents), after=lambda number: wait_for_others(ends),
            )  # fmt: skip

        resisting = ["python3", "-c", STOPPER, "0"]
        quiet = BenchCase("release until destroyed, alone", release_bystander, before=start_bystander)
        beside = build_case("do not resist", ["sh", "-c", "echo stopping; exec sleep 999"], ordinary_ends)
        beside_one = build_case("resist, of one agent", resisting, hostile_ends, OTHERS[:1] * COUNT)
        beside_one.aim = Aim(f"release beside {COUNT} of one agent that resist : alone", p50_ratio=2)
        beside_hostile = build_case("resist", resisting, hostile_ends)
        beside_hostile.aim = Aim(f"release beside {COUNT} sandboxes that resist : alone", p50_ratio=2)
        cases = [quiet, beside, beside_one, beside_hostile]
        interleave(cases, rounds=ROUNDS, warmup=1)
        print_report("a bystander's release until its sandbox is destroyed", cases, raw=quiet)
        print(
            f"  all {COUNT} are destroyed after at most {max(ordinary_ends):.1f} s, those that resist {max(hostile_ends):.1f} s"
        )
