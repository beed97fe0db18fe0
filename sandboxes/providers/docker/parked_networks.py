"""Parked network namespaces: containers that are started ahead, so that a sandbox's start need not create a namespace.

With the network mode "none" the engine spends half of a container's start on the empty network namespace. A parked container
has such a namespace, and does nothing. A sandbox that starts in the namespace of a parked container is the only one to do so,
and the parked container is removed as soon as the sandbox has started: the namespace lives on in the sandbox alone.

Parked containers have fixed names, so that any number of processes keep the same few. A process claims one by renaming it. The
new name contains the container's id: the engine refuses a second rename to the same name, so one process succeeds.

A crash at any step leaves a parked container, which the next process uses, or a claimed one, which a sweep removes. A sandbox
whose parked container is gone when it starts, or starts again, is replaced by one with a namespace of its own."""

import hashlib
import json
import re
import threading
import time
from typing import Any
from urllib.parse import quote

import structlog
from django.conf import settings
from docker.errors import APIError

from sandboxes.providers.docker.engine import Conflict, Engine
from sandboxes.providers.errors import Missing, ProviderError

log = structlog.get_logger(__name__)
LABEL = "leasehold.parked"  # runtime directory of the installation, which all its processes on the engine's host share
SANDBOX_LABEL = "leasehold.name"
REPLACE_DELAY_SECONDS = 1.0  # the first commands of the new sandbox come first
MEMORY_BYTES = 64 << 20  # limit, of which the runtime needs up to 20 MiB at the start; a parked container then uses 3 MiB
MAX_PIDS = 64  # the runtime's threads count too; with 5, one start in some hundreds failed on a loaded machine
# Messages of the engine for the start of a container whose parked container was removed, or has stopped.
GONE_PATTERN = re.compile(
    r"No such container: (?P<id>[0-9a-f]{64})|cannot join network of a non running container", re.IGNORECASE
)


def claim(engine: Engine) -> str | None:
    """Return the id of a parked container that no other start uses. None: there is none, or no answer."""
    for number in range(settings.PARKED_NETWORKS):
        try:
            if parked := find_parked(engine, number):
                _mark_used(engine, parked)
                return parked
        except ProviderError:  # another process was first, or the engine does not respond, as the start will show
            continue
    return None


def find_parked(engine: Engine, number: int) -> str | None:
    """Return the id of a parked container that runs and is not claimed, by its number from 0. Raise ProviderError."""
    try:
        parked = engine.call("GET", f"/containers/{_get_name(number)}/json")
    except Missing:
        return None
    return str(parked["Id"]) if parked["State"]["Running"] else None


def park(engine: Engine) -> int:
    """Start parked containers until there are LEASEHOLD_PARKED_NETWORKS. Return the number started. Raise ProviderError."""
    return sum(_park(engine, number) for number in range(settings.PARKED_NETWORKS))


def replace_later(engine: Engine, container: str | None) -> None:
    """Remove a claimed container, if any, and park another one, in a thread. If that fails, a sweep does it."""

    def replace() -> None:
        time.sleep(REPLACE_DELAY_SECONDS)
        try:
            if container:
                remove(engine, container)
            park(engine)
        except ProviderError as failed:
            log.warning("no network namespace parked", error=str(failed))

    threading.Thread(target=replace, name="parked-network", daemon=True).start()


def remove(engine: Engine, container: str) -> None:
    """Remove a claimed container. Idempotent."""
    try:
        engine.call("DELETE", f"/containers/{container}?force=true&v=true")
    except (Missing, Conflict):  # gone, or being removed by another process
        return


def sweep(engine: Engine, *, keep: int) -> int:
    """Remove this installation's containers that are used no longer, and all unused ones but `keep`. Return their number.

    Containers of other installations on the engine are kept: this process may be unable to see a directory that exists. A
    claimed container is kept while a sandbox waits to be started in its namespace. A sandbox that is created just now may
    lose its parked container in this way, and then starts in a namespace of its own. Raise ProviderError."""
    listed = engine.call("GET", f"/containers/json?all=true&filters={_quote_label(f'{LABEL}={_get_directory()}')}")
    kept = {f"/{_get_name(number)}" for number in range(keep)}
    waited_for = _find_waited_for(engine) if listed else set()
    removed = 0
    for container in listed:
        if not kept & {*container["Names"]} and container["Id"] not in waited_for:
            removed += _retire(engine, container)
    return removed


def is_gone(error: APIError, container: str) -> bool:
    """Return whether the engine could not start this container because its parked container is gone."""
    found = GONE_PATTERN.search(str(error.explanation or error))
    return found is not None and found["id"] != container


def _retire(engine: Engine, container: dict[str, Any]) -> int:
    """Claim a container, unless it is claimed, and remove it."""
    try:
        if not container["Names"][0].endswith("-used"):
            _mark_used(engine, container["Id"])
    except ProviderError:  # another process was first
        return 0
    remove(engine, container["Id"])
    return 1


def _mark_used(engine: Engine, container: str) -> None:
    """Claim a container. Raise a ProviderError if it is claimed."""
    engine.call("POST", f"/containers/{container}/rename?name={_get_prefix()}-{container[:32]}-used")


def _park(engine: Engine, number: int) -> bool:
    name = _get_name(number)
    try:
        if engine.call("GET", f"/containers/{name}/json")["State"]["Running"]:
            return False
    except Missing:
        try:
            engine.call("POST", f"/containers/create?name={name}", _build_config())
        except Conflict:  # created by another process
            pass
        except Missing:  # the image is not built yet, and no sandbox can start either
            return False
    try:
        engine.call("POST", f"/containers/{name}/start")
    except Missing:  # started and claimed by other processes meanwhile
        return False
    return True


def _build_config() -> dict[str, Any]:
    host_config = {
        "NetworkMode": "none", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges:true"], "ReadonlyRootfs": True,
        "IpcMode": "private", "CgroupnsMode": "private", "LogConfig": {"Type": "none"}, "PidsLimit": MAX_PIDS,
        "Memory": MEMORY_BYTES, "MemorySwap": MEMORY_BYTES,
    }  # fmt: skip
    return {
        "Image": settings.SANDBOX_IMAGE, "Entrypoint": ["sleep", "infinity"], "User": "65534:65534", "Hostname": "sandbox",
        "WorkingDir": "/", "Labels": {LABEL: _get_directory()}, "HostConfig": host_config,
    }  # fmt: skip


def _find_waited_for(engine: Engine) -> set[str]:
    """Return the ids of the parked containers of sandboxes that have not started yet."""
    found = set()
    for sandbox in engine.call("GET", f"/containers/json?all=true&filters={_quote_label(SANDBOX_LABEL, status='created')}"):
        kind, _, parked = sandbox["HostConfig"]["NetworkMode"].partition(":")
        if kind == "container":
            found.add(parked)
    return found


def _quote_label(label: str, **others: str) -> str:
    return quote(json.dumps({"label": [label], **{name: [value] for name, value in others.items()}}))


def _get_directory() -> str:
    return str(settings.RUNTIME_DIR.absolute())


def _get_prefix() -> str:
    return f"leasehold-parked-{hashlib.sha256(_get_directory().encode()).hexdigest()[:16]}"


def _get_name(number: int) -> str:
    return f"{_get_prefix()}-{number}"
