"""Latency of wake and join on the Docker Engine through HTTP, against the raw engine calls they need.

Reference figures of the prototype, with processes instead of containers: resume from warm 1.7 ms, from cold 32 ms."""

import os
import uuid

from django.conf import settings
from django.utils import timezone

from leases import api_keys
from sandboxes import destruction, eviction
from sandboxes.models import Pool, Sandbox, TransitionReason
from sandboxes.pool import allocation
from sandboxes.providers.docker import parked_networks
from sandboxes.providers.docker.engine import Engine
from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import ApiClient, destroy_raw_container, exec_raw, run_control_plane, start_raw_container
from tests.support.waiting import wait_until

START_COUNT = int(os.environ.get("BENCH_STARTS", "12"))
DID = "did:web:bench.invalid"


def main() -> None:
    with run_control_plane() as (_, port):
        bench_creates(port)
        bench_wakes(port)
        bench_claims(port)
    print("\n  prototype, with processes: resume from warm 1.7 ms, from cold 32 ms", flush=True)


def create_client(port: int) -> ApiClient:
    return ApiClient(port, api_keys.issue_key([DID], now=timezone.now())[1])


def bench_creates(port: int) -> None:
    """Join that creates a container, with and without a parked network namespace.

    The server parks the next one one second after each join. That is waited for, and not part of any figure."""
    api, run, engine = create_client(port), uuid.uuid4().hex[:8], Engine()
    name = f"lh-bench-{run}"

    def join(number: int) -> None:
        assert api.post(f"/environments/{run}-{number}/join", {"agent_did": DID, "environment_type": "coding"})["is_new"]

    def unpark(number: int) -> None:
        while parked := parked_networks.claim(engine):
            parked_networks.remove(engine, parked)

    def destroy(number: int) -> None:
        sandbox = Sandbox.objects.get(environment_id=f"{run}-{number}")
        assert destruction.schedule_destroy(sandbox.pk, now=timezone.now(), code=TransitionReason.OPERATOR)
        assert destruction.destroy(sandbox.pk, now=timezone.now())
        wait_until(lambda: parked_networks.find_parked(engine, 0), "the server has parked a network namespace")

    raw = BenchCase("raw: create, start", lambda number: start_raw_container(name, settings.SANDBOX_IMAGE))
    raw.after = lambda number: destroy_raw_container(name)
    unparked = BenchCase("join through HTTP, none parked", join, before=unpark, after=destroy)
    parked = BenchCase("join through HTTP, one parked", join, after=destroy)
    interleave([raw, unparked, parked], rounds=START_COUNT, warmup=2)
    print_report("join without a pre-warmed sandbox", [raw, unparked, parked], raw=raw, aim="0.8x")


def bench_wakes(port: int) -> None:
    """Exec of `true` in a cold sandbox: a container is created and its files are restored first."""
    api = create_client(port)
    lease = api.post("/environments/wake/join", {"agent_did": DID, "environment_type": "coding"})["id"]
    post, name = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]}), f"lh-bench-{uuid.uuid4().hex[:12]}"
    sandbox = Sandbox.objects.get(holder=lease)
    post()

    def put_to_sleep(number: int) -> None:
        assert eviction.evict(sandbox.pk, now=timezone.now(), reason="bench")

    def raw(number: int) -> None:
        start_raw_container(name, sandbox.image)
        assert exec_raw(name, ["true"]) == 0

    raw_case = BenchCase("raw: create, start, exec", raw, after=lambda number: destroy_raw_container(name))
    lease_case = BenchCase("exec on cold through HTTP", lambda number: post(), before=put_to_sleep)
    interleave([raw_case, lease_case], rounds=START_COUNT, warmup=3)
    print_report("wake from cold", [raw_case, lease_case], raw=raw_case, aim="1.15x")


def bench_claims(port: int) -> None:
    """Join of an environment with a pre-warmed sandbox."""
    api, run = create_client(port), uuid.uuid4().hex[:8]
    warmed = Pool.objects.create(name="warmed", provider="docker", warm_target=1)
    name = f"lh-bench-{uuid.uuid4().hex[:12]}"

    def join(number: int) -> None:
        request = {"agent_did": DID, "environment_type": "coding", "pool": "warmed"}
        assert api.post(f"/environments/{run}-{number}/join", request)["is_new"]

    def warm_one(number: int) -> None:
        assert allocation.start_warm(warmed, now=timezone.now())

    def destroy(number: int) -> None:
        sandbox = Sandbox.objects.get(pool=warmed, environment_id=f"{run}-{number}")
        assert destruction.schedule_destroy(sandbox.pk, now=timezone.now(), code=TransitionReason.OPERATOR)
        assert destruction.destroy(sandbox.pk, now=timezone.now())

    raw = BenchCase("raw: create, start", lambda number: start_raw_container(name, "leasehold-sandbox:latest"))
    raw.after = lambda number: destroy_raw_container(name)
    lease_case = BenchCase("join of a pre-warmed one through HTTP", join, before=warm_one, after=destroy)
    interleave([raw, lease_case], rounds=START_COUNT, warmup=3)
    print_report("join with a pre-warmed sandbox", [raw, lease_case], raw=raw, aim="0.1x")
