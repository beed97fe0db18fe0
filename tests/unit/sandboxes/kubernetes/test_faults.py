"""Kubernetes provider against an API server with faults. The Pods of most tests are never started, which is fast."""

import json
import random
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from sandboxes.hosts.pod_records import PodRows
from sandboxes.models import Pool, Sandbox
from sandboxes.models.names import build_name
from sandboxes.providers.base import GatewayAccess
from sandboxes.providers.errors import CapacityPending, FailureCause, Missing, NoCapacity, Rejected, Unavailable
from sandboxes.providers.kubernetes import api_client, pods, readiness
from sandboxes.providers.kubernetes.errors import build_error
from sandboxes.providers.remote.errors import MAX_RETRY_AFTER_SECONDS
from tests.conftest import NOW
from tests.emulators.base import CUT_AFTER, CUT_BEFORE, FOREIGN_ANSWERS, UNREADABLE_ANSWERS, Fault, distort
from tests.emulators.kubernetes.api.resources import PODS, QUOTAS, SECRETS
from tests.emulators.kubernetes.faults import (
    IMAGE_PULL,
    NO_SCALE_UP,
    NOT_STARTED,
    SCALE_UP,
    STUCK_TERMINATING,
    UNSCHEDULABLE,
    PodFault,
)
from tests.support.cluster import NAMESPACE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.docker
POST_POD = r"^POST /api/v1/namespaces/leasehold-sandboxes/pods$"


@pytest.fixture(autouse=True)
def not_started(cluster, monkeypatch):
    cluster.emulator.cluster_faults.pods.append(PodFault("lhp-", NOT_STARTED, times=100))
    monkeypatch.setattr(readiness, "PENDING_SECONDS", 0.0)
    monkeypatch.setattr(pods, "POLL_SECONDS", (0.02,))


@pytest.fixture
def fail_pods(cluster):
    def fail(outcome):
        cluster.emulator.cluster_faults.pods.insert(0, PodFault("lhp-", outcome, times=100))

    return fail


def find_pod(cluster, spec):
    return cluster.find(PODS, spec.name)


def create_on_node(cluster, provider, spec):
    """Create a Pod, and wait for its node: a Pod without one is removed at once."""
    provider.create(spec)
    wait_until(lambda: find_pod(cluster, spec)["spec"].get("nodeName"), "the Pod has a node")


# --- creation ----------------------------------------------------------------------------------------------------------


def test_create_whose_answer_was_lost_is_settled_by_the_name(cluster, provider, spec):
    cluster.emulator.faults.append(Fault(POST_POD, CUT_AFTER))
    assert provider.create(spec) == spec.name
    assert [found.name for found in provider.list(spec.owner)] == [spec.name]


def test_create_that_never_arrived_is_unavailable_and_can_be_repeated(cluster, provider, spec):
    cluster.emulator.faults.append(Fault(POST_POD, CUT_BEFORE))
    with pytest.raises(Unavailable):
        provider.create(spec)
    assert provider.create(spec) == spec.name


def test_name_of_a_pod_that_is_being_deleted_is_not_taken_over(cluster, provider, spec, fail_pods):
    fail_pods(STUCK_TERMINATING)
    create_on_node(cluster, provider, spec)
    uid = find_pod(cluster, spec)["metadata"]["uid"]
    provider.pods.api.call("DELETE", provider.pods.path("pods", spec.name), pods.build_deletion(uid))
    with pytest.raises(Unavailable, match="still being deleted"):
        provider.create(spec)
    with pytest.raises(Rejected, match="another owner"):
        provider.create(replace(spec, owner="someone-else"))


def test_secret_of_an_earlier_attempt_is_replaced_but_not_that_of_another_owner(cluster, provider, spec):
    def with_token(token, **changes):
        return replace(spec, gateway=GatewayAccess("https://10.96.7.7:8443", token), **changes)

    provider.create(with_token("one"))
    provider.create(with_token("two"))
    content = cluster.find(SECRETS, spec.name)["data"]["gateway.json"]
    with pytest.raises(Rejected, match="another owner"):
        provider.create(with_token("three", owner="someone-else"))
    assert cluster.find(SECRETS, spec.name)["data"]["gateway.json"] == content
    provider.destroy(spec.name)
    assert cluster.find(SECRETS, spec.name) is None


