"""Refusals of the egress proxy."""

from typing import Any


class CallRefused(Exception):
    """The proxy rejects the call with `status` and `code`. `details` are further fields of the error, for programs."""

    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        self.status, self.code, self.message, self.details = status, code, message, details
        super().__init__(message)
