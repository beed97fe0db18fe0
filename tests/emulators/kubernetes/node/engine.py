"""Docker Engine of the node: the containers of one run of the emulator."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from docker import APIClient
from docker.errors import APIError, DockerException, NotFound
from docker.utils import kwargs_from_env

from tests.emulators.kubernetes.node.containers import POD_LABEL, RUN_LABEL, Sandbox

TIMEOUT_SECONDS = 120
REMOVALS_AT_ONCE = 16


class Engine:
    """Containers with the label of a run. No method raises for a container that is gone.

    As with memory.oom.group, which the kubelet sets unless it has `singleProcessOOMKill`, an out-of-memory kill ends all
    processes of the container. The engine announces the kill of one process, and the others are killed some milliseconds
    later."""

    kills_single_process = False  # singleProcessOOMKill of the kubelet

    def __init__(self, run: str, connections: int) -> None:
        self.run = run
        self.client = APIClient(version="auto", timeout=TIMEOUT_SECONDS, num_pools=connections, **kwargs_from_env())
        self._events = self.client.events(decode=True, filters={"label": f"{RUN_LABEL}={run}", "event": ["die", "oom"]})

    def watch_ends(self, notice: Callable[[str], None]) -> None:
        """Call a function with the uid of a Pod, in a thread, whenever one of its containers ends."""

        def read() -> None:
            with suppress(DockerException, OSError, ValueError, AttributeError):  # closed
                for event in self._events:
                    if event["Action"] == "die":
                        notice(event["Actor"]["Attributes"].get(POD_LABEL, ""))
                    elif not self.kills_single_process:
                        self._kill_container(event["Actor"]["ID"])

        threading.Thread(target=read, daemon=True).start()

    def inspect(self, sandbox: Sandbox) -> dict[str, dict[str, Any]]:
        """Return the containers of a Pod by name, as the engine describes them."""
        found: dict[str, dict[str, Any]] = {}
        for name, identifier in list(sandbox.containers.items()):
            with suppress(NotFound):
                found[name] = self.client.inspect_container(identifier)
                if sandbox.has_run_out_of_memory:
                    found[name]["State"]["OOMKilled"] = True
        return found

    def start(self, identifier: str) -> None:
        """Start a container. If that fails, its state has the error."""
        with suppress(APIError):
            self.client.start(identifier)

    def kill(self, sandbox: Sandbox) -> None:
        """Kill all containers of a Pod."""
        for identifier in sandbox.containers.values():
            self._kill_container(identifier)

    def _kill_container(self, identifier: str) -> None:
        with suppress(APIError):
            self.client.kill(identifier)

    def stop(self, sandbox: Sandbox, grace: int) -> None:
        """Stop all containers of a Pod at once, within a grace period in seconds."""

        def stop(identifier: str) -> None:
            with suppress(APIError):
                self.client.stop(identifier, timeout=grace)

        _run_for_all(stop, sandbox.containers.values())

    def remove(self, identifier: str) -> None:
        """Remove a container with its anonymous volumes."""
        with suppress(APIError):
            self.client.remove_container(identifier, force=True, v=True)

    def remove_all(self) -> None:
        """Remove all containers of the run."""
        found = self.client.containers(all=True, filters={"label": f"{RUN_LABEL}={self.run}"})
        _run_for_all(self.remove, [container["Id"] for container in found])

    def stop_events(self) -> None:
        with suppress(DockerException, OSError):
            self._events.close()


def _run_for_all(work: Callable[[str], None], identifiers: Iterable[str]) -> None:
    with ThreadPoolExecutor(REMOVALS_AT_ONCE) as pool:
        list(pool.map(work, identifiers))
