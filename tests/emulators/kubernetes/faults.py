"""Fault switches of the Kubernetes emulator beyond those of single requests (tests.emulators.base.Fault).

Lines of requests are "METHOD /path", followed by "?watch" for a watch and "?continue" for a further page of a list. The
outcome 410 of a further page is an expired list, 429 has a Retry-After of one second, and CUT_AFTER of an exec cuts the
connection after the output and before the status."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

# Outcomes of PodFault
UNSCHEDULABLE = "unschedulable"  # Pending, until `Kubelet.schedule`; the scheduler reports Insufficient memory
SCALE_UP = "scale up"  # the same, with the event TriggeredScaleUp
NO_SCALE_UP = "no scale up"  # the same, with the event NotTriggerScaleUp
IMAGE_PULL = "image pull"  # ErrImagePull, then ImagePullBackOff
CONTAINER_CONFIG = "container config"  # CreateContainerConfigError
NOT_STARTED = "not started"  # ContainerCreating for ever
STUCK_TERMINATING = "stuck terminating"  # a deletion does not end before `Kubelet.release`

# Outcomes of WatchFault
DELAYED = "delayed"  # each event waits for `seconds`
TWICE = "twice"
REORDERED = "reordered"  # each pair of events in the wrong order
EXPIRED = "expired"  # ERROR with code 410 in place of the event, and the end of the watch
LOST = "lost"  # the event is not sent


@dataclass
class PodFault:
    """Fault of the next `times` Pods whose name matches `pattern`."""

    pattern: str
    outcome: str
    times: int = 1


@dataclass
class WatchFault:
    """Fault of the next `times` events of watches on a resource, by its plural name."""

    resource: str
    outcome: str
    times: int = 1
    seconds: float = 0.0


@dataclass
class Reaction:
    """Action after the next `times` requests whose line matches `pattern`, before the client has the answer.

    For example a Pod that disappears between two reads."""

    pattern: str
    action: Callable[[], object]
    times: int = 1


@dataclass
class ClusterFaults:
    """Faults of Pods and watches that have not been met yet, and reactions to requests."""

    reactions: list[Reaction] = field(default_factory=list)
    pods: list[PodFault] = field(default_factory=list)
    watches: list[WatchFault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take_pod(self, name: str, outcomes: frozenset[str]) -> str | None:
        """Return the outcome for a Pod among the given ones, and count it."""
        with self._lock:
            for fault in self.pods:
                if fault.times > 0 and fault.outcome in outcomes and re.search(fault.pattern, name):
                    fault.times -= 1
                    return fault.outcome
        return None

    def react(self, line: str) -> None:
        """Do what is to follow a request."""
        with self._lock:
            due = [one for one in self.reactions if one.times > 0 and re.search(one.pattern, line)]
            for reaction in due:
                reaction.times -= 1
        for reaction in due:
            reaction.action()

    def take_watch(self, resource: str) -> WatchFault | None:
        with self._lock:
            for fault in self.watches:
                if fault.times > 0 and fault.resource == resource:
                    fault.times -= 1
                    return fault
        return None
