"""Release of a lease on the Docker Engine through HTTP, until the answer and until the container is confirmed gone."""

import os
import time
import uuid

from django.utils import timezone

from leases import api_keys
from sandboxes.models import Sandbox, SandboxState
from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import ApiClient, destroy_raw_container, exec_raw, run_control_plane, start_raw_container

ROUNDS = int(os.environ.get("BENCH_STARTS", "12"))
POLL_SECONDS = 0.002
MAX_SECONDS = 30.0
DID = "did:web:bench.invalid"


def main() -> None:
    """Each round uses a new sandbox that has run `true`, and thus stores the state of an empty workspace at its end."""
    with run_control_plane(with_worker=True) as (_, port):
        api = ApiClient(port, api_keys.issue_key([DID], now=timezone.now())[1])
        run, name = uuid.uuid4().hex[:8], f"lh-bench-{uuid.uuid4().hex[:12]}"
        leases: dict[int, str] = {}

        def start(number: int) -> None:
            request = {"agent_did": DID, "environment_type": "coding"}
            leases[number] = api.post(f"/environments/{run}-{number}/join", request)["id"]
            api.post(f"/leases/{leases[number]}/exec", {"argv": ["true"]})

        def start_raw(number: int) -> None:
            start_raw_container(name, "leasehold-sandbox:latest")
            assert exec_raw(name, ["true"]) == 0

        def release(number: int) -> None:
            api.post(f"/leases/{leases[number]}/release")

        def wait_until_gone(number: int) -> None:
            give_up_at = time.monotonic() + MAX_SECONDS
            while not Sandbox.objects.filter(holder=leases[number], state=SandboxState.DESTROYED).exists():
                assert time.monotonic() < give_up_at
                time.sleep(POLL_SECONDS)

        def release_and_wait(number: int) -> None:
            release(number)
            wait_until_gone(number)

        raw = BenchCase("raw: delete", lambda number: destroy_raw_container(name), before=start_raw)
        gone = BenchCase("release until confirmed gone", release_and_wait, before=start)
        interleave([raw, gone], rounds=ROUNDS, warmup=2)
        print_report("release until the container is confirmed gone", [raw, gone], raw=raw, aim="1.5x")
        answer = BenchCase("answer of release", release, before=start, after=wait_until_gone)
        interleave([answer], rounds=ROUNDS, warmup=2)
        print_report("answer of a release", [answer], raw=answer, aim="10 ms")
