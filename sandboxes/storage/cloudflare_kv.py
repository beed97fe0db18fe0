"""A Cloudflare KV namespace as a store, through the REST API.

It is eventually consistent: elsewhere a value may be seen a minute late. Each key takes one write a second, so it suits
what is written seldom and read often."""

import json
import time
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, BinaryIO
from urllib.parse import quote

import requests

from sandboxes.storage.base import (
    MAX_PAGE_SIZE,
    Entry,
    KeyValueStore,
    OncePerProcess,
    Page,
    RemainderReader,
    StoreError,
    StoreRefused,
)

DEFAULT_API_URL = "https://api.cloudflare.com/client/v4"
KEY_NOT_FOUND_CODE = 10009  # of a key; a namespace that is not there has another code
MAX_ATTEMPTS = 5
MIN_PAGE_SIZE = 10  # keys
RETRY_DEADLINE_SECONDS = 30.0  # seconds after which a call begins no further attempt


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is sent before the first call. `timeout` is to connect and to read, in seconds, of each attempt."""
        self.prefix = prefix
        self.max_key_bytes = 512 - len(prefix.encode())
        self._base = f"{api.rstrip('/')}/accounts/{quote(account_id)}/storage/kv/namespaces/{quote(namespace_id)}"
        self._auth, self._timeout = _BearerAuth(api_token), timeout
        self._session, self._sleep, self._clock = OncePerProcess(session), sleep, clock

    def get(self, key: str) -> bytes | None:
        return self._value("get", key)

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key, "set")
        self.check_value(len(value), "set", key)
        self._put("set", key, path, value)

    def remove(self, key: str) -> None:
        self._json("remove", key, "DELETE", self._path(key, "remove"))

    def has(self, key: str) -> bool:
        """By a listing: the key itself is the first of those that begin with it."""
        self._path(key, "has")
        names, _ = self._keys("has", key, MIN_PAGE_SIZE, "")
        return key in names[:1]

    def page(self, prefix: str = "", *, following: str = "", limit: int = MAX_PAGE_SIZE) -> Page:
        self.check_page(prefix, limit)
        # A page of theirs has at least ten keys: of one that was not shown whole, `after` is the last key shown.
        cursor, after = _parse_cursor(following) or self._raise_invalid_cursor(prefix)
        names: list[str] = []
        while not names:  # theirs may be empty and yet not the last
            names, ahead = self._keys("page", prefix, max(limit, MIN_PAGE_SIZE), cursor)
            names = [name for name in names if name > after]
            if ahead == cursor and ahead:
                raise StoreError(self.name, "page", "the cursor does not move", key=prefix)
            if len(names) > limit:
                return Page([Entry(name) for name in names[:limit]], json.dumps([cursor, names[limit - 1]]))
            cursor, after = ahead, ""
            if not cursor:
                break
        return Page([Entry(name) for name in names], json.dumps([cursor, ""]) if cursor else "")

    def upload(self, key: str, source: BinaryIO) -> None:
        path = self._path(key, "upload")
        with self.asking("upload", key):
            rest = RemainderReader(source)
            self.check_value(rest.size, "upload", key)
            value = rest.read()
        self._put("upload", key, path, value)

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        self.check_range(key, start, length)
        value = self._value("download", key)
        if value is None:
            return False
        with self.asking("download", key):
            target.write(value[start : None if length is None else start + length])
        return True

    def remove_many(self, keys: Iterable[str]) -> None:
        """`remove` for each, up to 1000 in one call; one by one what such a call did not take."""
        left = iter(keys)
        while some := [*islice(left, MAX_PAGE_SIZE)]:
            for key in some:
                self._path(key, "remove_many")
            done = self._json("remove_many", "", "POST", "/bulk/delete", json=[self.prefix + key for key in some])
            for name in done.get("unsuccessful_keys") or []:
                self.remove(name.removeprefix(self.prefix))

    def _path(self, key: str, method: str) -> str:
        name = self.prefix + self.check_key(key, method)
        if name in (".", ".."):
            raise StoreRefused(self.name, method, "a key is not . or ..", key=key)
        return f"/values/{quote(name, safe='')}"

    def _value(self, method: str, key: str) -> bytes | None:
        answer = self._call(method, key, "GET", self._path(key, method))
        if answer.status_code == 404 and KEY_NOT_FOUND_CODE in _error_codes(answer):
            return None
        self._check(method, key, answer)
        return answer.content

    def _put(self, method: str, key: str, path: str, value: bytes) -> None:
        self._json(method, key, "PUT", path, data=value, headers={"Content-Type": "application/octet-stream"})

    def _keys(self, method: str, prefix: str, limit: int, cursor: str) -> tuple[list[str], str]:
        ask = {"prefix": self.prefix + prefix, "limit": str(limit), "cursor": cursor}
        params = {name: value for name, value in ask.items() if value}
        envelope = self._envelope(method, prefix, "GET", "/keys", params=params)
        try:
            names = [found["name"].removeprefix(self.prefix) for found in envelope["result"]]
            return names, (envelope.get("result_info") or {}).get("cursor") or ""
        except (KeyError, TypeError, AttributeError):
            raise StoreError(self.name, method, "the answer is no list of keys", key=prefix) from None

    def _json(self, method: str, key: str, verb: str, path: str, **more: Any) -> dict[str, Any]:
        return self._envelope(method, key, verb, path, **more).get("result") or {}

    def _envelope(self, method: str, key: str, verb: str, path: str, **more: Any) -> dict[str, Any]:
        answer = self._call(method, key, verb, path, **more)
        self._check(method, key, answer)
        try:
            envelope = answer.json()
        except requests.JSONDecodeError:
            envelope = None
        if not isinstance(envelope, dict) or envelope.get("success") is not True:
            raise StoreError(self.name, method, "the answer is not that of the API", key=key)
        return envelope

    def _call(self, method: str, key: str, verb: str, path: str, **more: Any) -> requests.Response:
        """The answer, after as many attempts as it needs and may have: every call of this API may be repeated."""
        deadline = self._clock() + RETRY_DEADLINE_SECONDS
        headers = {"Accept-Encoding": "identity", **more.pop("headers", {})}
        options: dict[str, Any] = {"auth": self._auth, "timeout": self._timeout, "allow_redirects": False, "headers": headers}
        for attempt in range(MAX_ATTEMPTS):
            wait, why = 2.0**attempt, ""
            try:
                answer = self._session().request(verb, self._base + path, **options, **more)
            except requests.RequestException as failed:
                why = f"{type(failed).__name__}: {failed}"
            else:
                if answer.status_code != 429 and answer.status_code < 500:
                    return answer
                why = self._said(answer)
                wait = max(wait, self._retry_after(answer))
            if attempt == MAX_ATTEMPTS - 1 or self._clock() + wait > deadline:
                break
            self._sleep(wait)
        raise StoreError(self.name, method, f"given up after {attempt + 1} attempts; the last: {why}", key=key)

    def _check(self, method: str, key: str, answer: requests.Response) -> None:
        if not answer.ok or answer.is_redirect:
            raise StoreError(self.name, method, self._said(answer), key=key)

    def _said(self, answer: requests.Response) -> str:
        if answer.status_code in (401, 403):
            return f"the API refuses this token, account or namespace (HTTP status {answer.status_code})"
        if answer.status_code == 429:
            return "too many writes of one key, or calls of one account (HTTP status 429)"
        return f"HTTP status {answer.status_code}, codes {_error_codes(answer)}"

    def _retry_after(self, answer: requests.Response) -> float:
        given = answer.headers.get("Retry-After", "")
        try:
            return float(given) if given.isdecimal() else parsedate_to_datetime(given).timestamp() - self._clock()
        except ValueError:
            return 0.0

    def _raise_invalid_cursor(self, prefix: str) -> tuple[str, str]:
        raise StoreRefused(self.name, "page", "this cursor is from no page", key=prefix)


class _BearerAuth(requests.auth.AuthBase):
    """As an auth object and not as a header, which a .netrc file would take the place of."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _parse_cursor(following: str) -> tuple[str, str] | None:
    """Their cursor and the key after which to go on, from what a page has said."""
    try:
        cursor, after = json.loads(following or '["", ""]')
    except (ValueError, TypeError):
        return None
    return (cursor, after) if isinstance(cursor, str) and isinstance(after, str) else None


def _error_codes(answer: requests.Response) -> list[int]:
    """The numbers of the errors in an envelope."""
    try:
        return [int(error["code"]) for error in answer.json()["errors"]]
    except (ValueError, KeyError, TypeError):
        return []
