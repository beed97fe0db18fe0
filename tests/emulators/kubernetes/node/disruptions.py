"""Ends of Pods that are not ordered by a client: eviction, preemption, drain, loss of a node, memory, and disappearance."""

from tests.emulators.kubernetes.api.deletion import DEFAULT_GRACE_SECONDS, Deletion, set_condition
from tests.emulators.kubernetes.api.resources import NODES, PODS
from tests.emulators.kubernetes.api.store import Object, Store, key_of
from tests.emulators.kubernetes.node.kubelet import Kubelet
from tests.emulators.kubernetes.node.scheduler import NODE_NAME

NODE_PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."
NODE_SHUTDOWN = "Pod was terminated in response to imminent node shutdown."


class Disruptions:
    """Switches of tests. Each takes the namespace and the name of a Pod, and leaves the evidence that a cluster leaves."""

    def __init__(self, store: Store, kubelet: Kubelet, deletion: Deletion) -> None:
        self.store, self.kubelet, self.deletion = store, kubelet, deletion

    def evict_for_pressure(self, namespace: str, name: str) -> None:
        """Let the node run out of memory: the Pod stays, with reason Evicted and a DisruptionTarget."""
        self.kubelet.fail(self._get(namespace, name), "Evicted", NODE_PRESSURE, "TerminationByKubelet")

    def evict_for_storage(self, namespace: str, name: str, volume: str, limit: str) -> None:
        """Let a Pod exceed the limit of an emptyDir: the Pod stays, with reason Evicted and without a DisruptionTarget."""
        message = f'Usage of EmptyDir volume "{volume}" exceeds the limit "{limit}". '
        self.kubelet.fail(self._get(namespace, name), "Evicted", message)

    def shut_down_node(self, namespace: str, name: str) -> None:
        """End a Pod as the graceful shutdown of its node does: it stays, with reason Terminated."""
        self.kubelet.fail(self._get(namespace, name), "Terminated", NODE_SHUTDOWN, "TerminationByKubelet")

    def preempt(self, namespace: str, name: str) -> None:
        """Delete a Pod for one of a higher priority."""
        self._delete(self._get(namespace, name), "PreemptionByScheduler", "default-scheduler: preempting for a higher priority "
                     "pod")  # fmt: skip

    def drain(self, namespace: str = "") -> None:
        """Delete all Pods, of one namespace or of all, as the drain of their node does."""
        for pod in self.store.list(PODS, namespace):
            self._delete(pod, "EvictionByEvictionAPI", "Eviction API: evicting")

    def lose_node(self) -> None:
        """Let the node become unreachable: its Pods are deleted, stay Terminating, and still say that they run."""

        def mark(node: Object) -> None:
            set_condition(node, "Ready", "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")

        self.store.edit(NODES, "", NODE_NAME, mark)
        for pod in self.store.list(PODS):
            self.kubelet.hold(pod["metadata"]["name"])
            self._delete(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def delete_node(self) -> None:
        """Delete the object of the lost node, and with it all of its Pods."""
        self.store.remove(NODES, "", NODE_NAME)
        for pod in self.store.list(PODS):
            self._mark(pod, "DeletionByPodGC", "PodGC: node no longer exists")
            self.vanish(*key_of(pod))

    def run_out_of_memory(self, namespace: str, name: str) -> None:
        """End the first container as the kernel does at its memory limit, without the work to reach it."""
        pod = self._get(namespace, name)
        if sandbox := self.kubelet.find_sandbox(pod):
            sandbox.has_run_out_of_memory = True
            self.kubelet.engine.kill(sandbox)

    def vanish(self, namespace: str, name: str) -> None:
        """Remove a Pod at once, as a forced deletion does."""
        pod = self._get(namespace, name)
        self.deletion.remove(PODS, pod)
        self.kubelet.discard(pod)

    def replace(self, namespace: str, name: str) -> Object:
        """Replace a Pod by another one of the same name, as a controller does. Return the new one."""
        pod = self._get(namespace, name)
        self.vanish(namespace, name)
        kept = {key: value for key, value in pod["metadata"].items() if key in {"name", "namespace", "labels", "annotations"}}
        spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
        created = self.store.create(
            PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": kept, "spec": spec, "status": {"phase": "Pending"}}
        )
        self.kubelet.start(created)
        return created

    def _get(self, namespace: str, name: str) -> Object:
        return self.store.get(PODS, namespace, name)

    def _mark(self, pod: Object, reason: str, message: str) -> None:
        self.kubelet.edit(pod, lambda item: set_condition(item, "DisruptionTarget", "True", reason, message))

    def _delete(self, pod: Object, reason: str, message: str) -> None:
        self._mark(pod, reason, message)
        grace = pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
        self.deletion.delete(
            PODS, *key_of(pod), {"gracePeriodSeconds": grace, "preconditions": {"uid": pod["metadata"]["uid"]}}
        )