@pytest.mark.parametrize("outcome", [CUT_BEFORE, CUT_AFTER])
def test_secret_goes_with_its_pod_however_the_pod_goes(cluster, provider, spec, outcome):
    """No sweep lists Secrets, so none may be left when the control plane fails or someone else deletes the Pod."""
    joined = replace(spec, gateway=GatewayAccess("https://10.96.7.7:8443", "token"))
    cluster.emulator.faults.append(Fault("^POST .*/secrets$", outcome))
    with pytest.raises(Unavailable):
        provider.create(joined)
    assert [found.name for found in provider.list(spec.owner)] == [spec.name]  # a sweep finds and destroys the Pod
    assert provider.create(joined) == spec.name
    assert cluster.find(SECRETS, spec.name)
    cluster.emulator.disruptions.vanish(NAMESPACE, spec.name)
    assert cluster.find(SECRETS, spec.name) is None


def test_exhausted_quota_is_a_lack_of_capacity_and_not_repeated(cluster, provider, spec):
    quota = cluster.find(QUOTAS, "sandboxes")
    cluster.emulator.store.edit(QUOTAS, NAMESPACE, "sandboxes", lambda item: item["spec"]["hard"].update(pods="0"))
    try:
        with pytest.raises(NoCapacity, match="exceeded quota"):
            provider.create(spec)
    finally:
        hard = quota["spec"]["hard"]
        cluster.emulator.store.edit(QUOTAS, NAMESPACE, "sandboxes", lambda item: item["spec"].update(hard=hard))


def test_too_many_requests_states_when_to_try_again(cluster, provider, spec):
    cluster.emulator.faults.append(Fault(POST_POD, 429))
    with pytest.raises(Unavailable) as raised:
        provider.create(spec)
    assert (raised.value.cause, raised.value.retry_after) == (FailureCause.RATE_LIMITED, 1)


@pytest.mark.parametrize("status", [429, 503])
def test_time_to_retry_after_is_bounded(status):
    error = build_error(status, b"{}", POD_PATH, {"Retry-After": "9" * 30})
    assert error.retry_after == MAX_RETRY_AFTER_SECONDS


def test_missing_permission_is_rejected_and_named(cluster, spec):
    stranger = cluster.emulator.write_kubeconfig("stranger", cluster.emulator.create_token("leasehold", "stranger"))
    provider = cluster.connect(kubeconfig=stranger)
    with pytest.raises(Rejected, match="cannot create resource") as raised:
        provider.create(spec)
    assert raised.value.cause == FailureCause.CREDENTIALS_REFUSED


def test_creates_are_limited_to_ten_a_second():
    slept, clock = [], [0.0]
    bucket = api_client.TokenBucket(10.0, clock=lambda: clock[0], sleep=slept.append)
    for _ in range(12):
        bucket.take()
    assert slept == pytest.approx([0.1, 0.2])
    clock[0] = 1.0
    bucket.take()
    assert len(slept) == 2


# --- absence -----------------------------------------------------------------------------------------------------------


def test_answer_of_another_server_neither_ends_a_sandbox_nor_confirms_its_end(cluster, provider, spec):
    provider.create(spec)
    calls = {
        "inspect": lambda: provider.inspect(spec.name), "list": lambda: provider.list(spec.owner),
        "list all": provider.list_all, "destroy": lambda: provider.destroy(spec.name), "identity": provider.engine_id,
        "stats": lambda: provider.stats(spec.name), "kill": lambda: provider.kill(spec.name, "mark"),
    }  # fmt: skip
    read = []
    for kind, answer in FOREIGN_ANSWERS.items():
        cluster.emulator.foreign_answer = answer
        for verb, call in calls.items():
            try:
                call()
                read.append((kind, verb, "success"))
            except Unavailable:
                continue
            except Exception as error:  # each is a wrong reading, and all are to be reported
                read.append((kind, verb, repr(error)))
    cluster.emulator.foreign_answer = None
    assert read == []
    assert provider.inspect(spec.name).name == spec.name
    provider.destroy(spec.name)
    with pytest.raises(Missing):
        provider.inspect(spec.name)


