"""Python client of Leasehold: sandboxes for scripts, over the HTTP API. Needs httpx only.

    from leasehold import Sandbox

    with Sandbox("coding") as box:
        print(box.exec("python3 --version", check=True).stdout)

LEASEHOLD_URL and LEASEHOLD_API_KEY name the control plane and the API key. docs/client.md has the tasks."""

from .async_sandbox import AsyncSandbox
from .errors import (
    ApiError,
    AuthenticationFailed,
    BudgetExhausted,
    CommandFailed,
    ConfigurationError,
    Conflict,
    ConnectionFailed,
    InvalidRequest,
    LeaseEnded,
    LeaseholdError,
    NotAllowed,
    NotFound,
    OutcomeUnknown,
    RateLimited,
    RenewalFailed,
    RunFailed,
    SandboxClosed,
    ServerFailed,
    Unavailable,
    UnexpectedAnswer,
)
from .exchange import RetryPolicy
from .operator import Operator
from .results import AgentEvent, ExecResult, OutputPart, RunResult
from .sandbox import Sandbox

__all__ = [
    "AgentEvent",
    "ApiError",
    "AsyncSandbox",
    "AuthenticationFailed",
    "BudgetExhausted",
    "CommandFailed",
    "ConfigurationError",
    "Conflict",
    "ConnectionFailed",
    "ExecResult",
    "InvalidRequest",
    "LeaseEnded",
    "LeaseholdError",
    "NotAllowed",
    "NotFound",
    "Operator",
    "OutcomeUnknown",
    "OutputPart",
    "RateLimited",
    "RenewalFailed",
    "RetryPolicy",
    "RunFailed",
    "RunResult",
    "Sandbox",
    "SandboxClosed",
    "ServerFailed",
    "Unavailable",
    "UnexpectedAnswer",
]
