"""Execs in live Docker sandboxes through HTTP, against the raw engine calls: latency, 1 MB of output, concurrent calls."""

import os
import uuid
from collections.abc import Callable
from datetime import timedelta

from django.db import connections
from django.utils import timezone

from leases import api_keys
from sandboxes import providers, suspension
from sandboxes.models import Sandbox
from tests.bench.measure import BenchCase, ConcurrentCase, interleave, list_process_tree, print_report, run_concurrently
from tests.bench.server import ApiClient, call_engine, exec_raw, run_control_plane

EXEC_COUNT = int(os.environ.get("BENCH_EXECS", "100"))
SECONDS_PER_ROUND = float(os.environ.get("BENCH_SECONDS", "2"))
CLIENT_COUNT = 8
DID = "did:web:bench.invalid"
MEGABYTE = ["head", "-c", "1000000", "/dev/zero"]


def main() -> None:
    with run_control_plane() as (up, port):
        key = api_keys.issue_key([DID], now=timezone.now())[1]
        api = ApiClient(port, key)
        leases = [
            str(api.post(f"/environments/exec-{number}/join", {"agent_did": DID, "environment_type": "coding"})["id"])
            for number in range(CLIENT_COUNT)
        ]
        refs = [Sandbox.objects.get(holder=lease).ref for lease in leases]
        bench_latency(api, leases[0], refs[0], up.pid)
        bench_suspended(api, leases[0], refs[0], refs[1])
        connections.close_all()  # the clients are forked from this process
        for title, count in ((f"{CLIENT_COUNT} at once in one sandbox", 1), ("one in each of several sandboxes", CLIENT_COUNT)):
            bench_concurrency(title, port, key, leases[:count], refs[:count])


def bench_latency(api: ApiClient, lease: str, ref: str, up: int) -> None:
    provider, minute = providers.get_provider("docker"), timedelta(minutes=1)
    post, post_megabyte = (api.calls(f"/leases/{lease}/exec", {"argv": argv}) for argv in (["true"], MEGABYTE))

    def exec_by_provider(number: int) -> object:
        return provider.exec(ref, ["true"], env={}, timeout=minute, mark=str(uuid.uuid4()))

    raw = BenchCase("raw: create, start, inspect", lambda number: exec_raw(ref, ["true"]))
    direct = BenchCase("provider.exec", exec_by_provider)
    http = BenchCase("through HTTP", lambda number: post(), lambda: list_process_tree(up))
    interleave([raw, direct, http], rounds=EXEC_COUNT, warmup=10)
    print_report("exec of `true`", [raw, direct, http], raw=raw, aim="0.12x")
    # Without the engine's work between the calls, which leaves cold caches behind.
    alone = BenchCase("through HTTP, alone", lambda number: post(), lambda: list_process_tree(up))
    interleave([alone], rounds=EXEC_COUNT, warmup=10)
    print_report("exec of `true`, against the raw calls above", [alone], raw=raw)
    raw = BenchCase("raw: create, start, inspect", lambda number: exec_raw(ref, MEGABYTE))
    http = BenchCase("through HTTP", lambda number: post_megabyte(), lambda: list_process_tree(up))
    interleave([raw, http], rounds=EXEC_COUNT, warmup=10)
    print_report("exec with 1 MB of output", [raw, http], raw=raw, aim="0.3x")


def bench_suspended(api: ApiClient, lease: str, ref: str, other_ref: str) -> None:
    """Time an exec that resumes its sandbox against one in a warm sandbox. `other_ref` is paused and unpaused by the engine."""
    post = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]})
    Sandbox.objects.filter(ref=ref).update(suspend_after=timedelta(seconds=1))

    def suspend(number: int) -> None:
        assert suspension.suspend(Sandbox.objects.get(ref=ref), now=timezone.now())

    def pause(number: int) -> None:
        call_engine("POST", f"/containers/{other_ref}/pause")

    warm = BenchCase("through HTTP, warm", lambda number: post())
    suspended = BenchCase("through HTTP, suspended", lambda number: post(), before=suspend)
    raw = BenchCase("raw: unpause", lambda number: call_engine("POST", f"/containers/{other_ref}/unpause"), before=pause)
    interleave([warm, suspended, raw], rounds=EXEC_COUNT, warmup=10)
    print_report("exec of `true` in a suspended sandbox, raw: in a warm one", [warm, suspended, raw], raw=warm, aim="8 ms")
    # Without the engine's work between the calls, which leaves cold caches behind.
    warm = BenchCase("through HTTP, warm", lambda number: post())
    suspended = BenchCase("through HTTP, suspended", lambda number: post(), before=suspend)
    interleave([warm, suspended], rounds=EXEC_COUNT, warmup=10)
    print_report("the same, without the engine's calls", [warm, suspended], raw=warm, aim="8 ms")


def bench_concurrency(title: str, port: int, key: str, leases: list[str], refs: list[str]) -> None:
    def make_raw(client: int) -> Callable[[int], object]:
        return lambda number: exec_raw(refs[client % len(refs)], ["true"])

    def make_http(client: int) -> Callable[[int], object]:
        call = ApiClient(port, key).calls(f"/leases/{leases[client % len(leases)]}/exec", {"argv": ["true"]})
        return lambda number: call()

    raw, http = ConcurrentCase("raw: create, start, inspect", make_raw), ConcurrentCase("through HTTP", make_http)
    run_concurrently([raw, http], clients=CLIENT_COUNT, seconds=SECONDS_PER_ROUND)
    print_report(f"exec of `true`, {title}", [raw, http], raw=raw, aim="800%")
