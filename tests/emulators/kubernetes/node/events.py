"""Events of Pods."""

from uuid import uuid4

from tests.emulators.kubernetes.api.resources import EVENTS
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.api.store import Object, Store, format_now


class Recorder:
    """Recorder of events in the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def record(self, pod: Object, kind: str, reason: str, message: str, component: str = "kubelet") -> None:
        """Record an event of a Pod, or count a repeated one. Events of a namespace that is gone are dropped."""
        metadata = pod["metadata"]
        for event in self.store.list(EVENTS, metadata["namespace"]):
            involved = event["involvedObject"]
            if (involved.get("uid"), event["reason"], event["message"]) == (metadata["uid"], reason, message):
                self._repeat(event)
                return
        self.store.create(
            EVENTS,
            {
                "apiVersion": "v1", "kind": "Event", "type": kind, "reason": reason, "message": message, "count": 1,
                "metadata": {"name": f"{metadata['name']}.{uuid4().hex[:16]}", "namespace": metadata["namespace"]},
                "involvedObject": {
                    "apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                },
                "firstTimestamp": format_now(), "lastTimestamp": format_now(), "source": {"component": component},
                "reportingComponent": component, "reportingInstance": "", "eventTime": None,
            },
        )  # fmt: skip

    def _repeat(self, event: Object) -> None:
        def change(item: Object) -> None:
            item["count"] += 1
            item["lastTimestamp"] = format_now()

        try:
            self.store.edit(EVENTS, event["metadata"]["namespace"], event["metadata"]["name"], change)
        except ApiError:  # deleted with its namespace
            return
