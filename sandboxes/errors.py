"""Errors of the sandboxes app. The first line of a class's docstring is its message, unless the raiser gives another.

`code` identifies the error in responses. `retry_after` is in seconds; None: a retry of the same request fails again."""

from typing import Any


class SandboxError(Exception):
    """The operation on the sandbox failed."""

    code = "sandbox_error"
    retry_after: int | None = None  # seconds
    provider = ""  # of the sandbox that failed
    has_changed = False  # whether a part of the operation was carried out

    def __init__(self, detail: str = "", **extra: Any) -> None:
        self.detail = detail or (self.__doc__ or "").split("\n")[0]
        self.extra = extra
        super().__init__(self.detail)


class IllegalTransition(SandboxError):
    """The sandbox cannot change to that state from its current state."""

    code = "illegal_transition"


class SandboxBusy(SandboxError):
    """Another operation is changing this sandbox. Try again in a moment."""

    code = "busy"
    retry_after = 2


class SandboxNotHeld(SandboxError):
    """This lease no longer holds the sandbox."""

    code = "not_held"


class SandboxAsleep(SandboxError):
    """The sandbox is asleep. It wakes with the next command of its lease. A visitor of a preview does not wake it."""

    code = "sandbox_asleep"
    retry_after = 10


class NoGateway(SandboxError):
    """Remote sandboxes have no models: LEASEHOLD_GATEWAY_URL is not set. Commands and files work."""

    code = "no_gateway"


class SandboxNotListed(SandboxError):
    """The engine lists no such sandbox."""

    code = "not_listed"


class SandboxHasOwner(SandboxError):
    """A row of this installation names the sandbox. End its lease, or destroy it on its own page."""

    code = "has_owner"


class SandboxTooYoung(SandboxError):
    """The sandbox is younger than LEASEHOLD_ORPHAN_GRACE: it may be one that is just being started."""

    code = "within_grace"
    retry_after = 60


class SandboxNotAdoptable(SandboxError):
    """The sandbox cannot be adopted."""

    code = "not_adoptable"


class InstallationMismatch(SandboxError):
    """The database does not match its store or state directory, so nothing is destroyed. See manage.py installation."""

    code = "installation_mismatch"


class WrongHost(SandboxError):
    """The sandbox is on a host that this server does not reach. Send the request to a server of that host."""

    code = "wrong_host"
    retry_after = 5


class HostLost(SandboxError):
    """The host of this server was declared lost and is not cleaned up yet."""

    code = "host_lost"
    retry_after = 60


class NotIsolated(SandboxError):
    """Sandboxes of this provider are not shown to be sealed, so none is started. The page of the host has the reason."""

    code = "not_isolated"
    retry_after = 60


class ClaimLost(SandboxError):
    """The operation made no progress for too long, and was given up. Nothing of it was recorded. Try again."""

    code = "no_progress"
    retry_after = 5


class CapacityExhausted(SandboxError):
    """All places in the pool are taken and none can be freed now."""

    code = "capacity_exhausted"
    retry_after = 10
    pool_id: int | None = None  # of the full pool, if the request has several pools


class CapacityPending(SandboxError):
    """The cluster has no room for the sandbox yet. It keeps its place, and starts as soon as there is room."""

    code = "capacity_pending"
    retry_after = 15


class StartsPaused(SandboxError):
    """The provider starts no sandboxes for now, after failed starts in a row."""

    code = "starts_paused"
    retry_after = 30
    cause: Any = None  # FailureCause of the last failed start


class TooManyStarts(SandboxError):
    """The pool starts as many sandboxes as it may at once. Try again in a few seconds."""

    code = "too_many_starts"
    retry_after = 5


class NoPoolAvailable(SandboxError):
    """None of the pools of this environment type can start a sandbox now."""

    code = "no_pool_available"
    retry_after = 10


class SandboxNotReady(SandboxError):
    """The sandbox could not be started and is destroyed. The next use starts a new one."""

    code = "sandbox_not_ready"
    retry_after = 5


class ImageMissing(SandboxNotReady):
    """The image of the sandbox is missing, or does not start. An operator has to provide it."""

    code = "image_missing"
    retry_after = 300  # of queued runs; other requests are not to be repeated (sandboxes.failures.needs_operator)


class EngineDiskFull(SandboxError):
    """The disk of the engine that runs sandboxes is full, so none is started and no file is written."""

    code = "disk_full"
    retry_after = 60


