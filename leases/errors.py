"""Errors of the lease app. The docstring of a class is its default message."""

from sandboxes.errors import SandboxError


class LeaseError(SandboxError):
    """The lease operation failed."""

    code = "lease_error"


class InvalidRequest(LeaseError):
    """The request is not valid."""

    code = "invalid"

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail, field=field)


class InvalidPack(LeaseError):
    """The environment pack is not valid."""

    code = "invalid_pack"

    def __init__(self, file: str, detail: str) -> None:
        super().__init__(f"{file}: {detail}", field=file)


class NotAllowed(LeaseError):
    """This API key may not use the environment type or pool."""

    code = "forbidden"


class HostNotAllowed(LeaseError):
    """The Host header names no host of this server. ALLOWED_HOSTS lists them."""

    code = "host_not_allowed"


class OriginNotAllowed(LeaseError):
    """Browsers may not send this request from that origin. CSRF_TRUSTED_ORIGINS lists further origins."""

    code = "origin_not_allowed"


class McpNotInstalled(LeaseError):
    """This server was installed without the extra `mcp`: pip install 'leasehold[mcp]'."""

    code = "mcp_not_installed"


class LeaseEnded(LeaseError):
    """The lease has ended; acquire a new one."""

    code = "lease_ended"


class Conflict(LeaseError):
    """The request conflicts with an existing resource."""

    code = "conflict"


class RunFailed(Conflict):
    """The run has ended without an exit code. Its note has the details."""

    code = "run_failed"


class AgentRunNotFound(LeaseError):
    """The lease has no such agent run."""

    code = "agent_run_not_found"


class AgentRunClosed(LeaseError):
    """The command did not begin in time, so the agent run was closed as failed. Nothing was executed; start another one."""

    code = "agent_run_closed"
    retry_after = 5


class CatalogAgentNotFound(LeaseError):
    """The catalog has no such agent."""

    code = "catalog_agent_not_found"


class ArtifactNotFound(LeaseError):
    """The lease has no such artifact."""

    code = "artifact_not_found"


class QueuedRunNotFound(LeaseError):
    """There is no such queued run."""

    code = "queued_run_not_found"


class EnvironmentNotFound(LeaseError):
    """There is no such environment, or the agent may not enter it. An operator can add the agent to its participants."""

    code = "environment_not_found"


class EnvironmentEnded(LeaseError):
    """The environment has ended. An operator can open it again."""

    code = "environment_ended"


class RepositoryNotFound(LeaseError):
    """There is no such repository."""

    code = "repository_not_found"


class RepositoryUnavailable(LeaseError):
    """The repository cannot be read or written."""

    code = "repository_unavailable"


class CodingTaskNotFound(LeaseError):
    """The environment has no coding task."""

    code = "coding_task_not_found"


class CodingTaskEnded(LeaseError):
    """The coding task has ended."""

    code = "coding_task_ended"


class CodingTaskBusy(LeaseError):
    """A submission of this coding task is in progress. Try again in a few seconds."""

    code = "coding_task_busy"
    retry_after = 5


class CheckoutFailed(LeaseError):
    """Git in the sandbox could not check out the repository."""

    code = "checkout_failed"


class InvalidSignature(LeaseError):
    """The signature of the event is not valid."""

    code = "invalid_signature"


class NoActiveLease(LeaseError):
    """The agent has no active lease in this environment. Join the environment first."""

    code = "no_active_lease"


class QueuedRunInterrupted(LeaseError):
    """The queued run was interrupted, or another runner has taken it over."""

    code = "queued_run_interrupted"


class StopIncomplete(LeaseError):
    """Not everything was stopped. Stop again to try the rest."""

    code = "stop_incomplete"
    retry_after = 5
    has_changed = True


class EventNotFound(LeaseError):
    """There is no event of this id any more. Read the current state, and connect without Last-Event-ID."""

    code = "event_not_found"


class TooManyQueuedRuns(LeaseError):
    """The queue has reached its limit of pending runs. Try again later."""

    code = "too_many_queued_runs"
    retry_after = 5


class StreamServerUnavailable(LeaseError):
    """The stream server of this host is not running. Terminals and previews need it."""

    code = "stream_server_unavailable"
    retry_after = 5


class PreviewsForbidden(LeaseError):
    """The policy of the lease's environment type does not allow previews."""

    code = "previews_forbidden"


class TerminalNotFound(LeaseError):
    """The lease has no such terminal."""

    code = "terminal_not_found"


class ShellNotFound(LeaseError):
    """The lease has no shell of this name."""

    code = "shell_not_found"


class ShellExists(LeaseError):
    """The lease has a shell of this name."""

    code = "shell_exists"


class TooManyShells(LeaseError):
    """The lease has reached its limit of shells. Delete one, then try again."""

    code = "too_many_shells"


class ShellDecryptionFailed(LeaseError):
    """No configured key decrypts the variables of this shell. Delete the shell, and create it again."""

    code = "shell_decryption_failed"


class TurnInProgress(LeaseError):
    """This turn is in progress. Try again in a few seconds."""

    code = "busy"
    retry_after = 2


class RateLimited(LeaseError):
    """Rate limit of new leases exceeded. Try again later."""

    code = "rate_limited"


class KeyExpired(LeaseError):
    """The API key has expired."""

    code = "key_expired"


class GrantEnded(LeaseError):
    """The API key or user that this was opened with was revoked, has expired, or may not do this any more."""

    code = "grant_ended"


class SignedUrlInvalid(LeaseError):
    """The signed URL is not valid, or is for another method."""

    code = "signed_url_invalid"


class SignedUrlExpired(LeaseError):
    """The signed URL has expired."""

    code = "signed_url_expired"


class InsufficientScope(LeaseError):
    """The API key does not have the scope of this request."""

    code = "insufficient_scope"


class RequestTooLarge(LeaseError):
    """The request body exceeds its size limit."""

    code = "too_large"


class LengthRequired(LeaseError):
    """A Content-Length header is required."""

    code = "length_required"


class UnsupportedEncoding(LeaseError):
    """A body with this Content-Encoding is not decoded."""

    code = "unsupported_media_type"

    def __init__(self, accepted: str = "identity") -> None:
        super().__init__(f"A body with this Content-Encoding is not decoded. Accepted: {accepted}.", field="Content-Encoding")
        self.headers = {"Accept-Encoding": accepted}  # RFC 9110, 15.5.16


class RangeNotSatisfiable(LeaseError):
    """The requested range is outside the file."""

    code = "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"The requested range is outside the file, which has {size} bytes.", field="Range")
        self.headers = {"Content-Range": f"bytes */{size}"}
