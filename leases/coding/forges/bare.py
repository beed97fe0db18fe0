"""Forge without pull requests: a branch of a bare repository, merged once the base branch contains its commit."""

from collections.abc import Callable
from dataclasses import dataclass

from leases.coding.forges.base import ForgeError, PullRequest
from leases.coding.git import GitError

HEAD, BASE = "refs/leasehold/forge/head", "refs/leasehold/forge/base"


@dataclass(frozen=True)
class BareForge:
    """`git` runs Git in a repository of the caller's, which may be empty."""

    repository: str
    git: Callable[..., str]

    def open_pull_request(self, *, head: str, base: str, title: str, body: str) -> PullRequest:
        return self.pull_request(head=head, base=base, number=None)

    def pull_request(self, *, head: str, base: str, number: int | None) -> PullRequest:
        """Compare the branches. A merge that rewrites the commits (squash, rebase) is not recognised."""
        try:
            refs = [f"+refs/heads/{name}:{ref}" for name, ref in ((head, HEAD), (base, BASE))]
            self.git("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--", self.repository, *refs)
            ahead = self.git("rev-list", "--count", f"{BASE}..{HEAD}")
            tip = self.git("rev-parse", BASE)
        except GitError as error:
            raise ForgeError(f"{self.repository}: branch {head} cannot be compared: {error}", retryable=True) from None
        state = "merged" if ahead == "0" else "open"
        url = f"{self.repository}#{head}"
        return PullRequest(None, url, state, tip if state == "merged" else "")  # type: ignore[arg-type]