def test_answer_that_cannot_be_read_is_unavailable_at_every_verb(cluster, provider, spec):
    calls = {
        "create": lambda: provider.create(replace(spec, name=f"lhp-{uuid4().hex[:12]}")),
        "inspect": lambda: provider.inspect(spec.name), "list": lambda: provider.list(spec.owner),
        "list all": provider.list_all, "identity": provider.engine_id, "stats": lambda: provider.stats(spec.name),
        "kill": lambda: provider.kill(spec.name, "mark"), "quotas": provider.read_quotas,
        "resume": lambda: provider.resume(spec.name),
        "problems": provider.find_setup_problems, "find exec": lambda: provider.find_exec(spec.name, "mark"),
        "ready": lambda: provider.wait_ready(spec.name, timeout=timedelta(seconds=0.2)),
        "destroy": lambda: provider.destroy("lhp-absent"),
    }  # fmt: skip
    provider.create(spec)
    generator = random.Random(7)
    answers = [*UNREADABLE_ANSWERS.values(), *[distort(generator)] * 4]
    raised, landed = [], 0
    for verb, call in calls.items():
        cluster.emulator.requests.clear()
        with suppress(Unavailable):
            call()
        for number in range(min(len(cluster.emulator.requests), 4)):
            for each in answers:
                fault = Fault("^(GET|POST|DELETE) /api/v1/(namespaces|apis)", each, skip=number)
                cluster.emulator.faults[:] = [fault]
                try:
                    call()
                except (Unavailable, Rejected, Missing):
                    pass
                except Exception as error:  # all are to be reported
                    raised.append((verb, number, each, repr(error)[:200]))
                landed += fault.times == 0
    cluster.emulator.faults.clear()
    assert raised == []
    assert landed > 200
    assert provider.inspect(spec.name).name == spec.name


def test_create_in_a_namespace_that_does_not_exist_is_rejected(cluster, spec, monkeypatch):
    monkeypatch.setattr(cluster.emulator.authorizer, "is_enforced", False)
    provider = cluster.connect()
    provider.pods.configuration = replace(provider.pods.configuration, namespace="nowhere")
    with pytest.raises(Rejected, match="The namespace nowhere does not exist"):
        provider.create(spec)


POD_PATH = "/api/v1/namespaces/sandboxes/pods/box"


@pytest.mark.parametrize(
    ("path", "changes", "kind"),
    [
        (POD_PATH, {}, Missing),
        (f"{POD_PATH}/exec", {}, Missing),
        (POD_PATH, {"kind": "NotStatus"}, Unavailable),
        (POD_PATH, {"reason": "Gone"}, Unavailable),
        (POD_PATH, {"details": {"kind": "pods", "name": "other"}}, Unavailable),
        (POD_PATH, {"details": {"kind": "namespaces", "name": "sandboxes"}}, Unavailable),
        (POD_PATH, {"details": {}}, Unavailable),  # "the server could not find the requested resource"
        ("/api/v1/namespaces/sandboxes/pods", {"details": {"kind": "namespaces", "name": "sandboxes"}}, Unavailable),
    ],
)
def test_404_is_an_absence_only_by_a_status_about_the_object_of_the_path(path, changes, kind):
    status = {"kind": "Status", "reason": "NotFound", "details": {"kind": "pods", "name": "box"}, "message": "not found"}
    error = build_error(404, json.dumps(status | changes).encode(), path, {})
    assert isinstance(error, kind)


# --- start -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [UNSCHEDULABLE, SCALE_UP])
def test_pod_without_a_node_is_pending_with_the_words_of_the_scheduler(provider, spec, fail_pods, outcome):
    fail_pods(outcome)
    provider.create(spec)
    with pytest.raises(CapacityPending, match="Insufficient memory") as raised:
        provider.wait_ready(spec.name, timeout=timedelta(seconds=20))
    assert raised.value.retry_after
    assert not provider.inspect(spec.name).running


def test_autoscaler_that_adds_no_node_is_a_lack_of_capacity(provider, spec, fail_pods):
    fail_pods(NO_SCALE_UP)
    provider.create(spec)
    with pytest.raises(NoCapacity):
        provider.wait_ready(spec.name, timeout=timedelta(seconds=20))


def test_image_that_cannot_be_fetched_is_named_at_the_timeout(provider, spec, fail_pods):
    fail_pods(IMAGE_PULL)
    provider.create(spec)
    with pytest.raises(Unavailable, match=r"ErrImagePull|ImagePullBackOff"):
        provider.wait_ready(spec.name, timeout=timedelta(seconds=2))


