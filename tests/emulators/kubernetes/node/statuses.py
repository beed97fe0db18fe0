"""Status of a Pod from the states of its Docker containers."""

from collections.abc import Mapping
from typing import Any

from tests.emulators.kubernetes.api.deletion import ENDED_PHASES, set_condition
from tests.emulators.kubernetes.api.store import Object, format_now

NODE_ADDRESS = "192.0.2.10"
START_ERROR_CODE = 128


def begin(pod: Object) -> None:
    """Set the status of a Pod whose containers are about to be created."""
    status = pod["status"]
    status |= {"startTime": format_now(), "hostIP": NODE_ADDRESS, "hostIPs": [{"ip": NODE_ADDRESS}]}
    set_condition(pod, "Initialized", "True")
    set_waiting(pod, "ContainerCreating")


def set_address(pod: Object, address: str) -> None:
    pod["status"] |= {"podIP": address, "podIPs": [{"ip": address}]}


def set_waiting(pod: Object, reason: str, message: str = "") -> None:
    """Let all containers wait for a reason."""
    waiting = {"reason": reason} | ({"message": message} if message else {})
    pod["status"]["containerStatuses"] = [
        {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": False, "started": False,
            "restartCount": 0, "state": {"waiting": waiting}, "lastState": {},
        }
        for container in pod["spec"]["containers"]
    ]  # fmt: skip
    _set_ready(pod)


def update(pod: Object, states: Mapping[str, Mapping[str, Any]], restarts: Mapping[str, int]) -> None:
    """Set the status of a Pod from the inspected containers, by name. A phase that is final does not change."""
    statuses = []
    for container in pod["spec"]["containers"]:
        if (found := states.get(container["name"])) is not None:
            statuses.append(_build_container_status(container, found, restarts.get(container["name"], 0)))
    status = pod["status"]
    status["containerStatuses"] = statuses
    if status["phase"] not in ENDED_PHASES:
        status["phase"] = _find_phase(pod["spec"], statuses)
    _set_ready(pod)


def is_restarted(pod: Object, status: Mapping[str, Any]) -> bool:
    """Return whether the kubelet starts this ended container again."""
    policy, ended = pod["spec"]["restartPolicy"], status["state"].get("terminated")
    if ended is None or pod["status"]["phase"] in ENDED_PHASES or pod["metadata"].get("deletionTimestamp"):
        return False
    return policy == "Always" or (policy == "OnFailure" and ended["exitCode"] != 0)


def _build_container_status(container: Object, found: Mapping[str, Any], restarts: int) -> Object:
    identifier, engine = f"docker://{found['Id']}", found["State"]
    if engine["Status"] == "created" and engine["Error"]:
        times = dict.fromkeys(("startedAt", "finishedAt"), "1970-01-01T00:00:00Z")
        ended = {"exitCode": START_ERROR_CODE, "reason": "StartError", "message": engine["Error"], "containerID": identifier}
        state: Object = {"terminated": ended | times}
    elif engine["Status"] in {"exited", "dead"}:
        code = engine["ExitCode"]
        reason = "OOMKilled" if engine["OOMKilled"] and code else "Completed" if code == 0 else "Error"
        state = {
            "terminated": {
                "exitCode": code, "reason": reason, "startedAt": _format_time(engine["StartedAt"]),
                "finishedAt": _format_time(engine["FinishedAt"]), "containerID": identifier,
            }
        }  # fmt: skip
    elif engine["Status"] == "created":
        state = {"waiting": {"reason": "ContainerCreating"}}
    else:
        state = {"running": {"startedAt": _format_time(engine["StartedAt"])}}
    is_running = "running" in state
    return {
        "name": container["name"], "image": container["image"], "imageID": f"docker://{found['Image']}",
        "containerID": identifier, "ready": is_running, "started": is_running,
        "restartCount": restarts, "state": state, "lastState": {},
    }  # fmt: skip


def _format_time(text: str) -> str:
    return text[:19] + "Z"  # the engine's time has nanoseconds


def _find_phase(spec: Object, statuses: list[Object]) -> str:
    ended = [status["state"]["terminated"] for status in statuses if "terminated" in status["state"]]
    if len(ended) < len(spec["containers"]) or spec["restartPolicy"] == "Always":
        return "Running" if any("waiting" not in status["state"] for status in statuses) else "Pending"
    if all(one["exitCode"] == 0 for one in ended):
        return "Succeeded"
    return "Failed" if spec["restartPolicy"] == "Never" else "Running"


def _set_ready(pod: Object) -> None:
    statuses = pod["status"].get("containerStatuses") or []
    unready = [status["name"] for status in statuses if not status["ready"]]
    ended = pod["status"]["phase"] in ENDED_PHASES
    message = f"containers with unready status: [{' '.join(unready)}]" if unready else ""
    reason = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(pod["status"]["phase"], "ContainersNotReady")
    for kind in ("Ready", "ContainersReady"):
        if unready or ended:
            set_condition(pod, kind, "False", reason, message)
        else:
            set_condition(pod, kind, "True")