class SandboxLost(SandboxError):
    """The provider has lost this sandbox, with all changes since its state was last stored."""

    code = "sandbox_lost"


class ProviderCallFailed(SandboxError):
    """The provider did not respond, so the outcome is unknown. The note of the run has the details."""

    code = "provider_unavailable"
    retry_after = 5


class SandboxDiskFull(ProviderCallFailed):
    """The disk of the sandbox or of its engine is full. Nothing was written. Delete files, or try again later."""

    code = "disk_full"
    retry_after = 60


class OutcomeUnknown(SandboxError):
    """The operation has started, and its result is not recorded. Check its effects before you repeat it."""

    code = "outcome_unknown"


class ResultPending(OutcomeUnknown):
    """The operation has ended, and the database did not accept its result. It is recorded once the database responds."""


class RunExists(SandboxError):
    """A run with this run_id exists. Read it if it is yours, or choose another random UUID."""

    code = "run_exists"


class QuotaExceeded(SandboxError):
    """The agent has reached its quota of sandboxes in this pool."""

    code = "quota_exceeded"
    retry_after = 30


class TooManyRuns(SandboxError):
    """The lease or its agent has reached its limit of open runs. Nothing was run. Try again when a run has ended."""

    code = "too_many_runs"
    retry_after = 5


class TooManyStreams(SandboxError):
    """The lease or the web process has reached its limit of open streams. Close one, or try again later."""

    code = "too_many_streams"
    retry_after = 5


class TooManyLongCalls(SandboxError):
    """The web process has reached its limit of calls that wait for sandboxes. Nothing was run. Try again in a few seconds."""

    code = "server_busy"
    retry_after = 5


class TooManyAdmissionRequests(SandboxError):
    """The agent has reached its limit of requests that wait for a place in this pool. Try again when one got a place."""

    code = "too_many_waiting"
    retry_after = 10


class PoolDraining(SandboxError):
    """The pool accepts no new sandboxes: an operator is draining it."""

    code = "pool_draining"
    retry_after = 60


class WorkspaceFull(SandboxError):
    """The workspace is over its pool's limit. Delete files through the files API, then try again."""

    code = "workspace_full"


class DataFull(SandboxError):
    """/data is over the limit for one agent. Delete files in /data, then try again."""

    code = "data_full"


class StoreUnavailable(SandboxError):
    """The store did not respond, so the state could not be read and nothing was run."""

    code = "store_unavailable"
    retry_after = 5


class SnapshotNotFound(SandboxError):
    """There is no such snapshot, or its stored objects are gone."""

    code = "no_snapshot"


class ProcessEnded(SandboxError):
    """The background process has ended."""

    code = "process_ended"


class TooManyProcesses(SandboxError):
    """The sandbox has reached its limit of processes. Stop one, then try again."""

    code = "too_many_processes"


class ProcessOutputGone(SandboxError):
    """The output of the process is gone, because its sandbox is cold or destroyed."""

    code = "output_gone"


class SigningKeyNotFound(SandboxError):
    """The agent has no signing key. An operator can create one."""

    code = "no_signing_key"


class SigningKeyRevoked(SandboxError):
    """The agent's signing key was revoked. An operator can create a new one."""

    code = "signing_key_revoked"


class SigningKeyExists(SandboxError):
    """The agent has a signing key already. Rotate it to replace it."""

    code = "signing_key_exists"


class SigningKeyDecryptionFailed(SandboxError):
    """The agent's signing key cannot be decrypted: LEASEHOLD_IDENTITY_KEYS lacks the key that encrypted it."""

    code = "signing_key_unopened"


class WebhookTestFailed(SandboxError):
    """The receiver did not accept the test event."""

    code = "not_delivered"


class InvalidTemplate(SandboxError):
    """The specification of the image template is not valid."""

    code = "invalid_template"

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail, field=field)


class TemplatesNotSupported(SandboxError):
    """The provider of this server builds no images."""

    code = "templates_not_supported"


class TemplateNotFound(SandboxError):
    """There is no such image template."""

    code = "no_such_template"


class TemplateBusy(SandboxError):
    """The image template is being built or removed. Try again when this has ended."""

    code = "template_busy"
    retry_after = 10


class TemplateInUse(SandboxError):
    """A pool or a sandbox uses the image of this template."""

    code = "template_in_use"
