"""Console pages of leases, turns, agents, API keys and environment types."""

from leases.admin import (
    agents,
    api_keys,
    environment_types,
    host_actions,
    leases,
    references,
    sandbox_actions,
    snapshot_actions,
)

__all__ = [
    "agents",
    "api_keys",
    "environment_types",
    "host_actions",
    "leases",
    "references",
    "sandbox_actions",
    "snapshot_actions",
]
