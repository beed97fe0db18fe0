"""Provider and cause of an error, found along the chain of the errors that it was raised from."""

from collections.abc import Iterator

from django.db import InterfaceError, OperationalError

from sandboxes.agent.addresses import AgentOutdated, NotConnected
from sandboxes.agent.client import ConnectionLost
from sandboxes.agent.protocol import ProtocolError
from sandboxes.agent.runs import OutcomeUnknown
from sandboxes.errors import CapacityExhausted, NoPoolAvailable, SandboxError
from sandboxes.providers.errors import FailureCause, ProviderError, Unavailable
from sandboxes.storage.base import StoreError

CODED_ERRORS = (SandboxError, ProviderError, StoreError)
OPERATOR_CAUSES = (FailureCause.CREDENTIALS_REFUSED, FailureCause.IMAGE_UNUSABLE, FailureCause.AGENT_OUTDATED)
CAUSE_BY_ERROR: dict[type[Exception], str] = {  # of errors that do not state a FailureCause
    AgentOutdated: FailureCause.AGENT_OUTDATED.value,
    NotConnected: FailureCause.AGENT_NOT_CONNECTED.value,
    ConnectionLost: FailureCause.AGENT_NOT_CONNECTED.value,
    ProtocolError: FailureCause.AGENT_FAILED.value,
    OutcomeUnknown: FailureCause.AGENT_FAILED.value,
    OperationalError: "database_unavailable",
    InterfaceError: "database_unavailable",
    TimeoutError: FailureCause.TIMEOUT.value,
}


def find_provider(error: BaseException) -> str:
    """Return the provider of the sandbox whose operation failed, or ""."""
    return next((name for each in _iterate_causes(error) if (name := getattr(each, "provider", ""))), "")


def find_cause(error: BaseException) -> str:
    """Return the code of the failure behind an error: the FailureCause if one is stated, else the code of the innermost cause.

    Return "" if the error has no known cause. A code names no host, path or secret."""
    chain = [*_iterate_causes(error)]
    for each in chain:
        if isinstance(stated := getattr(each, "cause", None), FailureCause):
            return stated.value
    for each in chain:
        for error_class, code in CAUSE_BY_ERROR.items():
            if isinstance(each, error_class):
                return code
    codes = [each.code for each in chain[1:] if isinstance(each, CODED_ERRORS)]
    return codes[-1] if codes else ""


def find_retry_after(error: BaseException) -> int | None:
    """Return the seconds after which the failed request may be repeated, at least those that the engine or vendor stated.

    None: it is not to be repeated, or the error states no time. An error that excludes a repetition stays so."""
    own = getattr(error, "retry_after", None)
    stated = [each.retry_after for each in _iterate_causes(error) if isinstance(each, Unavailable) and each.retry_after]
    return max([own or 0, *stated]) if stated and (own or isinstance(error, Unavailable)) else own


def needs_operator(error: BaseException) -> bool:
    """Return whether a repetition fails until an operator acts: the API key is refused, the image is missing, or the sandbox
    has to be put to sleep, because its agent is of another version.

    An error of several pools has the cause of the last one: another pool may get a place meanwhile."""
    return not isinstance(error, NoPoolAvailable | CapacityExhausted) and find_cause(error) in OPERATOR_CAUSES


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
