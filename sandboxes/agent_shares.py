"""Shares of agents in the threads of this process that destroy and evict sandboxes.

One such call may last as long as a transfer, or until the sandbox is given up. Without shares, the sandboxes of one agent could
take all threads, and those of others would wait. Work that is left alone for a share stays due, and is for the caller that
gives a part of that share back (`claim_left`)."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# Of the four passes of a sweep that a worker runs at once. On two cores it is one, which leaves a core for the others.
MAX_PASSES_PER_AGENT = max(1, min(2, (os.cpu_count() or 1) // 2))


class AgentShares:
    """Number of calls in progress for each agent, of which at most `limit` are admitted at once."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock, self._in_progress, self._left = limit, threading.Lock(), Counter[str](), set[str]()

    @contextmanager
    def entering(self, agent_did: str) -> Iterator[bool]:
        """Yield whether the agent had a part of its share left. A sandbox without an agent has no limit."""
        admitted = self.take(agent_did)
        try:
            yield admitted
        finally:
            if admitted:
                self.give_back(agent_did)

    def take(self, agent_did: str) -> bool:
        with self._lock:
            if agent_did and self._in_progress[agent_did] >= self._limit:
                self._left.add(agent_did)
                return False
            self._in_progress[agent_did] += 1
            return True

    def give_back(self, agent_did: str) -> None:
        with self._lock:
            self._in_progress[agent_did] -= 1
            self._in_progress += Counter()  # drops the agents without calls

    def claim_left(self, agent_did: str) -> bool:
        """Return whether work of the agent was left alone since the last call. It is the caller's then. Call after `give_back`.

        The caller listed its work before, and a pass that found the share in use has ended."""
        with self._lock:
            is_left = agent_did in self._left
            self._left.discard(agent_did)
            return is_left

    def list_exhausted(self) -> list[str]:
        """Return the agents without any part of their share left."""
        with self._lock:
            return [agent for agent, count in self._in_progress.items() if agent and count >= self._limit]


DESTROYS, EVICTIONS = AgentShares(MAX_PASSES_PER_AGENT), AgentShares(MAX_PASSES_PER_AGENT)  # of this process
