"""Result of an HTTP POST to a webhook."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class PostResult:
    """Status of the response, and the error of a failed POST."""

    status: int | None = None  # None without a response
    error: str = ""  # "" after a status from 200 to 299
    retry_after: timedelta = timedelta(0)
