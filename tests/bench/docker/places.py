"""Latency of join and wake on the Docker Engine through HTTP, against the raw engine calls they need.

Reference figures of the prototype, with processes instead of containers: resume from warm 1.7 ms, from cold 32 ms."""

import io
import os
import random
import tarfile
import time
import uuid

from django.conf import settings
from django.utils import timezone

from sandboxes import eviction
from sandboxes.models import Pool, Sandbox, Transition, TransitionReason
from sandboxes.pool import allocation
from sandboxes.providers.docker import parked_networks
from sandboxes.providers.docker.engine import Engine
from tests.bench.docker import leases as bench_leases
from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import ApiClient, call_engine, destroy_raw_container, run_control_plane, start_raw_container
from tests.bench.table import Aim
from tests.support.waiting import wait_until

START_COUNT = int(os.environ.get("BENCH_STARTS", "12"))
WORKSPACE_FILES = 10  # of 1 MB each
WARM_POOL = "warmed"
SETTLE_SECONDS = 1.5
PREPARING_ROUNDS = 6  # of a claim, until each connection has prepared its statements
DID = "did:web:bench.invalid"
FILL_SCRIPT = """
import os, sys
for number in range(int(sys.argv[1])):
    with open(f"/workspace/file-{number}", "wb") as file:
        file.write(os.urandom(10**6))
"""


def main() -> None:
    with run_control_plane() as (up, port):
        bench_creates(port, up.pid)
        bench_claims(port, up.pid)
        bench_wakes(port, up.pid)
    print("\n  prototype, with processes: resume from warm 1.7 ms, from cold 32 ms", flush=True)


def build_raw_start(name: str) -> BenchCase:
    raw = BenchCase("raw: create, start", lambda number: start_raw_container(name, settings.SANDBOX_IMAGE))
    raw.after = lambda number: destroy_raw_container(name)
    return raw


class Joins:
    """Joins of new environments, whose sandboxes are destroyed afterwards. `number` identifies the environment."""

    def __init__(self, port: int, pool: str) -> None:
        self.api, self.pool = ApiClient(port, bench_leases.create_key(DID)), pool
        self.run = uuid.uuid4().hex[:8]
        self.leases: dict[int, str] = {}

    def join(self, number: int) -> None:
        self.leases[number] = bench_leases.join(self.api, f"{self.run}-{number}", DID, pool=self.pool)

    def join_and_exec(self, number: int) -> None:
        self.join(number)
        self.api.post(f"/leases/{self.leases[number]}/exec", {"argv": ["true"]})

    def destroy(self, number: int) -> None:
        """Destroy the sandbox. Its join has claimed a pre-warmed one exactly if the pool is that of the pre-warmed ones."""
        sandbox = Sandbox.objects.get(holder=self.leases[number])
        prewarmed = Transition.objects.filter(sandbox=sandbox, code=TransitionReason.PREWARMED)
        assert prewarmed.exists() == (self.pool == WARM_POOL)
        bench_leases.destroy(self.leases[number])


def bench_creates(port: int, up: int) -> None:
    """Join of an environment without a pre-warmed sandbox, with and without a parked network namespace.

    The server parks the next one a second after each join. That is waited for, and not part of any figure."""
    joins, raw, engine = Joins(port, "default"), build_raw_start(f"lh-bench-{uuid.uuid4().hex[:12]}"), Engine()

    def unpark(number: int) -> None:
        while parked := parked_networks.claim(engine):
            parked_networks.remove(engine, parked)

    def destroy(number: int) -> None:
        joins.destroy(number)
        wait_until(lambda: parked_networks.find_parked(engine, 0), "the server has parked a network namespace")

    unparked = BenchCase("join through HTTP, none parked", joins.join, before=unpark, after=destroy)
    parked = BenchCase(
        "join through HTTP",
        joins.join,
        lambda: bench_leases.list_server_pids(up),
        after=destroy,
        aim=Aim("cold create through join : raw create + start", p50_ratio=0.8),
    )
    interleave([raw, unparked, parked], rounds=START_COUNT, warmup=2)
    print_report("join without a pre-warmed sandbox", [raw, unparked, parked], raw=raw)


def bench_claims(port: int, up: int) -> None:
    """Join of an environment with a pre-warmed sandbox, without and with a first exec."""
    warmed = Pool.objects.create(name=WARM_POOL, provider="docker", warm_target=1)
    joins, raw = Joins(port, WARM_POOL), build_raw_start(f"lh-bench-{uuid.uuid4().hex[:12]}")

    def warm_one(number: int) -> None:
        """Start a sandbox, and let it wait, as pre-warmed ones do, until the engine and its agent have nothing to do."""
        assert allocation.start_warm(warmed, now=timezone.now())
        time.sleep(SETTLE_SECONDS)

    def build_case(name: str, operation: str, limit_ms: float) -> BenchCase:
        call = joins.join_and_exec if "exec" in operation else joins.join
        return BenchCase(
            name,
            call,
            lambda: bench_leases.list_server_pids(up),
            before=warm_one,
            after=joins.destroy,
            aim=Aim(operation, p50_ms=limit_ms),
        )

    claim = build_case("join of a pre-warmed one", "claim of a warm sandbox through HTTP, durable", 6)
    both = build_case("the same, and first exec", "claim of a warm sandbox and first exec", 12)
    interleave([raw, claim, both], rounds=2 * START_COUNT, warmup=PREPARING_ROUNDS)
    print_report("join with a pre-warmed sandbox", [raw, claim, both], raw=raw)


def bench_wakes(port: int, up: int) -> None:
    """Exec of `true` in a cold sandbox: a container is created and its workspace of 10 MB is restored first."""
    api = ApiClient(port, bench_leases.create_key(DID))
    lease = bench_leases.join(api, "wake", DID)
    api.post(f"/leases/{lease}/exec", {"argv": ["python3", "-c", FILL_SCRIPT, str(WORKSPACE_FILES)]})
    post, name = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]}), f"lh-bench-{uuid.uuid4().hex[:12]}"
    sandbox, archive = Sandbox.objects.get(holder=lease), build_archive()

    def put_to_sleep(number: int) -> None:
        assert eviction.evict(sandbox.pk, now=timezone.now(), reason="bench")

    def raw(number: int) -> None:
        start_raw_container(name, settings.SANDBOX_IMAGE)
        call_engine("PUT", f"/containers/{name}/archive?path=/workspace", archive=archive)

    raw_case = BenchCase("raw: create, start, untar", raw, after=lambda number: destroy_raw_container(name))
    wake = BenchCase(
        "exec on cold through HTTP",
        lambda number: post(),
        lambda: bench_leases.list_server_pids(up),
        before=put_to_sleep,
        aim=Aim("wake from cold with a 10 MB workspace : create + start + untar", p50_ratio=1.0),
    )
    interleave([raw_case, wake], rounds=START_COUNT, warmup=2)
    restored = api.post(f"/leases/{lease}/exec", {"argv": ["test", "-s", f"/workspace/file-{WORKSPACE_FILES - 1}"]})
    assert restored["exit_code"] == 0
    print_report("wake from cold", [raw_case, wake], raw=raw_case)


def build_archive() -> bytes:
    """Return an uncompressed tar with the same number of files of the same size as the workspace."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for number in range(WORKSPACE_FILES):
            member = tarfile.TarInfo(f"file-{number}")
            member.size, member.uid, member.gid = 10**6, 10001, 10001
            archive.addfile(member, io.BytesIO(random.randbytes(member.size)))
    return content.getvalue()
