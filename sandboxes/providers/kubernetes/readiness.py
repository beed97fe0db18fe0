"""Wait for a new Pod: until its agent has joined the gateway, until it will not start, or until it turns out to be pending."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sandboxes.providers.errors import CapacityPending, FailureCause, NoCapacity, Rejected, Unavailable
from sandboxes.providers.kubernetes import endings
from sandboxes.providers.kubernetes.pods import PodClient
from sandboxes.redaction.texts import quote_answer

PENDING_SECONDS = 3.0  # for which a Pod is unschedulable before its caller is told: the scheduler may place it in a moment
PENDING_RETRY_SECONDS = 15  # an autoscaler needs a minute or more
AGENT_POLL_SECONDS, LATER_AGENT_POLL_SECONDS = 0.1, 0.5  # each look-up is a query
FIRST_SECONDS = 5.0  # in which most agents join
POD_POLL_SECONDS = (0.5, 1.0, 2.0)
REFUSED_EVENT = "NotTriggerScaleUp"  # of the autoscaler: no further node would have room for the Pod
SCALE_EVENTS = ("TriggeredScaleUp", REFUSED_EVENT)


class Readiness:
    """Progress of one Pod towards its first command."""

    def __init__(self, pods: PodClient, ref: str, *, timeout: timedelta) -> None:
        self._pods, self._ref, self._timeout = pods, ref, timeout
        self._unschedulable_since: float | None = None
        self._reason = "its agent has not joined the gateway"

    def wait(self, responds: Callable[[], bool]) -> None:
        """Return once `responds` does. Raise Missing, Rejected, CapacityPending, NoCapacity or Unavailable."""
        started, next_look, looks = time.monotonic(), 0.0, 0
        while True:
            if responds():
                return
            now = time.monotonic()
            if now >= next_look:
                self._check_pod(now)
                next_look, looks = now + POD_POLL_SECONDS[min(looks, len(POD_POLL_SECONDS) - 1)], looks + 1
            if now - started > self._timeout.total_seconds():
                message = f"{self._ref} is not ready after {self._timeout}: {self._reason}"
                raise Unavailable(message, cause=FailureCause.TIMEOUT)
            time.sleep(AGENT_POLL_SECONDS if now - started < FIRST_SECONDS else LATER_AGENT_POLL_SECONDS)

    def _check_pod(self, now: float) -> None:
        pod = self._pods.read_live(self._ref)
        reason, message = endings.find_waiting(pod)
        if reason:
            self._reason = f"{reason}: {message}"
            if reason in endings.UNUSABLE_REASONS:
                raise Rejected(f"{self._ref} cannot start: {self._reason}", cause=FailureCause.IMAGE_UNUSABLE)
        if not (unschedulable := endings.find_unschedulable(pod)):
            self._unschedulable_since = None
            return
        self._reason = unschedulable
        self._unschedulable_since = self._unschedulable_since or now
        waited = max(now - self._unschedulable_since, endings.find_unscheduled_seconds(pod, now=datetime.now(UTC)))  # noqa: TID251
        if waited >= PENDING_SECONDS:
            raise self._build_pending_error(str(pod["metadata"]["uid"]), unschedulable)

    def _build_pending_error(self, uid: str, unschedulable: str) -> Unavailable:
        """Build the error of a Pod without a node, with the words of scheduler and autoscaler."""
        events = [event for event in self._pods.list_events(uid) if event.get("reason") in SCALE_EVENTS]
        words = (
            f"{unschedulable} {quote_answer(events[-1].get('message') or events[-1]['reason'])}" if events else unschedulable
        )
        if events and events[-1]["reason"] == REFUSED_EVENT:
            return NoCapacity(f"{self._ref} has no node: {words}", cause=FailureCause.NO_CAPACITY)
        error = CapacityPending(words, cause=FailureCause.NO_CAPACITY)
        error.retry_after = PENDING_RETRY_SECONDS
        return error
