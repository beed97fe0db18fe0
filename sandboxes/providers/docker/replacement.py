"""Replacement of a container that the engine can no longer start.

An engine that is killed while it starts a container can leave a task in containerd. The next engine knows the container as
stopped, and each start fails because of the task, which has the container's id. A new container has a new id. The replacement
has the same name, settings and volumes, and therefore the same /workspace and /data. All other directories are lost, as by an
eviction.

A crash at any step is repaired by the next call. The replacement exists before the old container is removed, so the volumes are
never without a container."""

import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from docker.errors import APIError

from sandboxes.providers.docker.engine import Conflict, Engine
from sandboxes.providers.docker.freezer import find_freezer
from sandboxes.providers.errors import Missing

log = structlog.get_logger(__name__)
# Messages of containerd and runc, which the engine reports with status 409 or 500.
STALE_TASK_PATTERN = re.compile(
    r"\bid already in use"
    r"|\btask [0-9a-f]{64}:? already exists"
    r"|\bcontainer with (given )?id (already )?exists"
    r"|\bmkdir \S+/[0-9a-f]{64}: file exists",
    re.IGNORECASE,
)


def is_stale_task(error: APIError) -> bool:
    """Return whether the engine refused a start because of a task that an earlier engine has left behind."""
    return bool(STALE_TASK_PATTERN.search(str(error.explanation or error)))


def get_replacement_name(ref: str) -> str:
    """Return the container's name until the replaced container is removed."""
    return f"{ref}-replacement"


def replace_container(engine: Engine, ref: str, container: str, *, reason: str) -> None:
    """Replace the stopped container with this id by a new one, which is not started. May be called again at any time.

    No effect if the container was already replaced or removed. Raise Conflict if it runs.

    1. Create the replacement under a temporary name.
    2. Remove the container and keep its volumes.
    3. Kill its leftover processes, if they are visible and this process may.
    4. Give the replacement the name."""
    try:
        inspected = engine.call("GET", f"/containers/{container}/json")
    except Missing:
        return
    # Not the network namespace of a parked container, which belongs to one start.
    host_config = {**inspected["HostConfig"], "NetworkMode": "none"}
    body = {**inspected["Config"], "Image": inspected["Image"], "HostConfig": host_config}
    with suppress(Conflict):  # exists since an interrupted or concurrent replacement of this container
        engine.call("POST", f"/containers/create?name={get_replacement_name(ref)}", body)
    with suppress(Missing):
        engine.call("DELETE", f"/containers/{container}")
    kill_leftover_processes(container)
    engine.cgroups.pop(ref, None)
    try:
        engine.call("POST", f"/containers/{get_replacement_name(ref)}/rename?name={ref}")
    except Missing:  # renamed by a concurrent replacement
        return
    except Conflict:  # a concurrent replacement was first, and this one was created after it
        remove_replacement(engine, ref)
        return
    log.warning("container replaced", name=ref, container=container, reason=reason)


def complete_replacement(engine: Engine, ref: str) -> bool:
    """Give an interrupted replacement the name of the removed container. Return False if there is none."""
    with suppress(Missing, Conflict):
        engine.call("POST", f"/containers/{get_replacement_name(ref)}/rename?name={ref}")
        return True
    return False


def remove_replacement(engine: Engine, ref: str) -> None:
    """Remove an interrupted replacement, if any. Raise Conflict if another removal is in progress."""
    with suppress(Missing):
        engine.call("DELETE", f"/containers/{get_replacement_name(ref)}?force=true")


def finish_removal(engine: Engine, inspected: Mapping[str, Any]) -> bool:
    """Finish the removal of a container that the engine calls dead. Return False for any other container.

    An engine that is killed while it removes a container, or cannot delete its files, keeps the container as dead: the engine
    neither starts nor forgets it. Its volumes are kept. Raise Unavailable if the files still cannot be deleted."""
    if not inspected["State"]["Dead"]:
        return False
    with suppress(Missing, Conflict):  # removed meanwhile, or being removed
        engine.call("DELETE", f"/containers/{inspected['Id']}?force=true")
    kill_leftover_processes(inspected["Id"])
    log.warning("removal of a dead container finished", name=inspected["Name"].lstrip("/"), container=inspected["Id"])
    return True


def kill_leftover_processes(container: str) -> None:
    """Kill the processes of a removed container that were unknown to its engine. The engine leaves them running.

    Requires root in the host's pid namespace; no effect otherwise."""
    if os.geteuid() != 0:
        return
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if container in (process / "cgroup").read_text():
                _kill_member(int(process.name), container)


def _kill_member(pid: int, container: str) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        if container in Path(f"/proc/{pid}/cgroup").read_text():  # read again, because the pid may have been reused
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            if freezer := find_freezer(pid, container):
                freezer.thaw()  # a frozen process does not end before
    finally:
        os.close(descriptor)
