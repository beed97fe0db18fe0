"""Errors of a provider's verbs."""

from enum import StrEnum

from sandboxes.redaction.texts import quote_answer, redact

DISK_RETRY_SECONDS = 60


class FailureCause(StrEnum):
    """Cause of a provider error, for programs."""

    ENGINE_UNREACHABLE = "engine_unreachable"  # no connection to the engine, or the connection was lost
    ENGINE_ERROR = "engine_error"  # the engine answered with an error of its own
    ENGINE_REPLACED = "engine_replaced"  # the engine is not the one that started the sandbox
    AGENT_NOT_CONNECTED = "agent_not_connected"  # no agent of the sandbox is connected, or its connection was lost
    AGENT_OUTDATED = "agent_outdated"  # the agent in the sandbox is of a version that this one does not speak with
    AGENT_FAILED = "agent_failed"  # the agent in the sandbox violated its protocol, or has lost a result
    RATE_LIMITED = "rate_limited"  # the vendor of a remote provider refuses more requests for now
    CREDENTIALS_REFUSED = "credentials_refused"  # the vendor of a remote provider does not accept the API key
    NOT_SUPPORTED = "not_supported"  # by the engine
    NOT_RUNNING = "sandbox_not_running"
    TIMEOUT = "timeout"
    NO_CAPACITY = "no_capacity"  # the engine has no room for a further sandbox
    DISK_FULL = "disk_full"  # of the sandbox or of the engine
    # Why an engine ended a sandbox, with Missing.
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed the whole sandbox
    EVICTED = "evicted"  # for lack of memory or disk, of the node or of the sandbox
    PREEMPTED = "preempted"  # for a sandbox or workload of a higher priority
    NODE_DRAINED = "node_drained"  # by an operator, an autoscaler or a shutdown of the node
    NODE_LOST = "node_lost"  # the node does not respond, or was removed
    IMAGE_UNUSABLE = "image_unusable"  # it cannot be fetched or started
    LIFETIME_ENDED = "lifetime_ended"  # the fixed age at which the engine ends every sandbox
    AGENT_ENDED = "agent_ended"  # process 1 of the sandbox has exited
    REMOVED = "removed"  # by someone else, or for a reason of which no trace is left
    REPLACED = "replaced"  # another sandbox has the name


class ProviderError(Exception):
    """The provider did not perform the operation. sandboxes.hosts.bound_provider sets `provider`, its name.

    Text of an engine or vendor in the message is quoted (sandboxes.redaction.texts), so that agents do not get it."""

    code = "provider_error"

    def __init__(self, *args: object, cause: FailureCause | None = None, provider: str = "") -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))
        self.cause, self.provider = cause, provider
        self.retry_after: int | None = None  # seconds, as the engine stated them


class Unavailable(ProviderError):
    """The provider is unavailable. The operation may have been performed; repeat it later."""

    code = "provider_unavailable"


class SandboxUnreadable(Unavailable):
    """The sandbox does not deliver its files, or delivers an invalid answer, although its engine responds.

    Only the sandbox can be the cause, or a machine that is too slow for it: neither the engine nor the store has failed."""

    code = "sandbox_unreadable"


class StartKilled(Unavailable):
    """The start of a background process was killed. The program may have started, and was then killed, too."""

    code = "start_killed"


class Stopped(Unavailable):
    """The sandbox stopped or restarted during the operation. Its files are kept, and the next use starts it."""

    code = "sandbox_stopped"

    def __init__(self, *args: object, cause: FailureCause | None = FailureCause.NOT_RUNNING, provider: str = "") -> None:
        super().__init__(*args, cause=cause, provider=provider)


class NoCapacity(Unavailable):
    """The engine has no room for the sandbox and does not get any, or its quota is used up."""

    code = "no_capacity"


class OutOfSpace(Unavailable):
    """The disk of the sandbox or of its engine is full. Nothing was written."""

    code = "disk_full"

    def __init__(self, reason: str, *, provider: str = "") -> None:
        """`reason` is the text of the engine or of the sandbox, which may name directories of the host."""
        text = f"The disk of the sandbox or of its engine is full. Nothing was written. {quote_answer(reason)}"
        super().__init__(text, cause=FailureCause.DISK_FULL, provider=provider)
        self.retry_after = DISK_RETRY_SECONDS


class CapacityPending(Unavailable):
    """The engine has accepted the sandbox, and starts it as soon as it has room. `wait_ready` may be called again."""

    code = "capacity_pending"


class Rejected(ProviderError):
    """The provider rejects the request. Repeating it does not help."""

    code = "provider_rejected"


class Missing(ProviderError):
    """The sandbox does not exist."""

    code = "sandbox_missing"


class NoSuchFile(ProviderError):
    """The file does not exist in the sandbox."""

    code = "file_not_found"


class BadPath(Rejected):
    """The path leaves its root directory, contains a symbolic link, or is not a regular file."""

    code = "bad_path"


class FileExists(Rejected):
    """The target of the move exists."""

    code = "file_exists"


class TooLarge(Rejected):
    """The content exceeds the given limit."""

    code = "file_too_large"


class BuildCommandFailed(Rejected):
    """A command of the image's specification exited with an error."""

    code = "build_command_failed"


class ImageInUse(Rejected):
    """A container uses the image."""

    code = "image_in_use"
