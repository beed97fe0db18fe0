"""Reasons for which sandboxes were stopped, as clients receive them: on the lease, in errors and in events."""

from collections.abc import Callable

import pytest

from leases import leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction, stop_reasons
from sandboxes.errors import SandboxNotReady
from sandboxes.models import Event, TransitionReason
from sandboxes.providers.errors import Rejected
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, run

pytestmark = pytest.mark.django_db


def evict_for(code: TransitionReason, text: str = "") -> Callable[[Lease, MemoryProvider], None]:
    def act(lease: Lease, memory: MemoryProvider) -> None:
        run(lease)
        assert eviction.evict(get_sandbox(lease).pk, now=NOW, code=code, reason=text)
        leasing.end(lease.pk, reason="budget" if code == "budget" else "released", now=NOW)

    return act


def end_as(reason: str) -> Callable[[Lease, MemoryProvider], None]:
    def act(lease: Lease, memory: MemoryProvider) -> None:
        run(lease)
        leasing.end(lease.pk, reason=reason, now=NOW, detail="a note of the operator")

    return act


def discard(lease: Lease, memory: MemoryProvider) -> None:
    run(lease)
    leasing.discard(lease.pk, now=NOW, detail="a note of the operator")


def fail_start(lease: Lease, memory: MemoryProvider) -> None:
    with memory.fail("create", Rejected("no such image: agents:9"), times=1), pytest.raises(SandboxNotReady):
        run(lease)
    leasing.release(lease.pk, now=NOW)


def lose(lease: Lease, memory: MemoryProvider) -> None:
    run(lease)
    memory.vanish(get_sandbox(lease).ref)
    sweeps.reconcile(now=NOW + MINUTE, grace=MINUTE)
    with pytest.raises(LeaseEnded) as refused:
        run(lease, now=NOW + MINUTE)
    assert refused.value.extra["end_reason"] == "lost"


@pytest.mark.parametrize(
    ("act", "reason", "detail"),
    [
        (end_as("released"), "lease_ended", "lease ended: released"),
        (end_as("ttl"), "lease_ended", "lease ended: ttl"),
        (end_as("operator"), "lease_ended", "lease ended: operator"),
        (discard, "discarded", "discarded by an operator"),
        (evict_for(TransitionReason.BUDGET), "budget", "budget spent"),
        (evict_for(TransitionReason.CAPACITY, "place needed by did:plc:bob"), "capacity", "place needed"),
        (evict_for(TransitionReason.IDLE), "idle", "idle"),
        (fail_start, "start_failed", "start failed: no such image: agents:9"),
        (lose, "provider_lost", "lost by the provider"),
    ],
    ids=["released", "ttl", "operator", "discarded", "budget", "capacity", "idle", "image", "lost"],
)
def test_a_client_learns_why_its_sandbox_was_stopped(act, reason: str, detail: str, grant, memory) -> None:
    lease: Lease = grant()
    act(lease, memory)
    stop = stop_reasons.find_last_stop(lease.pk)
    assert stop and (stop.reason, stop.detail) == (reason, detail)
    with pytest.raises(LeaseEnded) as refused:
        run(lease, now=NOW + MINUTE)
    assert (refused.value.extra["sandbox_reason"], refused.value.extra["sandbox_detail"]) == (reason, detail)
    payload = Event.objects.get(kind="lease.ended").payload
    assert (payload["sandbox_reason"], payload["sandbox_detail"]) == (reason, detail)


def test_a_lease_without_a_sandbox_has_no_reason(grant) -> None:
    lease: Lease = grant()
    leasing.release(lease.pk, now=NOW)
    assert stop_reasons.find_last_stop(lease.pk) is None
    payload = Event.objects.get(kind="lease.ended").payload
    assert (payload["sandbox_reason"], payload["sandbox_detail"]) == (None, None)
