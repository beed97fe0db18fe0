"""Port of the forges."""

from dataclasses import dataclass
from typing import Literal, Protocol

MAX_URL_CHARS = 1000  # of a pull request
State = Literal["open", "merged", "closed"]


@dataclass(frozen=True)
class PullRequest:
    """State of a pull request. `number` is None where a forge has none."""

    number: int | None
    url: str
    state: State
    merge_commit: str = ""


class ForgeError(Exception):
    """A request to the forge failed. The message names the operation and the forge, never a token."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        self.retryable = retryable
        super().__init__(message)


class Forge(Protocol):
    """Pull requests of one repository."""

    def open_pull_request(self, *, head: str, base: str, title: str, body: str) -> PullRequest:
        """Open the pull request of a branch, or return the one that exists. Raise ForgeError."""

    def pull_request(self, *, head: str, base: str, number: int | None) -> PullRequest:
        """Return the current state. Raise ForgeError."""
