"""Errors of answers of vendors' APIs: documents of the vendor, and answers of other servers."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from modal.exception import ResourceExhaustedError

from sandboxes.providers.daytona import provider as daytona
from sandboxes.providers.errors import FailureCause, NoCapacity, ProviderError, Rejected, Unavailable
from sandboxes.providers.langsmith import provider as langsmith
from sandboxes.providers.modal import provider as modal
from sandboxes.providers.remote.errors import (
    MAX_RETRY_AFTER_SECONDS,
    Conflict,
    ErrorForm,
    NotFound,
    raise_for_answer,
    read_retry_after,
)
from sandboxes.providers.runloop.errors import ERRORS as RUNLOOP

pytestmark = pytest.mark.smoke
PAGE = "<html>Sandbox box not found</html>"
DAYTONA, LANGSMITH = daytona.ERRORS, langsmith.ERRORS


def read_error(form: ErrorForm, status: int, body: Any, **headers: str) -> ProviderError:
    with pytest.raises(ProviderError) as raised:
        raise_for_answer(form, "box", status, body if isinstance(body, str) else json.dumps(body), headers)
    return raised.value


@pytest.mark.parametrize(
    ("form", "body", "kind"),
    [
        (DAYTONA, {"message": "Sandbox with ID or name box not found", "statusCode": 404}, NotFound),
        (DAYTONA, {"message": "Cannot GET /api/sandbox/box", "error": "Not Found", "statusCode": 404}, Unavailable),
        (DAYTONA, {"error": "Sandbox box not found"}, Unavailable),
        (LANGSMITH, {"detail": {"error": "ResourceNotFound", "message": "Sandbox 'box' not found"}}, NotFound),
        (LANGSMITH, {"detail": "Not Found"}, Unavailable),
        (LANGSMITH, {"message": "Sandbox 'box' not found"}, Unavailable),
        (RUNLOOP, {"message": "Devbox dbx_1 not found"}, NotFound),
        (RUNLOOP, {"message": "no Route matched with those values"}, Unavailable),
        (RUNLOOP, ["Devbox dbx_1 not found"], Unavailable),
        (RUNLOOP, "", Unavailable),
        (RUNLOOP, PAGE, Unavailable),
    ],
)
def test_404_is_a_document_of_absence_only_in_the_form_of_the_vendor(
    form: ErrorForm, body: Any, kind: type[ProviderError]
) -> None:
    assert type(read_error(form, 404, body)) is kind


@pytest.mark.parametrize(
    ("status", "message", "kind", "cause"),
    [
        (302, "moved", Unavailable, FailureCause.ENGINE_ERROR),
        (400, "invalid name", Rejected, None),
        (400, "Total disk limit exceeded", NoCapacity, FailureCause.NO_CAPACITY),
        (401, "Unauthorized", Unavailable, FailureCause.CREDENTIALS_REFUSED),
        (403, "Forbidden resource", Unavailable, FailureCause.CREDENTIALS_REFUSED),
        (403, "Total CPU limit exceeded. Maximum allowed: 10.", NoCapacity, FailureCause.NO_CAPACITY),
        (409, "exists", Conflict, None),
        (410, "Sandbox box not found", Unavailable, FailureCause.ENGINE_ERROR),
        (429, "API rate limit exceeded", Unavailable, FailureCause.RATE_LIMITED),
        (429, "Sandbox limit reached", NoCapacity, FailureCause.NO_CAPACITY),
        (503, "later", Unavailable, FailureCause.ENGINE_ERROR),
    ],
)
def test_status_of_a_document_decides_the_error(
    status: int, message: str, kind: type[ProviderError], cause: FailureCause | None
) -> None:
    error = read_error(DAYTONA, status, {"message": message})
    assert (type(error), error.cause) == (kind, cause)


@pytest.mark.parametrize("status", [200, 302, 400, 403, 404, 409, 410, 418, 429, 500, 502])
def test_answer_without_a_document_is_unavailable_whatever_its_status(status: int) -> None:
    error = read_error(DAYTONA, status, PAGE, **{"Retry-After": "7"})
    assert type(error) is Unavailable and error.retry_after == 7
    assert error.cause == (FailureCause.RATE_LIMITED if status == 429 else FailureCause.ENGINE_ERROR)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120), ("0", 1), ("", None), ("soon", None), ("-5", None), ("9" * 40, MAX_RETRY_AFTER_SECONDS),
        ("Sat, 21 Nov 2026 12:01:30 GMT", 90), ("Sat, 21 Nov 2020 12:00:00 GMT", 1),
    ],
)  # fmt: skip
def test_time_to_retry_after_is_a_number_or_a_date_within_bounds(value: str, seconds: int | None) -> None:
    assert read_retry_after(value, now=datetime(2026, 11, 21, 12, tzinfo=UTC)) == seconds


@pytest.mark.parametrize(
    ("message", "cause"),
    [("Sandbox limit reached", FailureCause.NO_CAPACITY), ("API rate limit exceeded", FailureCause.RATE_LIMITED)],
)
def test_exhausted_resource_of_modal_is_a_quota_or_a_rate(message: str, cause: FailureCause) -> None:
    with pytest.raises(Unavailable) as raised, modal._translate_errors("box"):
        raise ResourceExhaustedError(message)
    assert (raised.value.cause, isinstance(raised.value, NoCapacity)) == (cause, cause == FailureCause.NO_CAPACITY)