# --- end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disrupt", "cause", "words"),
    [
        (lambda d, name: d.evict_for_pressure(NAMESPACE, name), FailureCause.EVICTED, "low on resource"),
        (lambda d, name: d.evict_for_storage(NAMESPACE, name, "tmp", "1Gi"), FailureCause.EVICTED, 'volume "tmp"'),
        (lambda d, name: d.shut_down_node(NAMESPACE, name), FailureCause.NODE_DRAINED, "node shutdown"),
        (lambda d, name: d.vanish(NAMESPACE, name), FailureCause.REMOVED, "no reason is left"),
    ],
)
def test_end_of_a_pod_is_missing_with_its_reason(cluster, provider, spec, disrupt, cause, words):
    provider.create(spec)
    disrupt(cluster.emulator.disruptions, spec.name)
    with pytest.raises(Missing, match=words) as raised:
        provider.inspect(spec.name)
    assert raised.value.cause == cause
    assert all(found.is_remnant for found in provider.list(spec.owner))
    provider.destroy(spec.name)
    assert provider.list(spec.owner) == []


def test_reason_of_a_preemption_is_remembered_once_the_pod_is_gone(cluster, provider, spec, fail_pods):
    fail_pods(STUCK_TERMINATING)
    create_on_node(cluster, provider, spec)
    cluster.emulator.disruptions.preempt(NAMESPACE, spec.name)
    [leaving] = provider.list(spec.owner)
    assert (leaving.running, leaving.is_remnant) == (False, False)
    assert leaving.ends_at
    assert "preempted" in leaving.end_reason
    cluster.emulator.disruptions.vanish(NAMESPACE, spec.name)
    with pytest.raises(Missing, match="preempted") as raised:
        provider.inspect(spec.name)
    assert raised.value.cause == FailureCause.PREEMPTED


def test_pod_of_another_uid_is_not_the_sandbox_and_is_not_deleted(cluster, provider, spec):
    provider.create(spec)
    other = cluster.emulator.disruptions.replace(NAMESPACE, spec.name)
    with pytest.raises(Missing, match="another Pod has its name") as raised:
        provider.inspect(spec.name)
    assert raised.value.cause == FailureCause.REPLACED
    provider.destroy(spec.name)
    assert find_pod(cluster, spec)["metadata"]["uid"] == other["metadata"]["uid"]


@pytest.mark.django_db
@pytest.mark.parametrize("changes", [{"state": "cold"}, {"state": "destroyed", "destroyed_at": NOW}])
def test_pod_that_has_taken_a_name_is_removed_once_no_row_claims_the_name(cluster, spec, changes):
    pool = Pool.objects.create(name="pods", provider="kubernetes")
    values = {"memory_mib": 128, "millicpus": 1000, "pids": 64, "state_since": NOW, "last_used_at": NOW, "created_at": NOW}
    pk = uuid4()
    row = Sandbox.objects.create(pk=pk, ref=build_name(pk, 1), pool=pool, provider="kubernetes", state="waiting", **values)
    spec = replace(spec, name=row.name)
    provider = cluster.connect(records=PodRows())
    provider.create(spec)
    cluster.emulator.disruptions.replace(NAMESPACE, spec.name)
    provider.destroy(spec.name)
    assert [found.name for found in provider.list(spec.owner)] == [spec.name]
    Sandbox.objects.update(**changes)
    provider.destroy(spec.name)  # by the sweep for orphans
    assert provider.list(spec.owner) == []


def test_pod_that_stays_is_never_removed_by_force_and_is_described(cluster, provider, spec, fail_pods, monkeypatch):
    monkeypatch.setattr(pods, "REMOVAL_TIMEOUT_SECONDS", 0.3)
    fail_pods(STUCK_TERMINATING)
    create_on_node(cluster, provider, spec)
    with pytest.raises(Unavailable, match=r"still being deleted.*node: .*out-of-service"):
        provider.destroy(spec.name)
    assert find_pod(cluster, spec)["metadata"]["deletionGracePeriodSeconds"] == pods.REMOVAL_GRACE_SECONDS > 0
    deletions = [line for line in cluster.emulator.requests if line.startswith("DELETE") and spec.name in line]
    assert len(deletions) == 1


# --- lists -------------------------------------------------------------------------------------------------------------


def test_list_that_expires_between_pages_is_repeated_and_never_partial(cluster, provider, spec, monkeypatch):
    monkeypatch.setattr(api_client, "PAGE_SIZE", 1)
    names = {provider.create(replace(spec, name=f"{spec.name}-{number}")) for number in range(3)}
    cluster.emulator.faults.append(Fault(r"^GET .*/pods\?continue", 410, times=2))
    assert {found.name for found in provider.list(spec.owner)} == names
    cluster.emulator.faults.append(Fault(r"^GET .*/pods\?continue", 410, times=3))
    with pytest.raises(Unavailable, match="changed too often"):
        provider.list(spec.owner)
