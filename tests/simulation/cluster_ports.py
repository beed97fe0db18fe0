"""Provider of one host that is KubernetesProvider on the emulator of a cluster, in place of the memory provider.

Each host has a cluster and a gateway of its own. The faults of the simulation become faults of the API server, as at vendors,
and of the control plane's connections to the gateway, which are cut before or after a request to the agent is carried out. Some
Pods have no node for a while, and Pods that are lost are deleted or evicted. After a history kubectl shows leaks. The
gateway has its records in memory: the database of a history is that of the history's threads alone."""

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from django.conf import settings

from sandboxes.agent.runs import AgentClient
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.engine_reports import SealReport
from tests.conftest import DOCKER_IMAGE
from tests.emulators.base import CUT_AFTER, Fault
from tests.emulators.kubernetes.emulator import GATEWAY
from tests.emulators.kubernetes.faults import UNSCHEDULABLE, PodFault
from tests.emulators.registry import serve_kubernetes
from tests.simulation.vendor_ports import SimulatedVendor, VendorSandbox, run_aside
from tests.support.cluster import NAMESPACE, Cluster, GatewayRecords, JoinGateway, running_gateway
from tests.support.kubernetes import Kubectl
from tests.support.suites.cluster_provider import (
    ClusterSuiteProvider,
    PodPrograms,
    connect,
    find_pod,
    find_sandbox,
    open_volumes,
    remove_pods,
)
from tests.support.suites.programs import ProgramServer
from tests.support.suites.provider import find_subject

if TYPE_CHECKING:
    from tests.simulation.world import Host, World

CHUNK_BYTES = 1 << 16
PENDING_SHARE = 0.1  # of the Pods have no node at first
PENDING_SECONDS = (2.0, 60.0, 400.0, 2000.0)
CLUSTERS = ExitStack()  # of all hosts; closed before the end of the interpreter, in which no thread can be started


class GatewayProxy:
    """Unix socket in front of a gateway. While `cuts` is positive, each exchange ends its connection, and is counted.

    With `is_carried_out` the gateway gets the request before the connection ends."""

    def __init__(self, upstream: Path) -> None:
        self.path, self._upstream = upstream.with_name("proxy.sock"), upstream
        self.cuts, self.is_carried_out = 0, False
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _take_cut(self, *, after: bool) -> bool:
        with self._lock:
            if self.cuts <= 0 or self.is_carried_out != after:
                return False
            self.cuts -= 1
            return True

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(str(self._upstream))
            back = threading.Thread(target=self._copy, args=(server, client), kwargs={"after": True}, daemon=True)
            back.start()
            self._copy(client, server, after=False)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, *, after: bool) -> None:
        with suppress(OSError):
            while (content := source.recv(CHUNK_BYTES)) and not self._take_cut(after=after):
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class ProxiedRecords(GatewayRecords):
    """Records of a provider whose connections to the gateway go through a proxy."""

    def __init__(self, gateway: JoinGateway, proxy: GatewayProxy) -> None:
        super().__init__(gateway)
        self._proxy = proxy

    def find_agent(self, ref: str) -> AgentClient | None:
        return AgentClient(self._proxy.path, ref)


@dataclass(frozen=True)
class HostCluster:
    """Cluster of one host, with its gateway."""

    cluster: Cluster
    gateway: JoinGateway
    proxy: GatewayProxy
    programs: PodPrograms


@cache
def start_cluster(number: int) -> HostCluster:
    """Start the cluster of one host, which serves all histories of this process."""
    stack = CLUSTERS
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-cluster-"))
    gateway = stack.enter_context(running_gateway())
    proxy = GatewayProxy(gateway.client_path)
    stack.callback(proxy.close)
    emulator = stack.enter_context(serve_kubernetes(Path(directory)))
    programs = PodPrograms(emulator)
    stack.callback(programs.close)
    return HostCluster(Cluster(emulator, gateway), gateway, proxy, programs)


