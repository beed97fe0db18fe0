"""Pings of the agents in sandboxes."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from sandboxes.agent.runs import CONNECT_SECONDS
from sandboxes.providers.agent.commands import AgentCommandProvider
from sandboxes.providers.errors import Missing, ProviderError

MAX_CONCURRENT_PINGS = 32
PREPARE_TIMEOUT = timedelta(seconds=5)


class AgentLivenessProvider(AgentCommandProvider):
    """Verbs that ask whether the agents of sandboxes respond."""

    def find_unresponsive(self, refs: Collection[str], *, timeout: timedelta) -> set[str]:
        if not refs:
            return set()
        with ThreadPoolExecutor(MAX_CONCURRENT_PINGS, "ping") as threads:
            silent = threads.map(lambda ref: self._is_silent(ref, timeout), refs)
            return {ref for ref, is_silent in zip(refs, silent, strict=True) if is_silent}

    def _is_silent(self, ref: str, timeout: timedelta) -> bool:
        """Return whether the connected agent of a sandbox does not respond although the sandbox is not frozen."""
        try:
            agent = self._find_agent(ref)
            return agent is not None and agent.is_silent(timeout=timeout.total_seconds()) and not self._is_frozen(ref)
        except Missing:
            return False

    def _is_frozen(self, ref: str) -> bool:
        """Return whether the processes of a sandbox are frozen. Raise Missing."""
        return False

    def responds(self, ref: str, *, timeout: timedelta) -> bool:
        return self._ping(ref, timeout)

    def has_outdated_agent(self, ref: str) -> bool:
        try:
            agent = self._find_agent(ref)
            return agent is not None and agent.is_outdated(wait=CONNECT_SECONDS)
        except ProviderError:
            return False

    def prepare_claim(self, ref: str) -> None:
        self._ping(ref, PREPARE_TIMEOUT, prepare=True)

    def _ping(self, ref: str, timeout: timedelta, *, prepare: bool = False) -> bool:
        try:
            agent = self._find_agent(ref)
            return agent is not None and agent.responds(timeout=timeout.total_seconds(), prepare=prepare)
        except ProviderError:
            return False
