"""What can go wrong with sandboxes. The docstring of a class is its message unless a better one is given."""

from typing import Any


class SandboxError(Exception):
    """The sandbox could not do that."""

    code = "sandbox_error"
    retry_after: int | None = None  # seconds

    def __init__(self, detail: str = "", **extra: Any) -> None:
        self.detail = detail or (self.__doc__ or "").split("\n")[0]
        self.extra = extra
        super().__init__(self.detail)


class IllegalTransition(SandboxError):
    """That state does not follow from the present one."""

    code = "illegal_transition"


class SandboxBusy(SandboxError):
    """Somebody else is working on this sandbox right now. Try again in a moment."""

    code = "busy"
    retry_after = 2


class SandboxNotHeld(SandboxError):
    """The sandbox is not held by this lease any more."""

    code = "not_held"


class CapacityExhausted(SandboxError):
    """Every place in the pool is taken and none can be freed now."""

    code = "capacity_exhausted"
    retry_after = 10


class SandboxNotReady(SandboxError):
    """The sandbox could not be made ready. It was given up; the next use starts a new one."""

    code = "sandbox_not_ready"
    retry_after = 5


class SandboxLost(SandboxError):
    """The provider does not have this sandbox any more, and what was in it since it was last stored is gone."""

    code = "sandbox_lost"


class ProviderCallFailed(SandboxError):
    """The provider did not answer, so it is not known what happened. The Run has what is known."""

    code = "provider_unavailable"
    retry_after = 5


class QuotaExceeded(SandboxError):
    """The agent has as many sandboxes in this pool as it may have."""

    code = "quota_exceeded"
    retry_after = 30


class PoolDraining(SandboxError):
    """The pool takes nothing new: an operator is draining it."""

    code = "pool_draining"
    retry_after = 60


class WorkspaceFull(SandboxError):
    """The workspace is larger than its pool allows. Delete files through the files API, then try again."""

    code = "workspace_full"


class DataFull(SandboxError):
    """/data holds more than is kept for one agent. Remove some of it, then try again."""

    code = "data_full"


class StoreUnavailable(SandboxError):
    """The store did not answer, so nothing was run: the state that belongs there could not be brought."""

    code = "store_unavailable"
    retry_after = 5


class SnapshotNotFound(SandboxError):
    """There is no such snapshot, or what it stored is gone."""

    code = "no_snapshot"


class TooManyProcesses(SandboxError):
    """As many processes run in this sandbox as may."""

    code = "too_many_processes"


class ProcessOutputGone(SandboxError):
    """What it printed is gone: its sandbox sleeps, or is gone."""

    code = "output_gone"


class SigningKeyNotFound(SandboxError):
    """The agent has no signing key. An operator can create one."""

    code = "no_signing_key"


class SigningKeyRevoked(SandboxError):
    """The agent's signing key was revoked. An operator can create another one."""

    code = "signing_key_revoked"


class SigningKeyExists(SandboxError):
    """The agent has a signing key. Rotate it to have another."""

    code = "signing_key_exists"


class SigningKeyDecryptionFailed(SandboxError):
    """The agent's signing key cannot be decrypted: LEASEHOLD_IDENTITY_KEYS lacks the key that it was encrypted under."""

    code = "signing_key_unopened"


class WebhookTestFailed(SandboxError):
    """The receiver did not take it."""

    code = "not_delivered"
