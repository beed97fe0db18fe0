"""Restart of containers whose agent does not respond. Their volumes stay, and with them /workspace and /data."""

import contextlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from sandboxes.providers.base import Missing, ProviderError
from sandboxes.providers.docker import agent_exec
from sandboxes.providers.docker.engine import Conflict, translate_errors
from sandboxes.providers.docker.suspension import ContainerSuspensionProvider

MAX_CONCURRENT_PINGS = 32
PREPARE_TIMEOUT = timedelta(seconds=5)


class ContainerRestartProvider(ContainerSuspensionProvider):
    """Restart verbs of DockerProvider."""

    def find_unresponsive(self, refs: Collection[str], *, timeout: timedelta) -> set[str]:
        if not refs:
            return set()
        with ThreadPoolExecutor(MAX_CONCURRENT_PINGS, "ping") as threads:
            silent = threads.map(lambda ref: self._is_silent(ref, timeout), refs)
            return {ref for ref, is_silent in zip(refs, silent, strict=True) if is_silent}

    def _is_silent(self, ref: str, timeout: timedelta) -> bool:
        """Return whether the connected agent of a container does not respond although the container is not frozen."""
        try:
            agent = agent_exec.find_agent(self._engine, ref)
            return agent is not None and agent.is_silent(timeout=timeout.total_seconds()) and not self._is_frozen(ref)
        except Missing:
            return False

    def responds(self, ref: str, *, timeout: timedelta) -> bool:
        return self._ping(ref, timeout)

    def prepare_claim(self, ref: str) -> None:
        self._ping(ref, PREPARE_TIMEOUT, prepare=True)

    def _ping(self, ref: str, timeout: timedelta, *, prepare: bool = False) -> bool:
        try:
            agent = agent_exec.find_agent(self._engine, ref)
            return agent is not None and agent.responds(timeout=timeout.total_seconds(), prepare=prepare)
        except ProviderError:
            return False

    def restart(self, ref: str) -> None:
        engine = self._engine
        container = str(engine.call("GET", f"/containers/{ref}/json")["Id"])
        self._thaw_in_kernel(ref)  # version 1 of cgroups kills no frozen process
        with contextlib.suppress(Conflict):  # it does not run
            engine.call("POST", f"/containers/{container}/kill")
        engine.call("POST", f"/containers/{container}/wait")  # a start before the end of process 1 has no effect
        with translate_errors():
            self._start(ref, container)
