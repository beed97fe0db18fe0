"""Translation of the errors of Runloop's client."""

from collections.abc import Iterator
from contextlib import contextmanager

from runloop_api_client import APIConnectionError, APIStatusError, APITimeoutError, RunloopError

from sandboxes.providers.errors import FailureCause, Unavailable
from sandboxes.providers.remote.errors import raise_for_status, raise_for_transport
from sandboxes.redaction.texts import quote_answer


@contextmanager
def translate_errors(subject: str) -> Iterator[None]:
    """Raise the port's errors for those of the client, about `subject`."""
    try:
        yield
    except APIStatusError as error:
        raise_for_status(error.status_code, subject, str(error.message))
    except APIConnectionError as error:
        raise_for_transport(subject, error, is_timeout=isinstance(error, APITimeoutError))
    except (RunloopError, ValueError) as error:
        raise Unavailable(f"{subject}: {quote_answer(error)}", cause=FailureCause.ENGINE_ERROR) from error
