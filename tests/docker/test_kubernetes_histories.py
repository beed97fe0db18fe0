"""Random histories of leases in Pods, with faults of the API server, of Pods, nodes and the gateway, and simulated crashes.

After each history the faults end and the sweeps run. Then no command has run twice, every acknowledged write is there, each row
that has a sandbox has one Pod and one Secret, and the namespace has no other: kubectl is the witness. Once the leases end
the namespace is empty, and no time is metered any more. REMOTE_HISTORIES is the number of seeds; a failure names its seed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest
from django.utils import timezone

from billing import metering
from billing.models import UsageKind, UsageRecord
from leases import execution
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import lifecycle
from sandboxes.errors import CapacityExhausted, CapacityPending, SandboxNotReady, StartsPaused
from sandboxes.models import GONE_STATES, Pool, Run, Sandbox
from sandboxes.pool import allocation, lifetimes
from sandboxes.providers.kubernetes import api_client, pods, readiness
from tests.conftest import SimulatedCrash
from tests.emulators.base import CUT_AFTER, CUT_BEFORE, Fault
from tests.emulators.kubernetes.api.resources import PODS, QUOTAS
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.faults import (
    CONTAINER_CONFIG,
    IMAGE_PULL,
    NO_SCALE_UP,
    NOT_STARTED,
    SCALE_UP,
    STUCK_TERMINATING,
    UNSCHEDULABLE,
    PodFault,
    Reaction,
)
from tests.support.cluster import NAMESPACE
from tests.support.kubernetes import Kubectl
from tests.support.suites.cluster_fixtures import SuiteCluster, memory, pool, suite_cluster  # noqa: F401 - fixtures
from tests.support.suites.cluster_provider import ClusterSuiteProvider
from tests.unit.sandboxes.remote import test_fault_histories as remote_histories

COUNT = int(os.environ.get("REMOTE_HISTORIES", "0"))
SEEDS, STEPS = (range(1, 1 + COUNT), 16) if COUNT else ((2,), 5)  # in CI a short and quick one
POD = r"/pods/leasehold-[^/?]*$"
REQUESTS = (
    "^POST .*/pods$", "^POST .*/secrets$", "^GET .*/pods$", f"^GET .*{POD}", f"^DELETE .*{POD}", "^DELETE .*/secrets/",
    r"^GET .*/pods\?continue", "^GET /api/v1/namespaces/[^/]*$", "^[A-Z]+ /",
)  # fmt: skip
OUTCOMES = (CUT_BEFORE, CUT_AFTER, CUT_AFTER, 410, 429, 500, 503)
POD_FAULTS = (UNSCHEDULABLE, SCALE_UP, NO_SCALE_UP, IMAGE_PULL, CONTAINER_CONFIG, NOT_STARTED, STUCK_TERMINATING)
FAILURES = (*remote_histories.FAILURES, CapacityExhausted, CapacityPending, LeaseEnded, StartsPaused)
START_TIMEOUT, LAST_START_TIMEOUT = timedelta(seconds=12), timedelta(minutes=2)
pytestmark = [
    pytest.mark.docker,
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("a random history of a minute: test_kubernetes_leases.py has one life of a lease"),
]


@dataclass
class History(remote_histories.History):
    """One history in one namespace."""

    provider: ClusterSuiteProvider = field(kw_only=True)
    restart_gateway: Callable[[], None] = field(kw_only=True)
    losses: int = 0  # of Pods with files

    @property
    def emulator(self) -> Any:
        return self.provider.emulator

    # Faults of one step

    def fail(self) -> None:
        self.random.choice((self.fail_requests, self.fail_requests, self.fail_pods, self.fail_quota, self.lose_during_read))()

    def fail_requests(self) -> None:
        """Let some of the next requests fail, or lose their answers."""
        pattern, outcome = self.random.choice(REQUESTS), self.random.choice(OUTCOMES)
        self.emulator.faults.append(Fault(pattern, outcome, self.random.choice([1, 1, 3, 8])))

    def fail_pods(self) -> None:
        """Let the next Pods not start, or not end."""
        self.emulator.cluster_faults.pods.append(PodFault("leasehold-", self.random.choice(POD_FAULTS), 1))

    def fail_quota(self) -> None:
        self.emulator.store.edit(QUOTAS, NAMESPACE, "sandboxes", lambda item: item["spec"]["hard"].update(pods="0"))

    def lose_during_read(self) -> None:
        """Delete a Pod between two reads of the Pod."""

        def vanish() -> None:
            existing = self.emulator.store.list(PODS, NAMESPACE)
            by_agent = sorted(existing, key=lambda pod: pod["metadata"]["annotations"]["leasehold.dev/agent"])
            for pod in by_agent[:1]:  # names are random, agents are not
                self.lose(pod["metadata"]["name"], self.provider.vanish)

        self.emulator.cluster_faults.reactions.append(Reaction(f"^GET .*{POD}", vanish))

    def end_faults(self) -> None:
        """End the faults of a step. Pods without a node stay so in half of the cases, and Pods that do not end sometimes."""
        faults = self.emulator.cluster_faults
        for kept in (self.emulator.faults, faults.pods, faults.reactions):
            kept.clear()
        self.emulator.store.edit(QUOTAS, NAMESPACE, "sandboxes", lambda item: item["spec"]["hard"].update(pods="60"))
        for pod in self.emulator.store.list(PODS, NAMESPACE):
            if self.random.random() < 0.5:
                self.release_pod(pod["metadata"]["name"])

    def release_pod(self, name: str) -> None:
        self.emulator.kubelet.schedule(name)
        self.emulator.kubelet.release(name)

    # Operations

    def lose(self, name: str, disrupt: Callable[[str], object]) -> None:
        """Let a Pod end without the control plane. A lease that loses unsaved files ends."""
        with suppress(ApiError):  # gone meanwhile
            disrupt(name)
            self.losses += 1

    def stop_at_vendor(self, agent: str) -> None:
        """End the Pod of an agent for one of the reasons of a cluster."""
        disruptions = self.emulator.disruptions
        ends: list[Callable[[str], object]] = [
            self.provider.vanish,
            self.provider.stop,
            lambda name: disruptions.evict_for_pressure(NAMESPACE, name),
            lambda name: disruptions.shut_down_node(NAMESPACE, name),
            lambda name: disruptions.preempt(NAMESPACE, name),
            lambda name: disruptions.run_out_of_memory(NAMESPACE, name),
            lambda name: disruptions.replace(NAMESPACE, name),
        ]
        if sandbox := allocation.find_by_holder(self.get_lease(agent).pk):
            self.lose(sandbox.name, self.random.choice(ends))

    def wake(self, agent: str) -> None:
        """Start a sandbox without a command: nothing in it is unsaved."""
        execution.ensure_sandbox_ready(self.get_lease(agent).pk, now=self.now)

    def lose_unused(self, agent: str) -> None:
        """Delete a Pod in which nothing is unsaved: the sandbox is cold then, and its lease goes on."""
        self.sleep(agent)
        self.wake(agent)
        if sandbox := allocation.find_by_holder(self.get_lease(agent).pk):
            self.lose(sandbox.name, self.provider.vanish)

    def drain(self, agent: str) -> None:
        self.emulator.disruptions.drain(NAMESPACE)

    def move_agents(self, agent: str) -> None:
        """Let the gateway end, and the agents connect to another one."""
        self.restart_gateway()

    def sweep(self, agent: str) -> None:
        lifetimes.end_lifetimes(now=self.now)
        super().sweep(agent)

    @contextmanager
    def crashing(self) -> Iterator[None]:
        """Let the process die at random checkpoints."""

        def hook(name: str, subject: Any) -> None:
            if self.random.random() < remote_histories.CRASH_PROBABILITY:
                raise SimulatedCrash

        lifecycle.CHECKPOINT_HOOKS.append(hook)
        try:
            yield
        except FAILURES:
            pass  # the operation failed; what it left is for the sweeps
        finally:
            lifecycle.CHECKPOINT_HOOKS.remove(hook)

    def step(self) -> None:
        operations = [self.append] * 4 + [self.sweep] * 3 + [self.sleep] * 2
        operations += [self.stop_at_vendor, self.lose_unused] * 2
        operations += [self.read, self.wake, self.drain, self.move_agents, self.release]
        with self.crashing():
            operation, agent = self.random.choice(operations), self.random.choice(remote_histories.AGENTS)
            if self.random.random() < remote_histories.FAULT_PROBABILITY:
                self.fail()
            operation(agent)
        self.end_faults()
        self.now += timedelta(minutes=self.random.choice([0, 1, 5, 20]))

    def end(self) -> None:
        """End all faults, and sweep until nothing changes."""
        self.end_faults()
        for _ in range(3):
            for pod in self.emulator.store.list(PODS, NAMESPACE):
                self.release_pod(pod["metadata"]["name"])
            self.now += timedelta(hours=2)
            self.sweep("")


@dataclass
class Witness:
    """kubectl of an administrator, and the rows."""

    kubectl: Kubectl
    pool: Pool

    def list_names(self, kind: str) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.kubectl.read(kind, f"--namespace={NAMESPACE}")["items"])

    def assert_agreement(self) -> None:
        """Check that Pods and Secrets are those of the rows, and that no start, run or capacity is left over."""
        rows = Sandbox.objects.filter(pool=self.pool)
        existing = sorted(sandbox.name for sandbox in rows.exclude(state__in=(*GONE_STATES, "cold")))
        assert self.list_names("pods") == self.list_names("secrets") == existing
        assert not Run.objects.filter(ended_at__isnull=True).exists()
        assert Pool.objects.get(pk=self.pool.pk).used == rows.exclude(state="destroyed").count()


def measure(now: datetime) -> dict[int, datetime]:
    """Return the ends of all metered time."""
    metering.meter_usage(now=now)
    return dict(UsageRecord.objects.filter(item=UsageKind.TIME).values_list("pk", "ended_at"))


@pytest.fixture
def kubectl(suite_cluster: SuiteCluster) -> Kubectl:  # noqa: F811
    return Kubectl(suite_cluster.cluster.emulator.kubeconfig)


@pytest.mark.parametrize("seed", SEEDS)
def test_history_with_faults_and_crashes_keeps_the_promises(
    seed: int, memory: Any, pool: Pool, grant: Callable[..., Lease], kubectl: Kubectl, suite_cluster: SuiteCluster,  # noqa: F811
    settings: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    settings.SANDBOX_START_TIMEOUT = START_TIMEOUT  # also the wait for a start whose process has died
    monkeypatch.setattr(pods, "REMOVAL_TIMEOUT_SECONDS", 4.0)
    monkeypatch.setattr(readiness, "PENDING_SECONDS", 0.5)
    monkeypatch.setattr(api_client, "PAGE_SIZE", 1)
    history = History(
        None, "kubernetes", Random(seed), grant, timezone.now(),  # type: ignore[arg-type]
        provider=memory, restart_gateway=suite_cluster.restart_gateway,
    )  # fmt: skip
    for _ in range(STEPS):
        history.step()
    settings.SANDBOX_START_TIMEOUT = LAST_START_TIMEOUT
    history.end()
    for agent in remote_histories.AGENTS:
        with suppress(LeaseEnded, SandboxNotReady):  # an empty list is not believed: the first use may find that a Pod is gone
            history.append(agent)
        history.append(agent)
        assert history.read(agent)
    witness = Witness(kubectl, pool)
    witness.assert_agreement()
    reasons = [*Lease.objects.values_list("end_reason", flat=True)]
    assert {*reasons} <= {"", "released", "lost"}
    assert reasons.count("lost") <= history.losses

    for agent in remote_histories.AGENTS:
        history.release(agent)
    history.end()
    assert not Sandbox.objects.exclude(state="destroyed").exists()
    witness.assert_agreement()
    metered = measure(history.now)
    assert measure(history.now + timedelta(days=1)) == metered != {}
