"""Models of the app: one module a noun. This package re-exports every model and the sets of states."""

from sandboxes.models.identity import MintedToken, SigningKey
from sandboxes.models.llm_calls import LlmCall, LogPosition, ModelRate
from sandboxes.models.policies import Policy
from sandboxes.models.pools import Pool, Quota
from sandboxes.models.processes import Ending, Process
from sandboxes.models.readings import Reading
from sandboxes.models.runs import RUN_KINDS, Outcome, Run
from sandboxes.models.sandboxes import ALIVE, GONE, IN_FLIGHT, Sandbox, State, Transition
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject, DataSize, Snapshot
from sandboxes.models.sweeps import Sweep
from sandboxes.models.webhooks import Delivery, Event, Webhook

__all__ = [
    "ALIVE", "GONE", "IN_FLIGHT", "RUN_KINDS", "AgentData", "Attachment", "DataEvent", "DataFile", "DataObject",
    "DataSize", "Delivery", "Ending", "Event", "LlmCall", "LogPosition", "MintedToken", "ModelRate", "Outcome", "Policy",
    "Pool", "Process", "Quota", "Reading", "Run", "Sandbox", "SigningKey", "Snapshot", "State", "Sweep", "Transition",
    "Webhook",
]  # fmt: skip
