"""Requests to the server of a repository (PDS) over XRPC: create a record once, read a record, open a session.

Any answer to `createRecord` but a success is followed by a look at the record: it may exist from an earlier attempt whose
answer was lost. https://atproto.com/specs/xrpc"""

import json as json_format
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from leases.service_urls import join_url
from sandboxes import http_calls
from sandboxes.http_calls import CallFailed, HttpAnswer
from sandboxes.redaction.streams import list_secrets
from sandboxes.redaction.texts import quote_answer, redact

MAX_URI_CHARS, MAX_CID_CHARS = 1200, 128  # of the columns; at://, a DID, an NSID and a record key have 1,091 at most
TIMEOUT_SECONDS = 20.0  # of one request and its answer
CREATE_RECORD, GET_RECORD = "com.atproto.repo.createRecord", "com.atproto.repo.getRecord"
CREATE_SESSION, REFRESH_SESSION = "com.atproto.server.createSession", "com.atproto.server.refreshSession"
ERROR_NAME = re.compile(r"[A-Za-z]{1,64}")  # of the lexicon
RESET_PATTERN = re.compile(r"[0-9]{1,10}")
RETRYABLE_STATUSES = (401, 403, 408, 429)  # an operator mends a password or publishes a key
EXPIRED_CODES = ("ExpiredToken", "InvalidToken")  # answers to an access token, some with status 400


@dataclass(frozen=True)
class RecordReference:
    uri: str
    cid: str


class ServiceError(Exception):
    """A request failed. The message names the server and the method, never a credential."""

    def __init__(self, message: str, *, retryable: bool, retry_at: datetime | None = None, expired: bool = False) -> None:
        self.retryable = retryable
        self.retry_at = retry_at  # stated by the server
        self.expired = expired  # the server rejects the credential
        super().__init__(message)


@dataclass(frozen=True)
class RepositoryService:
    """Server at a base URL."""

    url: str

    def create_record(
        self, repo: str, collection: str, key: str, value: Mapping[str, Any], *, authorization: str
    ) -> RecordReference:
        """Create a record, or return the one that exists with this key and value. Raise ServiceError."""
        body = {"repo": repo, "collection": collection, "rkey": key, "record": value}
        try:
            return _read_reference(self.call(CREATE_RECORD, json=body, authorization=authorization))
        except ServiceError as error:
            if existing := self._find(repo, collection, key):
                return _require_same(existing, value, key)
            raise error

    def _find(self, repo: str, collection: str, key: str) -> Mapping[str, Any] | None:
        """Return the document of a record, or None. Anyone may read records."""
        try:
            found = self.call(GET_RECORD, params={"repo": repo, "collection": collection, "rkey": key})
        except ServiceError:
            return None
        return found if isinstance(found.get("value"), dict) else None

    def call(
        self,
        method: str,
        *,
        authorization: str = "",
        json: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the document of a 2xx answer: of a query with `params`, else of a procedure. Redirects are not followed."""
        operation = f"{method} at {urlsplit(self.url).hostname}"
        headers = {"Authorization": authorization} if authorization else {}
        try:
            answer = http_calls.send(
                "GET" if params else "POST", join_url(self.url, f"xrpc/{method}"), json=json, params=params, headers=headers,
                timeout=TIMEOUT_SECONDS,
            )  # fmt: skip
        except CallFailed as error:
            raise ServiceError(f"{operation}: {error}", retryable=True) from None
        try:
            document = json_format.loads(answer.content)
        except (ValueError, RecursionError):
            document = None
        if 200 <= answer.status < 300 and isinstance(document, dict):
            return document
        sent = [*list_secrets(authorization), *(str(value) for name, value in (json or {}).items() if name == "password")]
        raise _build_error(operation, answer, document if isinstance(document, dict) else {}, sent)


def _build_error(operation: str, answer: HttpAnswer, document: Mapping[str, Any], secrets: Sequence[str]) -> ServiceError:
    """Build the error of an answer to a request that was sent with `secrets`."""
    code, status = str(document.get("error", ""))[:64], answer.status
    name = redact(code, *secrets) if ERROR_NAME.fullmatch(code) else ""
    text = quote_answer(document["message"], *secrets) if document.get("message") else ""
    message = " ".join(part for part in (str(status), name, text) if part)
    expired = status == 401 or code in EXPIRED_CODES
    retryable = not 400 <= status < 500 or status in RETRYABLE_STATUSES or expired
    retry_at = _read_retry_at(answer)
    return ServiceError(f"{operation}: {message}", retryable=retryable, retry_at=retry_at, expired=expired)


def _read_retry_at(answer: HttpAnswer) -> datetime | None:
    """Read `RateLimit-Reset` of a 429: here the end of the window in seconds since 1970, as Bluesky's servers send it."""
    reset = answer.headers.get("RateLimit-Reset", "")
    return datetime.fromtimestamp(int(reset), UTC) if answer.status == 429 and RESET_PATTERN.fullmatch(reset) else None


def _read_reference(document: Mapping[str, Any]) -> RecordReference:
    uri, cid = document.get("uri"), document.get("cid")
    if not (isinstance(uri, str) and 0 < len(uri) <= MAX_URI_CHARS and isinstance(cid, str) and len(cid) <= MAX_CID_CHARS):
        raise ServiceError("The server's answer has no valid URI and CID of the record.", retryable=True)
    return RecordReference(uri, cid)


def _require_same(existing: Mapping[str, Any], value: Mapping[str, Any], key: str) -> RecordReference:
    if existing["value"] != value:
        raise ServiceError(f"The repository has another record with the key {key}.", retryable=False)
    return _read_reference(existing)
