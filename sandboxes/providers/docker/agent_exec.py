"""Agents in containers: the look-up of an agent's client, and the count of execs that the engine executes instead."""

from collections import Counter

import structlog
from django.conf import settings

from sandboxes.agent.client import report_fallback
from sandboxes.agent.runs import AgentClient, NotStarted
from sandboxes.providers.docker.engine import Engine

log = structlog.get_logger(__name__)
fallbacks = Counter[str]()  # execs of this process by the engine although a gateway exists, by reason


def find_agent(engine: Engine, ref: str) -> AgentClient | None:
    """Return a client for the agent of a container. Raise Missing.

    None if no gateway was ever started here, or if the gateway cannot identify the agent (gVisor, Kata)."""
    if not settings.AGENT_GATEWAY.exists():
        return None
    container = engine.container_id(ref)
    return AgentClient(settings.AGENT_GATEWAY, container) if container else None


def note_fallback(engine: Engine, ref: str, error: NotStarted, mark: str = "") -> None:
    """Count and log an exec that the engine executes instead of the agent. `mark` identifies the exec of a run."""
    engine.container_ids.pop(ref, None)  # the container may have been replaced
    fallbacks[error.reason] += 1
    log.info("exec by the engine", sandbox=ref, run=mark, reason=str(error))
    report_fallback(settings.AGENT_GATEWAY, error.reason)
