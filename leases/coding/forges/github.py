"""Forge with GitHub's REST API, as GitHub, GitHub Enterprise, Gitea and Forgejo have it.

Gitea's list of pull requests ignores the parameter `head`, and answers 409 in place of GitHub's 422 for a pull request that
exists. Lists are therefore filtered here, and any refusal is followed by a second look."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from leases.coding.forges.base import MAX_URL_CHARS, ForgeError, PullRequest, State
from leases.service_urls import join_url
from sandboxes import http_calls
from sandboxes.http_calls import CallFailed
from sandboxes.redaction.texts import quote_answer
from sandboxes.unreadable_answers import guard_reads

TIMEOUT_SECONDS = 30.0  # of one request and its answer
LIST_SECONDS = 100.0  # of all pages of a list: two lists and two requests are within pull_requests.POLL_CLAIM
PAGE_SIZE = 50
MAX_PAGES = 20  # newest pull requests first
RATE_LIMITED = (403, 429)  # GitHub's secondary limit answers 403
EXISTS = (409, 422)


def _build_unreadable(operation: str, error: Exception) -> ForgeError:
    text = f"{operation}: The answer is not as expected: {type(error).__name__}: {quote_answer(error)}"
    return ForgeError(text, retryable=True)


@dataclass(frozen=True)
class GitHubForge:
    """Pull requests of `project`, which is owner/name, within one repository."""

    api_url: str
    project: str
    token: str = field(repr=False)

    def open_pull_request(self, *, head: str, base: str, title: str, body: str) -> PullRequest:
        """Open the pull request, or return the one that exists, also if the answer to an earlier request was lost."""
        if existing := self._find(head, base, "open"):
            return existing
        try:
            created = self._request("POST", "pulls", json={"title": title, "head": head, "base": base, "body": body})
        except ForgeError as error:
            if existing := self._find(head, base, "all"):  # opened by another request, or merged since
                return existing
            raise error
        return _read_pull_request(created)

    def pull_request(self, *, head: str, base: str, number: int | None) -> PullRequest:
        if number is not None:
            return _read_pull_request(self._request("GET", f"pulls/{number}"))
        if found := self._find(head, base, "all"):
            return found
        raise ForgeError(f"{self.project}: there is no pull request of {head}.", retryable=True)

    def _find(self, head: str, base: str, state: str) -> PullRequest | None:
        for row in self._list(head, base, state):
            same_repository = (row["head"].get("repo") or {}).get("full_name", self.project).lower() == self.project.lower()
            if row["head"]["ref"] == head and row["base"]["ref"] == base and same_repository:
                return _read_pull_request(row)
        return None

    def _list(self, head: str, base: str, state: str) -> Iterator[dict[str, Any]]:
        owner, ends_at = self.project.partition("/")[0], time.monotonic() + LIST_SECONDS
        for page in range(1, MAX_PAGES + 1):
            rows = self._request(
                "GET", "pulls", timeout=min(TIMEOUT_SECONDS, ends_at - time.monotonic()),
                params={
                    "state": state, "head": f"{owner}:{head}", "base": base, "sort": "created", "direction": "desc",
                    "per_page": PAGE_SIZE, "limit": PAGE_SIZE, "page": page,
                },
            )  # fmt: skip
            if not isinstance(rows, list):
                raise ValueError("The answer is not a list.")
            yield from rows
            if len(rows) < PAGE_SIZE:
                return

    def _request(self, method: str, path: str, *, timeout: float = TIMEOUT_SECONDS, **options: Any) -> Any:
        """Return the document of a 2xx answer. Redirects are not followed: the token belongs to one host."""
        operation = f"{method} {path.split('/')[0]} of {self.project} at {urlsplit(self.api_url).hostname}"
        headers = {"Accept": "application/vnd.github+json", "Authorization": f"Bearer {self.token}"}
        try:
            answer = http_calls.send(
                method, join_url(self.api_url, f"repos/{self.project}/{path}"), headers=headers if self.token else {},
                timeout=timeout, **options,
            )  # fmt: skip
            document = json.loads(answer.content)
        except (CallFailed, ValueError, RecursionError) as error:
            raise ForgeError(f"{operation}: {_describe(error)}", retryable=True) from None
        if 200 <= answer.status < 300:
            return document
        message = str(document.get("message", "")) if isinstance(document, dict) else ""
        retryable = answer.status >= 500 or answer.status in RATE_LIMITED
        raise ForgeError(f"{operation}: {answer.status} {quote_answer(message, self.token)}", retryable=retryable)


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CallFailed) else "The answer is not JSON."


guard_reads(GitHubForge, ("open_pull_request", "pull_request"), known=(ForgeError,), build_error=_build_unreadable)


def _read_pull_request(row: dict[str, Any]) -> PullRequest:
    """Raise an exception of any kind for a row of another form."""
    number, url = row["number"], row["html_url"]
    if type(number) is not int or not 0 < number < 1 << 31 or not isinstance(url, str) or len(url) > MAX_URL_CHARS:
        raise ValueError("a pull request without a number or a URL")
    merged = bool(row.get("merged") or row.get("merged_at"))
    state: State = "merged" if merged else "closed" if row["state"] == "closed" else "open"
    return PullRequest(number, url, state, str(row.get("merge_commit_sha") or "")[:64] if merged else "")
