"""Errors of the client. Those of the server are made from its problem documents (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .results import ExecResult

COMMAND_MAY_HAVE_RUN = "The command may have been executed. It is not repeated: check its effects first."


class LeaseholdError(Exception):
    """Base of all errors.

    `code`: stable code of the problem document, or a code of the client. `status`: HTTP status, None without an answer.
    `problem`: the whole document."""

    code = "error"

    def __init__(
        self, detail: str, *, code: str = "", status: int | None = None, problem: Mapping[str, Any] | None = None
    ) -> None:
        self.detail, self.status, self.problem = detail, status, dict(problem or {})
        self.code = code or self.code
        super().__init__(f"{detail} ({self.code})")

    @property
    def field_errors(self) -> dict[str, str]:
        """Detail of each invalid field of the request, by the name of the field."""
        listed = self.problem.get("errors")
        entries = [error for error in listed if isinstance(error, dict)] if isinstance(listed, list) else []
        errors = {str(error.get("field", "")): str(error.get("detail", "")) for error in entries}
        return errors or ({str(self.problem["field"]): self.detail} if self.problem.get("field") else {})

    @property
    def retryable(self) -> bool:
        """The same call may succeed later."""
        return bool(self.problem.get("retryable", False))


class ConfigurationError(LeaseholdError):
    """The address, the key or the agent is missing."""

    code = "not_configured"


class SandboxClosed(LeaseholdError):
    """The sandbox is not open yet, or was released."""

    code = "closed"


class ConnectionFailed(LeaseholdError):
    """No complete answer. `sent`: the server may have received the request."""

    code = "connection_failed"

    def __init__(self, detail: str, *, sent: bool) -> None:
        super().__init__(detail)
        self.sent = sent

    @property
    def retryable(self) -> bool:
        return True


class UnexpectedAnswer(LeaseholdError):
    """The answer is not one of the HTTP API: it is damaged, or of a proxy, or of a server of another version."""

    code = "unexpected_answer"


class OutcomeUnknown(LeaseholdError):
    """A command may have been executed, and its result is not known. `run_id`, `outcome` and `exit_code`: None if not known."""

    code = "outcome_unknown"

    @property
    def run_id(self) -> str | None:
        return self.problem.get("run_id")

    @property
    def outcome(self) -> str | None:
        return self.problem.get("outcome")

    @property
    def exit_code(self) -> int | None:
        return self.problem.get("exit_code")


class RenewalFailed(LeaseholdError):
    """The lease could not be renewed in the background: it has ended, or the key is not accepted any more."""

    code = "renewal_failed"


class CommandFailed(LeaseholdError):
    """A command of `exec(..., check=True)` exited with a code other than 0. `result` has its output."""

    code = "command_failed"

    def __init__(self, result: ExecResult) -> None:
        reason = "timed out" if result.timed_out else "ran out of memory" if result.oom else f"exited with {result.exit_code}"
        super().__init__(f"The command {reason}: {result.stderr.strip()[-400:]}".rstrip(": "))
        self.result = result


class ApiError(LeaseholdError):
    """The server refused a request."""


class InvalidRequest(ApiError):
    """A field of the request is invalid: see `field_errors`."""


class AuthenticationFailed(ApiError):
    """The API key is missing, wrong, revoked or expired."""


class BudgetExhausted(ApiError):
    """A budget is exhausted."""


class NotAllowed(ApiError):
    """The API key may not do this."""


class NotFound(ApiError):
    """The lease, file, run or process does not exist."""


class Conflict(ApiError):
    """The state of the lease does not permit the request."""


class RunFailed(ApiError):
    """A run has ended without an exit code."""


class LeaseEnded(ApiError):
    """The lease has ended. `problem["end_reason"]` has the reason."""


class RateLimited(ApiError):
    """A limit of the key, the agent or the lease is reached."""


class Unavailable(ApiError):
    """The server, the pool or the sandbox is not available now."""


class ServerFailed(ApiError):
    """Internal error of the server."""


ERROR_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequest, 411: InvalidRequest, 413: InvalidRequest, 415: InvalidRequest, 416: InvalidRequest,
    401: AuthenticationFailed, 402: BudgetExhausted, 403: NotAllowed, 404: NotFound, 409: Conflict, 410: LeaseEnded,
    429: RateLimited, 500: ServerFailed, 502: Unavailable, 503: Unavailable, 504: Unavailable,
}  # fmt: skip
ERROR_BY_CODE: dict[str, type[LeaseholdError]] = {"outcome_unknown": OutcomeUnknown, "run_failed": RunFailed}


def build_error(status: int, body: bytes) -> LeaseholdError:
    """Return the error of a response. Without a problem document, as of a reverse proxy, its code is `http_<status>`."""
    try:
        problem = json.loads(body)
        return build_problem_error({**problem, "status": status})
    except (ValueError, TypeError, KeyError, RecursionError):
        return ERROR_BY_STATUS.get(status, ApiError)(
            f"The server answered with status {status}.", code=f"http_{status}", status=status
        )


def build_problem_error(problem: Mapping[str, Any]) -> LeaseholdError:
    """Return the error of a problem document."""
    status, code = int(problem["status"]), str(problem["code"])
    error_class = ERROR_BY_CODE.get(code) or ERROR_BY_STATUS.get(status, ApiError)
    return error_class(str(problem["detail"]), code=code, status=status, problem=problem)
