"""Translation of answers of the API server to the errors of the provider port."""

import json
from collections.abc import Mapping
from urllib.parse import unquote

from sandboxes.providers.errors import FailureCause, Missing, NoCapacity, ProviderError, Rejected, Unavailable
from sandboxes.providers.remote.errors import read_retry_after
from sandboxes.redaction.texts import quote_answer


class Conflict(Unavailable):
    """409: the name is in use, or a precondition does not hold."""

    code = "provider_conflict"


class Expired(Unavailable):
    """410: the continuation of a list is not available any more."""

    code = "provider_list_expired"


class NotFound(Unavailable):
    """404 that does not say that the requested object is absent: of a proxy, of an unknown path, or about the namespace."""

    code = "provider_not_found"


def build_error(status: int, content: bytes, subject: str, headers: Mapping[str, str]) -> ProviderError:
    """Build the error of an answer that is no success about `subject`, the path of the request.

    Missing only for the API server's own document about the object of the path."""
    message = _read_message(content)
    text = f"{subject}: the API server answered {status}: {quote_answer(message)}"
    if status == 404:
        return Missing(text) if _states_absence(content, subject) else NotFound(text, cause=FailureCause.ENGINE_ERROR)
    if status == 409:
        return Conflict(text)
    if status == 410:
        return Expired(text)
    if status == 403 and "exceeded quota" in message:
        return NoCapacity(text, cause=FailureCause.NO_CAPACITY)
    if status == 401:
        return Unavailable(text, cause=FailureCause.CREDENTIALS_REFUSED)
    if status == 429:
        return _with_time(Unavailable(text, cause=FailureCause.RATE_LIMITED), headers)
    if not 400 <= status < 500 or status == 408:
        return _with_time(Unavailable(text, cause=FailureCause.ENGINE_ERROR), headers)
    return Rejected(text, cause=FailureCause.CREDENTIALS_REFUSED if status == 403 else None)


def _read_message(content: bytes) -> str:
    """Return the message of a Status object, or the content as text."""
    try:
        status = json.loads(content)
        return str(status["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _states_absence(content: bytes, path: str) -> bool:
    """Return whether a Status object says that the object of a path does not exist.

    The path ends with the resource and the name of the object, or with `exec` after them."""
    try:
        status = json.loads(content)
        found = (status["kind"], status["reason"], status["details"]["kind"], status["details"]["name"])
    except (ValueError, KeyError, TypeError):
        return False
    parts = [unquote(part) for part in path.removesuffix("/exec").split("/")]
    return found == ("Status", "NotFound", *parts[-2:])


def _with_time(error: Unavailable, headers: Mapping[str, str]) -> Unavailable:
    error.retry_after = read_retry_after(headers.get("Retry-After", ""))
    return error
