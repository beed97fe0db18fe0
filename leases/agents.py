"""Lookup of agents by DID."""

from leases.models import Agent
from sandboxes.formatting import suggest_match

MAX_COMPARED_AGENTS = 1000  # newest agents compared with an unknown DID


def describe_unknown_agent(did: str) -> str:
    """Return a warning if no agent with this DID is known, with the nearest known DID. Otherwise return an empty string.

    An agent may be named before its first lease, so an unknown DID is not an error."""
    if Agent.objects.filter(did=did).exists():
        return ""
    known = Agent.objects.order_by("-pk").values_list("did", flat=True)[:MAX_COMPARED_AGENTS]
    return f"No agent {did} is known yet. This has no effect until an agent with this DID joins.{suggest_match(did, known)}"
