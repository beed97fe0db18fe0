"""Execs in live Docker sandboxes through HTTP, against the raw engine calls: latency, 1 MB of output, concurrency, /data."""

import os
import uuid
from collections.abc import Callable
from datetime import timedelta

from django.db import connections
from django.utils import timezone

from leases import execution
from sandboxes import providers, suspension
from sandboxes.models import Sandbox
from sandboxes.runs.operations import Command
from tests.bench.docker import leases as bench_leases
from tests.bench.measure import BenchCase, ConcurrentCase, Timing, get_own_pids, interleave, print_report, run_concurrently
from tests.bench.server import ApiClient, call_engine, exec_raw, run_control_plane
from tests.bench.table import Aim

EXEC_COUNT = int(os.environ.get("BENCH_EXECS", "60"))
SECONDS_PER_ROUND = float(os.environ.get("BENCH_SECONDS", "1.5"))
CONCURRENT_ROUNDS = 2
CLIENT_COUNT, SANDBOX_COUNT = 8, 32
DATA_FILE_COUNT = 10
DIDS = [f"did:web:bench-{number}.invalid" for number in range(4)]  # one agent has at most 16 open runs
TEXT_SCRIPT = "head -c 750000 /dev/urandom | base64 >/workspace/text"
TEXT_MEGABYTE = ["head", "-c", "1000000", "/workspace/text"]
ZERO_MEGABYTE = ["head", "-c", "1000000", "/dev/zero"]  # JSON escapes a NUL byte with six characters
MINUTE = timedelta(minutes=1)


def main() -> None:
    with run_control_plane() as (up, port):
        key = bench_leases.create_key(*DIDS)
        environments = {f"exec-{number}": DIDS[number % len(DIDS)] for number in range(SANDBOX_COUNT)}
        leases = bench_leases.join_many(port, key, environments)
        refs = bench_leases.find_refs(leases)
        bench_latency(ApiClient(port, key), leases[0], refs[0], up.pid)
        bench_suspended(ApiClient(port, key), leases[0], refs[0], up.pid)
        bench_output(ApiClient(port, key), leases[0], refs[0], up.pid)
        bench_unchanged_data(leases[0])
        connections.close_all()  # the clients are forked from this process
        title = f"exec of `true`, {CLIENT_COUNT} at once on one sandbox"
        bench_concurrency(title, port, key, leases[:1], refs[:1], up.pid, clients=CLIENT_COUNT)
        title = f"exec of `true`, {SANDBOX_COUNT} sandboxes with one each"
        bench_concurrency(title, port, key, leases, refs, up.pid, clients=SANDBOX_COUNT)


def run_raw(ref: str, argv: list[str]) -> None:
    assert exec_raw(ref, argv) == 0


def bench_latency(api: ApiClient, lease: str, ref: str, up: int) -> None:
    provider = providers.get_provider("docker")
    post = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]})

    def exec_by_provider(number: int) -> object:
        return provider.exec(ref, ["true"], env={}, timeout=MINUTE, mark=str(uuid.uuid4()))

    def list_pids() -> set[int]:
        return bench_leases.list_server_pids(up)

    raw = BenchCase("raw: create, start, inspect", lambda number: run_raw(ref, ["true"]))
    direct = BenchCase("provider.exec", exec_by_provider)
    aim = Aim("exec of `true` through HTTP : raw engine exec", p50_ratio=0.12, p95_ratio=0.25)
    http = BenchCase("through HTTP", lambda number: post(), list_pids, aim=aim)
    interleave([raw, direct, http], rounds=EXEC_COUNT, warmup=10)
    print_report("exec of `true`", [raw, direct, http], raw=raw)
    # Without the engine's work between the calls, which leaves cold caches behind.
    alone = BenchCase("through HTTP, alone", lambda number: post(), list_pids)
    interleave([alone], rounds=EXEC_COUNT, warmup=10)
    print_report("exec of `true`, against the raw calls above", [alone], raw=raw)


