"""What an agent waits for, on the real engine and through HTTP, against the raw engine calls that it cannot do without.

The seed's own figures, with processes instead of containers: resume from warm 1.7 ms, from cold 32 ms."""

import os
import sys
import uuid
from datetime import timedelta
from pathlib import Path

from tests.bench.measure import Case, interleave, report, tree
from tests.bench.server import Api, configure, control_plane, engine, raw_destroy, raw_exec, raw_start

EXECS = int(os.environ.get("BENCH_EXECS", "100"))
STARTS = int(os.environ.get("BENCH_STARTS", "12"))
READINGS = int(os.environ.get("BENCH_READINGS", "20"))
DID = "did:web:bench.invalid"


def main(name: str, database: str, here: Path) -> None:
    # Few threads, since each has a connection of its own, on which every statement is planned once.
    os.environ |= {"LEASEHOLD_WEB_WORKERS": "1", "LEASEHOLD_WEB_THREADS": "2"}
    configure(database, here)
    from sandboxes import providers
    from sandboxes.models import Pool

    if providers.default_name() != "docker":
        print("\nexec, wake, claim: no Docker daemon answers; left out")
        return
    with control_plane() as (up, port):
        print(f"\n===== sandboxes on the real engine, {name} =====")
        try:
            execs(port, up.pid)
            readings(port)
            wakes(port)
            claims(port)
        finally:
            for pool in Pool.objects.all():
                for found in providers.get("docker").list(str(pool.owner)):
                    providers.get("docker").destroy(found.ref)


def caller(port: int) -> Api:
    from django.utils import timezone

    from leases import api_keys

    return Api(port, api_keys.issue([DID], now=timezone.now())[1])


def execs(port: int, up: int) -> None:
    """exec of `true` in a sandbox that is alive: what the seed calls a resume from warm."""
    from sandboxes import providers
    from sandboxes.models import Sandbox

    api, provider, minute = caller(port), providers.get("docker"), timedelta(minutes=1)
    lease = api.post("/environments/exec/join", {"agent_did": DID, "environment_type": "coding"})["id"]
    ref = Sandbox.objects.get(holder=lease).ref
    post = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]})
    bare = Case("raw: create, start, inspect", lambda number: raw_exec(ref, ["true"]))
    alone = Case("provider.exec", lambda number: provider.exec(ref, ["true"], env={}, timeout=minute, mark=str(uuid.uuid4())))
    ours = Case("exec on waiting through HTTP", lambda number: post(), lambda: tree(up))
    interleave([bare, alone, ours], rounds=EXECS, warmup=10)
    report("exec of `true` in a live sandbox", [bare, alone, ours], raw=bare, aim="1.15x")


def readings(port: int) -> None:
    """What a sandbox has used so far: of the engine, of the kernel where that can be seen from here, and written down."""
    from django.utils import timezone

    from sandboxes import providers
    from sandboxes.models import Sandbox
    from sandboxes.usage import readings as measuring

    api, provider = caller(port), providers.get("docker")
    lease = api.post("/environments/reading/join", {"agent_did": DID, "environment_type": "coding"})["id"]
    sandbox = Sandbox.objects.get(holder=lease)

    def write(number: int) -> None:
        assert measuring.read(sandbox, provider, now=timezone.now(), least=0)

    bare = Case(
        "raw: the engine's stats", lambda number: engine("GET", f"/containers/{sandbox.ref}/stats?stream=false&one-shot=1")
    )
    alone = Case("provider.stats", lambda number: provider.stats(sandbox.ref))
    ours = Case("a reading, with its row", write)
    interleave([bare, alone, ours], rounds=READINGS)
    report("what a sandbox has used", [bare, alone, ours], raw=bare)


def wakes(port: int) -> None:
    """exec of `true` in a sandbox that sleeps: a container is made and gets its files back before."""
    from django.utils import timezone

    from sandboxes import eviction
    from sandboxes.models import Sandbox

    api = caller(port)
    lease = api.post("/environments/wake/join", {"agent_did": DID, "environment_type": "coding"})["id"]
    post, name = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]}), f"lh-bench-{uuid.uuid4().hex[:12]}"
    sandbox = Sandbox.objects.get(holder=lease)
    post()

    def asleep(number: int) -> None:
        assert eviction.sleep(sandbox.pk, now=timezone.now(), reason="bench")

    def raw(number: int) -> None:
        raw_start(name, sandbox.image)
        assert raw_exec(name, ["true"]) == 0

    bare = Case("raw: create, start, exec", raw, after=lambda number: raw_destroy(name))
    ours = Case("exec on cold through HTTP", lambda number: post(), before=asleep)
    interleave([bare, ours], rounds=STARTS, warmup=3)
    report("wake from cold", [bare, ours], raw=bare, aim="1.15x")


def claims(port: int) -> None:
    """Joining an environment when a sandbox was warmed up ahead of it."""
    from django.utils import timezone

    from sandboxes import eviction, pool
    from sandboxes.models import Pool, Sandbox

    api, run = caller(port), uuid.uuid4().hex[:8]
    warmed = Pool.objects.create(name="warmed", provider="docker", warm_target=1)
    name = f"lh-bench-{uuid.uuid4().hex[:12]}"

    def join(number: int) -> None:
        ask = {"agent_did": DID, "environment_type": "coding", "pool": "warmed"}
        assert api.post(f"/environments/{run}-{number}/join", ask)["is_new"]

    def one_ready(number: int) -> None:
        assert pool.warm_up(warmed, now=timezone.now())

    def gone(number: int) -> None:
        held = Sandbox.objects.get(pool=warmed, environment_id=f"{run}-{number}")
        assert eviction.give_up(held.pk, now=timezone.now(), reason="bench")
        assert eviction.destroy(held.pk, now=timezone.now())

    raw = Case("raw: create, start", lambda number: raw_start(name, "leasehold-sandbox:latest"))
    raw.after = lambda number: raw_destroy(name)
    ours = Case("join of a pre-warmed one through HTTP", join, before=one_ready, after=gone)
    interleave([raw, ours], rounds=STARTS, warmup=3)
    report("join when one is ready", [raw, ours], raw=raw, aim="0.1x")
    print("\n  the seed, with processes: resume from warm 1.7 ms, from cold 32 ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
