"""Reasons for which a Pod has ended, or will not start, from the evidence that the cluster leaves in its status."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sandboxes.providers.errors import FailureCause
from sandboxes.redaction.texts import quote_answer

ENDED_PHASES = ("Failed", "Succeeded")
UNUSABLE_REASONS = ("InvalidImageName",)  # of a waiting container: waiting does not help
IMAGE_REASONS = (  # the kubelet tries again
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError", *UNUSABLE_REASONS,
)  # fmt: skip
CAUSES_BY_DISRUPTION = {  # reasons of the condition DisruptionTarget
    "PreemptionByScheduler": (FailureCause.PREEMPTED, "preempted by the scheduler"),
    "EvictionByEvictionAPI": (FailureCause.NODE_DRAINED, "evicted by a drain or an autoscaler"),
    "DeletionByTaintManager": (FailureCause.NODE_LOST, "deleted because of a taint of its node"),
    "DeletionByPodGC": (FailureCause.NODE_LOST, "deleted because its node is gone"),
    "TerminationByKubelet": (FailureCause.EVICTED, "ended by its node"),
}
VOLUME_PATTERN = re.compile(r'volume "([^"]{1,63})"')


@dataclass(frozen=True)
class Ending:
    """Cause, for programs, and the words of the cluster, for operators."""

    cause: FailureCause
    message: str


def describe_end(pod: Mapping[str, Any]) -> Ending | None:
    """Return why a Pod has ended. None for a Pod that has not: it may be pending, running or about to be deleted."""
    status = pod.get("status") or {}
    if status.get("phase") not in ENDED_PHASES:
        return None
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    disruption = find_disruption(pod)
    if reason == "Evicted":
        volume = VOLUME_PATTERN.search(message)
        place = f" (volume {volume[1]})" if volume and volume[1] not in message.partition(":")[0] else ""
        return Ending(FailureCause.EVICTED, f"evicted{place}: {_quote(message) or 'no reason stated'}")
    if reason == "DeadlineExceeded":
        return Ending(FailureCause.LIFETIME_ENDED, f"the Pod has reached its activeDeadlineSeconds {_quote(message)}".strip())
    if any(state.get("reason") == "OOMKilled" for state in _iter_terminated(status)):
        return Ending(FailureCause.OUT_OF_MEMORY, "the kernel killed the container for lack of memory")
    if reason in ("Terminated", "NodeShutdown", "Shutdown"):
        return Ending(FailureCause.NODE_DRAINED, f"its node was shut down: {_quote(message) or reason}")
    if disruption:
        return disruption
    codes = ", ".join(f"exit code {state.get('exitCode')}" for state in _iter_terminated(status))
    return Ending(FailureCause.AGENT_ENDED, f"process 1 ended: {_quote(message) or reason or codes or status['phase']}")


def describe_departure(pod: Mapping[str, Any]) -> Ending:
    """Return why a Pod is being deleted, as far as its status tells."""
    return find_disruption(pod) or Ending(FailureCause.REMOVED, "deleted by someone else")


def find_disruption(pod: Mapping[str, Any]) -> Ending | None:
    """Return the reason of the condition DisruptionTarget."""
    condition = find_condition(pod, "DisruptionTarget")
    if condition is None or condition.get("status") != "True":
        return None
    reason = str(condition.get("reason") or "")
    cause, text = CAUSES_BY_DISRUPTION.get(reason, (FailureCause.REMOVED, f"disrupted: {reason}"))
    details = str(condition.get("message") or "")
    return Ending(cause, f"{text}: {_quote(details)}" if details else text)


def find_unschedulable(pod: Mapping[str, Any]) -> str:
    """Return the scheduler's message about a Pod for which it has no node. Empty: the Pod has a node, or was not tried yet."""
    condition = find_condition(pod, "PodScheduled")
    if condition is None or condition.get("status") != "False" or condition.get("reason") != "Unschedulable":
        return ""
    return f"no node has room for the Pod {_quote(str(condition.get('message') or ''))}".strip()


def find_unscheduled_seconds(pod: Mapping[str, Any], *, now: datetime) -> float:
    """Return for how long the scheduler has found no node, by the cluster's clock."""
    condition = find_condition(pod, "PodScheduled") or {}
    since = condition.get("lastTransitionTime")
    return (now - datetime.fromisoformat(since)).total_seconds() if since else 0.0


def find_waiting(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return reason and message of a container that cannot be started for now. Empty: none."""
    for container in _get_container_statuses(pod.get("status") or {}):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in IMAGE_REASONS:
            return str(waiting["reason"]), _quote(str(waiting.get("message") or ""))
    return "", ""


def _quote(message: str) -> str:
    return quote_answer(message) if message else ""


def find_condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition.get("type") == kind), None)


def _iter_terminated(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for container in _get_container_statuses(status):
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            if terminated := state.get("terminated"):
                yield terminated


def _get_container_statuses(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return status.get("containerStatuses") or []
