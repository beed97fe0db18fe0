"""KubernetesProvider on the emulator of a cluster, with the hooks and switches of the memory provider.

A failure of a verb that the API server carries out is a fault of the API server during the call. Verbs that the agent carries
out go through the gateway and not through the API server: their failures are raised before the call."""

import shutil
import socketserver
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from docker.errors import APIError

from sandboxes.fault_injection import HookedCalls
from sandboxes.providers.base import DATA, WORKSPACE, SandboxSpec
from sandboxes.providers.kubernetes.pod_spec import AGENT_UID
from tests.conftest import DOCKER_IMAGE
from tests.emulators.kubernetes.api.resources import PODS, SECRETS
from tests.emulators.kubernetes.api.store import Object
from tests.emulators.kubernetes.emulator import KubernetesEmulator
from tests.emulators.kubernetes.node.containers import Sandbox
from tests.support.cluster import NAMESPACE, Cluster
from tests.support.suites.programs import DIRECTORY, DiskFiles, ProgramServer
from tests.support.suites.provider import SuiteProvider, build_class

KIND = "kubernetes"
API_VERBS = {"create", "destroy", "inspect", "kill", "list", "list_all"}  # which fail if the API server does


class PodPrograms(ProgramServer):
    """Programs of Pods, which reach this process by a unix socket: they have no network but the gateway."""

    def __init__(self, emulator: KubernetesEmulator) -> None:
        self._emulator = emulator
        self._directory = Path(tempfile.mkdtemp(prefix="lh-programs-", dir="/tmp"))
        self._directory.chmod(0o755)
        emulator.kubelet.shared_directories[DIRECTORY] = self._directory
        super().__init__()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _create_server(self) -> Any:
        path = self._directory / ".socket"
        handler: Any = self._build_handler()
        server = socketserver.ThreadingUnixStreamServer(str(path), handler)
        server.daemon_threads = True
        path.chmod(0o777)
        server.server_address = f"{DIRECTORY}/{path.name}"  # in the Pods
        return server

    def find_files(self, ref: str) -> DiskFiles | None:
        found = find_sandbox(self._emulator, ref)
        return open_volumes(found) if found else None

    def find_directory(self, ref: str) -> Path | None:
        return self._directory


def find_pod(emulator: KubernetesEmulator, ref: str) -> Object | None:
    found: Object | None = emulator.store.find(PODS, NAMESPACE, ref)
    return found


def find_sandbox(emulator: KubernetesEmulator, ref: str) -> Sandbox | None:
    """Return the Docker objects of the Pod with this name."""
    pod = find_pod(emulator, ref)
    return emulator.kubelet.find_sandbox(pod) if pod else None


def open_volumes(sandbox: Sandbox) -> DiskFiles:
    """Return the files of a Pod's volumes."""
    return DiskFiles({WORKSPACE: sandbox.directory / "workspace", DATA: sandbox.directory / "data"}, AGENT_UID)


def remove_pod(emulator: KubernetesEmulator, ref: str) -> None:
    """Remove a Pod as by a forced deletion, and kill its processes without a grace period."""
    sandbox = find_sandbox(emulator, ref)
    emulator.disruptions.vanish(NAMESPACE, ref)
    if sandbox:
        emulator.kubelet.engine.kill(sandbox)


class ClusterSuiteProvider(SuiteProvider):
    """Mixin of the provider of one cluster."""

    cluster: Cluster  # set by `connect`

    def create_program_server(self) -> ProgramServer:
        return PodPrograms(self.emulator)

    def complete_spec(self, spec: SandboxSpec) -> SandboxSpec:
        return replace(spec, image=spec.image or DOCKER_IMAGE)

    def reset(self) -> None:
        """Remove all Pods and Secrets, hooks, faults and recorded calls."""
        self.clear_hooks()
        self.emulator.faults.clear()
        faults = self.emulator.cluster_faults
        for kept in (faults.pods, faults.watches, faults.reactions):
            kept.clear()
        remove_pods(self.emulator)
        self.created.clear()
        self.programs.clear()

    def fail(self, method: str, error: BaseException, *, times: int | None = None) -> ExitStack:
        if method in API_VERBS:
            return super().fail(method, error, times=times)
        return HookedCalls.fail(self, method, error, times=times)

    def vanish(self, ref: str) -> None:
        remove_pod(self.emulator, ref)

    def stop(self, ref: str) -> None:
        """Evict a Pod, as the kubelet does at a limit of its storage."""
        self.emulator.disruptions.evict_for_storage(NAMESPACE, ref, "workspace", "4Gi")

    def count_processes(self, command_line: str) -> int:
        engine, count = self.emulator.kubelet.engine, 0
        for sandbox in [*self.emulator.kubelet.sandboxes.values()]:
            for container in [*sandbox.containers.values()]:
                with suppress(APIError):  # it has ended
                    listed = engine.client.top(container, ps_args="-eo pid,args")["Processes"]
                    count += sum(arguments == command_line for _, arguments in listed)
        return count


def remove_pods(emulator: KubernetesEmulator) -> None:
    """Remove all Pods and Secrets of sandboxes, and kill their processes."""
    for pod in emulator.store.list(PODS, NAMESPACE):
        remove_pod(emulator, pod["metadata"]["name"])
    for secret in emulator.store.list(SECRETS, NAMESPACE):
        emulator.store.remove(SECRETS, NAMESPACE, secret["metadata"]["name"])


def connect(
    cluster: Cluster, mixin: type[ClusterSuiteProvider] = ClusterSuiteProvider, *arguments: Any, **attributes: Any
) -> Any:
    """Return the provider of a cluster. `arguments` are those of its constructor, by default the settings and the database."""
    return build_class(KIND, mixin, emulator=cluster.emulator, cluster=cluster, **attributes)(*arguments)
