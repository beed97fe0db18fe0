"""Release of a lease on the Docker Engine through HTTP, until the answer and until the container is confirmed gone."""

import os
import uuid

from django.conf import settings

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker.provider import DockerProvider
from tests.bench.cases import open_driver
from tests.bench.docker import leases as bench_leases
from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import (
    ApiClient,
    call_engine,
    destroy_raw_container,
    exec_raw,
    run_control_plane,
    start_raw_container,
)
from tests.bench.table import Aim
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("BENCH_STARTS", "12"))
POLL_SECONDS = 0.002
MAX_SECONDS = 30.0
DID = "did:web:bench.invalid"


def main() -> None:
    """Each round uses new sandboxes. One that has run `true` stores the state of an empty workspace at its end."""
    with run_control_plane(with_worker=True) as (up, port):
        api = ApiClient(port, bench_leases.create_key(DID))
        run, name = uuid.uuid4().hex[:8], f"lh-bench-{uuid.uuid4().hex[:12]}"
        leases: dict[int, str] = {}
        execute = open_driver()  # polling by the ORM would take CPU time from the measured processes

        def start_unused(number: int) -> None:
            leases[number] = bench_leases.join(api, f"{run}-{number}", DID)

        def start(number: int) -> None:
            start_unused(number)
            api.post(f"/leases/{leases[number]}/exec", {"argv": ["true"]})

        def start_raw(number: int) -> None:
            start_raw_container(name, settings.SANDBOX_IMAGE)
            assert exec_raw(name, ["true"]) == 0

        def release(number: int) -> None:
            api.post(f"/leases/{leases[number]}/release")

        def wait_until_gone(number: int) -> None:
            wait_until(
                lambda: bench_leases.is_gone(execute, leases[number]), "the sandbox is destroyed", within=MAX_SECONDS,
                every=POLL_SECONDS,
            )  # fmt: skip

        def release_and_wait(number: int) -> None:
            release(number)
            wait_until_gone(number)

        def list_pids() -> set[int]:
            return bench_leases.list_server_pids(up.pid)

        def start_shape(number: int) -> None:
            provider.create(SandboxSpec(shape, owner=shape))

        provider, shape = DockerProvider(), f"{name}-shape"
        raw = BenchCase("raw: delete", lambda number: destroy_raw_container(name), before=start_raw)
        raw_shape = BenchCase("raw: delete of a sandbox's shape", lambda number: delete_shape(shape), before=start_shape)
        gone = BenchCase("release until confirmed gone", release_and_wait, list_pids, before=start)
        gone.aim = Aim("release until confirmed gone : raw delete", p50_ratio=1.5)
        answer = BenchCase("answer of release", release, list_pids, before=start, after=wait_until_gone)
        answer.aim = Aim("answer of a release", p50_ms=10)
        unused = BenchCase("the same, nothing to store", release_and_wait, list_pids, before=start_unused)
        cases = [raw, raw_shape, answer, gone, unused]
        interleave(cases, rounds=ROUNDS, warmup=1)
        print_report("release until the container is confirmed gone", cases, raw=raw)


def delete_shape(name: str) -> None:
    """Delete a container with a sandbox's settings, and its two volumes, with the minimum of engine calls."""
    destroy_raw_container(name)
    for volume in ("workspace", "data"):
        call_engine("DELETE", f"/volumes/{name}-{volume}")
