"""Console pages of leases, turns, agents, API keys and environment types."""

from leases.admin import (
    agent_runs,
    agents,
    api_keys,
    atproto,
    catalog,
    environment_types,
    environments,
    host_actions,
    leases,
    projects,
    references,
    sandbox_actions,
    snapshot_actions,
    template_actions,
    terminals,
)

__all__ = [
    "agent_runs",
    "agents",
    "api_keys",
    "atproto",
    "catalog",
    "environment_types",
    "environments",
    "host_actions",
    "leases",
    "projects",
    "references",
    "sandbox_actions",
    "snapshot_actions",
    "template_actions",
    "terminals",
]
