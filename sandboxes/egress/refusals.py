"""Refusals of the egress proxy."""


class CallRefused(Exception):
    """The proxy rejects the call with `status` and `code`."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message
        super().__init__(message)
