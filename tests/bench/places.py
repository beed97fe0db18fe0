"""What an agent waits for, on the real engine and through HTTP, against the raw engine calls that it cannot do without.

The seed's own figures, with processes instead of containers: resume from warm 1.7 ms, from cold 32 ms."""

import os
import sys
import uuid
from datetime import timedelta
from pathlib import Path

from tests.bench.measure import BenchCase, interleave, list_process_tree, print_report
from tests.bench.server import (
    ApiClient,
    call_engine,
    configure,
    destroy_raw_container,
    exec_raw,
    run_control_plane,
    start_raw_container,
)

EXEC_COUNT = int(os.environ.get("BENCH_EXECS", "100"))
START_COUNT = int(os.environ.get("BENCH_STARTS", "12"))
READING_COUNT = int(os.environ.get("BENCH_READINGS", "20"))
DID = "did:web:bench.invalid"


def main(name: str, database: str, here: Path) -> None:
    # Few threads, since each has a connection of its own, on which every statement is planned once.
    os.environ |= {"LEASEHOLD_WEB_WORKERS": "1", "LEASEHOLD_WEB_THREADS": "2"}
    configure(database, here)
    from sandboxes import providers
    from sandboxes.models import Pool

    if providers.get_default_provider_name() != "docker":
        print("\nexec, wake, claim: no Docker daemon answers; left out")
        return
    with run_control_plane() as (up, port):
        print(f"\n===== sandboxes on the real engine, {name} =====")
        try:
            bench_execs(port, up.pid)
            bench_readings(port)
            bench_wakes(port)
            bench_claims(port)
        finally:
            for pool in Pool.objects.all():
                for found in providers.get_provider("docker").list(str(pool.owner)):
                    providers.get_provider("docker").destroy(found.ref)


def create_client(port: int) -> ApiClient:
    from django.utils import timezone

    from leases import api_keys

    return ApiClient(port, api_keys.issue_key([DID], now=timezone.now())[1])


def bench_execs(port: int, up: int) -> None:
    """exec of `true` in a sandbox that is alive: what the seed calls a resume from warm."""
    from sandboxes import providers
    from sandboxes.models import Sandbox

    api, provider, minute = create_client(port), providers.get_provider("docker"), timedelta(minutes=1)
    lease = api.post("/environments/exec/join", {"agent_did": DID, "environment_type": "coding"})["id"]
    ref = Sandbox.objects.get(holder=lease).ref
    post = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]})
    bare = BenchCase("raw: create, start, inspect", lambda number: exec_raw(ref, ["true"]))
    alone = BenchCase(
        "provider.exec", lambda number: provider.exec(ref, ["true"], env={}, timeout=minute, mark=str(uuid.uuid4()))
    )
    ours = BenchCase("exec on waiting through HTTP", lambda number: post(), lambda: list_process_tree(up))
    interleave([bare, alone, ours], rounds=EXEC_COUNT, warmup=10)
    print_report("exec of `true` in a live sandbox", [bare, alone, ours], raw=bare, aim="1.15x")


def bench_readings(port: int) -> None:
    """What a sandbox has used so far: of the engine, of the kernel where that can be seen from here, and written down."""
    from django.utils import timezone

    from sandboxes import providers
    from sandboxes.models import Sandbox
    from sandboxes.usage import readings as measuring

    api, provider = create_client(port), providers.get_provider("docker")
    lease = api.post("/environments/reading/join", {"agent_did": DID, "environment_type": "coding"})["id"]
    sandbox = Sandbox.objects.get(holder=lease)

    def write(number: int) -> None:
        assert measuring.record_reading(sandbox, provider, now=timezone.now(), min_cpu_micros=0)

    bare = BenchCase(
        "raw: the engine's stats", lambda number: call_engine("GET", f"/containers/{sandbox.ref}/stats?stream=false&one-shot=1")
    )
    alone = BenchCase("provider.stats", lambda number: provider.stats(sandbox.ref))
    ours = BenchCase("a reading, with its row", write)
    interleave([bare, alone, ours], rounds=READING_COUNT)
    print_report("what a sandbox has used", [bare, alone, ours], raw=bare)


def bench_wakes(port: int) -> None:
    """exec of `true` in a sandbox that sleeps: a container is made and gets its files back before."""
    from django.utils import timezone

    from sandboxes import eviction
    from sandboxes.models import Sandbox

    api = create_client(port)
    lease = api.post("/environments/wake/join", {"agent_did": DID, "environment_type": "coding"})["id"]
    post, name = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]}), f"lh-bench-{uuid.uuid4().hex[:12]}"
    sandbox = Sandbox.objects.get(holder=lease)
    post()

    def asleep(number: int) -> None:
        assert eviction.evict(sandbox.pk, now=timezone.now(), reason="bench")

    def raw(number: int) -> None:
        start_raw_container(name, sandbox.image)
        assert exec_raw(name, ["true"]) == 0

    bare = BenchCase("raw: create, start, exec", raw, after=lambda number: destroy_raw_container(name))
    ours = BenchCase("exec on cold through HTTP", lambda number: post(), before=asleep)
    interleave([bare, ours], rounds=START_COUNT, warmup=3)
    print_report("wake from cold", [bare, ours], raw=bare, aim="1.15x")


def bench_claims(port: int) -> None:
    """Joining an environment when a sandbox was warmed up ahead of it."""
    from django.utils import timezone

    from sandboxes import destruction, pool
    from sandboxes.models import Pool, Sandbox, TransitionReason

    api, run = create_client(port), uuid.uuid4().hex[:8]
    warmed = Pool.objects.create(name="warmed", provider="docker", warm_target=1)
    name = f"lh-bench-{uuid.uuid4().hex[:12]}"

    def join(number: int) -> None:
        ask = {"agent_did": DID, "environment_type": "coding", "pool": "warmed"}
        assert api.post(f"/environments/{run}-{number}/join", ask)["is_new"]

    def one_ready(number: int) -> None:
        assert pool.start_warm(warmed, now=timezone.now())

    def gone(number: int) -> None:
        held = Sandbox.objects.get(pool=warmed, environment_id=f"{run}-{number}")
        assert destruction.schedule_destroy(held.pk, now=timezone.now(), code=TransitionReason.OPERATOR)
        assert destruction.destroy(held.pk, now=timezone.now())

    raw = BenchCase("raw: create, start", lambda number: start_raw_container(name, "leasehold-sandbox:latest"))
    raw.after = lambda number: destroy_raw_container(name)
    ours = BenchCase("join of a pre-warmed one through HTTP", join, before=one_ready, after=gone)
    interleave([raw, ours], rounds=START_COUNT, warmup=3)
    print_report("join when one is ready", [raw, ours], raw=raw, aim="0.1x")
    print("\n  the seed, with processes: resume from warm 1.7 ms, from cold 32 ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
