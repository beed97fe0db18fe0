"""What can go wrong with leases. The docstring of a class is its message unless a better one is given."""

from sandboxes.errors import SandboxError


class LeaseError(SandboxError):
    """The lease could not do that."""

    code = "lease_error"


class InvalidRequest(LeaseError):
    """The request is not valid."""

    code = "invalid"

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail, field=field)


class LeaseEnded(LeaseError):
    """The lease has ended; acquire a new one."""

    code = "lease_ended"


class Conflict(LeaseError):
    """It contradicts what is already there."""

    code = "conflict"


class TurnInProgress(LeaseError):
    """This turn is being played right now. Ask again in a moment."""

    code = "busy"
    retry_after = 2


class RateLimited(LeaseError):
    """Too many new leases in too short a time."""

    code = "rate_limited"


class RequestTooLarge(LeaseError):
    """The request is larger than its limit."""

    code = "too_large"


class LengthRequired(LeaseError):
    """Send a Content-Length: this server does not read bodies without one."""

    code = "length_required"


class RangeNotSatisfiable(LeaseError):
    """No byte of the file is in the range that was asked for."""

    code = "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"The file has {size} bytes, and none of them is in that range.", field="Range")
        self.headers = {"Content-Range": f"bytes */{size}"}
