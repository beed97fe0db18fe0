"""Metering benchmark: time and peak memory to derive all usage, compared with a plain read of the transitions.

Also the time of a pass over one day of new transitions, and of a pass with nothing new."""

import os
import resource
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.bench.server import configure

TRANSITION_COUNTS = [int(size) for size in os.environ.get("BENCH_TRANSITIONS", "100000,300000,1000000").split(",")]
TRANSITIONS_PER_DAY = int(os.environ.get("BENCH_DAY", "20000"))  # new transitions in the measured pass
TURNS_PER_SANDBOX = 9  # each with a run and two transitions; a sandbox also has four other transitions and two readings
STARTED_AT = datetime(2026, 11, 1, tzinfo=UTC)


def main(name: str, database: str, here: Path) -> None:
    configure(database, here)
    from billing import metering
    from billing.models import UsageRecord
    from sandboxes.models import Pool, Transition

    print(f"\n===== metering, {name} =====")
    print(f"  {'transitions':>12}{'derived in s':>14}{'us each':>10}{'read alone':>12}{'ratio':>8}{'peak MiB':>10}")
    pool = Pool.objects.create(name="bench", provider="memory", capacity=10**9)
    inserted = 0
    for size in TRANSITION_COUNTS:
        inserted += insert_history(pool, size - inserted, now=STARTED_AT)
        metering.reset_usage()
        began = time.perf_counter()
        sum(1 for _ in Transition.objects.order_by("sandbox", "pk").values_list("pk", "to", "holder", "at").iterator())
        read = time.perf_counter() - began
        began = time.perf_counter()
        metering.meter_usage(now=STARTED_AT + timedelta(days=1))
        seconds = time.perf_counter() - began
        assert UsageRecord.objects.exists()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"  {inserted:>12,}{seconds:14.1f}{1e6 * seconds / inserted:10.1f}{read:12.2f}{seconds / read:7.1f}x{peak:10.0f}",
            flush=True,
        )
    for label, count in (("nothing new", 0), (f"{TRANSITIONS_PER_DAY:,} new", TRANSITIONS_PER_DAY)):
        insert_history(pool, count, now=STARTED_AT + timedelta(days=1))
        began = time.perf_counter()
        metering.meter_usage(now=STARTED_AT + timedelta(days=2))
        print(f"  a pass with {label}: {time.perf_counter() - began:.2f} s", flush=True)


def insert_history(pool: object, count: int, *, now: datetime) -> int:
    """Insert destroyed sandboxes with at least `count` transitions. Return the number of transitions."""
    from sandboxes.models import Reading, Run, Sandbox, Transition

    states = ["warming", "warm", *["running", "waiting"] * TURNS_PER_SANDBOX, "destroying", "destroyed"]
    inserted = 0
    while inserted < count:
        sandboxes = [
            Sandbox(
                pool=pool, agent_did=f"did:plc:{number % 100}", environment_id="e", holder=uuid.uuid4(), state="destroyed",
                state_since=now, provider="memory", memory_mib=512, millicpus=1000, pids=64, last_used_at=now, created_at=now,
                destroyed_at=now,
            )
            for number in range(min(500, -(-(count - inserted) // len(states))))
        ]  # fmt: skip
        Sandbox.objects.bulk_create(sandboxes)
        moments = [now + timedelta(minutes=number) for number in range(len(states))]
        Transition.objects.bulk_create(
            [
                Transition(sandbox=sandbox, was=was, to=to, at=at, holder=sandbox.holder, reason="bench")
                for sandbox in sandboxes
                for was, to, at in zip(["", *states], states, moments, strict=False)
            ],
            batch_size=2000,
        )
        Run.objects.bulk_create(
            [
                Run(sandbox=sandbox, holder=sandbox.holder, argv=["true"], started_at=at, deadline_at=at + timedelta(minutes=1))
                for sandbox in sandboxes
                for at in moments[2:-2:2]
            ],
            batch_size=2000,
        )
        Reading.objects.bulk_create(
            Reading(
                sandbox=sandbox, incarnation=1, number=number, holder=sandbox.holder, since=now + timedelta(minutes=9 * number),
                at=now + timedelta(minutes=9 * number + 9), counted=10**6 * number, cpu_micros=10**6, memory_mib=40,
            )
            for sandbox in sandboxes
            for number in (1, 2)
        )  # fmt: skip
        inserted += len(sandboxes) * len(states)
    return inserted


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