def connect_cluster(world: "World", host: "Host", number: int) -> "SimulatedCluster":
    """Return the provider of a host, whose cluster has no Pods."""
    started = start_cluster(number)
    settings.__dict__.update({"SANDBOX_IMAGE": DOCKER_IMAGE, "GATEWAY_URL": f"https://{GATEWAY}:8443"})
    configuration, records = started.cluster.configuration, ProxiedRecords(started.gateway, started.proxy)
    attributes = {"world": world, "host": host, "started": started}
    provider: SimulatedCluster = connect(started.cluster, SimulatedCluster, configuration, records, **attributes)
    with patch.dict(os.environ, {"KUBECONFIG": str(started.cluster.kubeconfig)}):
        assert provider.pods.api  # reads the kubeconfig
    remove_pods(started.cluster.emulator)
    started.cluster.emulator.cluster_faults.pods.clear()
    return provider


class SimulatedCluster(SimulatedVendor, ClusterSuiteProvider):
    """Mixin of the provider of one host."""

    started: HostCluster

    def create_program_server(self) -> ProgramServer:
        self.started.programs.programs.clear()
        return self.started.programs

    def complete_spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Let the gateway of this host accept the token of the spec."""
        assert spec.gateway
        gateway = self.started.gateway
        gateway.records.refs_by_token[spec.gateway.token] = spec.name
        access = replace(spec.gateway, certificate_authority=gateway.files.authority.read_text())
        return replace(super().complete_spec(spec), gateway=access)

    def find_existing(self, name: str) -> VendorSandbox | None:
        if find_pod(self.emulator, name) is None:
            return None
        containers = find_sandbox(self.emulator, name)
        return VendorSandbox(self.created[name], open_volumes(containers) if containers else {}, suspended=False)

    def call(self, verb: str, arguments: Sequence[Any], act: Callable[[], Any]) -> Any:
        random = self.world.random
        if verb == "create" and self.world.faults.enabled and random.random() < PENDING_SHARE:
            name, scheduler = find_subject(arguments), self.world.scheduler
            scheduler.record("fault", "no node", name)
            self.emulator.cluster_faults.pods.append(PodFault(name, UNSCHEDULABLE))
            until = scheduler.seconds + random.choice(PENDING_SECONDS)
            scheduler.call_at(until, lambda: run_aside(lambda: self._add_node(name)))
        return super().call(verb, arguments, act)

    def _add_node(self, name: str) -> None:
        """Let Pods of this name get a node, now and later."""
        for fault in self.emulator.cluster_faults.pods:
            if fault.pattern == name:
                fault.times = 0
        self.emulator.kubelet.schedule(name)

    def vanish(self, ref: str) -> None:
        """Delete or evict a Pod. An evicted one stays as a remnant, unless its cluster is gone."""
        is_evicted = self.world.random.random() < 0.5 and not self.host.gone
        if not is_evicted:
            super().vanish(ref)
            return
        self.existence.vanished.add(ref)
        run_aside(lambda: self.stop(ref))
        self._stop_works([work for work in self.works if work.ref == ref])

    def list_witnessed(self) -> set[str]:
        """Return the names of all Pods and Secrets of sandboxes, as kubectl lists them."""

        def read() -> set[str]:
            listed = Kubectl(self.emulator.kubeconfig).read("pods,secrets", f"--namespace={NAMESPACE}")
            return {str(item["metadata"]["name"]) for item in listed["items"]}

        return cast(set[str], run_aside(read))

    def check_seal(self) -> SealReport:
        return cast(SealReport, self.call("check_seal", (), lambda: self.call_vendor(super(SimulatedVendor, self).check_seal)))

    @contextmanager
    def failing_emulator(self, fault: Fault | None) -> Iterator[None]:
        proxy = self.started.proxy
        if fault:
            proxy.is_carried_out, proxy.cuts = fault.outcome == CUT_AFTER, fault.times
        try:
            with super().failing_emulator(fault):
                yield
        finally:
            proxy.cuts = 0
