"""Models of the app: one module a noun. This package re-exports every model and the sets of states."""

from sandboxes.models.admission import AdmissionRequest
from sandboxes.models.egress_connections import EgressConnection
from sandboxes.models.egress_credentials import EgressCredential
from sandboxes.models.gateway import AgentRoute, GatewayToken
from sandboxes.models.hosts import Host
from sandboxes.models.identity import MintedToken, SigningKey
from sandboxes.models.installation import Installation
from sandboxes.models.llm_calls import LlmCall, LogPosition, TokenKind
from sandboxes.models.operator_actions import OperatorAction
from sandboxes.models.outputs import OutputObject, StoredOutput
from sandboxes.models.packs import PackAssignment, PackOrigin, PackVersion
from sandboxes.models.placement import SkipReason
from sandboxes.models.policies import Policy
from sandboxes.models.pools import Pool, Quota
from sandboxes.models.processes import Process, ProcessStatus, RestartPolicy
from sandboxes.models.readings import Reading
from sandboxes.models.runs import NEVER_STARTED, RUN_KINDS, Run, RunOutcome, StopReason
from sandboxes.models.sandboxes import (
    ALIVE_STATES,
    AWAKE_STATES,
    GONE_STATES,
    IN_FLIGHT_STATES,
    FinalPersist,
    Sandbox,
    SandboxState,
    Transition,
)
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject, DataSize, ObjectUpload, Snapshot
from sandboxes.models.sweeps import Sweep
from sandboxes.models.templates import ImageTemplate, TemplateFailure, TemplateState
from sandboxes.models.token_rates import TokenRate
from sandboxes.models.transition_reasons import TransitionReason
from sandboxes.models.webhooks import Delivery, Event, Webhook

__all__ = [
    "ALIVE_STATES",
    "AWAKE_STATES",
    "GONE_STATES",
    "IN_FLIGHT_STATES",
    "NEVER_STARTED",
    "RUN_KINDS",
    "AdmissionRequest",
    "AgentData",
    "AgentRoute",
    "Attachment",
    "DataEvent",
    "DataFile",
    "DataObject",
    "DataSize",
    "Delivery",
    "EgressConnection",
    "EgressCredential",
    "Event",
    "FinalPersist",
    "GatewayToken",
    "Host",
    "ImageTemplate",
    "Installation",
    "LlmCall",
    "LogPosition",
    "MintedToken",
    "ObjectUpload",
    "OperatorAction",
    "OutputObject",
    "PackAssignment",
    "PackOrigin",
    "PackVersion",
    "Policy",
    "Pool",
    "Process",
    "ProcessStatus",
    "Quota",
    "Reading",
    "RestartPolicy",
    "Run",
    "RunOutcome",
    "Sandbox",
    "SandboxState",
    "SigningKey",
    "SkipReason",
    "Snapshot",
    "StopReason",
    "StoredOutput",
    "Sweep",
    "TemplateFailure",
    "TemplateState",
    "TokenKind",
    "TokenRate",
    "Transition",
    "TransitionReason",
    "Webhook",
]
