"""Watch of Pods: reasons that only a watch sees, and faults of watches, after each of which the Pods are listed again."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from sandboxes.models import Host
from sandboxes.providers.errors import FailureCause, Missing, Rejected
from sandboxes.providers.kubernetes import pods
from sandboxes.providers.kubernetes.pod_watch import PodWatch
from sandboxes.providers.kubernetes.provider import KubernetesProvider
from sandboxes.sweeps import end_watch
from sandboxes.sweeps.heartbeat import record_heartbeats
from tests.conftest import MINUTE
from tests.emulators.base import CUT_BEFORE, Fault
from tests.emulators.kubernetes.api.resources import PODS, ROLES
from tests.emulators.kubernetes.faults import (
    DELAYED,
    EXPIRED,
    NOT_STARTED,
    REORDERED,
    STUCK_TERMINATING,
    TWICE,
    PodFault,
    Reaction,
    WatchFault,
)
from tests.support.cluster import NAMESPACE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.docker
WATCH = r"^GET /api/v1/namespaces/leasehold-sandboxes/pods\?watch$"


@pytest.fixture(autouse=True)
def not_started(cluster, monkeypatch):
    cluster.emulator.cluster_faults.pods.append(PodFault("lhp-", NOT_STARTED, times=100))
    monkeypatch.setattr(pods, "POLL_SECONDS", (0.02,))
    store = cluster.emulator.store
    oldest, newest = store.oldest_version, store.version
    yield
    store.oldest_version = oldest
    store.rewind(min(store.version - newest, 0))  # forwards
    cluster.emulator.cluster_faults.reactions.clear()
    cluster.emulator.cluster_faults.watches.clear()


@pytest.fixture
def watch(provider):
    return PodWatch(provider.pods, sleep=lambda seconds: time.sleep(0.02))


@pytest.fixture
def stuck(cluster, provider, spec):
    """A Pod on a node that stays while it is being deleted."""
    cluster.emulator.cluster_faults.pods.insert(0, PodFault("lhp-", STUCK_TERMINATING, times=100))
    provider.create(spec)
    wait_until(lambda: cluster.find(PODS, spec.name)["spec"].get("nodeName"), "the Pod has a node")
    return spec.name


def after_begin(cluster, action):
    """Act once the API server has accepted the next watch, before its first event is sent."""
    cluster.emulator.cluster_faults.reactions.append(Reaction(WATCH, action))


@pytest.mark.parametrize(
    ("disrupt", "cause"),
    [
        (lambda d, name: d.preempt(NAMESPACE, name), FailureCause.PREEMPTED),
        (lambda d, name: d.drain(NAMESPACE), FailureCause.NODE_DRAINED),
    ],
)
def test_reason_of_a_pod_that_is_deleted_at_once_is_stored(cluster, provider, spec, watch, disrupt, cause):
    provider.create(spec)
    after_begin(cluster, lambda: disrupt(cluster.emulator.disruptions, spec.name))
    hints = watch.iter_ends(timedelta(seconds=20))
    assert next(hints).ref == spec.name
    wait_until(lambda: cluster.find(PODS, spec.name) is None, "the Pod is gone")
    other = KubernetesProvider(provider.configuration, provider.records)  # of a process that has seen nothing
    other.pods._apis = provider.pods._apis
    with pytest.raises(Missing) as raised:
        other.inspect(spec.name)
    assert raised.value.cause == cause
    hints.close()


@pytest.mark.matrix("faults of a watch, which is a hint: the sweeps find each end without it")
@pytest.mark.parametrize("fault", [TWICE, REORDERED, EXPIRED, DELAYED, CUT_BEFORE, "compacted", "restored", ""])
def test_end_is_announced_once_whatever_happens_to_the_watch(cluster, watch, stuck, fault):
    emulator = cluster.emulator
    list(watch.iter_ends(timedelta(seconds=0.2)))  # a resource version from which to continue
    if fault == CUT_BEFORE:
        emulator.faults.append(Fault(WATCH, CUT_BEFORE))
        emulator.disruptions.drain(NAMESPACE)
    elif fault == "compacted":
        emulator.disruptions.drain(NAMESPACE)
        emulator.store.compact()
    elif fault == "restored":
        emulator.store.rewind(20)
        emulator.disruptions.drain(NAMESPACE)
    else:
        if fault:
            emulator.cluster_faults.watches.append(WatchFault("pods", fault, times=2, seconds=0.2))
        after_begin(cluster, lambda: emulator.disruptions.drain(NAMESPACE))
    hints = [hint for _ in range(2) for hint in watch.iter_ends(timedelta(seconds=1.2)) if hint.ref == stuck]
    assert [hint.is_remnant for hint in hints] == [False]
    assert hints[0].ends_at
    assert "drain" in hints[0].end_reason


@pytest.mark.matrix("faults of a watch, which is a hint: the sweeps find each end without it")
def test_pod_of_another_uid_and_a_destroyed_sandbox_leave_no_reason(cluster, provider, spec, watch):
    provider.create(spec)
    list(watch.iter_ends(timedelta(seconds=0.2)))
    cluster.emulator.disruptions.replace(NAMESPACE, spec.name)
    cluster.emulator.disruptions.preempt(NAMESPACE, spec.name)
    assert [hint.is_remnant for hint in watch.iter_ends(timedelta(seconds=0.5))] == [True]  # of the first Pod
    assert provider.records.find_ending(spec.name) is None


@pytest.mark.matrix("faults of a watch, which is a hint: the sweeps find each end without it")
def test_refused_watch_is_an_error_and_not_repeated(cluster, provider, watch):
    rules = cluster.find(ROLES, "leasehold")["rules"]
    kept = [{**rule, "verbs": [verb for verb in rule["verbs"] if verb != "watch"]} for rule in rules]
    cluster.emulator.store.edit(ROLES, NAMESPACE, "leasehold", lambda role: role.update(rules=kept))
    try:
        with pytest.raises(Rejected, match="cannot watch"):
            list(watch.iter_ends(timedelta(seconds=30)))
    finally:
        cluster.emulator.store.edit(ROLES, NAMESPACE, "leasehold", lambda role: role.update(rules=rules))


@pytest.mark.django_db
def test_one_process_watches_and_another_takes_over_after_the_end_of_its_claim(cluster, default_provider, monkeypatch):
    monkeypatch.setattr(end_watch, "WATCH_TIME", timedelta(seconds=0.2))
    now = timezone.now()
    record_heartbeats(now=now)
    [host] = Host.objects.all()
    Host.objects.filter(pk=host.pk).update(watched_until=now + end_watch.CLAIM_TIME)  # by a process that has died
    assert end_watch.watch_ends(now=now).counts == {"watched already": 1}
    assert not [line for line in cluster.emulator.requests if line.endswith("?watch")]
    result = end_watch.watch_ends(now=now + MINUTE)
    assert (result.counts, result.failures) == ({}, [])
    assert [line for line in cluster.emulator.requests if line.endswith("?watch")]
    host.refresh_from_db()
    assert host.watched_until is None
