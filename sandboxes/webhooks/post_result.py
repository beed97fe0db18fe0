"""Result of an HTTP POST to a webhook."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class PostResult:
    """Status of the response, or the error if there was no response. `error` is also set for a status outside 200 to 299."""

    status: int | None = None
    error: str = ""  # "" on success
    retry_after: timedelta = timedelta(0)
