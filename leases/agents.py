"""Lookup of agents by DID."""

from leases.models import Agent
from sandboxes.formatting import suggest_match

MAX_COMPARED_AGENTS = 1000  # newest agents compared with an unknown DID


def describe_unknown_agent(did: str) -> str:
    """Return a warning if no agent with this DID is known, with the nearest known DID. Otherwise return an empty string.

    An agent may be named before its first lease, so an unknown DID is not an error."""
    if Agent.objects.filter(did=did).exists():
        return ""
    return f"No agent {did} is known yet. This has no effect until an agent with this DID joins.{_suggest_agent(did)}"


def describe_new_agent(did: str) -> str:
    """Return a warning for an operation that creates the agent, with the nearest known DID. Empty if the agent is known."""
    return "" if Agent.objects.filter(did=did).exists() else f"The agent {did} is new.{_suggest_agent(did)}"


def _suggest_agent(did: str) -> str:
    known = Agent.objects.order_by("-pk").values_list("did", flat=True)[:MAX_COMPARED_AGENTS]
    return suggest_match(did, known)
