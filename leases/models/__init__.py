"""Models of the app. The package re-exports every model, and makes the tables of the app's features known to Django."""

from leases.agent_runs.models import AgentRun
from leases.atproto.models import AtprotoAccount, AtprotoRecord
from leases.catalog.models import CatalogAgent
from leases.coding.models import CodingTask, Repository
from leases.environments.models import Environment, EnvironmentOutcome, EnvironmentSecret, Participant
from leases.models.agents import (
    DID_DESCRIPTION,
    DID_PATTERN,
    Agent,
    AgentKey,
    KeyScope,
    default_key_scopes,
    require_did,
    validate_did,
)
from leases.models.environment_types import (
    CONDITION_DESCRIPTION,
    CONDITION_PATTERN,
    MIN_SUSPEND_AFTER,
    AlternativePool,
    EnvironmentType,
    check_argv,
    check_conditions,
    check_excludes,
    check_sleep_after,
    check_suspend_after,
    check_vendor_interval,
    default_turn_argv,
)
from leases.models.leases import (
    END_REASONS,
    ENVIRONMENT_ID_DESCRIPTION,
    ENVIRONMENT_ID_PATTERN,
    Lease,
    LeaseEvent,
    LeaseStatus,
)
from leases.models.turns import IdempotentRequest, Shell, Turn
from leases.projects.models import Project
from leases.queue.models import QueueAgent, QueuedRun

__all__ = [
    "CONDITION_DESCRIPTION",
    "CONDITION_PATTERN",
    "DID_DESCRIPTION",
    "DID_PATTERN",
    "END_REASONS",
    "ENVIRONMENT_ID_DESCRIPTION",
    "ENVIRONMENT_ID_PATTERN",
    "MIN_SUSPEND_AFTER",
    "Agent",
    "AgentKey",
    "AgentRun",
    "AlternativePool",
    "AtprotoAccount",
    "AtprotoRecord",
    "CatalogAgent",
    "CodingTask",
    "Environment",
    "EnvironmentOutcome",
    "EnvironmentSecret",
    "EnvironmentType",
    "IdempotentRequest",
    "KeyScope",
    "Lease",
    "LeaseEvent",
    "LeaseStatus",
    "Participant",
    "Project",
    "QueueAgent",
    "QueuedRun",
    "Repository",
    "Shell",
    "Turn",
    "check_argv",
    "check_conditions",
    "check_excludes",
    "check_sleep_after",
    "check_suspend_after",
    "check_vendor_interval",
    "default_key_scopes",
    "default_turn_argv",
    "require_did",
    "validate_did",
]
