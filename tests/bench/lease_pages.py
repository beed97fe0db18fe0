"""Page of 200 leases through the API against 400 model instances rendered in Python, the newest page and one far behind.

The table grows between the reports; a page should cost the same in each."""

import base64
import os
import uuid
from datetime import datetime, timedelta
from functools import partial

from django.utils import timezone

from leases import api_keys, leasing
from leases.api.base.renderers import encode_json
from leases.api.leases import serialize_lease
from leases.models import EnvironmentType, Lease
from sandboxes.models import GONE_STATES, Pool, Sandbox
from tests.bench.cases import list_database_pids
from tests.bench.measure import BenchCase, get_own_pids, interleave, list_process_tree, print_report, refresh_statistics
from tests.bench.pool import insert_rows
from tests.bench.server import ApiClient, run_control_plane
from tests.bench.table import Aim

ROW_COUNTS = [int(size) for size in os.environ.get("BENCH_ROWS", "1000,10000,100000").split(",")]
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
PAGE_SIZE = 200
CALLS_PER_ROUND = 10


def main() -> None:
    now = timezone.now()
    pool = Pool.objects.get(name="default")
    key = api_keys.issue_key([], operator=True, now=now)[1]
    insert_rows(pool, "waiting", ROW_COUNTS[0], now=now)
    holders = list(Sandbox.objects.values_list("holder", flat=True))

    def render_instances(number: int) -> None:
        page = list(Lease.objects.order_by("-leased_at", "-pk")[: PAGE_SIZE + 1])[:PAGE_SIZE]
        held = Sandbox.objects.filter(holder__in=[lease.pk for lease in page]).exclude(state__in=GONE_STATES)
        sandboxes = {sandbox.holder: sandbox for sandbox in held}
        encode_json([serialize_lease(leasing.apply_elapsed_clock(lease, now), sandboxes.get(lease.pk)) for lease in page])

    with run_control_plane() as (up, port):

        def list_pids() -> list[int]:
            return [*list_process_tree(up.pid), *list_database_pids()]

        def get_page(api: ApiClient, cursor: str, number: int) -> None:
            page = api.get(f"/leases?limit={PAGE_SIZE}" + (f"&cursor={cursor}" if cursor else "")).read()
            assert page.count(b'"sandbox_id"') == PAGE_SIZE

        for size in ROW_COUNTS:
            insert_leases(pool, holders, size - Lease.objects.count(), now=now)
            refresh_statistics()
            late = Lease.objects.order_by("leased_at")[PAGE_SIZE]
            cursor = base64.urlsafe_b64encode(f"{late.leased_at.isoformat()} {late.pk}".encode()).decode()
            instances = BenchCase("model instances, without HTTP", render_instances, get_own_pids)
            api = ApiClient(port, key)  # the server closes a connection that is idle while the rows are inserted
            newest = BenchCase("newest page", partial(get_page, api, ""), list_pids)
            last = BenchCase("last page", partial(get_page, api, cursor), list_pids)
            for case in (newest, last):
                case.aim = Aim(f"{case.name} of {PAGE_SIZE} leases of {size:,}", p50_ms=4)
            cases = [instances, newest, last]
            interleave(cases, rounds=ROUNDS, block=CALLS_PER_ROUND)
            print_report(f"page of {PAGE_SIZE} leases of {size:,} through HTTP", cases, raw=instances)


def insert_leases(pool: Pool, holders: list[uuid.UUID | None], count: int, *, now: datetime) -> None:
    """Insert leases, each granted a second before the previous one. The first hold a sandbox."""
    environment_type, oldest = EnvironmentType.objects.all()[0], Lease.objects.order_by("leased_at").first()
    leased_at, hour = oldest.leased_at if oldest else now, timedelta(hours=1)
    shared = {
        "environment_type": environment_type, "pool": pool, "last_activity_at": now, "ttl": hour, "expires_at": now + hour,
        "expires_minute": leasing.to_epoch_minute(now + hour), "max_expires_at": now + 24 * hour,
        "sleep_after": timedelta(minutes=5), "expiry_conditions": ["game.finished"],
    }  # fmt: skip
    for first in range(0, count, 5000):
        Lease.objects.bulk_create(
            Lease(
                id=holders.pop() if holders else uuid.uuid4(), agent_did=f"did:plc:a{number % 100}",
                environment_id=uuid.uuid4().hex, leased_at=leased_at - timedelta(seconds=number + 1), **shared,
            )
            for number in range(first, min(first + 5000, count))
        )  # fmt: skip