def bench_suspended(api: ApiClient, lease: str, ref: str, up: int) -> None:
    """Exec of `true` that resumes a suspended sandbox, against one in a warm sandbox and the engine's unpause."""
    post = api.calls(f"/leases/{lease}/exec", {"argv": ["true"]})
    Sandbox.objects.filter(ref=ref).update(suspend_after=timedelta(seconds=1))

    def suspend(number: int) -> None:
        assert suspension.suspend(Sandbox.objects.get(ref=ref), now=timezone.now())

    def pause(number: int) -> None:
        post()  # resumes the sandbox
        call_engine("POST", f"/containers/{ref}/pause")

    def list_pids() -> set[int]:
        return bench_leases.list_server_pids(up)

    raw = BenchCase("raw: unpause", lambda number: call_engine("POST", f"/containers/{ref}/unpause"), before=pause)
    warm = BenchCase("through HTTP, warm", lambda number: post(), list_pids)
    suspended = BenchCase("through HTTP, suspended", lambda number: post(), list_pids, before=suspend)
    suspended.aim = Aim("exec of `true` in a suspended sandbox", p50_ms=8)
    interleave([raw], rounds=EXEC_COUNT // 4, warmup=2)
    interleave([warm, suspended], rounds=EXEC_COUNT, warmup=10)
    print_report("exec of `true` in a suspended sandbox", [raw, warm, suspended], raw=raw)
    Sandbox.objects.filter(ref=ref).update(suspend_after=None)


def bench_output(api: ApiClient, lease: str, ref: str, up: int) -> None:
    api.post(f"/leases/{lease}/exec", {"argv": ["sh", "-c", TEXT_SCRIPT]})
    assert len(api.post(f"/leases/{lease}/exec", {"argv": TEXT_MEGABYTE})["stdout"]) == 10**6
    post_text, post_zeros = (api.calls(f"/leases/{lease}/exec", {"argv": argv}) for argv in (TEXT_MEGABYTE, ZERO_MEGABYTE))
    raw = BenchCase("raw: create, start, inspect", lambda number: run_raw(ref, TEXT_MEGABYTE))
    zeros = BenchCase("NUL bytes through HTTP", lambda number: post_zeros(), lambda: bench_leases.list_server_pids(up))
    text = BenchCase("text through HTTP", lambda number: post_text(), lambda: bench_leases.list_server_pids(up))
    text.aim = Aim("exec with 1 MB of output : raw", p50_ratio=0.3)
    interleave([raw, zeros, text], rounds=EXEC_COUNT, warmup=10)
    print_report("exec with 1 MB of output", [raw, zeros, text], raw=raw)


def bench_unchanged_data(lease: str) -> None:
    """Measure the time that a /data of some files, which the command does not change, adds to an exec. Without HTTP."""
    pk = uuid.UUID(lease)

    def execute(*argv: str, needs_data: bool) -> None:
        command = Command([*argv], MINUTE, run_id=uuid.uuid4(), needs_data=needs_data)
        assert execution.exec_command(pk, command, now=timezone.now(), actor="bench")[1].exit_code == 0

    files = [f"/data/file-{number}" for number in range(DATA_FILE_COUNT)]
    execute("touch", *files, needs_data=True)
    without = BenchCase("exec without /data", lambda number: execute("true", needs_data=False), get_own_pids)
    with_data = BenchCase("exec with /data", lambda number: execute("true", needs_data=True), get_own_pids)
    interleave([without, with_data], rounds=4 * EXEC_COUNT, warmup=10)
    added = Timing("difference of each pair of calls", aim=Aim("`/data` unchanged, added to an exec", p50_ms=0.5))
    added.seconds = [after - before for before, after in zip(without.seconds, with_data.seconds, strict=True)]
    added.cpu = with_data.cpu - without.cpu
    print_report(f"/data of {DATA_FILE_COUNT} files, unchanged by the exec", [without, with_data, added], raw=without)


def bench_concurrency(title: str, port: int, key: str, leases: list[str], refs: list[str], up: int, *, clients: int) -> None:
    def make_raw(client: int) -> Callable[[int], object]:
        return lambda number: run_raw(refs[client % len(refs)], ["true"])

    def make_http(client: int) -> Callable[[int], object]:
        call = ApiClient(port, key).calls(f"/leases/{leases[client % len(leases)]}/exec", {"argv": ["true"]})
        return lambda number: call()

    def list_pids() -> set[int]:
        pids = bench_leases.list_server_pids(up)
        connections.close_all()  # the clients of the next round are forked from this process
        return pids

    raw = ConcurrentCase("raw: create, start, inspect", make_raw)
    http = ConcurrentCase("through HTTP", make_http, list_pids, aim=Aim(title, rate_ratio=8))
    run_concurrently([raw, http], clients=clients, seconds=SECONDS_PER_ROUND, rounds=CONCURRENT_ROUNDS)
    print_report(title, [raw, http], raw=raw)
