"""Scheduler of the one node, and its faults."""

from contextlib import suppress

from tests.emulators.kubernetes.api.deletion import set_condition
from tests.emulators.kubernetes.api.resources import PODS
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.api.store import Object, Store, key_of
from tests.emulators.kubernetes.faults import NO_SCALE_UP, SCALE_UP, UNSCHEDULABLE, ClusterFaults
from tests.emulators.kubernetes.node.events import Recorder

NODE_NAME = "node-1"
SCHEDULING_FAULTS = frozenset({UNSCHEDULABLE, SCALE_UP, NO_SCALE_UP})
MESSAGE = "0/1 nodes are available: 1 Insufficient memory. preemption: 0/1 nodes are available: 1 No preemption victims found."


class Scheduler:
    """Placement of Pods on the node."""

    def __init__(self, store: Store, faults: ClusterFaults, recorder: Recorder) -> None:
        self.store, self.faults, self.recorder = store, faults, recorder

    def place(self, pod: Object) -> bool:
        """Bind a new Pod to the node. Return False if a fault prevents it."""
        fault = self.faults.take_pod(pod["metadata"]["name"], SCHEDULING_FAULTS)
        if fault is None:
            return self.bind(pod)
        self._edit(pod, lambda item: set_condition(item, "PodScheduled", "False", "Unschedulable", MESSAGE))
        self.recorder.record(pod, "Warning", "FailedScheduling", MESSAGE, "default-scheduler")
        if fault == SCALE_UP:
            message = "pod triggered scale-up: [{pool-1 1->2 (max: 5)}]"
            self.recorder.record(pod, "Normal", "TriggeredScaleUp", message, "cluster-autoscaler")
        elif fault == NO_SCALE_UP:
            message = "pod didn't trigger scale-up: 1 max node group size reached"
            self.recorder.record(pod, "Normal", "NotTriggerScaleUp", message, "cluster-autoscaler")
        return False

    def bind(self, pod: Object) -> bool:
        """Assign the node to a Pod. Return False if the Pod is gone."""

        def change(item: Object) -> None:
            item["spec"]["nodeName"] = NODE_NAME
            set_condition(item, "PodScheduled", "True")

        if not self._edit(pod, change):
            return False
        namespace, name = key_of(pod)
        self.recorder.record(
            pod, "Normal", "Scheduled", f"Successfully assigned {namespace}/{name} to {NODE_NAME}", "default-scheduler"
        )
        return True

    def _edit(self, pod: Object, change: object) -> bool:
        with suppress(ApiError):
            self.store.edit(PODS, *key_of(pod), change, uid=pod["metadata"]["uid"])  # type: ignore[arg-type]
            return True
        return False
