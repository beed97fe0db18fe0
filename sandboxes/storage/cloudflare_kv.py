"""Key-value store on a Cloudflare KV namespace, through its REST API.

Eventually consistent: other readers may see a value up to a minute late. A key accepts one write per second, so the store suits
values that are written rarely and read often."""

import json
import time
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, BinaryIO
from urllib.parse import quote

import requests

from sandboxes.answer_limits import limit_session
from sandboxes.redaction.texts import quote_answer
from sandboxes.storage.base import (
    MAX_PAGE_SIZE,
    Entry,
    KeyValueStore,
    ListingPage,
    OncePerProcess,
    RemainderReader,
    StoreError,
    StoreRefused,
    guard_answers,
)

DEFAULT_API_URL = "https://api.cloudflare.com/client/v4"
KEY_NOT_FOUND_CODE = 10009  # a missing namespace has another code
MAX_ATTEMPTS = 5
MAX_ANSWER_BYTES = 26 << 20  # the largest value, and its headers
MIN_PAGE_SIZE = 10  # smallest number of keys per listing that the API accepts
RETRY_DEADLINE_SECONDS = 30.0  # after the start of a call, no further attempt begins


@guard_answers
class CloudflareKVStore(KeyValueStore):
    name = "cloudflare_kv"
    max_value_bytes = 25 << 20

    def __init__(
        self,
        namespace_id: str,
        *,
        account_id: str,
        api_token: str,
        api: str = DEFAULT_API_URL,
        prefix: str = "",
        timeout: tuple[float, float] = (5, 60),
        session: Callable[[], requests.Session] = requests.Session,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a client; no request is sent. `timeout` is that of each connection and of each answer, in seconds.

        See answer_limits for a long answer."""
        self.prefix = prefix
        self.max_key_bytes = 512 - len(prefix.encode())
        self._base = f"{api.rstrip('/')}/accounts/{quote(account_id)}/storage/kv/namespaces/{quote(namespace_id)}"
        self._auth, self._timeout = _BearerAuth(api_token), timeout
        self._session = OncePerProcess(lambda: limit_session(session(), max_bytes=MAX_ANSWER_BYTES))
        self._sleep, self._clock = sleep, clock

    def get(self, key: str) -> bytes | None:
        return self._fetch("get", key)

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key, "set")
        self.check_value(len(value), "set", key)
        self._put("set", key, path, value)

    def remove(self, key: str) -> None:
        self._json("remove", key, "DELETE", self._path(key, "remove"))

    def has(self, key: str) -> bool:
        """Return whether the key exists, by a listing: a key sorts before all longer keys with the same prefix."""
        self._path(key, "has")
        names, _ = self._keys("has", key, MIN_PAGE_SIZE, "")
        return key in names[:1]

    def page(self, prefix: str = "", *, cursor: str = "", limit: int = MAX_PAGE_SIZE) -> ListingPage:
        self.check_page(prefix, limit)
        # The API's pages have at least ten keys. If a page was returned in part, `after` is the last key returned.
        api_cursor, after = _parse_cursor(cursor) or self._raise_invalid_cursor(prefix)
        names: list[str] = []
        while not names:  # a page of the API may be empty without being the last
            names, next_api_cursor = self._keys("page", prefix, max(limit, MIN_PAGE_SIZE), api_cursor)
            names = [name for name in names if name > after]
            if next_api_cursor == api_cursor and next_api_cursor:
                raise StoreError(self.name, "page", "the API returned the same cursor again", key=prefix)
            if len(names) > limit:
                return ListingPage([Entry(name) for name in names[:limit]], json.dumps([api_cursor, names[limit - 1]]))
            api_cursor, after = next_api_cursor, ""
            if not api_cursor:
                break
        return ListingPage([Entry(name) for name in names], json.dumps([api_cursor, ""]) if api_cursor else "")

    def upload(self, key: str, source: BinaryIO) -> None:
        path = self._path(key, "upload")
        with self.translate_errors("upload", key):
            rest = RemainderReader(source)
            self.check_value(rest.size, "upload", key)
            value = rest.read()
        self._put("upload", key, path, value)

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        self.check_range(key, start, length)
        value = self._fetch("download", key)
        if value is None:
            return False
        with self.translate_errors("download", key):
            target.write(value[start : None if length is None else start + length])
        return True

    def remove_many(self, keys: Iterable[str]) -> None:
        """Remove keys in batches of 1000; keys that a batch reports as failed are removed one by one."""
        remaining = iter(keys)
        while batch := [*islice(remaining, MAX_PAGE_SIZE)]:
            for key in batch:
                self._path(key, "remove_many")
            result = self._json("remove_many", "", "POST", "/bulk/delete", json=[self.prefix + key for key in batch])
            for name in result.get("unsuccessful_keys") or []:
                self.remove(name.removeprefix(self.prefix))

    def _path(self, key: str, method: str) -> str:
        name = self.prefix + self.check_key(key, method)
        if name in (".", ".."):
            raise StoreRefused(self.name, method, 'a key must not be "." or ".."', key=key)
        return f"/values/{quote(name, safe='')}"

    def _fetch(self, method: str, key: str) -> bytes | None:
        response = self._call(method, key, "GET", self._path(key, method))
        if response.status_code == 404 and KEY_NOT_FOUND_CODE in _error_codes(response):
            return None
        self._check(method, key, response)
        return response.content

    def _put(self, method: str, key: str, path: str, value: bytes) -> None:
        self._json(method, key, "PUT", path, data=value, headers={"Content-Type": "application/octet-stream"})

    def _keys(self, method: str, prefix: str, limit: int, cursor: str) -> tuple[list[str], str]:
        query = {"prefix": self.prefix + prefix, "limit": str(limit), "cursor": cursor}
        params = {name: value for name, value in query.items() if value}
        envelope = self._envelope(method, prefix, "GET", "/keys", params=params)
        try:
            names = [entry["name"].removeprefix(self.prefix) for entry in envelope["result"]]
            return names, (envelope.get("result_info") or {}).get("cursor") or ""
        except (KeyError, TypeError, AttributeError):
            raise StoreError(self.name, method, "the response is not a list of keys", key=prefix) from None

    def _json(self, method: str, key: str, verb: str, path: str, **options: Any) -> dict[str, Any]:
        result = self._envelope(method, key, verb, path, **options).get("result")
        return result if isinstance(result, dict) else {}

    def _envelope(self, method: str, key: str, verb: str, path: str, **options: Any) -> dict[str, Any]:
        response = self._call(method, key, verb, path, **options)
        self._check(method, key, response)
        try:
            envelope = response.json()
        except (ValueError, RecursionError):
            envelope = None
        if not isinstance(envelope, dict) or envelope.get("success") is not True:
            raise StoreError(self.name, method, "the response is not a result of the API", key=key)
        return envelope

    def _call(self, method: str, key: str, verb: str, path: str, **more: Any) -> requests.Response:
        """Send a request, retrying on 429, 5xx and connection errors: every call of this API may be repeated."""
        deadline = self._clock() + RETRY_DEADLINE_SECONDS
        headers = {"Accept-Encoding": "identity", **more.pop("headers", {})}
        options: dict[str, Any] = {"auth": self._auth, "timeout": self._timeout, "allow_redirects": False, "headers": headers}
        for attempt in range(MAX_ATTEMPTS):
            wait, reason = 2.0**attempt, ""
            try:
                response = self._session().request(verb, self._base + path, **options, **more)
            except requests.RequestException as error:
                reason = f"{type(error).__name__}: {quote_answer(error)}"
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return response
                reason = self._describe_failure(response)
                wait = max(wait, self._retry_after(response))
            if attempt == MAX_ATTEMPTS - 1 or self._clock() + wait > deadline:
                break
            self._sleep(wait)
        raise StoreError(self.name, method, f"failed after {attempt + 1} attempts; the last: {reason}", key=key)

    def _check(self, method: str, key: str, response: requests.Response) -> None:
        if not response.ok or response.is_redirect:
            raise StoreError(self.name, method, self._describe_failure(response), key=key)

    def _describe_failure(self, response: requests.Response) -> str:
        if response.status_code in (401, 403):
            return f"the API rejects this token, account or namespace (HTTP status {response.status_code})"
        if response.status_code == 429:
            return "rate limit exceeded: writes to one key, or calls of the account (HTTP status 429)"
        return f"HTTP status {response.status_code}, codes {_error_codes(response)}"

    def _retry_after(self, response: requests.Response) -> float:
        header = response.headers.get("Retry-After", "")
        try:
            if header.isdecimal():
                return float(header)
            answered_at = parsedate_to_datetime(response.headers.get("Date", ""))  # by the clock of the API, like the header
            return (parsedate_to_datetime(header) - answered_at).total_seconds()
        except (ValueError, TypeError):  # TypeError: one of them has no time zone
            return 0.0

    def _raise_invalid_cursor(self, prefix: str) -> tuple[str, str]:
        raise StoreRefused(self.name, "page", "invalid cursor", key=prefix)


class _BearerAuth(requests.auth.AuthBase):
    """Bearer token as a requests auth object: a .netrc file would override a plain header."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _parse_cursor(cursor: str) -> tuple[str, str] | None:
    """Split a cursor into the API's cursor and the key to continue after. Return None if it is invalid."""
    try:
        cursor, after = json.loads(cursor or '["", ""]')
    except (ValueError, TypeError):
        return None
    return (cursor, after) if isinstance(cursor, str) and isinstance(after, str) else None


def _error_codes(response: requests.Response) -> list[int]:
    """Return the error codes of a response envelope."""
    try:
        return [int(error["code"]) for error in response.json()["errors"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return []
