"""Console pages of pools, sandboxes, runs, stored state, egress, identity and webhooks."""

from sandboxes.admin import (
    agent_data,
    data_events,
    deliveries,
    egress_connections,
    hosts,
    identity,
    llm_calls,
    model_rates,
    operator_actions,
    packs,
    policies,
    pools,
    processes,
    quotas,
    readings,
    runs,
    sandboxes,
    snapshots,
    sweeps,
    templates,
    webhooks,
)

__all__ = [
    "agent_data", "data_events", "deliveries", "egress_connections", "hosts", "identity", "llm_calls", "model_rates",
    "operator_actions", "packs", "policies", "pools", "processes", "quotas", "readings", "runs", "sandboxes", "snapshots",
    "sweeps", "templates", "webhooks",
]  # fmt: skip
