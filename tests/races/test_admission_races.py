"""Concurrent requests for the places of a full pool, in real transactions."""

import time
from datetime import timedelta

import pytest
from django.db import connection

from leases import admission, leasing, sweeps
from leases.leasing import LeaseRequest
from leases.models import Lease
from sandboxes.errors import CapacityExhausted
from sandboxes.models import AdmissionRequest, Pool, Quota
from sandboxes.pool import admission_queue
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.billing import start_run
from tests.support.leases import update_pool

pytestmark = pytest.mark.django_db(transaction=True)
SECOND = timedelta(seconds=1)


def build_request(pool: Pool, number: int) -> LeaseRequest:
    """Two agents, one with more requests than the other."""
    return LeaseRequest("did:plc:rare" if number == 3 else "did:plc:many", f"game-{number}", "catan", pool=pool.name)


def test_free_place_goes_to_the_first_of_concurrent_waiting_requests(pool: Pool) -> None:
    update_pool(pool, capacity=1)
    requests = [build_request(pool, number) for number in range(4)]
    for number, request in enumerate(requests):
        admission_queue.enqueue(pool, request.agent_did, request.environment_id, now=NOW + number * SECOND)
    with run_in_threads(4) as together:
        results = together(lambda i: admission.acquire_with_place(requests[i], wait=0 * SECOND, now=NOW + 5 * SECOND))
    refused = [result for result in results if isinstance(result, CapacityExhausted)]
    assert (len(refused), results[0][1], Lease.objects.get().environment_id) == (3, True, "game-0")
    assert Pool.objects.get(pk=pool.pk).used == Quota.objects.get().used == 1
    assert AdmissionRequest.objects.count() == 3


def test_all_waiting_requests_are_served_in_turn_and_hold_no_transaction_while_they_wait(grant, pool: Pool) -> None:
    update_pool(pool, capacity=1)
    busy = grant("did:plc:busy")
    start_run(busy)
    served: list[str] = []

    def pause(seconds: float) -> None:
        assert not connection.in_atomic_block
        if AdmissionRequest.objects.count() + len(served) == 4:
            leasing.release(busy.pk, now=NOW)
            sweeps.reclaim(now=NOW)
        time.sleep(0.01)

    def join(number: int) -> None:
        request = build_request(pool, number)
        lease = admission.acquire_with_place(request, wait=MINUTE, now=NOW + number * SECOND, sleep=pause).lease
        served.append(request.agent_did)
        leasing.release(lease.pk, now=NOW + MINUTE)
        sweeps.reclaim(now=NOW + MINUTE)

    with run_in_threads(4) as together:
        assert together(join) == [None] * 4
    assert served.index("did:plc:rare") < 2
    assert (Pool.objects.get(pk=pool.pk).used, AdmissionRequest.objects.count()) == (0, 0)
