"""Translation of the errors of Runloop's client."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from runloop_api_client import APIConnectionError, APIStatusError, APITimeoutError, RunloopError

from sandboxes.providers.answer_guard import translate_answer
from sandboxes.providers.errors import FailureCause, Unavailable
from sandboxes.providers.remote.errors import ErrorForm, raise_for_answer, raise_for_transport
from sandboxes.redaction.texts import quote_answer

ERRORS = ErrorForm(absence=re.compile(r"(?i)\b(?:devbox|blueprint|network policy)\b.*\bnot found\b"))


@contextmanager
def translate_errors(subject: str) -> Iterator[None]:
    """Raise the port's errors for those of the client, about `subject`. The client accepts answers of any form."""
    with translate_answer(subject):
        try:
            yield
        except APIStatusError as error:
            raise_for_answer(ERRORS, subject, error.status_code, error.response.text, error.response.headers)
        except APIConnectionError as error:
            raise_for_transport(subject, error, is_timeout=isinstance(error, APITimeoutError))
        except RunloopError as error:
            raise Unavailable(f"{subject}: {quote_answer(error)}", cause=FailureCause.ENGINE_ERROR) from error
