"""Translation of the errors of vendors' APIs."""

from typing import NoReturn

from sandboxes.providers.errors import FailureCause, Missing, Rejected, Unavailable
from sandboxes.redaction.texts import quote_answer


class Conflict(Unavailable):
    """The name is taken, or the sandbox is in a state that does not permit the operation (HTTP 409)."""

    code = "provider_conflict"


def raise_for_status(status: int, subject: str, message: str) -> NoReturn:
    """Raise the error of an HTTP status above 399 that a vendor returned about `subject`."""
    text = f"{subject}: the vendor answered {status}: {quote_answer(message)}"
    if status in (404, 410):
        raise Missing(text)
    if status == 409:
        raise Conflict(text)
    if status == 429:
        raise Unavailable(text, cause=FailureCause.RATE_LIMITED)
    if status in (401, 403):
        raise Unavailable(text, cause=FailureCause.CREDENTIALS_REFUSED)
    if status >= 500 or status == 408:
        raise Unavailable(text, cause=FailureCause.ENGINE_ERROR)
    raise Rejected(text)


def raise_for_transport(subject: str, error: Exception, *, is_timeout: bool = False) -> NoReturn:
    """Raise Unavailable for a connection that failed, was cut or timed out. The request may have been carried out."""
    cause = FailureCause.TIMEOUT if is_timeout else FailureCause.ENGINE_UNREACHABLE
    raise Unavailable(
        f"{subject}: no response of the vendor: {type(error).__name__}: {quote_answer(error)}", cause=cause
    ) from error
