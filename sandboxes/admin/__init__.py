"""Admin pages on pools, sandboxes, runs, stored state, egress, identity and webhooks."""

from sandboxes.admin import (
    identity,
    llm_calls,
    model_rates,
    policies,
    pools,
    processes,
    readings,
    sandboxes,
    state,
    webhooks,
)  # fmt: skip

__all__ = [
    "identity", "llm_calls", "model_rates", "policies", "pools", "processes", "readings", "sandboxes", "state", "webhooks",
]  # fmt: skip
